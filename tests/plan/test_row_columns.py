"""What is found among numbers on the disk is what would be found in memory, and takes hardly any."""

import errno
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from safetrain.core.errors import DiskFullError
from safetrain.plan import row_columns
from safetrain.plan.row_columns import RowColumns, ascending, first_alike, first_among, named_when_full, quantile
from tests.conftest import chat
from tests.plan.test_dataset import validate
from tests.support.made_texts import Maker

Write = Callable[..., Path]


def test_columns_are_read_as_they_were_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(row_columns, "CHUNK", 3)
    with RowColumns(tmp_path, small="u4", large="u8") as columns:
        for start in range(0, 10, 2):
            columns.add(small=[start, start + 1], large=np.array([start, 2**64 - 1], dtype=np.uint64))
        assert [small.tolist() for (small,) in columns.chunks("small")] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        assert columns.column("large").tolist()[-2:] == [8, 2**64 - 1]
        assert (len(columns), columns.one("small", 7)) == (10, 7)
    assert not list(tmp_path.iterdir())


@given(some.lists(some.integers(0, 2**64 - 1) | some.integers(0, 5).map(lambda n: n << 60), max_size=60))
@settings(deadline=None, database=None, max_examples=60)
def test_the_first_row_with_the_same_key(keys: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_columns, "SORTED", 7)
        found = first_alike(len(keys), lambda: np.array_split(np.array(keys, dtype=np.uint64), 5))
    assert found.tolist() == [keys.index(key) for key in keys]


@given(some.lists(some.tuples(some.integers(0, 3), some.booleans()), min_size=1, max_size=30))
@settings(deadline=None, database=None, max_examples=60)
def test_the_first_of_some_rows_with_the_same_key(rows: list[tuple[int, bool]]) -> None:
    keys, among = np.array([key for key, _ in rows], dtype=np.uint64), np.array([there for _, there in rows])
    found = first_among(lambda: np.array_split(keys, 4), np.arange(len(rows)), among)
    assert found == [next((place for place, row in enumerate(rows) if row == (key, True)), None) for key, _ in rows]


@pytest.mark.parametrize("different", [3, 2**40])
def test_memory_does_not_grow_with_rows(monkeypatch: pytest.MonkeyPatch, different: int) -> None:
    monkeypatch.setattr(row_columns, "SORTED", 2**14)

    def keys(count: int) -> Iterator[np.ndarray]:
        chance = np.random.default_rng(1)
        return (chance.integers(0, different, 2**13, dtype=np.uint64) << np.uint64(24) for _ in range(count // 2**13))

    def peak(count: int) -> int:
        tracemalloc.start()
        try:
            found = first_alike(count, lambda: keys(count))
            return tracemalloc.get_traced_memory()[1] - found.nbytes
        finally:
            tracemalloc.stop()

    assert peak(2**19) < 1.3 * peak(2**16)


def test_a_full_disk_is_told_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match=f"where: *{tmp_path}"), named_when_full(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


@given(some.lists(some.integers(0, 40), min_size=1, max_size=50))
@settings(deadline=None, database=None, max_examples=60)
def test_quantiles_are_numpys(numbers: list[int]) -> None:
    values, ends = ascending(Counter(numbers))
    assert quantile(values, ends, 0.5) == np.median(numbers)
    assert quantile(values, ends, 0.95) == np.quantile(numbers, 0.95)


def test_a_validation_says_and_writes_the_same_however_much_it_reads_at_a_time(
    write_jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = Maker(6)
    rows: list[object] = [maker.row() for _ in range(60)]
    rows += [*rows[:5], *(chat(f"question {number % 7}", f"answer {number}") for number in range(30))]
    path = write_jsonl("a.jsonl", rows)
    whole = validate(path, tmp_path / "whole")
    monkeypatch.setattr(row_columns, "CHUNK", 4)
    monkeypatch.setattr(row_columns, "SORTED", 9)
    assert validate(path, tmp_path / "parts") == whole
    assert {"REPEATED-ROWS", "ANSWERS-DIFFER"} <= {finding.id for finding in whole.findings}
    for file in (tmp_path / "whole" / "validated").iterdir():
        assert (tmp_path / "parts" / "validated" / file.name).read_bytes() == file.read_bytes()
