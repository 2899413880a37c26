"""Which of mlx's attention kernels a GPU has for a model, by mlx 0.32's source. Pure: the device is handed in.

Metal, backend/metal/scaled_dot_product_attention.cpp: ``has_fused_kernel``, ``use_fallback``; it trains unfused.
CUDA, backend/cuda/scaled_dot_product_attention.cpp: ``supports_sdpa_cudnn``, the VJP's ``use_fallback``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

METAL_HEAD_SIZES = (64, 72, 80, 96, 128)  # 192 and 256 have one, which mlx finds slower than none
LARGEST_CUDNN_HEAD = 128
LEAST_CUDNN_CAPABILITY = 8  # Ampere; a T4 has 7
FUSED_BACKWARD_STEP = 128  # cuDNN's backward pass takes widths that are a multiple of this


@dataclass(frozen=True)
class FusedAttention:
    """What is fused: the forward pass where no gradient is asked for, and both passes in training."""

    forward: bool
    backward: bool


def fused_attention(device: Mapping[str, object], *, metal: bool, head_size: int, in_float32: bool) -> FusedAttention:
    """``device`` is ``mx.device_info()`` of a GPU, ``head_size`` 0 where it is not known."""
    if metal:
        return FusedAttention(head_size in METAL_HEAD_SIZES, backward=False)
    capability = device.get("compute_capability_major")
    able = isinstance(capability, int) and capability >= LEAST_CUDNN_CAPABILITY
    cudnn = able and not in_float32 and 0 < head_size <= LARGEST_CUDNN_HEAD and head_size % 8 == 0
    return FusedAttention(cudnn, cudnn)
