"""The beginning of a training as it will be: `python -m safetrain.engine.rehearse JOB SCRATCH`

The job's own rows, limits and model; everything a training does, its largest update first of all. A process of its own,
because it may die: that is an answer. Prints one line of JSON, and leaves nothing outside the scratch folder.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from safetrain.core.child_process import be_first_choice_of_the_kernel, die_with_parent, limit_memory
from safetrain.core.data.row_order import Cursor, largest_windows
from safetrain.core.errors import SafetrainError, TrainingError
from safetrain.core.flight import Recorder
from safetrain.core.job import TrainJob, read_job
from safetrain.core.probes import Rehearsed
from safetrain.core.process_memory import most_footprint_bytes
from safetrain.core.settings import updates_per_epoch
from safetrain.core.tracebacks import keep_traceback
from safetrain.engine.blas import load_fast_blas
from safetrain.engine.worker import Loaded, load

if TYPE_CHECKING:
    from safetrain.engine.batches import Update  # loads mlx
    from safetrain.engine.run import Run

MOST_TIMED, ENOUGH_SECONDS = 6, 1.5  # of updates
RATE = 1e-6  # what is learnt is thrown away


def main(job_path: str, scratch: str) -> int:
    """Rehearse the job; the exit code of an error that a person can do something about, told on one line."""
    job = read_job(Path(job_path))
    die_with_parent(os.getppid())
    be_first_choice_of_the_kernel()
    limit_memory(job.survival.memory_limit_bytes)
    try:
        loaded = load(job)
        load_fast_blas()  # before anything imports mlx
        print(json.dumps(dataclasses.asdict(rehearse(job, loaded, Path(scratch)))), flush=True)
    except SafetrainError as error:
        kept = keep_traceback(error)
        print(f"{error.what} (traceback: {kept})" if kept else error.what, file=sys.stderr)
        return error.exit_code
    return 0


def rehearse(job: TrainJob, loaded: Loaded, scratch: Path) -> Rehearsed:
    """Validate, update, save, and meet the largest updates; then time a few."""
    start = time.monotonic()
    import mlx.core as mx

    from safetrain.engine.model import on_cpu
    from safetrain.engine.run import record, save, update_of

    run = _open(job, loaded, scratch)
    record(run, None, RATE, validate=True)
    peaks = [_update(run, update_of(run, Cursor(0, 0)))]
    record(run, None, RATE, validate=True)
    save(run)
    settings, rows = loaded.settings, loaded.rows.train
    largest = largest_windows(rows, settings.rows_per_update, settings.num_epochs, settings.max_steps)
    peaks += [_update(run, _largest_part(run, window)) for window in largest]
    seconds, tokens, windows = 0.0, 0, updates_per_epoch(len(rows), settings.rows_per_update)
    for window in range(min(1, windows - 1), min(1 + MOST_TIMED, windows)):  # the first has the longest row of all
        update = update_of(run, Cursor(0, window))
        if not on_cpu():
            peaks.append(_update(run, update))  # compiles its shapes
        began = time.perf_counter()
        peaks.append(_update(run, update))
        seconds, tokens = seconds + time.perf_counter() - began, tokens + update.input_tokens
        if seconds > ENOUGH_SECONDS:
            break
    mean_tokens = int(rows.inputs().sum(dtype=np.int64)) / windows
    device = "cpu" if on_cpu() else str(mx.default_device())
    update_seconds, own_seconds = seconds / tokens * mean_tokens, time.monotonic() - start
    return Rehearsed(max(peaks), most_footprint_bytes(), update_seconds, device, own_seconds)


def _open(job: TrainJob, loaded: Loaded, scratch: Path) -> "Run":
    """The training, told and limited as it will be, with the longest rows alone to validate on."""
    from safetrain.engine.run import Job, Watcher, open_run
    from safetrain.engine.state import RunIdentity

    output = scratch / "output"
    output.mkdir()
    settings, valid = loaded.settings, loaded.rows.valid
    longest = valid.take(valid.by_length[: settings.rows_per_update])
    rehearsed = Job(
        base=Path(job.base),
        train=loaded.rows.train,
        valid=longest,
        settings=settings,
        identity=RunIdentity("rehearsal", "", "", ""),
        output=output,
        adapters=scratch / "adapters",
        restart=True,
        keep_checkpoints=job.survival.keep_checkpoints,
        disk_wait_minutes=job.survival.disk_wait_minutes,
        mlx_limit_bytes=job.mlx_limit_bytes or 0,
        taught=loaded.rows.taught,
    )
    return open_run(rehearsed, Watcher(lambda *_: None, lambda _: None, lambda: 0, Recorder(scratch / "recorder.bin")))


def _update(run: "Run", update: "Update") -> int:
    """Make and count an update; the peak of mlx's memory in it."""
    import mlx.core as mx

    from safetrain.engine.run import count
    from safetrain.engine.training import make_update

    began = time.perf_counter()
    _, result, refused = make_update(run, update, RATE)
    if refused is not None:
        raise TrainingError(f"An update cannot be applied: {refused.fault}")
    mx.eval(run.model.module.trainable_parameters(), run.optimizer.state)
    count(run, update, result, time.perf_counter() - began)
    return mx.get_peak_memory()


def _largest_part(run: "Run", window: list[int]) -> "Update":
    """The largest micro-batch of these rows, and another one, where there is one: any number holds what two hold."""
    from safetrain.engine.batches import fill, update_of_rows

    data = run.job.train
    groups = fill(data, window, run.layout)
    groups.sort(key=lambda rows: -int(data.inputs(rows).sum()))
    return update_of_rows(data, groups[:2], run.layout)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
