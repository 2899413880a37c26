"""An adapter folded into its base: the same numbers in float, and in fewer bits only what was measured to hold."""

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map_with_path

from safetrain.core.errors import ConfigError, DiskFullError, ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.adapter_files import PromptFormat
from safetrain.core.records.fusing import REPORT, ExportReport
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage.files import read_record
from safetrain.engine import fuse as fusing
from safetrain.engine.adapters import make_trainable
from safetrain.engine.folding import FLOAT
from safetrain.engine.fuse import fuse_adapter
from safetrain.engine.model import open_base
from safetrain.engine.tuned import ExportJob
from safetrain.engine.weight_files import ADAPTER_FILE, apply_adapter, load_arrays, save_adapter
from tests.engine.test_architectures import FAMILIES, SMALL
from tests.engine.test_training import rows
from tests.support.random_models import TINY, build_model

IDS = [[5, 9, 13, 21, 34, 55, 8]]
LORA = LoraSettings(4, 2.0, 0.0, 2, ("all-linear",))
Build = Callable[..., Path]


@pytest.fixture(autouse=True)
def memory_limit() -> Iterator[None]:
    """What a fuse sets, other tests do not inherit."""
    before = mx.set_memory_limit(2**40)
    mx.set_memory_limit(before)
    yield
    mx.set_memory_limit(before)


TAUGHT = PromptFormat((0, 7), "")


def adapter_of(
    base: Path,
    folder: Path,
    method: str = "lora",
    size: float = 0.05,
    lora: LoraSettings = LORA,
    prompt_format: PromptFormat = TAUGHT,
) -> Path:
    """An adapter whose every number is moved at random, by ``size`` where it begins with zeros."""
    model = open_base(base, dequantize=False)
    make_trainable(model, method, lora, 1)
    mx.random.seed(5)

    def moved(name: str, value: mx.array) -> mx.array:
        return value if name.endswith("lora_a") else value + size * mx.random.normal(value.shape)

    model.module.update(tree_map_with_path(moved, model.module.trainable_parameters()))
    fingerprint = read_model_files(base).fingerprint
    save_adapter(model, method, lora, base, folder, prompt_format, base_fingerprint=fingerprint)
    return folder


def job_of(base: Path, adapter: Path, out: Path, **changes: Any) -> ExportJob:
    return ExportJob(base, adapter, out, rows(12, 2), 256, 2**30, **changes)


def tuned_logits(base: Path, adapter: Path) -> np.ndarray:
    model = open_base(base, dequantize=True)
    apply_adapter(model, adapter)
    return np.array(model.module(mx.array(IDS)))


def consumer_logits(folder: Path) -> np.ndarray:
    """As any program that uses mlx-lm gets them."""
    from mlx_lm import load

    return np.array(load(str(folder))[0](mx.array(IDS)).astype(mx.float32))


def fused(job: ExportJob, bits: int | None = None) -> tuple[ExportReport, list[str]]:
    said: list[str] = []
    return fuse_adapter(job, said.append, bits), said


@pytest.mark.parametrize(
    ("method", "bits", "kind"),
    [
        ("lora", None, TINY),
        ("lora", 4, {**TINY, "tie_word_embeddings": False}),
        ("dora", 4, TINY),
        ("dora", None, TINY),
        ("full", None, TINY),
        ("lora", 4, {"model_type": "qwen3_moe", **SMALL, **FAMILIES["qwen3_moe"]}),
        ("lora", None, {"model_type": "mixtral", **SMALL, **FAMILIES["mixtral"]}),
        ("lora", 4, {"model_type": "qwen2", **SMALL}),  # has biases
    ],
)
def test_a_fused_float_model_is_the_tuned_one(
    method: str, bits: int | None, kind: dict[str, Any], tmp_path: Path
) -> None:
    base = build_model(tmp_path / "base", bits=bits, **kind)
    adapter = adapter_of(base, tmp_path / "adapter", method)
    report, _ = fused(job_of(base, adapter, tmp_path / "out"), FLOAT)
    expected = tuned_logits(base, adapter)
    assert np.abs(expected - np.array(open_base(base, dequantize=True).module(mx.array(IDS)))).max() > 1e-2
    np.testing.assert_allclose(consumer_logits(tmp_path / "out"), expected, atol=1e-4, rtol=1e-4)
    assert report.written.divergence < 1e-5
    assert report.kept == pytest.approx(1, abs=1e-3)
    assert read_model_files(tmp_path / "out").quantization_bits is None


def test_what_the_base_s_bits_hold_is_as_large_as_the_base(tmp_path: Path) -> None:
    base = build_model(tmp_path / "base", bits=8, **TINY)
    adapter = adapter_of(base, tmp_path / "adapter")
    report, said = fused(job_of(base, adapter, tmp_path / "out", may_lose=0.2))
    files, before = read_model_files(tmp_path / "out"), read_model_files(base)
    assert (report.type, files.static_bytes, files.quantization_bits) == ("8 bits", before.static_bytes, 8)
    assert read_record(tmp_path / "out" / REPORT, ExportReport) == report
    assert len(said) == 5  # rows, header, base, tuned, one candidate
    embedding = "model.embed_tokens.weight"
    one, two = (load_arrays(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    assert mx.array_equal(one[embedding], two[embedding])  # what no adapter is on stays to the last bit


def test_a_small_adapter_that_4_bits_lose_is_refused_there_and_found_at_more(tmp_path: Path) -> None:
    """Every layer is changed by far less than a step of 4 bits."""
    base = build_model(tmp_path / "base", bits=4, **TINY)
    adapter = adapter_of(base, tmp_path / "adapter", size=0.01)
    with pytest.raises(ModelError, match=r"does not keep the improvement: in 4 bits, it loses more than 2 %") as caught:
        fused(job_of(base, adapter, tmp_path / "four"), 4)
    assert "leave out --bits" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    report, said = fused(job_of(base, adapter, tmp_path / "out"))
    assert [line.split("  ")[0] for line in said[-2:]] == ["4 bits", "8 bits"]
    assert report.type == "8 bits"
    assert report.kept >= 0.98
    entries = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert entries["bits"] == 4  # of what no adapter is on
    assert {entry["bits"] for entry in entries.values() if isinstance(entry, dict)} == {8}
    consumer_logits(tmp_path / "out")


def test_a_float_base_stays_float(tmp_path: Path) -> None:
    base = build_model(tmp_path / "base", **TINY)
    job = job_of(base, adapter_of(base, tmp_path / "adapter"), tmp_path / "out")
    with pytest.raises(ModelError, match="The base is not quantized") as caught:
        fused(job, 8)
    assert "safetrain convert" in str(caught.value)
    assert fused(job)[0].type == "float"


def test_a_model_of_16_bits_stays_one(tmp_path: Path) -> None:
    base = build_model(tmp_path / "base", bits=4, bfloat16=True, **TINY)
    adapter = adapter_of(base, tmp_path / "adapter", size=0.3)
    fused(job_of(base, adapter, tmp_path / "out", may_lose=0.5))
    kinds = {tensor.dtype for tensor in read_model_files(tmp_path / "out").tensors}
    assert kinds == {"U32", "BF16"}


def test_weights_go_into_several_files_where_they_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.engine.weight_files.SHARD_BYTES", 2**16)
    base = build_model(tmp_path / "base", **TINY)
    adapter = adapter_of(base, tmp_path / "adapter")
    fused(job_of(base, adapter, tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3
    np.testing.assert_allclose(consumer_logits(tmp_path / "out"), tuned_logits(base, adapter), atol=1e-4, rtol=1e-4)


def test_what_ends_an_answer_and_the_tokenizer_go_with_it(tmp_path: Path) -> None:
    from mlx_lm import load

    base = build_model(tmp_path / "base", **TINY)
    fused(job_of(base, adapter_of(base, tmp_path / "adapter"), tmp_path / "out"))
    tokenizer = load(str(tmp_path / "out"))[1]
    assert set(tokenizer.eos_token_ids) == {0, 7}
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_writing_needs_no_float_copy_of_the_model(tmp_path: Path) -> None:
    """Layers are read, folded and written one after the other."""
    base = build_model(
        tmp_path / "base", bits=4, **{**TINY, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    )
    adapter = adapter_of(base, tmp_path / "adapter", lora=LoraSettings(4, 2.0, 0.0, 8, ("all-linear",)))
    files = read_model_files(base)
    job = job_of(base, adapter, tmp_path / "out")
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    fusing.write_fused(job, None, tmp_path / "candidate")
    assert mx.get_peak_memory() - before < files.static_bytes + 6 * 2**22  # the shard, and a few slices
    assert mx.get_peak_memory() - before < 4 * files.parameters


def test_an_adapter_that_changes_nothing_is_an_error(tmp_path: Path) -> None:
    base = build_model(tmp_path / "base", bits=4, **TINY)
    for method in ("lora", "dora"):
        adapter = adapter_of(base, tmp_path / method, method, size=0.0)
        with pytest.raises(ModelError, match="The adapter changes nothing"):
            fused(job_of(base, adapter, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    """Of the same shapes: nothing but the fingerprint tells them apart."""
    base, other = (build_model(tmp_path / name, seed=seed, **TINY) for name, seed in (("base", 3), ("other", 4)))
    adapter = adapter_of(base, tmp_path / "adapter")
    with pytest.raises(ModelError, match="trained on another base"):
        fused(job_of(other, adapter, tmp_path / "out"))


def test_half_written_adapters_and_a_full_disk_are_named_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = build_model(tmp_path / "base", **TINY)
    adapter = adapter_of(base, tmp_path / "adapter")
    monkeypatch.setattr("safetrain.core.storage.files.SPARE_BYTES", 2**62)
    with pytest.raises(DiskFullError, match="too little disk space"):
        fused(job_of(base, adapter, tmp_path / "out"))
    monkeypatch.undo()
    filled = OSError(errno.ENOSPC, "No space left on device")  # by another program, after the room was looked at
    monkeypatch.setattr(fusing, "save_shards", Mock(side_effect=filled))
    with pytest.raises(DiskFullError, match="nothing was written"):
        fused(job_of(base, adapter, tmp_path / "out"))
    monkeypatch.undo()
    weights = adapter / ADAPTER_FILE
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(ModelError, match="cannot be read"):
        fused(job_of(base, adapter, tmp_path / "out"))
    weights.unlink()
    with pytest.raises(ModelError, match="The adapter is missing"):
        fused(job_of(base, adapter, tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    with pytest.raises(ConfigError, match="already exists"):
        fused(job_of(base, adapter, base))
