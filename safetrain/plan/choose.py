"""Chooses how to run micro-batches by dry runs: the closed form orders the candidates, the model itself decides."""

import dataclasses
import functools
import math
from dataclasses import dataclass

from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.formatting import counted
from safetrain.core.memory.budget import own_limit_bytes
from safetrain.core.memory.estimate import mlx_limit_bytes
from safetrain.core.memory.terms import usable_cores
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.job import Survival, TrainJob
from safetrain.core.records.reports import DataReport, Machine
from safetrain.core.records.schema import Lora, Train
from safetrain.core.records.settings import DryRun, Recommendation, resolve
from safetrain.core.storage import paths
from safetrain.plan.candidates import (
    Candidate,
    Fit,
    PlannedTraining,
    candidates_at,
    nothing_fits,
    nothing_passed,
)
from safetrain.plan.dry_run import Answer, DryRunner, measured_share, remove_remains, try_out
from safetrain.plan.planning_time import PlanningTime
from safetrain.plan.recommend import DRY_RUN, ask, recommendation_of, rows_of, updates_of

MOST_DRY_RUNS = 12
LESS_AFTER_A_DEATH = 0.85  # after a dry run out of memory, candidates of this share of its peak come next
ALIKE = 1.1  # measured speeds that differ by less: so do two dry runs of the same training on a busy machine
SPARED = 0.02  # of train.memory_limit_gb is kept from dry runs: two processes never take quite the same


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


@dataclass(frozen=True)
class Passed:
    """A candidate that fits, with what its dry run has measured."""

    fit: Fit
    recommendation: Recommendation

    @property
    def rows_per_second(self) -> float:
        """Speed, comparable also where updates have different numbers of rows."""
        return self.fit.rows_per_update / (self.recommendation.step_seconds or math.inf)


@dataclass(frozen=True)
class Trial:
    """A candidate to be tried, the training of which to make the largest updates, and the seconds that may take."""

    fit: Fit
    job: TrainJob
    seconds: float | None  # None: not known


def machine_text(machine: Machine) -> str:
    """The machine as dry runs depend on it."""
    return f"{machine.chip} {machine.physical_cores} {machine.backend} {machine.device} {usable_cores()}"


def plan_by_dry_runs(inputs: PlanInputs, train: Train, lora: Lora, runner: DryRunner) -> Recommendation:
    """The fastest of the recommendations that pass a dry run with the model itself.

    Another one is tried where it may be faster by so much that the training makes up for it. Not ``verified`` where
    train.oversize asked for what does not fit, or where the dry run itself failed. Raises MachineError where nothing
    fits, and as ``ask`` does.
    """
    remove_remains(paths.OUTPUT)
    search = Search(inputs, question_of(inputs, train, lora), lora)
    while (trial := search.next_trial()) is not None:
        answer = try_out(runner, inputs.model, trial.job, inputs.digest, trial.fit.peak_bytes, trial.seconds)
        if why := search.learn(trial, answer):
            runner.say(why)
    return search.recommendation()


def question_of(inputs: PlanInputs, train: Train, lora: Lora) -> PlannedTraining:
    """The training to plan, with what dry runs here have measured; raises ConfigError as ``ask`` does."""
    model, machine = inputs.model, inputs.machine
    question = ask(inputs.data, machine, model, train, lora, rows_of(inputs.data, machine, train, model, inputs.rows))
    return dataclasses.replace(question, measured_share=measured_share(machine_text(machine), model))


class Search:
    """Which candidate to try next, and what those tried so far recommend. It starts no process."""

    def __init__(self, inputs: PlanInputs, question: PlannedTraining, lora: Lora) -> None:
        self._inputs, self._question, self._lora = inputs, question, lora
        self._time = PlanningTime(inputs.machine, inputs.model)
        self._lengths = iter(question.lengths)
        self._found = list[Fit]()  # of all lengths so far
        self._possible, self._left = list[Fit](), list[Fit]()  # of this length; those not tried yet
        self._passed = list[Passed]()
        self._too_much_bytes = math.inf  # the smallest predicted peak of a dry run that ran out of memory
        self._made, self._deaths, self._failed = 0, 0, False

    def next_trial(self) -> Trial | None:
        """What to try, at the first length at which something passes; None where enough is known."""
        if self._failed:
            return None
        fit = self._next_here()
        while fit is None and not self._passed and (length := next(self._lengths, None)) is not None:
            found = candidates_at(self._question, length)
            self._found += found
            self._possible = [each for each in found if each.may_fit(self._question.machine.memory_budget)]
            self._left = self._time.affordable_first(self._possible, self._updates_of)
            fit = self._next_here()
        return None if fit is None else Trial(fit, self._job(fit), self._time.of_next(fit))

    def learn(self, trial: Trial, answer: Answer) -> str:
        """Take what a dry run has shown; returns why the candidate did not pass, empty if it did."""
        fit, measured = trial.fit, answer.measured
        self._made += 1
        took = answer.seconds if measured is None else measured.own_seconds
        self._time.took(fit, took, ended_well=measured is not None)
        if measured is None and not answer.ran_out_of_memory:
            self._failed = True
            return f"not measured: the dry run ended with {answer.ended}"
        if measured is not None and (found := self._with_measured(fit, measured)).verified:
            self._passed.append(Passed(fit, found))
            return ""
        self._too_much_bytes, self._deaths = min(self._too_much_bytes, fit.peak_bytes), self._deaths + 1
        why = f"it ran out of memory ({answer.ended})" if answer.ended else "more than the memory budget"
        return f"{counted(fit.candidate.batch_size, 'row')} of {fit.candidate.length} tokens: {why}"

    def recommendation(self) -> Recommendation:
        """The best of what passed, or what there is instead of it; raises MachineError where nothing fits."""
        train, budget = self._question.train, self._question.machine.memory_budget_bytes
        if self._passed:
            return _best(self._passed).recommendation
        if self._failed or train.oversize:
            return self._unmeasured(self._most_likely(self._possible if self._failed else self._found))
        if self._made:
            raise nothing_passed(budget, train.memory_limit_gb)
        raise nothing_fits(self._question, self._found)

    def _next_here(self) -> Fit | None:
        """The candidate of this length to try next; those that failed decide what is left out.

        So does what was slower than another: still smaller micro-batches of its mode are slower yet.
        """
        if self._made >= MOST_DRY_RUNS:
            return None
        best = _best(self._passed) if self._passed else None
        slower = [each.fit.candidate for each in self._passed if best and each.rows_per_second < best.rows_per_second]
        self._left = [fit for fit in self._left if not any(_is_smaller(fit.candidate, other) for other in slower)]
        within = [fit for fit in self._left if fit.peak_bytes < self._too_much_bytes]
        less = [fit for fit in within if fit.peak_bytes < LESS_AFTER_A_DEATH**self._deaths * self._too_much_bytes]
        fit = next(iter(within if best else less or within), None)
        if fit is None or (best and not self._is_worth_it(fit, best)):
            return None
        self._left.remove(fit)
        return fit

    def _most_likely(self, fits: list[Fit]) -> Fit:
        """What to take without a measurement: the first that fits by the closed form and has not run out of memory."""
        budget = self._question.machine.memory_budget
        left = [fit for fit in fits if fit.fits(budget) and fit.peak_bytes < self._too_much_bytes]
        return left[0] if left else min(fits, key=lambda fit: fit.peak_bytes)

    def _is_worth_it(self, fit: Fit, best: Passed) -> bool:
        ratio = fit.relative_cost / best.fit.relative_cost
        return self._time.pays(ratio, best.recommendation.total_seconds, self._time.of_next(fit))

    def _unmeasured(self, fit: Fit) -> Recommendation:
        return recommendation_of(self._question, fit, self._inputs.data, self._lora)

    def _updates_of(self, fit: Fit) -> int:
        return updates_of(self._unmeasured(fit), self._question.rows.count)

    def _job(self, fit: Fit) -> TrainJob:
        """What the dry run trains: the same settings, under a slightly smaller memory limit."""
        train, chosen = self._question.train, self._unmeasured(fit)
        limit = own_limit_bytes(train.memory_limit_gb)
        least = None if limit is None else int(limit * (1 - SPARED))
        survival = Survival(True, False, 1, least)
        return TrainJob(
            str(self._inputs.model.folder), resolve(train, self._lora, chosen), False, chosen.memory_budget, None,
            survival, (), chosen.mlx_limit_bytes,
        )  # fmt: skip

    def _with_measured(self, fit: Fit, measured: DryRun) -> Recommendation:
        """Verified if the whole process kept to the budget; on a GPU, whose memory is its own, if mlx did."""
        chosen, machine = self._unmeasured(fit), self._question.machine
        if machine.backend == "cpu":
            enough = measured.footprint_bytes <= machine.memory_budget_bytes
        else:
            enough = measured.peak_bytes <= machine.memory_budget.mlx_bytes
        return dataclasses.replace(
            chosen,
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


def _best(passed: list[Passed]) -> Passed:
    """The fastest; of those that are about as fast, the one that was expected to be."""
    fastest = max(each.rows_per_second for each in passed)
    alike = [each for each in passed if each.rows_per_second * ALIKE >= fastest]
    return min(alike, key=lambda each: each.fit.relative_cost)


def _is_smaller(candidate: Candidate, other: Candidate) -> bool:
    """Whether it is the same way of computing in smaller micro-batches."""
    return candidate.mode == other.mode and candidate.batch_size < other.batch_size
