"""Choose how to run micro-batches: the closed form orders the candidates, dry runs with the real model decide.

The best candidate by the closed form is tried first, then at most two more, if a faster one can pay for its dry run.
A dry run is a process that may die; its answer is cached in the user's cache folder.
"""

import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from safetrain.core.formatting import counted, duration_text, size_text
from safetrain.core.memory.budget import own_limit_bytes
from safetrain.core.memory.estimate import mlx_limit_bytes
from safetrain.core.memory.terms import backend_of, base_bytes, usable_cores
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.evaluation import EVALUATION_SHARE, LEAST_EVALUATION_SECONDS
from safetrain.core.records.reports import Machine
from safetrain.core.records.schema import WHOLE, Lora, Train
from safetrain.core.records.settings import (
    DRY_RUN_SLOW_SECONDS,
    DRY_RUN_TIMED_SECONDS,
    DryRun,
    Recommendation,
    TrainJob,
    memory_shape,
    resolve,
    total_updates,
)
from safetrain.core.storage import paths
from safetrain.core.storage.files import from_json, write_record
from safetrain.plan.candidates import (
    Fit,
    PlanInputs,
    PlannedTraining,
    ask,
    candidates_at,
    nothing_fits,
    nothing_passed,
)
from safetrain.plan.child import (
    KILLED,
    PASSED_CAP,
    answers_about,
    digest_of,
    keep_answer,
    ran_out_of_memory,
    read_answer,
    run_lines,
)
from safetrain.plan.recommend import DRY_RUN, recommendation_of

MOST_DRY_RUNS, MOST_MORE = 8, 2  # in total; after one that has passed
LEAST_SECONDS, SHARE = 60.0, 0.03  # planning may take this long, or this share of the training if that is longer
MOST_FIRST_SECONDS = 300.0  # for the first dry run, if a smaller micro-batch is faster
LESS_AFTER_A_DEATH = 0.85  # after an out-of-memory dry run, only candidates with this share of its peak are tried
UNCERTAIN, LIKELY = 1.1, 0.5  # predicted speed ratios are off by a tenth; half of the possible saving is likely
ALIKE = 1.1  # speeds within this ratio count as equal: two dry runs on a busy machine differ as much
SPARED = 0.02  # share of train.memory_limit_gb held back from dry runs: no two processes use the same memory
START_SECONDS, LOAD_BYTES_PER_SECOND = 2.0, 0.5e9  # start of a process with mlx; loading of the base
FLOPS_PER_WEIGHT = 4  # per token: one product forward, one backward; base weights have no gradient
ATTAINED = 0.5  # a training's share of the speed of a large product (measured: benchmarks/bench_throughput)
LARGEST_MADE = 2.5  # largest updates in a dry run, including its validation; 1.5 if they are slow
PROVED_TOKENS, PROOF_PASSES = 2**12, 3  # most tokens of the adapter check, and its passes (engine/proof.py)
MOST_SECONDS = 3600.0  # time limit of a dry run
CAP_SLACK = 1.15
PREFIX = "dry-run-"


@dataclass(frozen=True)
class DryRunner:
    """How to make dry runs."""

    module: str  # of the engine; empty: only cached answers are used
    machine: str  # answers are cached for this machine
    say: Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """A dry run's measurements, or the reason why they are missing."""

    measured: DryRun | None
    ended: str  # how the process failed
    ran_out_of_memory: bool  # as far as that is known
    seconds: float  # of the process, including Python's start


def machine_text(machine: Machine) -> str:
    """The properties of a machine that dry runs depend on."""
    return f"{machine.chip} {machine.physical_cores} {machine.backend} {machine.device} {usable_cores()}"


def plan_run(inputs: PlanInputs, train: Train, lora: Lora, runner: DryRunner) -> Recommendation:
    """The fastest configuration that passes a dry run, at the first length at which one passes.

    It is not ``verified`` if a dry run failed for a reason other than memory, or if the runner makes none. Raises
    MachineError if nothing fits, ConfigError like ``ask``.
    """
    remove_remains(paths.OUTPUT)
    question = ask(inputs, train, lora)
    search = _Search(question, lora, f"{inputs.rows.train_digest} {inputs.rows.valid_digest}", runner)
    fits = list[Fit]()
    for length in question.lengths:
        candidates = candidates_at(question, length)
        unmeasured = search.try_out([fit for fit in candidates if fit.may_fit])
        if search.passed:
            return _fastest(search.passed)[1]
        if unmeasured is not None:
            return recommendation_of(question, unmeasured)
        fits += candidates
    if search.made:
        raise nothing_passed(question.machine.memory_budget_bytes, train.memory_limit_gb)
    raise nothing_fits(question, fits)


class _Search:
    """The dry runs of one plan."""

    def __init__(self, question: PlannedTraining, lora: Lora, rows_digest: str, runner: DryRunner) -> None:
        self._question, self._lora, self._rows_digest, self._runner = question, lora, rows_digest, runner
        self.passed = list[tuple[Fit, Recommendation]]()
        self.made, self._more = 0, 0  # dry runs in total, and after one that has passed
        self._spent_seconds = self._last_seconds = 0.0
        self._most_bytes = math.inf  # largest predicted peak that is still worth a dry run

    def try_out(self, fits: list[Fit]) -> Fit | None:
        """Make dry runs until a choice is possible; if one gave no answer, return a candidate to use unmeasured."""
        for fit in sorted(fits, key=self._lateness):
            if fit.peak_bytes > self._most_bytes or (self.passed and not self._pays(fit)):
                continue
            if self.made >= MOST_DRY_RUNS or self._more >= MOST_MORE:
                break
            self._more += bool(self.passed)
            job, seconds = self._job(fit), _expected_seconds(self._question, fit)[0]
            answer = try_out(self._runner, self._question.model, job, self._rows_digest, seconds)
            if answer is None:  # the runner makes none
                return fit
            if answer.measured is None and not answer.ran_out_of_memory:
                self._runner.say(f"not measured: the dry run failed: {answer.ended}")
                sure = (each for each in fits if each.fits)
                return next(sure, min(fits, key=lambda each: each.peak_bytes))
            self._take(fit, answer)
        return None

    def _take(self, fit: Fit, answer: Answer) -> None:
        """Record a dry run's answer; if the candidate did not pass, print why."""
        measured = answer.measured
        self._last_seconds = answer.seconds if measured is None else measured.own_seconds
        self._spent_seconds += self._last_seconds
        self.made += 1
        if measured is not None and (recommendation := _with_measured(self._question, fit, measured)).verified:
            self.passed.append((fit, recommendation))
            return
        why = f"out of memory ({answer.ended})" if answer.ended else "over the memory budget"
        self._runner.say(f"{counted(fit.rows, 'row')} of {fit.length} tokens: {why}")
        self._most_bytes = LESS_AFTER_A_DEATH * fit.peak_bytes

    def _pays(self, fit: Fit) -> bool:
        """Whether another dry run probably saves more time than it costs, within planning's share of the training."""
        best, recommendation = _fastest(self.passed)
        training = (recommendation.step_seconds or 0.0) * _updates_of(self._question, recommendation)
        saved = LIKELY * (1 - fit.relative_cost / best.relative_cost / UNCERTAIN) * training
        within = self._spent_seconds + self._last_seconds <= max(LEAST_SECONDS, SHARE * training)
        return within and self._last_seconds < saved

    def _lateness(self, fit: Fit) -> float:
        """Key for the order of dry runs: 0, or the dry run's seconds if it takes longer than planning may."""
        dry_run_seconds, step_seconds = _expected_seconds(self._question, fit)
        training = step_seconds * _updates_of(self._question, recommendation_of(self._question, fit))
        most = max(LEAST_SECONDS, min(MOST_FIRST_SECONDS, SHARE * training))
        return dry_run_seconds if dry_run_seconds > most else 0.0

    def _job(self, fit: Fit) -> TrainJob:
        """The job of the dry run: the same settings, under a slightly smaller memory limit."""
        train, plan = self._question.train, recommendation_of(self._question, fit)
        limit = own_limit_bytes(train.memory_limit_gb)
        return TrainJob(
            str(self._question.model.folder), resolve(train, self._lora, plan), False, plan.memory_budget, None,
            keep_checkpoints=1, memory_limit_bytes=None if limit is None else int(limit * (1 - SPARED)),
            mlx_limit_bytes=plan.mlx_limit_bytes,
        )  # fmt: skip


def _expected_seconds(question: PlannedTraining, fit: Fit) -> tuple[float, float]:
    """Seconds of a dry run and of a mean step, from the speed of a large matrix product; 0 if that is unknown."""
    model, machine = question.model, question.machine
    if not machine.gemm_gflops:
        return 0.0, 0.0
    operations = (FLOPS_PER_WEIGHT + 2 * fit.checkpointing) * model.parameters
    token = operations / (ATTAINED * machine.gemm_gflops * 1e9)
    step, largest = (
        token * fit.rows_per_update * min(fit.length, question.rows.mean_tokens),
        token * fit.micro_batch.total,
    )
    base = base_bytes(model, backend_of(model, machine.backend, fit.dequantize))
    timed = 0.0 if step > DRY_RUN_SLOW_SECONDS else max(DRY_RUN_TIMED_SECONDS, step)
    updates = LARGEST_MADE - (largest > DRY_RUN_SLOW_SECONDS)
    return START_SECONDS + base / LOAD_BYTES_PER_SECOND + updates * largest + timed, step


def _updates_of(question: PlannedTraining, plan: Recommendation) -> int:
    rows_per_update = plan.batch_size * plan.gradient_accumulation
    return total_updates(question.rows.count, rows_per_update, plan.num_epochs, plan.max_steps)


def _whole_seconds(question: PlannedTraining, plan: Recommendation, step_seconds: float) -> float:
    """Time of all steps, validations, the adapter check and the evaluation.

    A forward pass takes half of a token's training time, or a third if training recomputes activations or trains all
    weights.
    """
    updates = _updates_of(question, plan)
    training = step_seconds * updates
    rows_per_update = min(question.rows.count, plan.batch_size * plan.gradient_accumulation)
    fed_tokens = max(1.0, rows_per_update * min(plan.max_seq_length, question.rows.mean_tokens))
    forward_seconds = step_seconds / fed_tokens / (2 + (plan.gradient_checkpointing or question.train.method in WHOLE))
    validations, valid_tokens = 1 + math.ceil(updates / plan.eval_steps), question.rows.valid_tokens
    read_tokens = validations * valid_tokens + PROOF_PASSES * min(PROVED_TOKENS, valid_tokens)
    evaluation = max(LEAST_EVALUATION_SECONDS, EVALUATION_SHARE * training)  # its time limit
    return training + forward_seconds * read_tokens + evaluation


def _with_measured(question: PlannedTraining, fit: Fit, measured: DryRun) -> Recommendation:
    """Add a dry run's measurements; verified if the process stayed within the budget (on a GPU: if mlx did)."""
    machine = question.machine
    if machine.backend == "cpu":
        enough = measured.footprint_bytes <= machine.memory_budget_bytes
    else:
        enough = measured.peak_bytes <= machine.memory_budget.mlx_bytes
    plan = recommendation_of(question, fit)
    return dataclasses.replace(
        plan,
        step_seconds=round(measured.update_seconds, 4),
        total_seconds=round(_whole_seconds(question, plan, measured.update_seconds), 1),
        measured_peak_bytes=measured.peak_bytes,
        own_order=measured.own_order,
        mlx_limit_bytes=mlx_limit_bytes(measured.peak_bytes, machine.memory_budget),
        measured_footprint_bytes=measured.footprint_bytes,
        margin_bytes=0,
        basis=DRY_RUN,
        verified=enough,
    )


def _fastest(passed: list[tuple[Fit, Recommendation]]) -> tuple[Fit, Recommendation]:
    """Of the candidates about as fast as the fastest (rows per second), the one with the lowest predicted cost."""
    seconds_per_row = [(plan.step_seconds or math.inf) / fit.rows_per_update for fit, plan in passed]
    least = ALIKE * min(seconds_per_row)
    alike = [each for each, seconds in zip(passed, seconds_per_row, strict=True) if seconds <= least]
    return min(alike, key=lambda each: each[0].relative_cost)


def try_out(runner: DryRunner, model: ModelFiles, job: TrainJob, rows: str, seconds: float = 0.0) -> Answer | None:
    """Run the largest updates of the job under its limits; the answer is cached for ``rows`` (a digest).

    ``seconds``: the expected time, which is printed first. Returns None if the runner makes no dry runs.
    """
    path = answers_about("dry_runs", model.fingerprint, runner.machine) / f"{_key_of(job, rows)}.json"
    cached = read_answer(path, Answer)
    if cached is not None or not runner.module:
        return cached
    about = f", about {duration_text(seconds)}" if seconds else ""
    runner.say(f"dry run of the largest updates{about}: {memory_shape(job.settings)}")
    with scratch_folder(paths.OUTPUT) as scratch:
        file = scratch / "job.json"
        write_record(file, job)
        most = most_bytes(job.memory_budget.total_bytes, job.memory_limit_bytes)
        began = time.monotonic()
        lines, ended = run_lines(runner.module, [str(file), str(scratch)], MOST_SECONDS, most)
    answer = _answer_of(lines, ended, time.monotonic() - began)
    if answer.measured is not None:
        peak = size_text(answer.measured.peak_bytes)
        runner.say(f"dry run: {answer.measured.update_seconds:.2f} s per step, peak {peak}")
    # If the kernel killed the process, or it has no limit of its own, other programs may have caused it.
    limited, by_kernel = job.memory_limit_bytes is not None, ended.startswith(f"{KILLED} {signal.SIGKILL:d}")
    own_fault = ended.startswith(PASSED_CAP) or (answer.ran_out_of_memory and limited and not by_kernel)
    if answer.measured is not None or own_fault:
        keep_answer(path, answer)
    return answer


def most_bytes(budget_bytes: int, own_limit_bytes: int | None = None, platform: str = sys.platform) -> int | None:
    """Memory limit of a dry run on macOS, as in child.py; None on other systems.

    Without train.memory_limit_gb it is a little above the budget: mlx keeps unused buffers up to its limit.
    """
    return own_limit_bytes or int(CAP_SLACK * budget_bytes) or None if platform == "darwin" else None


def _key_of(job: TrainJob, rows: str) -> str:
    """A hash of all settings that affect the measurement; learning rate and intervals do not."""
    settings = dataclasses.replace(
        job.settings, learning_rate=0.0, warmup_steps=0, schedule="", save_steps=1, eval_steps=1, log_steps=1,
        max_loss_jump=None, max_grad_norm=1.0, weight_decay=0.0, early_stopping_patience=None,
    )  # fmt: skip
    return digest_of(f"{rows} {dataclasses.asdict(dataclasses.replace(job, settings=settings))}")


def _answer_of(lines: list[str], ended: str, seconds: float) -> Answer:
    try:
        return Answer(from_json(DryRun, json.loads(lines[-1])), "", False, seconds)
    except (IndexError, ValueError, TypeError):
        return Answer(None, ended or "it gave no answer", ran_out_of_memory(ended), seconds)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder, if possible in ``parent``, which has room for checkpoints."""
    prefix = f"{PREFIX}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent if parent.is_dir() else None) as folder:
        yield Path(folder)


def remove_remains(parent: Path) -> None:
    """Remove folders of killed plans: the process whose number they carry no longer exists."""
    for folder in parent.glob(f"{PREFIX}*"):
        process = folder.name.removeprefix(PREFIX).partition("-")[0]
        if not (process.isdecimal() and psutil.pid_exists(int(process))):
            shutil.rmtree(folder, ignore_errors=True)
