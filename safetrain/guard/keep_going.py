"""Trains to the end: supervises the process, explains its death, and restarts it with safer settings if there are any.

After running out of memory, the new settings use less; after the GPU watchdog, shorter GPU work (ladder.py).
"""

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from safetrain.core.errors import InterruptedRun, RunDied
from safetrain.core.events import Died, Event, Journal, Said, Started
from safetrain.core.formatting import RUN, dvc
from safetrain.core.memory.system import OWN_LIMIT
from safetrain.core.memory.terms import padded
from safetrain.core.records.run_state import PostMortem, describe, describe_rank, is_finished
from safetrain.core.records.settings import Rung, TrainJob, TrainSettings, memory_shape
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.core.storage.paths import JOB, JOURNAL, LADDER
from safetrain.guard.ladder import (
    GPU_CAUSES,
    MOST_RUNGS,
    Ladder,
    PlannedUpdate,
    describe_change,
    fit_to_available_memory,
    gpu_environment,
    next_gpu_rung,
    next_settings,
    read_ladder,
)
from safetrain.guard.postmortem import close_marker, explain, explain_unclosed, open_marker, write_postmortem
from safetrain.guard.process import Ending, WatchSettings, limit_now
from safetrain.guard.supervisor import supervise, who_started_us

LOADING = ("start", "load data", "load model", "resume")
REPORTED = ("stopped", "refused", "bad_update", "disk_full")  # the training process itself explains these causes
REPAIR_ROWS = (
    "the same command stops here again. Repair the rows of this step or lower train.learning_rate, then 'safetrain "
    "discard'; or allow a jump of the loss with a larger train.max_loss_jump"
)


def keep_going(job: TrainJob, watch: WatchSettings, planned: PlannedUpdate, show: Callable[[Event], None]) -> None:
    """Train, restarting the process as needed; raises RunDied or InterruptedRun when a person has to decide."""
    output, journal = watch.flight.parent, Journal(watch.flight / JOURNAL)

    def record(event: Event) -> None:
        journal.take(event)
        show(event)

    def say(text: str) -> None:
        record(Said(text))

    previous = explain_unclosed(output, command_again())
    if previous is not None:
        say(f"the previous training run ended suddenly:\n{describe(previous)}")
    asked, limit = memory_shape(job.settings), limit_now(job.memory_limit_bytes)
    ladder = read_ladder(output, job.settings, limit.size_bytes)
    if ladder is not None:
        job = _on_ladder(job, ladder, say)
    job = fit_to_available_memory(job, planned, say)
    while True:
        journal.write(Started())
        ending = _attempt(job, watch, record)
        if _is_complete(output, ending):
            close_marker(output)
            (output / LADDER).unlink(missing_ok=True)
            return
        death = explain(output, ending, command_again())
        journal.write(Died(death.title, death.step))
        close_marker(output)
        relief = None if ending.signal_passed_on else _relief(job, planned, death)
        if relief is None:
            raise _error(_with_advice(output, death), ending)
        job, change = relief
        next_step = f"nothing: the run continued by itself with {change}"
        write_postmortem(output, dataclasses.replace(death, advice="", next_command=next_step, went_on=True))
        rungs = Ladder(asked, limit.size_bytes, memory_shape(job.settings), job.rungs, job.gpu_rungs)
        write_record(output / LADDER, rungs)  # for the next run of the same command
        cause = "the training ran out of memory" if death.is_memory else "the training died"
        say(f"{cause}:\n{describe(death, with_next=False)}")
        say(f"continuing by itself with {change}")


def command_again() -> str:
    """Return the command that the user typed to start this run."""
    if os.environ.get("DVC_STAGE"):
        return _dvc_command()
    stage = ["python", "-m", "stages.train"] if Path("stages/train.py").is_file() else ["safetrain", "stage", "train"]
    return os.environ.get(RUN) or shlex.join([*stage, *sys.argv[1:]])


def _dvc_command() -> str:
    """Return dvc's own command line: without its -f, dvc might only restore a cached result."""
    starter = who_started_us()
    try:
        words = starter.cmdline() if starter is not None else []
    except psutil.Error:
        words = []
    place = next((number for number, word in enumerate(words) if Path(word).name == "dvc"), None)
    return f"{dvc()} repro" if place is None else shlex.join([dvc(), *words[place + 1 :]])


def _attempt(job: TrainJob, watch: WatchSettings, show: Callable[[Event], None]) -> Ending:
    write_record(watch.flight / JOB, job)
    open_marker(watch.flight.parent, command_again(), watch.hang_seconds, limit_now(job.memory_limit_bytes))
    environment = gpu_environment(len(job.gpu_rungs), os.environ)
    return supervise(dataclasses.replace(watch, environment=environment), show)


def _is_complete(output: Path, ending: Ending) -> bool:
    """Whether the training is complete, even if the process died right after writing its results."""
    if ending.finished is not None:
        return True
    return ending.began and is_finished(output) and (output / paths.SUMMARY.name).is_file()


def _on_ladder(job: TrainJob, ladder: Ladder, say: Callable[[str], None]) -> TrainJob:
    """Put the job on the rung that its unfinished run had reached."""
    if ladder.rungs:
        say(f"this run ran out of memory before and continues with {describe_change(ladder.asked, ladder.now)}")
        settings = dataclasses.replace(job.settings, **dataclasses.asdict(ladder.now))
        job = dataclasses.replace(job, settings=settings, rungs=ladder.rungs, mlx_limit_bytes=None)
    if ladder.gpu_rungs:
        say(f"the GPU watchdog ended this run before; it continues with {ladder.gpu_rungs[-1]}")
    return dataclasses.replace(job, gpu_rungs=ladder.gpu_rungs)


def _relief(job: TrainJob, planned: PlannedUpdate, death: PostMortem) -> tuple[TrainJob, str] | None:
    """Return the job to continue with, and the change in words; None if a person has to decide."""
    if death.cause in GPU_CAUSES:
        gpu_rung = next_gpu_rung(len(job.gpu_rungs))
        if gpu_rung is None:
            return None
        line = f"step {death.step}: {death.title}: {gpu_rung}"
        return dataclasses.replace(job, gpu_rungs=(*job.gpu_rungs, line)), gpu_rung
    smaller = _smaller(job, planned, death) if death.is_memory else None
    if smaller is None:
        return None
    rung = Rung(memory_shape(job.settings), death.step, death.title)
    change = describe_change(rung.failed, memory_shape(smaller))
    return dataclasses.replace(job, settings=smaller, rungs=(*job.rungs, rung), mlx_limit_bytes=None), change


def _smaller(job: TrainJob, planned: PlannedUpdate, death: PostMortem) -> TrainSettings | None:
    """Find the next rung whose micro-batches are smaller than the one that died; None at the bottom."""
    if len(job.rungs) >= MOST_RUNGS:
        return None
    smaller = next_settings(job.settings, quantized=planned.is_quantized, loading=_is_loading(death))
    while smaller is not None and smaller.batch_size > 1:
        longest = min(smaller.max_seq_length - 1, planned.largest_update.longest)
        if not 0 < death.tokens <= smaller.batch_size * padded(longest):
            break
        smaller = next_settings(smaller, quantized=planned.is_quantized)
    return smaller


def _with_advice(output: Path, death: PostMortem) -> PostMortem:
    """Add advice to the post-mortem of a training that does not continue by itself."""
    if death.cause == "bad_update":
        return write_postmortem(output, dataclasses.replace(death, advice=REPAIR_ROWS))
    if not death.is_memory:
        return death
    or_limit = f"a larger {OWN_LIMIT}, or " if death.limit_name == OWN_LIMIT else ""
    advice = f"{or_limit}a smaller or more strongly quantized model, or more memory"
    if not _is_loading(death):
        advice += ", or shorter rows: 'safetrain discard', then a smaller train.max_seq_length"
    return write_postmortem(output, dataclasses.replace(death, advice=advice))


def _is_loading(death: PostMortem) -> bool:
    return death.phase.removeprefix("after ") in LOADING


def _error(death: PostMortem, ending: Ending) -> RunDied | InterruptedRun:
    """Choose the error to end with; a message and exit code from the training process take precedence."""
    failed = ending.failed
    if failed is None or death.cause not in REPORTED:
        return RunDied(f"The training process died: {death.title}.\n{describe(death)}", exit_code=death.exit_code)
    if death.cause == "stopped":
        text = f"{failed.message.splitlines()[0]}\n  continue with: {death.next_command}"
        return InterruptedRun(failed.exit_code - 128, text)
    who = f"\n  who:      {describe_rank(death)}" if death.rank is not None else ""
    return RunDied(failed.message + who, exit_code=failed.exit_code)
