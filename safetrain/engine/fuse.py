"""Merges an adapter into its base: in the base's bits, in 8 bits or in float, whichever first keeps its improvement."""

import gc
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from safetrain.core.errors import MachineError, ModelError
from safetrain.core.formatting import size_text
from safetrain.core.memory.budget import host_room_bytes, read_memory
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.adapter_files import fingerprint, read_prompt_format, require_base, write_prompt_format
from safetrain.core.records.fusing import REPORT, Candidate, FuseReport, describe, kept_share, refusal
from safetrain.core.storage.files import full_disk_named, replace_directory, require_new, require_room, write_record
from safetrain.engine.backend import set_limits
from safetrain.engine.folding import FLOAT, folded, open_to_fold, plan_of, quantization_in
from safetrain.engine.tuned import ExportJob, measure_tuned
from safetrain.engine.upstream.loading import copy_beside, logits_for_a_consumer, write_config
from safetrain.engine.upstream.probing import tolerance_of
from safetrain.engine.weight_files import adapter_arrays, save_shards

MORE_BITS = 8  # if the base's own bits lose too much
OPENED_TOKENS = 8  # through the model as mlx-lm itself computes it


@dataclass(frozen=True)
class FuseJob(ExportJob):
    """What to merge, and how much of the improvement may be lost."""

    adapter: Path
    bits: int | None = None  # None: the base's own, then 8, then float
    as_float: bool = False  # all of it
    may_lose: float = 0.02  # share of the improvement


def fuse_adapter(job: FuseJob, say: Callable[[str], None]) -> FuseReport:
    """Write the first fused model that is accurate enough to ``job.out``, complete or not at all, with its report.

    Raises ConfigError, ModelError if no model is accurate enough or adapter and base do not match, DiskFullError, and
    MachineError if memory is too small to measure a model.
    """
    parent = require_new(job.out)
    files = read_model_files(job.base)
    require_base(job.adapter, job.base, files.fingerprint)
    set_limits(job.mlx_limit_bytes)
    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        job.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=job.out.parent, prefix=".fuse-") as scratch:
            folder, fusing = Path(scratch) / "fused", _Fusing(job, files, say)
            tried: list[Candidate] = []
            for bits in bits_to_try(job, files.quantization_bits):
                name = "float" if bits == FLOAT else f"{bits or files.quantization_bits} bits"
                tried.append(fusing.measured(name, write_candidate(job, bits, folder), folder))
                if not tried[-1].refusal:
                    break
                shutil.rmtree(folder)
            else:
                raise _none_passes(job, tried)
            report = fusing.report(tried)
            write_record(folder / REPORT, report)
            replace_directory(folder, job.out)
    return report


def bits_to_try(job: FuseJob, own: int | None) -> list[int | None]:
    """Bits for ``plan_of``, in the order to try them; ``own``: the base's bits, None: float."""
    if job.as_float or (job.bits is None and own is None):
        return [FLOAT]
    if job.bits is not None or own is None:
        return [job.bits]
    return [None, MORE_BITS, FLOAT] if own < MORE_BITS else [None, FLOAT]


def write_candidate(job: FuseJob, bits: int | None, folder: Path) -> int:
    """Write a fused model into a new ``folder``; returns the size of its weights, in bytes."""
    module, config, folds = open_to_fold(job.base, job.adapter)
    plan = plan_of(module, folds, bits)
    arrays = folded(module, folds, plan)
    size = sum(value.nbytes for value in arrays.values())
    do = "free some space, or choose a folder on another disk"
    require_room(job.out.parent, size, "There is too little disk space for the fused model.", do)
    folder.mkdir()
    write_config(module, quantization_in(config, module, plan), folder)
    form = read_prompt_format(job.adapter)
    copy_beside(job.base, folder, form.stop_ids if form else ())
    if form is not None:
        write_prompt_format(folder, form)  # for safetrain chat and serve
    del module, folds  # frees what is written
    save_shards(folder, arrays)
    return size


def _none_passes(job: FuseJob, tried: list[Candidate]) -> ModelError:
    best, is_set = max(tried, key=lambda each: each.kept), job.bits is not None or job.as_float
    return ModelError(
        f"{'This fused model does not keep' if is_set else 'No fused model keeps'} the improvement: "
        f"in {best.name}, it {best.refusal}.",
        where=str(job.adapter),
        expected=f"at least {100 * (1 - job.may_lose):g} % kept",
        got=f"{100 * best.kept:.1f} %",
        do="leave out --bits and --float, so that more bits are tried" if is_set
        else "keep base and adapter separate, or raise --may-lose",
    )  # fmt: skip


class _Fusing:
    """Measurements of base, tuned model and each candidate."""

    def __init__(self, job: FuseJob, files: ModelFiles, say: Callable[[str], None]) -> None:
        self._job, self._files, self._say = job, files, say
        self._tuned = measure_tuned(job, files)
        self._base = job.measure_base(self._tuned, files, say)
        size = files.static_bytes + sum(value.nbytes for value in adapter_arrays(job.adapter).values())
        say(describe("base and adapter", size, 1.0, self._tuned.own, len(self._tuned.rows)))

    def measured(self, name: str, size: int, folder: Path) -> Candidate:
        """Measure the model in ``folder``, once; raises MachineError if memory is too small."""
        gc.collect()
        room, job, rows = host_room_bytes(read_memory()), self._job, self._tuned.rows
        if size > room:
            raise MachineError(
                f"There is too little memory to measure the fused model ({name}).",
                expected=size_text(size),
                got=f"{size_text(room)} available",
                do="close other programs, keep base and adapter separate, or raise --may-lose",
            )
        set_limits(job.mlx_limit_bytes + max(0, size - self._files.static_bytes))
        model, ids = job.open(folder), rows[0].ids[:OPENED_TOKENS].tolist()
        ours = model.module(mx.array([ids]))[0].astype(mx.float32)
        mx.eval(ours)
        likeness = self._tuned.likeness_of(model)
        del model
        gc.collect()
        self._require_same(ours, logits_for_a_consumer(folder, ids), folder)
        share = kept_share(self._base, self._tuned.own, likeness)
        candidate = Candidate(name, size, share, likeness, refusal(share, likeness, job.may_lose))
        self._say(describe(name, size, share, likeness, len(rows), candidate.refusal or "passes"))
        return candidate

    def _require_same(self, ours: mx.array, theirs: mx.array, folder: Path) -> None:
        """Raise ModelError unless mlx-lm itself computes the same logits, up to the rounding of the stored type."""
        apart = float(np.array(mx.abs(ours - theirs).mean() / mx.abs(ours).mean()))
        in_16_bits = any(tensor.dtype in ("F16", "BF16") for tensor in read_model_files(folder).tensors)
        if not apart <= tolerance_of(mx.float16 if in_16_bits else mx.float32):
            raise ModelError(
                "mlx-lm and safetrain compute different logits with the fused model.",
                where=self._files.model_type,
                got=f"a difference of {100 * apart:.1f} %",
                do="keep base and adapter separate, and report this model's architecture",
            )

    def report(self, tried: list[Candidate]) -> FuseReport:
        """Report on the last of ``tried``, which is accurate enough."""
        job, rows = self._job, self._tuned.rows
        return FuseReport(
            str(job.base), self._files.fingerprint, fingerprint(job.adapter), len(rows), int(rows.label_counts.sum()),
            job.may_lose, self._base, self._tuned.own, tuple(tried), tried[-1].name,
        )  # fmt: skip
