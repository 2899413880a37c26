"""The training process: `python -m safetrain.engine.worker`, started and watched by a supervisor that never loads mlx.

It reads a job file, trains, writes everything there is to write, and says what happens over a pipe. It may die at any
moment: what it was doing is in the flight recorder.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetrain.core.data.row_order import largest_update
from safetrain.core.data.training_rows import TrainingRows, load_training_rows
from safetrain.core.errors import DiskFullError, EngineError, SafetrainError
from safetrain.core.formatting import counted
from safetrain.core.memory.run import RunMemory, in_rectangles, memory_of_run, require_fit
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.protocol.events import Begun, EventPipe, Failed, Finished, Recorded, Said
from safetrain.core.protocol.flight import NOTHING, Edge, Phase, Recorder
from safetrain.core.records.job import TrainJob, memory_shape, read_job
from safetrain.core.records.metrics import StepRecord, append_csv, start_csv
from safetrain.core.records.reports import TrainingOutcome, write_record, write_summary
from safetrain.core.records.settings import LargestUpdate, TrainSettings, total_updates, usual_warmup
from safetrain.core.signals import StopRequest, stop_on_signal
from safetrain.core.storage import paths
from safetrain.core.storage.files import DISK_FULL
from safetrain.core.storage.run_files import JOB, RECORDER
from safetrain.core.tracebacks import with_traceback
from safetrain.engine.blas import Blas, load_fast_blas
from safetrain.engine.child_process import set_up_child

if TYPE_CHECKING:
    from safetrain.engine.training import Result  # loads mlx

MEMORY_ONLY = ("batch_size", "gradient_accumulation", "gradient_checkpointing", "dequantize_base")


def main(arguments: list[str]) -> int:
    """``arguments``: the flight folder, the descriptor of the event pipe, the supervisor's process id."""
    flight, pipe = Path(arguments[0]), EventPipe(int(arguments[1]))
    job = read_job(flight / JOB)
    set_up_child(int(arguments[2]), flight, job.survival.memory_limit_bytes)
    with stop_on_signal() as stop:
        return run_job(job, flight / RECORDER, pipe, stop)


def run_job(job: TrainJob, record: Path, pipe: EventPipe, stop: StopRequest) -> int:
    """Train; tell an error that a person can do something about. Others end the process with their traceback."""
    try:
        _train(job, Recorder(record), pipe, stop)
    except SafetrainError as error:
        return _told(pipe, error, record.parent)
    except MemoryError as error:
        told = EngineError(f"out of memory: {error}")
        told.__cause__ = error
        return _told(pipe, told, record.parent)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        where = str(error.filename or Path.cwd())
        return _told(pipe, DiskFullError("The disk is full.", where=where, do="free some space"), record.parent)
    return 0


def _told(pipe: EventPipe, error: SafetrainError, flight: Path) -> int:
    """Tell the supervisor of it; gives the exit code."""
    pipe.send(Failed(type(error).__name__, with_traceback(error, flight), error.exit_code))
    return error.exit_code


@dataclass(frozen=True)
class Loaded:
    """Everything that is read before mlx is."""

    files: ModelFiles
    rows: TrainingRows
    settings: TrainSettings
    updates: int


def _train(job: TrainJob, recorder: Recorder, pipe: EventPipe, stop: StopRequest) -> None:
    with recorder.phase(Phase.LOAD_DATA):
        loaded = load(job, lambda: recorder.write(Phase.LOAD_DATA, Edge.BEFORE, NOTHING))
    with recorder.phase(Phase.LOAD_MODEL):
        blas = load_fast_blas()  # before anything imports mlx
        from safetrain.engine.backend import device
        from safetrain.engine.randomness import draws
        from safetrain.engine.run import Job, Watcher
        from safetrain.engine.state import RunIdentity
        from safetrain.engine.training import finish, train
    settings = loaded.settings
    memory = run_memory(job, loaded, device().name)
    predicted = recorder.predicted_peak_bytes = memory.peak_bytes
    rows = loaded.rows
    digests = rows.train_digest, rows.valid_digest
    identity = RunIdentity(loaded.files.fingerprint, *digests, identity_of(settings), draws())

    def begin(records: list[StepRecord], resumed_from_step: int, adaptation: str) -> None:
        for stale in (paths.SUMMARY, paths.METRICS_JSON):  # of an earlier run
            stale.unlink(missing_ok=True)
        start_csv(paths.METRICS_CSV, records)
        pipe.send(Begun(loaded.updates, resumed_from_step, describe(loaded, predicted, blas, adaptation)))

    result = train(
        Job(
            base=Path(job.base),
            train=rows.train,
            valid=rows.valid,
            settings=settings,
            identity=identity,
            output=paths.OUTPUT,
            adapters=paths.ADAPTERS,
            restart=job.survival.restart,
            keep_checkpoints=job.survival.keep_checkpoints,
            disk_wait_minutes=job.survival.disk_wait_minutes,
            trace=job.survival.trace,
            mlx_limit_bytes=job.mlx_limit_bytes or memory.mlx_limit_bytes,
            shortened=any(rung.failed.max_seq_length > settings.max_seq_length for rung in job.rungs),
            taught=rows.taught,
        ),
        Watcher(begin, Metrics(pipe).record, lambda: stop.signal_number, recorder, lambda text: pipe.send(Said(text))),
    )
    with recorder.phase(Phase.FINISH):
        write_record(paths.METRICS_JSON, result.metrics)
        write_summary(paths.SUMMARY, settings, result.metrics, _outcome(job, loaded, result, predicted, blas.name))
        finish(paths.OUTPUT, identity, result)
    metrics = result.metrics
    ended = metrics.best_valid_loss, metrics.best_step, metrics.steps, loaded.updates
    pipe.send(Finished(*ended, result.skipped_updates, result.stopped_early))


def run_memory(job: TrainJob, loaded: Loaded, backend_name: str) -> RunMemory:
    """What the run will take; raises MachineError when that does not fit the machine's budget."""
    largest = largest_of(loaded, backend_name)
    found = memory_of_run(loaded.files, loaded.settings, largest, backend_name, job.memory_budget, job.planned)
    if not job.rungs and not job.survival.oversize:  # the ladder has its own end
        require_fit(found, loaded.settings, largest, job.memory_budget)
    return found


def largest_of(loaded: Loaded, backend_name: str) -> LargestUpdate:
    """Of this run, in the order of its own seed."""
    settings = loaded.settings
    return largest_update(
        loaded.rows.train,
        loaded.rows.valid,
        settings.rows_per_update,
        settings.num_epochs,
        settings.max_steps,
        seeds=(settings.seed,),
        rectangles=in_rectangles(loaded.files, backend_name),
    )


def _outcome(job: TrainJob, loaded: Loaded, result: "Result", predicted: int, blas: str) -> TrainingOutcome:
    return TrainingOutcome(
        base_model=job.base,
        train_rows=len(loaded.rows.train),
        trainable_parameters=result.trainable_parameters,
        resumed_from_step=result.resumed_from_step,
        trained_tokens=result.trained_tokens,
        elapsed_seconds=round(result.elapsed_seconds, 3),
        tokens_per_second=round(result.tokens_per_second, 1),
        peak_memory_bytes=result.peak_memory_bytes,
        peak_footprint_bytes=result.peak_footprint_bytes,
        predicted_peak_bytes=predicted,
        blas=blas,
        padding_share=round(result.padding_share, 4),
        skipped_updates=result.skipped_updates,
        stopped_early=result.stopped_early,
        memory_rungs=tuple(f"step {rung.at_step}: {rung.failed}: {rung.evidence}" for rung in job.rungs),
        gpu_rungs=job.gpu_rungs,
    )


class Metrics:
    """Writes the metrics file, and tells of each record."""

    def __init__(self, pipe: EventPipe) -> None:
        self._pipe, self._again = pipe, False

    def record(self, records: list[StepRecord]) -> None:
        """Append the newest; after a failure, half a line may be there, so the file is written anew."""
        again, self._again = self._again, True
        if again:
            start_csv(paths.METRICS_CSV, records)
        else:
            append_csv(paths.METRICS_CSV, records[-1])
        self._again = False
        self._pipe.send(Recorded(records[-1]))


def load(job: TrainJob, beat: Callable[[], None] = lambda: None) -> Loaded:
    """Read model headers and map the rows; raises SafetrainError for what cannot be used.

    ``beat`` is called again and again where that takes long.
    """
    base, settings = Path(job.base), job.settings
    files = read_model_files(base)
    rows = load_training_rows(base, settings.max_examples, settings.max_seq_length, beat)
    updates = total_updates(len(rows.train), settings.rows_per_update, settings.num_epochs, settings.max_steps)
    if job.warmup_is_recommended:  # the plan may have been for a longer run
        settings = dataclasses.replace(settings, warmup_steps=min(settings.warmup_steps, usual_warmup(updates)))
    return Loaded(files, rows, settings, updates)


def identity_of(settings: TrainSettings) -> str:
    """The settings that decide what is computed, as text.

    Not among them: how often it is logged or saved; what a bad update is and what to do about it (a run that one has
    stopped can go on with other answers); what only takes more or less memory, because rounding is all it changes.
    """
    neutral = dataclasses.replace(settings, log_steps=1, save_steps=1, on_bad_update="stop", max_loss_jump=None)
    value = dataclasses.asdict(neutral)
    kept = {key: found for key, found in value.items() if key not in MEMORY_ONLY}
    return json.dumps({**kept, "rows_per_update": settings.rows_per_update}, sort_keys=True)


def describe(loaded: Loaded, predicted_bytes: int, blas: Blas, adaptation: str) -> str:
    """The first words of a training."""
    settings, rows = loaded.settings, loaded.rows.train
    lost = (
        f"{counted(rows.cut_rows, 'row')} cut to {settings.max_seq_length} tokens, "
        f"{counted(rows.lost_labels, 'label')} lost\n"
    )
    return (lost if rows.cut_rows else "") + (
        f"training on {counted(len(rows), 'row')}: {memory_shape(settings).window} rows per update, "
        f"{counted(loaded.updates, 'update')}, {settings.optimizer}, {settings.schedule} learning rate to "
        f"{settings.learning_rate:g}, {trained(settings)}; expected peak of mlx {predicted_bytes / 2**30:.2f} GiB; "
        f"BLAS: {blas.name}; {adaptation}"
    )


def trained(settings: TrainSettings) -> str:
    """What is trained, in words."""
    layers = f"the top {counted(settings.lora.num_layers, 'block')}"
    if settings.method == "full":
        return f"all weights of {layers}"
    name = {"lora": "LoRA", "dora": "DoRA"}[settings.method]
    return f"{name} rank {settings.lora.rank} on {layers}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
