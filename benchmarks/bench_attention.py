"""Time and memory of attention in an update, with probabilities kept for the backward pass and with them made again."""

from collections.abc import Callable
from typing import Any

from benchmarks.machine import write_result
from benchmarks.timing import fastest
from safetrain.engine.cpu.blas import blas_threads, load_fast_blas

Attention = Callable[[Any, Any, Any], Any]  # of arrays (tokens, heads, 1, size)
HEADS, SIZE, BLOCKS = 12, 64, 12  # of the 91M Llama of benchmarks/throughput_cases.py
SHAPES = ((1, 512), (4, 512), (8, 128), (1, 2048), (1, 4096), (1, 8192))  # rows and tokens
LONG = 4096  # from here on measured once


def main() -> None:
    """One row a shape. On one core, as each part of a micro-batch has one."""
    load_fast_blas()
    rows: list[list[object]] = []
    with blas_threads(2):
        for count, tokens in SHAPES:
            kept, again = (measure(make, count, tokens) for make in (kept_probabilities, made_again))
            sizes = [f"{size / 2**20:.0f}" for size in (kept[1], again[1])]
            slower = f"{100 * (again[0] / kept[0] - 1):+.0f} %"
            rows.append([f"{count} x {tokens}", f"{1e3 * kept[0]:.0f}", f"{1e3 * again[0]:.0f}", slower, *sizes])
    header = ["rows x tokens", "kept, ms", "made again, ms", "slower by", f"kept, {BLOCKS} blocks, MiB",
              f"made again, {BLOCKS} blocks, MiB"]  # fmt: skip
    notes = [
        f"Forward and backward pass of attention, {HEADS} heads of {SIZE}, float32, one core. Milliseconds: one block.",
        f"MiB: the peak of mlx's allocator with {BLOCKS} blocks, from those of one and two: queries, keys, values and "
        "outputs of all, and what the backward pass of one takes, where mlx runs no further ahead than it must.",
    ]
    write_result("bench_attention", "Attention in a training update, Linux CPU", header, rows, notes)


def measure(make: Callable[[int, int, float], Attention], rows: int, tokens: int) -> tuple[float, int]:
    """Seconds of one block, and bytes of BLOCKS blocks."""
    import mlx.core as mx

    mx.random.seed(0)
    hidden, along = (mx.random.normal((rows * tokens, HEADS, 1, SIZE)) for _ in range(2))
    mx.eval(hidden, along)
    attend = make(rows, tokens, SIZE**-0.5)

    def stack(blocks: int) -> Callable[[Any], Any]:
        def forward(x: Any) -> Any:
            for _ in range(blocks):
                x = attend(x * 1.1, x * 1.2, x * 1.3)
            return x

        return forward

    def both_passes(blocks: int) -> Any:
        return mx.vjp(stack(blocks), [hidden], [along])

    peaks, seconds = list[int](), 0.0
    for blocks in (2, 1):
        mx.clear_cache()
        before, limit = mx.get_active_memory(), mx.set_memory_limit(1)
        mx.reset_peak_memory()
        seconds = fastest(lambda blocks=blocks: both_passes(blocks), 1)  # type: ignore[misc]
        peaks.append(mx.get_peak_memory() - before)
        mx.set_memory_limit(limit)
    if tokens < LONG:
        seconds = fastest(lambda: both_passes(1))
    return seconds, peaks[1] + (BLOCKS - 1) * (peaks[0] - peaks[1])


def kept_probabilities(rows: int, tokens: int, scale: float) -> Attention:
    """Attention as it is usually written; mlx keeps what its gradient needs."""
    import mlx.core as mx

    hidden = mx.triu(mx.full((tokens, tokens), -1e30), k=1)

    def attend(*given: Any) -> Any:
        q, k, v = (part.reshape(rows, tokens, HEADS, SIZE).swapaxes(1, 2) for part in given)
        found = mx.softmax(scale * q @ k.swapaxes(2, 3) + hidden, axis=-1) @ v
        return found.swapaxes(1, 2).reshape(rows * tokens, HEADS, 1, SIZE)

    return attend


def made_again(rows: int, tokens: int, scale: float) -> Attention:
    """What the engine does."""
    from safetrain.engine.row_attention import Block, block_attention

    return block_attention(Block(0, rows * tokens, rows, tokens), scale, None)


if __name__ == "__main__":
    main()
