"""One real forward and backward pass of a model, against mlx-lm's own layers and a plain cross-entropy.

``python -m safetrain.engine.selftest MODEL_FOLDER ROWS TOKENS [LIMIT]`` prints one JSON object. A separate process,
because what it looks for may kill it, under the memory limit of a training.
"""

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from safetrain.core.data.row_order import Cursor
from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.model.files import read_model_files
from safetrain.core.records.settings import LoraSettings, TrainSettings
from safetrain.engine.child_process import die_with_parent, prefer_for_oom_kill
from safetrain.engine.cpu.blas import load_fast_blas

RANK, SCALE, SEED, MOST_LAYERS = 8, 2.0, 7, 4
SPREAD = 0.02  # of the adapter's random numbers; at its usual zeros half of the gradient vanishes


@dataclass(frozen=True)
class SelftestResult:
    """One pass compared with the reference. Differences are relative."""

    layers_with_adapter: int
    packs_rows: bool
    in_float32: bool
    on_cpu: bool
    loss: float  # nats per label
    loss_difference: float
    gradient_difference: float  # to the textbook's, over all trained numbers
    step_seconds: float
    tokens_per_second: float
    peak_memory_bytes: int


def main() -> None:
    """Run and print."""
    die_with_parent(os.getppid())
    prefer_for_oom_kill()
    load_fast_blas()
    from safetrain.engine.backend import keep_to_room

    folder, rows, tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    keep_to_room(int(sys.argv[4]) if len(sys.argv) > 4 else None)
    print(json.dumps(dataclasses.asdict(examine(folder, rows, tokens))))


def examine(folder: Path, rows: int, tokens: int) -> SelftestResult:
    """Compare on ``rows`` random rows of up to ``tokens`` tokens; the second half of each is trained."""
    import mlx.core as mx

    from safetrain.engine.adapters import adapted_names
    from safetrain.engine.backend import device
    from safetrain.engine.batches import update_at
    from safetrain.engine.layout import training_layout
    from safetrain.engine.update import prepare

    files = read_model_files(folder)
    lora = LoraSettings(RANK, SCALE, 0.0, min(MOST_LAYERS, files.num_layers), ("all-linear",))
    data = _random_rows(rows, tokens, files.vocab_size)
    settings = settings_of(lora, rows, tokens)
    model, gradients = prepare(folder, settings)
    weights = _spread(model.module)
    update = update_at(data, Cursor(0, 0), SEED, rows, training_layout(model, rows, data.inputs()))
    model.module.train()
    for _ in range(2):  # the first pass compiles
        mx.reset_peak_memory()
        began = time.perf_counter()
        loss, gradient = gradients.of(update, 0)
        mx.eval(loss, gradient)
        seconds = time.perf_counter() - began
    peak = mx.get_peak_memory()
    ours, gradient_vector = float(np.array(loss)) / update.trained_tokens, _as_vector(gradient)
    packs_rows, keys = model.packs_rows, adapted_names(model)
    del model, gradients, gradient
    expected_loss, expected, in_float32 = _textbook(folder, lora, keys, weights, data)
    return SelftestResult(
        layers_with_adapter=lora.num_layers,
        packs_rows=packs_rows,
        in_float32=in_float32,
        on_cpu=device().name == "cpu",
        loss=ours,
        loss_difference=abs(ours - expected_loss) / abs(expected_loss),
        gradient_difference=float(np.linalg.norm(gradient_vector - expected) / np.linalg.norm(expected)),
        step_seconds=seconds,
        tokens_per_second=update.input_tokens / seconds,
        peak_memory_bytes=peak,
    )


def _textbook(
    folder: Path, lora: LoraSettings, keys: list[str], weights: dict[str, Any], data: Any
) -> tuple[float, Any, bool]:
    """Loss, gradient, and whether in float32: mlx-lm's model and LoRA layers as they are, all logits, row by row."""
    import mlx.core as mx
    import mlx.nn as nn

    from safetrain.engine.backend import device
    from safetrain.engine.upstream.layers import add_lora
    from safetrain.engine.upstream.loading import plain_model

    module = plain_model(folder, in_float32=device().computes_in_float32)
    add_lora(module, lora.num_layers, lora.rank, lora.scale, keys)
    module.load_weights(list(weights.items()), strict=False)
    module.train()  # some models have kernels without a gradient, which they then do not use
    count = sum(sum(row.trained.tolist()[1:]) for row in data)

    def loss_of(module: Any, ids: mx.array, labels: mx.array) -> mx.array:
        losses = nn.losses.cross_entropy(module(ids[None, :-1]).astype(mx.float32), ids[None, 1:])
        return (losses * labels[1:]).sum() / count

    loss, summed = 0.0, np.zeros(1)
    for row in data:
        labels = mx.array([float(trained) for trained in row.trained.tolist()])
        part, gradient = nn.value_and_grad(module, loss_of)(module, mx.array(row.ids.tolist()), labels)
        mx.eval(part, gradient)
        loss, summed = loss + float(np.array(part)), _as_vector(gradient) + summed
    module.eval()
    in_float32 = module(mx.array([[1]])).dtype == mx.float32
    return loss, summed, in_float32


def _spread(module: Any) -> dict[str, Any]:
    """Give the adapter random numbers; returns them by name."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    mx.random.seed(SEED)
    weights = {n: w + SPREAD * mx.random.normal(w.shape) for n, w in tree_flatten(module.trainable_parameters())}
    module.load_weights(list(weights.items()), strict=False)
    mx.eval(list(weights.values()))
    return weights


def _as_vector(tree: Any) -> Any:
    from mlx.utils import tree_flatten

    return np.concatenate([np.array(part).ravel() for _, part in sorted(tree_flatten(tree))]).astype(np.float64)


def _random_rows(rows: int, tokens: int, vocabulary: int) -> Any:
    source = np.random.default_rng(SEED)
    lengths = [max(4, tokens - 3 * index) for index in range(rows)]
    return TokenRows.of(
        [
            token_row(source.integers(1, vocabulary, n).tolist(), [index >= n // 2 for index in range(n)])
            for n in lengths
        ]
    )


def settings_of(lora: LoraSettings, rows: int, tokens: int) -> TrainSettings:
    """Of an update of ``rows`` rows of up to ``tokens`` tokens, a quantized base left as it is."""
    return TrainSettings(
        method="lora", optimizer="adam", schedule="constant", batch_size=rows, gradient_accumulation=1,
        max_seq_length=tokens, learning_rate=1e-4, num_epochs=1, max_steps=1, max_examples=None, warmup_steps=0,
        save_steps=1, eval_steps=1, log_steps=1, max_grad_norm=1.0, weight_decay=0.0,
        early_stopping_patience=None, max_loss_jump=None, dequantize_base=False,
        gradient_checkpointing=False, seed=SEED, lora=lora,
    )  # fmt: skip


if __name__ == "__main__":
    main()
