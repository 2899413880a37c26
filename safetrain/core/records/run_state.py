"""training_state.json: where an unfinished run stands, and what makes two runs the same run."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.storage.files import from_json, write_json
from safetrain.core.storage.run_files import POINTER

GROWS_WITH_LENGTH = {"num_epochs", "warmup_steps", "eval_steps"}
OTHER_DRAWS = "numpy's random order of rows (install the numpy version that the run began with)"


@dataclass(frozen=True)
class RunIdentity:
    """What makes two runs the same run. Each value is text, so that a difference can be shown."""

    base_model: str
    training_rows: str
    validation_rows: str
    settings: str
    draws: str = ""  # fingerprint of how numpy orders rows

    def differences(self, other: "RunIdentity") -> list[str]:
        """Names of what differs."""
        names = ("base_model", "training_rows", "validation_rows")
        texts = [name.replace("_", " ") for name in names if getattr(self, name) != getattr(other, name)]
        texts += [] if self.draws == other.draws else [OTHER_DRAWS]
        mine, theirs = json.loads(self.settings), json.loads(other.settings)
        for key in self._changed_settings(other):
            texts.append(f"{key} ({json.dumps(theirs.get(key))} before, {json.dumps(mine.get(key))} now)")
        return texts

    def is_longer_than(self, other: "RunIdentity") -> bool:
        """Whether this is the same run with more epochs; values recommended by a run's length may differ with it."""
        same = dataclasses.replace(self, settings="") == dataclasses.replace(other, settings="")
        changed = set(self._changed_settings(other))
        if not same or "num_epochs" not in changed or not changed <= GROWS_WITH_LENGTH:
            return False
        mine, theirs = json.loads(self.settings), json.loads(other.settings)
        return mine["max_steps"] is None and mine["num_epochs"] > theirs["num_epochs"]

    def _changed_settings(self, other: "RunIdentity") -> list[str]:
        mine, theirs = json.loads(self.settings), json.loads(other.settings)
        return sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))


@dataclass(frozen=True)
class RunState:
    """training_state.json."""

    finished: bool
    checkpoint: str  # name of the newest checkpoint's folder
    step: int
    identity: RunIdentity


def write_run_state(output: Path, state: RunState) -> None:
    """Write training_state.json."""
    write_json(output / POINTER, dataclasses.asdict(state))


def read_run_state(output: Path) -> RunState | None:
    """None where the file is missing or unreadable: the checkpoints then speak for themselves."""
    try:
        return from_json(RunState, json.loads((output / POINTER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def is_finished(output: Path) -> bool:
    """Whether training_state.json calls its run complete, so that nothing is continued."""
    state = read_run_state(output)
    return state is not None and state.finished
