"""Remembers what the engine's probe said about a model on this installation, so that it runs once. Not a DVC output."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

from safetrain.core.macos import sysctl_number
from safetrain.core.memory.terms import usable_cores
from safetrain.core.storage.files import cache_directory, write_json
from safetrain.plan.machine import Probe, chip_name

CODE = ("memory/terms.py", "data/row_order.py")  # of core: what decides how much an update takes
PACKAGES = ("mlx", "mlx-lm", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "scipy-openblas32")


def installed_versions() -> list[str]:
    """The packages whose change makes an earlier answer void, each with its version."""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} -")
    return versions


@functools.cache
def engine_code() -> str:
    """Hash of the source that decides what an update takes and how the engine answers."""
    digest, package = hashlib.blake2b(digest_size=8), Path(__file__).parent.parent
    for file in sorted([*(package / "engine").glob("*.py"), *(package / "core" / name for name in CODE)]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def cache_path(model_fingerprint: str) -> Path:
    """Where the answer for this model, machine and these package versions is kept."""
    words = [sys.executable, model_fingerprint, chip_name(), str(usable_cores()), engine_code(), *_graphics()]
    words += installed_versions()
    key = hashlib.blake2b("\n".join(words).encode(), digest_size=12)
    return cache_directory() / "probes" / f"{key.hexdigest()}.json"


def _graphics() -> list[str]:
    """What decides whether mlx finds a GPU, and how much of its memory it may have: macOS 26 allows more than 15."""
    if sys.platform == "darwin":
        return [str(sysctl_number("iogpu.wired_limit_mb")), platform.release()]
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return [*devices, os.environ.get("CUDA_VISIBLE_DEVICES", "all")]


def remembered(path: Path) -> Probe | None:
    """The earlier answer, or None when there is none that can be read."""
    try:
        probe = Probe(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return probe if probe.loads and probe.trains else None


def remember(path: Path, probe: Probe) -> None:
    """Keep the answer where the cache can be written; elsewhere the probe runs again next time."""
    with contextlib.suppress(OSError):
        write_json(path, dataclasses.asdict(probe))
