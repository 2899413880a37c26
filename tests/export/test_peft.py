"""Adapters to PEFT: PEFT's own formula in NumPy, what is written to the last bit, and every refusal by name."""

import errno
import json
import re
from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from safetrain.core.errors import ConfigError, DiskFullError, ModelError
from safetrain.core.records.evaluation import EXPORT_REPORT, ExportReport
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage.files import read_record
from safetrain.engine.adapters import LINEAR, shape_of
from safetrain.engine.model import open_base
from safetrain.engine.weight_files import ADAPTER_FILE, apply_adapter, load_arrays
from safetrain.export.comparison import ExportJob
from safetrain.export.peft import CONFIG, SAME_NAMES, THEIRS, WEIGHTS, export_peft
from tests.conftest import ROOT
from tests.engine.test_architectures import FAMILIES, SMALL
from tests.engine.test_training import rows
from tests.export.test_fuse import adapter_of
from tests.support.random_models import TINY, build_model

pytestmark = pytest.mark.usefixtures("memory_limit")
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("peft") / "base", **TINY)


def weights_of(base: Path, adapter: Path | None = None) -> Arrays:
    """Every linear layer of the model's blocks as one matrix, by path."""
    model = open_base(base, dequantize=True)
    linear = {path: layer for path, layer in model.module.named_modules() if isinstance(layer, LINEAR)}
    shapes = {path: shape_of(layer) for path, layer in linear.items() if ".layers." in path}
    if adapter is not None:
        apply_adapter(model, adapter)
    layers = dict(model.module.named_modules())
    return {path: np.array(layers[path](mx.eye(inputs))).T for path, (_, inputs) in shapes.items()}  # without biases


def by_peft(base: Path, folder: Path) -> Arrays:
    """W + alpha / r * B A of every layer, with DoRA brought to its lengths, from PEFT's files alone."""
    found, config = weights_of(base), json.loads((folder / CONFIG).read_text())
    scale = config["lora_alpha"] / config["r"]
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


@pytest.mark.parametrize(("method", "bits"), [("lora", None), ("dora", 4)])
def test_what_is_written_is_the_adapter_to_the_last_bit(method: str, bits: int | None, tmp_path: Path) -> None:
    """And what is exported is the tuned model by PEFT's own formula."""
    base = build_model(tmp_path / "base", bits=bits, **TINY)
    lora = LoraSettings(5, 1.7, 0.1, 1, ("q_proj", "mlp.down_proj"))
    adapter = adapter_of(base, tmp_path / "adapter", method, lora=lora)
    report, said = exported(base, adapter, tmp_path / "out")
    assert read_record(tmp_path / "out" / EXPORT_REPORT, ExportReport) == report
    assert report.written is not None and report.base is not None  # noqa: PT018
    assert report.written.divergence < 1e-6 < report.base.divergence
    assert (report.written.same_answers, report.rows, report.stop_ids) == (1.0, 6, (0, 7))
    assert said[-1].endswith("passes")
    arrays = {name: np.array(value) for name, value in load_arrays(tmp_path / "out" / WEIGHTS).items()}
    for name, value in load_arrays(adapter / ADAPTER_FILE).items():
        path, _, kind = name.rpartition(".")
        written = arrays.pop(f"base_model.model.{path}.{THEIRS[kind]}")
        assert (written.T if kind != "m" else written).tobytes() == np.array(value).tobytes()
    assert not arrays
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["target_modules"] == [f"model.layers.1.{name}" for name in ("mlp.down_proj", "self_attn.q_proj")]
    assert (config["base_model_name_or_path"], config["use_dora"]) == ("owner/base", method == "dora")
    require_same(weights_of(base, adapter), by_peft(base, tmp_path / "out"), weights_of(base))


def require_same(found: Arrays, expected: Arrays, before: Arrays) -> None:
    assert max(np.abs(expected[path] - before[path]).max() for path in before) > 0.05
    for path, weight in expected.items():
        np.testing.assert_allclose(found[path], weight, atol=1e-4, err_msg=path)


def test_the_families_that_are_named_to_people_are_those_that_are_taken() -> None:
    text = (ROOT / "docs" / "peft.md").read_text(encoding="utf-8")
    named = text[text.index("llama,") : text.index(". [How")]
    assert sorted(re.findall(r"\w+", named)) == sorted(SAME_NAMES)


def test_an_adapter_is_written_whole_or_not_at_all(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, out = adapter_of(base, tmp_path / "adapter"), tmp_path / "out"
    with pytest.raises(ConfigError, match="already exists"):
        exported(base, adapter, adapter)
    filled = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("safetrain.export.peft.save_arrays", filled)
    with pytest.raises(DiskFullError, match="nothing was written"):
        exported(base, adapter, out)
    assert not out.exists()


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
