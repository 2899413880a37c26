"""A small model of every architecture that mlx-lm has, with random weights. No download, no meaning.

The sizes and what a family wants beside them: families.yaml.
"""

import dataclasses
import importlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.support.random_models import EMBEDDED

SPEC = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SIZES: dict[str, Any] = {name: value for value, names in SPEC["sizes"] for name in names.split()}
OWN: dict[str, dict[str, Any]] = SPEC["own"]
TEXT: dict[str, tuple[str, str]] = SPEC["text"]
ROUNDED = ("quant_key_scale", "quant_value_scale")  # steps to which AFM rounds its keys and values
FORMATS = ("prism_hadamard_qwen35",)  # of quantized weights, whose files say how they were quantized
DENSE = ("qwen3_5",)  # where the number of experts is none by itself


def families() -> list[str]:
    """Every architecture that mlx-lm has, by the name of its file."""
    folder = Path(importlib.util.find_spec("mlx_lm").submodule_search_locations[0]) / "models"  # type: ignore
    sources = {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.py")}
    found = sorted(name for name, text in sources.items() if "class ModelArgs" in text and "class Model(" in text)
    return [name for name in found if name not in FORMATS]


def config_of(family: str) -> dict[str, Any]:
    """A small config.json of the family."""
    if family not in TEXT:
        return {"model_type": family, **_arguments(family, "ModelArgs", {**OWN.get(family, {})})}
    inner, name = TEXT[family]
    own = {**OWN.get(inner, {}), **OWN.get(family, {})}
    text = {"model_type": inner, **_arguments(inner, name, own)}
    if family in DENSE:
        text = {key: value for key, value in text.items() if "expert" not in key}
    return {"model_type": family, "vocab_size": SIZES["vocab_size"], "text_config": text}


def _arguments(module: str, name: str, own: dict[str, Any]) -> dict[str, Any]:
    """Sizes for every argument that has one, false for what may be true, what is the family's own."""
    kind = getattr(importlib.import_module(f"mlx_lm.models.{module}"), name)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name in own:
            found[field.name] = own[field.name]
        elif field.name in SIZES:
            found[field.name] = SIZES[field.name]
        elif needed and field.type in (bool, "bool"):
            found[field.name] = field.name in ("norm_topk_prob", "tie_word_embeddings", "use_qk_norm", "use_conv_bias")
        elif needed and field.name == "mlp_only_layers":
            found[field.name] = []
    left = [key for key, value in own.items() if value is None and key in found]
    return {key: value for key, value in found.items() if key not in left or key in ("rope_scaling",)}


def build_family(folder: Path, family: str, **changes: Any) -> Path:
    """Write a small model of the family, with the embedded one's tokenizer; what starts as zero is small numbers."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map, tree_unflatten
    from mlx_lm.utils import _get_classes

    config = {**config_of(family), **changes}
    folder.mkdir(parents=True)
    mx.random.seed(3)
    architecture, arguments = _get_classes(config)
    model = architecture(arguments.from_dict(config))
    model.update(tree_map(_stirred, model.parameters()))
    for name, value in tree_flatten(model.parameters()):
        if name.endswith(ROUNDED):
            model.update(tree_unflatten([(name, 0.02 * mx.ones_like(value))]))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, folder / file)
    return folder


def _stirred(weight: Any) -> Any:
    """Random numbers on top: a router of zeros would choose by chance, and a layer of zeros has no gradient."""
    import mlx.core as mx

    floating = mx.issubdtype(weight.dtype, mx.floating)
    return weight + (0.02 * mx.random.normal(weight.shape)).astype(weight.dtype) if floating else weight
