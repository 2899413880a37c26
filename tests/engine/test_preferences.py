"""DPO and ORPO on pairs of answers: the published numbers, one gradient however it is computed, and nothing lost."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.data.training_rows import Cursor, TrainingRows, row_order
from safetrain.core.errors import ConfigError, InterruptedRun
from safetrain.core.records.settings import TrainSettings
from safetrain.core.storage.paths import REFERENCES
from safetrain.engine.batches import BatchLayout, fill, update_at, update_of_rows
from safetrain.engine.job import Job
from safetrain.engine.loss import PairLoss
from safetrain.engine.update import prepare
from safetrain.engine.weight_files import adapter_arrays
from tests.engine.exact import STILL, prepared
from tests.engine.numpy_llama import NumpyLlama
from tests.engine.test_training import final_state, job_in, require_same_run, run, same
from tests.support.jobs import with_rows
from tests.support.random_models import TINY, build_model

Build = Callable[..., Path]
DPO = dataclasses.replace(STILL, method="dpo", dequantize_base=False, batch_size=4, gradient_accumulation=1)
ORPO = dataclasses.replace(DPO, method="orpo")
WHOLE = BatchLayout(10**6, rows_per_pair=2)


def pairs_of(count: int, seed: int = 1) -> TokenRows:
    """Random pairs: a prompt, and two answers that are trained."""
    source, rows = np.random.default_rng(seed), []
    for _ in range(count):
        prompt = source.integers(5, 500, int(source.integers(5, 40))).tolist()
        for _ in range(2):
            answer = source.integers(5, 500, int(source.integers(2, 12))).tolist()
            rows.append(token_row([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
    data = TokenRows.of(rows)
    return TokenRows(data.ids, data.trained, data.starts, data.lengths, data.label_counts, rows_per_pair=2)


def gradient_of(
    folder: Path, settings: TrainSettings, data: TokenRows, layout: BatchLayout, *, trained: bool = True
) -> tuple[float, np.ndarray]:
    """The mean loss of all pairs as one update, and its gradient as a vector."""
    _, gradients = (prepared if trained else prepare)(folder, settings)
    rows = data.of_update(np.arange(len(data))).rows
    update = update_of_rows(data, list(fill(data, rows, layout)), layout)
    loss, gradient = gradients.of(update, 0)
    vector = np.concatenate([np.array(part).ravel() for _, part in tree_flatten(gradient)])
    return float(np.array(loss)) / update.labels, vector


def test_the_losses_are_the_published_numbers() -> None:
    """Values of torchtune's tests/torchtune/rlhf/loss/test_dpo_loss.py."""
    sums, references = np.array([-0.5, -0.1, -10, -30, -1, -21]), np.array([-0.5, -0.1, -10.1, -20.1, -0.1, -0.1])
    given = sums, np.ones(6), references
    assert PairLoss("dpo", 0.1)(*given) == pytest.approx([0.693147, 0.313262, 0.126928], abs=1e-6)
    found = PairLoss("dpo", 0.1, mx)(*(mx.array(each.astype(np.float32)) for each in given))
    assert np.array(found) == pytest.approx([0.693147, 0.313262, 0.126928], abs=1e-6)
    swapped = [each.reshape(-1, 2)[:, ::-1].ravel() for each in given]
    assert np.array_equal(PairLoss("dpo", 0.1).margins(*swapped), -PairLoss("dpo", 0.1).margins(*given))
    p, q = math.exp(-0.5), math.exp(-0.75)  # ORPO by hand: answers of 2 and 4 tokens
    odds = math.log(p / (1 - p)) - math.log(q / (1 - q))
    expected = 0.5 + 0.1 * math.log(1 + math.exp(-odds))
    assert PairLoss("orpo", 0.1)(np.array([-1.0, -3.0]), np.array([2, 4]), np.zeros(2)) == pytest.approx([expected])


@pytest.mark.parametrize("settings", [DPO, ORPO], ids=["dpo", "orpo"])
def test_the_gradient_is_that_of_finite_differences(settings: TrainSettings, tiny_model: Build) -> None:
    """Along random directions, in float64, by a Llama in NumPy."""
    folder, data, loss = tiny_model(), pairs_of(3), PairLoss(settings.method, settings.beta)
    model, gradients = prepared(folder, settings)
    data.references = np.linspace(-50, -90, 6).astype(np.float32)
    update = update_of_rows(data, list(fill(data, data.of_update(np.arange(6)).rows, WHOLE)), WHOLE)
    found = {name: np.array(part, dtype=np.float64) for name, part in tree_flatten(gradients.of(update, 0)[1])}
    lora = {n: np.array(w, dtype=np.float64) for n, w in tree_flatten(model.module.trainable_parameters())}
    reference, source = NumpyLlama(folder, settings.lora.scale), np.random.default_rng(0)

    def mean_loss(weights: dict[str, np.ndarray]) -> float:
        sums = [-reference.loss(row.ids.tolist(), row.trained.tolist(), weights) for row in data]
        return float(np.mean(loss(np.array(sums), data.label_counts, data.references)))

    for _ in range(3):
        way = {name: source.normal(size=w.shape) for name, w in lora.items()}
        ends = [mean_loss({name: w + step * way[name] for name, w in lora.items()}) for step in (1e-6, -1e-6)]
        slope = sum(float((found[name] * way[name]).sum()) for name in lora)
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=2e-3)


def test_the_first_step_of_dpo(tiny_model: Build) -> None:
    """The reference is the model itself: ln 2 within the rounding of a row's sum, and a gradient that is not zero."""
    folder, data = tiny_model(bits=4), pairs_of(4)
    _, gradients = prepare(folder, DPO)
    update = update_of_rows(data, [[0, 1]], WHOLE)
    sums = -np.array([_row_loss(gradients, data, row) for row in range(8)], dtype=np.float32)
    data.references = sums
    loss, vector = gradient_of(folder, DPO, data, WHOLE, trained=False)
    assert loss == pytest.approx(math.log(2), abs=1e-6)
    assert np.linalg.norm(vector) > 1e-3
    assert update.pairs == 1


def _row_loss(gradients: Any, data: TokenRows, row: int) -> float:
    from safetrain.engine.evaluation import row_losses

    return float(row_losses(gradients._model, data.take([row]), 10**6)[0])


@pytest.mark.parametrize("width", [64, 192], ids=["head whole", "head on disk in slices"])
@pytest.mark.parametrize("settings", [DPO, ORPO], ids=["dpo", "orpo"])
def test_one_gradient_however_pairs_are_computed(settings: TrainSettings, width: int, tmp_path: Path) -> None:
    """Any micro-batch, two shards, on disk; any order of pairs; two ranks."""
    shape = {**TINY, "hidden_size": width, "num_attention_heads": width // 32}
    folder, data = build_model(tmp_path / "base", bits=4, **shape), pairs_of(5)
    data.references = np.linspace(-50, -90, 10).astype(np.float32)
    expected, vector = gradient_of(folder, settings, data, WHOLE)
    most = float(np.abs(vector).max())
    on_disk = dataclasses.replace(settings, stream_base=True)
    layouts = [
        BatchLayout(10**6, 2, rows_per_pair=2),
        BatchLayout(100, 2, rows_per_pair=2),
        BatchLayout(1, rows_per_pair=2),
    ]
    for layout in layouts:
        loss, found = gradient_of(folder, settings, data, layout)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert np.abs(found - vector).max() < 1e-5 * most
        same_loss, same_gradient = gradient_of(folder, on_disk, data, layout)
        assert (same_loss, same_gradient.tobytes()) == (loss, found.tobytes())
    turned = data.take(data.rows_of(np.arange(5)[::-1]))
    assert np.abs(gradient_of(folder, settings, turned, WHOLE)[1] - vector).max() < 1e-5 * most
    _, gradients = prepared(folder, settings)
    halves = [update_at(data, Cursor(0, 0), 0, 10, WHOLE, rank, 2) for rank in (0, 1)]
    parts = [tree_flatten(gradients.of(update, 0)[1]) for update in halves]
    summed = np.concatenate([np.array(one + two).ravel() for (_, one), (_, two) in zip(*parts, strict=True)])
    assert np.abs(summed - vector).max() < 1e-5 * most


def test_pairs_stay_together_in_every_order() -> None:
    order = row_order(3, 1, 10, 7, 2).reshape(-1, 2)
    assert sorted(order[:, 0].tolist()) == [0, 2, 4, 6, 8]
    assert (order[:, 1] == order[:, 0] + 1).all()
    assert order[0].tolist() == [6, 7]


def paired_job(folder: Path, base: Path, settings: TrainSettings) -> Job:
    return with_rows(job_in(folder, base, settings), train=pairs_of(9, 1), valid=pairs_of(4, 2))


def test_a_killed_run_continues_bit_for_bit(tiny_model: Build, tmp_path: Path) -> None:
    """Also if it ends after the base has read the pairs, and before the first step."""
    base = tiny_model(bits=4)
    run(paired_job(tmp_path / "whole", base, DPO))
    broken = tmp_path / "broken"
    with pytest.raises(InterruptedRun):
        run(paired_job(broken, base, DPO), stop=lambda: 2 * (broken / REFERENCES).is_file())
    kept = (broken / REFERENCES).stat().st_mtime_ns
    with pytest.raises(InterruptedRun):
        run(paired_job(broken, base, DPO), stop_at=3)
    result = run(paired_job(broken, base, DPO))
    require_same_run(broken, tmp_path / "whole")
    assert (broken / REFERENCES).stat().st_mtime_ns == kept
    first, last = result.state.records[0], result.state.records[-1]
    assert first.valid_loss == pytest.approx(math.log(2), abs=1e-6)
    assert first.valid_margin == pytest.approx(0, abs=1e-5)
    assert last.valid_accuracy is not None
    assert last.valid_margin != first.valid_margin
    assert same(final_state(broken), final_state(tmp_path / "whole"))


@pytest.mark.parametrize("batch_size", [1, 9])
def test_an_odd_batch_size_trains_whole_pairs(batch_size: int, tiny_model: Build, tmp_path: Path) -> None:
    base, ends = tiny_model(bits=4), list[dict[str, mx.array]]()
    for size, accumulation in ((batch_size, 2), (2 * batch_size, 1)):
        settings = dataclasses.replace(DPO, batch_size=size, gradient_accumulation=accumulation, max_steps=4)
        result = run(paired_job(tmp_path / f"{size}", base, settings))
        assert result.metrics.steps == min(4, settings.num_epochs * -(-18 // (2 * batch_size)))
        ends.append(adapter_arrays(tmp_path / f"{size}" / "adapters"))
    for name, weights in ends[0].items():
        assert np.allclose(np.array(weights), np.array(ends[1][name]), atol=1e-4), name


def test_the_training_loss_is_the_mean_per_pair(tiny_model: Build, tmp_path: Path) -> None:
    """Not weighted by the lengths of the answers: with a rate of almost 0 it is the base's loss of the pairs."""
    settings = dataclasses.replace(ORPO, learning_rate=1e-12, num_epochs=1, log_steps=100, eval_steps=100)
    job = paired_job(tmp_path / "a", tiny_model(bits=4), settings)
    result = run(with_rows(job, valid=job.rows.train))
    first, last = result.state.records[0], result.state.records[-1]
    assert last.train_loss == pytest.approx(first.valid_loss, rel=1e-5)


def test_training_begins_with_an_adapter_and_dpo_compares_with_it(tiny_model: Build, tmp_path: Path) -> None:
    base = tiny_model(bits=4)
    first = run(job_in(tmp_path / "first", base, STILL))
    start = str(tmp_path / "first" / "adapters")
    more = run(job_in(tmp_path / "more", base, dataclasses.replace(STILL, from_adapter=start)))
    assert more.state.records[0].valid_loss == first.state.best_valid_loss != first.state.records[0].valid_loss
    paired = run(paired_job(tmp_path / "paired", base, dataclasses.replace(DPO, from_adapter=start)))
    assert paired.state.records[0].valid_loss == pytest.approx(math.log(2), abs=1e-6)
    other = run(paired_job(tmp_path / "other", base, DPO))
    assert paired.state.records[0].chosen_logp != other.state.records[0].chosen_logp


def test_pairs_and_methods_must_match() -> None:
    pairs, rows = (TrainingRows(data, data) for data in (pairs_of(3), pairs_of(3).take(slice(None))))
    rows.train.documents.rows_per_pair = 1
    assert len(pairs.at_length(32, "dpo").train) == 6
    with pytest.raises(ConfigError, match=r"train.method=lora cannot use this data(.*\n)*.*dpo or orpo"):
        pairs.at_length(32, "lora")
    with pytest.raises(ConfigError, match="pairs of answers"):
        rows.at_length(32, "orpo")
