"""What this engine leans on in mlx-lm is still so. A test that fails says which file of engine/upstream to look at."""

import importlib
import importlib.util
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models import base, llama

from safetrain.core.errors import ModelError
from safetrain.engine.upstream import adaptation
from safetrain.engine.upstream.adaptation import few_blocks, trunk_of
from safetrain.engine.upstream.family import build
from safetrain.engine.upstream.loading import READ_DIRECTLY, load
from tests.support.families import config_of
from tests.support.random_models import TINY

LLAMA: dict[str, Any] = {"model_type": "llama", **TINY, "vocab_size": 64, "rms_norm_eps": 1e-5}
MOVED = "mlx-lm has moved: see safetrain/engine/upstream/"


def test_files_use_our_functions_by_the_names_that_they_import() -> None:
    assert adaptation.replace(build(LLAMA)), f"{MOVED}adaptation.py"
    assert llama.scaled_dot_product_attention is adaptation.packed_attention
    assert llama.swiglu is adaptation.fast_swiglu
    assert base.scaled_dot_product_attention is adaptation.scaled_dot_product_attention, "mlx-lm's is as it was"
    assert adaptation.replace(build(LLAMA)), "once more"


def model_files() -> Iterator[types.ModuleType]:
    (folder,) = importlib.util.find_spec("mlx_lm.models").submodule_search_locations  # type: ignore[union-attr,misc]
    for file in sorted(Path(folder).glob("*.py")):
        try:
            yield importlib.import_module(f"mlx_lm.models.{file.stem}")
        except (ImportError, SystemExit):  # a package that is not installed
            continue


def test_every_attention_of_the_known_name_is_the_known_one() -> None:
    """Else a family's rows would be padded, without an error: in all of mlx-lm's files."""
    own = [each.__name__ for each in model_files()
           if getattr(each, "scaled_dot_product_attention", adaptation.packed_attention)
           not in (adaptation.scaled_dot_product_attention, adaptation.packed_attention)]  # fmt: skip
    assert not own, f"{MOVED}adaptation.py"


def test_every_linear_layer_whose_weight_a_model_reads_is_known() -> None:
    """Else its adapter would never be called, without an error: in all of mlx-lm's files."""
    on_top = {"output_attn_res_proj", "lm_head"}  # in no block, where no adapter goes
    (folder,) = importlib.util.find_spec("mlx_lm.models").submodule_search_locations  # type: ignore[union-attr,misc]
    for file in sorted(Path(folder).glob("*.py")):
        for code in re.split(r"^class ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            linear = set(re.findall(r"self\.(\w+) = nn\.Linear\(", code))
            read = set(re.findall(r"self\.(\w+)\.weight\b", code))
            assert linear & read <= READ_DIRECTLY | on_top, f"{MOVED}loading.py: {file.stem}"


def test_a_model_has_the_parts_that_are_asked_for() -> None:
    module = build(LLAMA)
    assert trunk_of(module) is module.model
    assert module.layers == module.model.layers, f"{MOVED}adaptation.py"
    with few_blocks(module) as fewer:
        assert fewer == (len(module.model.layers) < TINY["num_hidden_layers"])
        assert len(module.layers) == 1
    with few_blocks(build(config_of("muse_spark"))) as fewer:  # whose trunk has them as a property
        assert not fewer


def test_a_folder_that_mlx_lm_takes_for_a_pattern_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="rename the folder"):
        load(tmp_path / "my [new] model")
