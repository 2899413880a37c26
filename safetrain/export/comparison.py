"""Compares a fused or an exported model with the tuned model and its base, and judges what it keeps of the training."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.errors import MachineError, ModelError
from safetrain.core.formatting import counted, size_text
from safetrain.core.memory.system import host_room_bytes, read_memory
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.adapter_files import fingerprint, read_prompt_format, require_base
from safetrain.core.records.evaluation import Z95, ExportReport, Likeness
from safetrain.engine.backend import set_limits
from safetrain.engine.model import BaseModel, dequantize_to_answer, open_base
from safetrain.engine.tuned import DISCARD, NO_CHANGE, NO_EFFECT, TunedModel, sample_of
from safetrain.engine.weight_files import adapter_arrays, apply_adapter, bytes_of

HEADER = f"{'':<28}{'size':>10}{'keeps':>9}{'KL':>9}{'loss':>9}{'same answers':>15}"
MOST_TOKENS = 2**15  # of the rows compared
MOST_OPERATIONS, LEAST_ROWS = 2**40, 16  # of one model on an export's rows: a few seconds on a CPU


@dataclass(frozen=True)
class ExportJob:
    """Base and adapter, the output path, the rows to measure models on, and how much improvement an export may lose."""

    base: Path
    adapter: Path
    out: Path
    rows: TokenRows  # validation rows to measure on
    most_tokens: int  # that are computed together
    mlx_limit_bytes: int  # memory limit of the training
    may_lose: float = 0.02  # share of the improvement
    compute_dtype: str | None = None  # of a GPU
    fit: TokenRows | None = None  # training rows to refit a quantized model on

    def open(self, folder: Path) -> BaseModel:
        dequantize = dequantize_to_answer(read_model_files(folder))
        return open_base(folder, dequantize=dequantize, compute_dtype=self.compute_dtype)


class ExportComparison:
    """Compares written models with the tuned model and its base; shows each in a line."""

    def __init__(self, job: ExportJob, files: ModelFiles, say: Callable[[str], None]) -> None:
        """Measure and free base and tuned model. Raises ModelError if the adapter has no effect or another base."""
        require_base(job.adapter, job.base, files.fingerprint)
        set_limits(job.mlx_limit_bytes)
        self._job, self._files, self._say = job, files, say
        model = job.open(job.base)
        most_tokens = min(MOST_TOKENS, MOST_OPERATIONS // (2 * files.parameters))
        rows = sample_of(job.rows, files, model, most_tokens, LEAST_ROWS)
        apply_adapter(model, job.adapter)
        self._tuned = TunedModel.of(model, rows, job.most_tokens)
        del model
        gc.collect()
        self._base = self._tuned.likeness_of(job.open(job.base))
        gc.collect()
        if self._base.divergence < NO_CHANGE:
            raise ModelError(NO_EFFECT, where=job.adapter, do=DISCARD)
        some = f"; evenly spread among {len(job.rows):,} rows" if len(rows) < len(job.rows) else ""
        count = f"{counted(len(rows), 'validation row')} ({counted(len(self._tuned.keys), 'label')}{some})"
        say(f"Loss and predictions are compared with the tuned model's on {count}.")
        say(HEADER)
        say(describe_likeness("base", files.static_bytes, 0.0, self._base, len(rows)))
        size = files.static_bytes + bytes_of(adapter_arrays(job.adapter))
        say(describe_likeness("base and adapter", size, 1.0, self._tuned.own, len(rows)))

    def of(self, model: BaseModel, name: str, kind: str, size_bytes: int) -> tuple[ExportReport, ModelError | None]:
        """Compare a written model; returns its report, and the error if it loses too much."""
        job, tuned, rows, refused = self._job, self._tuned, self._tuned.rows, None
        likeness = tuned.likeness_of(model)
        share = kept_share(self._base, tuned.own, likeness)
        if why := refusal(share, likeness, job.may_lose):
            refused = ModelError(
                f"The export does not keep the improvement: in {kind}, it {why}.",
                where=job.out,
                expected=f"at least {100 * (1 - job.may_lose):g} % of the improvement kept",
                got=f"{100 * share:.1f} %",
                do="choose more bits (--type bf16 or f16; fuse without --bits), or accept the loss: --may-lose 100",
            )
        self._say(describe_likeness(name, size_bytes, share, likeness, len(rows), why or "passes"))
        form, base = read_prompt_format(job.adapter), str(job.base)
        return ExportReport(
            kind, size_bytes, base, self._files.fingerprint, fingerprint(job.adapter), len(rows), len(tuned.keys),
            self._base, tuned.own, likeness, share, form.stop_ids if form else (),
        ), refused  # fmt: skip


def require_memory(size: int, what: str, do: str) -> None:
    """Raise MachineError if ``what``, of ``size`` bytes, does not fit into memory."""
    room = host_room_bytes(read_memory())
    if size > room:
        raise MachineError(
            f"There is too little memory to measure {what}; nothing was written.",
            expected=f"{size_text(size)} of memory",
            got=f"{size_text(room)} available",
            do=do,
        )


def kept_share(base: Likeness, tuned: Likeness, other: Likeness) -> float:
    """The share kept of the loss improvement or of the KL divergence from base to tuned model, whichever is smaller.

    Rounding may lower the loss by chance, even if nothing of the training is left.
    """
    gained, way = base.loss - tuned.loss, 1 - other.divergence / base.divergence
    return min(way, (base.loss - other.loss) / gained) if gained > 0 else way


def refusal(share: float, other: Likeness, may_lose: float) -> str:
    """Say why a fused or exported model fails; empty if it passes. ``may_lose`` 1 accepts any loss that is a number.

    It also fails if it loses more right answers than the 95 % interval of chance allows.
    """
    if not math.isfinite(other.loss):
        return "has a loss that is not a number"
    if may_lose >= 1:
        return ""
    if share < 1 - may_lose:
        return f"loses more than {100 * may_lose:g} % of the improvement"
    fall = other.lost_answers - other.won_answers
    chance = Z95 * math.sqrt(other.lost_answers + other.won_answers)
    return f"answers {fall} fewer rows correctly" if fall > chance else ""


def describe_likeness(name: str, size_bytes: int, share: float, other: Likeness, rows: int, verdict: str = "") -> str:
    """Make one line of the table below ``HEADER``."""
    same = f"{round(other.same_answers * rows)} of {rows}"
    kept = f"{f'{100 * share:.1f} %':>9}{other.divergence:>9.4f}{other.loss:>9.4f}{same:>15}"
    return f"{name:<28}{size_text(size_bytes):>10}{kept}  {verdict}".rstrip()
