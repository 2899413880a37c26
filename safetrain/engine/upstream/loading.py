"""Model folders as mlx-lm opens, builds, quantizes and writes them, and the types of their numbers."""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.convert import convert
from mlx_lm.utils import (
    DEFAULT_ALLOW_PATTERNS,
    _get_classes,
    dequantize_model,
    load_adapters,
    load_model,
    save_config,
)

from safetrain.core.errors import EngineError, ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.storage.files import replace_directory
from safetrain.engine.backend import device
from safetrain.engine.cpu.kernels import dequantize_per_use
from safetrain.engine.layers import multiply_as_one_matrix
from safetrain.engine.upstream.layers import complete, dequantize_experts_per_use

NO_MEMORY = re.compile(r"allocate|memory|maximum allowed buffer|Resource temporarily unavailable", re.IGNORECASE)
NOT_TRAINED = {  # families, by the name in config.json
    "jamba": "in mlx-lm the time and memory of its recurrence grow with the square of a row's tokens"
}
FOREIGN = (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError)  # that mlx-lm raises
# Files that a new model writes itself, and one that it may add stop tokens to.
OWN_FILES = ("config.json", "hf_quant_config.json", "*.index.json", "*.safetensors")
GENERATION = "generation_config.json"


@contextmanager
def errors_told(doing: str, where: str = "") -> Iterator[None]:
    """Turn what mlx-lm raises while it opens a model into ModelError, or EngineError if memory runs out."""
    try:
        yield
    except FOREIGN as error:
        if NO_MEMORY.search(str(error)):
            raise EngineError(f"mlx ran out of memory, so it cannot {doing}: {error}", where=where) from error
        raise ModelError(f"mlx-lm cannot {doing}: {error}", where=where) from error
    except SystemExit:  # OLMo's first architecture, without ai2-olmo
        raise ModelError("mlx-lm needs a package for this model that is not installed.", where=where) from None


def training_refusal(folder: Path) -> str:
    """Why this model family cannot be trained, read from its config.json; empty if it can."""
    family = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", "")
    return f"{family} is not trained: {NOT_TRAINED[family]}" if family in NOT_TRAINED else ""


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """A model as stored, with its weights not read yet, and its config.json."""
    module, config = load_model(folder, lazy=True)
    return module, config


def build(config: dict[str, Any]) -> Any:
    """A model of this config.json with arbitrary weights."""
    architecture, arguments = _get_classes(config)
    return architecture(arguments.from_dict(config))


def rebuilt(config: dict[str, Any], arrays: dict[str, mx.array]) -> Any:
    """A model of this config.json that has these arrays; raises ValueError if these are not all of its arrays.

    Layers with scales have 8 bits, in groups of 32 weights.
    """
    plain = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    module = build(plain)
    arrays = module.sanitize(arrays) if hasattr(module, "sanitize") else arrays
    nn.quantize(module, group_size=32, bits=8, class_predicate=lambda path, _layer: f"{path}.scales" in arrays)
    module.load_weights(list(arrays.items()))
    return module


def ready_to_compute(module: Any, *, dequantize: bool = False, compute_dtype: str | None = None) -> Any:
    """Read all weights in the backend's compute type, dequantized now or at each use."""
    here = device()
    if compute_dtype is not None and not here.computes_in_float32:
        cast(module, getattr(mx, compute_dtype))  # dequantizing after that is as exact as the quantized products
    if dequantize:
        module = dequantize_model(module)
    if here.dequantizes_per_use:
        for name, part in module.named_modules():
            if getattr(part, "global_scale", None) is not None:  # nvfp4
                raise ValueError(f"{name} is quantized with a global scale, which cannot be dequantized on CPU")
        dequantize_per_use(module)
        dequantize_experts_per_use(module)
    else:
        multiply_as_one_matrix(module)
    if here.computes_in_float32:
        # but not scales and biases: dequantizing in their type is what mlx-lm computes
        cast(module, mx.float32, lambda name: not name.endswith((".scales", ".biases")))
    mx.eval(module.parameters())
    return module


def cast(module: Any, dtype: Any, may_cast: Callable[[str], bool] | None = None) -> None:
    """Cast floating parameters, also scales and biases of quantized weights, except those that mlx-lm never casts."""
    may: Any = may_cast or getattr(module, "cast_predicate", bool)

    def to_dtype(name: str, value: mx.array) -> mx.array:
        return value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) and may(name) else value

    module.update(tree_map_with_path(to_dtype, module.parameters()))


def is_quantized(module: Any) -> bool:
    """Whether any layer is quantized."""
    return any(hasattr(part, "bits") for _, part in module.named_modules())


def plain_model(folder: Path, *, in_float32: bool) -> Any:
    """The model as mlx-lm opens it, frozen; in float32 it is dequantized first."""
    module = load(folder)[0]
    if in_float32:
        module = dequantize_model(module)
        cast(module, mx.float32)
    complete(module)
    module.freeze()
    return module


def quantize(source: Path, target: Path, bits: int, group_size: int) -> None:
    """Write ``source`` with ``bits`` per weight to ``target``; raises ModelError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".convert-") as scratch:
        temporary = Path(scratch) / "new"
        try:
            convert(str(source), mlx_path=str(temporary), quantize=True, q_bits=bits, q_group_size=group_size)
        except (ValueError, KeyError, RuntimeError) as error:
            raise ModelError(f"mlx-lm cannot convert the model: {error}", where=str(source)) from error
        read_model_files(temporary)
        replace_directory(temporary, target)


def write_config(module: Any, config: dict[str, Any], folder: Path) -> None:
    """config.json of ``module``; "quantization" in it says how each layer is stored."""
    keeps_vision = "vision_tower" in getattr(module, "model", {})
    save_config(dict(config), folder / "config.json", keep_vision_config=keeps_vision)


def copy_beside(source: Path, folder: Path, stop_ids: Iterable[int]) -> None:
    """Copy a model's tokenizer, template and licence, and its generation settings with added stop tokens."""
    for file in sorted(source.iterdir()):
        is_usual = any(file.match(pattern) for pattern in (*DEFAULT_ALLOW_PATTERNS, "LICENSE*", "NOTICE*"))
        if file.is_file() and is_usual and not any(file.match(pattern) for pattern in OWN_FILES):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    path = folder / GENERATION
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    own = settings.get("eos_token_id", config.get("eos_token_id"))
    ends = set(own if isinstance(own, list) else [own] if own is not None else [])
    if not set(stop_ids) <= ends:
        settings["eos_token_id"] = sorted(ends | set(stop_ids))
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def holds_adapters(module: Any, method: str) -> bool:
    """Whether mlx-lm can put adapters of ``method`` on the module: its DoRA takes no base of 3, 5 or 6 bits."""
    return method != "dora" or all(32 % getattr(layer, "bits", 32) == 0 for _, layer in module.named_modules())


def adapt_for_a_consumer(module: Any, adapter: Path) -> None:
    """Load the adapter folder onto a base as ``mlx_lm.load`` does with ``adapter_path``; raises ModelError."""
    with errors_told("open the adapter", str(adapter)):
        load_adapters(module, str(adapter)).eval()
        mx.eval(module.parameters())
