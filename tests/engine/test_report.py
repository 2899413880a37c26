"""The report's measurements take a GPU's paths where there is one: bfloat16, compiled."""

import pytest

from safetrain.engine import report


def test_a_gpu_s_training_and_attention_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.engine.backend.name_now", lambda: "cuda")
    losses, _ = report.training()
    assert float(losses.partition("within ")[2].split()[0]) < 1e-4
    header, *costs = report.attention(2, 64, 48)
    assert header == "2 heads of size 64, 48 tokens, bfloat16; a training takes safetrain"
    assert len(costs) == 4
    assert [line.partition(":")[0] for line in report.product(64)] == [
        "64 x 64 float32",
        "64 x 64 float16",
        "64 x 64 bfloat16",
    ]
