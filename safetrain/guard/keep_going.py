"""Trains to the end: supervises the process, explains its death, and restarts it with safer settings if there are any.

If the process ran out of memory, the next settings need less memory for the same rows per update; each such change is
one rung of the memory ladder. If the GPU watchdog ended it, the GPU work comes in shorter pieces.
"""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from safetrain.core.errors import InterruptedRun, MachineError, RunDied
from safetrain.core.events import Died, Event, Journal, Said, Started
from safetrain.core.formatting import RUN, run_again, size_text
from safetrain.core.memory.estimate import memory_of_run, mlx_limit_bytes
from safetrain.core.memory.system import OWN_LIMIT, Readings, host_room_bytes, read_memory
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.postmortem import PostMortem, describe, describe_rank
from safetrain.core.records.run_state import is_finished
from safetrain.core.records.schema import LOWER_RATE, WHOLE, rows_together
from safetrain.core.records.settings import (
    FEWEST_LABELS,
    GPU_RUNGS,
    MEASURED,
    Recommendation,
    Rung,
    TrainJob,
    TrainSettings,
    gpu_environment,
)
from safetrain.core.results import is_complete, publish
from safetrain.core.signals import AT_RUNG
from safetrain.core.storage.files import read_or_none, write_record
from safetrain.core.storage.paths import JOB, JOURNAL, LADDER, UNFINISHED, kept_runs
from safetrain.guard.postmortem import close_marker, explain, explain_unclosed, open_marker, write_postmortem
from safetrain.guard.process import Ending, WatchSettings, limit_now
from safetrain.guard.supervisor import supervise

REPORTED = ("stopped", "refused", "bad_update", "disk_full", "disk_error")  # explained by the training process
REPAIR_ROWS = (
    f"the same command stops here again. Repair the rows of this step or set {LOWER_RATE}, then 'safetrain discard'; "
    "or allow a jump of the loss with a larger train.max_loss_jump"
)


@dataclass(frozen=True)
class Ladder:
    """memory_ladder.json: the planned settings, the current ones, and the failed rungs between them."""

    asked: TrainSettings
    limit_bytes: int  # the memory limit that was too small
    now: TrainSettings
    rungs: tuple[Rung, ...]
    gpu_rungs: tuple[str, ...] = ()  # rungs taken after the GPU watchdog ended a process


def keep_going(job: TrainJob, watch: WatchSettings, plan: Recommendation, show: Callable[[Event], None]) -> None:
    """Train, restarting the process as needed; raises RunDied or InterruptedRun when a person has to decide."""
    output, journal = watch.flight.parent, Journal(watch.flight / JOURNAL)

    def record(event: Event) -> None:
        journal.write(event)
        show(event)

    def say(text: str) -> None:
        record(Said(text))

    previous = explain_unclosed(output, command_again())
    if previous is not None:
        say(f"the previous training run ended suddenly:\n{describe(previous)}")
    asked, limit = job.settings, limit_now(job.memory_limit_bytes)
    ladder = read_ladder(output, job.settings, limit.size_bytes)
    if ladder is not None:
        job = _on_ladder(job, ladder, say)
    job = fit_to_available_memory(job, plan, say)
    while True:
        journal.write(Started())
        write_record(watch.flight / JOB, job)
        open_marker(output, command_again(), limit_now(job.memory_limit_bytes))
        ending = supervise(replace(watch, environment=gpu_environment(len(job.gpu_rungs), os.environ)), record)
        if _is_complete(output, ending):
            close_marker(output)
            (output / LADDER).unlink(missing_ok=True)
            return
        death = explain(output, ending, command_again())
        journal.write(Died(death.title, death.step))
        close_marker(output)
        relief = None if ending.signal_passed_on else _relief(job, death)
        if relief is None:
            raise _error(_with_advice(output, death), ending)
        job, change = relief
        next_step = f"nothing: the run is continuing by itself with {change}"
        death = replace(death, advice="", next_command=next_step, went_on=True)
        write_postmortem(output, death)
        rungs = Ladder(asked, limit.size_bytes, job.settings, job.rungs, job.gpu_rungs)
        write_record(output / LADDER, rungs)  # for the next run of the same command
        say(f"{'the training ran out of memory' if death.is_memory else 'the training died'}:\n{describe(death)}")


def command_again() -> str:
    """Return the command that the user typed to start this run, or say which it is."""
    if kept_runs(Path.cwd()) is not None:
        return "the same experiment (dvc exp run with --queue or --temp)"
    if RUN not in os.environ and os.environ.get("DVC_STAGE"):
        return "the same dvc command"
    stage = ["python", "-m", "stages.train"] if Path("stages/train.py").is_file() else ["safetrain", "stage", "train"]
    return os.environ.get(RUN) or shlex.join([*stage, *sys.argv[1:]])


def _is_complete(output: Path, ending: Ending) -> bool:
    """Whether the training is complete, even if the process died right after writing its results."""
    if ending.finished is not None:
        return True
    if ending.began and is_complete(output):
        publish(output)
    return ending.began and is_finished(output) and not (output / UNFINISHED).exists()


def _on_ladder(job: TrainJob, ladder: Ladder, say: Callable[[str], None]) -> TrainJob:
    """Put the job on the rung that its unfinished run had reached."""
    if ladder.rungs:
        say(f"this run ran out of memory earlier and continues with {ladder.now}")
        job = replace(job, settings=ladder.now, rungs=ladder.rungs, mlx_limit_bytes=None)
    if ladder.gpu_rungs:
        say(f"the GPU watchdog ended this run earlier; it continues with {ladder.gpu_rungs[-1]}")
    return replace(job, gpu_rungs=ladder.gpu_rungs)


def _relief(job: TrainJob, death: PostMortem) -> tuple[TrainJob, str] | None:
    """Return the job to continue with, and the change in words; None if a person has to decide."""
    if death.cause in ("gpu_watchdog", "gpu_timeout"):
        if len(job.gpu_rungs) == len(GPU_RUNGS):
            return None
        words, environment = GPU_RUNGS[len(job.gpu_rungs)]
        gpu_rung = f"{words} ({' '.join(f'{name}={value}' for name, value in environment.items())})"
        return replace(job, gpu_rungs=(*job.gpu_rungs, f"step {death.step}: {death.title}: {gpu_rung}")), gpu_rung
    quantized = read_model_files(Path(job.base)).quantization_bits is not None
    smaller = next_settings(job.settings, quantized=quantized, loading=_is_loading(death))
    if smaller is None or not death.is_memory:
        return None
    rung = Rung(job.settings, death.step, death.title)
    return replace(job, settings=smaller, rungs=(*job.rungs, rung), mlx_limit_bytes=None), str(smaller)


def _with_advice(output: Path, death: PostMortem) -> PostMortem:
    """Add advice to the post-mortem of a run that does not resume on its own."""
    advice = REPAIR_ROWS
    if death.is_memory:
        or_limit = f"a larger {OWN_LIMIT}, or " if death.limit_name == OWN_LIMIT else ""
        advice = f"{or_limit}a smaller or more strongly quantized model, or more memory"
        if not _is_loading(death):
            advice += ", or shorter rows: 'safetrain discard', then a smaller train.max_seq_length"
    elif death.cause != "bad_update":
        return death
    return write_postmortem(output, replace(death, advice=advice))


def _is_loading(death: PostMortem) -> bool:
    return death.phase.removeprefix("after ") in ("start", "load data", "load model", "resume")


def _error(death: PostMortem, ending: Ending) -> RunDied | InterruptedRun:
    """Choose the error to end with; a message and exit code from the training process take precedence."""
    failed = ending.failed
    if failed is None or death.cause not in REPORTED:
        return RunDied(f"The training process died: {death.title}.\n{describe(death)}", exit_code=death.exit_code)
    if death.cause == "stopped":
        text = f"{failed.message.splitlines()[0]}\n  continue with: {death.next_command}"
        number = failed.exit_code - 128
        came_too = ending.signal_passed_on if number == AT_RUNG else 0  # while it saved at its rung
        return InterruptedRun(came_too or number, text)
    who = f"\n  who:      {describe_rank(death)}" if death.rank is not None else ""
    return RunDied(failed.message + who, exit_code=failed.exit_code)


# The ladder


def read_ladder(output: Path, settings: TrainSettings, limit_bytes: int) -> Ladder | None:
    """Read the ladder of a run; None if it was made for other settings, measured ones apart, or a smaller limit."""
    ladder = read_or_none(output / LADDER, Ladder)
    if ladder is None or limit_bytes > ladder.limit_bytes:
        return None
    measured = {name: getattr(ladder.asked, name) for name in MEASURED}
    return ladder if ladder.asked == replace(settings, **measured) else None


def next_settings(settings: TrainSettings, *, quantized: bool, loading: bool = False) -> TrainSettings | None:
    """Return the settings of the next rung; None at the bottom.

    The order: half the micro-batch and twice the accumulation (an odd micro-batch is divided by its smallest factor),
    gradient checkpointing, a base that stays quantized, a base that stays on disk; with the first of them, few logits.
    All give the same update up to rounding. While ``loading``, only the base can use less memory.
    """
    size, change, asked = settings.batch_size, replace, settings
    if not loading:
        settings = replace(settings, labels_at_once=FEWEST_LABELS)
    if size > rows_together(settings.method) and not loading:
        factor = next(f for f in range(2, size + 1) if size % f == 0)
        accumulation = settings.gradient_accumulation * factor
        return change(settings, batch_size=size // factor, gradient_accumulation=accumulation)
    if not settings.gradient_checkpointing and not loading:
        return change(settings, gradient_checkpointing=True)
    if quantized and settings.dequantize_base:
        return change(settings, dequantize_base=False)
    if settings.stream_base or settings.method in WHOLE:  # the base is already on disk, or is trained itself
        return settings if settings != asked else None
    return change(settings, stream_base=True, dequantize_base=False)


def fit_to_available_memory(job: TrainJob, plan: Recommendation, say: Callable[[str], None]) -> TrainJob:
    """Take the job down the ladder if it needs more memory than is free; raises MachineError if no rung fits.

    This does not check a CUDA device's memory; preflight does.
    """
    if plan.backend == "cuda":
        return job
    available, words, remedy = available_memory(job, plan.backend, read_memory())
    model = read_model_files(Path(job.base))
    settings: TrainSettings | None = job.settings
    while settings is not None and needed_bytes(model, settings, job, plan) > available:
        settings = next_settings(settings, quantized=model.quantization_bits is not None)
    if settings == job.settings:
        return job
    need = f"{size_text(needed_bytes(model, job.settings, job, plan))} are needed"
    if settings is None:
        raise MachineError("Not enough free memory for this training run.", expected=need, got=words, do=remedy)
    say(f"warning: {words} and {need}, so training starts with {settings}")
    rung = Rung(job.settings, 0, words)
    budget = replace(job.memory_budget, total_bytes=available)
    limit = mlx_limit_bytes(budget.mlx_bytes, budget)
    return replace(job, settings=settings, rungs=(*job.rungs, rung), mlx_limit_bytes=limit)


def available_memory(job: TrainJob, backend: str, host: Readings) -> tuple[int, str, str]:
    """Return a rank's available memory: bytes, a description, and how to get more.

    On a Mac, where free memory says little, that is the planned budget, or 0 at critical memory pressure.
    """
    remedy = f"close other programs, or plan for the free memory: {run_again()}"
    if backend == "metal":
        free = job.memory_budget.total_bytes
        if host.is_critical:
            return 0, f"macOS reports critical memory pressure ({host.free_percent} % free)", remedy
    else:
        free = host_room_bytes(host) // job.ranks_here
    each = f" for each of {job.ranks_here} ranks" if job.ranks_here > 1 else ""
    return free, f"only {size_text(free)} are free now{each}", remedy


def needed_bytes(model: ModelFiles, settings: TrainSettings, job: TrainJob, plan: Recommendation) -> int:
    """Memory of the whole process, with rows truncated to the settings' length."""
    largest = replace(plan.largest_update, longest=min(plan.longest_row, settings.max_seq_length) - 1)
    memory = memory_of_run(model, settings, largest, plan.backend, job.memory_budget, job.planned)
    return memory.needed_bytes + job.memory_budget.process_bytes
