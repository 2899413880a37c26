"""The layout of a run's rows, decided once by the device, its attention kernels, and the lengths of the rows.

On a GPU mlx compiles a program for each shape and keeps it for ever. A shape is a width, a number of rows and a number
of labels, each out of a small set, so that a run meets a few dozen of them however many rows it has. They follow from
only the lengths, not from the order of training.
"""

import functools
import io

import mlx.core as mx
import numpy as np

from safetrain.core.memory.terms import WIDTH_STEP, padded
from safetrain.engine.backend import device
from safetrain.engine.batches import BatchLayout, padded_to
from safetrain.engine.model import BaseModel
from safetrain.engine.row_attention import Way
from safetrain.engine.upstream.probing import head_size

MOST_WIDTHS = 16
MOST_LONGER = 1.125  # times as wide, for a faster kernel: within the margin of the memory estimate
MOST_CANDIDATES = 256  # widths that are considered
FUSED_STEPS = (WIDTH_STEP, 128)  # cuDNN's backward pass takes widths that are a multiple of 128
KERNEL, GRADIENT_KERNEL = "ScaledDotProductAttention", "ScaledDotProductAttentionVJP"  # as mlx's graphs name them


def layout_for(model: BaseModel, most_tokens: int) -> BatchLayout:
    """How rows are laid out here to be measured: on CPU without padding, one shard a core; on a GPU in rectangles."""
    here = device()
    if here.packs_without_padding:
        return BatchLayout(most_tokens, shards=here.shards, rectangles=not model.packs_rows)
    return BatchLayout(most_tokens, rectangles=True, way=Way.SOFTMAX, fused_step=_fused_step(model, KERNEL))


def training_layout(model: BaseModel, batch_size: int, inputs: np.ndarray) -> BatchLayout:
    """The layout for training on rows that feed ``inputs`` (rows,) tokens, ``batch_size`` of the longest at once.

    On a GPU in rectangles of few shapes, so that few programs are compiled.
    """
    if device().packs_without_padding:
        return layout_for(model, batch_size * padded(int(inputs.max())))
    fused_step = _fused_step(model, GRADIENT_KERNEL)
    widths = plan_widths(inputs, long_step=fused_step or WIDTH_STEP)
    return BatchLayout(batch_size * widths[-1], rectangles=True, widths=widths, way=Way.SOFTMAX, fused_step=fused_step)


def _fused_step(model: BaseModel, kernel: str) -> int:
    """The least of FUSED_STEPS at whose multiples mlx computes the model's attention by ``kernel``; 0: none."""
    size = head_size(model.module)
    if not model.packs_rows or not size:
        return 0
    was_training = model.module.training
    model.module.eval()  # dropout has no random numbers yet
    dtype = model.module(mx.array([[0]])).dtype
    model.module.train(was_training)
    return next((step for step in FUSED_STEPS if kernel in attention_graph(step, size, dtype, kernel)), 0)


def attention_graph(width: int, head_size: int, dtype: mx.Dtype, kernel: str) -> str:
    """What mlx would compute here for causal attention, or for its gradient if ``kernel`` is that of a gradient.

    mlx chooses its kernels when it builds a graph, so nothing is computed.
    """
    attend = functools.partial(mx.fast.scaled_dot_product_attention, scale=1.0, mask="causal")
    part, graph = mx.zeros((1, 1, width, head_size), dtype), io.StringIO()
    outputs = mx.vjp(attend, [part] * 3, [part])[1] if kernel == GRADIENT_KERNEL else [attend(part, part, part)]
    mx.export_to_dot(graph, *outputs)
    return graph.getvalue()


def plan_widths(lengths: np.ndarray, most: int = MOST_WIDTHS, long_step: int = WIDTH_STEP) -> tuple[int, ...]:
    """At most ``most`` widths, ascending, that hold rows of these lengths with the least padding.

    Multiples of WIDTH_STEP; beyond ``long_step`` of that, where it is little more. Exact, by dynamic programming over
    the distinct widths.
    """
    rounded = padded_to(lengths, WIDTH_STEP)
    longer = padded_to(lengths, long_step)
    rounded = np.where((rounded > long_step) & (longer <= MOST_LONGER * rounded), longer, rounded)
    coarse = WIDTH_STEP * -(-int(rounded.max()) // (WIDTH_STEP * MOST_CANDIDATES))
    sizes, counts = np.unique(padded_to(rounded, max(coarse, WIDTH_STEP)), return_counts=True)
    sums, before = np.concatenate([[0], np.cumsum(counts)]), np.concatenate([[0], np.cumsum(counts * sizes)])
    best = np.full(len(sizes) + 1, np.inf)
    widths: list[tuple[int, ...]] = [()] * (len(sizes) + 1)
    best[0] = 0.0
    for _ in range(min(most, len(sizes))):
        new, picked = best.copy(), list(widths)
        for stop in range(1, len(sizes) + 1):
            size = sizes[stop - 1]
            cost = best[:stop] + size * (sums[stop] - sums[:stop]) - (before[stop] - before[:stop])
            start = int(cost.argmin())
            if cost[start] < new[stop]:
                new[stop], picked[stop] = cost[start], (*widths[start], int(size))
        best, widths = new, picked
    return widths[-1]
