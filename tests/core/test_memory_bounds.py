"""A machine learns from running out of memory, for trainings like that one, and a broken memory of it does no harm."""

import pytest

from safetrain.core.memory.bounds import (
    MOST_BOUNDS,
    BoundKey,
    MemoryBound,
    bounds_path,
    forget_bounds,
    key_of,
    learnt_factor,
    read_bounds,
    remember_bound,
)
from safetrain.core.storage.files import write_json

pytestmark = pytest.mark.usefixtures("own_cache")

GIB = 2**30


def key(model: str = "one") -> BoundKey:
    return key_of(model, "metal", "lora", 8)


def bound(model: str = "one", predicted: int = 4 * GIB, available: int = 6 * GIB) -> MemoryBound:
    return MemoryBound(key(model), predicted, available)


def test_nothing_is_known_at_first() -> None:
    assert read_bounds() == []
    assert learnt_factor(key()) == 0.0


def test_a_failure_raises_the_factor_of_its_model_device_method_and_rank_alone() -> None:
    remember_bound(bound())
    assert learnt_factor(key()) == pytest.approx(1.5)
    others = [("two", "metal", "lora", 8), ("one", "cpu", "lora", 8), ("one", "metal", "dora", 8),
              ("one", "metal", "lora", 16)]  # fmt: skip
    assert [learnt_factor(key_of(*other)) for other in others] == [0.0] * len(others)
    assert key_of("one", "metal", "full", 8) == key_of("one", "metal", "full", 16)


def test_a_success_of_the_same_size_takes_a_failure_back() -> None:
    """A smaller one says nothing of it, nor does one of another rank."""
    remember_bound(bound())
    remember_bound(bound(predicted=8 * GIB, available=10 * GIB))
    forget_bounds(key(), 4 * GIB - 1)
    forget_bounds(key_of("one", "metal", "lora", 16), 9 * GIB)
    assert learnt_factor(key()) == pytest.approx(1.5)
    forget_bounds(key(), 4 * GIB)
    assert learnt_factor(key()) == pytest.approx(1.25)
    forget_bounds(key(), 9 * GIB)
    assert read_bounds() == []


def test_the_worst_failure_counts_whichever_came_last() -> None:
    remember_bound(bound(available=8 * GIB))
    remember_bound(bound(available=5 * GIB))
    remember_bound(bound("two", available=40 * GIB))
    assert learnt_factor(key()) == pytest.approx(2.0)
    remember_bound(bound(available=10 * GIB))
    assert learnt_factor(key()) == pytest.approx(2.5)


def test_the_same_failure_is_remembered_once_and_the_oldest_are_forgotten() -> None:
    for _ in range(3):
        remember_bound(bound())
    assert read_bounds() == [bound()]
    for number in range(MOST_BOUNDS):
        remember_bound(bound("two", available=number + 1))
    assert len(read_bounds()) == MOST_BOUNDS
    assert learnt_factor(key()) == 0.0
    assert read_bounds()[-1].available_bytes == MOST_BOUNDS


def test_a_failure_without_a_prediction_teaches_nothing() -> None:
    remember_bound(bound(predicted=0))
    assert learnt_factor(key()) == 0.0


@pytest.mark.parametrize("text", ["", "[{", "7", "null", "{}", '[{"base_model": "one"}]', '["one"]', "\xff\xfe"])
def test_a_broken_file_teaches_nothing_and_is_written_anew(text: str) -> None:
    bounds_path().write_bytes(text.encode("latin-1"))
    assert read_bounds() == []
    assert learnt_factor(key()) == 0.0
    remember_bound(bound())
    assert learnt_factor(key()) == pytest.approx(1.5)


def test_what_an_older_version_has_learnt_is_forgotten() -> None:
    """It did not say of which method and rank."""
    older = {"base_model": "one", "device": "cpu", "predicted_peak_bytes": 4 * GIB, "available_bytes": 6 * GIB}
    write_json(bounds_path(), [older])
    assert read_bounds() == []


def test_a_file_that_was_cut_off_teaches_nothing() -> None:
    remember_bound(bound())
    content = bounds_path().read_bytes()
    for kept in (0, 1, len(content) // 2, len(content) - 3):
        bounds_path().write_bytes(content[:kept])
        assert read_bounds() == []
