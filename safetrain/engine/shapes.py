"""The few shapes that a run on a GPU computes in: mlx compiles a program for each and keeps it for ever.

A shape is a width, a number of rows and a number of labels, each out of a small set, so that a run meets a few dozen of
them however many rows it has. They follow from the lengths of the rows alone, not from the order of training.
"""

from collections.abc import Sequence

import numpy as np

from safetrain.core.memory.terms import WIDTH_STEP

MOST_WIDTHS = 16
MOST_LONGER = 1.125  # times as wide, for a faster kernel: within the margin of the memory estimate
MOST_CANDIDATES = 256  # widths that are considered
LABEL_STEP = 64  # a list of labels is padded to a multiple of this
LABEL_SHARES = 4  # and in planned rectangles to so many sizes


def plan_widths(lengths: np.ndarray, most: int = MOST_WIDTHS, long_step: int = WIDTH_STEP) -> tuple[int, ...]:
    """At most ``most`` widths, ascending, that hold rows of these lengths with the least padding.

    Multiples of WIDTH_STEP; beyond ``long_step`` of that, where it is little more. Exact, by dynamic programming over
    the distinct widths.
    """
    rounded = padded_to(lengths, WIDTH_STEP)
    longer = padded_to(lengths, long_step)
    rounded = np.where((rounded > long_step) & (longer <= MOST_LONGER * rounded), longer, rounded)
    coarse = WIDTH_STEP * -(-int(rounded.max()) // (WIDTH_STEP * MOST_CANDIDATES))
    sizes, counts = np.unique(padded_to(rounded, max(coarse, WIDTH_STEP)), return_counts=True)
    sums, before = np.concatenate([[0], np.cumsum(counts)]), np.concatenate([[0], np.cumsum(counts * sizes)])
    best = np.full(len(sizes) + 1, np.inf)
    chosen: list[tuple[int, ...]] = [()] * (len(sizes) + 1)
    best[0] = 0.0
    for _ in range(min(most, len(sizes))):
        new, picked = best.copy(), list(chosen)
        for stop in range(1, len(sizes) + 1):
            size = sizes[stop - 1]
            cost = best[:stop] + size * (sums[stop] - sums[:stop]) - (before[stop] - before[:stop])
            start = int(cost.argmin())
            if cost[start] < new[stop]:
                new[stop], picked[stop] = cost[start], (*chosen[start], int(size))
        best, chosen = new, picked
    return chosen[-1]


def widths_of(lengths: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """What each row is padded to: the next of the planned widths, or the next multiple of WIDTH_STEP."""
    if not len(widths):
        return padded_to(lengths, WIDTH_STEP)
    places = np.searchsorted(widths, lengths)
    beyond = places == len(widths)
    return np.where(beyond, padded_to(lengths, WIDTH_STEP), np.asarray(widths)[np.where(beyond, 0, places)])


def whole_rows(rows: int, most: int) -> int:
    """So many of ``rows`` that rectangles come with few numbers of rows: ``most`` of them, or a power of two."""
    return most if rows >= most else 2 ** (rows.bit_length() - 1)


def padded_labels(labels: int, tokens: int) -> int:
    """Room for ``labels`` of a rectangle's tokens: a quarter of these, a half, three or all."""
    share = -(-tokens // (LABEL_SHARES * LABEL_STEP)) * LABEL_STEP
    return max(share, -(-labels // share) * share)


def padded_to(lengths: np.ndarray | int, step: int) -> np.ndarray:
    """Rounded up to multiples."""
    return -(-np.asarray(lengths, dtype=np.int64) // step) * step
