"""mlx_lm.lora on one case of bench_throughput: its own loading, batches, loss, optimizer and compiled step.

This is what its command line runs, with a callback that keeps the time of every update and a list of the rows it takes.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

from mlx_lm.lora import CONFIG_DEFAULTS, load, load_dataset, train_model
from mlx_lm.tuner.callbacks import TrainingCallback

NEVER = 10**9
PADDED_TO = 32


class Enough(Exception):
    """The time for measuring is over."""


class PackedRows:
    """The training rows, and in which order they are taken: each for the first time in the batch that trains it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.index = {id(dataset[index]): index for index in range(len(dataset))}
        self.taken: list[int] = []
        self.length_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def process(self, row: Any) -> Any:
        """The row's tokens."""
        tokens, offset = self.dataset.process(row)
        self.taken.append(self.index[id(row)])
        self.length_of[self.index[id(row)]] = len(tokens)
        return tokens, offset


class Clock(TrainingCallback):
    """Keeps what each update took and stops when there is enough."""

    def __init__(self, rows: PackedRows, job: dict[str, Any]) -> None:
        self.rows, self.job = rows, job
        self.updates: list[dict[str, Any]] = []
        self.peak_memory_bytes = 0.0
        self.losses: list[float] = []

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        """After every update."""
        batch, self.rows.taken = self.rows.taken, []
        if len(batch) != self.job["batch_size"]:
            raise RuntimeError(f"mlx-lm took {len(batch)} new rows for a batch of {self.job['batch_size']}")
        longest = max(self.rows.length_of[row] for row in batch)
        width = min(1 + PADDED_TO * -(-longest // PADDED_TO), self.job["max_tokens"])
        seconds = 1 / train_info["iterations_per_second"]
        self.updates.append({"rows": batch, "seconds": seconds, "positions": len(batch) * (width - 1)})
        self.losses.append(train_info["train_loss"])
        self.peak_memory_bytes = 1e9 * train_info["peak_memory"]
        counted = self.updates[1:]
        if len(self.updates) >= self.job["least_updates"] and sum(u["seconds"] for u in counted) >= self.job["seconds"]:
            raise Enough


def main() -> None:
    """``python -m benchmarks.throughput_peer_mlx_lm JOB``, the job as JSON."""
    job = json.loads(sys.argv[1])
    lora = {"rank": job["rank"], "scale": job["scale"], "dropout": 0.0}
    changes = {
        "model": job["model"],
        "data": job["data"],
        "train": True,
        "mask_prompt": True,
        "num_layers": job["layers"],
        "batch_size": job["batch_size"],
        "iters": job["rows"] // job["batch_size"],
        "learning_rate": job["learning_rate"],
        "max_seq_length": job["max_tokens"],
        "lora_parameters": lora,  # without keys: every linear layer
        "steps_per_report": 1,
        "steps_per_eval": NEVER,
        "save_every": NEVER,
        "adapter_path": job["adapter"],
    }
    args = types.SimpleNamespace(**{**CONFIG_DEFAULTS, **changes})
    model, tokenizer = load(args.model)
    train_set, _, _ = load_dataset(args, tokenizer)
    rows = PackedRows(train_set)
    clock = Clock(rows, job)
    try:
        train_model(args, model, rows, [], clock)
    except Enough:
        print("stopped: measured long enough")
    result = {"updates": clock.updates, "peak_memory_bytes": round(clock.peak_memory_bytes), "losses": clock.losses}
    Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
