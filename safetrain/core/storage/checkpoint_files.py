"""Checkpoints as folders that prove themselves: a manifest with the length and hash of every file.

The newest whole one is found by that proof, not by a date or by what another file says.
"""

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.storage.files import write_json
from safetrain.core.storage.run_files import CHECKPOINTS, DAMAGED

MANIFEST = "manifest.json"
KEPT_BESIDE = 2  # train.keep_checkpoints: the best one, and the one that is being written
NAME = re.compile(r"checkpoint_epoch_(\d+)_step_(\d+)$")


@dataclass(frozen=True)
class Checkpoint:
    """A folder that may hold a checkpoint."""

    folder: Path
    step: int


def name_of(epoch: int, step: int) -> str:
    """The folder's name."""
    return f"checkpoint_epoch_{epoch}_step_{step}"


def checkpoints_in(output: Path) -> list[Checkpoint]:
    """All of them, whole or not, the newest first."""
    found = [(folder, NAME.match(folder.name)) for folder in output.glob(CHECKPOINTS)]
    named = [Checkpoint(folder, int(match[2])) for folder, match in found if match and folder.is_dir()]
    return sorted(named, key=lambda checkpoint: -checkpoint.step)


def write_manifest(folder: Path) -> None:
    """Read every file of ``folder`` back and write down its length and hash."""
    files = {file.name: _proof(file) for file in sorted(folder.iterdir())}
    write_json(folder / MANIFEST, {"sha256": files})


def fault_of(folder: Path) -> str:
    """What is wrong with a checkpoint, empty if it is whole. Raises OSError where the disk does not let it be read."""
    try:
        expected = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        for name, proof in expected.items():
            found = _proof(folder / name)
            if found != proof:
                size = f"{found['bytes']} bytes instead of {proof['bytes']}"
                return f"{name} has {size}" if found["bytes"] != proof["bytes"] else f"{name} has other contents"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return ""


def set_aside(checkpoint: Checkpoint) -> Path:
    """Rename a damaged checkpoint, so that it is no longer read as one; returns its new path."""
    target = checkpoint.folder.with_name(DAMAGED + checkpoint.folder.name)
    number = 2
    while target.exists():
        target = checkpoint.folder.with_name(f"{DAMAGED}{checkpoint.folder.name}_{number}")
        number += 1
    checkpoint.folder.rename(target)
    return target


def newest_whole(output: Path) -> Checkpoint | None:
    """The one to continue from; nothing is changed."""
    return next((found for found in checkpoints_in(output) if not fault_of(found.folder)), None)


def to_prune(output: Path, keep: int, best_step: int) -> list[Path]:
    """Folders that are neither among the newest ``keep`` nor of the best step."""
    return [found.folder for found in checkpoints_in(output)[keep:] if found.step != best_step]


def copied_sha256(source: Path, copy: Path) -> str:
    """Copy a file; returns the hash of what the disk then holds."""
    shutil.copyfile(source, copy)
    return sha256_of(copy)


def sha256_of(file: Path) -> str:
    """Of the file's bytes."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _proof(file: Path) -> dict[str, object]:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
