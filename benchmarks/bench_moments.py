"""What 16 bits for Adam's moments do to the loss: the example's model and rows, trained with either.

    python -m benchmarks.bench_moments

The same seed and data; beside the difference stands that of another seed, which is what chance does.
"""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.machine import write_result
from safetrain.core.data.token_rows import TokenRows
from safetrain.core.data.tokenizer import ChatTokenizer
from tests.support.random_models import EMBEDDED
from tests.support.settings import SETTINGS, as_trained

UPDATES = 200
RUN: dict[str, Any] = {
    "batch_size": 4,
    "gradient_accumulation": 1,
    "learning_rate": 2e-3,
    "warmup_steps": 10,
    "lora": dataclasses.replace(SETTINGS.lora, rank=16, num_layers=6),
}
EXAMPLE = Path(__file__).resolve().parent.parent / "data" / "example"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("adam, 32 bits", {}),
    ("adam, 16 bits, rounded at random", {"optimizer_state_bits": 16}),
    ("adam, 16 bits, rounded to nearest", {"optimizer_state_bits": 16}),
    ("adam, 32 bits, another seed", {"seed": 8}),
]


def main() -> None:
    """One row a case."""
    rows: list[list[object]] = []
    first = 0.0
    for name, changes in CASES:
        train, valid, size = losses(name, changes)
        first = first or valid
        rows.append(
            [name, f"{size / 2**10:,.0f}", f"{train:.4f}", f"{valid:.4f}", f"{100 * (valid / first - 1):+.2f} %"]
        )
    header = ["optimizer", "its state, KiB", "training loss, last 20 updates", "validation loss", "beside the first"]
    what = f"Adam's moments in 16 bits: losses after {UPDATES} updates of the example"
    write_result("bench_moments", what, header, rows)


def losses(name: str, changes: dict[str, Any]) -> tuple[float, float, int]:
    """Training loss at the end, validation loss, and bytes of the optimizer's state."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from safetrain.core.data.row_order import Cursor, advance
    from safetrain.engine.batches import update_at
    from safetrain.engine.evaluation import measure_loss
    from safetrain.engine.layout import training_layout
    from safetrain.engine.optimizer import learning_rate
    from safetrain.engine.trainable import optimizer_of, prepare
    from safetrain.engine.update import apply_gradient, measure

    settings = dataclasses.replace(SETTINGS, **{**RUN, **changes})
    train, valid = rows_of("train.jsonl"), rows_of("valid.jsonl")
    model, gradients = prepare(EMBEDDED, settings)
    optimizer, layout = optimizer_of(settings), training_layout(model, settings.batch_size, train.inputs())
    optimizer.init(model.module.trainable_parameters())
    cursor, found = Cursor(0, 0), list[float]()
    nearest = mock.patch("safetrain.engine.optimizer.rounded", lambda values, *_: values.astype(mx.bfloat16))
    with nearest if "nearest" in name else nullcontext():
        for step in range(UPDATES):
            update = update_at(train, cursor, settings.seed, settings.rows_per_update, layout)
            model.module.train()
            loss, gradient = gradients.of(update, step)
            result = measure(loss, gradient)
            rate = learning_rate(step, settings.learning_rate, settings.warmup_steps, UPDATES)
            apply_gradient(model, optimizer, gradient, result.grad_norm, rate, settings.max_grad_norm)
            found.append(result.summed_loss / update.trained_tokens)
            cursor = advance(cursor, len(train), settings.rows_per_update)
    size = sum(value.nbytes for _, value in tree_flatten(optimizer.state))
    return float(np.mean(found[-20:])), measure_loss(model, valid, layout.most_tokens), size


def rows_of(file: str) -> TokenRows:
    """The example's rows, as a training sees them."""
    tokenizer = ChatTokenizer(EMBEDDED)
    lines = (EXAMPLE / file).read_text(encoding="utf-8").splitlines()
    return TokenRows.of([as_trained(tokenizer, json.loads(line)) for line in lines])


if __name__ == "__main__":
    from safetrain.engine.blas import load_fast_blas

    load_fast_blas()
    main()
