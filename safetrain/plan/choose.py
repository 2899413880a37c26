"""Chooses how to run micro-batches by dry runs: the closed form orders the candidates, the model itself decides."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.formatting import counted
from safetrain.core.memory.budget import own_limit_bytes
from safetrain.core.memory.estimate import mlx_limit_bytes
from safetrain.core.memory.terms import usable_cores
from safetrain.core.model.files import ModelFiles
from safetrain.core.protocol.dry_run import DryRun
from safetrain.core.records.job import Survival, TrainJob
from safetrain.core.records.reports import DataReport, Machine
from safetrain.core.records.schema import Lora, Train
from safetrain.core.records.settings import Recommendation, resolve
from safetrain.core.storage import paths
from safetrain.plan.candidates import Candidate, Fit, PlannedTraining, candidates_at, nothing_fits, nothing_passed
from safetrain.plan.dry_run import Answer, DryRunner, measured_share, try_out
from safetrain.plan.planning_time import PlanningTime
from safetrain.plan.recommend import DRY_RUN, ask, recommendation_of, rows_of, updates_of
from safetrain.plan.scratch import remove_remains

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
    return _Search(inputs, question_of(inputs, train, lora), lora, runner).run()


def question_of(inputs: PlanInputs, train: Train, lora: Lora) -> PlannedTraining:
    """What is asked for, with what earlier dry runs here have shown; raises ConfigError as ``ask`` does."""
    rows = rows_of(inputs.data, inputs.machine, train, inputs.model, inputs.rows)
    question = ask(inputs.data, inputs.machine, inputs.model, train, lora, rows)
    share = measured_share(machine_text(inputs.machine), inputs.model)
    return dataclasses.replace(question, learnt=dataclasses.replace(question.learnt, measured_share=share))


class _Search:
    """Dry runs, one after the other, and what they have shown so far."""

    def __init__(self, inputs: PlanInputs, question: PlannedTraining, lora: Lora, runner: DryRunner) -> None:
        self._inputs, self._question, self._lora, self._runner = inputs, question, lora, runner
        self._time = PlanningTime(inputs.machine, inputs.model)
        self._too_much_bytes = math.inf  # the smallest predicted peak of a dry run that ran out of memory
        self._made, self._deaths = 0, 0

    def run(self) -> Recommendation:
        """At the first length at which something passes."""
        question, tried = self._question, list[Fit]()
        for length in question.lengths:
            found = candidates_at(question, length)
            tried += found
            possible = [fit for fit in found if fit.may_fit(question.machine.memory_budget)]
            if possible and (chosen := self._at_one_length(possible)) is not None:
                return chosen
        if question.train.oversize:
            return self._unmeasured(self._most_likely(tried))
        if self._made:
            raise nothing_passed(question.machine.memory_budget_bytes, question.train.memory_limit_gb)
        raise nothing_fits(question, tried)

    def _at_one_length(self, possible: list[Fit]) -> Recommendation | None:
        passed = list[Passed]()
        for fit in self._in_turn(possible, passed):
            answer = self._dry_run(fit)
            if answer.measured is None and not answer.ran_out_of_memory:
                self._runner.say(f"not measured: the dry run ended with {answer.ended}")
                return _best(passed).recommendation if passed else self._unmeasured(self._most_likely(possible))
            measured = None if answer.measured is None else self._with_measured(fit, answer.measured)
            if measured is not None and measured.verified:
                passed.append(Passed(fit, measured))
                continue
            self._too_much_bytes, self._deaths = min(self._too_much_bytes, fit.peak_bytes), self._deaths + 1
            why = f"it ran out of memory ({answer.ended})" if answer.ended else "more than the memory budget"
            self._runner.say(f"{counted(fit.candidate.batch_size, 'row')} of {fit.candidate.length} tokens: {why}")
        return _best(passed).recommendation if passed else None

    def _in_turn(self, possible: list[Fit], passed: list[Passed]) -> Iterable[Fit]:
        """The candidates to try, one after the other; those that failed decide what is left out.

        So does what was slower than another: still smaller micro-batches of its mode are slower yet.
        """
        left = self._time.affordable_first(possible, self._updates_of)
        while left and self._made < MOST_DRY_RUNS:
            slower = [each.fit.candidate for each in passed if each is not _best(passed)]
            left = [fit for fit in left if not any(_is_smaller(fit.candidate, other) for other in slower)]
            within = [fit for fit in left if fit.peak_bytes < self._too_much_bytes]
            less = [fit for fit in within if fit.peak_bytes < LESS_AFTER_A_DEATH**self._deaths * self._too_much_bytes]
            fit = next(iter(within if passed else less or within), None)
            if fit is None or (passed and not self._is_worth_it(fit, _best(passed))):
                return
            left.remove(fit)
            self._made += 1
            yield fit

    def _most_likely(self, fits: list[Fit]) -> Fit:
        """What to take without a measurement: the first that fits by the closed form and has not run out of memory."""
        budget = self._question.machine.memory_budget
        left = [fit for fit in fits if fit.fits(budget) and fit.peak_bytes < self._too_much_bytes]
        return left[0] if left else min(fits, key=lambda fit: fit.peak_bytes)

    def _is_worth_it(self, fit: Fit, best: Passed) -> bool:
        ratio = fit.relative_cost / best.fit.relative_cost
        return self._time.pays(ratio, best.recommendation.total_seconds, self._time.of_next(fit))

    def _dry_run(self, fit: Fit) -> Answer:
        job, inputs = self._job(fit), self._inputs
        expected = self._time.of_next(fit)
        answer = try_out(self._runner, inputs.model, job, inputs.digest, fit.peak_bytes, expected)
        took = answer.seconds if answer.measured is None else answer.measured.own_seconds
        self._time.took(fit, took, ended_well=answer.measured is not None)
        return answer

    def _unmeasured(self, fit: Fit) -> Recommendation:
        return recommendation_of(self._question, fit, self._inputs.data, self._lora)

    def _updates_of(self, fit: Fit) -> int:
        return updates_of(self._unmeasured(fit), self._inputs.data, self._question.train)

    def _job(self, fit: Fit) -> TrainJob:
        """What the dry run trains: the same settings, under a slightly smaller memory limit."""
        train, chosen = self._question.train, self._unmeasured(fit)
        limit = own_limit_bytes(train.memory_limit_gb)
        least = None if limit is None else int(limit * (1 - SPARED))
        survival = Survival(True, False, 1, 0.0, least)
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
