"""The optimizer at work block by block, and compiled: what it does stays what mlx does; the learning rate by step."""

import itertools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from safetrain.engine.model import BaseModel
from safetrain.engine.optimizer import BlockOptimizer, learning_rate, of_mlx
from safetrain.engine.update import apply_gradient
from tests.engine.exact import flat

DECAYS = {"adam": 0.0, "adamw": 0.1, "adafactor": 0.1, "muon": 0.1, "sgd": 0.1}
BLOCKS, MIB = 8, 2**20
AS_IS = "no model", None, "no model"


class Block(nn.Module):
    """What is trained of a transformer block: a matrix and a vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.lora_a, self.m = mx.random.normal((size, 16)), mx.random.normal((size,))


class Trunk(nn.Module):
    """Blocks, and a parameter beside them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        mx.random.seed(3)
        self.layers, self.norm = [Block(size) for _ in range(BLOCKS)], mx.ones((16,))
        mx.eval(self.parameters())


def gradient_at(module: nn.Module, step: int) -> Any:
    """A gradient that depends on the weights."""
    mx.random.seed(step)
    return tree_map(lambda w: w + mx.random.normal(w.shape), module.trainable_parameters())


@pytest.mark.parametrize("name", DECAYS)
def test_block_by_block_gives_the_bits_of_all_at_once(name: str) -> None:
    """Compiled, as on a GPU, multiply and add may become one operation."""

    def trained(optimizer: BlockOptimizer) -> np.ndarray:
        module = Trunk(40)
        optimizer.init(module.trainable_parameters())
        for step in range(6):
            model = BaseModel(module, frozenset(), *AS_IS)
            apply_gradient(model, optimizer, gradient_at(module, step), 9.0, 1e-2, 5.0)
        return flat(module.trainable_parameters())

    mine, theirs, expected = BlockOptimizer(of_mlx(name, DECAYS[name])), of_mlx(name, DECAYS[name]), Trunk(40)
    theirs.init(expected.trainable_parameters())
    for step in range(6):
        theirs.learning_rate = 1e-2
        scaled = tree_map(lambda part: part * (5.0 / (9.0 + 1e-6)), gradient_at(expected, step))
        theirs.update(expected, scaled)
    assert (trained(mine) == flat(expected.trainable_parameters())).all()
    assert (flat(mine.state) == flat(theirs.state)).all()
    if name == "adamw":
        compiled = trained(BlockOptimizer(of_mlx(name, 0.1), compiled=True))
        np.testing.assert_allclose(compiled, flat(expected.trainable_parameters()), rtol=1e-5, atol=1e-6)


def test_new_values_stand_beside_old_ones_for_one_block_only() -> None:
    """Twice the blocks' own size would be all new moments and weights; a fraction is one block's."""
    module, optimizer = Trunk(2**14), BlockOptimizer(of_mlx("adam", 0.0))
    optimizer.init(module.trainable_parameters())
    gradient = gradient_at(module, 0)
    mx.eval(gradient, optimizer.state)
    size = sum(value.nbytes for _, value in tree_flatten(module.trainable_parameters()))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    apply_gradient(BaseModel(module, frozenset(), *AS_IS), optimizer, gradient, 9.0, 1e-2, 5.0)
    more = mx.get_peak_memory() - before
    assert more <= 5.0 * size / BLOCKS + MIB / 4, (more / MIB, size / MIB)


@pytest.mark.parametrize(
    ("schedule", "middle", "near_the_end", "end"),
    [("cosine", 0.55, 0.1222, 0.1), ("linear", 0.55, 0.19, 0.1), ("constant", 1.0, 1.0, 1.0), ("wsd", 1.0, 0.55, 0.1)],
)
def test_schedules(schedule: str, middle: float, near_the_end: float, end: float) -> None:
    """After ten updates of warm-up, a hundred: at half of them, at nine tenths, after the last."""
    found = [learning_rate(update, 1.0, 10, 110, schedule) for update in (60, 100, 110)]
    assert found == pytest.approx([middle, near_the_end, end], abs=1e-3)
    rates = [learning_rate(update, 1.0, 10, 110, schedule) for update in range(111)]
    assert rates[:11] == pytest.approx([0.1 * update for update in range(1, 11)] + [1.0])
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert learning_rate(0, 1.0, 0, 1, schedule) == 1.0, "without warm-up"
