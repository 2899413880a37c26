"""A run as trackers take it: its settings, a few numbers for each step, and what came out at the end."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.core.records.metrics import parse_csv
from safetrain.core.storage import paths
from safetrain.core.storage.run_files import FLIGHT, JOB
from safetrain.watch.trackers.new_steps import HEADER, LINE_BYTES, NewSteps, Scalar

SCORES = ("loss", "exact_match", "token_f1", "chrf")


@dataclass(frozen=True)
class Setting:
    """A value that the training was made with."""

    name: str
    value: str | float | bool | None


@dataclass(frozen=True)
class TrackedRun:
    """One training. ``identity`` is the same as long as it is continued."""

    identity: str
    recorded_seconds: float  # wall clock, when the last step was recorded
    last_elapsed_seconds: float  # of that step
    settings: tuple[Setting, ...]
    steps: NewSteps  # those after the step that was asked for, read as they are taken
    results: tuple[Scalar, ...]  # of a finished and evaluated run

    @property
    def began_seconds(self) -> float:
        """Wall clock, when the training would have begun, had it never paused."""
        return self.recorded_seconds - self.last_elapsed_seconds

    @property
    def results_identity(self) -> str:
        """Of the results alone: they are sent once."""
        return hashlib.sha256(repr(self.results).encode()).hexdigest()[:16] if self.results else ""


def read_tracked(after_step: int = -1, identity: str = "", read_bytes: int = 0) -> TrackedRun:
    """The run of this project, its steps after ``after_step`` if it is that of ``identity``, else all.

    Raises ConfigError when no step was recorded yet. A training may be writing.
    """
    path = paths.METRICS_CSV
    front, end, recorded = _ends_of(path)
    header, _, lines = front.partition("\n")
    first = next((line for line in lines.split("\n") if line and not line.startswith("0,")), "")
    if not first or header != HEADER:
        raise ConfigError("No training step was recorded yet.", where=str(path), do="train first: safetrain run")
    found = hashlib.sha256(first.encode()).hexdigest()[:16]
    steps = NewSteps(path, after_step, read_bytes) if found == identity else NewSteps(path)
    last = parse_csv("\n".join([header, end.rstrip("\n").rpartition("\n")[2], ""]))[0]
    return TrackedRun(found, recorded, last.elapsed_seconds, tuple(_settings()), steps, tuple(_results()))


def _ends_of(path: Path) -> tuple[str, str, float]:
    """The whole lines at the file's beginning and at its end, and when it was written."""
    try:
        with path.open("rb") as file:
            recorded = os.fstat(file.fileno()).st_mtime
            front = file.read(2 * LINE_BYTES)
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * LINE_BYTES))
            end = file.read()
    except FileNotFoundError:
        return "", "", 0.0
    return _whole_lines(front), _whole_lines(end), recorded


def _whole_lines(part: bytes) -> str:
    return part[: part.rfind(b"\n") + 1].decode("utf-8", "replace")


def _settings() -> Iterator[Setting]:
    """What the training process was asked to do; numbers, choices and the base's name, no paths of data."""
    job = _read(paths.OUTPUT / FLIGHT / JOB)
    yield Setting("base_model", Path(str(job.get("base", ""))).name)
    yield from _flat("", job.get("settings", {}))
    for name, value in _read(paths.MACHINE).items():
        if name in ("backend", "chip", "device", "system", "mlx", "mlx_lm", "total_memory_bytes"):
            yield Setting(f"machine.{name}", value)


def _flat(before: str, values: Any) -> Iterator[Setting]:
    for name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict):
            yield from _flat(f"{before}{name}.", value)
        elif isinstance(value, list):
            yield Setting(f"{before}{name}", ", ".join(map(str, value)))
        else:
            yield Setting(f"{before}{name}", value)


def _results() -> Iterator[Scalar]:
    """Final losses, and base beside tuned where it was evaluated since."""
    metrics, summary, evaluation = _read(paths.METRICS_JSON), paths.SUMMARY, paths.EVALUATION
    if not summary.is_file():  # the training has not ended: what is there is of the one before
        return
    yield from (Scalar(f"result/{name}", float(value)) for name, value in metrics.items() if _is_number(value))
    if not evaluation.is_file() or evaluation.stat().st_mtime < summary.stat().st_mtime:
        return
    scores = _read(evaluation)
    for side in ("base", "tuned"):
        values = scores.get(side, {})
        yield from (Scalar(f"test/{side}_{name}", values[name]) for name in SCORES if _is_number(values.get(name)))
    gained = scores.get("improvement", {}).get("nats_per_label")
    if _is_number(gained):
        yield Scalar("test/nats_per_label_gained", gained)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read(path: Path) -> dict[str, Any]:
    """An object of JSON; empty where there is none to read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
