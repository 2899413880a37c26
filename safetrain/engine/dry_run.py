"""Runs the largest updates of a training before it starts: `python -m safetrain.engine.dry_run JOB SCRATCH`

It uses the job's own model, rows and limits, and does everything a training does. It is a separate process because it
may run out of memory and die. It prints one line of JSON and writes only into the scratch folder.
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from safetrain.core.data.training_rows import Cursor, largest_windows, rows_at
from safetrain.core.errors import SafetrainError
from safetrain.core.memory.system import most_footprint_bytes
from safetrain.core.recorder import Recorder
from safetrain.core.records.settings import (
    DRY_RUN_SLOW_SECONDS,
    DRY_RUN_TIMED_SECONDS,
    DryRun,
    OwnOrder,
    TrainJob,
    updates_per_epoch,
)
from safetrain.core.storage.files import read_record, with_traceback
from safetrain.engine.child_process import die_with_parent, limit_memory, prefer_for_oom_kill
from safetrain.engine.cpu.blas import load_fast_blas
from safetrain.engine.job import Job, load_job, own_largest_update

if TYPE_CHECKING:
    from safetrain.engine.batches import Update  # loads mlx
    from safetrain.engine.run import TrainingRun

MOST_TIMED = 6  # updates
RATE = 1e-6  # small: the weights are discarded


Measured = tuple[int, float, int]  # an update's peak of mlx's allocator in bytes, its seconds, its tokens


def main(job_path: str, scratch: str) -> int:
    """Make the dry run. Print an error that a user can act on in one line and return its exit code."""
    train_job = read_record(Path(job_path), TrainJob)
    die_with_parent(os.getppid())
    prefer_for_oom_kill()
    limit_memory(train_job.memory_limit_bytes)
    try:
        job = load_job(train_job)
        load_fast_blas(depth_first=job.settings.stream_base)  # before anything imports mlx
        from safetrain.engine.backend import keep_to_room

        keep_to_room(train_job.memory_limit_bytes)
        print(json.dumps(dataclasses.asdict(dry_run(job, Path(scratch)))), flush=True)
    except SafetrainError as error:
        print(with_traceback(error, in_one_line=True), file=sys.stderr)
        return error.exit_code
    return 0


def dry_run(job: Job, scratch: Path) -> DryRun:
    """Make the largest updates, validate and save; then time a few ordinary updates if updates are quick."""
    start = time.monotonic()
    from safetrain.engine.backend import device
    from safetrain.engine.training import record, save

    run, made, own = _open(job, scratch), list[Measured](), list[Measured]()
    largest_updates = _largest_updates(run)
    for largest, is_own in largest_updates:
        made.append(_make(run, largest))
        own += made[-1:] if is_own else []
        if made[0][1] > DRY_RUN_SLOW_SECONDS:
            break
    record(run, RATE, validate=True)
    save(run)
    rows = job.train
    mean_tokens = int(rows.inputs().sum(dtype=np.int64)) / updates_per_epoch(len(rows), job.settings.rows_per_update)
    _, seconds, tokens = made[-1]
    if seconds / tokens * mean_tokens <= DRY_RUN_SLOW_SECONDS:
        timed = _time_updates(run)
    else:
        timed = made[1:] or made if device().on_cpu else [_make(run, largest)]  # on a GPU the first one compiles
    update_seconds = mean_tokens * statistics.median(seconds / tokens for _, seconds, tokens in timed)
    own_order, own_seconds = None, time.monotonic() - start
    if len(made) == len(largest_updates):
        own_order = OwnOrder(own_largest_update(job, device().name), max(peak for peak, _, _ in [*own, *timed]))
    peak = max(peak for peak, _, _ in [*made, *timed])
    return DryRun(peak, most_footprint_bytes(), update_seconds, device().label, own_seconds, own_order)


def _open(job: Job, scratch: Path) -> "TrainingRun":
    """Open the training with its memory limits and only the longest validation rows."""
    from safetrain.engine.run import Watcher, open_run

    output, settings = scratch / "output", dataclasses.replace(job.settings, max_loss_jump=None)
    output.mkdir()
    rows = dataclasses.replace(job.rows, valid=job.valid.take(job.valid.by_length[: settings.batch_size]))
    trial = dataclasses.replace(
        job, settings=settings, trace=False, rows=rows, output=output, adapters=scratch / "adapters"
    )
    return open_run(trial, Watcher(lambda *_: None, lambda _: None, lambda: 0, Recorder(scratch / "recorder.bin")))


def _make(run: "TrainingRun", update: "Update") -> Measured:
    """Make an update."""
    import mlx.core as mx

    from safetrain.engine.training import make_update

    began = time.perf_counter()
    make_update(run, update, RATE)
    mx.eval(run.model.module.trainable_parameters(), run.optimizer.state)
    return mx.get_peak_memory(), time.perf_counter() - began, update.input_tokens


def _time_updates(run: "TrainingRun") -> list[Measured]:
    """Time ordinary updates; on a GPU each runs twice, because the first time compiles its shapes."""
    from safetrain.engine.backend import device
    from safetrain.engine.training import update_of

    updates = list[Measured]()
    windows = updates_per_epoch(len(run.job.train), run.job.settings.rows_per_update)
    for window in range(min(1, windows - 1), min(1 + MOST_TIMED, windows)):  # the first has the longest row of all
        update = update_of(run, Cursor(0, window))
        if not device().on_cpu:
            _make(run, update)
        updates.append(_make(run, update))
        if sum(seconds for _, seconds, _ in updates) > DRY_RUN_TIMED_SECONDS:
            break
    return updates


def _largest_updates(run: "TrainingRun") -> "list[tuple[Update, bool]]":
    """The largest micro-batches as separate updates, and whether each is one of the training's own order of rows.

    They come from the updates with the longest row, most tokens and most labels, in the training's own order and in
    several; the one that computes most comes first. Where an update has several micro-batches, one of a single row
    precedes it: gradients then add up in memory as in the training.
    """
    from safetrain.engine.batches import fill, update_of_rows

    data, settings, layout = run.job.train, run.job.settings, run.layout
    length = settings.rows_per_update, settings.num_epochs, settings.max_steps
    first = rows_at(data, Cursor(0, 0), settings.seed, settings.rows_per_update)
    own = [first, *largest_windows(data, *length, (settings.seed,))]
    taken, updates = list[object](), list[tuple["Update", bool]]()
    for number, window in enumerate([*own, *largest_windows(data, *length)]):
        labels, groups = window.data.label_counts, list(fill(window.data, window.rows, layout))
        tokens = [update_of_rows(window.data, [rows], layout).computed_tokens for rows in groups]
        for rows in (groups[int(np.argmax(tokens))], max(groups, key=lambda rows: int(labels[rows].sum()))):
            if (window.data, rows) not in taken:
                taken.append((window.data, rows))
                before = [[window.rows[-1]]] if len(groups) > 1 else []
                updates.append((update_of_rows(window.data, [*before, rows], layout), number < len(own)))
    return sorted(updates, key=lambda each: -each[0].computed_tokens)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
