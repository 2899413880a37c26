"""Updates of small models for the self-test's report: their cost, their kernels, and mlx_lm's beside them."""

import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import psutil
from mlx.utils import tree_flatten, tree_map

from safetrain.core.data.row_order import Cursor
from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.formatting import counted
from safetrain.core.memory.process import footprint_bytes
from safetrain.core.protocol.selftest import Exactness, Kernels, Line, ProcessMemory, Shapes, UpdateCost
from safetrain.core.records.settings import LoraSettings, TrainSettings
from safetrain.engine.backend import device
from safetrain.engine.batches import update_at
from safetrain.engine.graph import count_kernels, unevaluated
from safetrain.engine.layout import training_layout
from safetrain.engine.model import BaseModel, open_skeleton
from safetrain.engine.optimizer import BlockOptimizer
from safetrain.engine.selftest import SelftestResult, examine, settings_of
from safetrain.engine.trainable import equip, optimizer_of
from safetrain.engine.update import Gradients, apply_gradient, measure, norm_of
from safetrain.engine.upstream.loading import build

RANK, SCALE = 8, 2.0
LEAST_STEPS, MOST_STEPS, ENOUGH_SECONDS = 4, 10, 0.7  # the first is never used: buffers are made in it
MODEL_ROWS, MODEL_TOKENS = 4, 256


@dataclass(frozen=True)
class Small:
    """A Llama with random weights, and rows of equal length for it."""

    width: int
    blocks: int
    heads: int
    vocabulary: int
    rows: int
    tokens: int

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json: on a GPU quantized, on a CPU not, where mlx_lm would take minutes."""
        plain = {
            "model_type": "llama", "hidden_size": self.width, "num_hidden_layers": self.blocks,
            "intermediate_size": 3 * self.width, "num_attention_heads": self.heads,
            "num_key_value_heads": max(1, self.heads // 2), "rms_norm_eps": 1e-5, "vocab_size": self.vocabulary,
            "tie_word_embeddings": True,
        }  # fmt: skip
        return plain if device().dequantizes_per_use else {**plain, "quantization": {"group_size": 64, "bits": 4}}

    @property
    def settings(self) -> TrainSettings:
        """LoRA on every linear layer."""
        return settings_of(LoraSettings(RANK, SCALE, 0.0, self.blocks, ("all-linear",)), self.rows, self.tokens)

    @property
    def text(self) -> str:
        """In words."""
        form = "float32" if device().computes_in_float32 else "bfloat16, 4 bits"
        rows = f"{self.rows} x {self.tokens} tokens" if self.rows > 1 else f"one row of {self.tokens} tokens"
        return f"{self.blocks} blocks of width {self.width}, {form}; LoRA of rank {RANK}; {rows}"


def long_rows() -> Iterator[Line]:
    """Updates of one row, by its length: this project's own attention."""
    for tokens in (512, 2048):
        small = Small(64, 1, 2, 512, 1, tokens) if device().measures_small else Small(2048, 2, 16, 8192, 1, tokens)
        if tokens == 512:
            yield Shapes(f"{counted(small.blocks, 'block')} of width {small.width}, {counted(small.heads, 'head')}")
        yield cost_of(small, str(tokens))


def update() -> Iterator[Line]:
    """An update, and the process after it."""
    small = beside_mlx_lm()
    yield Shapes(small.text)
    yield cost_of(small, "safetrain")
    resident = psutil.Process().memory_info().rss
    yield ProcessMemory(footprint_bytes(os.getpid()), resident, mx.get_active_memory(), mx.get_cache_memory())


def update_of_mlx_lm() -> Iterator[Line]:
    """The same update by mlx_lm."""
    small = beside_mlx_lm()
    step, state = mlx_lm_step(small)
    seconds, peak = timed(lambda: mx.eval(step(), state))
    yield UpdateCost("mlx_lm", seconds, peak, mx.get_active_memory())


def kernels() -> Iterator[Line]:
    """Launches of an update of 8 narrow blocks; benchmarks/results/bench_kernels.md predicts them for Metal."""
    small = Small(64, 8, 2, 32_768, 1, 512)
    yield Shapes(small.text)
    gradient, optimizer = kernels_of(small)
    step, state = mlx_lm_step(small)
    with unevaluated():
        yield Kernels(gradient, optimizer, count_kernels(step(), state))


def exactness() -> Iterator[Line]:
    """A random model in the type that a 4-bit model computes in here: on CUDA the fused path."""
    small = Small(64, 2, 1, 256, 2, 48)
    with tempfile.TemporaryDirectory() as scratch:
        folder, config = Path(scratch), small.config
        weights = dict(tree_flatten(random_module(config).parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "tokenizer.json").write_text("{}", encoding="utf-8")  # has to be there, and makes no token
        yield _exactness("random", examine(folder, small.rows, small.tokens))


def exactness_of(folder: Path) -> Iterator[Line]:
    """A model on disk."""
    yield _exactness(folder.name, examine(folder, MODEL_ROWS, MODEL_TOKENS))


def beside_mlx_lm() -> Small:
    """What both train."""
    return Small(128, 2, 4, 2048, 2, 128) if device().measures_small else Small(2048, 4, 16, 8192, 2, 512)


def cost_of(small: Small, name: str) -> UpdateCost:
    """Measure a few updates."""
    settings, (model, gradients, optimizer) = small.settings, trainable(small)
    mx.clear_cache()
    still, rows = mx.get_active_memory(), rows_of(small)
    made = update_at(rows, Cursor(0, 0), 1, len(rows), training_layout(model, settings.batch_size, rows.inputs()))

    def step() -> None:
        loss, gradient = gradients.of(made, 0)
        result = measure(loss, gradient)
        apply_gradient(model, optimizer, gradient, result.grad_norm, 1e-4, settings.max_grad_norm)
        mx.eval(model.module.trainable_parameters(), optimizer.state)

    seconds, peak = timed(step)
    return UpdateCost(name, seconds, peak, still)


def trainable(small: Small) -> tuple[BaseModel, Gradients, BlockOptimizer]:
    """The model in memory, and what trains it."""
    model = open_skeleton(small.config, float32=device().computes_in_float32)
    gradients, optimizer = equip(model, small.settings), optimizer_of(small.settings)
    optimizer.init(model.module.trainable_parameters())
    mx.eval(model.module.parameters(), optimizer.state)
    model.module.train()
    return model, gradients, optimizer


def timed(step: Callable[[], None]) -> tuple[float, int]:
    """Seconds of the fastest of a few steps, and the largest peak of mlx's memory."""
    seconds, peaks = list[float](), list[int]()
    while len(peaks) < LEAST_STEPS or (sum(seconds) < ENOUGH_SECONDS and len(peaks) < MOST_STEPS):
        mx.reset_peak_memory()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
        peaks.append(mx.get_peak_memory())
    return min(seconds[1:]), max(peaks[1:])


def rows_of(small: Small) -> TokenRows:
    """Rows that mean nothing, every token a label."""
    ids = [place % small.vocabulary for place in range(small.tokens + 1)]
    return TokenRows.of([token_row(ids, [True] * len(ids))]).take([0] * small.rows)


def kernels_of(small: Small) -> tuple[int, int]:
    """Launches of the gradient with its norm, and of the optimizer."""
    settings, (model, gradients, optimizer) = small.settings, trainable(small)
    ones = tree_map(mx.ones_like, model.module.trainable_parameters())
    mx.eval(ones)
    rows = rows_of(small)
    made = update_at(rows, Cursor(0, 0), 1, 1, training_layout(model, settings.batch_size, rows.inputs()))
    with unevaluated():
        loss, gradient = gradients.of(made, 0)
        of_gradient = count_kernels(loss, gradient, norm_of(gradient))
        apply_gradient(model, optimizer, ones, 2.0, 1e-3, settings.max_grad_norm)  # a norm of 2 is clipped
        return of_gradient, count_kernels(model.module.trainable_parameters(), optimizer.state)


def mlx_lm_step(small: Small) -> tuple[Callable[[], Any], list[Any]]:
    """The compiled step of mlx_lm/tuner/trainer.py (0.32), and the state that it changes."""
    from safetrain.engine.upstream.reference import add_lora, default_loss

    model = random_module(small.config)
    model.freeze()
    add_lora(model, small.blocks, RANK, SCALE)
    optimizer = optim.Adam(1e-4)
    optimizer.init(model.trainable_parameters())
    model.train()
    state = [model.state, optimizer.state, mx.random.state]
    mx.eval(state)
    loss_and_gradient = nn.value_and_grad(model, default_loss)
    batch = mx.arange(small.tokens + 1)[None] % small.vocabulary + mx.zeros((small.rows, 1), mx.int32)
    lengths = mx.array([[1, small.tokens]] * small.rows)

    @functools.partial(mx.compile, inputs=state, outputs=state)
    def step(batch: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
        (loss, tokens), gradient = loss_and_gradient(model, batch, lengths)
        optimizer.update(model, gradient)
        return loss, tokens

    return lambda: step(batch, lengths), state


def random_module(config: dict[str, Any]) -> Any:
    """An mlx_lm model as it is stored: bfloat16 and quantized where the config says so, else float32."""
    module = build(config, bfloat16="quantization" in config)
    mx.eval(module.parameters())
    return module


def _exactness(name: str, found: SelftestResult) -> Exactness:
    return Exactness(name, found.loss_difference, found.gradient_difference, found.in_float32, found.on_cpu)
