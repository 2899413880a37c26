"""training_state.json and the checkpoints: the progress of a run.

A checkpoint is a folder that can be verified: its manifest has the length and hash of every file.
"""

import dataclasses
import json
import re
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetrain.core.storage import paths
from safetrain.core.storage.files import (
    link_files,
    read_or_none,
    remove_folder,
    sha256_of,
    write_atomic,
    write_folder,
    write_json,
)

MANIFEST = "manifest.json"
KEPT_BESIDE = 2  # in addition to train.keep_checkpoints: the best checkpoint, and the one that is being written
TEXT_BYTES = 2**20  # of a checkpoint: state.json, manifest and the headers of weight files
NAME = re.compile(r"checkpoint_epoch_(\d+)_step_(\d+)$")
DIFFERENCES = {  # of a RunIdentity, in words
    "base_model": "base model or train.from_adapter",
    "training_rows": "training rows",
    "validation_rows": "validation rows",
    "draws": "numpy's random order of rows (install the numpy version that the run began with)",
}


@dataclass(frozen=True)
class RunIdentity:
    """The values that must be equal for one run to continue another; all are texts, so that a message can show them."""

    base_model: str  # with the adapter that training began with
    training_rows: str
    validation_rows: str
    settings: str
    draws: str = ""  # fingerprint of how numpy orders rows

    def differences(self, other: "RunIdentity") -> list[str]:
        texts = [words for name, words in DIFFERENCES.items() if getattr(self, name) != getattr(other, name)]
        changed = self._changed_settings(other).items()
        return texts + [f"{key} ({json.dumps(old)} before, {json.dumps(new)} now)" for key, (old, new) in changed]

    def is_longer_than(self, other: "RunIdentity") -> bool:
        """Whether this is the same run with more epochs; values recommended for a run's length may differ too."""
        changed = self._changed_settings(other)
        before, now = changed.get("num_epochs", (0, 0))
        is_longer = before < now and json.loads(self.settings)["max_steps"] is None
        same = dataclasses.replace(self, settings=other.settings) == other
        return same and is_longer and changed.keys() <= {"num_epochs", "warmup_steps", "eval_steps"}

    def _changed_settings(self, other: "RunIdentity") -> dict[str, tuple[Any, Any]]:
        """The settings that differ, with their values before and now."""
        now, before = json.loads(self.settings), json.loads(other.settings)
        pairs = {key: (before.get(key), now.get(key)) for key in sorted(now.keys() | before.keys())}
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class RunState:
    """training_state.json: the progress of a run and its identity."""

    finished: bool
    checkpoint: str  # name of the newest checkpoint's folder
    step: int
    identity: RunIdentity


def is_finished(output: Path) -> bool:
    """Whether training_state.json calls its run complete, so that there is nothing to resume."""
    state = read_or_none(output / paths.POINTER, RunState)
    return state is not None and state.finished


@dataclass(frozen=True)
class Checkpoint:
    """A folder that may hold a checkpoint."""

    folder: Path
    step: int

    @property
    def saved_seconds(self) -> float:
        """Wall-clock time at which the checkpoint was complete; 0 if it has been pruned."""
        try:
            return (self.folder / MANIFEST).stat().st_mtime
        except OSError:
            return 0.0


def checkpoint_bytes(weight_bytes: int, state_bytes: int) -> int:
    """Bytes of one checkpoint: trained weights twice (now and best), the optimizer's state, and text."""
    return 2 * weight_bytes + state_bytes + TEXT_BYTES


def name_of(epoch: int, step: int) -> str:
    return f"checkpoint_epoch_{epoch}_step_{step}"


def checkpoints_in(output: Path) -> list[Checkpoint]:
    """List all checkpoints, intact or not, the newest first."""
    matches = [(folder, NAME.match(folder.name)) for folder in output.glob(paths.CHECKPOINTS)]
    checkpoints = [Checkpoint(folder, int(match[2])) for folder, match in matches if match and folder.is_dir()]
    return sorted(checkpoints, key=lambda checkpoint: -checkpoint.step)


def write_manifest(folder: Path) -> None:
    """Read every file of ``folder`` back and write down its length and hash."""
    write_json(folder / MANIFEST, {"sha256": {file.name: _proof(file) for file in sorted(folder.iterdir())}})


def fault_of(folder: Path) -> str:
    """Say what is wrong with a checkpoint, such as a disk that cannot read it; empty if it is intact."""
    try:
        expected = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        changed = [name for name, proof in expected.items() if _proof(folder / name) != proof]
    except OSError as error:
        return f"{Path(error.filename or MANIFEST).name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return f"{changed[0]} has different contents" if changed else ""


def set_aside(checkpoint: Checkpoint) -> Path:
    """Rename a damaged checkpoint, so that nothing reads it, replacing an older damaged one; returns its new path."""
    target = checkpoint.folder.with_name(paths.DAMAGED + checkpoint.folder.name)
    if target.exists():
        remove_folder(target)
    checkpoint.folder.rename(target)
    return target


def newest_whole(output: Path) -> Checkpoint | None:
    """Find the checkpoint to resume from, None if none is intact; changes nothing."""
    return next((checkpoint for checkpoint in checkpoints_in(output) if not fault_of(checkpoint.folder)), None)


def to_prune(output: Path, keep: int, best_step: int) -> list[Path]:
    """List the checkpoint folders to delete: all except the newest ``keep`` and the best step's."""
    return [checkpoint.folder for checkpoint in checkpoints_in(output)[keep:] if checkpoint.step != best_step]


def mirror(source: Path, target: Path) -> None:
    """Give ``target`` the checkpoints of ``source``, no others, and what a resume needs beside them."""
    if (source / paths.LADDER).is_file():
        write_atomic(target / paths.LADDER, partial(shutil.copyfile, source / paths.LADDER))
    names = {checkpoint.folder.name for checkpoint in checkpoints_in(source)}
    for name in names:
        if not (target / name).exists():
            write_folder(target / name, partial(link_files, source / name))
    for checkpoint in checkpoints_in(target):
        if checkpoint.folder.name not in names:
            remove_folder(checkpoint.folder)


def searched(identity: RunIdentity) -> Path | None:
    """Find the candidate of a search that a run continues, as it has the same values; None if there is none."""
    for pointer in paths.SEARCH.glob(f"*/{paths.POINTER}"):
        state = read_or_none(pointer, RunState)
        if state is not None and state.identity == identity:
            return pointer.parent
    return None


def remove_old(kept: Path) -> None:
    """Remove what experiments have kept in ``kept`` that have not been trained for a week."""
    for folder in kept.iterdir() if kept.is_dir() else ():
        if time.time() - folder.stat().st_mtime > 7 * 24 * 3600:
            shutil.rmtree(folder)


def _proof(file: Path) -> dict[str, object]:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}


def remove_half_written(output: Path) -> None:
    """Remove the temporary files of a killed process. Call it only while no other process works in ``output``.

    A folder that was being replaced gets its own name back if that is free.
    """
    for old in output.glob(paths.REPLACED):
        own = output / old.name[1:].rpartition("-old-")[0]
        if not own.exists() and any(old.iterdir()):
            old.rename(own)
    for path in (path for pattern in paths.HALF_WRITTEN for path in output.glob(pattern)):
        remove_folder(path)


def discard_run(output: Path, *, damaged_too: bool = False) -> int:
    """Remove all checkpoints, unfinished results, state files, reports of bad updates, and half-written files.

    Returns the number of checkpoints. Damaged ones stay for inspection, unless ``damaged_too``.
    """
    (output / paths.POINTER).unlink(missing_ok=True)
    (output / paths.LADDER).unlink(missing_ok=True)
    remove_half_written(output)
    checkpoints = list(output.glob(paths.CHECKPOINTS))
    for folder in [*checkpoints, *(output.glob(paths.DAMAGED + paths.CHECKPOINTS) if damaged_too else ())]:
        remove_folder(folder)
    for name in (paths.BAD_UPDATES, paths.UNFINISHED):
        shutil.rmtree(output / name, ignore_errors=True)
    return len(checkpoints)
