"""Plans a training on measurements: the recommendation, and the rehearsal of it with the model itself."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core import paths
from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.errors import MachineError
from safetrain.core.files import cache_directory, write_json
from safetrain.core.job import Survival, TrainJob
from safetrain.core.memory import total_bytes
from safetrain.core.memory_budget import own_limit_bytes
from safetrain.core.memory_terms import usable_cores
from safetrain.core.model_files import ModelFiles
from safetrain.core.probes import Rehearsed
from safetrain.core.reports import DataReport, Machine
from safetrain.core.schema import Lora, Train
from safetrain.core.settings import LoraSettings, Recommendation
from safetrain.core.words import counted
from safetrain.plan.calibration import Calibration, Mode
from safetrain.plan.candidates import NOISE, Calibrate, Candidate, Experience, Rows, nothing_passed
from safetrain.plan.measure import Bench, Certificate, calibration_for, certify, template
from safetrain.plan.recommend import recommend, rows_of
from safetrain.plan.scratch import remove_remains

MOST_CANDIDATES, MOST_CERTIFIED = 12, 5  # that are rehearsed with the model itself, and of which the fastest is taken
WORTH_A_LOOK = 1.4  # times the fastest one's predicted time: predictions of speed are a fifth off (measured)
LESS_AFTER_A_DEATH = 0.85  # of what ran out of memory is tried next, until something passes
SPARED = 0.02  # of train.memory_limit_gb: two processes never take quite the same


@dataclass(frozen=True)
class Facts:
    """What a plan is made from."""

    data: DataReport
    machine: Machine
    model: ModelFiles
    rows: TrainingRows | None = None  # without them, as many of the longest as there may be

    @functools.cached_property
    def digest(self) -> str:
        """Of the rows that a training sees, whole."""
        return "" if self.rows is None else f"{self.rows.train_digest} {self.rows.valid_digest}"


def bench_of(machine: Machine, module: str, rehearsal: str, say: Callable[[str], None]) -> Bench:
    """What this machine's measurements are made and remembered with."""
    chip = f"{machine.chip} {machine.physical_cores} {machine.backend} {machine.device} {usable_cores()}"
    return Bench(module, chip, say, rehearsal, machine.memory_budget_bytes)


def plan_measured(facts: Facts, train: Train, lora: Lora, bench: Bench) -> Recommendation:
    """The recommendation by what a shortened model has shown here, before it is certified; raises as ``recommend``."""
    experience = Experience(_calibrate(facts, train, bench), certifies=True, previous=_previous(facts, train, bench))
    return _plan(facts, train, lora, experience, rows_of(facts.data, facts.machine, train, facts.model, facts.rows))


def plan_certified(facts: Facts, train: Train, lora: Lora, bench: Bench) -> Recommendation:
    """The fastest of a few recommendations that pass a rehearsal: the beginning of the training itself.

    Of a training so short that a faster way could not make up for its rehearsal, the first that passes.
    Not ``verified`` where train.oversize asked for what does not fit, or where the measuring itself failed. Raises as
    ``recommend`` does.
    """
    remove_remains(paths.OUTPUT)
    search = _Search(facts, train, lora, bench)
    passed = list[Certified]()
    while len(search.tried) < MOST_CANDIDATES and len(passed) < MOST_CERTIFIED:
        chosen = search.next_after(passed)
        if chosen is None:
            break
        certificate = _certificate(chosen, facts, train, bench, search.tried)
        if certificate is None:
            return chosen if not passed else _pick(passed, search.previous, facts, train, bench)
        search.tried.add(_candidate(chosen))
        certified = None if certificate.measured is None else _with_measured(chosen, certificate.measured, facts)
        if certified is not None and certified.recommendation.verified:
            passed.append(certified)
            if certified.is_short:
                break
            continue
        search.too_much_bytes = min(search.too_much_bytes, total_bytes(chosen.memory_terms))
        why = f"it ran out of memory ({certificate.ended})" if certificate.ended else "more than the memory budget"
        bench.say(f"{counted(chosen.batch_size, 'row')} of {chosen.max_seq_length} tokens: {why}")
    if not passed:
        raise nothing_passed(facts.machine.memory_budget_bytes, train.memory_limit_gb)
    return _pick(passed, search.previous, facts, train, bench)


class _Search:
    """Which recommendation to rehearse next."""

    def __init__(self, facts: Facts, train: Train, lora: Lora, bench: Bench) -> None:
        self._facts, self._train, self._lora = facts, train, lora
        self._rows = rows_of(facts.data, facts.machine, train, facts.model, facts.rows)
        self._calibrate = _calibrate(facts, train, bench)
        self._least_seconds = math.inf  # of a row, as predicted
        self.previous = _previous(facts, train, bench)
        self.tried: set[Candidate] = set()
        self.too_much_bytes = math.inf  # the least, as predicted where mlx is told nothing, that ran out of memory

    def next_after(self, passed: "list[Certified]") -> Recommendation | None:
        """The fastest untried one; None when none is worth a look beside what has passed.

        Raises as ``recommend`` does, where nothing has passed and nothing is left.
        """
        try:
            chosen = self._plan(self.too_much_bytes if passed else LESS_AFTER_A_DEATH * self.too_much_bytes)
        except MachineError:
            if passed:
                return None
            chosen = self._plan(self.too_much_bytes)
        seconds = (chosen.step_seconds or math.inf) / (chosen.batch_size * chosen.gradient_accumulation)
        self._least_seconds = min(self._least_seconds, seconds)
        if passed and seconds > WORTH_A_LOOK * self._least_seconds:
            return None
        shorter = passed and chosen.max_seq_length < passed[0].recommendation.max_seq_length
        return None if shorter else chosen

    def _plan(self, less_than_bytes: float) -> Recommendation:
        experience = Experience(self._calibrate, True, frozenset(self.tried), less_than_bytes, self.previous)
        return _plan(self._facts, self._train, self._lora, experience, self._rows)


@dataclass(frozen=True)
class Certified:
    """A recommendation with what its rehearsal has shown."""

    recommendation: Recommendation
    rehearsal_seconds: float

    @property
    def rows_per_second(self) -> float:
        """So that updates of other numbers of rows can be compared."""
        chosen = self.recommendation
        return chosen.batch_size * chosen.gradient_accumulation / (chosen.step_seconds or math.inf)

    @property
    def is_short(self) -> bool:
        """Whether another rehearsal would take longer than what is noise in the time of this training."""
        seconds = self.recommendation.total_seconds
        return seconds is not None and (NOISE - 1) * seconds < self.rehearsal_seconds


def _certificate(
    chosen: Recommendation, facts: Facts, train: Train, bench: Bench, tried: set[Candidate]
) -> Certificate | None:
    """What the model itself took; None where it is not to be measured, or the measuring failed."""
    too_large = chosen.predicted_peak_bytes > chosen.memory_budget.mlx_bytes
    if too_large or _candidate(chosen) in tried or facts.rows is None:
        return None  # with train.oversize: to measure it could take the machine down
    certificate = certify(bench, facts.model, _job(chosen, facts, train), facts.digest)
    if certificate.measured is None and not certificate.ran_out_of_memory:
        bench.say(f"not certified: the measuring process ended with {certificate.ended}")
        return None
    return certificate


def _pick(
    passed: list[Certified], previous: Candidate | None, facts: Facts, train: Train, bench: Bench
) -> Recommendation:
    """The fastest, or the previous choice within noise of it; remembered for the next time."""
    fastest = max(passed, key=lambda each: each.rows_per_second)
    kept = [each for each in passed if _candidate(each.recommendation) == previous]
    chosen = kept[0] if kept and kept[0].rows_per_second >= fastest.rows_per_second / NOISE else fastest
    _remember(_candidate(chosen.recommendation), facts, train, bench)
    return chosen.recommendation


def _plan(facts: Facts, train: Train, lora: Lora, experience: Experience, rows: Rows) -> Recommendation:
    return recommend(facts.data, facts.machine, facts.model, train, lora, experience, rows)


def _calibrate(facts: Facts, train: Train, bench: Bench) -> Calibrate:
    @functools.cache
    def calibrate(adapter: LoraSettings, mode: Mode) -> Calibration | None:
        return calibration_for(bench, facts.model, template(train.method, adapter), mode)

    return calibrate


def _candidate(chosen: Recommendation) -> Candidate:
    mode = Mode(chosen.gradient_checkpointing, chosen.dequantize_base)
    return Candidate(chosen.batch_size, chosen.max_seq_length, mode)


def _choice_path(facts: Facts, train: Train, bench: Bench) -> Path:
    """Outside DVC's outputs, which it removes before a stage runs again."""
    words = f"{facts.model.fingerprint} {bench.chip} {train.method} {train.memory_limit_gb}"
    key = hashlib.blake2b(words.encode(), digest_size=12)
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


def _job(chosen: Recommendation, facts: Facts, train: Train) -> TrainJob:
    """The training as far as its memory and speed go, under a little less than it will have."""
    settings = dataclasses.replace(
        template(train.method, chosen.lora),
        batch_size=chosen.batch_size,
        gradient_accumulation=chosen.gradient_accumulation,
        max_seq_length=chosen.max_seq_length,
        num_epochs=chosen.num_epochs,
        max_steps=train.max_steps,
        max_examples=train.max_examples,
        gradient_checkpointing=chosen.gradient_checkpointing,
        dequantize_base=chosen.dequantize_base,
    )
    limit = own_limit_bytes(train.memory_limit_gb)
    least = None if limit is None else int(limit * (1 - SPARED))
    survival = Survival(True, False, 1, 0.0, least)
    return TrainJob(
        str(facts.model.folder), settings, False, chosen.memory_budget, None, survival, (), chosen.mlx_limit_bytes
    )


def _with_measured(chosen: Recommendation, measured: Rehearsed, facts: Facts) -> Certified:
    """Under train.memory_limit_gb it has shown that it is enough, where the kernel enforces that: on Linux.

    Nothing else may be exceeded either.
    """
    if facts.machine.backend == "cpu":
        enough = measured.footprint_bytes <= facts.machine.memory_budget_bytes
    else:
        enough = measured.peak_bytes <= chosen.memory_budget.mlx_bytes
    predicted, total = chosen.step_seconds, chosen.total_seconds
    found = dataclasses.replace(
        chosen,
        step_seconds=round(measured.update_seconds, 4),
        total_seconds=round(total * measured.update_seconds / predicted, 1) if total and predicted else None,
        measured_peak_bytes=measured.peak_bytes,
        measured_footprint_bytes=measured.footprint_bytes,
        verified=enough,
    )
    return Certified(found, measured.own_seconds)
