"""The state that a resume needs, and its checkpoint folders, checkpoint_epoch_E_step_S: complete or absent.

Random numbers are functions of the step (engine/layers.py), so a checkpoint holds no random state.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlx.utils import tree_flatten, tree_unflatten

from safetrain.core.data.training_rows import Cursor
from safetrain.core.errors import TrainingError
from safetrain.core.records.metrics import StepRecord, csv_of, parse_csv
from safetrain.core.records.run_state import (
    RunIdentity,
    RunState,
    checkpoint_bytes,
    checkpoints_in,
    fault_of,
    mirror,
    name_of,
    set_aside,
    to_prune,
    write_manifest,
)
from safetrain.core.storage.files import read_or_none, remove_folder, sha256_of, write_folder, write_json, write_record
from safetrain.core.storage.paths import POINTER
from safetrain.engine.adapters import adapter_weights, set_adapter_weights
from safetrain.engine.job import Job
from safetrain.engine.model import BaseModel
from safetrain.engine.optimizer import BlockOptimizer
from safetrain.engine.weight_files import ADAPTER_FILE, bytes_of, load_arrays, save_arrays

RECORD_BYTES = 2**9  # of a record's line, at most
START = Cursor(0, 0)
START_OVER = "remove it: safetrain discard"
BEST_FILE = "best.safetensors"  # in a checkpoint: a copy of the file in adapters/
RECORDS_FILE = "records.csv"


@dataclass
class TrainState:
    """The position of a run. Weights and optimizer moments live in the model and the optimizer."""

    step: int = 0  # optimizer updates made
    recorded_step: int = -1  # of the last record
    cursor: Cursor = START
    labels: int = 0  # labels seen
    input_tokens: int = 0  # tokens seen, padding not counted
    since_record_loss: float = 0.0  # sum of losses in nats since the last record
    since_record_terms: int = 0  # labels, or pairs, in it
    since_record_labels: int = 0  # labels since the last record
    since_record_seconds: float = 0.0  # training time since the last record
    elapsed_seconds: float = 0.0  # training time since the start of the run
    computed_tokens: int = 0  # with padding
    recent_losses: list[float] = field(default_factory=list)  # nats per label of the last updates
    validations_since_best: int = 0
    threads: int = 0  # that compute on a CPU; rounding and dropout depend on them (BatchLayout.shards)
    peak_memory_bytes: int = 0  # mlx's peak over the updates
    base_valid_loss: float | None = None  # before the first step
    valid_loss: float | None = None  # of the last validation
    best_valid_loss: float | None = None
    best_step: int = 0
    best_sha256: str = ""  # of the file with the best step's weights, which are only on disk
    grad_norm: float | None = None  # of the last update, before clipping; None: before the first
    records: list[StepRecord] = field(default_factory=list)  # in RECORDS_FILE
    resumed_from_step: int = 0  # 0 in a run that was never interrupted


def size_of(model: BaseModel, optimizer: BlockOptimizer, records: int = 0) -> int:
    """Bytes of one checkpoint with so many records."""
    weights = bytes_of(adapter_weights(model))
    moments = sum(array.nbytes for _, array in tree_flatten(optimizer.state))
    return checkpoint_bytes(weights, moments) + RECORD_BYTES * records


def save_checkpoint(job: Job, state: TrainState, model: BaseModel, optimizer: BlockOptimizer) -> None:
    """Write a checkpoint with the best adapter so far; then write the pointer to it and remove old checkpoints.

    Raises OSError when a write fails.
    """
    final, best = job.output / name_of(state.cursor.epoch, state.step), best_file(job, state)
    bare = dataclasses.asdict(dataclasses.replace(state, records=[]))

    def write(folder: Path) -> None:
        save_arrays(folder / "adapters.safetensors", adapter_weights(model))
        save_arrays(folder / "optimizer.safetensors", dict(tree_flatten(optimizer.state)))
        if best is not None:
            shutil.copyfile(best, folder / BEST_FILE)
        (folder / RECORDS_FILE).write_text(csv_of(state.records), encoding="utf-8", newline="\n")
        write_json(folder / "state.json", {**bare, "identity": dataclasses.asdict(job.identity)})
        write_manifest(folder)

    write_folder(final, write)
    write_record(job.output / POINTER, RunState(False, final.name, state.step, job.identity))
    for folder in to_prune(job.output, job.keep_checkpoints, state.best_step):
        if folder != final:
            remove_folder(folder)
    if job.kept is not None:
        mirror(job.output, job.kept)


def best_file(job: Job, state: TrainState) -> Path | None:
    """The file with the best weights so far: in the adapter folder, or a checkpoint's copy if it is gone from there.

    None before the first validation. Raises TrainingError if no file has the expected checksum.
    """
    adapter = job.adapters / ADAPTER_FILE
    if not state.best_sha256:
        return None
    for path in (adapter, *(checkpoint.folder / BEST_FILE for checkpoint in checkpoints_in(job.output))):
        with suppress(OSError):  # a disk that cannot read this copy
            if path.is_file() and sha256_of(path) == state.best_sha256:
                return path
    raise TrainingError(
        f"The adapter of the best step, {state.best_step}, is gone or was changed, and no checkpoint has a copy.",
        where=adapter,
        do="do not touch the folder while a training run uses it; the same command continues from the last checkpoint",
    )


def load_checkpoint(
    job: Job, model: BaseModel, optimizer: BlockOptimizer, say: Callable[[str], None]
) -> TrainState | None:
    """Restore an unfinished run from its newest undamaged checkpoint; None without one.

    A damaged checkpoint is renamed and reported through ``say``. Raises TrainingError if the checkpoint belongs to a
    different run. A finished run continues only if ``num_epochs`` is now larger and nothing else differs.
    """
    pointer = read_or_none(job.output / POINTER, RunState)
    if pointer is not None and pointer.finished and not job.identity.is_longer_than(pointer.identity):
        return None
    is_lost = pointer is not None and not pointer.finished and pointer.step > 0
    for checkpoint in checkpoints_in(job.output):
        if fault := fault_of(checkpoint.folder):
            say(f"{checkpoint.folder.name} is damaged ({fault}): renamed to {set_aside(checkpoint).name}")
            is_lost = True
            continue
        state, longer = _read_state(checkpoint.folder, job.identity)
        set_adapter_weights(model, load_arrays(checkpoint.folder / "adapters.safetensors"))
        optimizer.state = tree_unflatten(list(load_arrays(checkpoint.folder / "optimizer.safetensors").items()))
        if longer:
            say(f"train.num_epochs is larger than before: the run continues from step {state.step}; or {START_OVER}")
        return state
    if is_lost:
        say("no undamaged checkpoint is left: training starts from the beginning")
    return None


def _read_state(folder: Path, identity: RunIdentity) -> tuple[TrainState, bool]:
    """A checkpoint's state, and whether this run only adds epochs to it.

    Raises TrainingError when the checkpoint belongs to a different run.
    """
    try:
        value = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        theirs, cursor = RunIdentity(**value["identity"]), Cursor(**value["cursor"])
        own = {field.name: value[field.name] for field in dataclasses.fields(TrainState)}
        state = TrainState(**{**own, "cursor": cursor, "resumed_from_step": value["step"]})
        state.records = parse_csv((folder / RECORDS_FILE).read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        what = f"The checkpoint was written by a different version: {error}"
        raise TrainingError(what, where=folder, do=START_OVER) from error
    longer = identity.is_longer_than(theirs)
    if not longer and (differences := identity.differences(theirs)):
        what = f"An unfinished run stopped at step {state.step}, and this one differs in: {', '.join(differences)}."
        do = f"undo the difference to continue that run, or {START_OVER}; then run the same command again"
        raise TrainingError(what, where=folder.parent / POINTER, do=do)
    return state, longer
