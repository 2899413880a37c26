"""The tuned model, measured once: what a fused or an exported model is compared with."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.formatting import counted
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.fusing import HEADER, Likeness, describe, require_effect
from safetrain.engine.adapter_folder import apply_adapter
from safetrain.engine.effect import Reference, likeness, look, measured_rows, refer_to
from safetrain.engine.model import BaseModel, dequantize_to_answer, open_base

MOST_OPERATIONS, LEAST_ROWS = 2**40, 16  # of one model on the sample


@dataclass(frozen=True)
class ExportJob:
    """What was trained, where it goes, and what both are measured on."""

    base: Path
    adapter: Path | None  # None: the base is the tuned model already
    out: Path
    rows: TokenRows  # to measure on: those of the validation
    most_tokens: int  # that are computed together
    mlx_limit_bytes: int  # that the training kept to
    compute_dtype: str | None = field(default=None, kw_only=True)  # of a GPU

    def open(self, folder: Path) -> BaseModel:
        """Open a model for questions, dequantized if memory allows."""
        dequantize = dequantize_to_answer(read_model_files(folder))
        return open_base(folder, dequantize=dequantize, compute_dtype=self.compute_dtype)


@dataclass(frozen=True, eq=False)
class TunedModel:
    """The tuned model on the rows that others are compared with it on; of itself only its head stays in memory."""

    job: ExportJob
    rows: TokenRows
    reference: Reference
    own: Likeness  # to itself

    def likeness_of(self, model: BaseModel) -> Likeness:
        """Compare another model with the tuned one."""
        return likeness(look(model, self.rows, self.job.most_tokens, self.reference), self.reference.seen)

    def describe_rows(self) -> str:
        """One sentence: what is measured, and on which sample."""
        labels, of = counted(len(self.reference.seen.keys), "label"), len(self.job.rows)
        some = f"; evenly spread among {of:,}" if len(self.rows) < of else ""
        rows = counted(len(self.rows), "validation row")
        return f"Loss and predictions are compared with the tuned model's on {rows} ({labels}{some})."

    def measure_base(self, files: ModelFiles, say: Callable[[str], None]) -> Likeness:
        """Open the base, and begin a table with it; raises ModelError where the adapter changes nothing."""
        base = self.likeness_of(self.job.open(self.job.base))
        gc.collect()
        require_effect(base, str(self.job.adapter))
        say(self.describe_rows())
        say(HEADER)
        say(describe("base", files.static_bytes, 0.0, base, len(self.rows)))
        return base


def sample_of(rows: TokenRows, files: ModelFiles, model: BaseModel) -> TokenRows:
    """As many rows, evenly spread, as memory and a few seconds on a CPU allow, and ``LEAST_ROWS`` at least."""
    rows = measured_rows(rows, files, model)
    operations = 2 * files.parameters * int(rows.lengths.sum(dtype=np.int64))
    count = min(len(rows), max(LEAST_ROWS, len(rows) * MOST_OPERATIONS // operations))
    return rows.take(np.linspace(0, len(rows) - 1, count).round().astype(np.int64))


def measure_tuned(job: ExportJob, files: ModelFiles) -> TunedModel:
    """Look at the tuned model, which is gone from memory afterwards."""
    model = job.open(job.base)
    rows = sample_of(job.rows, files, model)
    if job.adapter is not None:
        apply_adapter(model, job.adapter)
    reference = refer_to(model, rows, job.most_tokens)
    del model
    gc.collect()
    return TunedModel(job, rows, reference, likeness(reference.seen, reference.seen))
