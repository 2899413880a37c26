"""The file that says that a training runs: who supervises it, by which command, and what would end it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

from safetrain.core.records.record_files import from_json


@dataclass(frozen=True)
class RunMarker:
    """flight/run.json. It is there from the start of a training process until its end is explained."""

    boot_id: str
    command: str  # that somebody typed
    started_seconds: float  # wall clock
    started_monotonic_seconds: float
    supervisor_pid: int = 0
    hang_seconds: float = 0.0  # a phase is never called hung before; 0: not told
    limit_bytes: int = 0  # of the process's memory
    limit_name: str = ""


def read_marker(path: Path) -> RunMarker | None:
    """None where there is none, or none that can be read."""
    try:
        return marker_in(path.read_bytes())
    except OSError:
        return None


def marker_in(content: bytes) -> RunMarker | None:
    """The marker that a file's ``content`` is; None where it is damaged, or another version's."""
    try:
        found = from_json(RunMarker, json.loads(content), partly=True)
    except (ValueError, TypeError, RecursionError):
        return None
    return found if all(_fits(kind, getattr(found, name)) for name, kind in get_type_hints(RunMarker).items()) else None


def _fits(kind: type, value: object) -> bool:
    """Whether a field has a value of its kind; a number has to be one that can be computed with."""
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and not isinstance(value, bool)
