"""What is measured of a shortened model and of the beginning of a training: the words between plan and engine."""

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
    mlx_limit_bytes: int = 0  # as in a training; 0: none


@dataclass(frozen=True)
class Measured:
    """What updates of it took, in bytes and seconds."""

    point: ProbePoint
    still_bytes: int  # mlx's memory between updates
    peak_bytes: int  # mlx's largest peak over the updates but the first
    step_seconds: float  # the fastest update
    device: str
    floor_bytes: int = 0  # mlx's peak when it waits for each operation: the least there is; 0: not measured


@dataclass(frozen=True)
class ProbeRequest:
    """Points of one model."""

    folder: str  # of its config.json
    float32: bool  # the type of the model's numbers, else 16 bits
    points: tuple[ProbePoint, ...]
    floors: bool = False  # measure also how little memory mlx can do with


@dataclass(frozen=True)
class Rehearsed:
    """What the beginning of a training took, in bytes and seconds."""

    peak_bytes: int  # of mlx's allocator, over the updates
    footprint_bytes: int  # of the process (core/process_memory.py), loading and validating included
    update_seconds: float  # the mean of a few updates as they come
    device: str
    own_seconds: float  # of all this, less what Python took to start


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
