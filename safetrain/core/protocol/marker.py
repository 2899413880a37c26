"""The file that says that a training runs: who supervises it, by which command, and what would end it."""

import json
from dataclasses import dataclass
from pathlib import Path

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
        return from_json(RunMarker, json.loads(path.read_text(encoding="utf-8")), partly=True)
    except (OSError, ValueError, TypeError):
        return None
