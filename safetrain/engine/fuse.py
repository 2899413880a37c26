"""Folds an adapter into its base: in its own bits, in 8 bits or in float, the first that keeps what was learnt."""

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from safetrain.core.errors import MachineError, ModelError
from safetrain.core.formatting import size_text
from safetrain.core.memory.budget import host_room_bytes, read_memory
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.adapter_files import (
    adapter_scale,
    fingerprint,
    read_prompt_format,
    require_base,
    write_prompt_format,
)
from safetrain.core.records.fusing import REPORT, Candidate, FuseReport, describe, kept_share, refusal
from safetrain.core.storage.files import full_disk_named, replace_directory, require_new, require_room, write_record
from safetrain.engine.adapter_folder import adapter_arrays
from safetrain.engine.arrays import save_shards
from safetrain.engine.backend import set_limits
from safetrain.engine.folding import Folds, Plan, bits_plan, float_plan, folded, folds_of, own_plan, quantization_in
from safetrain.engine.tuned import ExportJob, measure_tuned
from safetrain.engine.upstream.loading import copy_beside, errors_told, load, logits_for_a_consumer, write_config
from safetrain.engine.upstream.probing import tolerance_of

MORE_BITS = 8  # where the base's own lose too much
OPENED_TOKENS = 8  # through the model as mlx-lm itself computes it


@dataclass(frozen=True)
class FuseJob(ExportJob):
    """What to fold, and how much of what was learnt may be lost."""

    adapter: Path
    bits: int | None = None  # None: the base's own, then 8, then float
    as_float: bool = False  # all of it
    may_lose: float = 0.02  # share of what was learnt


def fuse_adapter(job: FuseJob, say: Callable[[str], None]) -> FuseReport:
    """Write the first fused model that holds to ``job.out``, whole or not at all, with its report.

    Raises ConfigError, ModelError where nothing holds or adapter and base do not belong together, DiskFullError, and
    MachineError where a model does not fit into memory to be measured.
    """
    parent = require_new(job.out)
    files = read_model_files(job.base)
    require_base(job.adapter, job.base, files.fingerprint)
    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        job.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=job.out.parent, prefix=".fuse-") as scratch:
            return _Fusing(job, files, Path(scratch) / "fused", say).first_that_holds()


class _Fusing:
    """One model after the other is made in ``folder``, hidden beside the target, until one holds."""

    def __init__(self, job: FuseJob, files: ModelFiles, folder: Path, say: Callable[[str], None]) -> None:
        self._job, self._files, self._folder, self._say = job, files, folder, say
        self._tried: list[Candidate] = []

    def first_that_holds(self) -> FuseReport:
        """Measure base and tuned model, then each candidate once."""
        job = self._job
        set_limits(job.mlx_limit_bytes)
        self._tuned = measure_tuned(job, self._files)
        rows = self._tuned.rows
        self._base = job.measure_base(self._tuned, self._files, self._say)
        size = self._files.static_bytes + sum(value.nbytes for value in adapter_arrays(job.adapter).values())
        self._say(describe("base and adapter, apart", size, 1.0, self._tuned.own, len(rows)))
        name_chosen = next((name for name, plan in self._candidates() if self._holds(name, plan)), None)
        if name_chosen is None:
            raise self._nothing_holds()
        report = FuseReport(
            str(job.base), self._files.fingerprint, fingerprint(job.adapter), len(rows), int(rows.label_counts.sum()),
            job.may_lose, self._base, self._tuned.own, tuple(self._tried), name_chosen,
        )  # fmt: skip
        write_record(self._folder / REPORT, report)
        replace_directory(self._folder, job.out)
        return report

    def _candidates(self) -> Iterator[tuple[str, Plan]]:
        """Names and plans, in the order of trying."""
        job, own = self._job, self._files.quantization_bits
        module, _, folds = self._read()
        if not job.as_float and job.bits is None and own is not None:
            yield f"{own} bits", own_plan(module, folds)
        bits = job.bits or (MORE_BITS if own is not None and own < MORE_BITS else None)
        if not job.as_float and bits is not None:
            yield f"{bits} bits", bits_plan(module, folds, bits)
        if job.bits is None:
            yield "float", float_plan(module, folds)

    def _nothing_holds(self) -> ModelError:
        best = max(self._tried, key=lambda each: each.kept)
        is_set = self._job.bits is not None or self._job.as_float
        return ModelError(
            f"{'This fused model does not keep' if is_set else 'No fused model keeps'} what was learnt: "
            f"{best.name}: {best.refusal}.",
            where=str(self._job.adapter),
            expected=f"at least {100 * (1 - self._job.may_lose):g} % kept",
            got=f"{100 * best.kept:.1f} %",
            do="leave out --bits and --float: more bits are then tried" if is_set
            else "use base and adapter apart, or allow more with --may-lose",
        )  # fmt: skip

    def _read(self) -> tuple[Any, dict[str, Any], Folds]:
        """The base, its configuration and what the adapter does to it; weights stay unread on the disk."""
        with errors_told("open the model", str(self._job.base)):
            module, config = load(self._job.base)
        return module, config, folds_of(module, adapter_arrays(self._job.adapter), adapter_scale(self._job.adapter))

    def _holds(self, name: str, plan: Plan) -> bool:
        """Write a candidate, open it and measure it; it stays in the folder only if it holds."""
        size = self._write(plan)
        gc.collect()
        self._require_memory(name, size)
        set_limits(self._job.mlx_limit_bytes + max(0, size - self._files.static_bytes))
        model = self._job.open(self._folder)
        ids = self._tuned.rows[0].ids[:OPENED_TOKENS].tolist()
        ours = model.module(mx.array([ids]))[0].astype(mx.float32)
        mx.eval(ours)
        likeness = self._tuned.likeness_of(model)
        del model
        gc.collect()
        self._require_same(ours, logits_for_a_consumer(self._folder, ids))
        share = kept_share(self._base, self._tuned.own, likeness)
        candidate = Candidate(name, size, share, likeness, refusal(share, likeness, self._job.may_lose))
        self._tried.append(candidate)
        self._say(describe(name, size, share, likeness, len(self._tuned.rows), candidate.refusal or "holds"))
        if candidate.refusal:
            shutil.rmtree(self._folder)
        return not candidate.refusal

    def _write(self, plan: Plan) -> int:
        """The candidate's folder; bytes of its weights."""
        module, config, folds = self._read()
        arrays = folded(module, folds, plan)
        size = sum(value.nbytes for value in arrays.values())
        do = "free some space, or choose a folder on another disk"
        require_room(self._job.out.parent, size, "There is too little room for the fused model.", do)
        self._folder.mkdir()
        write_config(module, quantization_in(config, module, plan), self._folder)
        form = read_prompt_format(self._job.adapter)
        copy_beside(self._job.base, self._folder, form.stop_ids if form else ())
        if form is not None:
            write_prompt_format(self._folder, form)  # for safetrain chat and serve
        del module, folds  # what is written is then gone from memory
        save_shards(self._folder, arrays)
        return size

    def _require_memory(self, name: str, size: int) -> None:
        room = host_room_bytes(read_memory())
        if size > room:
            raise MachineError(
                f"The fused model ({name}) does not fit into memory to be measured.",
                expected=size_text(size),
                got=f"{size_text(room)} available",
                do="close other programs, use base and adapter apart, or allow more to be lost with --may-lose",
            )

    def _require_same(self, ours: mx.array, theirs: mx.array) -> None:
        """Raise ModelError unless mlx-lm itself computes the same logits, up to the rounding of the stored type."""
        apart = float(np.array(mx.abs(ours - theirs).mean() / mx.abs(ours).mean()))
        in_16_bits = any(tensor.dtype in ("F16", "BF16") for tensor in read_model_files(self._folder).tensors)
        if not apart <= tolerance_of(mx.float16 if in_16_bits else mx.float32):
            raise ModelError(
                "mlx-lm computes something else with the fused model than safetrain does.",
                where=self._files.model_type,
                got=f"logits {100 * apart:.1f} % apart",
                do="use base and adapter apart, and report this model's architecture",
            )
