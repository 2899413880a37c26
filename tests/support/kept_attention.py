"""Attention as this engine did it until it kept log-sum-exps: probabilities are kept for the backward pass.

Written out for the benchmark and the test that compare with it.
"""

from collections.abc import Callable
from typing import Any

QUERIES = 128  # scored together, as then
LOWEST_EXPONENT, LOG2_E = -126.0, 1.4426950408889634

Attention = Callable[[Any, Any, Any], Any]  # of arrays (tokens, heads, 1, size)


def kept_probabilities(rows: int, tokens: int, scale: float) -> Attention:
    """A function of queries, keys and values of ``rows`` rows, which lie in one line."""
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
