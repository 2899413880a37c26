"""A model's sizes, rotations and windows as llama.cpp reads them; what it would compute otherwise is refused."""

import math
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

from safetrain.core.errors import ModelError
from safetrain.engine.exchange.gguf_families import Family

GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # blocks of those whose attention llama.cpp scales by width / heads
UNSAID_CONTEXT = 8192  # gemma2's, whose settings in mlx-lm have none
LONG = ("longrope", "su")
ROTATIONS = {"llama": ("default", "linear", "llama3"), "phi3": ("default", "linear", *LONG)}
PLAIN_ROTATIONS = ("default", "linear")


def write_shape(writer: gguf.GGUFWriter, family: Family, module: Any) -> None:
    """Write the metadata from which llama.cpp builds ``module``, mlx-lm's text model."""
    args = module.args
    head = _head_width(args)
    context = getattr(args, "max_position_embeddings", None) or UNSAID_CONTEXT
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
    if _rotation(args) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(args.rope_scaling["factor"]))
    _write_own(writer, family.architecture, module, context)


def _write_own(writer: gguf.GGUFWriter, architecture: str, module: Any, context: int) -> None:
    """What only one family has."""
    args = module.args
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(args.attn_logit_softcapping)
        writer.add_final_logit_softcapping(args.final_logit_softcapping)
        writer.add_sliding_window(context)  # mlx-lm has none, and llama.cpp one of 4096 where none is named
    elif architecture == "gemma3":
        writer.add_sliding_window(args.sliding_window)
        writer.add_sliding_window_pattern(args.sliding_window_pattern)
        writer.add_rope_freq_base_swa(float(args.rope_local_base_freq))
    elif architecture == "phi3":
        writer.add_sliding_window(0)  # mlx-lm has none
        writer.add_rope_scaling_orig_ctx_len(args.original_max_position_embeddings)
        if _rotation(args) in LONG:
            writer.add_rope_scaling_attn_factors(float(module.layers[0].self_attn.rope._scale))


def rope_tensors(module: Any) -> dict[str, np.ndarray]:
    """Divisors of the rotary frequencies for llama.cpp, (rotated / 2,) float32, if they are not the plain ones."""
    args, kind = module.args, _rotation(module.args)
    if kind == "llama3":
        rope = module.layers[0].self_attn.rope
        plain = float(args.rope_theta) ** (mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims)
        return {"rope_freqs.weight": np.array(rope._freqs / plain, dtype=np.float32)}
    if kind in LONG:  # mlx-lm takes the long ones for texts of any length, and so did the training
        factors = np.array(args.rope_scaling["long_factor"], dtype=np.float32)
        return {"rope_factors_long.weight": factors, "rope_factors_short.weight": factors}
    return {}


def _rotation(args: Any) -> str:
    scaling = getattr(args, "rope_scaling", None) or {}
    return str(scaling.get("type") or scaling.get("rope_type") or "default")


def _head_width(args: Any) -> int:
    return int(getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads)


def require_known(family: Family, args: Any) -> None:
    """Raise ModelError for a setting that the model has in mlx-lm and llama.cpp does not compute."""
    head = _head_width(args)
    rotations = ROTATIONS.get(family.architecture, PLAIN_ROTATIONS)
    if _rotation(args) not in rotations:
        raise _unknown(f"its rotation is scaled by {_rotation(args)}", f"one of {', '.join(rotations)}")
    if getattr(args, "rope_traditional", False):
        raise _unknown("it rotates neighbours (rope_traditional)", "halves of a head")
    if family.architecture == "llama" and "sliding_attention" in (getattr(args, "layer_types", None) or ()):
        raise _unknown("some of its blocks see a sliding window only", "blocks that see the whole text")
    if family.architecture in ("qwen2", "phi3") and head * args.num_attention_heads != args.hidden_size:
        raise _unknown("its heads are not as wide together as the model", str(args.hidden_size))
    if family.architecture in GEMMA_27B:
        large = args.num_hidden_layers == GEMMA_27B[family.architecture]
        scale = args.hidden_size // args.num_attention_heads if large else head
        if not math.isclose(args.query_pre_attn_scalar, scale):
            raise _unknown(f"query_pre_attn_scalar is {args.query_pre_attn_scalar:g}", f"{scale}")


def _unknown(what: str, expected: str) -> ModelError:
    return ModelError(
        f"llama.cpp computes this model differently than it was trained: {what}.",
        expected=expected,
        do="keep it as an MLX model: safetrain fuse",
    )
