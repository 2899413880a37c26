"""A Llama with LoRA in float64 NumPy, written from the papers: a reference that shares nothing with mlx."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np

Weights = dict[str, np.ndarray]


class NumpyLlama:
    """Summed cross-entropy of one row's labels. ``lora`` holds ...lora_a and ...lora_b by mlx-lm's names."""

    def __init__(self, folder: Path, scale: float) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        loaded = mx.load(str(folder / "model.safetensors"))
        assert isinstance(loaded, dict)
        self.weights = {name: np.array(value).astype(np.float64) for name, value in loaded.items()}
        self.scale = scale

    def loss(self, ids: list[int], trained: list[bool], lora: Weights) -> float:
        x = self.weights["model.embed_tokens.weight"][ids[:-1]]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", lora)
            h = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self.linear(h, f"{name}.mlp.{part}_proj", lora) for part in ("gate", "up"))
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, f"{name}.mlp.down_proj", lora)
        head = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        logits = self.norm(x, "model.norm") @ self.weights[f"{head}.weight"].T
        logits = logits - logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return -sum(log_p[place - 1, ids[place]] for place in range(1, len(ids)) if trained[place])

    def linear(self, x: np.ndarray, name: str, lora: Weights) -> np.ndarray:
        y = x @ self.weights[f"{name}.weight"].T
        a, b = lora.get(f"{name}.lora_a"), lora.get(f"{name}.lora_b")
        return y if a is None or b is None else y + self.scale * (x @ a) @ b

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        size = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / size * self.weights[f"{name}.weight"]

    def attention(self, x: np.ndarray, name: str, lora: Weights) -> np.ndarray:
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size, length = self.config["head_dim"], len(x)
        q, k, v = (
            self.linear(x, f"{name}.{part}_proj", lora).reshape(length, count, size).transpose(1, 0, 2)
            for part, count in (("q", heads), ("k", kv), ("v", kv))
        )
        q, k = self.rotate(q), np.repeat(self.rotate(k), heads // kv, axis=0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(size)
        scores = np.where(np.tril(np.ones((length, length), dtype=bool)), scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = (p / p.sum(axis=-1, keepdims=True)) @ np.repeat(v, heads // kv, axis=0)
        return self.linear(out.transpose(1, 0, 2).reshape(length, -1), f"{name}.o_proj", lora)

    def rotate(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = np.arange(x.shape[1])[:, None] * self.config["rope_theta"] ** (-np.arange(half) / half)
        one, two = x[..., :half], x[..., half:]
        return np.concatenate(
            [one * np.cos(angle) - two * np.sin(angle), one * np.sin(angle) + two * np.cos(angle)], axis=-1
        )
