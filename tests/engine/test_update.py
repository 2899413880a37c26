"""The numbers are right: loss and gradients against references that share no code with the engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from safetrain.core.chat import Rendered
from safetrain.core.settings import LoraSettings
from safetrain.engine.batches import Cursor, Update, make_batch, update_at
from safetrain.engine.loss import loss_function, loss_without_gradient
from safetrain.engine.model import BaseModel, add_lora, open_base
from safetrain.engine.update import apply_update, gradient_of, loss_and_gradient

Build = Callable[..., Path]
LORA = LoraSettings(4, 2.0, 0.0, 2, ("all-linear",))


def rows_of(*lengths: int) -> list[Rendered]:
    """Random rows, the second half of each trained."""
    source = np.random.default_rng(5)
    return [
        Rendered(tuple(source.integers(5, 2048, n).tolist()), tuple(index >= n // 2 for index in range(n)))
        for n in lengths
    ]


def with_lora(folder: Path) -> BaseModel:
    """A model whose LoRA matrices are all random: at their initial zeros half of the gradient would vanish."""
    model = open_base(folder, dequantize=True)
    add_lora(model, LORA, seed=1)
    weights = [(name, 0.1 * mx.random.normal(w.shape)) for name, w in tree_flatten(model.module.trainable_parameters())]
    model.module.load_weights(weights, strict=False)
    return model


def flat(gradient: Any) -> np.ndarray:
    return np.concatenate([np.array(part).ravel() for _, part in sorted(tree_flatten(gradient))])


def test_the_loss_is_the_cross_entropy_of_the_labels(tiny_model: Build) -> None:
    """Against NumPy, row by row, without padding: padding is never trained and never read."""
    model, data = with_lora(tiny_model()), rows_of(5, 40, 17)
    expected = 0.0
    for row in data:
        logits = np.array(model.module(mx.array([row.ids])))[0].astype(np.float64)
        for position in range(1, len(row.ids)):
            if row.trained[position]:
                line = logits[position - 1]
                peak = line.max()
                expected += peak + np.log(np.exp(line - peak).sum()) - line[row.ids[position]]
    batch = make_batch(data, [0, 1, 2])
    for loss in (loss_function(model.module), loss_without_gradient(model.module)):
        assert float(np.array(loss(batch))) == pytest.approx(expected, rel=1e-5)
    assert int(np.array(batch.weights.sum())) == sum(row.trained_tokens for row in data)


def test_micro_batches_give_the_gradient_of_the_one_big_batch(tiny_model: Build) -> None:
    """With very unequal lengths, where a mean of means is wrong by tens of percent."""
    model, data = with_lora(tiny_model(bits=4)), rows_of(3, 90, 6, 33, 4, 61, 5)
    compute, tokens = loss_and_gradient(model), sum(row.trained_tokens for row in data)
    one = Update((make_batch(data, range(7)),), tokens, 0)
    loss, expected = gradient_of(one, compute)
    for size in (1, 2, 3):
        parts = tuple(make_batch(data, range(start, min(start + size, 7))) for start in range(0, 7, size))
        micro_loss, gradient = gradient_of(Update(parts, tokens, 0), compute)
        difference = np.linalg.norm(flat(gradient) - flat(expected)) / np.linalg.norm(flat(expected))
        assert difference <= 1e-5
        assert micro_loss == pytest.approx(loss, rel=1e-6)


def test_the_gradient_of_lora_matches_finite_differences(tiny_model: Build) -> None:
    model, data = with_lora(tiny_model()), rows_of(24, 30)
    update = Update((make_batch(data, [0, 1]),), sum(row.trained_tokens for row in data), 0)
    _, gradient = gradient_of(update, loss_and_gradient(model))
    weights = dict(tree_flatten(model.module.trainable_parameters()))
    source, checked = np.random.default_rng(1), 0
    for name, part in tree_flatten(gradient)[::5]:
        direction = mx.array(source.standard_normal(weights[name].shape).astype(np.float32))
        losses = []
        for step in (1e-2, -1e-2):
            model.module.load_weights([(name, weights[name] + step * direction)], strict=False)
            losses.append(float(np.array(loss_function(model.module)(update.micro_batches[0]))))
        model.module.load_weights([(name, weights[name])], strict=False)
        measured = (losses[0] - losses[1]) / 2e-2 / update.trained_tokens
        assert measured == pytest.approx(float(np.array((part * direction).sum())), rel=0.05, abs=2e-4)
        checked += 1
    assert checked >= 5


def test_only_lora_is_trained_and_the_base_stays(tiny_model: Build) -> None:
    model, data = with_lora(tiny_model(bits=4)), rows_of(20, 25)
    before = {name: np.array(value) for name, value in tree_flatten(model.module.parameters())}
    optimizer = optim.Adam(1e-2, bias_correction=True)
    update = update_at(data, Cursor(0, 0), seed=1, batch_size=1, rows_per_update=2)
    apply_update(model, optimizer, update, loss_and_gradient(model), 1e-2, 1.0)
    changed = {
        name for name, value in tree_flatten(model.module.parameters()) if (np.array(value) != before[name]).any()
    }
    assert changed
    assert all(name.endswith(("lora_a", "lora_b")) for name in changed)


def test_the_gradient_is_clipped_to_its_norm(tiny_model: Build) -> None:
    """The first Adam step is blind to scale, so plain descent shows it."""
    model, data = with_lora(tiny_model()), rows_of(20, 25)
    before = flat(model.module.trainable_parameters())
    update = Update((make_batch(data, [0, 1]),), 3, 0)
    result = apply_update(model, optim.SGD(1.0), update, loss_and_gradient(model), 1.0, 0.01)
    moved = np.linalg.norm(flat(model.module.trainable_parameters()) - before)
    assert result.grad_norm > 0.01
    assert moved == pytest.approx(0.01, rel=1e-2)


def test_nothing_changes_when_the_loss_is_not_a_number(tiny_model: Build) -> None:
    model, data = with_lora(tiny_model()), rows_of(20)
    name, weight = tree_flatten(model.module.trainable_parameters())[0]
    model.module.load_weights([(name, mx.full(weight.shape, float("nan")))], strict=False)
    others = [w for n, w in tree_flatten(model.module.trainable_parameters()) if n != name]
    before = [np.array(w) for w in others]
    optimizer = optim.Adam(1e-2)
    update = update_at(data, Cursor(0, 0), seed=1, batch_size=1, rows_per_update=1)
    result = apply_update(model, optimizer, update, loss_and_gradient(model), 1e-2, 1.0)
    assert not np.isfinite(result.summed_loss)
    after = [np.array(w) for n, w in tree_flatten(model.module.trainable_parameters()) if n != name]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
