"""What this engine leans on in mlx-lm is still so. A test that fails says which file of engine/upstream to look at."""

import importlib
import importlib.util
import inspect
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import sample_utils
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import base, cache, gated_delta, llama, switch_layers
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import _get_classes, dequantize_model, load_model

from safetrain.engine.upstream import adaptation
from safetrain.engine.upstream.adaptation import few_blocks, packed_attention, trunk_of
from safetrain.engine.upstream.family import build
from safetrain.engine.upstream.loading import READ_DIRECTLY
from tests.support.families import config_of
from tests.support.random_models import TINY

LLAMA: dict[str, Any] = {"model_type": "llama", **TINY, "vocab_size": 64, "rms_norm_eps": 1e-5}
MOVED = "mlx-lm has moved: see safetrain/engine/upstream/"


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


TAKEN = [
    (load_model, ["model_path", "lazy"], "loading.py"),
    (_get_classes, ["config"], "loading.py"),
    (dequantize_model, ["model"], "loading.py"),
    (switch_layers.QuantizedSwitchLinear.__call__, ["self", "x", "indices", "sorted_indices"], "loading.py"),
    (base.scaled_dot_product_attention, parameters(packed_attention), "adaptation.py"),
    (base.create_attention_mask, ["h", "cache", "window_size", "return_array"], "adaptation.py"),
    (cache.make_prompt_cache, ["model"], "generation.py"),
    (BatchGenerator.insert, ["self", "prompts", "max_tokens"], "generation.py"),
    (cache.can_trim_prompt_cache, ["cache"], "generation.py"),
    (cache.trim_prompt_cache, ["cache", "num_tokens"], "generation.py"),
    (sample_utils.make_sampler, ["temp"], "generation.py"),
    (linear_to_lora_layers, ["model", "num_layers", "config"], "loading.py"),
    (generate_step, ["prompt", "model", "stream", "max_tokens", "sampler"], "generation.py"),
    (gated_delta.gated_delta_update, ["q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "mask", "use_kernel"],
     "adaptation.py"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "expected", "file"), TAKEN)
def test_a_function_takes_what_it_is_given(function: Callable[..., Any], expected: list[str], file: str) -> None:
    assert parameters(function)[: len(expected)] == expected, f"{MOVED}{file}"


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
