"""Which rows go to train, valid and test: by a hash of what they ask, the same on every machine."""

from pathlib import Path

import numpy as np

from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.plan.sources import SPLITS

MIN_ROWS = 3


def split_off(
    names: list[str], files: np.ndarray, questions: np.ndarray, shares: dict[str, float], path: Path
) -> tuple[np.ndarray, str]:
    """The split of each row, as indices into SPLITS, and in words how they came to be.

    ``names`` are the splits that have a file of their own, ``files`` (rows,) the file of each row, ``questions``
    (rows,) digests. What has no file is dealt out of train by its ``shares``: rows that ask the same stay together.
    Raises DataError where there are too few different ones; ``path`` is the file they are in.
    """
    parts = np.array([SPLITS.index(name) for name in names], dtype=np.uint8)[files]
    missing = {name: share for name, share in shares.items() if name not in names}
    if not missing:
        return parts, "train, valid and test as given"
    train = np.flatnonzero(parts == SPLITS.index("train"))
    groups, group_of_row = np.unique(questions[train], return_inverse=True)
    if len(groups) < MIN_ROWS:
        raise DataError(
            "Too few different rows to split.",
            where=str(path),
            expected=f"at least {MIN_ROWS} rows with different questions",
            got=str(len(groups)),
        )
    of_group = np.zeros(len(groups), dtype=np.uint8)
    taken = 0
    for place, (name, share) in enumerate(missing.items()):
        left = len(groups) - taken
        count = max(1, min(round(share * len(groups)), left - 1 - (len(missing) - place - 1)))
        of_group[taken : taken + count] = SPLITS.index(name)
        taken += count
    parts[train] = of_group[group_of_row]
    sizes = {name: int((parts == SPLITS.index(name)).sum()) for name in missing}
    listed = " and ".join(f"{name} ({counted(size, 'row')})" for name, size in sizes.items())
    return parts, f"{listed} split off train by content"
