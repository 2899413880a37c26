"""The shape of a model is read from keys of many names, and from its weights where config.json is silent."""

from pathlib import Path
from typing import Any

import pytest

from safetrain.core.errors import ModelError
from safetrain.core.model.files import sizes_of
from safetrain.core.model.shapes import TensorHeader

WEIGHTS = [
    TensorHeader("model.embed_tokens.weight", "F32", (320, 64), 0),
    TensorHeader("model.layers.0.mlp.up_proj.weight", "F32", (96, 64), 0),
    TensorHeader("model.layers.3.mlp.up_proj.weight", "F32", (96, 64), 0),
]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 320},
            (64, 4, 8, 8, 8, 256, 320, None),
        ),
        ({"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 99}, (64, 4, 4, 4, 16, 256, 320, 99)),
        ({"hidden_dim": 64, "num_layers": 4, "num_heads": 4}, (64, 4, 4, 4, 16, 256, 320, None)),
        ({"d_model": 64, "n_layers": 2, "n_heads": 4}, (64, 2, 4, 4, 16, 256, 320, None)),
        ({"hidden_size": 64, "head_dim": 32}, (64, 4, 2, 2, 32, 256, 320, None)),  # recurrent, without heads
        ({}, (64, 4, 1, 1, 64, 256, 320, None)),
        (
            {"model_dim": 64, "num_query_heads": [2, 4], "num_kv_heads": [1, 2], "intermediate_size": [80, 96]},
            (64, 4, 4, 2, 16, 96, 320, None),
        ),
    ],
)
def test_a_shape_has_many_names(config: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    """Width, layers, heads, key heads, a head, feed-forward, vocabulary, positions."""
    assert tuple(sizes_of(config, WEIGHTS, Path()).values()) == expected


@pytest.mark.parametrize(("config", "missing"), [({}, "hidden_size"), ({"hidden_size": 64}, "num_hidden_layers")])
def test_what_nothing_says_is_named(config: dict[str, Any], missing: str) -> None:
    with pytest.raises(ModelError, match=missing):
        sizes_of(config, [], Path())
