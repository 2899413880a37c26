"""Everything a restart needs as one value, and the folders that hold it: checkpoint_epoch_E_step_S, whole or absent.

Random numbers are functions of the step (engine/randomness.py), so none of their state is in here.
"""

import dataclasses
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from safetrain.core.errors import TrainingError
from safetrain.core.files import replace_directory, write_json
from safetrain.core.metrics import StepRecord
from safetrain.core.run_files import CHECKPOINTS, POINTER
from safetrain.engine.arrays import load_arrays, save_arrays
from safetrain.engine.batches import Cursor
from safetrain.engine.model import BaseModel, adapter_weights, set_adapter_weights

KEPT_CHECKPOINTS = 2
START = Cursor(0, 0)
START_OVER = "'safetrain discard' throws it away"
ARRAYS = ("adapters", "best", "optimizer")


@dataclass(frozen=True)
class RunIdentity:
    """What makes two runs the same run. Each value is text, so that a difference can be shown."""

    base_model: str
    training_rows: str
    validation_rows: str
    settings: str

    def differences(self, other: "RunIdentity") -> list[str]:
        """Names of what differs."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "settings"]
        found = [name.replace("_", " ") for name in names if getattr(self, name) != getattr(other, name)]
        mine, theirs = json.loads(self.settings), json.loads(other.settings)
        changed = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
        return found + [f"{key} ({theirs.get(key)} before, {mine.get(key)} now)" for key in changed]


@dataclass
class TrainState:
    """The position of a run. Weights and optimizer moments live in the model and the optimizer."""

    step: int = 0  # optimizer updates made
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
    skipped_steps: list[int] = field(default_factory=list)  # updates that were not applied
    validations_since_best: int = 0
    parts: int = 0  # of a micro-batch, computed side by side; dropout and rounding depend on it
    peak_memory_bytes: int = 0  # mlx's peak over the updates
    best_valid_loss: float | None = None
    best_step: int = 0
    best_weights: dict[str, mx.array] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
    resumed_from_step: int = 0  # 0 in a run that was never interrupted


NOT_SCALARS = ("cursor", "best_weights", "records", "resumed_from_step")
SCALARS = tuple(f.name for f in dataclasses.fields(TrainState) if f.name not in NOT_SCALARS)


def save_checkpoint(
    output: Path, state: TrainState, identity: RunIdentity, model: BaseModel, optimizer: optim.Optimizer
) -> None:
    """Write a checkpoint, then the pointer to it, then remove the ones that are no longer needed."""
    name = f"checkpoint_epoch_{state.cursor.epoch}_step_{state.step}"
    with tempfile.TemporaryDirectory(dir=output, prefix=".checkpoint-") as scratch:
        temporary = Path(scratch) / "new"
        temporary.mkdir()
        save_arrays(temporary / "adapters.safetensors", adapter_weights(model))
        save_arrays(temporary / "best.safetensors", state.best_weights)
        save_arrays(temporary / "optimizer.safetensors", dict(tree_flatten(optimizer.state)))
        write_json(temporary / "state.json", _as_json(state, identity))
        replace_directory(temporary, output / name)
    _write_pointer(output, name, state.step, identity, finished=False)
    _prune(output, keep=name)


def load_checkpoint(
    output: Path, identity: RunIdentity, model: BaseModel, optimizer: optim.Optimizer
) -> TrainState | None:
    """Put the unfinished run's state back; None when there is none. Raises TrainingError when it is another run's."""
    pointer = _read_pointer(output)
    if pointer is None or pointer["finished"]:
        return None
    differences = identity.differences(_identity_in(pointer, output))
    if differences:
        raise TrainingError(
            f"An unfinished run stopped at step {pointer['step']}, and this one differs in: {', '.join(differences)}.",
            where=str(output / POINTER),
            do=f"undo the difference to continue that run, or {START_OVER}, then run the same command again",
        )
    folder = output / pointer["checkpoint"]
    try:
        return _read_checkpoint(folder, model, optimizer)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise TrainingError(f"The checkpoint cannot be read: {error}", where=str(folder), do=START_OVER) from error


def _read_checkpoint(folder: Path, model: BaseModel, optimizer: optim.Optimizer) -> TrainState:
    """Everything is read before anything is put into the model."""
    value = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    adapter, best, moments = (load_arrays(folder / f"{name}.safetensors") for name in ARRAYS)
    state = TrainState(
        **{name: value[name] for name in SCALARS},
        cursor=Cursor(**value["cursor"]),
        best_weights=best,
        records=[StepRecord(**record) for record in value["records"]],
        resumed_from_step=value["step"],
    )
    set_adapter_weights(model, adapter)
    optimizer.state = tree_unflatten(list(moments.items()))
    return state


def _identity_in(pointer: dict[str, Any], output: Path) -> RunIdentity:
    try:
        return RunIdentity(**pointer["identity"])
    except (KeyError, TypeError):
        raise TrainingError(
            "The training state is that of another version.", where=str(output / POINTER), do=START_OVER
        ) from None


def mark_finished(output: Path, step: int, identity: RunIdentity) -> None:
    """After this the same command trains again instead of continuing."""
    pointer = _read_pointer(output)
    _write_pointer(output, pointer["checkpoint"] if pointer else "", step, identity, finished=True)


def _as_json(state: TrainState, identity: RunIdentity) -> dict[str, Any]:
    return {
        **{name: getattr(state, name) for name in SCALARS},
        "cursor": dataclasses.asdict(state.cursor),
        "records": [dataclasses.asdict(record) for record in state.records],
        "identity": dataclasses.asdict(identity),
    }


def _write_pointer(output: Path, name: str, step: int, identity: RunIdentity, *, finished: bool) -> None:
    value = {"finished": finished, "checkpoint": name, "step": step, "identity": dataclasses.asdict(identity)}
    write_json(output / POINTER, value)


def _read_pointer(output: Path) -> dict[str, Any] | None:
    path = output / POINTER
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrainingError(f"The training state cannot be read: {error}", where=str(path), do=START_OVER) from None


def _prune(output: Path, keep: str) -> None:
    """Keep the newest checkpoints of this run; ``keep`` is always one of them."""
    folders = sorted(output.glob(CHECKPOINTS), key=lambda folder: int(folder.name.rpartition("_")[2]))
    for folder in folders[:-KEPT_CHECKPOINTS]:
        if folder.name != keep:
            shutil.rmtree(folder)
