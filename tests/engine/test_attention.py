"""Attention in tiles gives the numbers of a plain one, and keeps next to nothing."""

import itertools
from pathlib import Path
from typing import Any

import mlx
import mlx.core as mx
import numpy as np
import pytest

from safetrain.core.memory.terms import Tiles, metal_row_bytes
from safetrain.engine import row_attention
from safetrain.engine.batches import _gather
from safetrain.engine.row_attention import (
    GRADIENT_KERNEL,
    Block,
    PackedRows,
    has_gradient_kernel,
    padded_attention,
    powers_of,
)
from safetrain.engine.upstream.adaptation import PackedRowsCache, packed_attention
from tests.conftest import cpu_only
from tests.engine.exact import within

SIZE = 8
Given = list[mx.array]


def given(tokens: int, heads: int, key_heads: int, spread: float = 1.0) -> Given:
    """Queries, keys, values, and a gradient of the outputs; scores of some rows are many times those of others."""
    mx.random.seed(4)
    made = [mx.random.normal((tokens, count, 1, SIZE)) for count in (heads, key_heads, key_heads, heads)]
    made[0] = made[0] * mx.exp(mx.random.normal((tokens, 1, 1, 1)) * np.log(spread))
    return made


def blocks_of(*widths: int) -> tuple[Block, ...]:
    """One rectangle of rows of these widths, the first the widest."""
    return (Block(0, sum(widths), len(widths), widths[0], _gather(list(widths))),)


def both_passes(blocks: tuple[Block, ...], window: int | None, parts: Given) -> list[np.ndarray]:
    """Output and the gradients of queries, keys and values."""
    cache = PackedRowsCache(PackedRows(mx.array([0]), blocks))

    def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return packed_attention(q, k, v, cache=cache, scale=SIZE**-0.5, mask=window)

    outputs, gradients = mx.vjp(attention, parts[:3], [parts[3]])
    return [np.array(each) for each in (*outputs, *gradients)]


def plain(widths: tuple[int, ...], window: int | None, parts: Given) -> list[np.ndarray]:
    """By mlx's own attention, row by row with a mask."""

    def attention(*given: mx.array) -> mx.array:
        made = []
        for start, stop in itertools.pairwise([0, *np.cumsum(widths).tolist()]):
            distance = np.arange(stop - start)[:, None] - np.arange(stop - start)[None, :]
            mask = mx.array((distance >= 0) & (distance < (window or stop)))
            q, k, v = (part[start:stop, :, 0].transpose(1, 0, 2)[None] for part in given)
            row = mx.fast.scaled_dot_product_attention(q, k, v, scale=SIZE**-0.5, mask=mask)
            made.append(row[0].transpose(1, 0, 2)[:, :, None])
        return mx.concatenate(made)

    outputs, gradients = mx.vjp(attention, parts[:3], [parts[3]])
    return [np.array(each) for each in (*outputs, *gradients)]


def farthest(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(
        float(np.linalg.norm(one - other) / (np.linalg.norm(other) or 1.0))
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize(
    ("widths", "window"),
    [((1,), None), ((5, 5), None), ((70, 70, 37, 2), None), ((150,), None), ((150, 140), 40), ((140, 140), 129)],
)
def test_tiles_give_the_plain_attention(
    heads: tuple[int, int], widths: tuple[int, ...], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tile or several, gathered rows and equal ones, shared keys, windows; some lines after the others too."""
    parts = given(sum(widths), *heads)
    expected = plain(widths, window, parts)
    for lines, most_queries in ((1, 512), (3, 128)):
        monkeypatch.setattr(row_attention, "CPU_TILES", Tiles(most_queries, most_queries // 2, 2**23))
        monkeypatch.setattr(Tiles, "lines", lambda *_sizes, lines=lines: lines)
        assert farthest(both_passes(blocks_of(*widths), window, parts), expected) <= within(2e-6)


@cpu_only
def test_later_tokens_change_no_bit_and_no_product_is_subnormal() -> None:
    """Products of subnormal numbers took a third of an update on Intel."""
    before, after = given(64, 2, 2), given(64, 2, 2)
    for part in after[1:3]:
        part[32:] = part[32:] + 100.0
    before[3][32:], after[3][32:] = 0.0, 0.0  # no gradient comes from them
    blocks = blocks_of(64)
    for found, expected in zip(both_passes(blocks, None, after), both_passes(blocks, None, before), strict=True):
        assert (found[:32] == expected[:32]).all()
        assert np.abs(found[found != 0]).min() > np.finfo(np.float32).tiny
    powers = np.array(powers_of(mx.arange(-200.0, 1.0)))
    assert (powers[:100] == 0).all()
    assert powers[powers > 0].min() * 1e-9 > np.finfo(np.float32).tiny


@cpu_only
def test_a_long_row_takes_far_less_than_its_probabilities() -> None:
    """Where mlx keeps to a limit, as in a training; else it makes some tiles ahead."""
    tokens, heads = 2048, 2
    parts = given(tokens, heads, heads)
    mx.eval(parts)
    mx.clear_cache()
    before, limit = mx.get_active_memory(), mx.set_memory_limit(1)
    mx.reset_peak_memory()
    both_passes(blocks_of(tokens), None, parts)
    peak = mx.get_peak_memory() - before
    mx.set_memory_limit(limit)
    assert peak < 0.5 * (heads * tokens**2 // 2) * 4


@pytest.mark.parametrize("most_bytes", [None, 2**28, 3 * metal_row_bytes(4, 50, 4), 1])
def test_padded_rows_on_a_gpu_attend_as_packed_ones(monkeypatch: pytest.MonkeyPatch, most_bytes: int | None) -> None:
    """In tiles, or by mlx's own kernels, on Metal some rows after the others: their tiles would fill the memory."""
    parts, expected = given(200, 4, 2), both_passes(blocks_of(50, 50, 50, 50), None, given(200, 4, 2))
    monkeypatch.setattr("safetrain.engine.backend.name_now", lambda: "cuda")
    if most_bytes is not None:
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr(row_attention, "has_gradient_kernel", lambda *_: True)
        monkeypatch.setattr(row_attention, "MOST_METAL_BYTES", most_bytes)

    def attention(*listed: mx.array) -> mx.array:
        q, k, v = (part.reshape(4, 50, -1, SIZE).transpose(0, 2, 1, 3) for part in listed)
        return padded_attention(q, k, v, SIZE**-0.5).transpose(0, 2, 1, 3).reshape(200, 4, 1, SIZE)

    outputs, gradients = mx.vjp(attention, parts[:3], [parts[3]])
    assert farthest([np.array(each) for each in (*outputs, *gradients)], expected) <= within(2e-6)


def test_on_cuda_rows_get_the_width_that_its_gradient_has_a_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50 tokens 128: cuDNN's gradient has multiples of 128 alone, and tiles are slow."""
    parts, asked = given(100, 4, 2), list[tuple[int, ...]]()
    expected = both_passes(blocks_of(50, 50), None, parts)
    monkeypatch.setattr("safetrain.engine.backend.name_now", lambda: "cuda")
    monkeypatch.setattr(row_attention, "has_gradient_kernel", lambda width, *_: width % 128 == 0)
    kernel = mx.fast.scaled_dot_product_attention

    def seen(q: mx.array, *others: Any, **more: Any) -> mx.array:
        asked.append(q.shape)
        return kernel(q, *others, **more)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", seen)

    def attention(*listed: mx.array) -> mx.array:
        q, k, v = (part.reshape(2, 50, -1, SIZE).transpose(0, 2, 1, 3) for part in listed)
        return padded_attention(q, k, v, SIZE**-0.5).transpose(0, 2, 1, 3).reshape(100, 4, 1, SIZE)

    outputs, gradients = mx.vjp(attention, parts[:3], [parts[3]])
    assert farthest([np.array(each) for each in (*outputs, *gradients)], expected) <= within(2e-6)
    assert asked == [(2, 4, 128, SIZE)]


@pytest.mark.usefixtures("compiling")
def test_mlx_is_asked_for_a_kernel_that_it_has_by_its_name() -> None:
    """A name that mlx has changed would be read as a kernel that it has not, and every rectangle take the tiles."""
    header = (Path(next(iter(mlx.__path__))) / "include/mlx/fast_primitives.h").read_text(encoding="utf-8")
    assert f"DEFINE_NAME({GRADIENT_KERNEL})" in header
    assert not has_gradient_kernel(128, 64, mx.float32)  # a CPU has none
    assert not mx.compile(lambda x: x + has_gradient_kernel(64, 64, mx.float32))(mx.array(0)).item()  # also in a trace
