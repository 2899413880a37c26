"""The report's measurements take a GPU's paths where there is one: 4 bits, bfloat16, compiled."""

import pytest

from safetrain.engine import report


def test_a_gpu_s_update_and_attention_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.engine.backend.name_now", lambda: "cuda")
    (update,) = report.update(128, 1, 256, 1, 24)
    assert update.startswith("1 block of width 128, 1 x 24 tokens: ")
    header, *costs = report.attention(2, 64, 48)
    assert header == "2 heads of size 64, 48 tokens, bfloat16"
    assert len(costs) == 4
    assert [line.partition(":")[0] for line in report.product(64)] == [
        "64 x 64 float32",
        "64 x 64 float16",
        "64 x 64 bfloat16",
    ]
