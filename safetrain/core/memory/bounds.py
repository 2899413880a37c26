"""What this machine has taught about the memory estimate: where a training ran out of memory that was thought to fit.

One small file in the user's cache folder. A bound says: at a predicted peak of so much, so much was not enough.
"""

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.storage.files import cache_directory, write_json
from safetrain.core.storage.records import from_json

MOST_BOUNDS = 100
MOST_FACTOR = 4.0  # a larger one says that something else took the memory


@dataclass(frozen=True)
class BoundKey:
    """What a bound is about: it says nothing of another model, device, method or rank."""

    base_model: str  # fingerprint
    device: str  # cpu, metal, cuda
    method: str
    rank: int  # of the adapter, 0 without one


@dataclass(frozen=True)
class MemoryBound:
    """One training that did not fit."""

    key: BoundKey
    predicted_peak_bytes: int  # of mlx's allocator
    available_bytes: int  # that mlx could have, and that were not enough


def key_of(base_model: str, device: str, method: str, rank: int) -> BoundKey:
    """The key of a training; all weights of a block have no rank."""
    return BoundKey(base_model, device, method, 0 if method == "full" else rank)


def bounds_path() -> Path:
    """Where they are kept."""
    return cache_directory() / "memory_bounds.json"


def read_bounds() -> list[MemoryBound]:
    """All of them; a file that cannot be read, or is of another version, teaches nothing."""
    try:
        return [from_json(MemoryBound, value) for value in json.loads(bounds_path().read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def remember_bound(bound: MemoryBound) -> None:
    """Add one, where the cache can be written."""
    _write([other for other in read_bounds() if other != bound] + [bound])


def forget_bounds(key: BoundKey, predicted_peak_bytes: int) -> None:
    """A training of this predicted peak has run to its end: what says that so much, or less, does not fit is over."""
    known = read_bounds()
    kept = [each for each in known if each.key != key or each.predicted_peak_bytes > predicted_peak_bytes]
    if len(kept) < len(known):
        _write(kept)


def _write(bounds: list[MemoryBound]) -> None:
    with contextlib.suppress(OSError):
        write_json(bounds_path(), [dataclasses.asdict(each) for each in bounds[-MOST_BOUNDS:]])


def learnt_factor(key: BoundKey) -> float:
    """The largest known ratio of what was not enough to what was predicted; 0 where nothing is known."""
    mine = [bound for bound in read_bounds() if bound.key == key and bound.predicted_peak_bytes]
    ratios = [bound.available_bytes / bound.predicted_peak_bytes for bound in mine]
    return max((ratio for ratio in ratios if ratio <= MOST_FACTOR), default=0.0)
