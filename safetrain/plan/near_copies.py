"""Finds texts that are nearly the same: all whose runs of five words overlap by a given share, and no sample.

Two sets that are similar by Jaccard's measure share one of their first few members, whatever the order of members is:
with a similarity of 0.8 one of the first fifth. With the rarest first, texts are looked up by these alone, and every
pair that meets is compared in full. Unlike MinHash this misses none. Runs that very many share are not looked up: what
resembles by these alone is found by ``families``. Memory is at most 200 MiB, 20 bytes a text (70 for one of a family)
and 80 for each pair: the runs themselves lie on the disk.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.words import Words, shingles
from safetrain.plan.near_families import Classes, Families
from safetrain.plan.row_columns import RowColumns, read_at

BLOCK = 2**18  # runs that are held at a time
LOOKED_UP = 2**22  # places of runs that are looked up at a time
SORTED = 2**19  # of them, those that are sorted at a time, about
COUNTER_BITS = 24
MOST_CANDIDATES = 10_000_000  # pairs that are compared; beyond it the farthest in the file are left out, and it is said
AT_ONCE = 2**20  # candidates that are gathered before they are compared
COMPARED = 2**16  # of them, those that are compared at a time


@dataclass(frozen=True)
class NearPairs:
    """Pairs of rows (pairs, 2), the earlier first. ``complete``: all were compared."""

    pairs: np.ndarray
    complete: bool


class ShingleFile(contextlib.AbstractContextManager["ShingleFile"]):
    """The runs of five words of each text, on the disk in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._counts = RowColumns(folder, runs="u4")

    def __exit__(self, *_ended: object) -> None:
        self.file.close()
        self._counts.__exit__()

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, words: Words) -> None:
        """The next texts."""
        values, bounds = shingles(words)
        self.file.write(values.astype("<u4").tobytes())
        self._counts.add(runs=np.diff(bounds))

    def add_set(self, runs: np.ndarray) -> None:
        """One more text, by its runs."""
        values = np.unique(runs.astype("<u4"))
        self.file.write(values.tobytes())
        self._counts.add(runs=[len(values)])

    def bounds(self) -> np.ndarray:
        """(texts + 1,) where the runs of each begin."""
        self.file.flush()
        found, start = np.zeros(len(self) + 1, dtype=np.int64), 0
        for (counts,) in self._counts.chunks("runs"):
            found[start + 1 : start + len(counts) + 1] = found[start] + np.cumsum(counts, dtype=np.int64)
            start += len(counts)
        return found


def find(texts: ShingleFile, chosen: np.ndarray, similarity: float, sides: np.ndarray | None = None) -> NearPairs:
    """The pairs among ``chosen`` (rows,), ascending, of which ``similarity`` of all their runs are in both.

    Runs that more than a thousandth of the texts share (at least 50; of fewer than 200 texts a quarter, at least 10)
    are not looked up. Of texts that resemble by these alone not all pairs are given, but so many that what would be
    connected is, and that each has a partner on each of ``sides`` (rows,) on which it has any.
    """
    count = len(chosen)
    limit = max(10, min(50, count // 4), count // 1000)
    with _Join(texts, chosen, similarity, limit) as join, ShingleFile(texts.folder) as kinds:
        classes = join.look_up()
        for number, first in enumerate(classes.firsts.tolist()):
            kinds.add_set(np.concatenate([join.frequent_runs(first), classes.rare_runs(number)]))
        codes, complete = join.pairs(), join.complete
        if len(classes.numbers):
            with _Join(kinds, np.arange(len(kinds)), similarity, len(kinds)) as between:
                between.look_up()
                near, complete = _both(between.pairs()), complete and between.complete
            of_sides = np.zeros(count, dtype=np.uint8) if sides is None else sides[chosen]
            codes = np.unique(np.concatenate([codes, classes.pairs(near, similarity, of_sides)]))
    both = _both(codes)
    return NearPairs(chosen[both] if len(both) else both, complete)


def _both(codes: np.ndarray) -> np.ndarray:
    return np.stack([codes >> np.uint64(32), codes & np.uint64(2**32 - 1)], axis=1).astype(np.int64)


def clusters(count: int, pairs: np.ndarray) -> np.ndarray:
    """(count,) the smallest number that each of ``count`` things is connected to by ``pairs`` (pairs, 2)."""
    found = np.arange(count, dtype=np.uint32)
    numbers, places = np.unique(pairs, return_inverse=True)
    places, label = places.reshape(-1, 2), np.arange(len(numbers))
    while len(places):
        first, second = label[places[:, 0]], label[places[:, 1]]
        apart = first != second
        if not apart.any():
            break
        low, high = np.minimum(first, second)[apart], np.maximum(first, second)[apart]
        np.minimum.at(label, high, low)
        while not np.array_equal(label, label[label]):
            label = label[label]
    found[numbers] = numbers[label]
    return found


class _Join(contextlib.AbstractContextManager["_Join"]):
    """One search. Texts are numbered by their place in ``chosen``."""

    def __init__(self, texts: ShingleFile, chosen: np.ndarray, similarity: float, limit: int) -> None:
        self.complete = True
        self._descriptor, self._bounds = texts.file.fileno(), texts.bounds()
        self._chosen, self._similarity, self._limit = chosen, similarity, limit
        self._places, self._total = tempfile.TemporaryFile(dir=texts.folder), 0  # noqa: SIM115
        pieces = [chosen[start : start + BLOCK] for start in range(0, len(chosen), BLOCK)]
        runs = sum(int((self._bounds[rows + 1] - self._bounds[rows]).sum()) for rows in pieces)
        self._slots = np.uint32((1 << min(COUNTER_BITS, max(10, (4 * runs).bit_length()))) - 1)
        most = np.iinfo(np.uint16 if limit < 2**16 - 1 else np.uint32)  # beyond the limit all counts are one
        self._frequency = np.zeros(int(self._slots) + 1, dtype=most.dtype)
        self._left_to_compare = MOST_CANDIDATES
        for values, _, _ in self._blocks():
            slots, counts = np.unique(values & self._slots, return_counts=True)
            self._frequency[slots] = np.minimum(self._frequency[slots] + counts, most.max)

    def __exit__(self, *_ended: object) -> None:
        self._places.close()

    def pairs(self) -> np.ndarray:
        """Codes of the pairs that are near copies, ascending. After that nothing more is known of frequent runs."""
        self._frequency = self._frequency[:0].copy()
        found = list(self._meetings(self._places.fileno(), self._total))
        return np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *found]))

    def frequent_runs(self, number: int) -> np.ndarray:
        """Those of a text that are not looked up."""
        values = self._runs_of(number)
        return values[self._often(values) > self._limit]

    def look_up(self) -> Classes:
        """Write (run, text) for the first runs of each text, the rarest being first; what is left for ``families``."""
        families = Families()
        for values, of_text, numbers in self._blocks():
            often = self._often(values)
            sizes = np.bincount(of_text, minlength=len(numbers))
            first = np.where(sizes > 0, sizes - np.ceil(self._similarity * sizes - 1e-9) + 1, 0)
            families.add(values, of_text, numbers, often > self._limit, first)
            order = np.lexsort((often, of_text))  # stable: of equally rare ones the smaller number
            rank = np.arange(len(values)) - (np.cumsum(sizes) - sizes)[of_text]
            order = order[(rank < first[of_text]) & (often[order] <= self._limit)]
            codes = (values[order].astype(np.uint64) << np.uint64(32)) | numbers[of_text[order]].astype(np.uint64)
            self._places.write(codes.astype("<u8").tobytes())
            self._total += len(codes)
        self._places.flush()
        return families.classes()

    def _meetings(self, places: int, total: int) -> Iterator[np.ndarray]:
        """Codes of the pairs that are near copies, some of them twice."""
        parts = max(1, -(-total // LOOKED_UP))
        for part in range(parts):
            gathered, size = [np.zeros(0, dtype=np.uint64)], 0
            budget = self._left_to_compare // (parts - part)
            for codes in self._candidates(_partition(places, total, part, parts)):
                gathered, size = [*gathered, codes], size + len(codes)
                if size > AT_ONCE:
                    found = np.unique(np.concatenate(gathered))
                    self._left_to_compare, budget = self._left_to_compare - len(found), budget - len(found)
                    yield self._compared(found)
                    gathered, size = [np.zeros(0, dtype=np.uint64)], 0
                    if budget <= 0:
                        self.complete = False
                        break
            found = np.unique(np.concatenate(gathered))
            self._left_to_compare -= len(found)
            yield self._compared(found)

    def _candidates(self, places: np.ndarray) -> Iterator[np.ndarray]:
        """Pairs that share a run: first those that stand next to each other in its list, then the next but one, …"""
        texts, runs = places.view("<u4").reshape(-1, 2).T
        at, distance = np.arange(len(places), dtype=np.uint32), 1
        while len(at):
            at = at[: np.searchsorted(at, np.uint32(max(0, len(places) - distance)))]
            pieces = [at[start : start + BLOCK] for start in range(0, len(at), BLOCK)]
            at = np.concatenate([at[:0], *(some[runs[some] == runs[some + distance]] for some in pieces)])
            for start in range(0, len(at), AT_ONCE):
                some = at[start : start + AT_ONCE]
                first, second = texts[some], texts[some + distance]
                sizes = self._raw_sizes(first), self._raw_sizes(second)
                alike = np.minimum(*sizes) >= self._similarity * np.maximum(*sizes) - 1e-9
                yield (first[alike].astype(np.uint64) << np.uint64(32)) | second[alike]
            distance += 1

    def _compared(self, codes: np.ndarray) -> np.ndarray:
        """Those of the candidates that are near copies."""
        kept = [codes[:0]]
        for few in range(0, len(codes), COMPARED):
            some, start = codes[few : few + COMPARED], 0
            first, second = (some >> np.uint64(32)).astype(np.int64), (some & np.uint64(2**32 - 1)).astype(np.int64)
            ends = np.cumsum(self._raw_sizes(first) + self._raw_sizes(second))
            while start < len(some):
                before = int(ends[start - 1]) if start else 0
                stop = max(start + 1, int(np.searchsorted(ends, before + BLOCK, "right")))
                part = slice(start, stop)
                kept.append(some[part][self._are_near(first[part], second[part])])
                start = stop
        return np.concatenate(kept)

    def _are_near(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        numbers, place = np.unique(np.concatenate([first, second]), return_inverse=True)
        sets = [self._runs_of(number) for number in numbers.tolist()]
        values, sizes = np.concatenate(sets), np.array([len(each) for each in sets])
        starts = np.cumsum(sizes) - sizes
        lengths = sizes[place]
        pair = np.repeat(np.tile(np.arange(len(first)), 2), lengths)
        inside = np.arange(len(pair)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        keys = (pair.astype(np.uint64) << np.uint64(32)) | values[np.repeat(starts[place], lengths) + inside]
        keys.sort()
        twice = keys[1:][keys[1:] == keys[:-1]] >> np.uint64(32)
        common = np.bincount(twice.astype(np.int64), minlength=len(first))
        together = lengths[: len(first)] + lengths[len(first) :]
        return common * (1 + self._similarity) >= self._similarity * together - 1e-9

    def _runs_of(self, number: int) -> np.ndarray:
        row = self._chosen[number]
        begin, end = int(self._bounds[row]), int(self._bounds[row + 1])
        return np.frombuffer(os.pread(self._descriptor, 4 * (end - begin), 4 * begin), dtype="<u4")

    def _often(self, values: np.ndarray) -> np.ndarray:
        return self._frequency[values & self._slots]

    def _raw_sizes(self, numbers: np.ndarray) -> np.ndarray:
        rows = self._chosen[numbers]
        return self._bounds[rows + 1] - self._bounds[rows]

    def _blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Runs, the place in ``numbers`` of the text of each, and ``numbers``: the chosen texts of the block."""
        bounds, start = self._bounds, 0
        while start < len(self._chosen):
            low = int(self._chosen[start])
            limit = int(np.searchsorted(bounds, bounds[low] + BLOCK, "right")) - 1
            stop = max(start + 1, int(np.searchsorted(self._chosen, self._chosen.dtype.type(limit))))
            rows = self._chosen[start:stop]
            begin, end = int(bounds[low]), int(bounds[rows[-1] + 1])
            values = np.frombuffer(read_at(self._descriptor, 4 * (end - begin), 4 * begin), dtype="<u4")
            sizes = bounds[rows + 1] - bounds[rows]
            of_text = np.repeat(np.arange(len(rows)), sizes)
            inside = np.arange(len(of_text)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            yield values[np.repeat(bounds[rows] - begin, sizes) + inside], of_text, np.arange(start, stop)
            start = stop


def _partition(places: int, total: int, part: int, parts: int) -> np.ndarray:
    """The places of one part of all runs, sorted by run, without those of runs that one text alone has."""
    kept, pieces = [np.zeros(0, dtype="<u8")], max(1, total // parts // SORTED)
    for piece in range(pieces):  # a piece of all runs after the other: the least, the next
        found = [np.zeros(0, dtype="<u8")]
        for start in range(0, total, BLOCK):
            size = min(BLOCK, total - start)
            codes = np.frombuffer(read_at(places, 8 * size, 8 * start), dtype="<u8")
            runs = codes >> np.uint64(32)
            mine = (runs % np.uint64(parts) == part) & ((runs * np.uint64(pieces)) >> np.uint64(32) == piece)
            found.append(codes[mine])
        codes = np.sort(np.concatenate(found))
        again = np.zeros(len(codes) + 1, dtype=np.bool_)  # has it the run of the one before?
        again[1:-1] = codes[1:] >> np.uint64(32) == codes[:-1] >> np.uint64(32)
        kept.append(codes[again[1:] | again[:-1]])
    return np.concatenate(kept)
