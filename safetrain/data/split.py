"""Which rows go to train, valid and test: by a hash of their question, the same on every machine."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from safetrain.core.data.words import mixed
from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.data.folders import SPLITS

MIN_GROUPS = 3
TRAIN, VALID, TEST = range(3)


def split_off(
    names: Sequence[str],
    files: np.ndarray,
    clusters: np.ndarray,
    digests: np.ndarray,
    shares: dict[str, float],
    path: Path,
) -> tuple[np.ndarray, str]:
    """The split of each row, as indices into SPLITS, and in words how they came to be.

    ``names`` are the splits of the files, one of several shards more than once, ``files`` (rows,) the file of each
    row, ``clusters`` (rows,) numbers of rows, equal for those that must stay together, ``digests`` (rows,) uint64 of
    the question of each row.
    A split without a file is taken out of train by its share, at most a half each. It is guaranteed that

    - rows of a file of their own stay where they are;
    - rows of one cluster stay together, with train where a given file has some of them, unless too few are left;
    - a row's split depends on the smallest digest in its cluster and on the shares, and on nothing else: rows that
      come, go or change places move no row of another cluster;
    - no split is empty. That is the one exception to the third: a split for which no row would be left gets the
      cluster nearest to its border, and the text says so.

    Raises DataError where there are too few clusters; ``path`` is the file they are in.
    """
    parts = np.array([SPLITS.index(name) for name in names], dtype=np.uint8)[files]
    missing = [name for name in shares if name not in names]
    if not missing:
        return parts, "train, valid and test as given"
    in_train = parts == TRAIN
    smallest = np.full(len(parts), np.iinfo(np.uint64).max, dtype=np.uint64)  # of each cluster, by its number
    np.minimum.at(smallest, clusters[in_train], digests[in_train])
    there = np.zeros(len(parts), dtype=np.bool_)
    there[clusters[in_train]] = True
    count = int(there.sum())
    if count < MIN_GROUPS:
        raise DataError(
            "Too few different rows to split.",
            where=str(path),
            expected=f"at least {MIN_GROUPS} rows with different questions",
            got=str(count),
            do="add rows, or name a folder with train, valid and test files; a text is divided into documents by lines "
            "of <|endoftext|>, as between chapters",
        )
    free = there.copy()  # clusters of which a given file has no row
    free[clusters[~in_train]] = False
    if free.sum() <= len(missing):
        free = there
    of_cluster = np.full(len(parts), TRAIN, dtype=np.uint8)
    places = mixed(smallest[free])  # mixed, because the smallest of many digests is small
    of_cluster[free], changed = _dealt(places, {name: shares[name] for name in missing})
    parts[in_train] = of_cluster[clusters[in_train]]
    sizes = {name: int((parts == SPLITS.index(name)).sum()) for name in missing}
    listed = " and ".join(f"{name} ({counted(size, 'row')})" for name, size in sizes.items())
    text = f"{listed} split off train by content"
    if changed:
        text += f"; {' and '.join(changed)} would have been empty and got the nearest rows, which more rows can move"
    return parts, text


def _dealt(places: np.ndarray, shares: dict[str, float]) -> tuple[np.ndarray, list[str]]:
    """(groups,) the split of each by its place (uint64), and which splits are not as their share says.

    Valid takes the lowest places and test the highest, so that neither share moves the other's rows.
    """
    count, place = len(places), places.astype(np.float64) / 2.0**64
    valid_share, test_share = shares.get("valid", 0.0), shares.get("test", 0.0)
    wanted = {"valid": int((place < valid_share).sum()), "test": int((place >= 1 - test_share).sum())}
    if "test" not in shares:
        wanted["test"] = 0
    taken = {name: max(number, 1 if name in shares else 0) for name, number in wanted.items()}
    while sum(taken.values()) >= count:  # train would be empty
        larger = max(taken, key=lambda name: taken[name])
        taken[larger] -= 1
    of_group, ordered = np.full(count, TRAIN, dtype=np.uint8), np.sort(places)  # no two are equal
    of_group[places < ordered[taken["valid"]]] = VALID
    if taken["test"]:
        of_group[places >= ordered[-taken["test"]]] = TEST
    changed = [name for name, number in wanted.items() if taken[name] > number]
    if any(taken[name] < number for name, number in wanted.items()):
        changed.append("train")
    return of_group, changed
