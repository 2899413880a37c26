"""How long an update takes and what several ranks bring, by arithmetic that can be checked by hand."""

import json
from pathlib import Path

import pytest

from safetrain.core.model.files import read_model_plan
from safetrain.plan.speed import (
    MESSAGE_BYTES,
    Link,
    SharedUpdate,
    Speed,
    exchange_seconds,
    flops_per_token,
    multiplied_weights,
    shared_update,
    update_seconds,
    wire_bytes,
)
from tests.core.test_model_shapes import BIG

NO_COST = Link(gbps=1e9, latency_seconds=0)


def test_a_gradient_is_counted_in_the_messages_that_it_is_sent_in() -> None:
    from safetrain.engine import ranks

    assert ranks.MESSAGE_BYTES == MESSAGE_BYTES


def test_traffic_is_that_of_a_ring_and_a_second_on_the_wire_is_a_second() -> None:
    assert [wire_bytes(1000, ranks) for ranks in (1, 2, 4, 100)] == [0, 1000, 1500, 1980]
    assert exchange_seconds(125_000_000, 2, Link(1, 0)) == pytest.approx(1.0)  # 1 Gbit over 1 Gbit/s
    assert exchange_seconds(0, 4, Link(1, 0.001)) == pytest.approx(0.006)  # 2 (N - 1) steps
    assert exchange_seconds(MESSAGE_BYTES + 1, 4, Link(1e12, 0.001)) == pytest.approx(0.012)  # two messages


def test_the_largest_share_decides_and_more_ranks_than_rows_bring_nothing() -> None:
    update = SharedUpdate(16.0, 0, 0, 16)
    assert [update_seconds(update, ranks, NO_COST) for ranks in (1, 2, 5, 8, 9, 15, 16, 40)] == [
        16, 8, 4, 2, 2, 2, 1, 1,
    ]  # fmt: skip
    assert update_seconds(SharedUpdate(2.0, 0.5, 10**9, 16), 1, Link(1)) == 2.5


def test_a_measured_time_is_kept_and_a_modelled_one_is_operations_by_speed() -> None:
    measured = shared_update(Speed(None, "", 3.0, 8), 0, 10**6, "cpu", 16)
    assert measured is not None
    assert measured.compute_seconds + measured.fixed_seconds == pytest.approx(3.0)
    assert measured.rows == 8
    modelled = shared_update(Speed(10, ""), 5e12, 10**6, "metal", 16)
    assert modelled is not None
    assert modelled.compute_seconds == pytest.approx(0.5)
    assert shared_update(Speed(None, ""), 5e12, 10**6, "metal", 16) is None


def test_operations_are_six_for_a_trained_weight_and_four_for_a_frozen_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BIG["Llama-3.1-8B"][0]))
    model = read_model_plan(path)
    weights = multiplied_weights(model)
    assert weights / model.parameters == pytest.approx(1 - 128256 * 4096 / 8_030_261_248, rel=1e-3)  # its own head
    whole, adapter = flops_per_token(model, 1, weights), flops_per_token(model, 1, 0)
    assert whole == pytest.approx(6 * weights, rel=1e-3)
    assert adapter == pytest.approx(4 * weights, rel=1e-3)
    long = flops_per_token(model, 8192, weights)
    assert long - whole == pytest.approx(6 * 32 * 4096 * 8191)
    assert flops_per_token(model, 1, weights, recompute=True) == pytest.approx(8 * weights, rel=1e-3)
