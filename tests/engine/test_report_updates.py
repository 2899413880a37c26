"""The report's models as a GPU has them, made to run here: quantized, in bfloat16, by a GPU's paths, and small."""

import dataclasses
from collections.abc import Iterator

import mlx.core as mx
import pytest

from safetrain.core.protocol.selftest import Exactness
from safetrain.engine import report_updates
from safetrain.engine.graph import count_kernels, unevaluated
from safetrain.engine.report_updates import Small, kernels_of, mlx_lm_step

TINY = Small(64, 2, 2, 256, 1, 24)


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.engine.backend.name_now", lambda: "cuda")


def test_kernels_grow_with_the_blocks() -> None:
    one, two = (kernels_of(dataclasses.replace(TINY, blocks=blocks)) for blocks in (1, 2))
    assert 0 < one[0] < two[0]
    assert 0 < one[1] < two[1]


def test_mlx_lm_s_step_is_counted_beside_ours() -> None:
    step, state = mlx_lm_step(TINY)
    assert TINY.config["quantization"]["bits"] == 4
    with unevaluated():
        assert 0 < count_kernels(step(), state) < sum(kernels_of(TINY))  # it is compiled as a whole


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """A CPU takes seconds to compile what a GPU compiles in none."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.usefixtures("uncompiled")
def test_sixteen_bits_are_near_the_reference() -> None:
    (found,) = report_updates.exactness()
    assert isinstance(found, Exactness)
    assert not found.in_float32
    assert max(found.loss_difference, found.gradient_difference) < 0.1
