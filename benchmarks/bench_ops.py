"""What single operations cost on mlx's Linux CPU backend, stock and as this engine does them."""

from collections.abc import Callable
from typing import Any

from benchmarks.machine import write_result
from benchmarks.timing import fastest
from safetrain.engine.cpu.blas import load_fast_blas

ROWS, WIDTH, HIDDEN, INNER, HEADS, SIZE, VOCABULARY = 8, 160, 768, 2048, 12, 64, 8192
TOKENS, LABELS = ROWS * WIDTH, 640
LARGE, FEW = (4096, 14336), 256  # inputs and outputs of a 7B's largest layers; tokens


def main() -> None:
    """One row a pair, on one core each (the products on all)."""
    load_fast_blas()
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.activations import swiglu as stock_swiglu

    from safetrain.engine.cpu.kernels import LinearDequantizedPerUse, cross_entropy, dequantizing_twice, swiglu
    from safetrain.engine.layers import dequantized
    from safetrain.engine.row_attention import Block, PackedRows
    from safetrain.engine.upstream.adaptation import PackedRowsCache, packed_attention

    normal = mx.random.normal
    x, weight = normal((TOKENS, HIDDEN)), normal((INNER, HIDDEN))
    gate, up, along = (normal((TOKENS, INNER)) for _ in range(3))
    quantized = nn.QuantizedLinear.from_linear(nn.Linear(HIDDEN, INNER, bias=False), 64, 4)
    per_use = nn.QuantizedLinear.from_linear(nn.Linear(HIDDEN, INNER, bias=False), 64, 4)
    per_use.__class__ = LinearDequantizedPerUse
    large, some = nn.QuantizedLinear.from_linear(nn.Linear(*LARGE, bias=False), 64, 4), normal((FEW, LARGE[0]))
    large.__class__ = LinearDequantizedPerUse
    q, k, v = (normal((ROWS, HEADS, WIDTH, SIZE)) for _ in range(3))
    along_q = normal((ROWS, HEADS, WIDTH, SIZE))
    listed = [part.transpose(0, 2, 1, 3).reshape(TOKENS, HEADS, 1, SIZE) for part in (q, k, v, along_q)]
    cache = PackedRowsCache(PackedRows(mx.tile(mx.arange(WIDTH), ROWS), (Block(0, TOKENS, ROWS, WIDTH),)))
    logits, targets = normal((LABELS, VOCABULARY)), mx.zeros((LABELS,), dtype=mx.int32)
    mx.eval(x, weight, gate, up, along, listed, logits, targets, quantized.parameters(), per_use.parameters())

    def both_ways(function: Callable[..., mx.array], *inputs: mx.array, along: mx.array) -> Callable[[], Any]:
        return lambda: mx.vjp(function, list(inputs), [along])

    def stock_attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=SIZE**-0.5, mask="causal")

    def our_attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return packed_attention(q, k, v, cache=cache, scale=SIZE**-0.5, mask=None)

    ones = mx.ones((LABELS,))
    pairs: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        (f"2 to the power of {TOKENS * INNER / 1e6:.1f} million numbers",
         lambda: mx.exp(gate), lambda: mx.power(2.0, gate)),
        ("SwiGLU, forward and backward",
         both_ways(stock_swiglu, gate, up, along=along), both_ways(swiglu, gate, up, along=along)),
        ("causal attention, forward and backward",
         both_ways(stock_attention, q, k, v, along=along_q), both_ways(our_attention, *listed[:3], along=listed[3])),
        (f"cross-entropy over {VOCABULARY}, forward and backward",
         both_ways(lambda z: nn.losses.cross_entropy(z, targets), logits, along=ones),
         both_ways(lambda z: cross_entropy(z, targets), logits, along=ones)),
        (f"a 4-bit weight times {TOKENS // 8} tokens",
         lambda: quantized(x[: TOKENS // 8]), lambda: per_use(x[: TOKENS // 8])),
        (f"a 4-bit weight of {LARGE[1]} x {LARGE[0]} and {FEW} tokens, both ways; stock: dequantized whole",
         both_ways(dequantizing_twice(lambda x: x @ dequantized(large).T), some, along=mx.ones((FEW, LARGE[1]))),
         both_ways(large, some, along=mx.ones((FEW, LARGE[1])))),
    ]  # fmt: skip
    rows: list[list[object]] = []
    for name, stock, ours in pairs:
        one, other = fastest(stock), fastest(ours)
        rows.append([name, f"{1e3 * one:.1f}", f"{1e3 * other:.1f}", f"{one / other:.1f} x"])
    product = fastest(lambda: x @ weight.T)
    rows.append([f"product {TOKENS} x {HIDDEN} x {INNER}, to compare", f"{1e3 * product:.1f}", "", ""])
    header = ["operation", "stock, ms", "this engine, ms", "faster"]
    write_result("bench_ops", "Single operations on Linux CPU, float32, fast BLAS in both columns", header, rows)


if __name__ == "__main__":
    main()
