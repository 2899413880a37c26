"""What runs on a GPU alone, made to run here: rectangles, compiled, in bfloat16.

The backend is still the CPU, so this shows that the code is right, not that a GPU is fast or its kernels exact.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.errors import InterruptedRun
from safetrain.core.memory.terms import Setup, base_bytes
from safetrain.core.model.files import read_model_files
from safetrain.core.records.metrics import parse_csv
from safetrain.engine.batches import Update, fill, training_layout, update_of_rows
from safetrain.engine.evaluation import row_losses
from safetrain.engine.job import Job
from safetrain.engine.model import open_base
from safetrain.engine.selftest import dry_run
from safetrain.engine.weight_files import load_arrays
from tests.engine.exact import SETTINGS, STILL, distance, flat, loss_and_gradient, prepared, rows_of
from tests.engine.test_training import job_in, require_same_run, run
from tests.support.jobs import with_rows
from tests.support.random_models import TINY, build_model


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.engine.backend.name_now", lambda: "cuda")


def back_on_cpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("safetrain.engine.backend.name_now", lambda: "cpu")


SHORT, FEW_TOKENS = 16, 256  # a CPU takes milliseconds for each token in bfloat16, half of them for 2048 logits


def short_job(output: Path, base: Path, settings: Any) -> Job:
    """A job with short rows of few tokens."""
    job = job_in(output, base, settings)

    def shortened(data: TokenRows) -> TokenRows:
        rows = [(row.ids[:SHORT] % FEW_TOKENS, row.trained[:SHORT]) for row in data]
        return TokenRows.of([token_row(ids.tolist(), trained.tolist()) for ids, trained in rows])

    return with_rows(job, train=shortened(job.rows.train.documents), valid=shortened(job.rows.valid.take([0, 1])))


@pytest.mark.usefixtures("compiling")
def test_a_compiled_run_learns_and_continues_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With accumulation and recomputed blocks; also one that was stopped on a CPU goes on."""
    # Each compiled shape costs seconds on CPU, whose kernels a C++ compiler builds.
    for module in ("core.memory.terms", "engine.batches"):
        monkeypatch.setattr(f"safetrain.{module}.widths_of", lambda lengths: np.full_like(lengths, SHORT))
    monkeypatch.setattr("safetrain.engine.batches.LABEL_SHARES", 1)
    base = build_model(tmp_path / "model", bits=4, bfloat16=True, vocab_size=FEW_TOKENS, **TINY)
    settings = dataclasses.replace(
        SETTINGS, dequantize_base=False, gradient_checkpointing=True, learning_rate=2e-2, num_epochs=2
    )
    whole = run(short_job(tmp_path / "whole", base, settings))
    records = parse_csv((tmp_path / "whole" / "metrics.csv").read_text())
    assert (records[-1].train_loss or 9) < (records[1].train_loss or 0) - 0.2
    assert 0 < 1 - whole.state.input_tokens / whole.state.computed_tokens < 0.9
    with pytest.raises(InterruptedRun):
        run(short_job(tmp_path / "broken", base, settings), 7)
    run(short_job(tmp_path / "broken", base, settings))
    require_same_run(tmp_path / "broken", tmp_path / "whole")
    with monkeypatch.context() as here:
        back_on_cpu(here)
        here.setattr("safetrain.engine.backend.cores", lambda: 2)  # micro-batches in two parts side by side
        with pytest.raises(InterruptedRun):
            run(short_job(tmp_path / "moved", base, settings), 8)
    result = run(short_job(tmp_path / "moved", base, settings))
    assert (result.state.resumed_from_step, result.metrics.steps) == (8, 10)


@pytest.mark.parametrize(("bits", "has_kernel"), [(4, True), (4, False), (None, True)])
def test_every_gpu_gives_the_loss_and_gradient_of_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int | None, has_kernel: bool
) -> None:
    """Rectangles by mlx's kernels or in tiles, and the loss as it is measured for validation."""
    data, folder = rows_of(3, 140, 6, 33, 250, 61, 5, 120, 33, 34), build_model(tmp_path / "model", bits=bits, **TINY)
    settings = dataclasses.replace(STILL, dequantize_base=False)
    with monkeypatch.context() as here:
        back_on_cpu(here)
        model, gradients = prepared(folder, settings)
        loss, gradient = loss_and_gradient(model, gradients, data)
        measured = row_losses(model, data, 600).sum()
    asked = set[tuple[int, mx.Dtype]]()

    def answer(_width: int, head_size: int, dtype: mx.Dtype) -> bool:
        asked.add((head_size, dtype))
        return has_kernel

    monkeypatch.setattr("safetrain.engine.row_attention.has_gradient_kernel", answer)
    model, gradients = prepared(folder, settings)
    found, other = loss_and_gradient(model, gradients, data, training_layout(model, 2, data))
    assert asked == {(TINY["hidden_size"] // TINY["num_attention_heads"], mx.float32)}
    assert found == pytest.approx(loss, rel=1e-5)
    assert distance(other, gradient) <= 1e-4
    assert row_losses(model, data, 600).sum() == pytest.approx(measured, rel=1e-5)


@pytest.mark.parametrize(
    ("a_token", "a_micro_batch", "expected"), [(1.0, 1000.0, 1024), (1.0, 0.0, 32), (0.0, 1.0, 4096)]
)
def test_a_dry_run_measures_how_much_padding_a_micro_batch_is_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, a_token: float, a_micro_batch: float, expected: int
) -> None:
    """From the time of the same rows together and each alone, on a GPU that takes these seconds."""
    monkeypatch.setattr("safetrain.engine.selftest.time_operation", lambda gradients: seconds_of(gradients.args[0]))

    def seconds_of(update: Update) -> float:
        return a_micro_batch * len(update.micro_batches) + a_token * update.computed_tokens

    base = build_model(tmp_path / "model", vocab_size=FEW_TOKENS, **TINY)
    (tmp_path / "run").mkdir()
    job = short_job(tmp_path / "run", base, dataclasses.replace(SETTINGS, batch_size=4, gradient_accumulation=1))
    assert dry_run(job, tmp_path / "run").padding_tokens == expected


@pytest.mark.parametrize("bits", [4, None])
def test_a_base_in_bfloat16_is_trained_in_float32_as_one_that_is_stored_so(tmp_path: Path, bits: int | None) -> None:
    """To the bit, quantized and dequantized; in its own type the update is another."""
    base = build_model(tmp_path / "model", bits=bits, bfloat16=True, **TINY)
    wide, data = tmp_path / "wide", rows_of(20, 40, 33)
    shutil.copytree(base, wide)  # each of its numbers stored in float32
    arrays = load_arrays(base / "model.safetensors").items()
    kept = {name: a.astype(mx.float32) if a.dtype == mx.bfloat16 else a for name, a in arrays}
    mx.save_safetensors(str(wide / "model.safetensors"), kept, metadata={"format": "mlx"})

    def found(folder: Path, **changes: Any) -> tuple[float, np.ndarray]:
        model, gradients = prepared(folder, dataclasses.replace(STILL, **changes))
        return loss_and_gradient(model, gradients, data, training_layout(model, 2, data))

    for dequantize in (False, True):
        loss, gradient = found(base, dequantize_base=dequantize, compute_dtype="float32")
        expected, other = found(wide, dequantize_base=dequantize)
        assert loss == expected
        assert np.array_equal(gradient, other)
        assert distance(found(base, dequantize_base=dequantize)[1], other) > 1e-4


@pytest.mark.parametrize("method", ["lora", "pretrain", "orpo"])
@pytest.mark.parametrize("labels", [8, 512, 2**15])
def test_float16_keeps_the_gradient_of_an_update_with_many_labels(tmp_path: Path, method: str, labels: int) -> None:
    """The weight of a label, 1 / labels, underflows in float16 from some thousand labels on."""
    base, data = build_model(tmp_path / "model", **TINY), rows_of(20, 12)
    data.rows_per_pair = 2 if method == "orpo" else 1
    found = list[tuple[float, np.ndarray]]()
    ways = [("float32", 2, False), ("float16", 2, False), ("float16", 1, False), ("float16", 2, True)]
    for dtype, size, on_disk in ways if method != "pretrain" else ways[:3]:
        settings = dataclasses.replace(
            STILL, method=method, dequantize_base=False, compute_dtype=dtype, stream_base=on_disk
        )
        model, gradients = prepared(base, settings)
        layout = training_layout(model, size, data)
        update = update_of_rows(data, list(fill(data, [0, 1], layout)), layout)
        longer = dataclasses.replace(update, labels=labels, pairs=labels // 16 if method == "orpo" else 0)
        loss, gradient = gradients.of(longer, 3)
        found.append((float(np.array(loss)), flat(gradient)))
    for loss_in_float16, vector in found[1:]:
        assert loss_in_float16 == pytest.approx(found[0][0], rel=0.01)
        assert distance(vector, found[0][1]) < 0.01


@pytest.mark.parametrize("bits", [4, None])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_the_model_computes_in_the_type_that_is_asked_for_and_takes_what_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None, bits: int | None
) -> None:
    base = build_model(tmp_path / "model", bits=bits, bfloat16=True, **TINY)
    files = read_model_files(base)
    for dequantize in (False, True):
        module = open_base(base, dequantize=dequantize, compute_dtype=dtype).module
        assert module(mx.array([[3, 4]])).dtype == getattr(mx, dtype or "bfloat16")
        settings = dataclasses.replace(SETTINGS, dequantize_base=dequantize, compute_dtype=dtype)
        setup = Setup(files, settings, "cuda")
        assert base_bytes(setup) == sum(each.nbytes for _, each in tree_flatten(module.parameters()))
    back_on_cpu(monkeypatch)
    module = open_base(base, dequantize=False, compute_dtype=dtype).module
    assert module(mx.array([[3, 4]])).dtype == mx.float32
