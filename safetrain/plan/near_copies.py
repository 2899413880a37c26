"""Finds texts that are nearly the same: all whose runs of five words overlap by a given share, and no sample.

Two sets that are similar by Jaccard's measure share one of their first few members, whatever the order of members is:
with a similarity of 0.8 one of the first fifth. With the rarest first, texts are looked up by these alone, and every
pair that meets is compared in full. Unlike MinHash this misses none. Runs that very many share are not looked up: what
resembles by these alone is found by ``families``. Memory is 64 MiB for counts, some 100 MiB while pairs are looked up,
and 24 bytes a text: the runs themselves lie on the disk.
"""

import os
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from safetrain.core.data.words import Words, shingles
from safetrain.plan.near_families import Families

BLOCK = 2**20  # runs that are held at a time
LOOKED_UP = 2**22  # places of runs that are sorted at a time
COUNTER_BITS = 24
MOST_CANDIDATES = 10_000_000  # pairs that are compared; beyond it the farthest in the file are left out, and it is said
AT_ONCE = 2**20  # candidates that are gathered before they are compared


@dataclass(frozen=True)
class NearPairs:
    """Pairs of rows (pairs, 2), the earlier first. ``complete``: all were compared."""

    pairs: np.ndarray
    complete: bool


class ShingleFile:
    """The runs of five words of each text, on the disk."""

    def __init__(self, folder: Path) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._counts = array("I")

    def __enter__(self) -> "ShingleFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, words: Words) -> None:
        """The next texts."""
        values, bounds = shingles(words)
        self.file.write(values.astype("<u4").tobytes())
        self._counts.frombytes(np.diff(bounds).astype(np.uint32).tobytes())

    def add_set(self, runs: np.ndarray) -> None:
        """One more text, by its runs."""
        values = np.unique(runs.astype("<u4"))
        self.file.write(values.tobytes())
        self._counts.append(len(values))

    def bounds(self) -> np.ndarray:
        """(texts + 1,) where the runs of each begin."""
        self.file.flush()
        return np.concatenate([[0], np.cumsum(np.array(self._counts, dtype=np.int64))])


def find(texts: ShingleFile, chosen: np.ndarray, similarity: float, sides: np.ndarray | None = None) -> NearPairs:
    """The pairs among ``chosen`` (rows,), ascending, of which ``similarity`` of all their runs are in both.

    Runs that more than a thousandth of the texts share (at least 50; of fewer than 200 texts a quarter, at least 10)
    are not looked up. Of texts that resemble by these alone not all pairs are given, but so many that what would be
    connected is, and that each has a partner on each of ``sides`` (rows,) on which it has any.
    """
    count = len(chosen)
    join = _Join(texts, chosen, similarity, max(10, min(50, count // 4), count // 1000))
    codes, complete = join.pairs(), join.complete
    classes = join.families.classes()
    if len(classes.numbers):
        with ShingleFile(Path(tempfile.gettempdir())) as file:
            for number, first in enumerate(classes.firsts.tolist()):
                file.add_set(np.concatenate([join.frequent_runs(first), classes.rare_runs(number)]))
            del join
            between = _Join(file, np.arange(len(file)), similarity, len(file))
            near, complete = _both(between.pairs()), complete and between.complete
        of_sides = np.zeros(count, dtype=np.int64) if sides is None else sides[chosen]
        codes = np.unique(np.concatenate([codes, classes.pairs(near, similarity, of_sides)]))
    both = _both(codes)
    return NearPairs(chosen[both] if len(both) else both, complete)


def _both(codes: np.ndarray) -> np.ndarray:
    return np.stack([codes >> np.uint64(32), codes & np.uint64(2**32 - 1)], axis=1).astype(np.int64)


def clusters(count: int, pairs: np.ndarray) -> np.ndarray:
    """(count,) the smallest number that each of ``count`` things is connected to by ``pairs`` (pairs, 2)."""
    label = np.arange(count)
    while len(pairs):
        first, second = label[pairs[:, 0]], label[pairs[:, 1]]
        apart = first != second
        if not apart.any():
            break
        low, high = np.minimum(first, second)[apart], np.maximum(first, second)[apart]
        np.minimum.at(label, high, low)
        while not np.array_equal(label, label[label]):
            label = label[label]
    return label


class _Join:
    """One search. Texts are numbered by their place in ``chosen``."""

    def __init__(self, texts: ShingleFile, chosen: np.ndarray, similarity: float, limit: int) -> None:
        self.complete = True
        self._descriptor, self._bounds = texts.file.fileno(), texts.bounds()
        self._chosen, self._similarity, self._limit = chosen, similarity, limit
        runs = int((self._bounds[chosen + 1] - self._bounds[chosen]).sum()) if len(chosen) else 0
        self._slots = np.uint32((1 << min(COUNTER_BITS, max(10, (4 * runs).bit_length()))) - 1)
        self._frequency = np.zeros(int(self._slots) + 1, dtype=np.uint32)
        self._left_to_compare = MOST_CANDIDATES
        for values, _, _ in self._blocks():
            np.add.at(self._frequency, values & self._slots, np.uint32(1))
        self._sizes = np.zeros(len(chosen), dtype=np.uint32)
        self.families = Families()

    def pairs(self) -> np.ndarray:
        """Codes of the pairs that are near copies, ascending."""
        with tempfile.TemporaryFile() as places:
            total = self._look_up_places(places.write)
            places.flush()
            found = list(self._meetings(places.fileno(), total))
        return np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *found]))

    def frequent_runs(self, number: int) -> np.ndarray:
        """Those of a text that were not looked up."""
        values = self._runs_of(number)
        return values[self._often(values) > self._limit]

    def _look_up_places(self, write: Callable[[bytes], int]) -> int:
        """Write (run, text) for the first runs of each text, the rarest being first; how many."""
        total = 0
        for values, of_text, numbers in self._blocks():
            often = self._often(values)
            sizes = np.bincount(of_text, minlength=len(numbers))
            self._sizes[numbers] = sizes
            first = np.where(sizes > 0, sizes - np.ceil(self._similarity * sizes - 1e-9) + 1, 0)
            self.families.add(values, of_text, numbers, often > self._limit, first)
            order = np.lexsort((often, of_text))  # stable: of equally rare ones the smaller number
            rank = np.arange(len(values)) - (np.cumsum(sizes) - sizes)[of_text]
            order = order[(rank < first[of_text]) & (often[order] <= self._limit)]
            codes = (values[order].astype(np.uint64) << np.uint64(32)) | numbers[of_text[order]].astype(np.uint64)
            write(codes.astype("<u8").tobytes())
            total += len(codes)
        return total

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
        runs, texts = places >> np.uint64(32), places & np.uint64(2**32 - 1)
        at, distance = np.arange(len(places)), 1
        while True:
            at = at[at + distance < len(places)]
            at = at[runs[at] == runs[at + distance]]
            if not len(at):
                return
            for start in range(0, len(at), AT_ONCE):
                some = at[start : start + AT_ONCE]
                first, second = texts[some], texts[some + distance]
                sizes = self._sizes[first.astype(np.int64)], self._sizes[second.astype(np.int64)]
                alike = np.minimum(*sizes) >= self._similarity * np.maximum(*sizes) - 1e-9
                yield (first[alike] << np.uint64(32)) | second[alike]
            distance += 1

    def _compared(self, codes: np.ndarray) -> np.ndarray:
        """Those of the candidates that are near copies."""
        if not len(codes):
            return codes
        first, second = (codes >> np.uint64(32)).astype(np.int64), (codes & np.uint64(2**32 - 1)).astype(np.int64)
        ends = np.cumsum(self._raw_sizes(first) + self._raw_sizes(second))
        kept, start = [], 0
        while start < len(codes):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + BLOCK, "right")))
            part = slice(start, stop)
            kept.append(codes[part][self._are_near(first[part], second[part])])
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
            stop = max(start + 1, int(np.searchsorted(self._chosen, limit)))
            rows = self._chosen[start:stop]
            begin, end = int(bounds[low]), int(bounds[rows[-1] + 1])
            values = np.frombuffer(_read(self._descriptor, 4 * (end - begin), 4 * begin), dtype="<u4")
            sizes = bounds[rows + 1] - bounds[rows]
            of_text = np.repeat(np.arange(len(rows)), sizes)
            inside = np.arange(len(of_text)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            yield values[np.repeat(bounds[rows] - begin, sizes) + inside], of_text, np.arange(start, stop)
            start = stop


def _partition(places: int, total: int, part: int, parts: int) -> np.ndarray:
    """The places of one part of all runs, sorted by run."""
    kept = []
    for start in range(0, total, BLOCK):
        size = min(BLOCK, total - start)
        codes = np.frombuffer(_read(places, 8 * size, 8 * start), dtype="<u8")
        if parts > 1:
            codes = codes[(codes >> np.uint64(32)) % np.uint64(parts) == part]
        kept.append(codes)
    found = np.concatenate([np.zeros(0, dtype=np.uint64), *kept])
    found.sort()
    return found


def _read(descriptor: int, size: int, offset: int) -> bytes:
    """All of it: one call gives at most 2 GiB."""
    pieces = []
    while size:
        piece = os.pread(descriptor, min(size, 2**30), offset)
        if not piece:
            raise EOFError(f"{size} bytes are missing at {offset}")
        pieces.append(piece)
        size, offset = size - len(piece), offset + len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
