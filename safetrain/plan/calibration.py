"""Fits the memory estimate's coefficients, and the time of an update, to measurements of a shortened model.

Seven probes for each way of computing (blocks recomputed or not, base unpacked or packed): two depths, four shapes.
What is known exactly (weights, adapter, optimizer) is taken off first; the rest is linear in the coefficients. A ridge
towards the usual values keeps terms that the probes cannot tell apart from running away.
(measured: benchmarks/bench_memory_accuracy.py)
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from safetrain.core.files import cache_directory, write_json
from safetrain.core.memory import (
    LAYER_NAME,
    Backend,
    Coefficients,
    Shape,
    backend_of,
    forward_bytes,
    predicted_peak,
    total_bytes,
)
from safetrain.core.model_files import ModelFiles
from safetrain.core.probes import Measured, ProbePoint, measured_from
from safetrain.core.settings import LoraSettings, TrainSettings
from safetrain.plan.probe_cache import installed_versions

SHAPES = ((1, 128), (4, 128), (1, 512), (8, 32))  # rows and tokens, at the lower depth; the first three at the higher
RIDGE = 0.03  # of the peak, for a coefficient that is off by one
USUAL = Coefficients(stored=0.87, recomputed=0.8, scores=1.15, logits=0.8, unpacked=0.8, gradient=0.5)
USUAL_RECOMPUTED = Coefficients(stored=1.0, recomputed=0.8, scores=0.8, logits=0.8, unpacked=0.8, gradient=0.5)
NAMES = tuple(field.name for field in dataclasses.fields(Coefficients))
LEAST_PROBES = 5
LEAST_MARGIN, UNCERTAINTY = 0.1, 2.0  # the margin is at least so much, and so many times what the fit is off by


@dataclass(frozen=True)
class Mode:
    """A way of computing that has its own coefficients."""

    checkpointing: bool
    dequantize_base: bool


@dataclass(frozen=True)
class Speed:
    """Seconds of a micro-batch: a + b n T + c T + d n T S, with n trained blocks, T tokens in all, S in a row."""

    fixed: float
    per_block_token: float
    per_token: float
    per_score: float

    def seconds(self, blocks: int, rows: int, tokens: int) -> float:
        """Of one micro-batch of so many rows, each of so many tokens."""
        total = rows * tokens
        linear = self.per_block_token * blocks * total + self.per_token * total
        return self.fixed + linear + self.per_score * blocks * total * tokens


@dataclass(frozen=True)
class Calibration:
    """What a machine has shown of a model in one mode."""

    mode: Mode
    coefficients: Coefficients
    speed: Speed
    worst_residual: float  # of the fit on its own probes, as a share of the peak
    worst_spread: float  # of the peaks of one probe's updates
    probes: int

    @property
    def margin(self) -> float:
        """To be kept free, as a share of the predicted peak."""
        return max(LEAST_MARGIN, UNCERTAINTY * max(self.worst_residual, self.worst_spread))


def probe_points(model: ModelFiles, template: TrainSettings, mode: Mode) -> tuple[ProbePoint, ...]:
    """What to measure: depths 4 and 8, or half of a model that has fewer blocks and all of it."""
    deep = min(8, model.num_layers)
    shallow = min(4, max(1, deep // 2))
    longest = model.max_positions or 2**20
    found = []
    planned = [(shallow, shape) for shape in SHAPES] + [(deep, shape) for shape in SHAPES[:3]]
    for depth, (rows, tokens) in planned:
        settings = dataclasses.replace(
            template,
            batch_size=rows,
            gradient_accumulation=1,
            gradient_checkpointing=mode.checkpointing,
            dequantize_base=mode.dequantize_base,
            lora=dataclasses.replace(template.lora, num_layers=depth),
        )
        found.append(ProbePoint(depth, min(tokens, longest), settings))
    return tuple(found)


def shortened(model: ModelFiles, num_layers: int) -> ModelFiles:
    """The same model with its first blocks alone."""

    def kept(name: str) -> bool:
        found = LAYER_NAME.search(name)
        return found is None or int(found[1]) < num_layers

    tensors = tuple(tensor for tensor in model.tensors if kept(tensor.name))
    size = sum(tensor.size_bytes for tensor in tensors)
    return dataclasses.replace(model, num_layers=num_layers, tensors=tensors, static_bytes=size)


def fit(model: ModelFiles, mode: Mode, measured: Sequence[Measured]) -> Calibration:
    """Coefficients and speed from at least five probes; raises ValueError for fewer."""
    if len(measured) < LEAST_PROBES:
        raise ValueError(f"{len(measured)} probes are too few")
    usual = USUAL_RECOMPUTED if mode.checkpointing else USUAL
    prior = np.array([getattr(usual, name) for name in NAMES])
    rows, targets, peaks = [], [], []
    for each in measured:
        exact, varying = _split(model, each)
        peaks.append(each.peak_bytes)
        rows.append([varying[name] / each.peak_bytes for name in NAMES])
        targets.append((each.peak_bytes - exact) / each.peak_bytes)
    features, wanted = np.array(rows), np.array(targets)
    ridge = RIDGE**2 * np.eye(len(NAMES))
    found = np.linalg.solve(features.T @ features + ridge, features.T @ wanted + ridge @ prior)
    found = np.maximum(found, 0.0)
    residual = float(np.abs(features @ found - wanted).max())
    spread = max(1 - each.least_peak_bytes / each.peak_bytes for each in measured)
    coefficients = Coefficients(**dict(zip(NAMES, map(float, found), strict=True)))
    return Calibration(mode, coefficients, _fit_speed(measured), residual, spread, len(measured))


def _split(model: ModelFiles, each: Measured) -> tuple[int, dict[str, int]]:
    """(bytes known exactly, bytes by coefficient) of a probe."""
    settings = each.point.settings
    short, backend, shape = shortened(model, each.point.num_layers), backend_for(model, each), shape_of(each.point)
    none = dataclasses.replace(backend, coefficients=Coefficients(0, 0, 0, 0, 0, 0))
    exact = total_bytes(predicted_peak(short, settings.lora, shape, none, keeps_best=False))
    return exact, forward_bytes(short, settings.lora, shape, backend)


def backend_for(model: ModelFiles, each: Measured) -> Backend:
    """The estimate's backend for a probe."""
    settings = each.point.settings
    name = "cpu" if each.device == "cpu" else "gpu"
    checkpointing = settings.gradient_checkpointing
    return backend_of(model, name, settings.dequantize_base, settings.method, checkpointing=checkpointing)


def shape_of(point: ProbePoint) -> Shape:
    """The shape of a probe's micro-batches."""
    return Shape(point.settings.batch_size, point.tokens, point.settings.gradient_accumulation > 1)


def predict(model: ModelFiles, calibration: Calibration, point: ProbePoint, device: str = "cpu") -> int:
    """Peak of mlx's allocator in a probe like those measured, in bytes."""
    each = Measured(point, 0, 0, 0, 0, 0.0, device)
    backend = dataclasses.replace(backend_for(model, each), coefficients=calibration.coefficients)
    short = shortened(model, point.num_layers)
    return total_bytes(predicted_peak(short, point.settings.lora, shape_of(point), backend, keeps_best=False))


def _fit_speed(measured: Sequence[Measured]) -> Speed:
    """Least squares on relative errors, none below zero."""
    rows = []
    for each in measured:
        blocks, count, tokens = each.point.num_layers, each.point.settings.batch_size, each.point.tokens
        total = count * tokens
        rows.append([1.0, blocks * total, total, blocks * total * tokens])
    features, seconds = np.array(rows), np.array([each.step_seconds for each in measured])
    weighted = features / seconds[:, None]
    active = list(range(4))
    while True:
        found = np.zeros(4)
        found[active] = np.linalg.lstsq(weighted[:, active], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            return Speed(*map(float, found))
        active.remove(int(np.argmin(found)))


def cache_path(model: ModelFiles, lora: LoraSettings, method: str, mode: Mode, chip: str) -> Path:
    """Where a calibration is kept: by model, chip, versions, adapter and mode."""
    targets, words = ",".join(lora.targets), [model.fingerprint, chip, method, str(lora.rank), str(lora.dropout)]
    words.append(_engine_code())
    key = hashlib.blake2b("\n".join([*words, targets, str(mode), *installed_versions()]).encode(), digest_size=12)
    return cache_directory() / "calibrations" / f"{key.hexdigest()}.json"


def _engine_code() -> str:
    """Hash of the engine's source: another engine takes another amount of memory."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted((Path(__file__).parent.parent / "engine").glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def remember(path: Path, measured: Sequence[Measured]) -> None:
    """Keep the measurements; they are fitted anew each time, so that a better fit needs no new probes."""
    write_json(path, [dataclasses.asdict(each) for each in measured])


def remembered(path: Path) -> list[Measured]:
    """Earlier measurements, none where there are none that can be read."""
    try:
        values: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return [measured_from(value) for value in values]
    except (OSError, ValueError, TypeError, KeyError):
        return []
