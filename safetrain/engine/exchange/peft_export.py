"""An adapter as PEFT reads it: written, read again to the last bit, and compared with the tuned model."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from safetrain.core.errors import ModelError
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.adapter_files import (
    adapter_dropout,
    adapter_scale,
    fingerprint,
    read_prompt_format,
    require_base,
)
from safetrain.core.records.exporting import REPORT, PeftReport
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
from safetrain.core.storage.files import full_disk_named, require_new, write_folder, write_record
from safetrain.engine.adapter_folder import adapter_arrays
from safetrain.engine.arrays import save_arrays
from safetrain.engine.backend import set_limits
from safetrain.engine.exchange.peft_arrays import LayerPlace, places_of, require_pairs, to_peft
from safetrain.engine.exchange.peft_import import put_on
from safetrain.engine.model import BaseModel
from safetrain.engine.tuned import ExportJob, TunedModel, measure_tuned

MAY_LOSE = 0.02  # share of what was learnt, of which rounding takes far less


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
    arrays = adapter_arrays(job.adapter)
    require_pairs(arrays, job.adapter)
    set_limits(job.mlx_limit_bytes)
    tuned = measure_tuned(job, files)
    base, size = job.measure_base(tuned, files, say), sum(value.nbytes for value in arrays.values())
    say(describe("tuned: base and adapter", files.static_bytes + size, 1.0, tuned.own, len(tuned.rows)))
    reports: list[PeftReport] = []

    def write(folder: Path) -> None:
        model = job.open(job.base)
        write_peft(arrays, places_of(model), shape_for_peft(arrays, job.adapter, job.base_name), folder)
        _require_read_back(model, folder, arrays, job.adapter)
        likeness = tuned.likeness_of(model)
        share = kept_share(base, tuned.own, likeness)
        why = refusal(share, likeness, MAY_LOSE)
        say(describe("exported, read again", size, share, likeness, len(tuned.rows), why or "holds"))
        if why:
            raise _not_the_adapter(job.adapter, why)
        reports.append(_report(job, files, tuned, base, likeness, share))
        write_record(folder / REPORT, reports[0])

    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        write_folder(job.out, write)
    return reports[0]


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
        alpha=adapter_scale(adapter) * rank,  # divided by the rank again: the scale, up to the last bit of a double
        dora=any(name.endswith(".m") for name in arrays),
        dropout=adapter_dropout(adapter),
        base_name=base_name,
    )


def _require_read_back(model: BaseModel, folder: Path, arrays: Mapping[str, mx.array], adapter: Path) -> None:
    """Put the written adapter on ``model``; raises ModelError unless it is ``adapter`` to the last bit."""
    imported = put_on(model, folder, read_peft_config(folder))
    same = imported.weights.keys() == arrays.keys() and all(
        mx.array_equal(value, imported.weights[name]).item() for name, value in arrays.items()
    )
    if not same or np.float32(adapter_scale(adapter)) != np.float32(imported.lora.scale):
        raise _not_the_adapter(adapter, "other numbers when it is read again")


def _not_the_adapter(adapter: Path, why: str) -> ModelError:
    do = "safetrain fuse OUT makes one model of base and adapter"
    return ModelError("What was written for PEFT is not the tuned model.", where=str(adapter), got=why, do=do)


def _report(
    job: PeftExportJob, files: ModelFiles, tuned: TunedModel, base: Likeness, likeness: Likeness, share: float
) -> PeftReport:
    form = read_prompt_format(job.adapter)
    return PeftReport(
        str(job.base), files.fingerprint, files.quantization_bits, job.base_name, fingerprint(job.adapter),
        len(tuned.rows), len(tuned.keys), base, tuned.own, likeness, share,
        form.stop_ids if form else (),
    )  # fmt: skip
