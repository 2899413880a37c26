"""The layout of a run's rows, decided once by the device, its attention kernels, and the lengths of the rows.

On a GPU mlx compiles a program for each shape and keeps it for ever. A shape is a width, a number of rows and a number
of labels, each out of a small set, so that a run meets a few dozen of them however many rows it has. They follow from
only the lengths, not from the order of training.

Which attention is one kernel follows mlx 0.32's source.
Metal, backend/metal/scaled_dot_product_attention.cpp: ``has_fused_kernel``, ``use_fallback``; it trains unfused.
CUDA, backend/cuda/scaled_dot_product_attention.cpp: ``supports_sdpa_cudnn``, the VJP's ``use_fallback``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
METAL_HEAD_SIZES = (64, 72, 80, 96, 128)  # 192 and 256 have one, which mlx finds slower than none
LARGEST_CUDNN_HEAD = 128
LEAST_CUDNN_CAPABILITY = 8  # Ampere; a T4 has 7
FUSED_BACKWARD_STEP = 128  # cuDNN's backward pass takes widths that are a multiple of this


@dataclass(frozen=True)
class FusedAttention:
    """What is fused: the forward pass without a gradient, and both passes in training."""

    forward: bool
    backward: bool


def layout_for(model: BaseModel, most_tokens: int) -> BatchLayout:
    """How rows are laid out here to be measured: on CPU without padding, one shard a core; on a GPU in rectangles."""
    here = device()
    if here.packs_without_padding:
        return BatchLayout(most_tokens, shards=here.shards, rectangles=not model.packs_rows)
    fused_step = 1 if _attention_kernels(model).forward else 0
    return BatchLayout(most_tokens, rectangles=True, way=Way.SOFTMAX, fused_step=fused_step)


def training_layout(model: BaseModel, batch_size: int, inputs: np.ndarray) -> BatchLayout:
    """The layout for training on rows that feed ``inputs`` (rows,) tokens, ``batch_size`` of the longest at once.

    On a GPU in rectangles of few shapes, so that few programs are compiled.
    """
    if device().packs_without_padding:
        return layout_for(model, batch_size * padded(int(inputs.max())))
    fused_step = FUSED_BACKWARD_STEP if _attention_kernels(model).backward else 0
    widths = plan_widths(inputs, long_step=fused_step or WIDTH_STEP)
    return BatchLayout(batch_size * widths[-1], rectangles=True, widths=widths, way=Way.SOFTMAX, fused_step=fused_step)


def _attention_kernels(model: BaseModel) -> FusedAttention:
    here = device()
    if not model.packs_rows or here.packs_without_padding:
        return FusedAttention(forward=False, backward=False)
    was_training = model.module.training
    model.module.eval()  # dropout has no random numbers yet
    in_float32 = model.module(mx.array([[0]])).dtype == mx.float32
    model.module.train(was_training)
    size, metal = head_size(model.module), here.name == "metal"
    return fused_attention(here.facts, metal=metal, head_size=size, in_float32=in_float32)


def fused_attention(device: Mapping[str, object], *, metal: bool, head_size: int, in_float32: bool) -> FusedAttention:
    """``device`` is ``mx.device_info()`` of a GPU, ``head_size`` 0 where it is not known."""
    if metal:
        return FusedAttention(head_size in METAL_HEAD_SIZES, backward=False)
    capability = device.get("compute_capability_major")
    able = isinstance(capability, int) and capability >= LEAST_CUDNN_CAPABILITY
    cudnn = able and not in_float32 and 0 < head_size <= LARGEST_CUDNN_HEAD and head_size % 8 == 0
    return FusedAttention(cudnn, cudnn)


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
    chosen: list[tuple[int, ...]] = [()] * (len(sizes) + 1)
    best[0] = 0.0
    for _ in range(min(most, len(sizes))):
        new, picked = best.copy(), list(chosen)
        for stop in range(1, len(sizes) + 1):
            size = sizes[stop - 1]
            cost = best[:stop] + size * (sums[stop] - sums[:stop]) - (before[stop] - before[:stop])
            start = int(cost.argmin())
            if cost[start] < new[stop]:
                new[stop], picked[stop] = cost[start], (*chosen[start], int(size))
        best, chosen = new, picked
    return chosen[-1]
