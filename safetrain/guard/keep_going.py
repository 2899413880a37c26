"""Trains to the end: supervises the process, explains its death, and goes on by itself where something can be changed.

After running out of memory with less memory (ladder.py), after the GPU watchdog with shorter work (gpu_watchdog.py).
"""

import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from safetrain.core.again import DVC, RUN
from safetrain.core.errors import ModelError, RunDied, SafetrainError
from safetrain.core.memory.bounds import BoundKey, MemoryBound, forget_bounds, key_of, remember_bound
from safetrain.core.memory.budget import OWN_LIMIT
from safetrain.core.memory.terms import padded
from safetrain.core.model.files import read_model_files
from safetrain.core.protocol.events import Event, Finished
from safetrain.core.protocol.flight import FlightRecord, read_flight
from safetrain.core.protocol.journal import DIED, STARTED, Journal
from safetrain.core.records.job import Rung, TrainJob, memory_shape
from safetrain.core.records.postmortem import PostMortem
from safetrain.core.records.record_files import write_record
from safetrain.core.records.settings import TrainSettings
from safetrain.core.storage.run_files import FLIGHT, JOB, JOURNAL, LADDER, RECORDER, rank_folder
from safetrain.guard.ending import Ending, WatchSettings
from safetrain.guard.gpu_watchdog import GPU_CAUSES, gpu_environment, in_words, next_gpu_rung
from safetrain.guard.ladder import (
    MOST_RUNGS,
    Ladder,
    describe_change,
    next_settings,
    on_rung,
    read_ladder,
)
from safetrain.guard.memory_left import PlannedUpdate, closed_form_bytes, fit_to_what_is_left
from safetrain.guard.postmortem import (
    advise,
    close_marker,
    completed,
    describe,
    explain,
    explain_unclosed,
    goes_on,
    open_marker,
    rank_in_words,
)
from safetrain.guard.sampling import MACHINE, limit_now
from safetrain.guard.supervisor import supervise, who_started_us

SET_PARAM = ("-S", "--set-param")  # of dvc exp run
LOADING = ("start", "load data", "load model", "resume")
SAID_BY_ITSELF = ("stopped", "refused", "bad_update", "disk_full")
LOOK_FIRST = "look at the update's rows first; the same command alone ends there again, and 'next' goes on without it"


@dataclass(frozen=True)
class RunOptions:
    """What a training is run with, beside its job."""

    command: tuple[str, ...]  # that starts the training process
    output: Path
    locks: tuple[int, ...]
    hang_seconds: float
    may_shorten: bool
    planned: PlannedUpdate  # what the plan knows of its memory
    keep_awake: bool = False  # the machine, where it would sleep
    hostfile: Path | None = None  # of mlx.launch, where not all ranks are on this machine
    launcher: tuple[str, ...] = ()  # that starts mlx.launch then


@dataclass(frozen=True)
class Relief:
    """How a training goes on by itself after a sudden end."""

    job: TrainJob
    change: str  # in words


class ToldError(SafetrainError):
    """An error of the training process, in its own words and with its own exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def keep_going(
    job: TrainJob, options: RunOptions, show: Callable[[Event], None], say: Callable[[str], None]
) -> Finished:
    """Train, over as many processes as it takes; raises ToldError or RunDied when it cannot go on by itself."""
    journal = Journal(options.output / FLIGHT / JOURNAL)
    show, say = journal.showing(show), journal.saying(say)
    before = explain_unclosed(options.output, command_again())
    if before is not None:
        say(f"the training before this one ended suddenly:\n{describe(before)}")
    asked, limit = job.settings, limit_now(job.survival.memory_limit_bytes)
    ladder = read_ladder(options.output, asked, limit.size_bytes, may_shorten=options.may_shorten)
    if ladder is not None:
        job = _where_it_stood(job, ladder, say)
    job = fit_to_what_is_left(job, options.planned, say)
    restarts, begun = job.survival.restart, False  # once a restart has begun, another attempt must continue it
    while True:
        journal.note(STARTED)
        ending = _attempt(job, options, show)
        finished = completed(options.output, ending)
        if finished is not None:
            close_marker(options.output)
            (options.output / LADDER).unlink(missing_ok=True)
            _unlearn(job, options)
            return finished
        starts_over = job.survival.restart and not ending.began
        begun = begun or ending.began
        again = with_override(command_again(), "train.restart=false") if restarts and begun else command_again()
        found = explain(options.output, ending, again, starts_over=starts_over)
        journal.note(DIED, found.title, step=found.step)
        close_marker(options.output)
        if found.is_memory and not job.survival.oversize:  # train.oversize: it was known not to fit
            _learn(job, options, found)
        relief = None if ending.signal_passed_on else _relief(job, options, found)
        if found.cause == "bad_update":
            found = advise(options.output, found, LOOK_FIRST, with_override(again, "train.on_bad_update=skip"))
        if relief is None:
            raise _error(_at_the_bottom(job, options, found) if found.is_memory else found, ending)
        goes_on(options.output, found, relief.change)
        survival = dataclasses.replace(job.survival, restart=job.survival.restart and not ending.began)
        job = dataclasses.replace(relief.job, survival=survival)
        now = memory_shape(job.settings)
        taken = Ladder(memory_shape(asked), limit.size_bytes, now, job.rungs, job.gpu_rungs)
        write_record(options.output / LADDER, taken)  # for the next time that the same command is run
        told = "the training ran out of memory" if found.is_memory else "the training died"
        say(f"{told}:\n{describe(found, with_next=False)}")
        say(f"going on by itself with {relief.change}")


def command_again() -> str:
    """The command that somebody typed to get here."""
    if os.environ.get("DVC_STAGE"):
        return _dvc_command()
    return os.environ.get(RUN) or shlex.join(["python", "-m", "stages.train", *sys.argv[1:]])


def _dvc_command() -> str:
    """The command line of dvc itself: repeated without its -f, it might only put back a result from its cache."""
    starter = who_started_us()
    try:
        words = starter.cmdline() if starter is not None else []
    except psutil.Error:
        words = []
    place = next((number for number, word in enumerate(words) if Path(word).name == "dvc"), None)
    return DVC if place is None else shlex.join(["dvc", *words[place + 1 :]])


def with_override(command: str, override: str) -> str:
    """The same command with one key set otherwise."""
    key = override.partition("=")[0]
    words = [word for word in shlex.split(command) if not word.startswith((f"{key}=", f"--set-param={key}="))]
    if words[0] == "dvc":
        kept = words[3:] if words[1:3] == ["exp", "run"] else []
        pairs = pairwise([*kept, ""])  # -S of a key that is set anew has lost its value above
        kept = [word for word, value in pairs if word not in SET_PARAM or "=" in value]
        return shlex.join(["dvc", "exp", "run", *kept, "-S", override])
    return shlex.join([*words, override])


def _attempt(job: TrainJob, options: RunOptions, show: Callable[[Event], None]) -> Ending:
    flight = options.output / FLIGHT
    write_record(flight / JOB, job)
    limit = limit_now(job.survival.memory_limit_bytes)
    open_marker(options.output, command_again(), options.hang_seconds, limit)
    guarding = WatchSettings(
        flight,
        job.survival.memory_limit_bytes,
        options.hang_seconds,
        options.locks,
        keep_awake=options.keep_awake,
        environment=gpu_environment(len(job.gpu_rungs), os.environ),
        ranks=job.ranks,
        backend=job.rank_backend,
        hostfile=options.hostfile,
        launcher=options.launcher,
    )
    return supervise(options.command, guarding, show)


def _where_it_stood(job: TrainJob, ladder: Ladder, say: Callable[[str], None]) -> TrainJob:
    """The job with what its unfinished run had already given up."""
    if ladder.rungs:
        say(f"this run has run out of memory before and goes on with {describe_change(ladder.asked, ladder.now)}")
        job = dataclasses.replace(
            job, settings=on_rung(job.settings, ladder.now), rungs=ladder.rungs, mlx_limit_bytes=None
        )
    if ladder.gpu_rungs:
        say(f"the GPU watchdog has ended this run before; it goes on as then ({ladder.gpu_rungs[-1]})")
    return dataclasses.replace(job, gpu_rungs=ladder.gpu_rungs)


def _relief(job: TrainJob, options: RunOptions, found: PostMortem) -> Relief | None:
    """How to go on; None where only a person can decide."""
    if found.cause in GPU_CAUSES:
        rung = next_gpu_rung(len(job.gpu_rungs))
        if rung is None:
            return None
        told = f"step {found.step}: {found.title}: {in_words(rung)}"
        return Relief(dataclasses.replace(job, gpu_rungs=(*job.gpu_rungs, told)), in_words(rung))
    smaller = _smaller(job, options, found) if found.is_memory else None
    if smaller is None:
        return None
    failed = Rung(memory_shape(job.settings), found.step, found.title)
    change = describe_change(failed.failed, memory_shape(smaller))
    return Relief(dataclasses.replace(job, settings=smaller, rungs=(*job.rungs, failed), mlx_limit_bytes=None), change)


def _smaller(job: TrainJob, options: RunOptions, found: PostMortem) -> TrainSettings | None:
    if len(job.rungs) >= MOST_RUNGS:
        return None
    quantized = read_model_files(Path(job.base)).quantization_bits is not None
    loading = _is_loading(found)
    smaller = next_settings(job.settings, quantized=quantized, may_shorten=options.may_shorten, loading=loading)
    while smaller is not None and smaller.batch_size > 1 and _still_holds(smaller, found, options.planned):
        smaller = next_settings(smaller, quantized=quantized, may_shorten=options.may_shorten)
    return smaller


def _at_the_bottom(job: TrainJob, options: RunOptions, found: PostMortem) -> PostMortem:
    """The post-mortem with advice for when there is no rung left."""
    raised = f"a larger {OWN_LIMIT}, or " if found.limit_name == OWN_LIMIT else ""
    if (
        next_settings(job.settings, quantized=False, may_shorten=True) is None
        or options.may_shorten
        or _is_loading(found)
    ):
        return advise(
            options.output, found, f"{raised}a smaller or more strongly quantized model, or more memory", None
        )
    consented = with_override(found.next_command, "train.oom_may_shorten=true")
    return advise(
        options.output, found, f"{raised}shorter rows, the last thing left to try, which needs your consent", consented
    )


def _is_loading(found: PostMortem) -> bool:
    return found.phase.removeprefix("after ") in LOADING


def _still_holds(settings: TrainSettings, found: PostMortem, planned: PlannedUpdate) -> bool:
    """Whether the micro-batch that died would be made again: ``batch_size`` longest rows hold as many tokens."""
    longest = min(settings.max_seq_length - 1, planned.largest_update.longest)
    return 0 < found.tokens <= settings.batch_size * padded(longest)


def _learn(job: TrainJob, options: RunOptions, found: PostMortem) -> None:
    """Remember for the next plan how much memory was not enough for mlx."""
    flight = read_flight(rank_folder(options.output / FLIGHT, found.rank or 0) / RECORDER)
    if flight is None or not flight[1] or not found.predicted_peak_bytes:
        return
    own_limit = job.survival.memory_limit_bytes is not None
    available = not_enough_bytes(flight[1][-1], found, options.planned.backend, own_limit=own_limit)
    predicted = closed_form_bytes(job, options.planned)
    remember_bound(MemoryBound(_bound_key(job, options), predicted, available))


def _unlearn(job: TrainJob, options: RunOptions) -> None:
    """A training that ran to its end as planned disproves the bounds of earlier failures like it."""
    flight = read_flight(options.output / FLIGHT / RECORDER)
    if job.rungs or flight is None or not flight[1]:
        return
    with contextlib.suppress(ModelError):  # the base is gone, which does not harm what was trained
        forget_bounds(_bound_key(job, options), closed_form_bytes(job, options.planned))


def _bound_key(job: TrainJob, options: RunOptions) -> BoundKey:
    fingerprint = read_model_files(Path(job.base)).fingerprint
    return key_of(fingerprint, options.planned.backend, job.settings.method, job.settings.lora.rank)


def not_enough_bytes(last: FlightRecord, found: PostMortem, backend: str, *, own_limit: bool) -> int:
    """How much memory mlx had, which was not enough; on a CUDA device, which has no limit of ours, its peak."""
    if backend == "cuda":
        return last.allocator.peak_bytes
    had = last.data_bytes if own_limit and last.data_bytes else last.footprint_bytes
    limited = found.limit_name != MACHINE  # of the machine's memory other programs have a part
    most = found.limit_bytes if limited else found.footprint_bytes
    most = most if own_limit else most // found.ranks  # of any other limit each rank has its share
    return most - max(0, had - last.allocator.active_bytes)


def _error(found: PostMortem, ending: Ending) -> SafetrainError:
    if ending.failed is not None and found.cause == "stopped":
        first = ending.failed.message.splitlines()[0]
        return ToldError(f"{first}\n  do:       {found.next_command}", ending.failed.exit_code)
    if ending.failed is not None and found.cause == "bad_update":
        return ToldError(f"{ending.failed.message}\n  next:     {found.next_command}", ending.failed.exit_code)
    if ending.failed is not None and found.cause in SAID_BY_ITSELF:
        who = f"\n  who:      {rank_in_words(found)}" if found.rank is not None else ""
        return ToldError(ending.failed.message + who, ending.failed.exit_code)
    return RunDied(found.exit_code, f"The training process died: {found.title}.\n{describe(found)}")
