"""A model's weights as a GGUF file has them: names, order of rows, types and bytes, a few rows at a time.

The gguf package has llama.cpp's names for weights. Their layout is in llama.cpp's code: src/models/FAMILY.cpp,
conversion/FAMILY.py and ggml/src/ggml-common.h.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten

from safetrain.core.errors import ModelError
from safetrain.engine.layers import dequantized, inputs_of, slices_of
from safetrain.engine.tuned import DISCARD, NO_EFFECT
from safetrain.export.fuse import Changes

BLOCK = 32  # numbers that share a scale in GGUF's types
KINDS = {"f16": Kind.F16, "bf16": Kind.BF16, "q8_0": Kind.Q8_0, "q4_0": Kind.Q4_0}
PLAIN = (Kind.F32, Kind.F16, Kind.BF16)
AS_STORED = {mx.float16: Kind.F16, mx.bfloat16: Kind.BF16, mx.float32: Kind.F32}
REPACKED = (Kind.Q4_1, Kind.Q5_1, Kind.MXFP4)  # types with the numbers, scales and biases of mlx
HIGH_BIT = 4  # of a number in Q5_1, which is stored apart
READ_BITS = 8  # of quantized weights that are read back
AT_THE_ENDS = ("token_embd.weight", "output.weight")  # every token passes through them
KEEP_MLX = "keep it as an MLX model: safetrain fuse OUT"


@dataclass(frozen=True)
class GgufPart:
    """A weight of the model, and how the file stores it."""

    name: str  # in the file
    path: str  # of its layer in the module
    kind: str  # weight, or bias
    shape: tuple[int, ...]  # (outputs, inputs), or (width,)
    heads: int  # whose rows are reordered; 0: none
    added: float  # to every number in the file

    def order(self) -> np.ndarray:
        """For each row in the file, its place in mlx-lm; shape (rows,)."""
        rows = np.arange(self.shape[0])
        return rows.reshape(self.heads, 2, -1).swapaxes(1, 2).ravel() if self.heads else rows

    def stored_as(self, kind: Kind) -> Kind:
        """The weight's type in a file of ``kind``: F32 for vectors, Q8_0 for a name in AT_THE_ENDS if it is Q4_0."""
        if len(self.shape) == 1:
            return Kind.F32
        return Kind.Q8_0 if kind == Kind.Q4_0 and self.name in AT_THE_ENDS else kind

    def bytes_as(self, kind: Kind) -> int:
        """The weight's size in the type ``kind``, in bytes."""
        block, size = gguf.GGML_QUANT_SIZES[kind]
        return math.prod(self.shape) // block * size


def text_model(module: Any) -> Any:
    """The language model in a module: gemma3 also has a vision model."""
    return module.get("language_model", module)


def parts_of(module: Any, architecture: str) -> list[GgufPart]:
    """Every weight of the model, in the order of writing; raises ModelError if llama.cpp has no name for it."""
    inner = text_model(module)
    prefix, args = "" if inner is module else "language_model.", inner.args
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], args.num_hidden_layers)
    layers = dict(inner.named_modules())
    # llama.cpp rotates neighbouring numbers of q and k in Llama, mlx-lm the halves of a head
    turned = {"attn_q": args.num_attention_heads, "attn_k": args.num_key_value_heads}
    parts, arrays = list[GgufPart](), dict[str, mx.array](tree_flatten(inner.parameters()))
    for array_name, value in arrays.items():
        path, _, kind = array_name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        name = names.get_name(array_name, (".weight", ".bias"))
        if name is None:
            what = f"llama.cpp has no place for a weight of this model: {array_name}."
            raise ModelError(what, expected=f"the weights of {architecture}", do=KEEP_MLX)
        shape = tuple(value.shape) if value.ndim == 1 else (value.shape[0], inputs_of(layers[path]))
        heads = turned.get(name.split(".")[-2], 0) if architecture == "llama" else 0
        is_gemma = architecture.startswith("gemma")  # mlx-lm's norms multiply by 1 + weight
        added = 1.0 if is_gemma and name.endswith("norm.weight") else 0.0
        parts.append(GgufPart(name, prefix + path, kind, shape, heads, added))
    return parts


def exact_kind(part: GgufPart, layer: Any) -> Kind:
    """The smallest type that holds a weight of the base as it is, else one of 16 bits."""
    if len(part.shape) == 1:
        return Kind.F32
    kind, mode = AS_STORED[dequantized(layer, slice(0, 1)).dtype], getattr(layer, "mode", "affine")
    if "scales" not in layer or mode != "affine":
        return Kind.MXFP4 if "scales" in layer and mode == "mxfp4" else kind
    if not all(map(_fits_float16, (layer.scales, layer.biases))):
        return kind
    return Kind.F16 if layer.bits > HIGH_BIT + 1 else Kind.Q5_1 if layer.bits > HIGH_BIT else Kind.Q4_1


def rounds(layer: Any, kind: Kind) -> bool:
    """Whether a type changes a quantized weight: the product of a 16-bit scale has more digits than 16 bits hold."""
    return "scales" in layer and getattr(layer, "mode", "affine") == "affine" and kind in (Kind.F16, Kind.BF16)


def _fits_float16(values: mx.array) -> bool:
    """Whether float16, which llama.cpp's scales have, changes none of them."""
    return bool(mx.array_equal(values.astype(mx.float16).astype(values.dtype), values).item())


def encoded(part: GgufPart, layer: Any, changes: Changes | None, kind: Kind) -> Iterator[np.ndarray]:
    """Encode a weight a few rows at a time, in the file's order: uint8 (rows, bytes of a row).

    The adapter's ``changes`` are merged in. None: the base's own weight, and a ModelError if ``kind`` does not hold it.
    """
    order = part.order()
    for place in slices_of(part.shape[0], math.prod(part.shape[1:])):
        rows: Any = mx.array(order[place]) if part.heads else place
        values = _values(part, layer, changes, rows, kind)
        if changes is None and kind in REPACKED:
            data = _repacked(layer, rows, kind)
        else:
            with np.errstate(over="ignore"):  # the measured loss is then not a number
                data = np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8)
        data = data.reshape(len(values), -1)
        is_exact = changes is None and not rounds(layer, kind)
        if is_exact and not np.array_equal(gguf.quants.dequantize(data, kind), values, equal_nan=True):
            raise ModelError(f"{kind.name} cannot hold {part.path} of the base as it is.", do=KEEP_MLX)
        yield data


def _values(part: GgufPart, layer: Any, changes: Changes | None, rows: Any, kind: Kind) -> np.ndarray:
    """Some rows of a weight in float32, as mlx's quantized products have them, not rounded to 16 bits."""
    if len(part.shape) == 1:
        own = layer[part.kind] if changes is None else changes.values.get(f"{part.path}.{part.kind}", layer[part.kind])
        weight = own[rows]
    elif changes is not None:
        weight = changes.merged(part.path, dequantized(layer, rows), rows)
    elif "scales" in layer and getattr(layer, "mode", "affine") == "affine":
        scales, biases = (layer[name][rows].astype(mx.float32) for name in ("scales", "biases"))
        weight = mx.dequantize(layer.weight[rows], scales, biases, layer.group_size, layer.bits)
    else:
        weight = dequantized(layer, rows)
    return np.array(weight.astype(mx.float32)).reshape(weight.shape[0], -1) + np.float32(part.added)


def _repacked(layer: Any, rows: Any, kind: Kind) -> np.ndarray:
    """Some rows of a quantized weight in blocks of a type of REPACKED: scale, bias, high bits, two numbers a byte."""
    stream = np.unpackbits(np.array(layer.weight[rows]).view(np.uint8), axis=-1, bitorder="little")
    numbers = np.packbits(stream.reshape(len(stream), -1, layer.bits), axis=-1, bitorder="little")
    blocks = numbers.reshape(len(stream), -1, BLOCK)
    if kind == Kind.MXFP4:
        parts = [np.array(layer.scales[rows])[..., None]]
    else:
        both = mx.stack([layer.scales[rows], layer.biases[rows]], axis=-1).astype(mx.float16)
        parts = [np.repeat(np.array(both), layer.group_size // BLOCK, axis=1).view(np.uint8)]
    if kind == Kind.Q5_1:
        parts.append(np.packbits(blocks >> HIGH_BIT, axis=-1, bitorder="little"))
    low = blocks & (2**HIGH_BIT - 1)
    parts.append(low[..., : BLOCK // 2] | low[..., BLOCK // 2 :] << HIGH_BIT)
    return np.concatenate(parts, axis=-1)


def arrays_in(file: Path, parts: Iterable[GgufPart]) -> Iterator[tuple[str, mx.array]]:
    """Read a file's weights under their names in mlx-lm; quantized weights get 8 bits."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for part in parts:
        tensor, places = tensors[part.name], np.argsort(part.order())
        data, kind = np.asarray(tensor.data).reshape(part.shape[0], -1)[places], tensor.tensor_type
        if kind == Kind.BF16:
            yield f"{part.path}.{part.kind}", mx.array(data.view(np.uint16)).view(mx.bfloat16).reshape(part.shape)
        elif kind in PLAIN:
            yield f"{part.path}.{part.kind}", mx.array((data - part.added).astype(data.dtype).reshape(part.shape))
        else:
            for name, value in zip(("weight", "scales", "biases"), _in_8_bits(data, kind), strict=True):
                yield f"{part.path}.{name}", value


def _in_8_bits(data: np.ndarray, kind: Kind) -> tuple[mx.array, ...]:
    """Convert quantized rows to mlx's 8 bits: q8_0 exactly, fewer bits with a rounding much finer than their own."""
    data = np.ascontiguousarray(data)
    if kind != Kind.Q8_0:
        return tuple(mx.quantize(mx.array(gguf.quants.dequantize(data, kind)), BLOCK, READ_BITS))
    blocks = data.reshape(len(data), -1, 2 + BLOCK)  # a float16 scale and signed numbers
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    numbers = np.ascontiguousarray(blocks[..., 2:] ^ 0x80).reshape(len(data), -1).view(np.uint32)  # -128 becomes 0
    return mx.array(numbers), mx.array(scales), mx.array(scales * -128.0)


def adapter_pairs(
    arrays: Mapping[str, mx.array], parts: Iterable[GgufPart], where: Path
) -> dict[str, tuple[mx.array, mx.array]]:
    """lora_a (rank, inputs) and lora_b (outputs, rank), float32, as llama.cpp has them, by their weight's name.

    Raises ModelError for an adapter that llama.cpp would not apply as it was trained, or that changes nothing.
    """
    places = {part.path: part for part in parts if part.kind == "weight"}
    found = dict[str, tuple[mx.array, mx.array]]()
    for name, array in arrays.items():
        path, _, kind = name.rpartition(".")
        part = places.get(path)
        if kind not in ("lora_a", "lora_b") or part is None or part.name == "token_embd.weight":
            what = "DoRA's lengths of weights" if kind == "m" else name
            do = "merge it into one file: add --fused"
            raise ModelError(f"A GGUF adapter cannot contain {what}.", where=where, do=do)
        if kind == "lora_a":
            outputs = arrays[f"{path}.lora_b"].astype(mx.float32).T[mx.array(part.order())]
            found[part.name] = array.astype(mx.float32).T, outputs
    if not any(mx.any(outputs).item() for _, outputs in found.values()):
        raise ModelError(NO_EFFECT, where=where, do=DISCARD)
    return found
