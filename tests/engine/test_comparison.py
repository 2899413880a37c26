"""As many questions as there is time for, the same of both models, and memory for their answers."""

from collections.abc import Sequence

import pytest

from safetrain.core.model.files import read_model_files
from safetrain.engine.comparison import in_random_order, in_time, tokens_to_hold
from tests.conftest import EMBEDDED


class Answerer:
    """Takes so many seconds a question, on a clock of its own."""

    def __init__(self, seconds: float, start: float = 0.0) -> None:
        self.now, self.parts = 100.0, list[int]()
        self._seconds, self._start = seconds, start

    def clock(self) -> float:
        return self.now

    def __call__(self, part: Sequence[int], done: int) -> dict[int, list[int]]:
        assert done == sum(self.parts)
        self.parts.append(len(part))
        self.now += self._start + self._seconds * len(part)
        return {number: [number] for number in part}


def test_all_questions_are_answered_where_there_is_time() -> None:
    ask, order = Answerer(0.01), in_random_order(220)
    found = in_time(ask, order, 8, 15.0, ask.clock)
    assert list(found) == order
    assert sorted(order) == list(range(220))
    assert len(ask.parts) < 8  # growing: many questions share a pass through the weights


@pytest.mark.parametrize("seconds", [30.0, 100.0, 1000.0])
@pytest.mark.parametrize("start", [0.0, 10.0])
def test_no_more_time_is_taken_than_there_is(seconds: float, start: float) -> None:
    ask, order = Answerer(1.0, start), in_random_order(10_000)
    found = in_time(ask, order, 8, seconds, ask.clock)
    assert list(found) == order[: len(found)]
    assert ask.now - 100.0 <= seconds
    assert len(found) >= (seconds - start * len(ask.parts)) / 3


def test_some_are_answered_however_long_it_takes() -> None:
    ask = Answerer(1000.0)
    assert len(in_time(ask, in_random_order(50), 8, 30.0, ask.clock)) == 8


def test_a_longer_sample_holds_a_shorter_one() -> None:
    assert in_random_order(500) == in_random_order(500)
    assert in_random_order(500) != sorted(in_random_order(500))


def test_more_tokens_are_held_in_more_room_and_one_in_none() -> None:
    files = read_model_files(EMBEDDED)
    assert tokens_to_hold(files, 48, 0) == tokens_to_hold(files, 48, -1) == 1
    few, many = (tokens_to_hold(files, 48, room) for room in (2**24, 2**26))
    assert many == pytest.approx(4 * few, rel=0.01)
    assert few > 100
