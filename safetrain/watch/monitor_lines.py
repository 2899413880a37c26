"""What a monitor shows as one line, for a script or a log: in words, or as JSON."""

import dataclasses
import enum
import json
import math
from typing import Any

from safetrain.core.formatting import printable, size_text
from safetrain.watch.monitor_rows import age_text, damaged_text, progress_text
from safetrain.watch.monitor_state import State
from safetrain.watch.monitor_view import MonitorView
from safetrain.watch.time_left import clock_text, time_left_text

LAST_EVENTS = 5  # of the events in a JSON line


def plain_line(view: MonitorView) -> str:
    """One line, what matters first."""
    parts = [f"{clock_text(view.wall_seconds, view.wall_seconds)}  {view.state.value}"]
    if view.state is State.NOTHING:
        return f"{parts[0]}: nothing has been trained here"
    phase, losses, memory = view.phase, view.losses, view.memory
    parts.append(progress_text(view))
    if view.verdict is not None:
        parts += [f"{view.verdict.title} ({view.verdict.confidence})"]
    elif phase is not None and view.state.is_running:
        warning = ", hangs" if phase.is_silent else ", longer than ever" if phase.is_slow else ""
        parts.append(f"{phase.label} {age_text(phase.age_seconds)}{warning}")
    parts += [f"loss {losses.train:.4f}"] if losses.train is not None else []
    parts += [f"valid {losses.valid:.4f}"] if losses.valid is not None else []
    parts += [f"best {losses.best:.4f} at {losses.best_step}"] if losses.best is not None else []
    parts += [f"mlx peak {size_text(memory.mlx_peak_bytes)}"] if memory.mlx_peak_bytes else []
    parts += [f"process {size_text(memory.process_bytes)}"] if memory.process_bytes else []
    parts += [f"saved {view.checkpoints.last_step}"] if view.checkpoints.last_step is not None else []
    parts += [f"rung {view.rung}"] if view.rung else []
    parts += [damaged_text(view)] if view.curves.damaged_lines else []
    left = view.progress.left
    parts += [time_left_text(left, view.wall_seconds)] if left is not None else []
    parts += [f"next: {view.next_command}"] if view.next_command else []
    return printable("  ".join(part.replace("\n", " ") for part in parts if part))


def json_line(view: MonitorView) -> str:
    """One object, its curves left out; what is not known is null."""
    found = {field.name: getattr(view, field.name) for field in dataclasses.fields(view) if field.name != "curves"}
    found["events"] = view.events[-LAST_EVENTS:]
    found["damaged_lines"] = view.curves.damaged_lines
    found["unread_bytes"] = view.curves.unread_bytes
    return json.dumps(_plain(found), allow_nan=False)


def _plain(value: Any) -> Any:
    """As JSON has it: no number that is none."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
