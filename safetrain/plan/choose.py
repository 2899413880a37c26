"""Plans a training on measurements: the recommendation, and what the model itself takes at the longest rows."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.files import cache_directory, write_json
from safetrain.core.memory import PROCESS_BYTES, told_limit_bytes
from safetrain.core.memory_terms import FLOAT32, padded, trained_parameters, usable_cores
from safetrain.core.model_files import ModelFiles
from safetrain.core.reports import DataReport, Machine
from safetrain.core.schema import Lora, Train
from safetrain.core.settings import LoraSettings, Recommendation
from safetrain.core.words import counted, size_text
from safetrain.plan.calibration import Calibration, Mode
from safetrain.plan.measure import Bench, calibration_for, certify, settings_of, template
from safetrain.plan.recommend import Candidate, Experience, recommend

MOST_CANDIDATES = 8


@dataclass(frozen=True)
class Facts:
    """What a plan is made from."""

    data: DataReport
    machine: Machine
    model: ModelFiles


def bench_of(machine: Machine, module: str, say: Callable[[str], None]) -> Bench:
    """What this machine's measurements are made and remembered with."""
    chip = f"{machine.chip} {machine.physical_cores} {machine.backend} {machine.device} {usable_cores()}"
    return Bench(module, chip, say)


def plan_measured(facts: Facts, train: Train, lora: Lora, bench: Bench) -> Recommendation:
    """The recommendation by what a shortened model has shown here; raises as ``recommend`` does."""
    return _plan(facts, train, lora, bench, frozenset(), _previous(facts, train, bench))


def plan_certified(facts: Facts, train: Train, lora: Lora, bench: Bench) -> Recommendation:
    """The first recommendation that the model itself, measured at the longest rows, bears out.

    Not ``verified`` where what was asked for with train.oversize does not fit, or after eight that were not borne out.
    """
    rejected: set[Candidate] = set()
    previous = _previous(facts, train, bench)
    for _ in range(MOST_CANDIDATES):
        chosen = _plan(facts, train, lora, bench, frozenset(rejected), previous)
        if chosen.predicted_peak_bytes + PROCESS_BYTES > chosen.memory_budget_bytes:
            return chosen  # with train.oversize: to measure it could take the machine down
        measured, ended = _measured(chosen, facts, train, bench)
        if measured is not None and measured.verified:
            _remember(_candidate(measured), facts, train, bench)
            return measured
        if measured is not None:
            ended = f"{size_text(measured.measured_peak_bytes or 0)}, more than the memory budget"
        bench.say(f"{counted(chosen.batch_size, 'row')} of {chosen.max_seq_length} tokens: {ended}")
        rejected.add(_candidate(chosen))
    return _plan(facts, train, lora, bench, frozenset(rejected), previous)


def _plan(
    facts: Facts, train: Train, lora: Lora, bench: Bench, rejected: frozenset[Candidate], previous: Candidate | None
) -> Recommendation:
    def calibrate(adapter: LoraSettings, mode: Mode) -> Calibration | None:
        return calibration_for(bench, facts.model, template(train.method, adapter), mode)

    experience = Experience(calibrate, rejected, previous)
    return recommend(facts.data, facts.machine, facts.model, train, lora, experience)


def _candidate(chosen: Recommendation) -> Candidate:
    mode = Mode(chosen.gradient_checkpointing, chosen.dequantize_base)
    return Candidate(chosen.batch_size, chosen.max_seq_length, mode)


def _choice_path(facts: Facts, train: Train, bench: Bench) -> Path:
    """Outside DVC's outputs, which it removes before a stage runs again."""
    key = hashlib.blake2b(f"{facts.model.fingerprint} {bench.chip} {train.method}".encode(), digest_size=12)
    return cache_directory() / "choices" / f"{key.hexdigest()}.json"


def _previous(facts: Facts, train: Train, bench: Bench) -> Candidate | None:
    try:
        value = json.loads(_choice_path(facts, train, bench).read_text(encoding="utf-8"))
        return Candidate(**{**value, "mode": Mode(**value["mode"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _remember(chosen: Candidate, facts: Facts, train: Train, bench: Bench) -> None:
    with contextlib.suppress(OSError):  # where the cache cannot be written, there is no previous choice
        write_json(_choice_path(facts, train, bench), dataclasses.asdict(chosen))


def _measured(chosen: Recommendation, facts: Facts, train: Train, bench: Bench) -> tuple[Recommendation | None, str]:
    """The recommendation with what the model itself took, or how the measuring process ended."""
    settings = settings_of(chosen, template(train.method, chosen.lora))
    best = FLOAT32 * trained_parameters(facts.model, chosen.lora, train.method)  # which a training keeps, a probe not
    limit = told_limit_bytes(chosen.predicted_peak_bytes) - best
    measured, ended = certify(bench, facts.model, settings, padded(chosen.max_seq_length - 1), limit)
    if measured is None:
        return None, ended
    peak, process = measured.peak_bytes + best, measured.footprint_bytes + best
    fits = (process if facts.machine.backend == "cpu" else peak) <= chosen.memory_budget_bytes
    return dataclasses.replace(chosen, measured_peak_bytes=peak, measured_footprint_bytes=process, verified=fits), ""
