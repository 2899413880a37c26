"""How many bits each quantized weight has, layer by layer: from the headers and config.json.

A header gives the words and the groups of a row, which is bits times group size. Which is which, the type of the scales
says, or config.json, which has an entry for each layer that differs from the rest.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from safetrain.core.model.shapes import TensorHeader

WORD_BITS = 32
SCALES, COMPANIONS = "scales", ("scales", "biases", "global_scale")
FLOAT_MODES = ((4, 16), (4, 32), (8, 32))  # bits and group size of nvfp4, mxfp4, mxfp8
FLOAT_BITS = {bits * group: bits for bits, group in FLOAT_MODES}
AFFINE_BITS, AFFINE_GROUPS = (2, 3, 4, 5, 6, 8), (64, 32, 128)


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization in config.json, wherever it stands there; empty for a model that is not quantized."""
    text = config.get("text_config") or {}
    entries = (source.get(key) for source in (config, text) for key in ("quantization", "quantization_config"))
    return next((value for value in entries if isinstance(value, dict)), {})


def with_quantization(tensors: Iterable[TensorHeader], quantization: Mapping[str, Any]) -> tuple[TensorHeader, ...]:
    """The same headers, each quantized weight with its bits, and scales and biases marked."""
    headers = tuple(tensors)
    scales = {stem: tensor for tensor in headers if (stem := _stem(tensor, SCALES)) is not None}
    result = []
    for tensor in headers:
        stem, _, kind = tensor.name.rpartition(".")
        if stem in scales and kind in COMPANIONS:
            tensor = dataclasses.replace(tensor, of_quantization=True)
        elif stem in scales and kind == "weight" and tensor.dtype == "U32":
            tensor = dataclasses.replace(tensor, bits=_bits(tensor, scales[stem], quantization))
        result.append(tensor)
    return tuple(result)


def usual_bits(tensors: Iterable[TensorHeader], quantization: Mapping[str, Any]) -> int | None:
    """Bits of most of the quantized weights, or what config.json says; None for a model that is not quantized."""
    counted = Counter[int]()
    for tensor in tensors:
        if tensor.bits:
            counted[tensor.bits] += tensor.weights
    return counted.most_common(1)[0][0] if counted else _number(quantization.get("bits"))


def _bits(weight: TensorHeader, scales: TensorHeader, quantization: Mapping[str, Any]) -> int:
    """The bits of one layer; config.json counts only as far as it agrees with the header."""
    product = weight.shape[-1] * WORD_BITS // scales.shape[-1]  # bits times group size
    if scales.dtype == "U8" and product in FLOAT_BITS:
        return FLOAT_BITS[product]
    own = _entry(weight.name.removesuffix(".weight"), quantization)
    for group in (_number(own.get("group_size")), _number(quantization.get("group_size")), *AFFINE_GROUPS):
        if group and product % group == 0 and product // group in AFFINE_BITS:
            return product // group
    return _number(own.get("bits")) or _number(quantization.get("bits")) or WORD_BITS


def _entry(layer: str, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of a layer in config.json; multimodal models may leave out the first part of its name there."""
    for name in (layer, layer.partition(".")[2]):
        if isinstance(entry := quantization.get(name), dict):
            return entry
    return {}


def _stem(tensor: TensorHeader, kind: str) -> str | None:
    stem, _, last = tensor.name.rpartition(".")
    return stem if last == kind else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
