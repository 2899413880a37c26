"""What this machine has taught about the memory estimate: where a training ran out of memory that was thought to fit.

One small file in the user's cache folder. A bound says: at a predicted peak of so much, so much was not enough.
"""

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.files import cache_directory, write_json

MOST_BOUNDS = 100
MOST_FACTOR = 4.0  # a larger one says that something else took the memory


@dataclass(frozen=True)
class MemoryBound:
    """One training that did not fit."""

    base_model: str  # fingerprint
    predicted_peak_bytes: int  # of mlx's allocator
    available_bytes: int  # that mlx could have, and that were not enough


def bounds_path() -> Path:
    """Where they are kept."""
    return cache_directory() / "memory_bounds.json"


def read_bounds() -> list[MemoryBound]:
    """All of them; a file that cannot be read teaches nothing."""
    try:
        return [_bound_from(value) for value in json.loads(bounds_path().read_text(encoding="utf-8"))]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _bound_from(value: dict[str, Any]) -> MemoryBound:
    """Older files also name the device."""
    return MemoryBound(value["base_model"], value["predicted_peak_bytes"], value["available_bytes"])


def remember_bound(bound: MemoryBound) -> None:
    """Add one, where the cache can be written."""
    kept = [other for other in read_bounds() if other != bound]
    with contextlib.suppress(OSError):
        write_json(bounds_path(), [dataclasses.asdict(each) for each in [*kept, bound][-MOST_BOUNDS:]])


def learnt_factor(base_model: str) -> float:
    """The largest known ratio of what was not enough to what was predicted; 0 where nothing is known."""
    mine = [bound for bound in read_bounds() if bound.base_model == base_model and bound.predicted_peak_bytes]
    ratios = [bound.available_bytes / bound.predicted_peak_bytes for bound in mine]
    return max((ratio for ratio in ratios if ratio <= MOST_FACTOR), default=0.0)
