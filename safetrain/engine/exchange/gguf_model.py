"""Models in GGUF files: llama.cpp's names and settings, and weights that are written and read one at a time.

The reference is llama.cpp's code: src/models/FAMILY.cpp for the weights, conversion/FAMILY.py for their layout.
"""

import math
import re
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
from safetrain.engine.fuse import Folds, as_it_is
from safetrain.engine.layers import dequantized, inputs_of, slices_of

BLOCK_PATH = re.compile(r"model\.layers\.(\d+)\.(.+)")
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LLAMA_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PHI_BLOCK = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
LONG = ("longrope", "su")


@dataclass(frozen=True)
class Family:
    """A model family of llama.cpp. ``block``: its names for the parts of a block, by their paths in mlx-lm."""

    architecture: str
    block: Mapping[str, str]
    turns: bool = False  # llama.cpp rotates neighbouring numbers of q and k, mlx-lm the halves of a head
    adds_one: bool = False  # mlx-lm's norms multiply by 1 + weight
    rotations: tuple[str, ...] = ("default", "linear")


LLAMA = Family("llama", LLAMA_BLOCK, turns=True, rotations=("default", "linear", "llama3"))
GEMMA3 = Family("gemma3", {**LLAMA_BLOCK, **GEMMA_NORMS, **HEAD_NORMS}, adds_one=True)
FAMILIES = {  # by model_type in config.json
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Family("qwen2", LLAMA_BLOCK),
    "qwen3": Family("qwen3", {**LLAMA_BLOCK, **HEAD_NORMS}),
    "gemma2": Family("gemma2", {**LLAMA_BLOCK, **GEMMA_NORMS}, adds_one=True),
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "phi3": Family("phi3", {**LLAMA_BLOCK, **PHI_BLOCK}, rotations=("default", "linear", *LONG)),
}
DEFAULT_CONTEXT = 8192  # for gemma2, whose settings in mlx-lm have none

BLOCK = 32  # numbers that share a scale in q8_0 and q4_0
KINDS = {"f16": Kind.F16, "bf16": Kind.BF16, "q8_0": Kind.Q8_0, "q4_0": Kind.Q4_0}
FILE_TYPES = {kind: gguf.LlamaFileType[f"MOSTLY_{kind.name}"] for kind in KINDS.values()}
PLAIN = (Kind.F32, Kind.F16, Kind.BF16)
READ_BITS = 8  # of quantized weights that are read
AT_THE_ENDS = ("token_embd.weight", "output.weight")  # every token passes through them


def family_of(model_type: str, where: str) -> Family:
    """Look up a model type; raises ModelError if no GGUF files are written for it."""
    if model_type not in FAMILIES:
        raise ModelError(
            f"Models of the type {model_type} cannot be exported as GGUF files.",
            where=where,
            expected=f"one of {', '.join(FAMILIES)}",
            do="keep it as an MLX model (safetrain fuse OUT), or run safetrain fuse OUT --float and convert OUT with "
            "llama.cpp's convert_hf_to_gguf.py",
        )
    return FAMILIES[model_type]


def text_model(module: Any) -> Any:
    """The language model in a module: gemma3 also has one for images."""
    return module.get("language_model", module)


def write_shape(writer: gguf.GGUFWriter, family: Family, module: Any) -> dict[str, np.ndarray]:
    """Write the metadata from which llama.cpp builds ``module``, a text model; returns tensors that it also needs.

    These divide the rotary frequencies, (rotated / 2,) float32. Raises ModelError for a setting of the model that
    llama.cpp does not support.
    """
    args = module.args
    head = int(getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads)
    scaling = getattr(args, "rope_scaling", None) or {}
    rotation = str(scaling.get("type") or scaling.get("rope_type") or "default")
    _require_known(family, args, rotation)
    context = getattr(args, "max_position_embeddings", None) or DEFAULT_CONTEXT
    writer.add_context_length(context)
    writer.add_embedding_length(args.hidden_size)
    writer.add_block_count(args.num_hidden_layers)
    writer.add_feed_forward_length(args.intermediate_size)
    writer.add_head_count(args.num_attention_heads)
    writer.add_head_count_kv(args.num_key_value_heads)
    writer.add_layer_norm_rms_eps(args.rms_norm_eps)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(args.vocab_size)
    writer.add_rope_dimension_count(int(head * getattr(args, "partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(float(args.rope_theta))
    if family.architecture == "gemma2":
        writer.add_attn_logit_softcapping(args.attn_logit_softcapping)
        writer.add_final_logit_softcapping(args.final_logit_softcapping)
        writer.add_sliding_window(context)  # mlx-lm has none; without this, llama.cpp has one of 4096
    elif family.architecture == "gemma3":
        writer.add_sliding_window(args.sliding_window)
        writer.add_sliding_window_pattern(args.sliding_window_pattern)
        writer.add_rope_freq_base_swa(float(args.rope_local_base_freq))
    elif family.architecture == "phi3":
        writer.add_sliding_window(0)  # mlx-lm has none
        writer.add_rope_scaling_orig_ctx_len(args.original_max_position_embeddings)
    return _rotation(writer, module, rotation, scaling)


def _rotation(writer: gguf.GGUFWriter, module: Any, rotation: str, scaling: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Write how positions are scaled; returns the tensors of ``write_shape``."""
    rope = module.layers[0].self_attn.rope
    if rotation == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(scaling["factor"]))
    elif rotation == "llama3":
        plain = float(module.args.rope_theta) ** (mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims)
        return {"rope_freqs.weight": np.array(rope._freqs / plain, dtype=np.float32)}
    elif rotation in LONG:  # mlx-lm uses the long factors for texts of any length, also in training
        writer.add_rope_scaling_attn_factors(float(rope._scale))
        factors = np.array(scaling["long_factor"], dtype=np.float32)
        return {"rope_factors_long.weight": factors, "rope_factors_short.weight": factors}
    return {}


def _require_known(family: Family, args: Any, rotation: str) -> None:
    windows = family is LLAMA and "sliding_attention" in (getattr(args, "layer_types", None) or ())
    if windows or rotation not in family.rotations:
        what = "some of its blocks see only a sliding window" if windows else f"its rotary scaling is {rotation}"
        raise ModelError(
            f"llama.cpp would compute this model differently than in training: {what}.",
            do="keep it as an MLX model: safetrain fuse OUT",
        )


@dataclass(frozen=True)
class GgufPart:
    """A weight of the model in the file."""

    name: str  # in the file
    path: str  # of its layer in the module
    kind: str  # weight, or bias
    shape: tuple[int, ...]  # (outputs, inputs), or (width,)
    heads: int = 0  # whose rows are reordered; 0: none
    added: float = 0.0  # to every number in the file

    def places(self) -> np.ndarray:
        """Place of each of mlx-lm's rows in the file, (rows,)."""
        rows = np.arange(self.shape[0])
        if not self.heads:
            return rows
        return np.argsort(rows.reshape(self.heads, 2, -1).swapaxes(1, 2).ravel())

    def stored_as(self, kind: Kind) -> Kind:
        """Type in a file of ``kind``: float32 for vectors, float16 for rows that do not divide into blocks."""
        if len(self.shape) == 1:
            return Kind.F32
        if self.shape[-1] % BLOCK:
            return kind if kind in PLAIN else Kind.F16
        return Kind.Q8_0 if kind == Kind.Q4_0 and self.name in AT_THE_ENDS else kind

    def bytes_as(self, kind: Kind) -> int:
        """Bytes in a file of ``kind``."""
        block, size = gguf.GGML_QUANT_SIZES[self.stored_as(kind)]
        return math.prod(self.shape) // block * size


def parts_of(module: Any, family: Family) -> list[GgufPart]:
    """Every weight of the model, in the order of writing; raises ModelError if llama.cpp lacks a name for one."""
    inner = text_model(module)
    prefix = "" if inner is module else "language_model."
    layers, parts = dict(inner.named_modules()), list[GgufPart]()
    arrays: list[tuple[str, mx.array]] = tree_flatten(inner.parameters())
    for array_name, value in arrays:
        path, _, kind = array_name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        match = BLOCK_PATH.fullmatch(path)
        name = family.block.get(match[2]) if match else OUTSIDE.get(path)
        if name is None or kind not in ("weight", "bias"):
            raise ModelError(
                f"llama.cpp has no place for a weight of this model: {array_name}.",
                expected=f"the weights of its architecture {family.architecture}",
                do="keep it as an MLX model: safetrain fuse OUT",
            )
        shape = tuple(value.shape) if value.ndim == 1 else (value.shape[0], inputs_of(layers[path]))
        turned = {"attn_q": inner.args.num_attention_heads, "attn_k": inner.args.num_key_value_heads}
        heads = turned.get(name, 0) if family.turns else 0
        added = 1.0 if family.adds_one and name.endswith("norm") else 0.0
        full_name = f"blk.{match[1]}.{name}.{kind}" if match else f"{name}.{kind}"
        parts.append(GgufPart(full_name, prefix + path, kind, shape, heads, added))
    return parts


def taken(part: GgufPart, module: Any, folds: Folds, kind: Kind) -> np.ndarray:
    """Encode a weight, with the adapter merged in, a few rows at a time; returns (rows, bytes of a row) uint8.

    The weight is removed from ``module``, which frees its memory. Raises ModelError for a number that ``kind`` cannot
    hold.
    """
    layer, stored, places = dict(module.named_modules())[part.path], part.stored_as(kind), part.places()
    value = folds.values.pop(f"{part.path}.{part.kind}", None)
    fold = folds.layers.pop(part.path, as_it_is) if part.kind == "weight" else as_it_is
    data = np.empty((part.shape[0], part.bytes_as(kind) // part.shape[0]), dtype=np.uint8)
    for rows in slices_of(part.shape[0], math.prod(part.shape[1:])):
        if len(part.shape) == 1:
            weight = (layer[part.kind] if value is None else value)[rows].astype(mx.float32)
        else:
            weight = fold(dequantized(layer, rows).astype(mx.float32), rows)
        values = np.array(weight).reshape(rows.stop - rows.start, -1) + np.float32(part.added)
        with np.errstate(over="ignore"):
            quantized = gguf.quants.quantize(values, stored)
        if stored == Kind.F16 and not np.isfinite(quantized).all():
            raise ModelError(f"{part.path} has numbers that float16 cannot hold.", do="choose --type bf16 or q8_0")
        data[places[rows]] = np.ascontiguousarray(quantized).view(np.uint8).reshape(len(values), -1)
    for name in ("weight", "scales", "biases") if part.kind == "weight" else ("bias",):
        layer.pop(name, None)
    return data


def arrays_in(file: Path, parts: Iterable[GgufPart]) -> Iterator[tuple[str, mx.array]]:
    """Read a file's weights under their names in mlx-lm; quantized ones get 8 bits, which hold q8_0 exactly."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for part in parts:
        tensor = tensors[part.name]
        data, kind = np.asarray(tensor.data).reshape(part.shape[0], -1)[part.places()], tensor.tensor_type
        if kind == Kind.BF16:
            yield f"{part.path}.{part.kind}", mx.array(data.view(np.uint16)).view(mx.bfloat16).reshape(part.shape)
        elif kind in PLAIN:
            yield f"{part.path}.{part.kind}", mx.array((data - part.added).astype(data.dtype).reshape(part.shape))
        else:
            quantized = _unpacked(data) if kind == Kind.Q8_0 else _in_8_bits(data, kind)
            for name, value in zip(("weight", "scales", "biases"), quantized, strict=True):
                yield f"{part.path}.{name}", value


def _unpacked(data: np.ndarray) -> tuple[mx.array, ...]:
    """Convert blocks of q8_0, (rows, bytes): a float16 scale and signed numbers, in mlx scale * number + bias."""
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, 2 + BLOCK)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    numbers = np.ascontiguousarray(blocks[..., 2:] ^ 0x80).reshape(len(data), -1).view(np.uint32)  # -128 becomes 0
    return mx.array(numbers), mx.array(scales), mx.array(scales * -128.0)


def _in_8_bits(data: np.ndarray, kind: Kind) -> tuple[mx.array, ...]:
    """Convert blocks of fewer bits: the rounding to 8 bits is small beside theirs."""
    weight = mx.array(gguf.quants.dequantize(np.ascontiguousarray(data), kind))
    return tuple(mx.quantize(weight, BLOCK, READ_BITS))
