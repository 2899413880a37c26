"""The shape of a model: by config.json, whose keys go by many names; by the weights where config.json is silent.

A config.json may leave out what mlx-lm has a default for, and some families have no such thing: a recurrent one has no
attention heads. Then the weights say it, or what is usual: the estimate of memory goes by it, nothing that is computed.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from safetrain.core.model.shapes import TensorHeader

# The first of each that config.json has; those of mlx_lm/models/*.py
WIDTH = ("hidden_size", "n_embd", "d_model", "dim", "model_dim", "hidden_dim")
DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
KEY_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_attention_groups")
HEAD_SIZE = ("head_dim", "hidden_size_per_head", "kv_channels")
FEED_FORWARD = ("intermediate_size", "n_inner", "ffn_hidden_size", "mlp_hidden_size", "ff_intermediate_size")
VOCABULARY = ("vocab_size", "num_vocab")
POSITIONS = ("max_position_embeddings", "n_positions", "model_max_length")
USUAL_HEAD_SIZE, USUAL_FEED_FORWARD = 64, 4  # the second in widths
EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|tok_embeddings|word_embeddings|embeddings?|embed_in|wte)\.weight$")
BLOCK = re.compile(r"(?:^|[._])(layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class ModelWidths:
    """Widths in features; of layers that differ, the largest."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head: int
    feed_forward: int
    vocabulary: int
    positions: int | None


def with_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json, with the keys of its text part (multimodal models) at the top level."""
    return {**config, **(config.get("text_config") or {})}


def sizes_of(config: Mapping[str, Any], tensors: Iterable[TensorHeader]) -> ModelWidths | str:
    """The sizes of a model, or the name of a size that neither config.json nor the weights give."""
    headers = tuple(tensors)
    embedding = next((t.dequantized_shape for t in headers if EMBEDDING.search(t.name) and len(t.shape) == 2), (0, 0))
    hidden = first_of(config, WIDTH) or embedding[1]
    layers = first_of(config, DEPTH) or depth_of(headers)
    vocabulary = first_of(config, VOCABULARY) or embedding[0]
    for value, names in ((hidden, WIDTH), (layers, DEPTH), (vocabulary, VOCABULARY)):
        if not value:
            return names[0]
    stated, size = first_of(config, HEADS), first_of(config, HEAD_SIZE)
    heads = stated or max(1, hidden // (size or USUAL_HEAD_SIZE))
    return ModelWidths(
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_heads=min(heads, first_of(config, KEY_HEADS) or heads),
        head=size or max(1, hidden // heads),
        feed_forward=first_of(config, FEED_FORWARD) or USUAL_FEED_FORWARD * hidden,
        vocabulary=vocabulary,
        positions=first_of(config, POSITIONS) or None,
    )


def first_of(config: Mapping[str, Any], names: Iterable[str]) -> int:
    """The first of ``names`` that is a number, or the largest of a list; 0 if none is set."""
    for name in names:
        value = config.get(name)
        numbers = [n for n in (value if isinstance(value, list) else [value]) if type(n) is int]
        if numbers and max(numbers) > 0:
            return max(numbers)
    return 0


def depth_of(tensors: Iterable[TensorHeader]) -> int:
    """Blocks that the names of the weights count, 0 where they name none."""
    found = [int(match[2]) for tensor in tensors if (match := BLOCK.search(tensor.name))]
    return max(found, default=-1) + 1
