"""The state that a resume needs, and its checkpoint folders, checkpoint_epoch_E_step_S: complete or absent.

Random numbers are functions of the step (engine/layers.py), so a checkpoint holds no random state.
"""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mlx.utils import tree_flatten, tree_unflatten

from safetrain.core.data.training_rows import Cursor
from safetrain.core.errors import TrainingError
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.run_state import (
    Checkpoint,
    RunIdentity,
    RunState,
    checkpoints_in,
    fault_of,
    name_of,
    read_run_state,
    set_aside,
    to_prune,
    write_manifest,
    write_run_state,
)
from safetrain.core.storage.files import replace_directory, sha256_of, write_json
from safetrain.core.storage.paths import POINTER
from safetrain.engine.adapters import adapter_weights, set_adapter_weights
from safetrain.engine.model import BaseModel
from safetrain.engine.optimizer import BlockOptimizer
from safetrain.engine.weight_files import load_arrays, save_arrays

TEXT_BYTES = 2**20  # of a checkpoint or of metrics, with 1,600 records
START = Cursor(0, 0)
START_OVER = "'safetrain discard' removes it"
BEST_FILE = "best.safetensors"  # in a checkpoint: a copy of the file in adapters/


@dataclass
class TrainState:
    """The position of a run. Weights and optimizer moments live in the model and the optimizer."""

    step: int = 0  # optimizer updates made
    recorded_step: int = -1  # of the last record
    cursor: Cursor = START
    trained_tokens: int = 0  # labels seen
    input_tokens: int = 0  # tokens seen, padding not counted
    window_loss: float = 0.0  # sum of losses in nats since the last record
    window_tokens: int = 0  # labels since the last record
    window_seconds: float = 0.0  # training time since the last record
    elapsed_seconds: float = 0.0  # training time since the start of the run
    final_loss: float = 0.0  # sum of losses in nats over the last tenth of the run
    final_tokens: int = 0  # labels in it
    computed_tokens: int = 0  # with padding
    recent_losses: list[float] = field(default_factory=list)  # nats per label of the last updates
    validations_since_best: int = 0
    shards: int = 0  # of a micro-batch, computed side by side; rounding and dropout depend on it
    peak_memory_bytes: int = 0  # mlx's peak over the updates
    best_valid_loss: float | None = None
    best_step: int = 0
    best_sha256: str = ""  # of the file with the best step's weights, which are only on disk
    grad_norm: float | None = None  # of the last update, before clipping; None: before the first
    records: list[StepRecord] = field(default_factory=list)
    resumed_from_step: int = 0  # 0 in a run that was never interrupted


def checkpoint_bytes(model: BaseModel, optimizer: BlockOptimizer) -> int:
    """Bytes of one checkpoint: the trained weights twice (now and best), the optimizer's state, text."""
    weights = sum(array.nbytes for array in adapter_weights(model).values())
    moments = sum(array.nbytes for _, array in tree_flatten(optimizer.state))
    return 2 * weights + moments + TEXT_BYTES


def save_checkpoint(
    output: Path,
    state: TrainState,
    identity: RunIdentity,
    model: BaseModel,
    optimizer: BlockOptimizer,
    best: Path | None,
    keep: int = 2,
) -> None:
    """Write a checkpoint and rename it; then write the pointer and remove old checkpoints.

    ``best``, the file of the best adapter so far, is copied. Raises OSError when a write fails.
    """
    final = output / name_of(state.cursor.epoch, state.step)
    arrays = {"adapters": adapter_weights(model), "optimizer": dict(tree_flatten(optimizer.state))}
    with tempfile.TemporaryDirectory(dir=output, prefix=".checkpoint-", ignore_cleanup_errors=True) as scratch:
        temporary = Path(scratch) / "new"
        temporary.mkdir()
        for name, values in arrays.items():
            save_arrays(temporary / f"{name}.safetensors", values)
        if best is None:
            save_arrays(temporary / BEST_FILE, {})
        else:
            shutil.copyfile(best, temporary / BEST_FILE)
        content = {**dataclasses.asdict(state), "identity": dataclasses.asdict(identity)}
        write_json(temporary / "state.json", content)
        write_manifest(temporary)
        replace_directory(temporary, final)
    write_run_state(output, RunState(False, final.name, state.step, identity))
    for folder in to_prune(output, keep, state.best_step):
        if folder != final:
            shutil.rmtree(folder)


def best_file(state: TrainState, adapter: Path, output: Path) -> Path | None:
    """The file with the best weights so far: ``adapter``, or a checkpoint's copy if ``adapter`` was removed.

    None before the first validation. Raises TrainingError if no file has the expected checksum.
    """
    if not state.best_sha256:
        return None
    for path in (adapter, *(checkpoint.folder / BEST_FILE for checkpoint in checkpoints_in(output))):
        if path.is_file() and sha256_of(path) == state.best_sha256:
            return path
    raise TrainingError(
        f"The adapter of the best step, {state.best_step}, is gone or was changed, and no checkpoint holds it.",
        where=str(adapter),
        do="do not touch the folder while training runs; the same command continues from the last checkpoint",
    )


def load_checkpoint(
    output: Path,
    identity: RunIdentity,
    model: BaseModel,
    optimizer: BlockOptimizer,
    say: Callable[[str], None] = lambda _text: None,
) -> TrainState | None:
    """Restore an unfinished run from its newest undamaged checkpoint; None without one.

    A damaged checkpoint is renamed and reported through ``say``. Raises TrainingError if the checkpoint belongs to a
    different run. A finished run continues only if ``num_epochs`` is now larger and nothing else differs.
    """
    pointer = read_run_state(output)
    if pointer is not None and pointer.finished and not identity.is_longer_than(pointer.identity):
        return None
    damaged, folder = list[tuple[Checkpoint, str]](), None
    for candidate in checkpoints_in(output):
        if not (fault := fault_of(candidate.folder)):
            folder = candidate.folder
            break
        damaged.append((candidate, fault))
    state, longer = _read_state(folder, identity) if folder is not None else (None, False)
    for checkpoint, fault in damaged:  # only now: a refused run leaves everything as it was
        moved = set_aside(checkpoint)
        say(f"{checkpoint.folder.name} is damaged ({fault}): renamed to {moved.name}")
    if folder is None or state is None:
        if damaged:
            say("no undamaged checkpoint is left: training starts from the beginning")
        elif pointer is not None and not pointer.finished and pointer.step:
            say(f"the run that stopped at step {pointer.step} left no complete checkpoint")
        return None
    weights, moments = (load_arrays(folder / f"{name}.safetensors") for name in ("adapters", "optimizer"))
    set_adapter_weights(model, weights)
    optimizer.state = tree_unflatten(list(moments.items()))
    if longer:
        state.final_loss, state.final_tokens = 0.0, 0  # the last tenth of the run has moved
        say(f"train.num_epochs is larger than before: the run continues from step {state.step} (or {START_OVER})")
    return state


def _read_state(folder: Path, identity: RunIdentity) -> tuple[TrainState, bool]:
    """A checkpoint's state, and whether this run only adds epochs to it.

    Raises TrainingError when the checkpoint belongs to a different run.
    """
    try:
        value = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        theirs, cursor = RunIdentity(**value["identity"]), Cursor(**value["cursor"])
        records = [StepRecord(**record) for record in value["records"]]
        own = {field.name: value[field.name] for field in dataclasses.fields(TrainState)}
        state = TrainState(**{**own, "cursor": cursor, "records": records, "resumed_from_step": value["step"]})
    except (ValueError, KeyError, TypeError) as error:
        what = f"The checkpoint was written by a different version: {error}"
        raise TrainingError(what, where=str(folder), do=START_OVER) from error
    longer = identity.is_longer_than(theirs)
    differences = [] if longer else identity.differences(theirs)
    if differences:
        raise TrainingError(
            f"An unfinished run stopped at step {state.step}, and this one differs in: {', '.join(differences)}.",
            where=str(folder.parent / POINTER),
            do=f"undo the difference to continue that run, or {START_OVER}, then run the same command again",
        )
    return state, longer


def mark_finished(output: Path, step: int, identity: RunIdentity) -> None:
    """Mark the run as finished, after its results are written: the same command then trains again from the start."""
    pointer = read_run_state(output)
    write_run_state(output, RunState(True, pointer.checkpoint if pointer else "", step, identity))
