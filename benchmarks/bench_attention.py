"""Time and memory of attention in an update, with probabilities kept for the backward pass and with them made again.

The former is what this engine did until attention kept log-sum-exps; it is written out here, to stand beside.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.machine import write_result
from benchmarks.timing import fastest
from safetrain.engine.blas import blas_threads, load_fast_blas

HEADS, SIZE, BLOCKS = 12, 64, 12  # of the 91M Llama of benchmarks/throughput_cases.py
SHAPES = ((1, 512), (4, 512), (8, 128), (1, 2048), (1, 4096), (1, 8192))  # rows and tokens
QUERIES = 128  # scored together, as then
LOWEST_EXPONENT, LOG2_E = -126.0, 1.4426950408889634
LONG = 4096  # from here on measured once

Attention = Callable[[Any, Any, Any], Any]  # of arrays (tokens, heads, 1, size)


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


def made_again(rows: int, tokens: int, scale: float) -> Attention:
    """What the engine does."""
    from safetrain.engine.row_attention import Block, block_attention

    return block_attention(Block(0, rows * tokens, rows, tokens), scale, None)


def kept_probabilities(rows: int, tokens: int, scale: float) -> Attention:
    """What it did."""
    import mlx.core as mx

    def rectangle(part: Any, groups: int) -> Any:
        heads, size = part.shape[1], part.shape[3]
        return part.reshape(rows, tokens, heads // groups, groups, size).transpose(0, 2, 3, 1, 4)

    def listed(part: Any) -> Any:
        heads = part.shape[1] * part.shape[2]
        return part.transpose(0, 3, 1, 2, 4).reshape(rows * tokens, heads, 1, part.shape[4])

    def over_groups(part: Any) -> Any:
        return part.sum(axis=2, keepdims=True)

    tiles = [(start, min(start + QUERIES, tokens)) for start in range(0, tokens, QUERIES)]
    places = mx.arange(tokens)
    hidden = [mx.where(places[start:stop, None] >= places[None, :stop], 0.0, -1e30) for start, stop in tiles]
    mx.eval(hidden)

    def forward(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        groups = q.shape[1] // k.shape[1]
        queries, keys, values = rectangle(q, groups) * (scale * LOG2_E), rectangle(k, 1), rectangle(v, 1)
        outputs, kept = [], []
        for (start, stop), mask in zip(tiles, hidden, strict=True):
            scores = queries[..., start:stop, :] @ keys[..., :stop, :].swapaxes(-1, -2) + mask
            powers = mx.power(2.0, mx.maximum(scores - scores.max(axis=-1, keepdims=True), LOWEST_EXPONENT))
            kept.append(powers / powers.sum(axis=-1, keepdims=True))
            outputs.append(kept[-1] @ values[..., :stop, :])
        return (listed(mx.concatenate(outputs, axis=-2)), *kept)

    def backward(primals: Any, cotangents: Any, results: Any) -> tuple[Any, ...]:
        groups = primals[0].shape[1] // primals[1].shape[1]
        queries, keys, values = rectangle(primals[0], groups), rectangle(primals[1], 1), rectangle(primals[2], 1)
        along, output = rectangle(cotangents[0], groups), rectangle(results[0], groups)
        inner = (along * output).sum(axis=-1, keepdims=True)
        d_queries, sums = [], [mx.zeros_like(keys), mx.zeros_like(values)]
        for (start, stop), powers in zip(tiles, results[1:], strict=True):
            here = along[..., start:stop, :]
            d_powers = here @ values[..., :stop, :].swapaxes(-1, -2)
            d_scores = powers * (d_powers - inner[..., start:stop, :]) * scale
            d_queries.append(d_scores @ keys[..., :stop, :])
            parts = [over_groups(one.swapaxes(-1, -2) @ other)
                     for one, other in ((d_scores, queries[..., start:stop, :]), (powers, here))]  # fmt: skip
            sums = [mx.concatenate([total[..., :stop, :] + part, total[..., stop:, :]], axis=-2)
                    for total, part in zip(sums, parts, strict=True)]  # fmt: skip
        return tuple(map(listed, (mx.concatenate(d_queries, axis=-2), *sums)))

    attend: Any = mx.custom_function(forward)
    attend.vjp(backward)
    return lambda q, k, v: attend(q, k, v)[0]


if __name__ == "__main__":
    main()
