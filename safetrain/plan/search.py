"""Chooses how to run micro-batches: the closed form orders the candidates, dry runs with the model itself decide.

The best by the closed form is tried; two more at the most, while a faster one can pay for its dry run.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass

from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.formatting import counted
from safetrain.core.memory.budget import own_limit_bytes
from safetrain.core.memory.estimate import mlx_limit_bytes
from safetrain.core.memory.terms import backend_of, base_bytes, usable_cores
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.job import Survival, TrainJob
from safetrain.core.records.reports import DataReport, Machine
from safetrain.core.records.schema import Lora, Train
from safetrain.core.records.settings import (
    DRY_RUN_SLOW_SECONDS,
    DRY_RUN_TIMED_SECONDS,
    DryRun,
    Recommendation,
    resolve,
    total_updates,
)
from safetrain.core.storage import paths
from safetrain.plan.candidates import Fit, PlannedTraining, candidates_at, nothing_fits, nothing_passed
from safetrain.plan.dry_run import Answer, DryRunner, remove_remains, try_out
from safetrain.plan.recommend import DRY_RUN, ask, recommendation_of, rows_of

MOST_DRY_RUNS, MOST_MORE = 8, 2  # in all; after one that has passed
LEAST_SECONDS, SHARE = 60.0, 0.03  # planning may take this long, or this share of the training where that is longer
MOST_FIRST_SECONDS = 300.0  # for the first dry run, where a smaller micro-batch takes less
LESS_AFTER_A_DEATH = 0.85  # after a dry run out of memory, only candidates of this share of its peak are tried
UNCERTAIN, LIKELY = 1.1, 0.5  # predicted ratios of speed are a tenth off; half of the possible saving is likely
ALIKE = 1.1  # measured speeds that differ by less: so do two dry runs of the same training on a busy machine
SPARED = 0.02  # of train.memory_limit_gb is kept from dry runs: two processes never take quite the same
START_SECONDS, LOAD_BYTES_PER_SECOND = 2.0, 0.5e9  # a process until mlx is loaded; the base, as kept in memory
FLOPS_PER_WEIGHT = 4  # and token: one product forward, one backward; weights of the base get no gradient
ATTAINED = 0.5  # a training's share of the speed of a large product (measured: benchmarks/bench_throughput)
LARGEST_MADE = 2.5  # largest updates in a dry run, its validation among them; 1.5 where they are slow


@dataclass(frozen=True)
class PlanInputs:
    """What a plan is made from."""

    data: DataReport
    machine: Machine
    model: ModelFiles
    rows: TrainingRows

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the training's rows, before they are cut."""
        return f"{self.rows.train_digest} {self.rows.valid_digest}"


def machine_text(machine: Machine) -> str:
    """The machine as dry runs depend on it."""
    return f"{machine.chip} {machine.physical_cores} {machine.backend} {machine.device} {usable_cores()}"


def question_of(inputs: PlanInputs, train: Train, lora: Lora) -> PlannedTraining:
    """The training to plan; raises ConfigError as ``ask`` does."""
    rows = rows_of(inputs.data, inputs.machine, train, inputs.model, inputs.rows)
    return ask(inputs.data, inputs.machine, inputs.model, train, lora, rows)


def plan_run(inputs: PlanInputs, train: Train, lora: Lora, runner: DryRunner) -> Recommendation:
    """The fastest configuration that passes a dry run; of all lengths, the first at which one passes.

    Not ``verified`` where train.oversize asked for what does not fit, where a dry run failed for another reason than
    memory, or where the runner makes none. Raises MachineError where nothing fits, ConfigError as ``ask`` does.
    """
    remove_remains(paths.OUTPUT)
    search = _Search(inputs, question_of(inputs, train, lora), lora, runner)
    for length in search.question.lengths:
        search.try_length(length)
        if search.passed:
            return _fastest(search.passed)[1]
        if search.unmeasured is not None:
            return search.closed_form(search.unmeasured)
    if train.oversize:
        return search.closed_form(min(search.found, key=lambda fit: fit.peak_bytes))
    if search.made:
        raise nothing_passed(search.question.machine.memory_budget_bytes, train.memory_limit_gb)
    raise nothing_fits(search.question, search.found)


class _Search:
    """The dry runs of one plan."""

    def __init__(self, inputs: PlanInputs, question: PlannedTraining, lora: Lora, runner: DryRunner) -> None:
        self.question = question
        self._inputs, self._lora, self._runner = inputs, lora, runner
        self.found, self.passed = list[Fit](), list[tuple[Fit, Recommendation]]()
        self.unmeasured: Fit | None = None  # to be used by the closed form, because a dry run gave no answer
        self.made, self._more = 0, 0  # dry runs in all, and after one that has passed
        self._spent_seconds = self._last_seconds = 0.0
        self._most_bytes = math.inf  # of a predicted peak that is still worth a dry run

    def try_length(self, length: int) -> None:
        """Make dry runs of rows cut to this length, until enough is known."""
        found = candidates_at(self.question, length)
        self.found += found
        possible = [fit for fit in found if fit.may_fit(self.question.budget)]
        for fit in self._affordable_first(possible):
            if fit.peak_bytes > self._most_bytes or (self.passed and not self._pays(fit)):
                continue
            if self.made >= MOST_DRY_RUNS or self._more >= MOST_MORE:
                return
            self._more += bool(self.passed)
            answer = try_out(
                self._runner, self._inputs.model, self._job(fit), self._inputs.digest, self._expected(fit)[0]
            )
            if answer is None:  # the runner makes none
                self.unmeasured = fit
                return
            if answer.measured is None and not answer.ran_out_of_memory:
                self._runner.say(f"not measured: the dry run ended with {answer.ended}")
                fits = [each for each in possible if each.fits(self.question.budget)]
                self.unmeasured = fits[0] if fits else min(possible, key=lambda each: each.peak_bytes)
                return
            if not self._passes(fit, answer):
                self._most_bytes = LESS_AFTER_A_DEATH * fit.peak_bytes

    def closed_form(self, fit: Fit) -> Recommendation:
        """The configuration around a candidate, not measured."""
        return recommendation_of(self.question, fit)

    def _passes(self, fit: Fit, answer: Answer) -> bool:
        """Take what a dry run has shown, and say why a candidate did not pass."""
        measured = answer.measured
        self._last_seconds = answer.seconds if measured is None else measured.own_seconds
        self._spent_seconds += self._last_seconds
        self.made += 1
        if measured is not None and (found := self._with_measured(fit, measured)).verified:
            self.passed.append((fit, found))
            return True
        why = f"it ran out of memory ({answer.ended})" if answer.ended else "more than the memory budget"
        self._runner.say(f"{counted(fit.batch_size, 'row')} of {fit.length} tokens: {why}")
        return False

    def _pays(self, fit: Fit) -> bool:
        """Whether another dry run is likely to save more than it takes, within planning's share of the training."""
        best, chosen = _fastest(self.passed)
        training = chosen.total_seconds or 0.0
        saved = LIKELY * (1 - fit.relative_cost / best.relative_cost / UNCERTAIN) * training
        within = self._spent_seconds + self._last_seconds <= max(LEAST_SECONDS, SHARE * training)
        return within and self._last_seconds < saved

    def _affordable_first(self, fits: list[Fit]) -> list[Fit]:
        """The same order, but at the end those whose dry run takes more than planning may."""

        def too_long(fit: Fit) -> bool:
            dry_run, update = self._expected(fit)
            return dry_run > max(LEAST_SECONDS, min(MOST_FIRST_SECONDS, SHARE * update * self._updates_of(fit)))

        late = [fit for fit in fits if too_long(fit)]
        return [fit for fit in fits if fit not in late] + sorted(late, key=lambda fit: self._expected(fit)[0])

    def _expected(self, fit: Fit) -> tuple[float, float]:
        """Seconds of a dry run and of an update by the speed of a large product; zeros where that is not known."""
        machine, model = self.question.machine, self.question.model
        if not machine.gemm_gflops:
            return 0.0, 0.0
        operations = (FLOPS_PER_WEIGHT + 2 * fit.checkpointing) * model.parameters
        token = operations / (ATTAINED * machine.gemm_gflops * 1e9)
        update = token * fit.rows_per_update * min(fit.length, self.question.rows.mean_tokens)
        largest = token * fit.shape.total
        load = base_bytes(model, backend_of(model, machine.backend, fit.dequantize_base)) / LOAD_BYTES_PER_SECOND
        timed = 0.0 if update > DRY_RUN_SLOW_SECONDS else max(DRY_RUN_TIMED_SECONDS, update)
        made = LARGEST_MADE - (largest > DRY_RUN_SLOW_SECONDS)
        return START_SECONDS + load + made * largest + timed, update

    def _updates_of(self, fit: Fit) -> int:
        chosen = self.closed_form(fit)
        return total_updates(self.question.rows.count, fit.rows_per_update, chosen.num_epochs, chosen.max_steps)

    def _job(self, fit: Fit) -> TrainJob:
        """The job of the dry run: the same settings, under a slightly smaller memory limit."""
        train, chosen = self.question.train, self.closed_form(fit)
        limit = own_limit_bytes(train.memory_limit_gb)
        survival = Survival(True, False, 1, None if limit is None else int(limit * (1 - SPARED)))
        return TrainJob(
            str(self._inputs.model.folder), resolve(train, self._lora, chosen), False, chosen.memory_budget, None,
            survival, (), chosen.mlx_limit_bytes,
        )  # fmt: skip

    def _with_measured(self, fit: Fit, measured: DryRun) -> Recommendation:
        """Verified if the whole process kept to the budget; on a GPU, whose memory is its own, if mlx did."""
        machine = self.question.machine
        if machine.backend == "cpu":
            enough = measured.footprint_bytes <= machine.memory_budget_bytes
        else:
            enough = measured.peak_bytes <= machine.memory_budget.mlx_bytes
        return dataclasses.replace(
            self.closed_form(fit),
            step_seconds=round(measured.update_seconds, 4),
            total_seconds=round(measured.update_seconds * self._updates_of(fit), 1),
            measured_peak_bytes=measured.peak_bytes,
            own_order=measured.own_order,
            mlx_limit_bytes=mlx_limit_bytes(measured.peak_bytes, machine.memory_budget),
            measured_footprint_bytes=measured.footprint_bytes,
            margin_bytes=0,
            basis=DRY_RUN,
            verified=enough,
        )


def _fastest(passed: list[tuple[Fit, Recommendation]]) -> tuple[Fit, Recommendation]:
    """Of those that are about as fast as the fastest, by rows a second, the one that was expected to be."""
    seconds_per_row = [(chosen.step_seconds or math.inf) / fit.rows_per_update for fit, chosen in passed]
    least = ALIKE * min(seconds_per_row)
    alike = [each for each, seconds in zip(passed, seconds_per_row, strict=True) if seconds <= least]
    return min(alike, key=lambda each: each[0].relative_cost)
