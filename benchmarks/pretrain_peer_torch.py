"""A plain PyTorch loop that trains a Llama from scratch, for bench_pretrain_torch: ``JOB``, the job as JSON.

Needs torch, numpy and safetensors, and nothing of safetrain. An update is made for each line that is read; its answer
is a line of JSON: the mean loss per label, and seconds. Windows lie as a batch; a mask keeps attention inside a
document.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

FLOOR = 0.1  # of the peak, where the cosine ends
NEWTON_SCHULZ, STEPS, MOMENTUM = (3.4445, -4.7750, 2.0315), 5, 0.95  # Muon's (kellerjordan.github.io/posts/muon)


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, width, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        linear = {
            "q_proj": (hidden, self.heads * size), "k_proj": (hidden, self.kv_heads * size),
            "v_proj": (hidden, self.kv_heads * size), "o_proj": (self.heads * size, hidden),
        }  # fmt: skip
        self.self_attn = nn.ModuleDict({name: nn.Linear(*sizes, bias=False) for name, sizes in linear.items()})
        wide = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*sizes, bias=False) for name, sizes in wide.items()})
        self.input_layernorm = nn.RMSNorm(hidden, config["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(hidden, config["rms_norm_eps"])

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """(batch, tokens, hidden)."""
        of, rows, tokens = self.self_attn, x.shape[0], x.shape[1]
        seen = self.input_layernorm(x)
        query = of["q_proj"](seen).view(rows, tokens, self.heads, -1).transpose(1, 2)
        key = of["k_proj"](seen).view(rows, tokens, self.kv_heads, -1).transpose(1, 2)
        value = of["v_proj"](seen).view(rows, tokens, self.kv_heads, -1).transpose(1, 2)
        found = F.scaled_dot_product_attention(
            rotated(query, rotation), rotated(key, rotation), value, mask, enable_gqa=self.heads != self.kv_heads
        )
        x = x + of["o_proj"](found.transpose(1, 2).reshape(rows, tokens, -1))
        seen = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](seen)) * self.mlp["up_proj"](seen))


class Llama(nn.Module):
    """As in Hugging Face's checkpoints, the head tied."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.base, self.size = config["rope_theta"], config["head_dim"]

    def forward(self, inputs: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        """Logits of (batch, tokens) inputs."""
        turns = self.base ** (-torch.arange(0, self.size, 2) / self.size)
        angles = positions[:, None, :, None] * turns
        causal = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool).tril()
        mask = (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]
        x = self.embed_tokens(inputs)
        for block in self.layers:
            x = block(x, (angles.cos(), angles.sin()), mask)
        return F.linear(self.norm(x), self.embed_tokens.weight)


class Muon(torch.optim.Optimizer):
    """Muon in float32, its steps as long as AdamW's (arXiv 2502.16982)."""

    def step(self, closure: Any = None) -> None:
        """One update."""
        for group in self.param_groups:
            for weight in group["params"]:
                kept = self.state[weight].setdefault("v", torch.zeros_like(weight))
                kept.lerp_(weight.grad, 1 - MOMENTUM)
                step = orthogonal(weight.grad.lerp(kept, MOMENTUM)) * 0.2 * math.sqrt(max(weight.shape))
                weight.data.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """By Newton and Schulz's iteration."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions; the two halves of a head are the two parts of its complex numbers."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def optimizers(model: Llama, job: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """AdamW, which decays matrices alone; or Muon for the matrices inside blocks, and AdamW for all others."""
    named = list(model.named_parameters())
    inside = [w for name, w in named if w.ndim == 2 and name.startswith("layers.")]
    vectors = [w for _, w in named if w.ndim < 2]
    decayed = [model.embed_tokens.weight] + ([] if job["optimizer"] == "muon" else inside)
    groups = [{"params": decayed, "weight_decay": job["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)]
    if job["optimizer"] == "muon":
        made.append(Muon(inside, {"lr": 0.0, "weight_decay": job["weight_decay"]}))
    return made


def rate_at(update: int, job: dict[str, Any]) -> float:
    """Warm-up, then a cosine down to a tenth."""
    if update < job["warmup"]:
        return job["rate"] * (update + 1) / job["warmup"]
    progress = (update - job["warmup"]) / max(1, job["updates"] - job["warmup"])
    return job["rate"] * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))


def main() -> None:
    """Make an update for each line."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    weights = load_file(Path(job["model"]) / "model.safetensors")
    model = Llama(json.loads((Path(job["model"]) / "config.json").read_text()))
    model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    tools, data = optimizers(model, job), np.load(job["windows"])
    for update, _ in enumerate(sys.stdin):
        began = time.perf_counter()
        given = {name: torch.from_numpy(data[name][update].astype(np.int64)) for name in data.files}
        logits = model(given["inputs"], given["positions"], given["documents"])
        loss = F.cross_entropy(logits.flatten(0, 1), given["targets"].flatten(), ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for tool in tools:
            for group in tool.param_groups:
                group["lr"] = rate_at(update, job)
            tool.step()
            tool.zero_grad()
        print(json.dumps({"loss": loss.item(), "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
