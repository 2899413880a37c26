"""Measures updates at several shapes: memory and time. `python -m safetrain.engine.calibrate REQUEST`

Of a shortened model: real widths, vocabulary and loss, few blocks, weights that mean nothing: none are loaded. A
process of its own, because a probe may die. Prints one line of JSON per probe, as it goes.
"""

import dataclasses
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from safetrain.core.child_process import be_first_choice_of_the_kernel, die_with_parent
from safetrain.core.data.token_rows import TokenRow, TokenRows, token_row
from safetrain.core.model_config import VOCABULARY, first_of, with_text
from safetrain.core.model_files import read_model_files
from safetrain.core.packing import packing_of
from safetrain.core.probes import Measured, ProbePoint, read_request
from safetrain.engine.blas import load_fast_blas

if TYPE_CHECKING:
    from safetrain.engine.model import BaseModel  # loads mlx

LEAST_VOCABULARY = 256  # where config.json does not say it
FLOOR_UPDATES = 2
FLOOR_SHARE = 0.5  # of the peak; from half of it down mlx waits for every operation that matters (measured: 0.6 to 1)
LEAST_UPDATES, MOST_UPDATES = 4, 10  # the first is never used: optimizer state and buffers are made in it
ENOUGH_SECONDS = 0.7  # of updates: parts of a micro-batch meet in different places each time, and the largest counts


def main(request_path: str) -> None:
    """Measure every point of the request."""
    request = read_request(Path(request_path))
    die_with_parent(os.getppid())
    be_first_choice_of_the_kernel()
    load_fast_blas()
    folder = Path(request.folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    from safetrain.engine.limits import keep_to_room
    from safetrain.engine.model import open_skeleton

    keep_to_room()
    packing = packing_of(read_model_files(folder).tensors)
    vocabulary = first_of(with_text(config), VOCABULARY) or LEAST_VOCABULARY
    for point in request.points:
        dequantize = point.settings.dequantize_base
        model = open_skeleton(config, point.num_layers, dequantize=dequantize, float32=request.float32, packing=packing)
        found = measure_point(model, vocabulary, point, floor=request.floors)
        print(json.dumps(dataclasses.asdict(found)), flush=True)


def measure_point(model: "BaseModel", vocabulary: int, point: ProbePoint, *, floor: bool = False) -> Measured:
    """Peak of mlx's allocator and fastest step of a few updates, every token a label.

    With ``floor`` also the peak of an update in which mlx is limited to half of that, so that it waits
    for each operation before it starts the next. That is nearly always the same: nothing runs ahead.
    """
    import mlx.core as mx

    from safetrain.engine.model import on_cpu

    own_limit = mx.get_memory_limit()
    if point.mlx_limit_bytes:
        mx.set_memory_limit(point.mlx_limit_bytes)
    updates = _Updates(model, vocabulary, point)
    still = mx.get_active_memory()
    peaks, seconds = list[int](), list[float]()
    while len(peaks) < LEAST_UPDATES or (sum(seconds) < ENOUGH_SECONDS and len(peaks) < MOST_UPDATES):
        began = time.perf_counter()
        peaks.append(updates.make())
        seconds.append(time.perf_counter() - began)
    least = 0
    if floor:
        mx.set_memory_limit(int(FLOOR_SHARE * max(peaks[1:])))
        least = max(updates.make() for _ in range(FLOOR_UPDATES))
    del model, updates
    gc.collect()
    mx.clear_cache()
    mx.set_memory_limit(own_limit)
    device = "cpu" if on_cpu() else str(mx.default_device())
    return Measured(point, still, max(peaks[1:]), min(seconds[1:]), device, least)


class _Updates:
    """Updates of one shape, on rows that mean nothing."""

    def __init__(self, model: "BaseModel", vocabulary: int, point: ProbePoint) -> None:
        import mlx.core as mx

        from safetrain.engine.model import training_layout
        from safetrain.engine.run import equip, optimizer_of

        self._model, self._settings, self._made = model, point.settings, 0
        self._gradients = equip(model, point.settings)
        self._optimizer = optimizer_of(point.settings)
        self._optimizer.init(model.module.trainable_parameters())
        mx.eval(model.module.parameters(), self._optimizer.state)
        mx.clear_cache()
        one = TokenRows.of([made_up_row(point.tokens, vocabulary)])
        self._rows = one.take([0] * point.settings.rows_per_update)
        self._layout = training_layout(model, point.settings.batch_size, self._rows.inputs())

    def make(self) -> int:
        """Make one; the peak of mlx's memory in it."""
        import mlx.core as mx

        from safetrain.core.data.row_order import Cursor
        from safetrain.engine.batches import update_at
        from safetrain.engine.update import apply_gradient, measure

        model, optimizer = self._model, self._optimizer
        model.module.train()
        mx.reset_peak_memory()
        update = update_at(self._rows, Cursor(0, 0), 1, len(self._rows), self._layout)
        loss, gradient = self._gradients.of(update, self._made)
        result = measure(loss, gradient)
        apply_gradient(model, optimizer, gradient, result.grad_norm, 1e-4, self._settings.max_grad_norm)
        mx.eval(model.module.trainable_parameters(), optimizer.state)
        self._made += 1
        return mx.get_peak_memory()


def made_up_row(tokens: int, vocabulary: int) -> TokenRow:
    """A row that feeds ``tokens`` tokens, all of them with a label."""
    return token_row([place % vocabulary for place in range(tokens + 1)], [True] * (tokens + 1))


if __name__ == "__main__":
    main(sys.argv[1])
