"""An adapter folded into its base: the same numbers in float, and in fewer bits only what was measured to hold."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map_with_path

from safetrain.core.errors import ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.adapter_files import PromptFormat, read_prompt_format
from safetrain.core.records.evaluation import REPORT, ExportReport
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage.files import read_record
from safetrain.engine.adapters import make_trainable
from safetrain.engine.model import open_base
from safetrain.engine.weight_files import apply_adapter, load_arrays, save_adapter
from safetrain.export import fuse as fusing
from safetrain.export.comparison import ExportJob
from safetrain.export.fuse import FLOAT, fuse_adapter
from tests.engine.test_architectures import FAMILIES, SMALL
from tests.engine.test_training import rows
from tests.support.random_models import TINY, build_model

IDS = [[5, 9, 13, 21, 34, 55, 8]]
pytestmark = pytest.mark.usefixtures("memory_limit")
LORA = LoraSettings(4, 2.0, 0.0, 2, ("all-linear",))
Build = Callable[..., Path]


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


def of_family(name: str) -> dict[str, Any]:
    return {"model_type": name, **SMALL, **FAMILIES[name]}


@pytest.mark.parametrize(("method", "bits", "kind"), [
    ("lora", None, TINY),
    ("lora", 4, {**TINY, "tie_word_embeddings": False}),
    ("dora", 4, TINY),
    ("full", None, TINY),
    *(("lora", 4, of_family(name)) for name in ("qwen3_moe", "qwen2", "qwen3", "gemma3_text", "phi3")),
    ("dora", None, of_family("gemma2")),
    ("lora", None, of_family("mixtral")),
])  # fmt: skip
def test_a_float_fuse_is_the_tuned_model(method: str, bits: int | None, kind: dict[str, Any], tmp_path: Path) -> None:
    base = build_model(tmp_path / "base", bits=bits, **kind)
    adapter = adapter_of(base, tmp_path / "adapter", method)
    report, _ = fused(job_of(base, adapter, tmp_path / "out"), FLOAT)
    expected = tuned_logits(base, adapter)
    assert np.abs(expected - np.array(open_base(base, dequantize=True).module(mx.array(IDS)))).max() > 1e-2
    np.testing.assert_allclose(consumer_logits(tmp_path / "out"), expected, atol=1e-4, rtol=1e-4)
    assert read_prompt_format(tmp_path / "out") == TAUGHT
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert report.written is not None
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


def test_a_small_adapter_that_4_bits_lose_is_found_at_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is changed by far less than a step of 4 bits; the weights go into several files."""
    monkeypatch.setattr("safetrain.engine.weight_files.SHARD_BYTES", 2**16)
    base = build_model(tmp_path / "base", bits=4, **TINY)
    adapter = adapter_of(base, tmp_path / "adapter", size=0.01)
    lost = r"does not keep the improvement: in 4 bits, it loses more than 2 %(?s:.*)fuse without --bits"
    with pytest.raises(ModelError, match=lost):
        fused(job_of(base, adapter, tmp_path / "four"), 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    report, said = fused(job_of(base, adapter, tmp_path / "out"))
    assert [line.split("  ")[0] for line in said[-2:]] == ["4 bits", "8 bits"]
    assert report.type == "8 bits"
    assert report.kept >= 0.98
    entries = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert entries["bits"] == 4  # of what no adapter is on
    assert {entry["bits"] for entry in entries.values() if isinstance(entry, dict)} == {8}
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    consumer_logits(tmp_path / "out")


@pytest.mark.parametrize(("bits", "family"), [
    (3, TINY), (4, {**TINY, "attention_bias": True}), (6, {**TINY, "mode": "mxfp4"}),
    (4, of_family("gemma2")), (4, of_family("qwen3_moe")),
])  # fmt: skip
def test_a_refitted_model_keeps_more_in_the_same_bits(bits: int, family: dict[str, Any], tmp_path: Path) -> None:
    """Fitted on other rows than those it is measured on; 16-bit scales stay 16-bit scales."""
    kind = {"bits": 4, "group_size": 32} if "mode" in family else {"bits": bits}
    base = build_model(tmp_path / "base", bfloat16=True, **kind, **family)
    adapter = adapter_of(base, tmp_path / "adapter", size=0.05)
    plain, fitted = (
        fused(job_of(base, adapter, tmp_path / name, may_lose=1.0, fit=fit), bits)[0]
        for name, fit in (("plain", None), ("fitted", rows(200, 7)))
    )
    assert plain.written is not None
    assert fitted.written is not None
    assert fitted.written.divergence < 0.8 * plain.written.divergence
    assert fitted.size_bytes == plain.size_bytes
    one, two = (load_arrays(tmp_path / name / "model.safetensors") for name in ("plain", "fitted"))
    assert {name: (value.dtype, value.shape) for name, value in one.items()} == {
        name: (value.dtype, value.shape) for name, value in two.items()
    }
    consumer_logits(tmp_path / "fitted")


def test_without_the_memory_to_refit_it_rounds_and_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.export.refit.COPIES", 2**40)
    base = build_model(tmp_path / "base", bits=4, **TINY)
    adapter = adapter_of(base, tmp_path / "adapter")
    report, said = fused(job_of(base, adapter, tmp_path / "out", may_lose=1.0, fit=rows(20, 7)), 4)
    assert re.search(r"rounded, not refitted: that needs [\d,.]+ [A-Z]iB of memory$", said[-2])
    assert report.type == "4 bits"


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_what_other_programs_read_beside_the_weights_travels(key: str, tmp_path: Path) -> None:
    """Named templates; and mlx-lm rotates short texts as long ones, which transformers does not unless told to."""
    long, short = [1.0 + number / 8 for number in range(16)], [1.0] * 16
    rotation = {
        "type": "longrope",
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": short,
        "long_factor": long,
    }
    shape = {**of_family("phi3"), key: rotation, "max_position_embeddings": 512, "original_max_position_embeddings": 64}
    base = build_model(tmp_path / "base", **shape)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    fused(job_of(base, adapter_of(base, tmp_path / "adapter"), tmp_path / "out"), FLOAT)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for name in {key, "rope_scaling"}:
        assert config[name]["short_factor"] == config[name]["long_factor"] == long
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"


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
    fusing.write_fused(job, None, tmp_path / "candidate", print)
    assert mx.get_peak_memory() - before < files.static_bytes + 6 * 2**22  # the shard, and a few slices
    assert mx.get_peak_memory() - before < 4 * files.parameters


@pytest.mark.parametrize(("bits", "kinds"), [(4, {"U32", "BF16"}), (None, {"BF16"})])
def test_16_bits_stay_16_bits_and_floats_stay_floats(tmp_path: Path, bits: int | None, kinds: set[str]) -> None:
    from mlx_lm import load

    base = build_model(tmp_path / "base", bits=bits, bfloat16=True, **TINY)
    job = job_of(base, adapter_of(base, tmp_path / "adapter", size=0.3), tmp_path / "out", may_lose=0.5)
    if bits is None:
        with pytest.raises(ModelError, match=r"The base is not quantized(?s:.*)safetrain convert"):
            fused(job, 8)
    fused(job)
    assert {tensor.dtype for tensor in read_model_files(tmp_path / "out").tensors} == kinds
    assert set(load(str(tmp_path / "out"))[1].eos_token_ids) == {0, 7}, "what ends an answer"
