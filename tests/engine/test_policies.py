"""What a run does beside plain LoRA with Adam: other methods and optimizers, bad updates, early stopping."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.data.training_rows import row_order
from safetrain.core.errors import BadUpdateError, ConfigError, InterruptedRun
from safetrain.core.records.run_state import RunIdentity
from safetrain.core.records.settings import identity_of
from safetrain.engine.adapters import make_trainable
from safetrain.engine.model import open_base
from safetrain.engine.training import Result
from safetrain.engine.weight_files import load_arrays, save_arrays
from tests.engine.exact import LORA, SETTINGS
from tests.engine.test_training import final_state, job_in, require_same_run, rows, run, same
from tests.support.jobs import with_rows

Build = Callable[..., Path]


def test_quantized_weights_are_not_trained_in_full(tiny_model: Build) -> None:
    with pytest.raises(ConfigError, match="Quantized weights cannot be trained in full"):
        make_trainable(open_base(tiny_model(bits=4), dequantize=False), "full", LORA, 1)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon", "sgd"])
def test_an_interrupted_run_continues_bit_for_bit_with_every_optimizer(
    tiny_model: Build, tmp_path: Path, optimizer: str
) -> None:
    """With DoRA, dropout, weight decay and recomputed blocks."""
    decay = 0.0 if optimizer == "sgd" else 0.1
    settings = dataclasses.replace(
        SETTINGS, method="dora", optimizer=optimizer, schedule="wsd", weight_decay=decay,
        gradient_checkpointing=True, max_steps=4,
    )  # fmt: skip
    base = tiny_model(bits=3)
    run(job_in(tmp_path / "whole", base, settings))
    with pytest.raises(InterruptedRun):
        run(job_in(tmp_path / "broken", base, settings), 2)
    assert run(job_in(tmp_path / "broken", base, settings)).state.resumed_from_step == 2
    require_same_run(tmp_path / "broken", tmp_path / "whole")


def test_patience_ends_a_run_that_no_longer_improves(tiny_model: Build, tmp_path: Path) -> None:
    wild = dataclasses.replace(SETTINGS, learning_rate=0.05, eval_steps=1, num_epochs=9, early_stopping_patience=3)
    result = run(job_in(tmp_path / "a", tiny_model(), wild))
    assert result.metrics.steps == result.metrics.best_step + 3 < 45


def test_a_bad_update_is_written_down_and_the_same_command_stops_there_again(tiny_model: Build, tmp_path: Path) -> None:
    """One row begins with a token whose embedding is infinite."""
    base = tiny_model(tie=False)
    tensors = load_arrays(base / "model.safetensors")
    tensors["model.embed_tokens.weight"][4] = float("inf")
    save_arrays(base / "model.safetensors", tensors)
    job = job_in(tmp_path / "a", base)
    train = list(job.train.documents)
    train[13] = token_row([4, *train[13].ids[1:].tolist()], train[13].trained.tolist())
    job = with_rows(job, train=TokenRows.of(train))
    for _ in range(2):
        with pytest.raises(BadUpdateError, match=r"Update \d+ was not applied: the loss is not a number") as caught:
            run(job)
    assert "lower train.learning_rate" in str(caught.value)
    assert "max_loss_jump" not in str(caught.value)
    (dump,) = (tmp_path / "a" / "bad_updates").glob("step_*.json")
    written = json.loads(dump.read_text())
    assert [row["row"] for row in written["rows"] if row["loss"] is None] == [14]
    assert len(written["rows"]) == 4
    assert json.loads((tmp_path / "a" / "training_state.json").read_text())["step"] == written["step"] - 1


def test_a_run_that_a_jump_has_stopped_goes_on_where_the_jump_is_allowed(tiny_model: Build, tmp_path: Path) -> None:
    """One row of noise among rows that say one word; the run ends as one that nothing has stopped."""
    settings = dataclasses.replace(SETTINGS, batch_size=1, gradient_accumulation=1, num_epochs=1, learning_rate=0.05)
    plain, noise = [token_row([7] * 20, [True] * 20)] * 18, rows(1, 3).cut(16)[0]
    place = int(row_order(settings.seed, 0, 18, 0)[12])
    train = TokenRows.of([*plain[:place], noise, *plain[place + 1 :]])
    base = tiny_model()

    def run_in(name: str, max_loss_jump: float | None) -> Result:
        job = job_in(tmp_path / name, base, dataclasses.replace(settings, max_loss_jump=max_loss_jump))
        identity = RunIdentity("base", "train", "valid", identity_of(job.settings))
        return run(dataclasses.replace(with_rows(job, train=train), identity=identity))

    run_in("whole", None)
    with pytest.raises(BadUpdateError, match="the loss jumped") as caught:
        run_in("broken", 0.5)
    assert "a larger train.max_loss_jump, or null" in str(caught.value)
    assert run_in("broken", None).state.resumed_from_step == 12
    assert same(final_state(tmp_path / "broken"), final_state(tmp_path / "whole"))
