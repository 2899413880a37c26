"""Weights in a GGUF file: one at a time folded, quantized and written, and read again as mlx computes with them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind

from safetrain.core.errors import ModelError
from safetrain.core.memory.terms import FLOAT32
from safetrain.engine.adapters import SLICE_BYTES
from safetrain.engine.exchange.gguf_families import GgufPart
from safetrain.engine.folding import Folds, as_it_is
from safetrain.engine.layers import dequantized

BLOCK = 32  # numbers that share a scale in both kinds of quantization
KINDS = {"f16": Kind.F16, "bf16": Kind.BF16, "q8_0": Kind.Q8_0, "q4_0": Kind.Q4_0}
FILE_TYPES = {
    Kind.F16: gguf.LlamaFileType.MOSTLY_F16,
    Kind.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    Kind.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    Kind.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
}
SCALE_BYTES = 2  # of a block, in float16
BITS = {Kind.Q8_0: 8, Kind.Q4_0: 4}
AT_THE_ENDS = ("token_embd.weight", "output.weight")  # every answer goes through them whole


def kind_of(part: GgufPart, kind: Kind) -> Kind:
    """How a weight is stored in a file of ``kind``: vectors in float32, rows that take no blocks in float16."""
    if len(part.shape) == 1:
        return Kind.F32
    if kind == Kind.Q4_0 and part.name in AT_THE_ENDS and part.shape[-1] % BLOCK == 0:
        return Kind.Q8_0
    return Kind.F16 if kind in BITS and part.shape[-1] % BLOCK else kind


def bytes_of(part: GgufPart, kind: Kind) -> int:
    """Bytes of the tensor in a file of ``kind``."""
    block, size = gguf.GGML_QUANT_SIZES[kind_of(part, kind)]
    return int(np.prod(part.shape)) // block * size


def opened_bytes(part: GgufPart, kind: Kind) -> int:
    """Of ``arrays_in``, for a file of ``kind``: a block's scale has 2 bytes in the file, here it and a bias have 8."""
    blocks = int(np.prod(part.shape)) // BLOCK if kind_of(part, kind) in BITS else 0
    return bytes_of(part, kind) + blocks * (2 * FLOAT32 - SCALE_BYTES)


def written(part: GgufPart, module: Any, folds: Folds, kind: Kind) -> np.ndarray:
    """The bytes of a weight, (rows, bytes of a row) uint8, with the adapter folded in; a few rows at a time.

    Raises ModelError for a number that ``kind`` cannot hold.
    """
    stored = kind_of(part, kind)
    data = np.empty((part.shape[0], bytes_of(part, kind) // part.shape[0]), dtype=np.uint8)
    places = part.places()
    for rows, values in _rows(part, module, folds):
        with np.errstate(over="ignore"):
            quantized = gguf.quants.quantize(values, stored)
        if stored == Kind.F16 and not np.isfinite(quantized).all():
            raise ModelError(f"{part.path} has numbers that float16 cannot hold.", do="choose --type bf16 or q8_0")
        data[places[rows]] = np.ascontiguousarray(quantized).view(np.uint8).reshape(len(values), -1)
    return data


def _rows(part: GgufPart, module: Any, folds: Folds) -> Iterator[tuple[slice, np.ndarray]]:
    """Rows of the tuned weight in float32, (rows, inputs), and which they are."""
    layer = _layer(module, part.path)
    value = folds.values.get(f"{part.path}.{part.kind}")
    fold = folds.layers.get(part.path, as_it_is)
    count, each = part.shape[0], int(np.prod(part.shape[1:]))
    step = max(1, SLICE_BYTES // (FLOAT32 * each))
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        if len(part.shape) == 1:
            weight = (layer[part.kind] if value is None else value)[rows].astype(mx.float32)
        else:
            weight = fold(dequantized(layer, rows).astype(mx.float32), rows)
        yield rows, np.array(weight).reshape(rows.stop - rows.start, -1) + np.float32(part.added)


def forget(part: GgufPart, module: Any, folds: Folds) -> None:
    """Take a weight that is written out of the module, and with it out of memory: an opened one keeps what it read."""
    layer = _layer(module, part.path)
    for kind in ("weight", "scales", "biases") if part.kind == "weight" else (part.kind,):
        layer.pop(kind, None)
    folds.values.pop(f"{part.path}.{part.kind}", None)
    if part.kind == "weight":
        folds.layers.pop(part.path, None)


def _layer(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = module[int(name)] if name.isdigit() else module[name]
    return module


def require_whole(file: Path, parts: list[GgufPart], tokens: Sequence[str]) -> None:
    """Raise ModelError unless a file, read again, has every weight in its shape, and the vocabulary."""
    reader = gguf.GGUFReader(file)
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    for part in parts:
        if shapes.get(part.name) != part.shape:
            raise ModelError(f"{part.name} is not in the file as it was written.", where=str(file),
                             expected=str(part.shape), got=str(shapes.get(part.name)))  # fmt: skip
    if reader.fields["tokenizer.ggml.tokens"].contents() != list(tokens):
        raise ModelError("The vocabulary is not in the file as it was written.", where=str(file))


def arrays_in(file: Path, parts: list[GgufPart]) -> dict[str, mx.array]:
    """The weights of a whole file by their names in mlx-lm; q8_0 and q4_0 with scales and biases in float32."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    arrays: dict[str, mx.array] = {}
    for part in parts:
        tensor = tensors[part.name]
        data = np.asarray(tensor.data).reshape(part.shape[0], -1)[part.places()]
        name = f"{part.path}.{part.kind}"
        if tensor.tensor_type in BITS:
            weight, scales = _unpacked(data.view(np.uint8), tensor.tensor_type)
            arrays[name] = mx.array(weight)
            arrays[f"{part.path}.scales"] = mx.array(scales)
            arrays[f"{part.path}.biases"] = mx.array(-scales * 2.0 ** (BITS[tensor.tensor_type] - 1))
        else:
            arrays[name] = _plain(data, tensor.tensor_type, part)
    return arrays


def _plain(data: np.ndarray, kind: Kind, part: GgufPart) -> mx.array:
    if kind == Kind.BF16:
        return mx.array(np.ascontiguousarray(data).view(np.uint16)).view(mx.bfloat16).reshape(part.shape)
    if kind not in KINDS.values() and kind != Kind.F32:  # by llama-quantize
        return mx.array(gguf.quants.dequantize(np.ascontiguousarray(data), kind).astype(np.float16))
    values: np.ndarray = np.ascontiguousarray(data).view(np.float16 if kind == Kind.F16 else np.float32)
    return mx.array((values - part.added).astype(values.dtype).reshape(part.shape))


def _unpacked(data: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Blocks (rows, bytes) as mlx keeps them: words (rows, words) uint32 and scales (rows, blocks) float32.

    Both store scale * (number - half of the range): mlx as scale * number + bias.
    """
    bits = BITS[kind]
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, SCALE_BYTES + BLOCK * bits // 8)
    scales = np.ascontiguousarray(blocks[..., :SCALE_BYTES]).view(np.float16)[..., 0].astype(np.float32)
    numbers = blocks[..., SCALE_BYTES:]
    if bits == 8:
        numbers = numbers ^ 0x80  # signed: -128 becomes 0
    else:  # the first half of a block is in the low halves of its bytes, the second in the high ones
        both = np.concatenate([numbers & 0xF, numbers >> 4], axis=-1)
        numbers = both[..., 0::2] | (both[..., 1::2] << 4)
    return np.ascontiguousarray(numbers).reshape(len(data), -1).view(np.uint32), scales
