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

from safetrain.core.errors import ConfigError, DiskFullError, ModelError
from safetrain.core.records.fusing import EXPORT_REPORT, ExportReport
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage.files import read_record
from safetrain.engine.exchange.peft import (
    CONFIG,
    SAME_NAMES,
    WEIGHTS,
    ImportedAdapter,
    export_peft,
    import_peft,
    places_of,
    require_pairs,
    targets_of,
)
from safetrain.engine.folding import FLOAT
from safetrain.engine.fuse import fuse_adapter
from safetrain.engine.model import open_base
from safetrain.engine.tuned import ExportJob
from safetrain.engine.weight_files import ADAPTER_FILE, apply_adapter, load_arrays
from tests.conftest import ROOT
from tests.engine.test_architectures import FAMILIES, SMALL
from tests.engine.test_fuse import IDS, LORA, adapter_of, consumer_logits, memory_limit, tuned_logits
from tests.engine.test_training import rows
from tests.support.peft_judge import dequantized_base, logits_of_peft
from tests.support.random_models import TINY, build_model

__all__ = ["memory_limit"]  # a fixture of every test here
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


def weight_of(layer: Any, inputs: int) -> np.ndarray:
    """(outputs, inputs) of a layer without bias: what it makes of unit vectors."""
    return np.array(layer(mx.eye(inputs))).T


def weights_of(base: Path, adapter: Path | None = None) -> Arrays:
    """Every linear layer of the model's blocks as one matrix, by path."""
    model = open_base(base, dequantize=True)
    places = places_of(model)
    if adapter is not None:
        apply_adapter(model, adapter)
    layers = dict(model.module.named_modules())
    return {path: weight_of(layers[path], place.inputs) for path, place in places.items()}


def by_peft(base: Arrays, folder: Path) -> Arrays:
    """W + alpha / r * B A of every layer, with DoRA brought to its lengths, from PEFT's files alone."""
    config = json.loads((folder / CONFIG).read_text())
    arrays = {name: np.array(value) for name, value in load_arrays(folder / WEIGHTS).items()}
    found = dict(base)
    for name, a in arrays.items():
        if not name.endswith("lora_A.weight"):
            continue
        stem = name.removesuffix("lora_A.weight")
        path = stem.removeprefix("base_model.model.").removesuffix(".")
        assert a.shape[0] == config["r"]
        changed = base[path] + config["lora_alpha"] / config["r"] * arrays[f"{stem}lora_B.weight"] @ a
        if config["use_dora"]:
            lengths = arrays[f"{stem}lora_magnitude_vector"]
            changed *= (lengths / np.linalg.norm(changed, axis=1))[:, None]
        found[path] = changed
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


def imported(source: Path, base: Path, out: Path) -> ImportedAdapter:
    return import_peft(source, base, out)


@pytest.mark.parametrize(("method", "bits"), [("lora", None), ("dora", None), ("lora", 4), ("dora", 4)])
def test_what_is_exported_is_the_tuned_model_by_peft_s_formula(method: str, bits: int | None, tmp_path: Path) -> None:
    base = build_model(tmp_path / "base", bits=bits, **TINY)
    adapter = adapter_of(base, tmp_path / "adapter", method, lora=LoraSettings(5, 1.7, 0.0, 2, ("all-linear",)))
    exported(base, adapter, tmp_path / "out")
    before, tuned = weights_of(base), weights_of(base, adapter)
    found = by_peft(before, tmp_path / "out")
    assert max(np.abs(tuned[path] - before[path]).max() for path in before) > 0.05
    for path, weight in tuned.items():
        np.testing.assert_allclose(found[path], weight, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_round_trip_is_the_adapter_to_the_last_bit(base: Path, method: str, tmp_path: Path) -> None:
    lora = LoraSettings(5, 1.7, 0.1, 1, ("q_proj", "mlp.down_proj"))
    adapter = adapter_of(base, tmp_path / "adapter", method, lora=lora)
    exported(base, adapter, tmp_path / "out")
    found = imported(tmp_path / "out", base, tmp_path / "back")
    assert (tmp_path / "back" / ADAPTER_FILE).read_bytes() == (adapter / ADAPTER_FILE).read_bytes()
    np.testing.assert_array_equal(tuned_logits(base, tmp_path / "back"), tuned_logits(base, adapter))
    assert found.lora == LoraSettings(5, 1.7, 0.1, 1, ("mlp.down_proj", "self_attn.q_proj"))
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert (config["target_modules"], config["layers_to_transform"]) == (["down_proj", "q_proj"], [1])
    assert (config["base_model_name_or_path"], config["use_dora"]) == ("owner/base", method == "dora")


def test_the_report_compares_what_was_opened_again_with_the_tuned_model(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(base, tmp_path / "adapter")
    report, said = exported(base, adapter, tmp_path / "out")
    assert read_record(tmp_path / "out" / EXPORT_REPORT, ExportReport) == report
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted((CONFIG, WEIGHTS, EXPORT_REPORT))
    assert report.written.divergence < 1e-6 < report.base.divergence
    assert (report.written.same_answers, report.rows, report.stop_ids) == (1.0, 6, (0, 7))
    assert report.written.loss == pytest.approx(report.tuned.loss, abs=1e-5)
    assert said[-1].endswith("passes")


def test_an_imported_adapter_is_fused_and_opened_by_mlx_lm(base: Path, tmp_path: Path) -> None:
    from mlx_lm import load

    imported(written_by_peft(tmp_path / "peft"), base, tmp_path / "own")
    expected = tuned_logits(base, tmp_path / "own")
    theirs = load(str(base), adapter_path=str(tmp_path / "own"))[0](mx.array(IDS))
    np.testing.assert_allclose(np.array(theirs), expected, atol=1e-4, rtol=1e-4)
    fuse_adapter(ExportJob(base, tmp_path / "own", tmp_path / "fused", rows(6, 2), 256, 2**30), print, FLOAT)
    np.testing.assert_allclose(consumer_logits(tmp_path / "fused"), expected, atol=1e-4, rtol=1e-4)


def pair_of(folder: Path, stem: str) -> tuple[np.ndarray, np.ndarray]:
    arrays = load_arrays(folder / WEIGHTS)
    return np.array(arrays[f"{stem}.lora_A.weight"]), np.array(arrays[f"{stem}.lora_B.weight"])


@pytest.mark.parametrize(("config", "scale"), [({}, 1.5), ({"use_rslora": True}, 4.5 / math.sqrt(3))])
def test_scales_are_peft_s(base: Path, config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    source = written_by_peft(tmp_path / "peft", **config)
    imported(source, base, tmp_path / "own")
    before, after = weights_of(base), weights_of(base, tmp_path / "own")
    for path, weight in before.items():
        expected = weight
        if path.endswith(("q_proj", "down_proj")):
            a, b = pair_of(source, f"base_model.model.{path}")
            expected = weight + scale * b @ a
        np.testing.assert_allclose(after[path], expected, atol=1e-4, err_msg=path)


def test_an_adapter_of_lower_blocks_alone_is_refused(base: Path, tmp_path: Path) -> None:
    def lower(arrays: Arrays) -> Arrays:
        return {name: value for name, value in arrays.items() if ".layers.0." in name}

    with pytest.raises(ModelError, match=r"adapter has no weights for model\.layers\.1"):
        imported(written_by_peft(tmp_path / "peft", lower), base, tmp_path / "own")


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


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices is"),
        ({"lora_bias": True}, "lora_bias is true"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication is"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"use_qalora": True}, "use_qalora is true"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', which changes the base"),
        ({"init_lora_weights": "olora"}, "'olora', which changes the base"),
        ({"init_lora_weights": "loftq"}, "'loftq', which changes the base"),
        ({"of_tomorrow": {"a": 1}}, "of_tomorrow is"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"r": 0}, "r is 0"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": 9}}, "alpha_pattern is"),
        ({"peft_type": None, "fine_tune_type": "lora"}, "peft_type is None"),
    ],
)
def test_a_setting_without_a_counterpart_is_refused_by_name(
    base: Path, config: dict[str, Any], match: str, tmp_path: Path
) -> None:
    source = written_by_peft(tmp_path / "peft")
    (source / CONFIG).write_text(json.dumps({**PLAIN, **config}))
    with pytest.raises(ModelError, match=match):
        imported(source, base, tmp_path / "own")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peft"]


@pytest.mark.parametrize("start", [False, "gaussian", "eva", "orthogonal", "mica"])
def test_beginnings_that_leave_the_base_alone_are_taken(base: Path, start: object, tmp_path: Path) -> None:
    imported(written_by_peft(tmp_path / "peft", init_lora_weights=start), base, tmp_path / "own")


def with_key(key: str, *shape: int) -> Change:
    return lambda arrays: {**arrays, key: np.ones(shape)}


def without(part: str) -> Change:
    return lambda arrays: {name: value for name, value in arrays.items() if part not in name}


def zeroed(part: str, value: float = 0.0) -> Change:
    return lambda arrays: {name: each * value if part in name else each for name, each in arrays.items()}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (with_key("base_model.model.model.embed_tokens.lora_embedding_A", 3, 9), "no linear layer .*embed_tokens"),
        (with_key("base_model.model.lm_head.lora_A.weight", 3, 64), "no linear layer .*lm_head"),
        (with_key(f"{BLOCKS}.0.self_attn.q_proj.base_layer.bias", 64), "no linear layer .*base_layer.bias"),
        (
            with_key(f"{BLOCKS}.0.input_layernorm.modules_to_save.weight", 64),
            "no linear layer .*modules_to_save.weight",
        ),
        (lambda arrays: {name.replace("layers.1", "layers.7"): v for name, v in arrays.items()}, "layers.7"),
        (without("layers.1.mlp.down_proj.lora_B"), r"is incomplete: .*layers\.1\.mlp\.down_proj"),
        (zeroed("lora_B"), "changes nothing"),
        (zeroed("lora_A", math.nan), "infinite numbers or NaN"),
        (lambda arrays: {name: v[:2] if "lora_A" in name else v[:, :2] for name, v in arrays.items()}, "rank of 3"),
        (with_key(f"{BLOCKS}.0.mlp.up_proj.lora_magnitude_vector", 128), "is incomplete: .*up_proj"),
    ],
)
def test_arrays_without_a_counterpart_are_refused_by_name(
    base: Path, change: Change, match: str, tmp_path: Path
) -> None:
    source = written_by_peft(tmp_path / "peft", change)
    with pytest.raises(ModelError, match=match):
        imported(source, base, tmp_path / "own")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peft"]


def test_a_wrong_base_is_named_with_both_shapes(tmp_path: Path) -> None:
    wider = build_model(tmp_path / "wider", **{**TINY, "hidden_size": 128, "num_attention_heads": 4})
    with pytest.raises(ModelError, match="does not fit this base, or is incomplete") as caught:
        imported(written_by_peft(tmp_path / "peft"), wider, tmp_path / "own")
    assert "(3, 128)" in str(caught.value)
    assert "(3, 64)" in str(caught.value)
    mixture = build_model(tmp_path / "mixture", model_type="mixtral", **SMALL, **FAMILIES["mixtral"])
    with pytest.raises(ModelError, match="Layers of mixtral may have other names"):
        imported(tmp_path / "peft", mixture, tmp_path / "own")
    several = build_model(tmp_path / "several", **TINY)
    config = json.loads((several / "config.json").read_text())
    (several / "config.json").write_text(json.dumps({**config, "model_type": "gemma3", "text_config": config}))
    with pytest.raises(ModelError, match="Layers of gemma3 may have other names"):  # of its text part: llama
        imported(tmp_path / "peft", several, tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_the_families_that_are_named_to_people_are_those_that_are_taken() -> None:
    text = (ROOT / "docs" / "peft.md").read_text(encoding="utf-8")
    named = text[text.index("llama,") : text.index(". [How far")]
    assert sorted(re.findall(r"\w+", named)) == sorted(SAME_NAMES)


def test_folders_that_are_not_whole_are_named(base: Path, tmp_path: Path) -> None:
    source = written_by_peft(tmp_path / "peft")
    with pytest.raises(ConfigError, match="already exists"):
        imported(source, base, source)
    weights = source / WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-50])
    with pytest.raises(ModelError, match="damaged or incomplete"):
        imported(source, base, tmp_path / "own")
    weights.rename(source / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"incomplete: adapter_model\.safetensors is missing") as caught:
        imported(source, base, tmp_path / "own")
    assert "safe_serialization=True" in str(caught.value)
    (source / CONFIG).write_text("{")
    with pytest.raises(ModelError, match="configuration cannot be read"):
        imported(source, base, tmp_path / "own")
    with pytest.raises(ModelError, match="No such file"):
        imported(tmp_path / "nowhere", base, tmp_path / "own")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peft"]


def test_a_full_disk_leaves_nothing(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, source = adapter_of(base, tmp_path / "adapter"), written_by_peft(tmp_path / "peft")
    filled = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("safetrain.engine.exchange.peft.save_arrays", filled)
    monkeypatch.setattr("safetrain.engine.weight_files.save_arrays", filled)
    with pytest.raises(DiskFullError, match="nothing was written"):
        exported(base, adapter, tmp_path / "out")
    with pytest.raises(DiskFullError, match="nothing was written"):
        imported(source, base, tmp_path / "own")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "peft"]


def test_what_peft_cannot_hold_is_not_exported(base: Path, tmp_path: Path) -> None:
    whole = adapter_of(base, tmp_path / "full", "full")
    zeros = adapter_of(base, tmp_path / "zeros", size=0.0)
    adapter = adapter_of(base, tmp_path / "adapter")
    other = build_model(tmp_path / "other", seed=4, **TINY)
    kind: dict[str, Any] = {"model_type": "qwen3_moe", **SMALL, **FAMILIES["qwen3_moe"]}
    mixture = build_model(tmp_path / "mixture", **kind)
    names = sorted(path.name for path in tmp_path.iterdir())
    for where, folder, match in (
        (base, whole, "has whole weights"),
        (base, zeros, "changes nothing"),
        (other, adapter, "trained on another base"),
        (base, tmp_path / "none", "No trained adapter"),
        (mixture, adapter_of(mixture, tmp_path / "experts"), "Layers of qwen3_moe may have other names"),
    ):
        with pytest.raises(ModelError, match=match):
            exported(where, folder, tmp_path / "out")
    with pytest.raises(ModelError, match="mixture's experts"):
        require_pairs(load_arrays(tmp_path / "experts" / ADAPTER_FILE), tmp_path)
    with pytest.raises(ConfigError, match="already exists"):
        exported(base, adapter, base)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "experts"])


def test_targets_are_as_short_as_is_unambiguous() -> None:
    linear = {f"model.layers.{b}.{name}": b for b in (0, 1) for name in ("a.o_proj", "b.o_proj", "a.q_proj")}

    def of(*ends: str) -> tuple[list[str], list[int] | None]:
        return targets_of({path for path in linear if path.endswith(ends)}, linear)

    assert of("o_proj") == (["o_proj"], None)
    assert of("1.a.o_proj", "1.b.o_proj") == (["o_proj"], [1])
    assert of("a.o_proj", "q_proj") == (["a.o_proj", "a.q_proj"], None)
    assert of("0.a.o_proj", "1.a.q_proj") == (["model.layers.0.a.o_proj", "model.layers.1.a.q_proj"], None)


def test_peft_itself_computes_dora_on_a_base_of_4_bits(tmp_path: Path) -> None:
    base = build_model(tmp_path / "base", bits=4, **TINY)
    adapter = adapter_of(base, tmp_path / "adapter", "dora", lora=LORA)
    exported(base, adapter, tmp_path / "out")
    of_peft = logits_of_peft(dequantized_base(base, tmp_path / "float"), tmp_path / "out", IDS)
    np.testing.assert_allclose(of_peft, tuned_logits(base, adapter), atol=1e-3)
