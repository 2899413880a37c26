"""After running out of memory the same update is made with less memory at a time, in order, and remembered."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from safetrain.core.records.settings import Rung, TrainSettings, identity_of, memory_shape
from safetrain.core.storage.files import write_record
from safetrain.core.storage.paths import LADDER
from safetrain.guard.ladder import MOST_RUNGS, Ladder, next_settings, read_ladder
from tests.support.settings import SETTINGS

LIMIT = 8 * 2**30
SIZES = (1, 2, 3, 4, 6, 7, 8, 9, 12, 15)


def settings(batch_size: int = 4, length: int = 512) -> TrainSettings:
    return dataclasses.replace(SETTINGS, batch_size=batch_size, gradient_accumulation=2, max_seq_length=length)


def rungs(start: TrainSettings, *, quantized: bool) -> Iterator[TrainSettings]:
    """Every rung below ``start``."""
    now = next_settings(start, quantized=quantized)
    while now is not None:
        yield now
        now = next_settings(now, quantized=quantized)


def shape(s: TrainSettings) -> tuple[int, int, bool, bool, bool, int]:
    ways = s.gradient_checkpointing, s.dequantize_base, s.stream_base
    return s.batch_size, s.gradient_accumulation, *ways, s.max_seq_length


def test_the_rungs_come_in_order_down_to_the_bottom() -> None:
    assert [shape(s) for s in rungs(settings(), quantized=True)] == [
        (2, 4, False, True, False, 512),
        (1, 8, False, True, False, 512),
        (1, 8, True, True, False, 512),
        (1, 8, True, False, False, 512),
        (1, 8, True, False, True, 512),
    ]


@pytest.mark.parametrize(
    ("size", "windows"),
    [(6, ["3 x 4", "1 x 12"]), (7, ["1 x 14"]), (9, ["3 x 6", "1 x 18"]), (12, ["6 x 4", "3 x 8", "1 x 24"])],
)
def test_an_odd_micro_batch_is_divided_by_its_smallest_factor(size: int, windows: list[str]) -> None:
    found = [memory_shape(s).window for s in rungs(settings(size), quantized=False)]
    assert found[: len(windows)] == windows
    assert set(found[len(windows) :]) == {windows[-1]}


@pytest.mark.parametrize("quantized", [True, False])
def test_no_rung_changes_what_is_computed(quantized: bool) -> None:
    """Neither the rows of an update nor anything else that tells one run from another; each rung is a new one."""
    for start in map(settings, SIZES):
        found = list(rungs(start, quantized=quantized))
        assert {s.rows_per_update for s in found} == {start.rows_per_update}
        assert {identity_of(s) for s in found} == {identity_of(start)}
        assert len({memory_shape(s) for s in [start, *found]}) == len(found) + 1 <= MOST_RUNGS + 1
        assert (found[-1].batch_size, found[-1].gradient_checkpointing) == (1, True)


def test_while_loading_only_the_base_itself_can_take_less() -> None:
    start = settings(8)
    quantized = next_settings(start, quantized=True, loading=True)
    assert quantized == dataclasses.replace(start, dequantize_base=False)
    on_disk = dataclasses.replace(quantized, stream_base=True)
    assert next_settings(quantized, quantized=True, loading=True) == on_disk
    assert next_settings(start, quantized=False, loading=True) == on_disk
    assert next_settings(on_disk, quantized=True, loading=True) is None
    assert next_settings(dataclasses.replace(start, method="full"), quantized=False, loading=True) is None


def written(output: Path) -> Ladder:
    first = memory_shape(settings())
    tried = next_settings(settings(), quantized=True)
    assert tried is not None
    ladder = Ladder(first, LIMIT, memory_shape(tried), (Rung(first, 7, "killed by the system: out of memory"),))
    write_record(output / LADDER, ladder)
    return ladder


def test_a_ladder_is_remembered_for_the_same_settings_and_no_more_memory(tmp_path: Path) -> None:
    ladder = written(tmp_path)
    assert read_ladder(tmp_path, settings(), LIMIT) == read_ladder(tmp_path, settings(), LIMIT // 2) == ladder
    others = ((settings(), LIMIT + 1), (settings(2), LIMIT), (settings(length=256), LIMIT))
    assert [read_ladder(tmp_path, *other) for other in others] == [None, None, None]
    assert read_ladder(tmp_path / "elsewhere", settings(), LIMIT) is None
    content = (tmp_path / LADDER).read_bytes()
    for kept in (0, len(content) // 2, len(content) - 3):
        (tmp_path / LADDER).write_bytes(content[:kept])
        assert read_ladder(tmp_path, settings(), LIMIT) is None
