"""What runs on a GPU alone, made to run here: lists under a mask in planned sizes, compiled, in bfloat16.

The backend is still the CPU, so this shows that the code is right, not that a GPU is fast or its kernels exact.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.random_models import build_model
from safetrain.core.errors import InterruptedRun
from safetrain.core.metrics import read_csv
from safetrain.engine import update as update_module
from safetrain.engine.model import BaseModel, layout_for
from tests.engine.exact import SETTINGS
from tests.engine.test_training import final_state, job_in, metrics_without_time, run, same

SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def not_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("model", "update", "run", "evaluation", "loss"):
        monkeypatch.setattr(f"safetrain.engine.{module}.on_cpu", lambda: False)


def settings_with(**changes: Any) -> Any:
    return dataclasses.replace(SETTINGS, dequantize_base=False, **changes)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_compiled_run_learns_and_continues_bit_for_bit(tmp_path: Path, method: str) -> None:
    """With dropout, noise on the embedding, accumulation and recomputed blocks."""
    base = build_model(tmp_path / "model", bits=4, bfloat16=True, **SMALL)
    settings = settings_with(method=method, neftune_alpha=5.0, gradient_checkpointing=True, learning_rate=2e-2)
    whole = run(job_in(tmp_path / "whole", base, settings))
    records = read_csv(tmp_path / "whole" / "metrics.csv")
    assert (records[-1].train_loss or 9) < (records[1].train_loss or 0) - 0.3
    assert 0 < whole.padding_share < 0.9  # lists are padded to planned sizes: 128 tokens at least
    with pytest.raises(InterruptedRun):
        run(job_in(tmp_path / "broken", base, settings), 7)
    run(job_in(tmp_path / "broken", base, settings))
    assert same(final_state(tmp_path / "broken"), final_state(tmp_path / "whole"))
    assert metrics_without_time(tmp_path / "broken") == metrics_without_time(tmp_path / "whole")


def test_few_programs_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One trace a shape, however many updates."""
    traced: list[int] = []
    original = update_module.loss_function

    def counting(model: BaseModel) -> Callable[..., mx.array]:
        loss = original(model)

        def traced_loss(part: Any) -> mx.array:
            traced.append(part.inputs.size)
            return loss(part)

        return traced_loss

    monkeypatch.setattr(update_module, "loss_function", counting)
    base = build_model(tmp_path / "model", bfloat16=True, **SMALL)
    assert run(job_in(tmp_path / "a", base, settings_with())).metrics.steps == 15
    assert len(traced) == len(set(traced)) <= 2


def test_float32_and_evaluation_use_rectangles_without_padding(tmp_path: Path) -> None:
    from safetrain.engine.model import open_base

    halves = open_base(build_model(tmp_path / "halves", bfloat16=True, **SMALL), dequantize=False)
    floats = open_base(build_model(tmp_path / "floats", **SMALL), dequantize=False)
    assert layout_for(halves, 100, training=True).masked
    assert not layout_for(halves, 100).masked
    assert not layout_for(floats, 100, training=True).masked
    result = run(job_in(tmp_path / "a", tmp_path / "floats", settings_with(max_steps=3)))
    assert result.padding_share == 0


def test_the_norm_of_a_gradient_in_one_kernel_each_is_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    mx.random.seed(4)
    gradient = {"layers": [{"lora_a": mx.random.normal((64, 8)), "m": mx.random.normal((64,))} for _ in range(40)]}
    norm = update_module.norm_of(gradient).item()
    monkeypatch.setattr(update_module, "on_cpu", lambda: True)
    assert norm == pytest.approx(update_module.norm_of(gradient).item(), rel=1e-6)
