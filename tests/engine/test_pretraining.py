"""A model trained whole, on windows of documents: its gradient is the plain one, and a run continues exactly."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from safetrain.core.data.token_rows import TokenRows, TokenWindows, token_row
from safetrain.core.errors import DataError, InterruptedRun, ModelError
from safetrain.core.records.adapter_files import PromptFormat, adapter_method
from safetrain.core.records.run_state import RunIdentity
from safetrain.core.records.settings import TrainSettings
from safetrain.engine.adapters import adapter_weights
from safetrain.engine.batches import fill, update_of_rows
from safetrain.engine.job import Job
from safetrain.engine.model import open_base
from safetrain.engine.optimizer import mlx_optimizer
from safetrain.engine.update import Gradients, prepare
from safetrain.engine.weight_files import apply_adapter
from tests.engine.exact import LAYOUTS, STILL
from tests.engine.test_training import require_same_run, run
from tests.support.jobs import job_of, with_rows
from tests.support.random_models import TINY, build_model

END = 0
PRETRAIN = dataclasses.replace(
    STILL, method="pretrain", optimizer="adamw", weight_decay=0.1, max_seq_length=24, learning_rate=3e-3,
    num_epochs=1, eval_steps=8, save_steps=8,
)  # fmt: skip


def documents(count: int, seed: int) -> TokenRows:
    """Short sentences over few tokens, so that there is something to learn; each closed by the end token."""
    source = np.random.default_rng(seed)
    sizes = source.integers(1, 60, count).tolist()
    return TokenRows.of([token_row([*source.integers(40, 60, n).tolist(), END], [True] * (n + 1)) for n in sizes])


def job_in(folder: Path, base: Path, settings: TrainSettings = PRETRAIN) -> Job:
    identity = RunIdentity("base", "train", "valid", json.dumps(dataclasses.asdict(settings), sort_keys=True))
    train, valid = (TokenWindows(documents(*of), settings.max_seq_length, frozenset({END})) for of in ((24, 1), (6, 2)))
    job = job_of(folder, base, train, valid.some(1000), settings, identity)
    return with_rows(job, prompt_format=PromptFormat((END,), ""))


def plain_gradient(module: Any, pieces: TokenRows) -> tuple[float, dict[str, np.ndarray]]:
    """Of the mean loss, document by document through mlx-lm's own model, by mlx's own differentiation."""
    labels = int(pieces.label_counts.sum())

    def mean_loss(parameters: Any) -> mx.array:
        module.update(parameters)
        total = mx.array(0.0)
        for row in pieces:
            ids = mx.array(row.ids.astype(np.int32))
            total = total + nn.losses.cross_entropy(module(ids[None, :-1])[0], ids[1:], reduction="sum")
        return total / labels

    loss, gradient = mx.value_and_grad(mean_loss)(module.trainable_parameters())
    return float(loss) * labels, {name: np.array(value) for name, value in tree_flatten(gradient)}


@pytest.mark.parametrize(("name", "tied", "recomputed"), [
    ("one list", True, False), ("two lists at a time", False, True), ("rectangles of 640 tokens", True, False),
    ("lists of 100 tokens", False, False),
])  # fmt: skip
def test_the_gradient_is_that_of_the_plain_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tied: bool, recomputed: bool
) -> None:
    """Also where the logits are made in several chunks."""
    monkeypatch.setattr("safetrain.engine.loss.chunk_tokens", lambda *_sizes: 7)
    base = build_model(tmp_path / "base", **{**TINY, "tie_word_embeddings": tied})
    found = job_in(tmp_path, base).rows.train.of_update([0, 3, 5, 2])
    model, gradients = prepare(base, dataclasses.replace(PRETRAIN, gradient_checkpointing=recomputed))
    layout = LAYOUTS[name]
    loss, gradient = gradients.of(update_of_rows(found.data, list(fill(found.data, found.rows, layout)), layout), 0)
    expected_loss, expected = plain_gradient(open_trainable(base), found.data)
    got = {key: np.array(value) for key, value in tree_flatten(gradient)}
    assert got.keys() == expected.keys() == adapter_weights(model).keys()
    assert any("embed_tokens" in key for key in got)
    assert float(np.array(loss)) == pytest.approx(expected_loss, rel=1e-5)
    for key, value in expected.items():
        assert np.linalg.norm(got[key] - value) < 2e-5 * np.linalg.norm(value), key


def open_trainable(base: Path) -> Any:
    """mlx-lm's model alone."""
    from mlx_lm.utils import load_model

    module = load_model(base)[0]
    module.unfreeze()
    module.train()
    return module


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_interrupted_run_continues_bit_for_bit_and_learns(tmp_path: Path, optimizer: str) -> None:
    base = build_model(tmp_path / "base", **TINY)
    settings = dataclasses.replace(PRETRAIN, optimizer=optimizer)
    result = run(job_in(tmp_path / "a", base, settings))
    before = result.state.records[0].valid_loss
    assert before is not None
    assert result.metrics.best_valid_loss < before - 0.5
    with pytest.raises(InterruptedRun):
        run(job_in(tmp_path / "b", base, settings), stop_at=6)
    resumed = run(job_in(tmp_path / "b", base, settings))
    assert resumed.state.resumed_from_step == 6
    require_same_run(tmp_path / "b", tmp_path / "a")
    require_opens_as_the_whole_model(base, tmp_path / "a" / "adapters", tmp_path)


def require_opens_as_the_whole_model(base: Path, adapters: Path, folder: Path) -> None:
    assert adapter_method(adapters) == "pretrain"
    plain, opened = open_base(base, dequantize=False), open_base(base, dequantize=False)
    apply_adapter(opened, adapters)
    before, after = (dict(tree_flatten(each.module.parameters())) for each in (plain, opened))
    assert all(not mx.array_equal(before[name], after[name]).item() for name in before)
    other = build_model(folder / "other", **{**TINY, "num_hidden_layers": 3})
    with pytest.raises(ModelError, match="does not fit this model"):
        apply_adapter(open_base(other, dequantize=False), adapters)


def test_windows_without_a_label_change_nothing_and_end_no_run(tmp_path: Path) -> None:
    """A row may have an untrained part, such as a prompt, that is longer than several windows."""
    base = build_model(tmp_path / "base", **TINY)
    job = job_in(tmp_path / "a", base, dataclasses.replace(PRETRAIN, batch_size=1, gradient_accumulation=1))
    hidden = token_row([*range(40, 60)] * 8, [False] * 160)
    shown = [token_row([*range(40, 60), END], [True] * 21) for _ in range(12)]
    train = TokenWindows(TokenRows.of([*shown[:6], hidden, *shown[6:]]), 24, frozenset({END}))
    labels = [int(train.pieces([window]).label_counts.sum()) for window in range(len(train))]
    assert labels.count(0) > 3
    result = run(with_rows(job, train=train))
    assert (result.metrics.steps, result.state.labels) == (len(train), sum(labels))
    nothing = dataclasses.replace(with_rows(job, valid=TokenRows.of([hidden])), output=tmp_path / "c")
    with pytest.raises(DataError, match="is a label"):
        run(nothing)


def test_norms_are_not_decayed_and_muon_takes_the_matrices_of_blocks() -> None:
    weight, norm = mx.ones((4, 8)), mx.ones((8,))
    parameters = {"embed": {"weight": weight}, "layers": [{"proj": {"weight": weight}, "norm": {"weight": norm}}]}
    optimizer = mlx_optimizer("muon", 0.5, whole_model=True)
    optimizer.init({"model": parameters})
    block = optimizer.state["model"]["layers"][0]
    assert (set(block["proj"]["weight"]), set(block["norm"]["weight"])) == ({"v"}, {"m", "v"})
    assert set(optimizer.state["model"]["embed"]["weight"]) == {"m", "v"}
    optimizer.state["step"], optimizer.state["learning_rate"] = mx.array(1), mx.array(0.1)
    still = optimizer.apply_single(mx.zeros((8,)), norm, block["norm"]["weight"])
    np.testing.assert_allclose(np.array(still), 1.0)


def test_three_steps_of_muon_are_those_of_its_definition() -> None:
    """Momentum of Nesterov, five steps of Newton and Schulz (kellerjordan.github.io/posts/muon), weight decay."""
    source = np.random.default_rng(5)
    gradients, weight, momentum = source.normal(size=(3, 16, 48)), source.normal(size=(16, 48)), np.zeros((16, 48))
    tree = {"layers": [{"weight": mx.array(weight.astype(np.float32))}]}
    optimizer = mlx_optimizer("muon", 0.1, whole_model=True)
    optimizer.init(tree)
    kept, found = optimizer.state["layers"][0]["weight"], tree["layers"][0]["weight"]
    for step, gradient in enumerate(gradients, 1):
        optimizer.state["step"], optimizer.state["learning_rate"] = mx.array(step), mx.array(0.02)
        found = optimizer.apply_single(mx.array(gradient.astype(np.float32)), found, kept)
        momentum = 0.95 * momentum + 0.05 * gradient
        ahead = 0.05 * gradient + 0.95 * momentum
        x = ahead / np.linalg.norm(ahead)
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        weight = weight * (1 - 0.02 * 0.1) - 0.02 * 0.2 * 48**0.5 * x
        np.testing.assert_allclose(np.array(found), weight, atol=1e-5)


def test_weights_stay_float32_where_a_pass_is_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; here without compiling, which takes a CPU seconds."""
    monkeypatch.setattr("safetrain.engine.backend.name_now", lambda: "cuda")
    base = build_model(tmp_path / "base", **TINY)
    found = job_in(tmp_path, base).rows.train.of_update([0, 1])
    model, _ = prepare(base, dataclasses.replace(PRETRAIN, compute_dtype="bfloat16"))
    layout = LAYOUTS["one padded rectangle"]
    (shard,) = update_of_rows(found.data, [found.rows], layout).micro_batches[0].shards
    key = mx.random.key(0)
    made = [Gradients(model, 0, whole_model=dtype).of_shard(shard, key)[1] for dtype in (mx.float32, mx.bfloat16)]
    for (name, a), (_, b) in zip(*(tree_flatten(each) for each in made), strict=True):
        assert b.dtype == mx.float32, name
        assert 0 < float(mx.linalg.norm(a - b)) < 0.1 * float(mx.linalg.norm(a)), name
    assert {value.dtype for value in adapter_weights(model).values()} == {mx.float32}
