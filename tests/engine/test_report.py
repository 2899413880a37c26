"""The report's measurements take a GPU's paths where there is one: bfloat16, compiled."""

import pytest

from safetrain.engine import selftest
from tests.conftest import EMBEDDED


def test_a_gpu_s_training_and_attention_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.engine.backend.name_now", lambda: "cuda")
    within, _ = selftest.report("training", EMBEDDED)
    assert float(within.partition("within ")[2].split()[0]) < 1e-2
    header, *costs = selftest.attention(2, 64, 48)
    assert header == "2 heads of size 64, 48 tokens, bfloat16; a training takes safetrain"
    assert len(costs) == 4
    assert all(selftest.product_gflops(64, dtype) > 0 for dtype in ("float32", "float16", "bfloat16"))
