"""Folds an adapter into its base, as small as what was learnt allows: written, opened again and measured each time."""

import gc
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from safetrain.core.errors import MachineError, ModelError
from safetrain.core.formatting import size_text
from safetrain.core.memory.budget import host_room_bytes, read_memory
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.adapter_files import adapter_scale, fingerprint, read_taught, require_base, write_taught
from safetrain.core.records.fusing import (
    REPORT,
    FuseReport,
    Tried,
    describe,
    kept_share,
    refusal,
)
from safetrain.core.storage.files import full_disk_named, replace_directory, require_new, require_room, write_record
from safetrain.engine.adapter_folder import adapter_arrays
from safetrain.engine.arrays import save_shards
from safetrain.engine.backend import set_limits
from safetrain.engine.bit_plans import bits_plan, float_plan, name_of, own_plan, steps_of, with_steps
from safetrain.engine.folding import Folds, Plan, folded, folds_of, quantization_in
from safetrain.engine.tuned import ExportJob, measure_tuned
from safetrain.engine.upstream.loading import errors_told, load
from safetrain.engine.upstream.packing import tolerance_of
from safetrain.engine.upstream.saving import copy_beside, logits_for_a_consumer, write_config

PARTS = 16  # in which the way from the base's bits to 8 bits is searched
OPENED_TOKENS = 16  # through the model as mlx-lm alone computes it


@dataclass(frozen=True)
class FuseJob(ExportJob):
    """What to fold, and how much of what was learnt may be lost."""

    adapter: Path
    bits: int | None = None  # exactly so many; None: as few as hold
    as_float: bool = False  # all of it
    may_lose: float = 0.02  # share of what was learnt


@dataclass(frozen=True)
class FusedCandidate:
    """A way of storing the fused model."""

    name: str  # by the layers that the adapter changes
    plan: Plan


def fuse_adapter(job: FuseJob, say: Callable[[str], None]) -> FuseReport:
    """Write the smallest fused model that holds to ``job.out``, whole or not at all, with its report.

    Raises ConfigError, ModelError where nothing holds or adapter and base do not belong together, DiskFullError, and
    MachineError where a model does not fit into memory to be measured.
    """
    parent = require_new(job.out)
    files = read_model_files(job.base)
    require_base(job.adapter, job.base, files.fingerprint)
    with (
        full_disk_named("The disk is full; nothing was written.", parent, "free some space"),
        _Fusing(job, files, say) as fusing,
    ):
        return fusing.smallest_that_holds()


class _Fusing:
    """Candidates are made in a hidden folder beside the target; the best so far stays in it."""

    def __init__(self, job: FuseJob, files: ModelFiles, say: Callable[[str], None]) -> None:
        self._job, self._files, self._say = job, files, say
        self._tried: list[Tried] = []

    def __enter__(self) -> "_Fusing":
        self._job.out.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.TemporaryDirectory(dir=self._job.out.parent, prefix=".fuse-")
        self._best = Path(self._scratch.name) / "best"
        return self

    def __exit__(self, *_error: object) -> None:
        self._scratch.cleanup()

    def smallest_that_holds(self) -> FuseReport:
        """Measure base and tuned model, then one candidate after the other."""
        job = self._job
        set_limits(job.mlx_limit_bytes)
        self._tuned = measure_tuned(job, self._files)
        self._count = len(self._tuned.rows)
        self._base = self._tuned.measure_base(self._files, self._say)
        size = self._files.static_bytes + sum(value.nbytes for value in adapter_arrays(job.adapter).values())
        self._say(describe("base and adapter, apart", size, 1.0, self._tuned.own, self._count))
        chosen = self._search()
        report = FuseReport(
            str(job.base), self._files.fingerprint, fingerprint(job.adapter), self._count,
            int(self._tuned.rows.label_counts.sum()), job.may_lose, self._base, self._tuned.own, tuple(self._tried),
            chosen.name,
        )  # fmt: skip
        write_record(self._best / REPORT, report)
        replace_directory(self._best, job.out)
        return report

    def _search(self) -> Tried:
        job, (module, _, folds) = self._job, self._read()
        if job.as_float:
            return self._only(FusedCandidate("float", float_plan(module, folds)))
        own = own_plan(module, folds)
        if job.bits is not None:
            return self._only(FusedCandidate(f"{job.bits} bits", bits_plan(module, folds, job.bits)))
        steps = steps_of(module, folds)
        as_float = FusedCandidate("float", float_plan(module, folds))
        del module, folds
        usual = self._files.quantization_bits

        def part(number: int) -> FusedCandidate:
            plan = with_steps(own, steps, number / PARTS)
            return FusedCandidate(name_of(plan), plan)

        if found := self._try(part(0)):
            return found
        if steps and (found := self._try(part(PARTS))):
            low, high = 0, PARTS
            while high - low > 1:
                middle = (low + high) // 2
                smaller = self._try(part(middle))
                low, high, found = (low, middle, smaller) if smaller else (middle, high, found)
            return found
        if usual is not None and (found := self._try(as_float)):
            return found
        raise self._nothing_holds()

    def _only(self, candidate: FusedCandidate) -> Tried:
        if found := self._try(candidate):
            return found
        raise self._nothing_holds()

    def _nothing_holds(self) -> ModelError:
        best = max(self._tried, key=lambda tried: tried.kept)
        asked = self._job.bits is not None or self._job.as_float
        return ModelError(
            f"{'This fused model does not keep' if asked else 'No fused model keeps'} what was learnt: "
            f"{best.name}: {best.refusal}.",
            where=str(self._job.adapter),
            expected=f"at least {100 * (1 - self._job.may_lose):g} % kept",
            got=f"{100 * best.kept:.1f} %",
            do="leave out --bits and --float: more bits are then found" if asked
            else "use base and adapter apart, or allow more with --may-lose",
        )  # fmt: skip

    def _read(self) -> tuple[Any, dict[str, Any], Folds]:
        """The base and what the adapter does to it, both unread on the disk, and the base's configuration."""
        with errors_told("open the model", str(self._job.base)):
            module, config = load(self._job.base)
        weights, scale = adapter_arrays(self._job.adapter), adapter_scale(self._job.adapter)
        return module, config, folds_of(module, weights, scale)

    def _try(self, candidate: FusedCandidate) -> Tried | None:
        """Write it, open it and measure it; None where it does not hold. The best takes the place of the one before."""
        folder = Path(self._scratch.name) / "candidate"
        size = self._write(candidate, folder)
        gc.collect()
        self._require_memory(candidate, size)
        set_limits(self._job.mlx_limit_bytes + max(0, size - self._files.static_bytes))
        found = self._tuned.likeness_of(self._job.open(folder))
        kept = kept_share(self._base, self._tuned.own, found)
        tried = Tried(candidate.name, size, kept, found, refusal(kept, found, self._job.may_lose))
        self._tried.append(tried)
        self._say(describe(tried.name, size, kept, found, self._count, tried.refusal or "holds"))
        if not tried.refusal:
            self._require_opens(folder)
            shutil.rmtree(self._best, ignore_errors=True)
            folder.replace(self._best)
            return tried
        shutil.rmtree(folder)
        return None

    def _write(self, candidate: FusedCandidate, folder: Path) -> int:
        """The candidate's folder; bytes of its weights."""
        module, config, folds = self._read()
        arrays = folded(module, folds, candidate.plan)
        size = sum(value.nbytes for value in arrays.values())
        do = "free some space, or choose a folder on another disk"
        require_room(self._job.out.parent, size, "There is too little room for the fused model.", do)
        folder.mkdir()
        write_config(module, quantization_in(config, module, candidate.plan), folder)
        taught = read_taught(self._job.adapter)
        copy_beside(self._job.base, folder, taught.stop_ids if taught else ())
        if taught is not None:
            write_taught(folder, taught)  # for safetrain chat and serve
        del module, folds  # what is written is then gone from memory
        save_shards(folder, arrays)
        return size

    def _require_memory(self, candidate: FusedCandidate, size: int) -> None:
        room = host_room_bytes(read_memory())
        if size > room:
            raise MachineError(
                f"The fused model ({candidate.name}) does not fit into memory, so nobody can say what it keeps.",
                expected=size_text(size),
                got=f"{size_text(room)} available",
                do="close other programs, use base and adapter apart, or allow more to be lost with --may-lose",
            )

    def _require_opens(self, folder: Path) -> None:
        """Raise ModelError unless mlx-lm alone opens the folder and computes the same."""
        row = self._tuned.rows[0]
        ids = row.ids[:OPENED_TOKENS].tolist()
        ours = self._job.open(folder).module(mx.array([ids]))[0].astype(mx.float32)
        mx.eval(ours)
        gc.collect()
        theirs = logits_for_a_consumer(folder, ids)
        apart = float(np.array(mx.abs(ours - theirs).mean() / mx.abs(ours).mean()))
        if not apart <= tolerance_of(mx.bfloat16 if self._files.in_bfloat16 else mx.float32):
            raise ModelError(
                "mlx-lm computes something else with the fused model than was measured.",
                where=self._files.model_type,
                got=f"logits {100 * apart:.1f} % apart",
                do="use base and adapter apart, and report this model's architecture",
            )
