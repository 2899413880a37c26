"""The probe's decision by speeds as they were or could be; what it times works; a cast leaves quantized words alone."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from safetrain.engine import selftest
from safetrain.engine.selftest import layer_speed, probed_dtype
from safetrain.engine.upstream.loading import cast

TURING, AMPERE = ({"compute_capability_major": major} for major in (7, 8))  # 7 is a V100's too


@pytest.mark.parametrize(
    ("bfloat16", "float32", "expected"),
    [
        (100.0, 800.0, "float32"),
        (100.0, 121.0, "float32"),
        (100.0, 119.0, None),  # noise
        (100.0, 50.0, None),
        (0.0, 50.0, "float32"),  # mlx has no such kernel
        (0.0, 0.0, None),
    ],
)
def test_float32_must_be_faster_by_more_than_noise(
    monkeypatch: pytest.MonkeyPatch, bfloat16: float, float32: float, expected: str | None
) -> None:
    monkeypatch.setattr(selftest, "layer_speed", lambda dtype, _: float32 if dtype == mx.float32 else bfloat16)
    assert probed_dtype(TURING, quantized=False) == expected


@pytest.mark.parametrize("device", [AMPERE, {"compute_capability_major": 9}, {}])  # Metal has no such number
def test_what_computes_in_bfloat16_by_itself_is_never_timed(
    monkeypatch: pytest.MonkeyPatch, device: dict[str, Any]
) -> None:
    monkeypatch.delattr(selftest, "layer_speed")
    assert [probed_dtype(device, quantized=each) for each in (False, True)] == [None, None]


def test_plain_and_quantized_layers_are_decided_each_by_its_own_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {mx.float32: 80.0, mx.bfloat16: 10.0}
    monkeypatch.setattr(selftest, "layer_speed", lambda dtype, quantized: 30.0 if quantized else plain[dtype])
    assert [probed_dtype(TURING, quantized=each) for each in (False, True)] == ["float32", None]


def test_what_is_timed_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "TIMED_TOKENS", 16)
    monkeypatch.setattr(selftest, "TIMED_WIDTH", 128)
    for quantized in (False, True):
        for dtype in (mx.bfloat16, mx.float32):
            assert layer_speed(dtype, quantized) > 0

    def refuse(*_: Any, **__: Any) -> mx.array:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(mx, "quantize", refuse)
    assert layer_speed(mx.bfloat16, True) == 0


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
