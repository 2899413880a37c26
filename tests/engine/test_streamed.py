"""A base that stays on disk: the same numbers to the bit as in memory, for families, methods and layouts."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from safetrain.core.errors import InterruptedRun, ModelError
from safetrain.core.recorder import Recorder
from safetrain.core.records.settings import TrainSettings
from safetrain.engine.backend import device
from safetrain.engine.batches import BatchLayout
from safetrain.engine.cpu.kernels import stream_of
from safetrain.engine.evaluation import answer, row_losses
from safetrain.engine.model import open_base
from safetrain.engine.run import Watcher
from safetrain.engine.tuned import prove
from tests.engine.exact import GPU_TOLERANCE, LAYOUTS, LORA, ON_GPU, STILL, prepared, rows_of, update_of, within
from tests.engine.test_architectures import FAMILIES, SMALL
from tests.engine.test_training import final_state, job_in, run, same
from tests.support.families import build_family
from tests.support.random_models import build_model

Build = Callable[..., Path]
UNEQUAL = rows_of(3, 140, 6, 33, 4, 61, 5, 90, 33, 34)
IN_MEMORY = dataclasses.replace(STILL, dequantize_base=False, lora=dataclasses.replace(LORA, dropout=0.2))
ON_DISK = dataclasses.replace(IN_MEMORY, stream_base=True)
FEW_STEPS = 4


@pytest.fixture(autouse=True)
def errors_of_reading_end_here() -> Iterator[None]:
    """mlx reports a read that failed ahead of time in whatever a stream computes next, perhaps in another test."""
    yield
    for index in 2 * [*range(device().shards), None]:
        with (
            contextlib.suppress(RuntimeError),
            contextlib.nullcontext() if index is None else mx.stream(stream_of(index)),
        ):
            mx.synchronize()
    with contextlib.suppress(RuntimeError):
        mx.clear_cache()  # waits for the stream that reads ahead


def gradient_of(folder: Path, settings: TrainSettings, layout: BatchLayout) -> tuple[float, dict[str, np.ndarray]]:
    _, gradients = prepared(folder, settings)
    loss, gradient = gradients.of(update_of(UNEQUAL, layout), 3)
    return float(np.array(loss)), {name: np.array(part) for name, part in tree_flatten(gradient)}


def require_the_same_bits(folder: Path, layout: BatchLayout, method: str = "lora") -> None:
    """Loss and gradient with the base in memory and on disk."""
    in_memory, on_disk = (dataclasses.replace(each, method=method) for each in (IN_MEMORY, ON_DISK))
    (loss, expected), (found_loss, found) = (gradient_of(folder, each, layout) for each in (in_memory, on_disk))
    assert found_loss == pytest.approx(loss, rel=GPU_TOLERANCE if ON_GPU else 0)
    assert list(found) == list(expected)
    for name, part in expected.items():
        most = GPU_TOLERANCE * float(np.abs(part).max()) if ON_GPU else 0  # a GPU compiles what is in memory
        np.testing.assert_allclose(found[name], part, rtol=0, atol=most, err_msg=name)
    assert any(part.any() for part in expected.values())


@pytest.mark.parametrize(("family", "method", "bits"), [
    ("llama", "lora", 4), ("llama", "dora", None), ("qwen2", "lora", None), ("gemma3_text", "dora", 4),
    ("gemma2", "lora", 4), ("qwen3_moe", "lora", 4), ("qwen3_moe", "lora", None),
])  # fmt: skip
def test_gradients_are_those_in_memory_to_the_bit(family: str, method: str, bits: int | None, tmp_path: Path) -> None:
    """With dropout, several micro-batches, two shards at once, a tied or separate head, frozen blocks below."""
    folder = build_model(
        tmp_path / "model", bits=bits, bfloat16=True, model_type=family, **{**SMALL, **FAMILIES[family]}
    )
    layout = LAYOUTS["rectangles" if family == "gemma2" else "pairs of lists of 100 tokens"]
    require_the_same_bits(folder, layout, method)


def test_a_run_resumes_in_memory_and_on_disk_again_to_the_bit(tiny_model: Build, tmp_path: Path) -> None:
    """Validation, checkpoints and the check of the saved adapter included."""
    base = tiny_model(bits=4)
    in_memory, on_disk = (dataclasses.replace(each, max_steps=FEW_STEPS) for each in (IN_MEMORY, ON_DISK))
    run(job_in(tmp_path / "memory", base, in_memory))
    expected = final_state(tmp_path / "memory")
    job = job_in(tmp_path / "disk", base, on_disk)
    job = dataclasses.replace(job, identity=job_in(tmp_path / "memory", base, in_memory).identity)
    for stop_at, settings in ((1, on_disk), (3, in_memory)):
        with pytest.raises(InterruptedRun):
            run(dataclasses.replace(job, settings=settings), stop_at)
    result = run(job)
    assert same(final_state(tmp_path / "disk"), expected)
    watcher = Watcher(lambda *_: None, lambda _: None, lambda: 0, Recorder(tmp_path / "recorder.bin"))
    proof = prove(job, result.tuned, watcher, result.metrics.steps)
    assert proof.opened.divergence < within(1e-6) < proof.base.divergence


def test_groups_of_rows_give_the_same_gradient(tiny_model: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the inputs of blocks take too much memory, micro-batches pass through the blocks one after another."""
    monkeypatch.setattr("safetrain.engine.block_loop.KEPT_BYTES", 1)
    require_the_same_bits(tiny_model(bits=4), LAYOUTS["lists of 100 tokens"])


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_a_head_in_slices_gives_the_same_gradient(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model caps or scales its logits."""
    folder = build_model(tmp_path / "model", bits=4, model_type=family, **{**SMALL, **FAMILIES[family]})
    monkeypatch.setattr("safetrain.engine.block_loop.slices_head", lambda *_: True)
    monkeypatch.setattr("safetrain.engine.loss.chunk_of", lambda _: 48)
    require_the_same_bits(folder, LAYOUTS["rectangles" if family == "gemma2" else "two lists at a time"])


def test_losses_and_answers_are_the_same_and_no_weight_stays_in_memory(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "head_dim": 64}
    folder = build_model(tmp_path / "model", bits=8, num_attention_heads=4, num_key_value_heads=2, **shape)
    in_memory, on_disk = (open_base(folder, dequantize=False, stream=stream) for stream in (False, True))
    assert np.array_equal(row_losses(in_memory, UNEQUAL, 100), row_losses(on_disk, UNEQUAL, 100))
    prompts = [row.ids.tolist()[:9] for row in UNEQUAL if len(row) >= 9]
    told = [answer(model, prompts, frozenset(), 5, 10**6) for model in (in_memory, on_disk)]
    assert told[0] == told[1]
    del in_memory
    before = mx.get_active_memory()
    _, gradients = prepared(folder, dataclasses.replace(ON_DISK, lora=dataclasses.replace(LORA, num_layers=6)))
    update = update_of(UNEQUAL, LAYOUTS["lists of 100 tokens"])
    loss, gradient = gradients.of(update, 0)
    mx.eval(loss, gradient)
    trained = 2 * sum(part.nbytes for _, part in tree_flatten(gradient))
    assert (
        mx.get_active_memory() - before
        < trained + sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 6
    )


def test_a_gpu_gives_the_gradient_of_its_recomputed_blocks(tiny_model: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.engine.backend.name_now", lambda: "metal")
    folder, layout = tiny_model(), LAYOUTS["rectangles of 640 tokens"]
    expected = gradient_of(folder, dataclasses.replace(IN_MEMORY, gradient_checkpointing=True), layout)
    loss, found = gradient_of(folder, ON_DISK, layout)
    assert loss == pytest.approx(expected[0], rel=within(1e-6))
    for name, part in expected[1].items():
        np.testing.assert_allclose(
            found[name], part, rtol=within(1e-4), atol=within(1e-6) * float(np.abs(part).max()), err_msg=name
        )


@pytest.mark.parametrize("family", ["gemma3n", "gemma4_text", "afm7"])
def test_a_family_whose_blocks_need_more_than_one_input_is_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be trained with its base on disk: .*\n(.*\n)*.*stream_base=false"):
        open_base(build_family(tmp_path / "model", family), dequantize=False, stream=True)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _replace(file: Path) -> None:
    copy = file.with_name("copy")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)


@pytest.mark.parametrize("damage", [Path.unlink, _truncate, _replace])
def test_a_model_that_changes_is_noticed(tiny_model: Build, damage: Callable[[Path], None]) -> None:
    base = tiny_model(bits=4)
    model = open_base(base, dequantize=False, stream=True)
    damage(base / "model.safetensors")
    with pytest.raises(ModelError, match="continues from the last checkpoint"):
        row_losses(model, UNEQUAL, 100)


def test_a_model_that_changes_while_it_trains_ends_the_run_and_loses_nothing(tiny_model: Build, tmp_path: Path) -> None:
    base = tiny_model(bits=4)
    file, kept = base / "model.safetensors", (base / "model.safetensors").read_bytes()
    settings = dataclasses.replace(ON_DISK, max_steps=FEW_STEPS)
    whole = job_in(tmp_path / "whole", base, settings)
    run(whole)
    job = dataclasses.replace(job_in(tmp_path / "run", base, settings), identity=whole.identity)
    steps = list[int]()

    def record(records: list[Any]) -> None:
        steps.append(records[-1].step)
        if records[-1].step == 2:
            _truncate(file)

    watcher = Watcher(lambda *_: None, record, lambda: 0, Recorder(job.output / "recorder.bin"))
    from safetrain.engine.training import train

    with pytest.raises(ModelError, match="continues from the last checkpoint"):
        train(job, watcher)
    assert steps[-1] == 2
    file.unlink(missing_ok=True)
    file.write_bytes(kept)
    assert run(job).state.resumed_from_step == 2
    assert same(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))


def test_a_disk_that_fails_ends_the_run_with_what_to_do(tiny_model: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it fails while the next block is read ahead: mlx says so in whatever it computes next."""
    base = tiny_model(bits=4)
    model = open_base(base, dequantize=False, stream=True)
    os.truncate(base / "model.safetensors", 4096)  # its lazy arrays are open
    monkeypatch.setattr(type(model.blocks), "require_unchanged", lambda _: None)
    with pytest.raises(ModelError, match=r"cannot be read from disk: .*Unable to read(.*\n)*.*check this disk"):
        row_losses(model, UNEQUAL, 100)
