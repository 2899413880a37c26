"""PyTorch and PEFT on one case of bench_throughput: the same weights, dequantized, and LoRA on the same linear layers.

Needs torch, transformers, peft and safetensors, and nothing of safetrain, so that any interpreter that has them can run
it. The loop is the usual one: rows in random order, each batch padded to its longest row, gradients clipped, Adam.
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

UNTRAINED = -100
MAX_GRAD_NORM = 1.0


def main() -> None:
    """``python -m benchmarks.throughput_peer_torch JOB``, the job as JSON."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    torch.manual_seed(job["seed"])
    model = open_model(job)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=job["learning_rate"])
    rows = json.loads(Path(job["tokens"]).read_text())
    updates: list[dict[str, Any]] = []
    losses: list[float] = []
    for batch in batches(len(rows), job["batch_size"], job["seed"]):
        tensors = collate([rows[index] for index in batch])
        began = time.perf_counter()
        loss = model(**tensors).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds = time.perf_counter() - began
        updates.append({"rows": batch, "seconds": seconds, "positions": len(batch) * (tensors["labels"].shape[1] - 1)})
        counted = sum(update["seconds"] for update in updates[1:])
        if len(updates) >= job["least_updates"] and counted >= job["seconds"]:
            break
    Path(job["result"]).write_text(json.dumps({"updates": updates, "losses": losses}))


def open_model(job: dict[str, Any]) -> Any:
    """Hugging Face's Llama with the case's weights and new LoRA layers."""
    folder = Path(job["float32"])
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
    config.use_cache = False
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    if unexpected or [name for name in missing if not (name == "lm_head.weight" and config.tie_word_embeddings)]:
        raise RuntimeError(f"the weights do not fit: {missing} are missing, {unexpected} are too many")
    model.tie_weights()
    model.to(getattr(torch, job["dtype"]))
    lora = LoraConfig(
        r=job["rank"],
        lora_alpha=job["scale"] * job["rank"],
        lora_dropout=0.0,
        target_modules=job["targets"],
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, lora)
    adapted.train()
    return adapted


def batches(rows: int, size: int, seed: int) -> list[list[int]]:
    """One epoch of row numbers in random order, whole batches only."""
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    return [order[start : start + size] for start in range(0, rows - size + 1, size)]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows as tensors, padded on the right to the longest of them."""
    longest = max(len(row["ids"]) for row in rows)
    padded: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        padding = longest - len(row["ids"])
        padded["input_ids"].append(row["ids"] + [0] * padding)
        padded["attention_mask"].append([1] * len(row["ids"]) + [0] * padding)
        padded["labels"].append(row["labels"] + [UNTRAINED] * padding)
    return {name: torch.tensor(values) for name, values in padded.items()}


if __name__ == "__main__":
    main()
