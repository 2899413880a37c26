"""The optimizer at work block by block, compiled, with a state in 16 bits: what it does stays what mlx does."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from safetrain.engine.model import BaseModel
from safetrain.engine.optimizer import BlockOptimizer, of_mlx, rounded
from safetrain.engine.update import apply_gradient
from safetrain.engine.upstream.adaptation import Adaptation
from tests.engine.exact import flat

NAMES = ["adam", "adamw", "adafactor", "muon", "sgd"]
BLOCKS, MIB = 8, 2**20
AS_IS = Adaptation("no model", None, "no model")


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


def trained(optimizer: BlockOptimizer, steps: int = 6, size: int = 40, max_norm: float = 5.0) -> nn.Module:
    module = Trunk(size)
    optimizer.init(module.trainable_parameters())
    for step in range(steps):
        apply_gradient(BaseModel(module, frozenset(), AS_IS), optimizer, gradient_at(module, step), 9.0, 1e-2, max_norm)
    return module


def trained_by_mlx(name: str, steps: int = 6) -> tuple[nn.Module, Any]:
    """All parameters at once, the gradient scaled to the same length."""
    module, optimizer, decay = Trunk(40), of_mlx(name, decay_of(name)), 5.0 / (9.0 + 1e-6)
    optimizer.init(module.trainable_parameters())
    for step in range(steps):
        optimizer.learning_rate = 1e-2
        optimizer.update(module, tree_map(lambda part: part * decay, gradient_at(module, step)))
    return module, optimizer.state


def decay_of(name: str) -> float:
    return 0.0 if name == "adam" else 0.1


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_block_by_block_gives_the_bits_of_all_at_once(name: str, streams: int) -> None:
    mine = BlockOptimizer(of_mlx(name, decay_of(name)), streams=streams)
    module = trained(mine)
    expected, state = trained_by_mlx(name)
    assert (flat(module.trainable_parameters()) == flat(expected.trainable_parameters())).all()
    assert (flat(mine.state) == flat(state)).all()


def test_compiled_it_differs_by_rounding_alone() -> None:
    """A GPU's way: multiply and add may become one operation, so the last bit may differ."""
    module = trained(BlockOptimizer(of_mlx("adamw", 0.1), compiled=True))
    expected = trained_by_mlx("adamw")[0]
    found, wanted = flat(module.trainable_parameters()), flat(expected.trainable_parameters())
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


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
    apply_gradient(BaseModel(module, frozenset(), AS_IS), optimizer, gradient, 9.0, 1e-2, 5.0)
    more = mx.get_peak_memory() - before
    assert more <= 5.0 * size / BLOCKS + MIB / 4, (more / MIB, size / MIB)


def test_a_state_in_16_bits_is_right_on_average_where_rounding_to_nearest_stands_still() -> None:
    """A second moment that should fall to a half over 693 updates: each takes off less than half a unit of bfloat16."""
    wanted, kept, nearest = 0.999**693, mx.full((64, 64), 1.0, mx.bfloat16), mx.array(1.0, mx.bfloat16)
    for step in range(693):
        kept = rounded(kept.astype(mx.float32) * 0.999, mx.array(step, mx.uint32), mx.array(5))
        nearest = (nearest.astype(mx.float32) * 0.999).astype(mx.bfloat16)
    assert nearest.item() == 1.0
    found = np.array(kept.astype(mx.float32))
    assert found.mean() == pytest.approx(wanted, rel=2e-3)
    assert found.std() < 0.1 * wanted


def test_rounding_keeps_what_16_bits_can_hold_and_lies_beside_the_rest() -> None:
    values = mx.random.normal((1000,)).astype(mx.bfloat16)
    step, number = mx.array(3, mx.uint32), mx.array(0)
    assert mx.array_equal(rounded(values.astype(mx.float32), step, number), values).item()
    odd = mx.random.normal((100_000,))
    found = rounded(odd, step, number).astype(mx.float32)
    assert np.abs(np.array(found - odd) / np.array(odd)).max() < 2**-7
    assert abs(np.array((found - odd) / mx.abs(odd)).mean()) < 1e-5  # 16 bits' own error is 2e-3
    assert not mx.array_equal(found, rounded(odd, mx.array(4, mx.uint32), number)).item()


def test_streams_round_a_state_in_16_bits_as_one_does() -> None:
    one, three = (BlockOptimizer(of_mlx("adam", 0.0), state_bits=16, streams=streams) for streams in (1, 3))
    found, expected = (flat(trained(each, steps=3).trainable_parameters()) for each in (three, one))
    assert (found == expected).all()


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in NAMES), ("adam", True)])
def test_a_state_in_16_bits_takes_half_and_moves_the_weights_nearly_alike(name: str, compiled: bool) -> None:
    narrow = BlockOptimizer(of_mlx(name, decay_of(name)), state_bits=16, compiled=compiled)
    module = trained(narrow, steps=12)
    kept = [value for key, value in tree_flatten(narrow.state) if key not in ("step", "learning_rate")]
    assert {value.dtype for value in kept} == {mx.bfloat16}
    start = flat(Trunk(40).trainable_parameters())
    found, wanted = (flat(each.trainable_parameters()) - start for each in (module, trained_by_mlx(name, 12)[0]))
    assert np.linalg.norm(found - wanted) < 0.03 * np.linalg.norm(wanted)
