"""Adapters to PEFT and back: PEFT's own formula in NumPy, round trips to the last bit, and every refusal by name."""

import errno
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from safetrain.core.errors import ConfigError, DiskFullError, ModelError, SafetrainError
from safetrain.core.records.evaluation import EXPORT_REPORT, ExportReport
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage.files import read_record
from safetrain.engine.adapters import shape_of
from safetrain.engine.exchange.peft import CONFIG, SAME_NAMES, WEIGHTS, export_peft, import_peft, places_of
from safetrain.engine.fuse import FLOAT, fuse_adapter
from safetrain.engine.model import open_base
from safetrain.engine.tuned import ExportJob
from safetrain.engine.weight_files import ADAPTER_FILE, apply_adapter, load_arrays
from tests.conftest import ROOT
from tests.engine.test_architectures import FAMILIES, SMALL
from tests.engine.test_fuse import IDS, adapter_of, consumer_logits, tuned_logits
from tests.engine.test_training import rows
from tests.support.random_models import TINY, build_model

pytestmark = pytest.mark.usefixtures("memory_limit")
Arrays = dict[str, np.ndarray]
Change = Callable[[Arrays], Any]
BLOCKS = "base_model.model.model.layers"
PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "owner/base", "r": 3, "lora_alpha": 4.5,
    "target_modules": ["q_proj", "down_proj"], "bias": "none", "peft_version": "0.21.2", "qalora_group_size": 16,
    "init_lora_weights": True, "inference_mode": True, "loftq_config": {}, "modules_to_save": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("peft") / "base", **TINY)


def weights_of(base: Path, adapter: Path | None = None) -> Arrays:
    """Every linear layer of the model's blocks as one matrix, by path."""
    model = open_base(base, dequantize=True)
    shapes = {path: shape_of(dict(model.module.named_modules())[path]) for path in places_of(model)}
    if adapter is not None:
        apply_adapter(model, adapter)
    layers = dict(model.module.named_modules())
    return {path: np.array(layers[path](mx.eye(inputs))).T for path, (_, inputs) in shapes.items()}  # without biases


def by_peft(base: Path, folder: Path) -> Arrays:
    """W + alpha / r * B A of every layer, with DoRA brought to its lengths, from PEFT's files alone."""
    found, config = weights_of(base), json.loads((folder / CONFIG).read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    arrays = {name: np.array(value) for name, value in load_arrays(folder / WEIGHTS).items()}
    for stem in (name.removesuffix("lora_A.weight") for name in arrays if name.endswith("lora_A.weight")):
        path = stem.removeprefix("base_model.model.").removesuffix(".")
        found[path] = found[path] + scale * arrays[f"{stem}lora_B.weight"] @ arrays[f"{stem}lora_A.weight"]
        if config["use_dora"]:
            lengths = arrays[f"{stem}lora_magnitude_vector"]
            found[path] *= (lengths / np.linalg.norm(found[path], axis=1))[:, None]
    return found


def exported(base: Path, adapter: Path, out: Path) -> tuple[ExportReport, list[str]]:
    said: list[str] = []
    return export_peft(ExportJob(base, adapter, out, rows(6, 2), 256, 2**30), "owner/base", said.append), said


def written_by_peft(folder: Path, change: Change = dict, dora: bool = False, **config: Any) -> Path:
    """A random adapter on two layers of both blocks, as PEFT writes it; ``change`` makes other arrays of them."""
    source = np.random.default_rng(1)
    rank, arrays = config.get("r", PLAIN["r"]), dict[str, np.ndarray]()
    for block in (0, 1):
        for name, outputs, inputs in (("self_attn.q_proj", 64, 64), ("mlp.down_proj", 64, 128)):
            stem = f"{BLOCKS}.{block}.{name}"
            arrays[f"{stem}.lora_A.weight"] = source.normal(size=(rank, inputs))
            arrays[f"{stem}.lora_B.weight"] = source.normal(size=(outputs, rank))
            if dora:
                arrays[f"{stem}.lora_magnitude_vector"] = source.uniform(0.5, 2, outputs)
    arrays = change(arrays) or arrays
    folder.mkdir()
    mx.save_safetensors(str(folder / WEIGHTS), {k: mx.array(v.astype(np.float32)) for k, v in arrays.items()})
    (folder / CONFIG).write_text(json.dumps({**PLAIN, "use_dora": dora, **config}))
    return folder


def imported(source: Path, base: Path, out: Path) -> LoraSettings:
    return import_peft(source, base, out)[1]


@pytest.mark.parametrize(("method", "bits"), [("lora", None), ("dora", 4)])
def test_a_round_trip_is_the_adapter_to_the_last_bit(method: str, bits: int | None, tmp_path: Path) -> None:
    """And what is exported is the tuned model by PEFT's own formula."""
    base = build_model(tmp_path / "base", bits=bits, **TINY)
    lora = LoraSettings(5, 1.7, 0.1, 1, ("q_proj", "mlp.down_proj"))
    adapter = adapter_of(base, tmp_path / "adapter", method, lora=lora)
    report, said = exported(base, adapter, tmp_path / "out")
    assert read_record(tmp_path / "out" / EXPORT_REPORT, ExportReport) == report
    assert report.written.divergence < 1e-6 < report.base.divergence
    assert (report.written.same_answers, report.rows, report.stop_ids) == (1.0, 6, (0, 7))
    assert said[-1].endswith("passes")
    found = imported(tmp_path / "out", base, tmp_path / "back")
    assert (tmp_path / "back" / ADAPTER_FILE).read_bytes() == (adapter / ADAPTER_FILE).read_bytes()
    assert found == LoraSettings(5, 1.7, 0.0, 1, ("mlp.down_proj", "self_attn.q_proj"))
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["target_modules"] == [f"model.layers.1.{name}" for name in ("mlp.down_proj", "self_attn.q_proj")]
    assert (config["base_model_name_or_path"], config["use_dora"]) == ("owner/base", method == "dora")
    require_same(weights_of(base, adapter), by_peft(base, tmp_path / "out"), weights_of(base))


def require_same(found: Arrays, expected: Arrays, before: Arrays) -> None:
    assert max(np.abs(expected[path] - before[path]).max() for path in before) > 0.05
    for path, weight in expected.items():
        np.testing.assert_allclose(found[path], weight, atol=1e-4, err_msg=path)


@pytest.mark.parametrize(
    "config", [{}, {"use_rslora": True}, *({"init_lora_weights": start} for start in (False, "eva", "orthogonal"))]
)
def test_what_is_imported_is_tuned_by_peft_s_formula(base: Path, config: dict[str, Any], tmp_path: Path) -> None:
    """mlx-lm opens the imported adapter, and a fuse of it."""
    from mlx_lm import load

    source, own = written_by_peft(tmp_path / "peft", **config), tmp_path / "own"
    imported(source, base, own)
    require_same(weights_of(base, own), by_peft(base, source), weights_of(base))
    if not config:
        theirs = load(str(base), adapter_path=str(own))[0](mx.array(IDS))
        np.testing.assert_allclose(np.array(theirs), tuned_logits(base, own), atol=1e-4, rtol=1e-4)
        fuse_adapter(ExportJob(base, own, tmp_path / "fused", rows(6, 2), 256, 2**30), print, FLOAT)
        np.testing.assert_allclose(consumer_logits(tmp_path / "fused"), np.array(theirs), atol=1e-4, rtol=1e-4)


def test_adapters_of_16_bits_and_of_older_versions_are_read(base: Path, tmp_path: Path) -> None:
    source = written_by_peft(tmp_path / "peft", dora=True)
    arrays = {name: value.astype(mx.bfloat16) for name, value in load_arrays(source / WEIGHTS).items()}
    renamed = {name.replace("vector", "vector.weight").replace("A.w", "A.default.w"): v for name, v in arrays.items()}
    mx.save_safetensors(str(source / WEIGHTS), renamed)
    imported(source, base, tmp_path / "own")
    found = load_arrays(tmp_path / "own" / ADAPTER_FILE)
    assert {value.dtype for value in found.values()} == {mx.float32}
    stem = "model.layers.1.mlp.down_proj"
    expected = arrays[f"base_model.model.{stem}.lora_A.weight"].astype(mx.float32).T
    assert mx.array_equal(found[f"{stem}.lora_a"], expected)


@pytest.mark.parametrize(("config", "match"), [
    ({"peft_type": "IA3"}, 'peft_type is "IA3"'),
    ({"task_type": "SEQ_CLS"}, 'task_type is "SEQ_CLS"'),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ({"bias": "all"}, 'bias is "all"'),
    ({"init_lora_weights": "pissa_niter_4"}, 'init_lora_weights is "pissa_niter_4"'),
    ({"of_tomorrow": {"a": 1}}, "of_tomorrow is"),
    ({"r": 0}, "r is 0"),
    ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
    ({"peft_type": None, "fine_tune_type": "lora"}, "peft_type is null"),
])  # fmt: skip
def test_a_setting_without_a_counterpart_is_refused_by_name(
    base: Path, config: dict[str, Any], match: str, tmp_path: Path
) -> None:
    source = written_by_peft(tmp_path / "peft")
    (source / CONFIG).write_text(json.dumps({**PLAIN, **config}))
    with pytest.raises(ModelError, match=match):
        imported(source, base, tmp_path / "own")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peft"]


def with_key(key: str, *shape: int) -> Change:
    return lambda arrays: {**arrays, key: np.ones(shape)}


def changed_arrays(part: str, change: Callable[[np.ndarray], np.ndarray] | None) -> Change:
    """Without those whose names have ``part``, or with other numbers in them."""
    return lambda arrays: {
        name: change(value) if change and part in name else value
        for name, value in arrays.items()
        if change or part not in name
    }


@pytest.mark.parametrize(("change", "match"), [
    (with_key("base_model.model.model.embed_tokens.lora_embedding_A", 3, 9), "no linear layer .*embed_tokens"),
    (with_key(f"{BLOCKS}.7.self_attn.q_proj.lora_A.weight", 3, 64), "layers.7"),
    (changed_arrays("layers.1.", None), r"skips layers of the upper blocks: 4 .*model\.layers\.1"),
    (changed_arrays("layers.1.mlp.down_proj.lora_B", None), r"is incomplete.*layers\.1\.mlp\.down_proj"),
    (changed_arrays("lora_B", np.zeros_like), "changes nothing"),
    (changed_arrays("lora_B", lambda value: value * math.nan), "infinity or NaN"),
    (changed_arrays("lora_", lambda value: value[:2, :2]), "does not fit this base(?s:.*)a rank of 3"),
    (with_key(f"{BLOCKS}.0.mlp.up_proj.lora_magnitude_vector", 128), "is incomplete.*up_proj"),
])  # fmt: skip
def test_arrays_without_a_counterpart_are_refused(base: Path, change: Change, match: str, tmp_path: Path) -> None:
    source = written_by_peft(tmp_path / "peft", change)
    with pytest.raises(ModelError, match=match):
        imported(source, base, tmp_path / "own")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peft"]


def test_a_wrong_base_is_named(tmp_path: Path) -> None:
    wider = build_model(tmp_path / "wider", **{**TINY, "hidden_size": 128, "num_attention_heads": 4})
    with pytest.raises(ModelError, match=r"does not fit this base.*the first: model\.layers\.0\.mlp\.down_proj"):
        imported(written_by_peft(tmp_path / "peft"), wider, tmp_path / "own")
    mixture = build_model(tmp_path / "mixture", model_type="mixtral", **SMALL, **FAMILIES["mixtral"])
    with pytest.raises(ModelError, match="Layers of mixtral may have other names"):
        imported(tmp_path / "peft", mixture, tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_the_families_that_are_named_to_people_are_those_that_are_taken() -> None:
    text = (ROOT / "docs" / "peft.md").read_text(encoding="utf-8")
    named = text[text.index("llama,") : text.index(". [How")]
    assert sorted(re.findall(r"\w+", named)) == sorted(SAME_NAMES)


def test_folders_that_are_not_whole_are_named(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, own = written_by_peft(tmp_path / "peft"), tmp_path / "own"
    weights, config = source / WEIGHTS, source / CONFIG

    def refused(match: str, error: type[SafetrainError] = ModelError, *, of: Path = source, to: Path = own) -> None:
        with pytest.raises(error, match=match):
            imported(of, base, to)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["peft"]

    refused("already exists", ConfigError, to=source)
    with monkeypatch.context() as patched:
        filled = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        patched.setattr("safetrain.engine.weight_files.save_arrays", filled)
        refused("nothing was written", DiskFullError)
    weights.write_bytes(weights.read_bytes()[:-50])
    refused("damaged or incomplete")
    weights.rename(source / "adapter_model.bin")
    refused(r"incomplete: adapter_model\.safetensors is missing(?s:.*)safe_serialization=True")
    config.write_text("{")
    refused("configuration is missing or cannot be read")
    refused("configuration is missing or cannot be read", of=tmp_path / "nowhere")


def test_what_peft_cannot_hold_is_not_exported(base: Path, tmp_path: Path) -> None:
    mixture = build_model(tmp_path / "mixture", model_type="qwen3_moe", **SMALL, **FAMILIES["qwen3_moe"])
    for where, method, match in (
        (base, "full", "trains model.*, which a PEFT adapter cannot contain"),
        (mixture, "lora", "Layers of qwen3_moe may have"),
    ):
        adapter = adapter_of(where, tmp_path / method, method)
        with pytest.raises(ModelError, match=match):
            exported(where, adapter, tmp_path / "out")
    with pytest.raises(ModelError, match="cannot be read"):
        exported(base, tmp_path / "none", tmp_path / "out")
    assert not (tmp_path / "out").exists()
