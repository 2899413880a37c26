"""An adapter as PEFT reads it: written, opened again as its consumer does, and compared with the tuned model."""

import gc
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.errors import ModelError
from safetrain.core.formatting import size_text
from safetrain.core.memory.budget import host_room_bytes, read_memory
from safetrain.core.memory.terms import FLOAT32
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.adapter_files import (
    adapter_dropout,
    adapter_scale,
    fingerprint,
    read_taught,
    require_base,
)
from safetrain.core.records.fusing import Likeness, describe, kept_share, refusal
from safetrain.core.records.peft_config import (
    CONFIG,
    WEIGHTS,
    PeftShape,
    config_of,
    read_peft_config,
    require_same_names,
    targets_of,
)
from safetrain.core.records.peft_report import OWN_READING, REPORT, PeftReport
from safetrain.core.storage.files import full_disk_named, require_new, write_folder, write_record
from safetrain.engine.adapter_folder import adapter_arrays
from safetrain.engine.arrays import save_arrays, save_shards
from safetrain.engine.backend import set_limits
from safetrain.engine.bit_plans import float_plan
from safetrain.engine.effect import likeness, measured_rows
from safetrain.engine.exchange.peft_arrays import LayerPlace, places_of, require_pairs, to_peft
from safetrain.engine.exchange.peft_asking import ask_peft, missing_packages
from safetrain.engine.exchange.peft_import import put_on
from safetrain.engine.folding import Folds, folded, quantization_in
from safetrain.engine.model import BaseModel
from safetrain.engine.tuned import ExportJob, measure_tuned
from safetrain.engine.upstream.loading import errors_told, load
from safetrain.engine.upstream.saving import write_config

MAY_LOSE = 0.02  # share of what was learnt, of which rounding takes far less
MOST_OPERATIONS = 2**46  # by PyTorch, on the CPU: some minutes
ADAPTERS_COPIES = 2  # of its bytes, that PyTorch has beside the base


@dataclass(frozen=True)
class PeftExportJob(ExportJob):
    """What to write for PEFT."""

    adapter: Path
    base_name: str  # of the float model that PEFT puts it on


def export_peft(job: PeftExportJob, say: Callable[[str], None]) -> PeftReport:
    """Write the adapter to ``job.out`` as PEFT reads it, whole or not at all, with its report.

    Raises ConfigError where the target is there, ModelError for what PEFT cannot hold, where adapter and base do not
    belong together, or where the written adapter is not the tuned model; DiskFullError.
    """
    parent = require_new(job.out)
    files = read_model_files(job.base)
    require_base(job.adapter, job.base, files.fingerprint)
    require_same_names(job.base)
    export = _PeftExport(job, files, say)
    export.measure_both()
    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        made: list[PeftReport] = []
        write_folder(job.out, lambda folder: made.append(export.write(folder)))
    return made[0]


def write_peft(
    arrays: Mapping[str, mx.array], places: Mapping[str, LayerPlace], shape: PeftShape, folder: Path
) -> None:
    """The adapter's arrays and configuration as PEFT reads them, into ``folder``; raises ModelError, OSError."""
    adapted = {name.rpartition(".")[0] for name in arrays}
    linear = {path: place.block for path, place in places.items()}
    targets = targets_of({path: linear[path] for path in adapted}, linear, depth=1 + max(linear.values()))
    text = json.dumps(config_of(shape, targets), indent=2, ensure_ascii=False)
    (folder / CONFIG).write_text(f"{text}\n", encoding="utf-8")
    save_arrays(folder / WEIGHTS, to_peft(arrays), "pt")


def shape_for_peft(arrays: Mapping[str, mx.array], adapter: Path, base_name: str) -> PeftShape:
    """Of the adapter in ``adapter``, whose arrays these are."""
    rank = max(value.shape[1] for name, value in arrays.items() if name.endswith(".lora_a"))
    return PeftShape(
        rank=rank,
        alpha=adapter_scale(adapter) * rank,  # divided by the rank again: the scale, but for the last bit of a double
        dora=any(name.endswith(".m") for name in arrays),
        dropout=adapter_dropout(adapter),
        base_name=base_name,
    )


class _PeftExport:
    def __init__(self, job: PeftExportJob, files: ModelFiles, say: Callable[[str], None]) -> None:
        self._job, self._files, self._say = job, files, say
        self._arrays = adapter_arrays(job.adapter)
        require_pairs(self._arrays, job.adapter)

    def measure_both(self) -> None:
        """Tuned model and base, on the rows that all are compared on; raises ModelError where they are the same."""
        job = self._job
        set_limits(job.mlx_limit_bytes)
        self._tuned = measure_tuned(job, self._files, _rows_for)
        self._base = self._tuned.measure_base(self._files, self._say)
        size = self._files.static_bytes + sum(value.nbytes for value in self._arrays.values())
        self._say(describe("tuned: base and adapter", size, 1.0, self._tuned.own, len(self._tuned.rows)))

    def write(self, folder: Path) -> PeftReport:
        """Into a folder that is not yet in its place; raises ModelError where it is not what was to be written."""
        job = self._job
        model, tuned = job.open(job.base), self._tuned
        write_peft(self._arrays, places_of(model), shape_for_peft(self._arrays, job.adapter, job.base_name), folder)
        self._require_read_back(model, folder)
        refused = self._why_not_peft()
        if refused:
            self._say(refused)
            found, opened_by, largest = tuned.likeness_of(model), OWN_READING, None
        else:
            del model
            gc.collect()
            with tempfile.TemporaryDirectory(dir=job.out.parent, prefix=".peft-") as scratch:
                answered = ask_peft(self._float_base(Path(scratch)), folder, tuned.rows, tuned.reference)
            found = likeness(answered.seen, tuned.reference.seen)
            opened_by, largest = answered.opened_by, answered.largest_difference
        report = self._report(found, opened_by, largest)
        write_record(folder / REPORT, report)
        return report

    def _require_read_back(self, model: BaseModel, folder: Path) -> None:
        """Raise ModelError unless an import gives the adapter's own numbers, to the last bit."""
        imported = put_on(model, folder, read_peft_config(folder))
        same = imported.weights.keys() == self._arrays.keys() and all(
            mx.array_equal(value, imported.weights[name]).item() for name, value in self._arrays.items()
        )
        scale = adapter_scale(self._job.adapter)
        if not same or np.float32(scale) != np.float32(imported.lora.scale):
            raise ModelError(
                "What was written for PEFT is not the adapter when it is read again.",
                where=str(self._job.adapter),
                do="safetrain fuse OUT makes one model of base and adapter",
            )

    def _why_not_peft(self) -> str:
        """Why PEFT itself is not asked; empty where it is."""
        if missing := missing_packages():
            return (
                f"PEFT itself was not asked: {' and '.join(missing)} are not installed here "
                "(pip install --editable '.[peft]'); its files were read by safetrain import instead"
            )
        size, room = FLOAT32 * self._files.parameters, host_room_bytes(read_memory())
        size += ADAPTERS_COPIES * sum(value.nbytes for value in self._arrays.values())
        if size > room:
            return f"PEFT itself was not asked: it needs {size_text(size)} of memory, {size_text(room)} are available"
        free = shutil.disk_usage(self._job.out.parent).free
        if self._files.quantization_bits is not None and free < size:
            return f"PEFT itself was not asked: a float copy of the base takes {size_text(size)} on the disk"
        return ""

    def _float_base(self, scratch: Path) -> Path:
        """A folder that transformers opens: the base, or where it is quantized a dequantized copy in ``scratch``."""
        base = self._job.base
        if self._files.quantization_bits is None:
            return base
        with errors_told("open the model", str(base)):
            module, config = load(base)
        nothing: Folds = Folds({}, {})
        plan = float_plan(module, nothing)
        write_config(module, quantization_in(config, module, plan), scratch)
        save_shards(scratch, folded(module, nothing, plan))
        return scratch

    def _report(self, exported: Likeness, opened_by: str, largest: float | None) -> PeftReport:
        job, files, taught = self._job, self._files, read_taught(self._job.adapter)
        rows, seen = self._tuned.rows, self._tuned.reference.seen
        kept = kept_share(self._base, self._tuned.own, exported)
        why = refusal(kept, exported, MAY_LOSE)
        size = sum(value.nbytes for value in self._arrays.values())
        self._say(describe("exported, opened again", size, kept, exported, len(rows), why or "holds"))
        if why:
            raise ModelError(
                f"The exported adapter is not the tuned model: it {why}.",
                where=str(job.adapter),
                got=f"by {opened_by}: {exported.divergence:.1e} nats per label from the tuned model",
                do="safetrain fuse OUT makes one model of base and adapter, and report this model's architecture",
            )
        return PeftReport(
            str(job.base), files.fingerprint, files.quantization_bits, job.base_name, fingerprint(job.adapter),
            opened_by, len(rows), len(seen.keys), self._base, self._tuned.own, exported, kept,
            largest, taught.stop_ids if taught else (),
        )  # fmt: skip


def _rows_for(rows: TokenRows, files: ModelFiles, model: BaseModel) -> TokenRows:
    """As many rows, evenly spread, as memory and time allow."""
    rows = measured_rows(rows, files, model)
    each = 2 * files.parameters * int(rows.lengths.sum(dtype=np.int64)) / len(rows)
    count = max(1, min(len(rows), int(MOST_OPERATIONS / each)))
    return rows.take(np.linspace(0, len(rows) - 1, count).round().astype(np.int64))
