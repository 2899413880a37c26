"""Which documents of a corpus go to train, valid and test: runs of neighbours, chosen with a fixed seed."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from safetrain.core.errors import DataError

SEED = 20  # of the choice: the same files give the same splits
MOST_TOKENS = 2_000_000  # of valid and of test: a pass over more tells no more
BLOCKS, RUNS = 1024, 64  # the corpus is cut into blocks, of which so many give a run


@dataclass(frozen=True)
class DocumentRun:
    """Documents of a file that stand one after the other."""

    file: int
    first: int
    stop: int


def all_of(ends: Sequence[np.ndarray], files: Sequence[int]) -> tuple[DocumentRun, ...]:
    """All documents of these files; ``ends`` of every file."""
    return tuple(DocumentRun(file, 0, len(ends[file])) for file in files if len(ends[file]))


def split_runs(
    ends: Sequence[np.ndarray], files: Sequence[int], shares: Mapping[str, float]
) -> dict[str, tuple[DocumentRun, ...]]:
    """Divide the documents of these ``files``: a run out of many places to each of ``shares``, the rest to train.

    A split gets about its share of all tokens, at most 2 million, and at most a third of the places; a document is
    never cut. Raises DataError where there are too few documents.
    """
    counts = np.array([len(ends[file]) for file in files], dtype=np.int64)
    borders = np.concatenate([[0], np.cumsum(counts)])  # of the files, counted in documents
    lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(ends[file], prepend=0) for file in files)])
    before = np.concatenate([[0], np.cumsum(lengths)])  # tokens before each document, and all
    if np.count_nonzero(lengths) <= len(shares):
        raise DataError("Too few documents to split.", expected=f"at least {len(shares) + 1}", got=str(len(lengths)))
    blocks = _blocks(before, min(BLOCKS, len(lengths)))
    if len(blocks) <= len(shares):
        blocks = [(int(number), int(number) + 1) for number in np.flatnonzero(lengths)]
    order = np.random.default_rng(SEED).permutation(len(blocks)).tolist()
    taken = dict[str, list[tuple[int, int]]]()
    for place, (name, share) in enumerate(shares.items()):
        own = [blocks[number] for number in order[place :: len(shares) + 1]]
        taken[name] = _chosen(before, own, min(share * float(before[-1]), MOST_TOKENS))
    kept = list[tuple[int, int]]()
    last = 0
    for first, stop in sorted(itertools.chain(*taken.values())):
        kept.append((last, first))
        last = stop
    taken["train"] = [*kept, (last, len(lengths))]
    return {name: tuple(_by_file(runs, borders, files)) for name, runs in taken.items()}


def _blocks(before: np.ndarray, most: int) -> list[tuple[int, int]]:
    """The documents as blocks of about equal tokens, each beginning with one that is not empty."""
    wanted = np.linspace(0, before[-1], most + 1)
    edges = np.unique(np.searchsorted(before, np.floor(wanted), side="right") - 1)
    return [(int(first), int(stop)) for first, stop in itertools.pairwise(edges) if before[stop] > before[first]]


def _chosen(before: np.ndarray, blocks: Sequence[tuple[int, int]], wanted: float) -> list[tuple[int, int]]:
    """The first documents of some blocks, about ``wanted`` tokens of them; of one document at the least."""
    found, tokens = list[tuple[int, int]](), 0
    each = wanted / min(RUNS, len(blocks))
    for first, end in blocks:
        left = min(each, wanted - tokens)
        stop = min(end, int(np.searchsorted(before, before[first] + left, side="right")) - 1)
        if stop <= first and before[first + 1] - before[first] <= wanted - tokens:
            stop = first + 1
        if stop > first and before[stop] > before[first]:
            found.append((first, stop))
            tokens += int(before[stop] - before[first])
        if tokens >= wanted:
            break
    if not found:  # each is longer than the share: the shortest that begins a block
        first = min((first for first, _ in blocks), key=lambda first: before[first + 1] - before[first])
        found = [(first, first + 1)]
    return found


def _by_file(runs: Sequence[tuple[int, int]], borders: np.ndarray, files: Sequence[int]) -> list[DocumentRun]:
    """Runs of documents that are counted over all files, as runs in each."""
    found = []
    for first, stop in runs:
        place = int(np.searchsorted(borders, first, side="right")) - 1
        while first < stop:
            start, end = int(borders[place]), int(borders[place + 1])
            if min(stop, end) > first:
                found.append(DocumentRun(files[place], first - start, min(stop, end) - start))
            first, place = max(first, min(stop, end)), place + 1
    return found
