"""Measures updates at several shapes: memory and time. `python -m safetrain.engine.calibrate REQUEST`

Of a shortened model (real widths, vocabulary and loss, few blocks, weights that mean nothing: none are loaded), or of
the model itself. A process of its own, because a probe may die. Prints one line of JSON per probe, as it goes.
"""

import gc
import json
import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from safetrain.core.chat import Rendered
from safetrain.core.child_process import be_first_choice_of_the_kernel, die_with_parent, limit_memory
from safetrain.core.probes import Measured, ProbePoint, read_request
from safetrain.engine.blas import load_fast_blas

if TYPE_CHECKING:
    from safetrain.engine.model import BaseModel  # loads mlx

LEAST_UPDATES, MOST_UPDATES = 4, 10  # the first is never used: optimizer state and buffers are made in it
ENOUGH_SECONDS = 0.7  # of updates: parts of a micro-batch meet in different places each time, and the largest counts


def main(request_path: str) -> None:
    """Measure every point of the request."""
    request = read_request(Path(request_path))
    die_with_parent(os.getppid())
    be_first_choice_of_the_kernel()
    limit_memory(request.data_limit_bytes)
    load_fast_blas()
    folder = Path(request.folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {**config, **(config.get("text_config") or {})}
    from safetrain.engine.model import open_base, open_skeleton

    for point in request.points:
        dequantize = point.settings.dequantize_base
        if request.shortened:
            model = open_skeleton(config, point.num_layers, dequantize=dequantize, float32=request.float32)
        else:
            model = open_base(folder, dequantize=dequantize)
        print(json.dumps(asdict(measure_point(model, config["vocab_size"], point))), flush=True)


def measure_point(model: "BaseModel", vocabulary: int, point: ProbePoint) -> Measured:
    """Peak of mlx's allocator, resident memory and fastest step of a few updates, every token a label."""
    import mlx.core as mx

    from safetrain.engine.batches import Cursor, update_at
    from safetrain.engine.limits import set_limits
    from safetrain.engine.model import layout_for, on_cpu
    from safetrain.engine.optimizer import build_optimizer
    from safetrain.engine.run import equip
    from safetrain.engine.update import apply_gradient, measure

    settings, own_limit = point.settings, mx.get_memory_limit()
    if point.predicted_peak_bytes:
        set_limits(point.budget_bytes, point.predicted_peak_bytes)
    gradients = equip(model, settings)
    optimizer = build_optimizer(settings.optimizer, 0.0)
    optimizer.init(model.module.trainable_parameters())
    mx.eval(model.module.parameters(), optimizer.state)
    mx.clear_cache()
    still = mx.get_active_memory()
    peaks: list[int] = []
    seconds: list[float] = []
    layout = layout_for(model, settings.batch_size * point.tokens, training=True)
    rows = [made_up_row(point.tokens, vocabulary)] * settings.rows_per_update
    while len(peaks) < LEAST_UPDATES or (sum(seconds) < ENOUGH_SECONDS and len(peaks) < MOST_UPDATES):
        model.module.train()
        mx.reset_peak_memory()
        began = time.perf_counter()
        loss, gradient = gradients.of(update_at(rows, Cursor(0, 0), 1, len(rows), layout), len(peaks))
        result = measure(loss, gradient)
        apply_gradient(model, optimizer, gradient, result.grad_norm, 1e-4, settings.max_grad_norm)
        mx.eval(model.module.trainable_parameters(), optimizer.state)
        seconds.append(time.perf_counter() - began)
        peaks.append(mx.get_peak_memory())
        del loss, gradient
    footprint = most_resident_bytes()
    device = "cpu" if on_cpu() else str(mx.default_device())
    del model, gradients, optimizer
    gc.collect()
    mx.clear_cache()
    mx.set_memory_limit(own_limit)
    return Measured(point, still, max(peaks[1:]), min(peaks[1:]), footprint, min(seconds[1:]), device)


def most_resident_bytes() -> int:
    """The largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def made_up_row(tokens: int, vocabulary: int) -> Rendered:
    """A row that feeds ``tokens`` tokens, all of them with a label."""
    return Rendered(tuple(place % vocabulary for place in range(tokens + 1)), (True,) * (tokens + 1))


if __name__ == "__main__":
    main(sys.argv[1])
