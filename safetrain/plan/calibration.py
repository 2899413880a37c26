"""What a machine shows of a model: which probes to make, and the memory estimate and speed fitted to them.

Nine probes of a shortened model for each way of computing (blocks recomputed or not, base unpacked or packed): two
depths, six shapes. (measured: benchmarks/bench_memory_accuracy.py)
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
from safetrain.core.memory import AHEAD, at_work_bytes, predicted_peak, total_bytes
from safetrain.core.memory_terms import (
    FLOAT32,
    LAYER_NAME,
    Backend,
    Coefficients,
    Shape,
    allocation_bytes,
    backend_of,
    base_bytes,
    optimizer_state_bytes,
    trained_parameters,
    work_phases,
)
from safetrain.core.model_files import ModelFiles
from safetrain.core.probes import Measured, ProbePoint, measured_from
from safetrain.core.settings import LoraSettings, TrainSettings
from safetrain.plan.fitting import Equation, Speed, fit_speed, solve
from safetrain.plan.probe_cache import installed_versions

SHAPES = ((1, 128), (4, 128), (1, 512), (8, 32), (2, 256), (1, 1024))  # rows and tokens, at the lower depth
DEEPER = SHAPES[:3]  # at the higher
# Usual values, kept blocks and recomputed ones (measured: medians over eight architectures, Linux CPU, two cores),
# of the least that mlx can do with ...
USUAL_FLOOR = {
    False: Coefficients(0.97, 1.1, 0.47, 0.43, 0.5, 1.0, 0.62, 1.0, 0.8, 3.0),
    True: Coefficients(1.1, 1.0, 1.2, 0.52, 0.8, 0.9, 0.38, 1.0, 0.8, 2.5),
}
# ... and of what it takes when nothing is said.
USUAL = {
    False: Coefficients(0.95, 1.0, 1.0, 1.0, 0.6, 1.0, 0.4, 1.0, 0.8, 3.5),
    True: Coefficients(1.0, 1.2, 1.9, 1.0, 0.6, 1.0, 0.4, 1.0, 0.8, 3.5),
}
NAMES = tuple(field.name for field in dataclasses.fields(Coefficients))
LEAST_PROBES = 5
LEAST_MARGIN = 0.05  # mlx is limited to the prediction, and oversteps it by one allocation at most


@dataclass(frozen=True)
class Mode:
    """A way of computing that has its own coefficients."""

    checkpointing: bool
    dequantize_base: bool


@dataclass(frozen=True)
class Calibration:
    """What a machine has shown of a model in one mode."""

    mode: Mode
    coefficients: Coefficients
    extra_bytes: int  # always there, and in no header
    speed: Speed
    worst_residual: float  # of the fit on its own probes, as a share of the peak
    probes: int
    ahead: float = 0.0  # of the least that mlx can do with, where that was measured

    @property
    def margin(self) -> float:
        """To be kept free, as a share of the predicted peak."""
        return max(LEAST_MARGIN, self.worst_residual)

    def applied_to(self, backend: Backend) -> Backend:
        """The estimate's backend with what was measured."""
        return dataclasses.replace(
            backend, coefficients=self.coefficients, extra_bytes=self.extra_bytes, ahead=self.ahead
        )


def probe_points(model: ModelFiles, template: TrainSettings, mode: Mode) -> tuple[ProbePoint, ...]:
    """What to measure: depths 4 and 8, or half of a model that has fewer blocks and all of it."""
    deep = min(8, model.num_layers)
    shallow = min(4, max(1, deep // 2))
    longest = model.max_positions or 2**20
    found = []
    planned = [(shallow, shape) for shape in SHAPES] + [(deep, shape) for shape in DEEPER]
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
    extra = max(0, int(np.median([each.still_bytes - _still_bytes(model, each) for each in measured])))
    floors = all(each.floor_bytes for each in measured)
    equations = [_equation(model, each, extra, floors=floors) for each in measured]
    usual = (USUAL_FLOOR if floors else USUAL)[mode.checkpointing]
    found, residual = solve(equations, np.array([getattr(usual, name) for name in NAMES]))
    coefficients = Coefficients(**dict(zip(NAMES, map(float, found), strict=True)))
    speed, ahead = fit_speed(measured), AHEAD if floors else 0.0
    return Calibration(mode, coefficients, extra, speed, residual, len(measured), ahead)


def _equation(model: ModelFiles, each: Measured, extra_bytes: int, *, floors: bool) -> Equation:
    """What a probe says of the coefficients, every size as a share of its peak, or of the least that it needs."""
    settings, peak = each.point.settings, each.floor_bytes if floors else each.peak_bytes
    short, shape = shortened(model, each.point.num_layers), shape_of(each.point)
    backend = backend_for(model, each.point, each.device)
    phases = work_phases(short, settings.lora, shape, backend)
    sizes = np.array([[getattr(phase, name) for name in NAMES] for phase in phases], float)
    gradient = FLOAT32 * trained_parameters(short, settings.lora, settings.method)
    still = _still_bytes(model, each) + extra_bytes + gradient * shape.accumulates
    optimizer = at_work_bytes(short, settings.lora, backend) - gradient * shape.accumulates
    return Equation(sizes / peak, still / peak, optimizer / peak)


def _still_bytes(model: ModelFiles, each: Measured) -> int:
    """Weights, adapter and moments of a probe's model, by its headers."""
    settings, short = each.point.settings, shortened(model, each.point.num_layers)
    backend = backend_for(model, each.point, each.device)
    trained = FLOAT32 * trained_parameters(short, settings.lora, settings.method)
    return base_bytes(short, backend) + trained + optimizer_state_bytes(short, settings.lora, backend)


def backend_for(model: ModelFiles, point: ProbePoint, device: str) -> Backend:
    """The estimate's backend for a probe."""
    settings, name = point.settings, "cpu" if device == "cpu" else "gpu"
    return backend_of(
        model, name, settings.dequantize_base, settings.method, checkpointing=settings.gradient_checkpointing,
        optimizer=settings.optimizer, optimizer_state_bits=settings.optimizer_state_bits,
    )  # fmt: skip


def shape_of(point: ProbePoint) -> Shape:
    """The shape of a probe's micro-batches."""
    return Shape(point.settings.batch_size, point.tokens, point.settings.gradient_accumulation > 1)


def predict(model: ModelFiles, calibration: Calibration, point: ProbePoint, device: str = "cpu") -> int:
    """Peak of mlx's allocator in a probe like those measured, in bytes."""
    backend = calibration.applied_to(backend_for(model, point, device))
    short = shortened(model, point.num_layers)
    return total_bytes(predicted_peak(short, point.settings.lora, shape_of(point), backend))


def limit_bytes(model: ModelFiles, calibration: Calibration, point: ProbePoint, device: str = "cpu") -> int:
    """mlx's limit with which it takes what is predicted."""
    backend = calibration.applied_to(backend_for(model, point, device))
    overstep = allocation_bytes(model, shape_of(point), backend)
    return predict(model, calibration, point, device) - overstep


def cache_path(model: ModelFiles, lora: LoraSettings, method: str, mode: Mode, chip: str) -> Path:
    """Where a calibration is kept: by model, chip, versions, adapter and mode."""
    targets, words = ",".join(lora.targets), [model.fingerprint, chip, method, str(lora.rank), str(lora.dropout)]
    words.append(_engine_code())
    key = hashlib.blake2b("\n".join([*words, targets, str(mode), *installed_versions()]).encode(), digest_size=12)
    return cache_directory() / "calibrations" / f"{key.hexdigest()}.json"


def _engine_code() -> str:
    """Hash of the source that decides how much memory an update takes."""
    digest, package = hashlib.blake2b(digest_size=8), Path(__file__).parent.parent
    core = (package / "core" / name for name in ("child_process.py", "memory_terms.py", "data/row_order.py"))
    for file in sorted([*(package / "engine").glob("*.py"), *core]):
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
