"""Measures a model on this machine, in processes that may die, and remembers it in the user's cache folder."""

import contextlib
import dataclasses
import hashlib
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core import paths
from safetrain.core.files import write_json
from safetrain.core.job import TrainJob, memory_shape, write_job
from safetrain.core.model_files import ModelFiles
from safetrain.core.probes import Measured, ProbeRequest, Rehearsed, measured_from, write_request
from safetrain.core.settings import LoraSettings, TrainSettings
from safetrain.core.words import size_text
from safetrain.plan.calibration import (
    LEAST_PROBES,
    Calibration,
    Mode,
    cache_path,
    fit,
    probe_points,
    remember,
    remembered,
)
from safetrain.plan.child import PASSED_CAP, Cap, run_lines
from safetrain.plan.scratch import scratch_folder

CALIBRATION_SECONDS = 600.0
CERTIFICATION_SECONDS = 1800.0
CAP_SLACK = 1.15
KILLED = "killed by signal"  # on CPU a failed allocation is a crash, or a thread that cannot be started
OUT_OF_MEMORY = ("memory", "allocate", "resource temporarily unavailable")


@dataclass(frozen=True)
class Bench:
    """What to measure with."""

    module: str  # the engine's probe
    chip: str
    say: Callable[[str], None]
    rehearsal: str = ""  # the engine's rehearsal of a training
    budget_bytes: int = 0  # of memory on this machine; 0: not known


def template(method: str, lora: LoraSettings) -> TrainSettings:
    """Settings whose memory is measured, with the optimizer that takes most; the rest of them changes none of it."""
    return TrainSettings(
        method=method, optimizer="adam", schedule="constant", batch_size=1, gradient_accumulation=1,
        max_seq_length=2**20, learning_rate=1e-4, num_epochs=1, max_steps=None, max_examples=None, warmup_steps=0,
        save_steps=1, eval_steps=1, log_steps=1, max_grad_norm=1.0, weight_decay=0.0, neftune_alpha=0.0,
        early_stopping_patience=None, on_bad_update="stop", max_loss_jump=None, dequantize_base=False,
        gradient_checkpointing=False, seed=1, lora=lora,
    )  # fmt: skip


def calibration_for(bench: Bench, model: ModelFiles, settings: TrainSettings, mode: Mode) -> Calibration | None:
    """What this machine shows of the model in this mode, measured once; None when too few probes survive."""
    path = cache_path(model, settings.lora, settings.method, mode, bench.chip)
    measured = remembered(path)
    if len(measured) < LEAST_PROBES:
        how = "recomputed" if mode.checkpointing else "kept"
        bench.say(
            f"measuring a shortened model: activations {how}, base {_base(mode)} (once for model, adapter and machine)"
        )
        points = probe_points(model, settings, mode)
        request = ProbeRequest(str(model.folder), model.compute_bytes == 4, points, floors=True)
        measured, ended = run_probes(bench.module, request, CALIBRATION_SECONDS, cap_of(bench.budget_bytes))
        if ended:
            bench.say(f"after {len(measured)} of {len(points)} probes: {ended}")
        if len(measured) < LEAST_PROBES:
            return None
        with contextlib.suppress(OSError):  # where the cache cannot be written, it is measured again next time
            remember(path, measured)
    return fit(model, mode, measured)


@dataclass(frozen=True)
class Certificate:
    """What the beginning of the training took, or why there is no answer."""

    measured: Rehearsed | None
    ended: str  # how the process ended without an answer
    ran_out_of_memory: bool  # as far as that can be told


def certify(bench: Bench, model: ModelFiles, job: TrainJob, rows: str) -> Certificate:
    """The beginning of the training itself, told and limited as it will be; ``rows`` is a digest of what it sees."""
    settings = job.settings
    mode = Mode(settings.gradient_checkpointing, settings.dequantize_base)
    path = cache_path(model, settings.lora, settings.method, mode, bench.chip)
    key = hashlib.blake2b(f"{rows} {dataclasses.asdict(job)}".encode(), digest_size=12).hexdigest()
    path = path.with_name(f"{path.stem}-{key}.json")
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return _certificate_from(json.loads(path.read_text(encoding="utf-8")))
    bench.say(f"certifying the training's largest updates, with the model itself: {memory_shape(settings)}")
    with scratch_folder(paths.OUTPUT) as scratch:
        file = scratch / "job.json"
        write_job(file, job)
        cap = cap_of(job.memory_budget.total_bytes, job.survival.memory_limit_bytes)
        lines, ended = run_lines(bench.rehearsal, [str(file), str(scratch)], CERTIFICATION_SECONDS, cap)
    certificate = _certificate_of(lines, ended)
    found, limited = certificate.measured, job.survival.memory_limit_bytes is not None
    if found is not None:
        bench.say(f"passed: {found.update_seconds:.2f} s an update, peak {size_text(found.peak_bytes)}")
    # a process that the kernel ends (SIGKILL), or that has no limit of its own, may die of what other programs take
    own_fault = certificate.ran_out_of_memory and limited and not ended.startswith(f"{KILLED} {signal.SIGKILL:d}")
    own_fault = own_fault or ended.startswith(PASSED_CAP)
    if found is not None or own_fault:
        with contextlib.suppress(OSError):
            write_json(path, dataclasses.asdict(certificate))
    return certificate


def cap_of(budget_bytes: int, own_limit_bytes: int | None = None, platform: str = sys.platform) -> Cap | None:
    """What a dry run may take on macOS, where no limit of a process bounds Metal's memory: it would swap the desktop.

    Elsewhere the process limits itself. Without a limit of its own it keeps to what a plan may take, and a little more:
    mlx holds buffers that it does not use, up to what it was told.
    """
    most = own_limit_bytes or int(CAP_SLACK * budget_bytes)
    return Cap(most) if platform == "darwin" and most else None


def _certificate_of(lines: list[str], ended: str) -> Certificate:
    try:
        return Certificate(Rehearsed(**json.loads(lines[-1])), "", ran_out_of_memory=False)
    except (IndexError, ValueError, TypeError):
        died = ended.startswith(KILLED) or any(word in ended.lower() for word in OUT_OF_MEMORY)
        return Certificate(None, ended or "it gave no answer", died)


def _certificate_from(value: dict[str, Any]) -> Certificate:
    measured = value["measured"]
    return Certificate(Rehearsed(**measured) if measured else None, value["ended"], value["ran_out_of_memory"])


def _base(mode: Mode) -> str:
    return "unpacked once" if mode.dequantize_base else "as it is"


def run_probes(
    module: str, request: ProbeRequest, timeout_seconds: float, cap: Cap | None = None
) -> tuple[list[Measured], str]:
    """What was measured before the process ended, and how it ended; empty: well."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "request.json"
        write_request(path, request)
        lines, ended = run_lines(module, [str(path)], timeout_seconds, cap)
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # the last line of a killed process may be cut off
            found.append(measured_from(json.loads(line)))
    return found, ended
