"""Which rows go to train, valid and test: by a hash of what they ask, the same on every machine."""

import hashlib
from array import array
from pathlib import Path

import numpy as np

from safetrain.core.data.rows import Row
from safetrain.core.errors import DataError
from safetrain.core.words import counted
from safetrain.plan.sources import SPLITS

MIN_ROWS = 3
DIGEST_BYTES = 16


class RowHashes:
    """Hashes of the rows of a file: what each asks, and what it says in all. 44 bytes a row."""

    def __init__(self) -> None:
        self._questions, self._identities, self._lines = bytearray(), bytearray(), array("I")

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, row: Row, line: int) -> None:
        """The next row of the file."""
        self._questions += hashlib.blake2b(row.question().encode(), digest_size=DIGEST_BYTES).digest()
        self._identities += hashlib.blake2b(row.identity().encode(), digest_size=DIGEST_BYTES).digest()
        self._lines.append(line)

    def questions(self) -> np.ndarray:
        """(rows,) digests; rows that ask the same share one."""
        return np.frombuffer(bytes(self._questions), dtype=f"S{DIGEST_BYTES}")

    def identities(self) -> np.ndarray:
        """(rows,) digests; rows that say the same share one."""
        return np.frombuffer(bytes(self._identities), dtype=f"S{DIGEST_BYTES}")

    def lines(self) -> np.ndarray:
        """(rows,) line numbers, from 1."""
        return np.array(self._lines)


def split_off(
    hashes: dict[str, RowHashes], valid_fraction: float, test_fraction: float, path: Path
) -> tuple[dict[str, np.ndarray], str]:
    """For each file the split of its rows, as indices into SPLITS, and in words how they came to be.

    What has no file of its own is dealt out of train by a hash of the question: rows that ask the same stay together.
    Raises DataError where there are too few different ones.
    """
    parts = {name: np.full(len(found), SPLITS.index(name), dtype=np.uint8) for name, found in hashes.items()}
    shares = {"valid": valid_fraction, "test": test_fraction}
    missing = {name: share for name, share in shares.items() if name not in hashes}
    if not missing:
        return parts, "train, valid and test as given"
    groups, group_of_row = np.unique(hashes["train"].questions(), return_inverse=True)
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
    parts["train"] = of_group[group_of_row]
    sizes = {name: int((parts["train"] == SPLITS.index(name)).sum()) for name in missing}
    listed = " and ".join(f"{name} ({counted(size, 'row')})" for name, size in sizes.items())
    return parts, f"{listed} split off train by content"
