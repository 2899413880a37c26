"""The probe's decision by speeds as they were or could be; what it times works; a cast leaves quantized words alone."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from safetrain.engine import backend
from safetrain.engine.backend import probed_dtype
from safetrain.engine.upstream.loading import cast

TURING, AMPERE = ({"compute_capability_major": major} for major in (7, 8))  # 7 is a V100's too


@pytest.mark.parametrize(("device", "bfloat16", "float32", "expected"), [
    (TURING, 100.0, 121.0, "float32"), (TURING, 100.0, 119.0, None),  # noise
    (TURING, 0.0, 50.0, "float32"), (TURING, 0.0, 0.0, None),  # mlx has no such kernel
    (AMPERE, 1.0, 9.0, None), ({}, 1.0, 9.0, None),  # never asked; Metal has no such number
])  # fmt: skip
def test_float32_must_be_faster_by_more_than_noise_where_bfloat16_is_slow(
    monkeypatch: pytest.MonkeyPatch, device: dict[str, Any], bfloat16: float, float32: float, expected: str | None
) -> None:
    """Plain and quantized layers are decided each by its own speed."""

    def speed(dtype: Any, quantized: bool) -> float:
        return 9.0 if quantized else float32 if dtype == mx.float32 else bfloat16

    monkeypatch.setattr(backend, "layer_speed", speed)
    assert [probed_dtype(device, quantized=each) for each in (False, True)] == [expected, None]


@pytest.mark.parametrize(("device", "plain", "quantized", "expected"), [
    (AMPERE, 5.0, 4.0, True), (AMPERE, 4.7, 4.0, False), (TURING, 5.0, 4.0, True), ({}, 9.0, 1.0, False),
])  # fmt: skip
def test_a_base_is_dequantized_where_a_cuda_device_is_faster_so_by_more_than_noise(
    monkeypatch: pytest.MonkeyPatch, device: dict[str, Any], plain: float, quantized: float, expected: bool
) -> None:
    """Each in its faster type. On a Mac, whose memory is small, nobody asks."""
    monkeypatch.setattr(
        backend, "layer_speed", lambda dtype, bits: (quantized if bits else plain) / (1 + (dtype == mx.float32))
    )
    assert backend.dequantizing_pays(device) is expected


@pytest.mark.parametrize(("seconds", "expected"), [
    ({32: 0.01, 128: 0.04}, 32), ({32: 0.01, 128: 0.02, 512: 0.08}, 128), ({32: 0.01, 128: 0.011, 512: 0.02}, 512),
    ({32: 1.0}, 32),  # a GPU this slow is not kept waiting
])  # fmt: skip
def test_as_many_logits_at_once_as_make_each_label_cheaper(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], expected: int
) -> None:
    monkeypatch.setattr(backend, "head_seconds", seconds.__getitem__)
    assert backend.labels_at_once(AMPERE) == expected


def test_what_is_timed_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_WIDTH", "HEAD_WORDS", "TIMED_WIDTH"):
        monkeypatch.setattr(backend, name, 64)
    assert backend.head_seconds(2) > 0
    assert backend.layer_speed(mx.float32, quantized=True) > 0
    assert backend.labels_at_once({}) == 128, "as measured on CPU"


def test_words_and_integer_scales_of_quantized_weights_are_not_cast_nor_what_mlx_lm_never_casts() -> None:
    linear = nn.Linear(64, 32)
    affine = nn.QuantizedLinear.from_linear(linear, 32, 4)
    mxfp4 = nn.QuantizedLinear.from_linear(linear, 32, 4, mode="mxfp4")
    module = nn.Sequential(affine, mxfp4, nn.RMSNorm(32))
    module.cast_predicate = lambda name: "layers.2" not in name
    cast(module, mx.bfloat16)
    assert (affine.weight.dtype, affine.scales.dtype, affine.biases.dtype) == (mx.uint32, mx.bfloat16, mx.bfloat16)
    assert (mxfp4.weight.dtype, mxfp4.scales.dtype) == (mx.uint32, mx.uint8)
    assert affine.bias.dtype == mxfp4.bias.dtype == mx.bfloat16
    assert module.layers[2].weight.dtype == mx.float32


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
COMPUTES_AT_EXIT = (
    LOAD + "import ctypes, mlx.core as mx\n"
    "ctypes.CDLL(None).openblas_set_num_threads({threads})\n"
    "a = mx.random.normal((1000, 1000))\n"
    "for _ in range(30): a = (a @ a) * 1e-3\n"
    "mx.async_eval(a)\n"
    "print('all is said'); raise SystemExit(3)\n"
)


@linux_cpu
@pytest.mark.parametrize("threads", [1, 2])
def test_a_process_ends_with_its_code_while_a_stream_computes(threads: int) -> None:
    """The end of OpenBLAS waits for ever for a thread that computes, or frees what it reads."""
    command = [sys.executable, "-c", COMPUTES_AT_EXIT.format(threads=threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (3, "all is said\n"), done.stderr


@linux_cpu
def test_it_is_made_once_and_found_in_the_global_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETRAIN_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", USED], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "OpenBLAS" in done.stdout
    assert len(list((tmp_path / "blas").glob("*/libopenblas.so"))) == 1


@linux_cpu
def test_an_unwritable_cache_falls_back_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = LOAD + "print(blas.fast, blas.reason)"
    environment = {"SAFETRAIN_CACHE_DIR": str(tmp_path / "file"), "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.startswith("False ")
    assert "Error" in done.stdout
