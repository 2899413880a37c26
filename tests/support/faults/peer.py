"""Drives mlx-lm: its own loop, loss, batches, data sets and command line, with tiny models and in this process."""

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import mlx_lm.lora
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.datasets import CacheDataset
from mlx_lm.tuner.trainer import TrainingArgs, default_loss, evaluate, iterate_batches, train
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, load_tokenizer

from tests.support.faults.project import tiny_model

NEVER = 10**6


@dataclass
class Recorder(TrainingCallback):
    """What mlx-lm reports while it trains; ``die_at`` plays a process that ends at that report."""

    train: list[dict[str, float]] = field(default_factory=list)
    valid: list[float] = field(default_factory=list)
    die_at: int = NEVER

    def on_train_loss_report(self, train_info: dict[str, float]) -> None:
        self.train.append(train_info)
        if len(self.train) == self.die_at:
            raise ProcessEndedError

    def on_val_loss_report(self, val_info: dict[str, float]) -> None:
        self.valid.append(val_info["val_loss"])

    @property
    def losses(self) -> list[float]:
        """The training losses, in order."""
        return [info["train_loss"] for info in self.train]


class ProcessEndedError(Exception):
    """Stands for the end of the process."""


class TokenRows:
    """Rows that are tokens already: (ids, number of prompt tokens)."""

    def __init__(self, rows: Sequence[tuple[list[int], int]]) -> None:
        self._rows = rows

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def process(self, row: tuple[list[int], int]) -> tuple[list[int], int]:
        """Nothing is left to do."""
        return row


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """mlx-lm without its screen, and without compilation, which changes its speed and not what it computes."""
    out = io.StringIO()
    mx.disable_compile()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            yield out
    finally:
        mx.enable_compile()


def tokenizer(folder: Path | None = None) -> Any:
    """The tokenizer as mlx-lm wraps it."""
    return load_tokenizer(folder or tiny_model())


def adapted_model(folder: Path | None = None, rank: int = 8) -> Any:
    """A tiny model with LoRA layers, as mlx_lm.lora makes it."""
    model = load_model(folder or tiny_model())[0]
    mx.random.seed(1)
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": rank, "scale": 2.0, "dropout": 0.0})
    return model


def trained(
    model: Any, data: Any, folder: Path, *, optimizer: Any = None, valid: Any = None, die_at: int = NEVER, **args: Any
) -> Recorder:
    """Train with mlx-lm's own loop; its adapter goes to ``folder``. ``args`` are those of TrainingArgs."""
    folder.mkdir(parents=True, exist_ok=True)
    np.random.seed(0)
    recorder = Recorder(die_at=die_at)
    settings = {"steps_per_report": 1, "adapter_file": folder / "adapters.safetensors", **args}
    with quiet():
        train(
            model=model,
            optimizer=optimizer or optim.Adam(learning_rate=1e-3),
            train_dataset=CacheDataset(data),
            val_dataset=CacheDataset(valid) if valid is not None else None,
            args=TrainingArgs(**settings),
            training_callback=recorder,
        )
    return recorder


def adapter_of(model: Any) -> dict[str, np.ndarray]:
    """The trainable weights as they are."""
    return {name: np.array(value) for name, value in tree_flatten(model.trainable_parameters())}


def command_line(data: Path, adapters: Path, *arguments: str, model: Path | None = None) -> str:
    """What ``mlx_lm.lora --train`` prints. ``arguments`` come last and win."""
    fixed = ["--train", "--model", str(model or tiny_model()), "--data", str(data), "--adapter-path", str(adapters)]
    usual = ["--num-layers", "2", "--learning-rate", "1e-3", "--seed", "1", "--steps-per-eval", str(NEVER)]
    before = sys.argv
    sys.argv = ["mlx_lm.lora", *fixed, *usual, *arguments]
    try:
        with quiet() as out:
            mlx_lm.lora.main()
    finally:
        sys.argv = before
    return out.getvalue()


def batches(data: Any, batch_size: int, max_seq_length: int = 2048) -> list[tuple[mx.array, mx.array]]:
    """One pass over ``data`` in mlx-lm's batches."""
    with quiet():
        return list(iterate_batches(CacheDataset(data), batch_size, max_seq_length, seed=0))


def targets(batch: mx.array, lengths: mx.array, vocabulary: int = 2048) -> list[int]:
    """The tokens that mlx-lm's loss trains: those whose logits have a gradient."""
    shape = (batch.shape[0], batch.shape[1] - 1, vocabulary)
    gradient = mx.grad(lambda logits: default_loss(lambda _inputs: logits, batch, lengths)[0])(mx.zeros(shape))
    counted = np.array(mx.abs(gradient).sum(axis=-1)) > 0
    return np.array(batch)[:, 1:][counted].tolist()


def validation_loss(model: Any, data: Any) -> float:
    """mlx-lm's own measure over every row of ``data``."""
    with quiet():
        return evaluate(model, CacheDataset(data), batch_size=1, num_batches=-1)
