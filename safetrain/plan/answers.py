"""Answers of the engine's child processes, kept in the user's cache so that nothing is measured twice. No DVC outputs.

An answer is void once the code that measured it, a package or Python itself is another.
"""

import contextlib
import functools
import hashlib
import sys
from pathlib import Path
from typing import TypeVar

from safetrain.core.storage.files import cache_directory, read_record, write_record
from safetrain.plan.machine import version_of

Kind = TypeVar("Kind")
CORE_CODE = (
    "memory/terms.py",
    "data/row_order.py",
    "records/settings.py",
)  # of core: what decides how much an update takes
PACKAGES = ("mlx", "mlx-lm", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "scipy-openblas32")


@functools.cache
def engine_code() -> str:
    """Hash of the source that decides what an update takes and how the engine answers."""
    package = Path(__file__).parent.parent
    files = [*(package / "engine").rglob("*.py"), *(package / "core" / name for name in CORE_CODE)]
    return digest_of(*(file.read_text(encoding="utf-8") for file in sorted(files)))


def digest_of(*words: str) -> str:
    """A short hash of all of them."""
    return hashlib.blake2b("\n".join(words).encode(), digest_size=12).hexdigest()


def answers_about(kind: str, *words: str) -> Path:
    """Where answers of this kind are kept that hold for these words, this Python, these packages and this code."""
    versions = [f"{name} {version_of(name)}" for name in PACKAGES]
    return cache_directory() / kind / digest_of(sys.executable, *words, engine_code(), *versions)


def read_answer(path: Path, kind: type[Kind]) -> Kind | None:
    """An earlier answer; None where there is none, or one of another form."""
    try:
        return read_record(path, kind)
    except (OSError, ValueError, TypeError):
        return None


def keep_answer(path: Path, answer: object) -> None:
    """Write a dataclass down; where the cache cannot be written, it is measured again next time."""
    with contextlib.suppress(OSError):
        write_record(path, answer)
