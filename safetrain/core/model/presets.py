"""Shapes of untrained Llama models, named after their parameters: embeddings, blocks and norms."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv:2203.15556, table 3
RESIDUAL_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
OWN_IDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}


@dataclass(frozen=True)
class ModelShape:
    """The shape of a Llama model with tied embeddings. Widths in features, ``context`` in tokens."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    feed_forward: int
    vocabulary: int
    context: int

    @property
    def head(self) -> int:
        """Width of an attention head."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        query, key = self.hidden, self.key_heads * self.head
        block = self.hidden * (2 * query + 2 * key + 3 * self.feed_forward + 2)
        return self.vocabulary * self.hidden + self.layers * block + self.hidden


# Widths near ln(width) = 5.039 + 0.0555 layers (Levine et al. 2020, arXiv:2006.12467); heads of 64 features that share
# key heads from 384 features up (Ainslie et al. 2023); embeddings that grow as the 0.83rd power of the other parameters
# (Tao et al. 2024, arXiv:2407.13623)
PRESETS = {
    "10m": ModelShape(256, 11, 4, 4, 704, 4096, 1024),
    "85m": ModelShape(576, 22, 9, 3, 1536, 12288, 2048),
    "400m": ModelShape(1024, 34, 16, 4, 2688, 24576, 2048),
    "800m": ModelShape(1344, 39, 21, 7, 3584, 33792, 2048),
}


def wanted_tokens(parameters: int) -> int:
    """Recommended training tokens for a model of ``parameters`` parameters."""
    return parameters * TOKENS_PER_PARAMETER


def config_of(shape: ModelShape, ids: Mapping[str, object]) -> dict[str, object]:
    """Content of config.json for transformers and mlx-lm, with the ``ids`` of special tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,  # Su et al. 2021
        "max_position_embeddings": shape.context,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": round(deviation(shape), 6),
        "torch_dtype": "float32",
        **ids,
    }


def deviation(shape: ModelShape, tensor: str = "") -> float:
    """Standard deviation of the initial weights of a tensor.

    It is sqrt(2 / (5 x width)) ("small init": Nguyen and Salazar 2019, arXiv:1910.05895; used by GPT-NeoX): at a width
    of 1,000 it is the 0.02 of GPT-2, and larger in narrower models, so that logits and the outputs of all layers begin
    at one scale. For projections to the residual stream it is divided by sqrt(2 x layers) (Radford et al. 2019, GPT-2).
    """
    usual = math.sqrt(2 / (5 * shape.hidden))
    return usual / math.sqrt(2 * shape.layers) if tensor.endswith(RESIDUAL_OUTPUTS) else usual
