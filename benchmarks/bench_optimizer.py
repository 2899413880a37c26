"""The optimizer's part of an update on a CPU, with parameters of a block one after the other and side by side.

python -m benchmarks.bench_optimizer
"""

import statistics
import time
from typing import Any

from benchmarks.machine import write_result
from safetrain.core.memory.terms import MOST_SHARDS, usable_cores
from safetrain.engine.blas import load_fast_blas

SIZES = {"10m": (256, 704, 12), "85m": (768, 2048, 12), "400m": (1024, 2816, 24)}  # width, inner width, blocks
OPTIMIZERS = ("adamw", "muon")
MOST_BLOCKS, UPDATES = 4, 5  # a whole model's time is that of its blocks
HEADER = ["blocks as in", "optimizer", "one stream, ms a block", "streams", "ms a block", "as fast", "memory"]


def main() -> None:
    """One row for each preset and optimizer, the two in turn."""
    load_fast_blas()
    streams, rows = min(MOST_SHARDS, usable_cores()), list[list[object]]()
    for preset, (width, inner, _) in SIZES.items():
        for name in OPTIMIZERS:
            sides = [updates(name, width, inner, count) for count in (1, streams)]
            found = [[next(side) for side in sides] for _ in range(UPDATES)][1:]
            one, many = (statistics.median(pair[side][0] for pair in found) for side in (0, 1))
            ratio = statistics.median(pair[0][0] / pair[1][0] for pair in found)
            more = found[-1][1][1] - found[-1][0][1]
            rows.append([preset, name, f"{one:.1f}", streams, f"{many:.1f}", f"{ratio:.2f} x", f"{more:+.0f} MiB"])
            print(rows[-1], flush=True)
    notes = (
        f"{MOST_BLOCKS} blocks of seven float32 matrices; median of {UPDATES - 1} updates. Memory: what the peak of "
        "mlx's allocator is more with all streams.",
    )
    write_result("bench_optimizer", "The optimizer side by side, Linux CPU", HEADER, rows, notes)


def updates(name: str, width: int, inner: int, streams: int) -> Any:
    """Yields milliseconds a block and MiB at the peak, beside weights and state, of one update after the other."""
    import mlx.core as mx
    import mlx.nn as nn

    from safetrain.engine.optimizer import BlockOptimizer
    from safetrain.engine.whole_model import of_whole_model

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            square, wide = (width, width), (inner, width)
            for place, shape in enumerate((square, square, square, square, wide, wide, wide[::-1])):
                self[f"matrix{place}"] = mx.random.normal(shape)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [Block() for _ in range(MOST_BLOCKS)]

    module, optimizer = Model(), BlockOptimizer(of_whole_model(name, 0.1), streams=streams)
    optimizer.init(module.trainable_parameters())
    gradient = module.trainable_parameters()
    mx.eval(gradient, optimizer.state)
    while True:
        before, began = mx.get_active_memory(), time.perf_counter()
        mx.reset_peak_memory()
        optimizer.update(module, gradient, 1e-3, 1.0, mx.eval)
        seconds = time.perf_counter() - began
        yield 1000 * seconds / MOST_BLOCKS, (mx.get_peak_memory() - before) / 2**20


if __name__ == "__main__":
    main()
