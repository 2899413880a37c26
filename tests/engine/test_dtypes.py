"""The probe's decision by speeds as they were or could be; what it times works; a cast leaves quantized words alone."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from safetrain.engine import dtypes
from safetrain.engine.dtypes import layer_speed, probed_dtype
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
def test_float32_must_be_faster_by_more_than_noise(bfloat16: float, float32: float, expected: str | None) -> None:
    def speed(dtype: Any, _quantized: bool) -> float:
        return float32 if dtype == mx.float32 else bfloat16

    assert probed_dtype(TURING, metal=False, quantized=False, speed=speed) == expected


@pytest.mark.parametrize(
    ("device", "metal"),
    [(AMPERE, False), ({"compute_capability_major": 9}, False), ({}, False), (TURING, True), ({}, True)],
)
def test_what_computes_in_bfloat16_by_itself_is_never_timed(device: dict[str, Any], metal: bool) -> None:
    def never(_dtype: Any, _quantized: bool) -> float:
        raise AssertionError

    for quantized in (False, True):
        assert probed_dtype(device, metal=metal, quantized=quantized, speed=never) is None


def test_plain_and_quantized_layers_are_decided_each_by_its_own_speed() -> None:
    def speed(dtype: Any, quantized: bool) -> float:
        plain = 80.0 if dtype == mx.float32 else 10.0
        return 30.0 if quantized else plain

    found = [probed_dtype(TURING, metal=False, quantized=each, speed=speed) for each in (False, True)]
    assert found == ["float32", None]


def test_what_is_timed_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "TOKENS", 16)
    monkeypatch.setattr(dtypes, "WIDTH", 128)
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
