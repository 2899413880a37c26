"""The tensors of a model from its config.json: names, shapes, types, for the dense families that people tune.

A model that is not downloaded can then be planned for. Architectures that are not listed are not guessed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from safetrain.core.errors import ModelError

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "cohere", "granite",
    "smollm3",
)  # fmt: skip
TYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ALWAYS_TIED = ("gemma", "gemma2", "gemma3_text", "cohere")  # whatever the config says, mlx-lm has no other head


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as a safetensors header describes it, and how it is quantized (core/model/quantization.py)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    bits: int = 0  # of each weight, where several are packed into a word of 32 bits
    of_quantization: bool = False  # scales or biases of quantized weights, not weights themselves

    @property
    def dequantized_shape(self) -> tuple[int, ...]:
        """The shape of the weights once they are dequantized."""
        return (*self.shape[:-1], self.shape[-1] * 32 // self.bits) if self.bits else self.shape

    @property
    def weights(self) -> int:
        """How many of the model's weights it holds."""
        return 0 if self.of_quantization else math.prod(self.dequantized_shape)


def is_known(model_type: str) -> bool:
    """Whether the shapes and the closed form of the memory estimate hold for this architecture."""
    return model_type in FAMILIES


def tensors_of(config: dict[str, Any]) -> tuple[TensorHeader, ...]:
    """Every tensor of the model, quantized if the config says so; raises ModelError for an unknown architecture."""
    family = str(config.get("model_type", "unknown"))
    if family not in FAMILIES:
        raise ModelError(
            f"The architecture {family} is not known well enough to be planned from its config.json.",
            expected=f"one of {', '.join(FAMILIES)}",
            do="fetch the model: its own files say how large it is, and a dry run measures what it takes",
        )
    shapes = _Shapes(config, family)
    kind = TYPES.get(str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"), "BF16")
    quantization = config.get("quantization") or {}
    tensors: list[TensorHeader] = []
    for name, shape in shapes.all():
        if len(shape) == 2 and quantization:
            tensors += _quantized(
                name.removesuffix(".weight"), shape, quantization["bits"], quantization["group_size"], kind
            )
        else:
            tensors.append(_tensor(name, kind, shape))
    return tuple(tensors)


class _Shapes:
    """Names and shapes, family by family, as mlx-lm's weights have them."""

    def __init__(self, config: dict[str, Any], family: str) -> None:
        self._config, self._family = config, family
        self._hidden, self._heads = config["hidden_size"], config["num_attention_heads"]
        self._kv_heads = config.get("num_key_value_heads") or self._heads
        self._head_dim = config.get("head_dim") or self._hidden // self._heads
        self._width = config["intermediate_size"]

    def all(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Tensors of the whole model."""
        vocabulary, hidden = self._config["vocab_size"], self._hidden
        yield "model.embed_tokens.weight", (vocabulary, hidden)
        for layer in range(self._config["num_hidden_layers"]):
            for name, shape in self.block():
                yield f"model.layers.{layer}.{name}", shape
        yield "model.norm.weight", (hidden,)
        if not self._config.get("tie_word_embeddings", False) and self._family not in ALWAYS_TIED:
            yield "lm_head.weight", (vocabulary, hidden)

    def block(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Tensors of one block."""
        hidden, query, key = self._hidden, self._heads * self._head_dim, self._kv_heads * self._head_dim
        if self._family == "phi3":
            yield "self_attn.qkv_proj.weight", (query + 2 * key, hidden)
            yield "mlp.gate_up_proj.weight", (2 * self._width, hidden)
        else:
            bias = self._family == "qwen2" or bool(self._config.get("attention_bias"))
            for name, size in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
                yield f"self_attn.{name}.weight", (size, hidden)
                if bias:
                    yield f"self_attn.{name}.bias", (size,)
            yield "mlp.gate_proj.weight", (self._width, hidden)
            yield "mlp.up_proj.weight", (self._width, hidden)
        yield "self_attn.o_proj.weight", (hidden, query)
        if self._family != "qwen2" and self._config.get("attention_bias") and self._family != "phi3":
            yield "self_attn.o_proj.bias", (hidden,)
        yield "mlp.down_proj.weight", (hidden, self._width)
        for name, size in self._norms(query, key):
            yield f"{name}.weight", (size,)

    def _norms(self, query: int, key: int) -> Iterator[tuple[str, int]]:
        hidden, head = self._hidden, self._head_dim
        if self._family not in ("olmo2",):
            yield "input_layernorm", hidden
        if self._family != "cohere":
            yield "post_attention_layernorm", hidden
        if self._family in ("gemma2", "gemma3_text", "olmo2"):
            yield "post_feedforward_layernorm", hidden
        if self._family in ("gemma2", "gemma3_text"):
            yield "pre_feedforward_layernorm", hidden
        if self._family in ("qwen3", "gemma3_text"):
            yield "self_attn.q_norm", head
            yield "self_attn.k_norm", head
        if self._family == "olmo2":
            yield "self_attn.q_norm", query
            yield "self_attn.k_norm", key


def _quantized(stem: str, shape: tuple[int, ...], bits: int, group: int, kind: str) -> list[TensorHeader]:
    """Words of 32 bits, and a scale and a bias for each group of weights (mlx's affine quantization)."""
    rows, columns = shape
    groups = (rows, columns // group)
    return [
        _tensor(f"{stem}.weight", "U32", (rows, columns * bits // 32)),
        _tensor(f"{stem}.scales", kind, groups),
        _tensor(f"{stem}.biases", kind, groups),
    ]


def _tensor(name: str, kind: str, shape: tuple[int, ...]) -> TensorHeader:
    return TensorHeader(name, kind, shape, TYPE_BYTES[kind] * math.prod(shape))
