"""The families of models that GGUF files are written for, and what llama.cpp calls their weights.

llama.cpp's own code is the reference: src/models/FAMILY.cpp for the weights, conversion/FAMILY.py for how they lie.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from safetrain.core.errors import ModelError
from safetrain.engine.folding import inputs_of

BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")
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
TURNED = ("self_attn.q_proj", "self_attn.k_proj")


@dataclass(frozen=True)
class Family:
    """A model family in llama.cpp's names. ``block``: names of the parts of a block by their paths in mlx-lm."""

    architecture: str
    block: Mapping[str, str] = field(default_factory=lambda: dict(LLAMA_BLOCK))
    turned: bool = False  # llama.cpp rotates neighbours in q and k, mlx-lm halves of a head
    adds_one: bool = False  # mlx-lm's norms multiply with 1 + weight


LLAMA = Family("llama", turned=True)
GEMMA3 = Family("gemma3", {**LLAMA_BLOCK, **GEMMA_NORMS, **HEAD_NORMS}, adds_one=True)
FAMILIES = {  # by model_type in config.json
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", {**LLAMA_BLOCK, **HEAD_NORMS}),
    "gemma2": Family("gemma2", {**LLAMA_BLOCK, **GEMMA_NORMS}, adds_one=True),
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "phi3": Family("phi3", {**LLAMA_BLOCK, **PHI_BLOCK}),
}


@dataclass(frozen=True)
class GgufPart:
    """A weight of the model in the file."""

    name: str  # in the file
    path: str  # of its layer in the module
    kind: str  # weight, or bias
    shape: tuple[int, ...]  # (outputs, inputs), or (width,)
    heads: int = 0  # whose rows are turned; 0: they stay
    added: float = 0.0  # to every number

    def places(self) -> np.ndarray:
        """(rows,) where each row of mlx-lm's weight lies in the file."""
        rows = np.arange(self.shape[0])
        if not self.heads:
            return rows
        turned = rows.reshape(self.heads, 2, -1).swapaxes(1, 2).ravel()  # what lies at each place in the file
        return np.argsort(turned)


def family_of(model_type: str, where: str) -> Family:
    """Raises ModelError for a family that no GGUF file is written for."""
    if model_type not in FAMILIES:
        raise ModelError(
            f"GGUF files are not written for models of the type {model_type}.",
            where=where,
            expected=f"one of {', '.join(FAMILIES)}",
            do="keep it as an MLX model (safetrain fuse), or convert the folder of 'safetrain fuse --float' with "
            "llama.cpp's convert_hf_to_gguf.py",
        )
    return FAMILIES[model_type]


def text_model(module: Any) -> tuple[Any, str]:
    """The language model of a module, and what its paths begin with: gemma3 has it beside pictures."""
    inner = module.get("language_model")
    return (module, "") if inner is None else (inner, "language_model.")


def parts_of(module: Any, family: Family) -> list[GgufPart]:
    """Every weight of the model, in the order of writing; raises ModelError for one that llama.cpp has no name for."""
    inner, prefix = text_model(module)
    layers = dict(inner.named_modules())
    parts: list[GgufPart] = []
    arrays: list[tuple[str, mx.array]] = tree_flatten(inner.parameters())
    for name, value in arrays:
        path, _, kind = name.rpartition(".")
        if kind in ("weight", "bias"):
            shape = (value.shape[0], inputs_of(layers[path])) if kind == "weight" and value.ndim == 2 else value.shape
            parts.append(_part(name, prefix, path, kind, tuple(shape), family, inner.args))
        elif kind not in ("scales", "biases"):
            raise _unnamed(name, family)
    return parts


def _part(name: str, prefix: str, path: str, kind: str, shape: tuple[int, ...], family: Family, args: Any) -> GgufPart:
    match = BLOCK.fullmatch(path)
    inside = match[2] if match else ""
    part_name = family.block.get(inside) if match else OUTSIDE.get(path)
    if part_name is None:
        raise _unnamed(name, family)
    heads = 0
    if family.turned and inside in TURNED:
        heads = args.num_attention_heads if inside.endswith("q_proj") else args.num_key_value_heads
    added = 1.0 if family.adds_one and part_name.endswith("norm") else 0.0
    return GgufPart(f"blk.{match[1]}.{part_name}.{kind}" if match else f"{part_name}.{kind}",
                prefix + path, kind, shape, heads, added)  # fmt: skip


def _unnamed(name: str, family: Family) -> ModelError:
    return ModelError(
        f"llama.cpp has no place for a weight of this model: {name}.",
        expected=f"the weights of its architecture {family.architecture}",
        do="keep it as an MLX model: safetrain fuse",
    )
