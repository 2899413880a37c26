"""What is measured of a shortened model, and what came out: the words between the plan and the engine's probe."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.files import write_json
from safetrain.core.settings import TrainSettings, settings_from


@dataclass(frozen=True)
class ProbePoint:
    """One configuration to measure."""

    num_layers: int  # of the shortened model
    tokens: int  # that each row feeds
    settings: TrainSettings  # batch size, accumulation, adapter, recomputing, packing
    budget_bytes: int = 0  # with the next, what mlx is told as a training is (engine/limits.py); 0: nothing
    predicted_peak_bytes: int = 0


@dataclass(frozen=True)
class Measured:
    """What updates of it took, in bytes and seconds."""

    point: ProbePoint
    still_bytes: int  # mlx's memory between updates
    peak_bytes: int  # mlx's largest peak over the updates but the first
    least_peak_bytes: int  # the smallest of them: how far apart they are is the noise
    footprint_bytes: int  # resident memory of the process
    step_seconds: float  # the fastest update
    device: str


@dataclass(frozen=True)
class ProbeRequest:
    """Points of one model."""

    folder: str  # of its config.json
    shortened: bool  # a model of the points' depths with weights that mean nothing; else the model itself
    float32: bool  # the type of a shortened model's numbers, else 16 bits
    points: tuple[ProbePoint, ...]
    data_limit_bytes: int | None = None  # on the process's private memory, as train.memory_limit_gb


def write_request(path: Path, request: ProbeRequest) -> None:
    """Write it down."""
    write_json(path, dataclasses.asdict(request))


def read_request(path: Path) -> ProbeRequest:
    """Read what ``write_request`` wrote."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return ProbeRequest(**{**value, "points": tuple(point_from(point) for point in value["points"])})


def measured_from(value: dict[str, Any]) -> Measured:
    """From a line of the probe's answer."""
    return Measured(**{**value, "point": point_from(value["point"])})


def point_from(value: dict[str, Any]) -> ProbePoint:
    """From its JSON."""
    return ProbePoint(**{**value, "settings": settings_from(value["settings"])})
