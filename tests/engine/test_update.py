"""The numbers are right: loss, gradients and updates against references that share no code with the engine."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.data.training_rows import Cursor, advance, largest_update
from safetrain.core.memory.estimate import largest_micro_batch
from safetrain.core.memory.terms import widths_of
from safetrain.core.records.settings import updates_per_epoch
from safetrain.engine.batches import BatchLayout, in_order, make_shard, training_layout, update_at
from safetrain.engine.cpu.kernels import cross_entropy
from safetrain.engine.layers import Randomness, key_of
from safetrain.engine.loss import ShardLoss
from safetrain.engine.model import BaseModel
from safetrain.engine.optimizer import BlockOptimizer, apply_gradient, learning_rate, mlx_optimizer
from safetrain.engine.update import Gradients, measure
from safetrain.engine.upstream.adaptation import call_packed
from tests.conftest import cpu_only
from tests.engine.exact import (
    LAYOUTS,
    LORA,
    ON_GPU,
    ONE_LIST,
    SETTINGS,
    STILL,
    distance,
    flat,
    loss_and_gradient,
    prepared,
    rows_of,
    update_of,
    within,
)
from tests.engine.numpy_llama import NumpyLlama
from tests.support.random_models import build_model

Build = Callable[..., Path]
UNEQUAL = rows_of(3, 140, 6, 33, 4, 61, 5, 300, 33, 34)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are made for so few labels at a time that most updates take several."""
    monkeypatch.setattr("safetrain.engine.loss.chunk_tokens", lambda *_sizes: 50)


def test_loss_and_gradient_are_those_of_a_numpy_llama(tiny_model: Build) -> None:
    """Every part at once, in float64: rotation, grouped heads, norms, SwiGLU, LoRA, cross-entropy, tied head."""
    folder = tiny_model()
    model, gradients = prepared(folder)
    assert model.packs_rows is not ON_GPU
    data = rows_of(5, 40, 17)
    reference = NumpyLlama(folder, LORA.scale)
    lora = {
        name: np.array(w).astype(np.float64) for name, w in tree_flatten(model.module.trainable_parameters())
    }  # fmt: skip

    def mean_loss(weights: dict[str, np.ndarray]) -> float:
        return sum(reference.loss(row.ids.tolist(), row.trained.tolist(), weights) for row in data) / labels

    labels = sum(row.labels for row in data)
    update = update_of(data, ONE_LIST)
    loss, gradient = gradients.of(update, 0)
    assert float(np.array(loss)) / labels == pytest.approx(mean_loss(lora), rel=within(1e-6))
    source = np.random.default_rng(1)
    for name, part in tree_flatten(gradient):
        direction = source.standard_normal(lora[name].shape)
        step = 1e-5
        ahead, behind = ({**lora, name: lora[name] + sign * step * direction} for sign in (1, -1))
        expected = (mean_loss(ahead) - mean_loss(behind)) / (2 * step)
        found = float((np.array(part).astype(np.float64) * direction).sum())
        size = float(np.linalg.norm(np.array(part)) * np.linalg.norm(direction)) / direction.size**0.5
        assert abs(found - expected) <= within(1e-4) * max(size, abs(expected)), name


@pytest.mark.parametrize("bits", [None, 4])
def test_every_way_to_lay_out_an_update_gives_one_gradient(tiny_model: Build, bits: int | None) -> None:
    """Micro-batches, parts, packing, padding, very unequal lengths: a mean of means is wrong by tens of percent."""
    model, gradients = prepared(tiny_model(bits=bits))
    found = {name: loss_and_gradient(model, gradients, UNEQUAL, layout) for name, layout in LAYOUTS.items()}
    for name, (loss, gradient) in found.items():
        assert loss == pytest.approx(found["rectangles"][0], rel=within(1e-6)), name
        assert distance(gradient, found["rectangles"][1]) <= within(1e-5), name
    model.module.eval()  # measuring gives the loss of training
    shards = [shard for batch in update_of(UNEQUAL, ONE_LIST).micro_batches for shard in batch.shards]
    measured = sum(float(np.array(ShardLoss(model).by_label(shard).sum())) for shard in shards)
    assert measured == pytest.approx(found["one list"][0], rel=within(1e-6))


@pytest.mark.parametrize("layout", ["one list", "one padded rectangle"])
def test_packed_rows_have_the_losses_they_have_alone(tiny_model: Build, layout: str) -> None:
    """Label by label: nothing of one row is seen by another, and positions start anew."""
    model, _ = prepared(tiny_model())
    model.module.eval()
    rows = sorted(range(len(UNEQUAL)), key=lambda row: -len(UNEQUAL[row]))
    part = make_shard(UNEQUAL, rows, LAYOUTS[layout])
    logits = call_packed(model.module, 2, part.inputs, part.layout)[part.positions]
    quantized = np.array(cross_entropy(logits, part.targets))[np.array(part.weights) > 0]
    alone = []
    for row in part.rows:
        ids = mx.array([UNEQUAL[row].ids.tolist()])
        chosen = [place for place in range(1, ids.shape[1]) if UNEQUAL[row].trained[place]]
        mine = nn.losses.cross_entropy(model.module(ids)[0, :-1], ids[0, 1:])
        alone += [float(np.array(mine[place - 1])) for place in chosen]
    assert len(quantized) == len(alone)
    np.testing.assert_allclose(quantized, alone, rtol=within(1e-5), atol=within(1e-5))


@pytest.mark.parametrize(("method", "dropout"), [("lora", 0.3), ("dora", 0.3), ("full", 0.0)])
def test_recomputed_blocks_give_the_same_gradient(tiny_model: Build, method: str, dropout: float) -> None:
    """With dropout too: a block that is computed twice draws the same numbers twice."""
    base = dataclasses.replace(STILL, method=method, lora=dataclasses.replace(LORA, dropout=dropout))
    folder = tiny_model()
    plain = loss_and_gradient(*prepared(folder, base), UNEQUAL)
    recomputed = loss_and_gradient(*prepared(folder, dataclasses.replace(base, gradient_checkpointing=True)), UNEQUAL)
    assert recomputed[0] == pytest.approx(plain[0], rel=within(1e-6))
    assert distance(recomputed[1], plain[1]) <= within(1e-5)


def test_recomputed_blocks_take_less_memory(tmp_path: Path) -> None:
    """Also while two streams run side by side, where mlx walks the graph in breadth."""
    changes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 12, "intermediate_size": 192, "head_dim": 32}
    folder = build_model(tmp_path / "deep", num_attention_heads=2, num_key_value_heads=2, **changes)
    lora, data, peaks = dataclasses.replace(LORA, num_layers=12), rows_of(*[200] * 8), []
    for recompute in (False, True):
        settings = dataclasses.replace(STILL, lora=lora, gradient_checkpointing=recompute)
        _, gradients = prepared(folder, settings)
        update = update_of(data, LAYOUTS["two lists at a time"])
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(gradients.of(update, 0))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < 0.4 * peaks[0]


@pytest.mark.usefixtures("compiling")
def test_compiled_rectangles_give_the_same_gradient_and_one_program_a_shape(tiny_model: Build) -> None:
    """What a GPU runs: rectangles, compiled; with dropout, whose keys are inputs."""
    model, _ = prepared(tiny_model(), SETTINGS)
    plain, compiled = Gradients(model, 1), Gradients(model, 1)
    compiled.compiles = True
    shapes = set()
    for step, data in enumerate(map(UNEQUAL.take, (range(5), range(3, len(UNEQUAL)), range(5)))):
        for batch in update_of(data, LAYOUTS["rectangles of 640 tokens"]).micro_batches:
            (part,) = batch.shards
            shapes.add(part.layout.blocks)
            key = key_of(1, step, part.rows[0])
            one, other = (each.of_shard(part, key) for each in (plain, compiled))
            assert float(np.array(one[0])) == pytest.approx(float(np.array(other[0])), rel=within(1e-6))
            assert distance(flat(other[1]), flat(one[1])) <= within(1e-5)
    assert set(compiled.programs) == shapes
    assert len(shapes) < 8


@pytest.mark.parametrize(
    ("method", "bits"), [*(("lora", bits) for bits in (2, 3, 4, 5, 6, 8)), ("dora", 3), ("dora", 4)]
)
def test_a_quantized_base_gives_what_the_dequantized_one_gives(tiny_model: Build, method: str, bits: int) -> None:
    """Dequantized at each use: in every number of bits, the tied head included, nothing is multiplied quantized."""
    folder = tiny_model(bits=bits)
    settings = dataclasses.replace(STILL, method=method)
    dequantized = loss_and_gradient(*prepared(folder, settings), UNEQUAL)
    quantized = loss_and_gradient(*prepared(folder, dataclasses.replace(settings, dequantize_base=False)), UNEQUAL)
    assert quantized[0] == pytest.approx(dequantized[0], rel=within(1e-5))
    assert distance(quantized[1], dequantized[1]) <= within(1e-4)  # scales and biases are rounded once more


def test_dora_is_that_of_mlx_lm(tiny_model: Build) -> None:
    from mlx_lm.tuner.dora import DoRALinear

    from safetrain.engine.adapters import DoraLinear

    mx.random.seed(1)
    linear = nn.Linear(24, 40)
    ours, theirs = DoraLinear(linear, LORA, Randomness()), DoRALinear.from_base(linear, r=4, scale=2.0)
    lora_b, lengths = mx.random.normal((4, 40)), ours.m * 1.5
    for layer in (ours, theirs):
        layer.update({"lora_a": ours.lora_a, "lora_b": lora_b, "m": lengths})
    x = mx.random.normal((7, 24))
    np.testing.assert_allclose(np.array(ours(x)), np.array(theirs(x)), rtol=within(1e-5), atol=within(1e-5))
    for layer in (ours, theirs):
        layer.freeze()
        layer.unfreeze(keys=["lora_a", "lora_b", "m"], recurse=False)
    found, expected = (
        nn.value_and_grad(layer, lambda x, layer=layer: mx.square(layer(x)).sum())(x)[1] for layer in (ours, theirs)
    )
    assert distance(flat(found), flat(expected)) <= within(1e-5)


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_updates_are_those_of_a_textbook_loop(tiny_model: Build, name: str) -> None:
    """Eight updates over mlx-lm's own layers, padded rows, plain cross-entropy, mlx's clipping."""
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    folder = tiny_model()
    model, gradients = prepared(folder)
    theirs: Any = load_model(folder)[0]
    theirs.freeze()
    linear_to_lora_layers(theirs, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    theirs.load_weights(tree_flatten(model.module.trainable_parameters()), strict=False)
    start = flat(model.module.trainable_parameters())

    def textbook_loss(module: Any, ids: mx.array, weights: mx.array) -> mx.array:
        losses = nn.losses.cross_entropy(module(ids[:, :-1]), ids[:, 1:]) * weights[:, 1:]
        return losses.sum() / weights[:, 1:].sum()

    mine, other = BlockOptimizer(mlx_optimizer(name, 0.0)), mlx_optimizer(name, 0.0)
    mine.init(model.module.trainable_parameters())
    for step in range(8):
        data, rate = UNEQUAL.take(range(step, step + 3)), learning_rate(step, 1e-3, 2, 8)
        loss, gradient = gradients.of(update_of(data, ONE_LIST), step)
        apply_gradient(model, mine, gradient, measure(loss, gradient)[1], rate, 0.1)
        width = max(len(row.ids) for row in data)
        ids = mx.array([[*row.ids.tolist(), *[0] * (width - len(row.ids))] for row in data])
        weights = mx.array([[*map(float, row.trained.tolist()), *[0.0] * (width - len(row.ids))] for row in data])
        _, textbook = nn.value_and_grad(theirs, textbook_loss)(theirs, ids, weights)
        other.learning_rate = rate
        other.update(theirs, optim.clip_grad_norm(textbook, 0.1)[0])
    assert measure(loss, gradient)[1] > 0.1, "clipped, which shows in plain descent"
    moved, expected = (flat(module.trainable_parameters()) - start for module in (model.module, theirs))
    assert distance(moved, expected) <= 1e-3
    assert np.linalg.norm(expected) > 0


def test_dropout_differs_by_step_and_part_and_repeats_by_position(tiny_model: Build) -> None:
    settings = dataclasses.replace(STILL, lora=dataclasses.replace(LORA, dropout=0.5))
    _, gradients = prepared(tiny_model(), settings)
    update = update_of(UNEQUAL, ONE_LIST)
    losses = [float(np.array(gradients.of(update, step)[0])) for step in (1, 2, 1)]
    assert losses[0] == losses[2] != losses[1]


LENGTHS = (9, 33, 34, 2, 65, 12, 40)
DATA = TokenRows.of([token_row(range(5, 5 + n), [False] + [True] * (n - 1)) for n in LENGTHS])


def epoch_of(seed: int, epoch: int, most_tokens: int, rows_per_update: int) -> list[tuple[int, ...]]:
    windows = updates_per_epoch(len(DATA), rows_per_update)
    layout = BatchLayout(most_tokens)
    updates = [update_at(DATA, Cursor(epoch, w), seed, rows_per_update, layout) for w in range(windows)]
    return [tuple(row for batch in update.micro_batches for row in batch.rows) for update in updates]


def test_every_row_is_seen_once_and_the_last_window_is_smaller() -> None:
    windows = epoch_of(seed=1, epoch=0, most_tokens=70, rows_per_update=3)
    assert [len(window) for window in windows] == [3, 3, 1]
    assert sorted(row for window in windows for row in window) == list(range(7))

    layout = BatchLayout(128, rectangles=True)
    assert sorted(row for batch in in_order(DATA, layout) for row in batch.rows) == list(range(7)), "in evaluation too"
    assert epoch_of(1, 0, 1, 4) == epoch_of(1, 0, 64, 4) == epoch_of(1, 0, 1000, 4)


def test_a_gpu_computes_a_long_tail_in_few_shapes_with_little_padding() -> None:
    """Each shape is a program that mlx compiles and keeps for ever; one epoch of a realistic data set."""
    source = np.random.default_rng(3)
    lengths = np.clip(np.exp(source.normal(np.log(120), 0.8, 800)), 8, 1024).astype(int).tolist()
    data = TokenRows.of([token_row([7] * n, [False] * (n // 2) + [True] * (n - n // 2)) for n in lengths])
    layout = BatchLayout(4 * int(widths_of(data.inputs().max())), rectangles=True)
    shapes, tokens, real, cursor = set(), 0, 0, Cursor(0, 0)
    for _ in range(updates_per_epoch(len(data), 16)):
        update = update_at(data, cursor, 1, 16, layout)
        parts = [shard for batch in update.micro_batches for shard in batch.shards]
        shapes |= {(shard.layout.blocks, shard.targets.size) for shard in parts}
        assert max(shard.inputs.size for shard in parts) <= layout.most_tokens
        tokens, real = tokens + update.computed_tokens, real + update.input_tokens
        cursor = advance(cursor, len(data), 16)
    assert len({block for block, _ in shapes}) <= 60
    assert len(shapes) <= 100
    assert 1 - real / tokens < 0.2
    widths = widths_of(np.array([1, 32, 33, 512, 513, 640, 1025, 4097])).tolist()
    assert widths == [32, 32, 64, 512, 576, 640, 1152, 4608], "multiples of 32, and of more for long rows"


@pytest.mark.parametrize("rectangles", [False, True])
@pytest.mark.parametrize("tokens", [33, 700, 1025, 1100, 2049])
def test_the_estimate_has_the_micro_batches_of_the_engine(rectangles: bool, tokens: int) -> None:
    """Longest rows on a CPU, which packs them, and on a GPU, which pads them by up to an eighth."""
    data = TokenRows.of([token_row([7] * (tokens + 1), [True] * (tokens + 1))] * 6)
    model: Any = SimpleNamespace(packs_rows=not rectangles, blocks=None)
    layout = training_layout(model, 3, data)
    largest = largest_update(data, data, 6, 1, None, rectangles=rectangles)
    shape = largest_micro_batch(largest, 3, 6, rectangles=rectangles)
    assert shape.tokens == layout.most_tokens
    parts = [shard for batch in update_at(data, Cursor(0, 0), 1, 6, layout).micro_batches for shard in batch.shards]
    assert max(shard.inputs.size for shard in parts) <= shape.tokens
    assert not rectangles or {shard.layout.blocks[0].width for shard in parts} == {shape.longest}


@pytest.mark.parametrize("length", [120, 300])
def test_where_a_micro_batch_costs_as_much_as_many_tokens_a_step_has_few(length: int) -> None:
    """Rows of a usual spread around ``length``, 16 a step: by the padding that a dry run measured."""
    lengths = np.clip(np.exp(np.random.default_rng(3).normal(np.log(length), 0.8, 800)), 8, 1024).astype(int).tolist()
    data, found = TokenRows.of([token_row([7] * n, [True] * n) for n in lengths]), list[float]()
    for padding in (128, 512, 2048):
        layout = BatchLayout(16 * int(widths_of(data.inputs().max())), rectangles=True, padding_tokens=padding)
        updates = [update_at(data, Cursor(0, number), 1, 16, layout) for number in range(50)]
        found.append(sum(len(update.micro_batches) for update in updates) / 50)
        assert all(
            shard.inputs.size <= layout.most_tokens for u in updates for b in u.micro_batches for shard in b.shards
        )
    assert found[0] > 1.3 * found[1] > 1.3 * 1.3 * found[2], found


DECAYS = {"adam": 0.0, "adamw": 0.1, "muon": 0.1}
BLOCKS, MIB = 8, 2**20
AS_IS = "no model", None


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


@pytest.mark.usefixtures("compiling")
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

    mine, theirs, expected = (
        BlockOptimizer(mlx_optimizer(name, DECAYS[name])),
        mlx_optimizer(name, DECAYS[name]),
        Trunk(40),
    )
    theirs.init(expected.trainable_parameters())
    for step in range(6):
        theirs.learning_rate = 1e-2
        scaled = tree_map(lambda part: part * (5.0 / (9.0 + 1e-6)), gradient_at(expected, step))
        theirs.update(expected, scaled)
    assert (trained(mine) == flat(expected.trainable_parameters())).all()
    assert (flat(mine.state) == flat(theirs.state)).all()
    if name == "adamw":
        compiled = trained(BlockOptimizer(mlx_optimizer(name, 0.1), compiled=True))
        np.testing.assert_allclose(
            compiled, flat(expected.trainable_parameters()), rtol=within(1e-5), atol=within(1e-6)
        )


@cpu_only
def test_new_values_stand_beside_old_ones_for_one_block_only() -> None:
    """Twice the blocks' own size would be all new moments and weights; a fraction is one block's."""
    module, optimizer = Trunk(2**14), BlockOptimizer(mlx_optimizer("adam", 0.0))
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
