"""Small random models of each family that a GGUF file is written for, each with a tokenizer of its kind, and rows."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.random_models import TINY, build_model
from tests.support.tokenizers_made import STRIPPING_ENDS, write_tokenizer

SMALL = {**TINY, "tie_word_embeddings": False}
GEMMA: dict[str, Any] = {
    **TINY, "tie_word_embeddings": True, "head_dim": 32, "query_pre_attn_scalar": 32, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
GEMMA3 = {
    **GEMMA, "model_type": "gemma3_text", "num_hidden_layers": 7, "rms_norm_eps": 1e-6, "sliding_window": 8,
    "rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG_ROPE = {
    "type": "longrope", "short_factor": [1.0 + number / 64 for number in range(16)],
    "long_factor": [1.0 + number / 8 for number in range(16)],
}  # fmt: skip
SHARPER = 3.0


@dataclass(frozen=True)
class Made:
    """A family as config.json has it, and the kind of its tokenizer."""

    tokenizer: str
    config: dict[str, Any]
    stripping: tuple[str, ...] = ()


MODELS = {
    "llama": Made("llama-bpe", {**SMALL, "model_type": "llama", "rope_scaling": LLAMA3_ROPE}),
    "llama, biases": Made("dbrx", {**SMALL, "model_type": "llama", "attention_bias": True, "mlp_bias": True}),
    "llama, tied": Made("llama", {**TINY, "model_type": "llama", "head_dim": 64}),
    "mistral": Made("mistral", {**SMALL, "model_type": "mistral"}),
    "qwen2": Made("qwen2", {**SMALL, "model_type": "qwen2"}),
    "qwen3": Made("qwen2", {**SMALL, "model_type": "qwen3", "head_dim": 64}),
    "gemma2": Made("gemma", {**GEMMA, "model_type": "gemma2"}),
    "gemma3": Made("gemma", {**GEMMA3, "model_type": "gemma3_text"}),
    "gemma3, beside pictures": Made("gemma", {"model_type": "gemma3", "text_config": GEMMA3}),
    "phi3": Made("llama", {**SMALL, "model_type": "phi3"}, STRIPPING_ENDS),
    "phi3, long": Made("gpt-2", {**SMALL, "model_type": "phi3", "rope_scaling": LONG_ROPE,
                                 "max_position_embeddings": 512, "original_max_position_embeddings": 64}),
}  # fmt: skip


def _sharpen(weights: Path) -> None:
    """Make the matrices larger: a model that chooses at random would hide a wrong rotation or a wrong order of rows."""
    import mlx.core as mx

    arrays: dict[str, mx.array] = mx.load(str(weights))  # type: ignore[assignment]
    for name, value in arrays.items():
        if value.ndim == 2 and mx.issubdtype(value.dtype, mx.floating):  # of quantized ones: scales and biases
            arrays[name] = value * SHARPER
    mx.save_safetensors(str(weights), arrays, metadata={"format": "mlx"})


def build(folder: Path, name: str, **changes: Any) -> Path:
    """Write one of ``MODELS``, in float32 or as ``build_model`` is asked."""
    made, spare = MODELS[name], folder.with_name(f"{folder.name}-tokenizer")
    spare.mkdir(parents=True)
    size = write_tokenizer(spare, made.tokenizer, stripping=made.stripping)
    config = {"max_position_embeddings": 512, "vocab_size": size + 3, "eos_token_id": None, **made.config, **changes}
    model_type = config["model_type"]
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "vocab_size": size + 3}
    if model_type == "mistral":  # mlx-lm computes it as a Llama
        config["model_type"] = "llama"
    build_model(folder, **config)
    _sharpen(folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type}))
    for file in spare.iterdir():
        file.replace(folder / file.name)
    return folder
