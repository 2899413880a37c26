"""Trainings that ran out of memory although they were predicted to fit, kept in a small file of the user's cache.

Each bound says: at this predicted peak, this much memory was not enough.
"""

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.records.record_files import from_json
from safetrain.core.records.schema import WHOLE
from safetrain.core.storage.files import cache_directory, write_json

MOST_BOUNDS = 100
MOST_FACTOR = 4.0  # a larger one says that something else took the memory


@dataclass(frozen=True)
class BoundKey:
    """What a bound holds for; it says nothing of another model, device, method or rank."""

    base_model: str  # fingerprint
    device: str  # cpu, metal, cuda
    method: str
    rank: int  # of the adapter, 0 without one


@dataclass(frozen=True)
class MemoryBound:
    """One training that did not fit."""

    key: BoundKey
    closed_form_bytes: int  # its predicted peak of mlx's allocator, whatever a dry run had measured
    available_bytes: int  # that mlx could have, and that were not enough


def key_of(base_model: str, device: str, method: str, rank: int) -> BoundKey:
    """The key of a training; all weights of a block have no rank."""
    return BoundKey(base_model, device, method, 0 if method in WHOLE else rank)


def bounds_path() -> Path:
    """Where they are kept."""
    return cache_directory() / "memory_bounds.json"


def read_bounds() -> list[MemoryBound]:
    """All bounds; none where the file cannot be read, or is of another version."""
    try:
        return [from_json(MemoryBound, value) for value in json.loads(bounds_path().read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def remember_bound(bound: MemoryBound) -> None:
    """Add one, where the cache can be written."""
    _write([other for other in read_bounds() if other != bound] + [bound])


def forget_bounds(key: BoundKey, closed_form_bytes: int) -> None:
    """A training of this predicted peak has run to its end: forget the bounds that say it, or less, does not fit."""
    known = read_bounds()
    kept = [each for each in known if each.key != key or each.closed_form_bytes > closed_form_bytes]
    if len(kept) < len(known):
        _write(kept)


def _write(bounds: list[MemoryBound]) -> None:
    with contextlib.suppress(OSError):
        write_json(bounds_path(), [dataclasses.asdict(each) for each in bounds[-MOST_BOUNDS:]])


def learnt_factor(key: BoundKey) -> float:
    """The largest ratio of memory that was not enough to predicted peak; 0 where nothing is known."""
    mine = [bound for bound in read_bounds() if bound.key == key and bound.closed_form_bytes]
    ratios = [bound.available_bytes / bound.closed_form_bytes for bound in mine]
    return max((ratio for ratio in ratios if ratio <= MOST_FACTOR), default=0.0)
