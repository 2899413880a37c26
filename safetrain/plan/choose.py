"""Plans a training on measurements: the recommendation, and what the model itself takes at the longest rows."""

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.errors import MachineError
from safetrain.core.files import cache_directory, write_json
from safetrain.core.memory import needed_bytes
from safetrain.core.memory_budget import own_limit_bytes
from safetrain.core.memory_terms import FLOAT32, padded, trained_parameters, usable_cores
from safetrain.core.model_files import ModelFiles
from safetrain.core.probes import Measured, ProbePoint
from safetrain.core.reports import DataReport, Machine
from safetrain.core.schema import Lora, Train
from safetrain.core.settings import LoraSettings, Recommendation
from safetrain.core.words import counted
from safetrain.plan.calibration import Calibration, Mode
from safetrain.plan.candidates import NOISE, Candidate, Experience
from safetrain.plan.measure import Bench, Certificate, calibration_for, certify, settings_of, template
from safetrain.plan.recommend import recommend

MOST_CANDIDATES, MOST_CERTIFIED = 12, 3  # that are measured with the model itself, and of which the fastest is taken
WORTH_A_LOOK = 1.4  # times the fastest one's predicted time: predictions of speed are a fifth off (measured)
TRAINING_BESIDE_BYTES = 64 * 2**20  # private memory of a training beside that of a probe of the same shape


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
    """The recommendation by what a shortened model has shown here, before it is certified; raises as ``recommend``."""
    return _plan(facts, train, lora, bench, Experience(certifies=True, previous=_previous(facts, train, bench)))


def plan_certified(facts: Facts, train: Train, lora: Lora, bench: Bench) -> Recommendation:
    """The fastest of a few recommendations that the model itself, measured at the longest rows, bears out.

    Not ``verified`` where train.oversize asked for what does not fit, or where the measuring itself failed. Raises as
    ``recommend`` does.
    """
    tried: set[Candidate] = set()
    passed: list[Certified] = []
    previous, least_seconds = _previous(facts, train, bench), math.inf
    while len(tried) < MOST_CANDIDATES and len(passed) < MOST_CERTIFIED:
        experience = Experience(certifies=True, rejected=frozenset(tried), previous=previous)
        try:
            chosen = _plan(facts, train, lora, bench, experience)
        except MachineError:
            if not passed:
                raise
            break
        least_seconds = min(least_seconds, chosen.step_seconds or math.inf)
        if passed and (chosen.step_seconds or math.inf) > WORTH_A_LOOK * least_seconds:
            break
        certificate = _certificate(chosen, facts, train, bench, tried)
        if certificate is None:
            break
        tried.add(_candidate(chosen))
        if certificate.measured is not None:
            certified = _with_measured(chosen, certificate.measured, facts, train)
            if certified.verified:
                passed.append(Certified(certified, rate_of(certificate.measured)))
                continue
        why = certificate.ended or "more than the memory budget"
        bench.say(f"{counted(chosen.batch_size, 'row')} of {chosen.max_seq_length} tokens: {why}")
    return _pick(passed, previous, facts, train, bench) if passed else chosen


@dataclass(frozen=True)
class Certified:
    """A verified recommendation, and how fast the model itself was."""

    recommendation: Recommendation
    tokens_per_second: float


def _certificate(
    chosen: Recommendation, facts: Facts, train: Train, bench: Bench, tried: set[Candidate]
) -> Certificate | None:
    """What the model itself took; None where it is not to be measured, or the measuring failed."""
    too_large = needed_bytes(chosen.predicted_peak_bytes, 1.0) > chosen.memory_budget_bytes
    if too_large or _candidate(chosen) in tried:
        return None  # with train.oversize: to measure it could take the machine down
    certificate = certify(bench, facts.model, _point(chosen, facts, train), _data_limit_bytes(train))
    if certificate.measured is None and not certificate.ran_out_of_memory:
        bench.say(f"not certified: the measuring process ended with {certificate.ended}")
        return None
    return certificate


def _pick(
    passed: list[Certified], previous: Candidate | None, facts: Facts, train: Train, bench: Bench
) -> Recommendation:
    """The fastest, or the previous choice within noise of it; remembered for the next time."""
    fastest = max(passed, key=lambda each: each.tokens_per_second)
    kept = [each for each in passed if _candidate(each.recommendation) == previous]
    chosen = kept[0] if kept and kept[0].tokens_per_second >= fastest.tokens_per_second / NOISE else fastest
    _remember(_candidate(chosen.recommendation), facts, train, bench)
    return chosen.recommendation


def rate_of(measured: Measured) -> float:
    """Tokens per second of a measured update."""
    return measured.point.settings.rows_per_update * measured.point.tokens / measured.step_seconds


def _plan(facts: Facts, train: Train, lora: Lora, bench: Bench, experience: Experience) -> Recommendation:
    def calibrate(adapter: LoraSettings, mode: Mode) -> Calibration | None:
        return calibration_for(bench, facts.model, template(train.method, adapter), mode)

    with_calibration = dataclasses.replace(experience, calibrate=calibrate)
    return recommend(facts.data, facts.machine, facts.model, train, lora, with_calibration)


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


def _data_limit_bytes(train: Train) -> int | None:
    """Less than the training will have, which holds rows, a tokenizer and copies for checkpoints besides."""
    limit = own_limit_bytes(train.memory_limit_gb)
    return None if limit is None else limit - TRAINING_BESIDE_BYTES


def _best_bytes(chosen: Recommendation, facts: Facts, train: Train) -> int:
    """The best weights so far, which a training keeps and a probe does not."""
    return FLOAT32 * trained_parameters(facts.model, chosen.lora, train.method)


def _point(chosen: Recommendation, facts: Facts, train: Train) -> ProbePoint:
    longest = min(chosen.max_seq_length, facts.data.longest_row)
    best = _best_bytes(chosen, facts, train)
    return ProbePoint(
        facts.model.num_layers,
        padded(longest - 1),
        settings_of(chosen, template(train.method, chosen.lora)),
        chosen.memory_budget_bytes - best,
        chosen.predicted_peak_bytes - best,
    )


def _with_measured(chosen: Recommendation, measured: Measured, facts: Facts, train: Train) -> Recommendation:
    best = _best_bytes(chosen, facts, train)
    peak, process = measured.peak_bytes + best, measured.footprint_bytes + best
    fits = (process if facts.machine.backend == "cpu" else peak) <= chosen.memory_budget_bytes
    return dataclasses.replace(chosen, measured_peak_bytes=peak, measured_footprint_bytes=process, verified=fits)
