"""The fast BLAS takes effect on the plain install, and its absence is told, never fatal."""

import subprocess
import sys
from pathlib import Path

import pytest

from safetrain.engine.cpu.blas import load_fast_blas

linux_cpu = pytest.mark.skipif(sys.platform != "linux", reason="macOS links Accelerate")
LOAD = "from safetrain.engine.cpu.blas import load_fast_blas\nblas = load_fast_blas()\n"
USED = (
    LOAD + "assert blas.fast, blas.reason\n"
    "import ctypes, mlx.core as mx\n"
    "mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))\n"
    "name = ctypes.CDLL(None).openblas_get_config\n"
    "name.restype = ctypes.c_char_p\n"
    "print(name().decode(), load_fast_blas().reason)\n"
)


@linux_cpu
def test_it_is_made_once_and_found_in_the_global_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETRAIN_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", USED], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "OpenBLAS" in done.stdout
    assert len(list((tmp_path / "blas").glob("*/libopenblas.so"))) == 1


@linux_cpu
def test_after_mlx_it_says_that_it_is_too_late() -> None:
    import mlx.core

    assert mlx.core.float32.size == 4
    blas = load_fast_blas()
    assert not blas.fast
    assert "imported before" in blas.reason


@linux_cpu
def test_an_unwritable_cache_falls_back_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = LOAD + "print(blas.fast, blas.reason)"
    environment = {"SAFETRAIN_CACHE_DIR": str(tmp_path / "file"), "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.startswith("False ")
    assert "Error" in done.stdout
