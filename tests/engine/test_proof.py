"""What the adapter's folder does once it is opened again: the tuned model, or an error that says so."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import pytest

from safetrain.core.errors import InterruptedRun, ModelError, TrainingError
from safetrain.core.recorder import Recorder
from safetrain.core.records.metrics import ComparedWith, Proof, describe_proof, require_proof
from safetrain.engine.job import Job
from safetrain.engine.proof import LEAST_TOKENS, prove
from safetrain.engine.run import Watcher
from safetrain.engine.training import Result
from safetrain.engine.weight_files import load_arrays, save_arrays
from tests.engine.exact import SETTINGS
from tests.engine.test_training import job_in, rows, run, weights
from tests.support.jobs import with_rows

Build = Callable[..., Path]


def watcher(job: Job, stop: int = 0) -> Watcher:
    return Watcher(lambda *_: None, lambda _: None, lambda: stop, Recorder(job.output / "recorder.bin"))


def proof_of(job: Job, result: Result) -> Proof:
    return prove(job, result.tuned, watcher(job), result.metrics.steps)


@pytest.mark.parametrize(("method", "bits"), [("lora", 5), ("dora", 3), ("dora", None), ("full", None)])
def test_what_mlx_lm_opens_is_the_tuned_model_at_its_best_step(
    tiny_model: Build, tmp_path: Path, method: str, bits: int | None
) -> None:
    """With so high a learning rate the best step is not the last: memory has gone on from it."""
    wild = dataclasses.replace(SETTINGS, method=method, learning_rate=0.05, eval_steps=1)
    if bits == 3:
        wild = dataclasses.replace(wild, dequantize_base=False)
    job = job_in(tmp_path / "a", tiny_model(bits=bits), wild)
    result = run(job)
    assert 0 < result.metrics.best_step < result.metrics.steps
    assert method != "full" or len(weights(tmp_path / "a")) == 2 * 9, "of each block seven matrices and two norms"
    mx.reset_peak_memory()
    found = proof_of(job, result)
    assert mx.get_peak_memory() <= result.state.peak_memory_bytes
    assert (found.rows, found.opened.same_answers) == (5, 5)
    assert found.tuned_loss == pytest.approx(result.metrics.best_valid_loss, rel=1e-5)
    assert found.base.loss == pytest.approx(result.state.records[0].valid_loss, rel=1e-5)
    assert found.opened.divergence < 1e-6 < found.base.divergence
    assert "answers the same on 5 of 5 rows" in describe_proof(found)
    assert found.opened_by == ("safetrain" if bits == 3 else "mlx-lm")


def test_a_run_that_was_killed_at_it_comes_to_the_same(tiny_model: Build, tmp_path: Path) -> None:
    job = job_in(tmp_path / "a", tiny_model(bits=4), dataclasses.replace(SETTINGS, max_steps=4))
    result = run(job)
    with pytest.raises(InterruptedRun, match="after step 4, the last one") as caught:
        prove(job, result.tuned, watcher(job, stop=15), 4)
    assert caught.value.exit_code == 143
    assert proof_of(job, result) == proof_of(job, run(job))
    many = with_rows(job, valid=rows(300, 4))
    found = run(dataclasses.replace(many, output=tmp_path / "b", adapters=tmp_path / "b" / "adapters")).tuned
    assert LEAST_TOKENS / 2 < found.rows.lengths.sum() < 1.2 * LEAST_TOKENS < many.valid.lengths.sum(), (
        "few are compared"
    )


def test_a_folder_that_is_another_model_is_an_error(tiny_model: Build, tmp_path: Path) -> None:
    job = job_in(tmp_path / "a", tiny_model(), dataclasses.replace(SETTINGS, max_steps=4))
    result, file = run(job), job.adapters / "adapters.safetensors"
    config = job.adapters / "adapter_config.json"
    written, shape = load_arrays(file), json.loads(config.read_text())
    mx.eval(written)
    half = {**shape["lora_parameters"], "scale": shape["lora_parameters"]["scale"] / 2}
    for arrays, says, error, match in (
        (
            {name: mx.zeros_like(value) for name, value in written.items()},
            shape,
            TrainingError,
            "not the trained model",
        ),
        (written, {**shape, "lora_parameters": half}, TrainingError, "is not the trained model"),
        (written, {**shape, "num_layers": 1}, ModelError, "cannot open the adapter"),
    ):
        save_arrays(file, arrays)
        config.write_text(json.dumps(says))
        with pytest.raises(error, match=match):
            proof_of(job, result)


@pytest.mark.parametrize(("base", "opened", "in_16_bit", "told"), [
    ((2.0 + 1e-8, 1e-9), (2.0, 0.0), False, "changes nothing"),
    ((2.0001, 3e-7), (2.0, 0.0), False, ""),  # one update: the divergence goes by squares
    ((2.5, 0.3), (2.004, 4e-3), True, ""),  # rounding in 16 bits
    ((2.5, 0.3), (2.5, 0.3), True, "is not the trained model"),
    ((2.5, 0.3), (float("nan"), float("nan")), True, "is not the trained model"),
])  # fmt: skip
def test_rounding_is_no_other_model_and_a_lost_adapter_is(
    base: tuple[float, float], opened: tuple[float, float], in_16_bit: bool, told: str
) -> None:
    """Losses and divergences; the tuned model's loss is 2."""
    found = Proof(3, 9, 2.0, ComparedWith(*base, 3), ComparedWith(*opened, 3), "mlx-lm")
    with pytest.raises(TrainingError, match=told) if told else nullcontext():
        require_proof(found, "adapters", in_16_bit=in_16_bit)
