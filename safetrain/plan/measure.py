"""Measures a model on this machine, in processes that may die, and remembers it in the user's cache folder."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.model_files import ModelFiles
from safetrain.core.probes import Measured, ProbePoint, ProbeRequest, measured_from, write_request
from safetrain.core.settings import LoraSettings, Recommendation, TrainSettings
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
from safetrain.plan.child import run_lines

CALIBRATION_SECONDS = 600.0
CERTIFICATION_SECONDS = 1800.0
KILLED = "killed by signal"  # on CPU a failed allocation is a crash, or a thread that cannot be started
OUT_OF_MEMORY = ("memory", "allocate", "resource temporarily unavailable")


@dataclass(frozen=True)
class Bench:
    """What to measure with."""

    module: str  # the engine's probe
    chip: str
    say: Callable[[str], None]


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
        request = ProbeRequest(str(model.folder), True, model.compute_bytes == 4, points)
        measured, ended = run_probes(bench.module, request, CALIBRATION_SECONDS)
        if ended:
            bench.say(f"after {len(measured)} of {len(points)} probes: {ended}")
        if len(measured) < LEAST_PROBES:
            return None
        with contextlib.suppress(OSError):  # where the cache cannot be written, it is measured again next time
            remember(path, measured)
    return fit(model, mode, measured)


@dataclass(frozen=True)
class Certificate:
    """What updates of the model itself took, or why there is no answer."""

    measured: Measured | None
    ended: str  # how the process ended without an answer
    ran_out_of_memory: bool  # as far as that can be told


def certify(bench: Bench, model: ModelFiles, point: ProbePoint, data_limit_bytes: int | None = None) -> Certificate:
    """Updates of the model itself at the worst shape of this data, told and limited as the training will be."""
    settings = point.settings
    mode = Mode(settings.gradient_checkpointing, settings.dequantize_base)
    path = cache_path(model, settings.lora, settings.method, mode, bench.chip)
    shape = (settings.batch_size, settings.gradient_accumulation, point.tokens, settings.lora.num_layers)
    name = "x".join(map(str, (*shape, point.predicted_peak_bytes, point.budget_bytes, data_limit_bytes or 0)))
    path = path.with_name(f"{path.stem}-{name}.json")
    known = remembered(path)
    if known:
        return Certificate(known[0], "", ran_out_of_memory=False)
    bench.say("certifying: a few updates of the model itself at the longest rows")
    request = ProbeRequest(str(model.folder), False, False, (point,), data_limit_bytes)
    measured, ended = run_probes(bench.module, request, CERTIFICATION_SECONDS)
    if not measured:
        died = ended.startswith(KILLED) or any(word in ended.lower() for word in OUT_OF_MEMORY)
        return Certificate(None, ended or "it gave no answer", died)
    with contextlib.suppress(OSError):
        remember(path, measured)
    return Certificate(measured[0], "", ran_out_of_memory=False)


def settings_of(chosen: Recommendation, settings: TrainSettings) -> TrainSettings:
    """The template with what was chosen."""
    return dataclasses.replace(
        settings,
        batch_size=chosen.batch_size,
        gradient_accumulation=min(2, chosen.gradient_accumulation),  # two hold what any number holds
        gradient_checkpointing=chosen.gradient_checkpointing,
        dequantize_base=chosen.dequantize_base,
        lora=chosen.lora,
    )


def _base(mode: Mode) -> str:
    return "unpacked once" if mode.dequantize_base else "as it is"


def run_probes(module: str, request: ProbeRequest, timeout_seconds: float) -> tuple[list[Measured], str]:
    """What was measured before the process ended, and how it ended; empty: well."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "request.json"
        write_request(path, request)
        lines, ended = run_lines(module, [str(path)], timeout_seconds)
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # the last line of a killed process may be cut off
            found.append(measured_from(json.loads(line)))
    return found, ended
