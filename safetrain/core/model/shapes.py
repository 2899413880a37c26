"""The tensors of a model: their quantization, and for known architectures all names and shapes from config.json.

A header gives only the product of bits and group size. The type of the scales tells the two apart, or config.json,
which has an entry for each layer that differs from the others.

For common dense families, config.json determines every name and shape, so safetrain can plan for a model that is not
downloaded. It does not guess other architectures.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from safetrain.core.errors import ModelError

FAMILIES = (  # architectures that shapes and the analytic memory estimate cover
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "cohere", "granite",
    "smollm3",
)  # fmt: skip
TYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ALWAYS_TIED = ("gemma", "gemma2", "gemma3_text", "cohere")  # whatever config.json says, mlx-lm ties the head
WORD_BITS = 32
METHOD_BITS = {  # of other programs' formats that mlx-lm reads; the first four have the bits in config.json
    **dict.fromkeys(("awq", "gptq", "bitnet", "compressed-tensors")), "modelopt": 4, "mxfp4": 4, "mxfp8": 8, "fp8": 8,
}  # fmt: skip
UNQUANTIZED = "fetch the unquantized model, or one from mlx-community: safetrain fetch HUB_ID"
FLOAT_BITS = {4 * 16: 4, 4 * 32: 4, 8 * 32: 8}  # by bits times group size: nvfp4, mxfp4, mxfp8
AFFINE_BITS, AFFINE_GROUPS = (2, 3, 4, 5, 6, 8), (64, 32, 128)
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv:2203.15556, table 3
RESIDUAL_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
OWN_IDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}


@dataclass(frozen=True)
class TensorHeader:
    """A tensor from a safetensors header, with its quantization."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    bits: int = 0  # of each weight packed into 32-bit words; 0: not packed
    of_quantization: bool = False  # whether it holds scales or biases of quantized weights

    @property
    def dequantized_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.shape[-1] * 32 // self.bits) if self.bits else self.shape

    @property
    def weights(self) -> int:
        """How many of the model's weights this tensor holds."""
        return 0 if self.of_quantization else math.prod(self.dequantized_shape)


def tensors_of(config: dict[str, Any]) -> tuple[TensorHeader, ...]:
    """All tensors of the model, quantized if config.json says so; raises ModelError for an unknown architecture."""
    family = str(config.get("model_type", "unknown"))
    if family not in FAMILIES:
        what = f"safetrain cannot plan the architecture {family} from config.json alone."
        do = "fetch the model: its files give its size, and a dry run measures its memory"
        raise ModelError(what, expected=f"one of {', '.join(FAMILIES)}", do=do)
    kind = TYPES.get(str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"), "BF16")
    quantization, tensors = config.get("quantization") or {}, list[tuple[str, str, tuple[int, ...]]]()
    for name, shape in _shapes(config, family):
        if len(shape) == 2 and quantization:  # 32-bit words, with a scale and a bias for each group of weights
            (rows, columns), stem = shape, name.removesuffix(".weight")
            groups = (rows, columns // quantization["group_size"])
            tensors.append((name, "U32", (rows, columns * quantization["bits"] // WORD_BITS)))
            tensors += [(f"{stem}.{part}", kind, groups) for part in ("scales", "biases")]
        else:
            tensors.append((name, kind, shape))
    return tuple(TensorHeader(*each, TYPE_BYTES[each[1]] * math.prod(each[2])) for each in tensors)


def _shapes(config: Mapping[str, Any], family: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of all tensors, as in mlx-lm's weights."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    block = _block(config, family)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in block.items():
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", False) and family not in ALWAYS_TIED:
        yield "lm_head.weight", (vocabulary, hidden)


def _block(config: Mapping[str, Any], family: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a block's tensors: linear layers, their biases, norms."""
    hidden, width, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    query, key = heads * head, (config.get("num_key_value_heads") or heads) * head
    inputs = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key,
              "mlp.gate_proj": width, "mlp.up_proj": width}  # fmt: skip
    biased = "qkv" if family == "qwen2" else "qkvo" if config.get("attention_bias") else ""
    if family == "phi3":
        inputs, biased = {"self_attn.qkv_proj": query + 2 * key, "mlp.gate_up_proj": 2 * width}, ""
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size, hidden) for name, size in inputs.items()}
    shapes |= {"self_attn.o_proj.weight": (hidden, query), "mlp.down_proj.weight": (hidden, width)}
    shapes |= {f"self_attn.{name}_proj.bias": shapes[f"self_attn.{name}_proj.weight"][:1] for name in biased}
    norms = {} if family == "olmo2" else {"input_layernorm": hidden}
    if family != "cohere":
        norms["post_attention_layernorm"] = hidden
    if family in ("gemma2", "gemma3_text", "olmo2"):
        norms["post_feedforward_layernorm"] = hidden
    if family in ("gemma2", "gemma3_text"):
        norms["pre_feedforward_layernorm"] = hidden
    if family in ("qwen3", "gemma3_text", "olmo2"):
        whole = family == "olmo2"  # norms of all heads together
        norms |= {"self_attn.q_norm": query if whole else head, "self_attn.k_norm": key if whole else head}
    return shapes | {f"{name}.weight": (size,) for name, size in norms.items()}


# Quantization


def quantization_of(config: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The quantization in config.json, under any of its keys; empty for a model that is not quantized.

    Raises ModelError if another program quantized the model and mlx-lm's ``load_model`` does not know its format.
    """
    text = config.get("text_config") or {}
    entries = (source.get(key) for source in (config, text) for key in ("quantization", "quantization_config"))
    entry = next((value for value in entries if isinstance(value, dict) and value), {})
    method, form = entry.get("quant_method"), entry.get("bnb_4bit_quant_type") if entry.get("load_in_4bit") else ""
    if entry and method not in METHOD_BITS and (method or not {"group_size", "bits"} <= entry.keys()):
        name = f"{method or 'an unnamed method'}{f' ({form})' if form else ''}"
        raise ModelError(
            f"The checkpoint is quantized by {name}, which mlx-lm cannot read.", where=where, do=UNQUANTIZED
        )
    return entry


def with_quantization(tensors: Iterable[TensorHeader], quantization: Mapping[str, Any]) -> tuple[TensorHeader, ...]:
    """Set the bits of quantized weights, and mark scales and biases."""
    headers = tuple(tensors)
    scales = {tensor.name.removesuffix(".scales"): tensor for tensor in headers if tensor.name.endswith(".scales")}
    result = []
    for tensor in headers:
        stem, _, kind = tensor.name.rpartition(".")
        if stem in scales and kind in ("scales", "biases", "global_scale"):
            tensor = dataclasses.replace(tensor, of_quantization=True)
        elif stem in scales and kind == "weight" and tensor.dtype == "U32":
            tensor = dataclasses.replace(tensor, bits=_bits(tensor, scales[stem], quantization))
        result.append(tensor)
    return tuple(result)


def usual_bits(tensors: Iterable[TensorHeader], quantization: Mapping[str, Any]) -> int | None:
    """The bits of most quantized weights, or the bits in config.json; None for a model that is not quantized."""
    counted = Counter[int]()
    for tensor in tensors:
        if tensor.bits:
            counted[tensor.bits] += tensor.weights
    bits = quantization.get("bits") or METHOD_BITS.get(str(quantization.get("quant_method")))
    return counted.most_common(1)[0][0] if counted else bits if isinstance(bits, int) else None


def _bits(weight: TensorHeader, scales: TensorHeader, quantization: Mapping[str, Any]) -> int:
    """The bits of one layer; config.json counts only if it agrees with the header."""
    product = weight.shape[-1] * WORD_BITS // scales.shape[-1]  # bits times group size
    if scales.dtype == "U8" and product in FLOAT_BITS:
        return FLOAT_BITS[product]
    layer = weight.name.removesuffix(".weight")  # multimodal models may leave out the first part of its name
    entries = (quantization.get(layer), quantization.get(layer.partition(".")[2]), quantization)
    groups = (*(entry.get("group_size") for entry in entries if isinstance(entry, Mapping)), *AFFINE_GROUPS)
    fits = (product // group for group in groups if isinstance(group, int) and group and product % group == 0)
    return next((bits for bits in fits if bits in AFFINE_BITS), WORD_BITS)


# New models: untrained Llamas, named after their parameters: embeddings, blocks and norms


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
