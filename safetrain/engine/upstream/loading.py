"""Models as mlx-lm opens and builds them, and the types of their numbers."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map, tree_map_with_path
from mlx_lm.utils import _get_classes, dequantize_model, load_model

from safetrain.core.errors import EngineError, ModelError
from safetrain.engine.backend import device
from safetrain.engine.cpu.kernels import dequantize_per_use
from safetrain.engine.layers import multiply_as_one_matrix
from safetrain.engine.upstream.layers import complete, dequantize_experts_per_use

NO_MEMORY = re.compile(r"allocate|memory|maximum allowed buffer|Resource temporarily unavailable", re.IGNORECASE)
REBUILT_GROUP = 32
NOT_TRAINED = {  # families, by the name in config.json
    "jamba": "in mlx-lm the time and memory of its recurrence grow with the square of a row's tokens"
}
FOREIGN = (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError)  # that mlx-lm raises


@contextmanager
def errors_told(doing: str, where: str = "") -> Iterator[None]:
    """Around calls of mlx-lm that open a model: what it raises becomes ModelError, or EngineError without memory."""
    try:
        yield
    except FOREIGN as error:
        if NO_MEMORY.search(str(error)):
            raise EngineError(f"mlx ran out of memory, so it cannot {doing}: {error}", where=where) from error
        raise ModelError(f"mlx-lm cannot {doing}: {error}", where=where) from error
    except SystemExit:  # OLMo's first architecture, without ai2-olmo
        raise ModelError("mlx-lm needs a package for this model that is not installed.", where=where) from None


def training_refusal(folder: Path) -> str:
    """Why a model of this family is not trained, read from its config.json; empty if it is."""
    family = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", "")
    return f"{family} is not trained: {NOT_TRAINED[family]}" if family in NOT_TRAINED else ""


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """A model as it is stored, nothing of it read yet, and its config.json."""
    module, config = load_model(folder, lazy=True)
    return module, config


def build(config: dict[str, Any], *, bfloat16: bool) -> Any:
    """A model of this config.json with weights that mean nothing, in float32 or bfloat16, quantized if it says so."""
    architecture, arguments = _get_classes(config)
    module: Any = architecture(arguments.from_dict(config))
    if bfloat16:
        module.update(tree_map(lambda weight: weight.astype(mx.bfloat16), module.parameters()))
    if quantization := config.get("quantization"):
        nn.quantize(module, group_size=quantization["group_size"], bits=quantization["bits"])
    return module


def rebuilt(config: dict[str, Any], arrays: dict[str, mx.array]) -> Any:
    """A model of this config.json that has these arrays; raises ValueError if these are not all of its arrays.

    A layer's scales say how many bits it has, in groups of ``REBUILT_GROUP`` weights.
    """
    plain = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    module = build(plain, bfloat16=False)
    arrays = module.sanitize(arrays) if hasattr(module, "sanitize") else arrays

    def bits_of(path: str, _layer: Any) -> bool | dict[str, int]:
        if f"{path}.scales" not in arrays:
            return False
        words, groups = (arrays[f"{path}.{kind}"].shape[-1] for kind in ("weight", "scales"))
        return {"group_size": REBUILT_GROUP, "bits": words * 32 // (groups * REBUILT_GROUP)}

    nn.quantize(module, group_size=REBUILT_GROUP, class_predicate=bits_of)
    module.load_weights(list(arrays.items()))
    return module


def ready_to_compute(module: Any, *, dequantize: bool = False, compute_dtype: str | None = None) -> Any:
    """Dequantized or taught to dequantize, in the type that the backend computes in; all weights are read."""
    here = device()
    if compute_dtype is not None and not here.computes_in_float32:
        cast(module, getattr(mx, compute_dtype))  # dequantizing after that is as exact as the quantized products
    if dequantize:
        module = dequantize_model(module)
    if here.dequantizes_per_use:
        _require_known_quantization(module)
        dequantize_per_use(module)
        dequantize_experts_per_use(module)
    else:
        multiply_as_one_matrix(module)
    if here.computes_in_float32:
        _cast_to_float32(module)
    mx.eval(module.parameters())
    return module


def cast(module: Any, dtype: Any) -> None:
    """Every floating parameter, scales and biases of quantized weights too, except those that mlx-lm never casts."""
    may_cast = getattr(module, "cast_predicate", lambda _name: True)

    def to_dtype(name: str, value: mx.array) -> mx.array:
        return value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) and may_cast(name) else value

    module.update(tree_map_with_path(to_dtype, module.parameters()))


def _cast_to_float32(module: Any) -> None:
    """All but scales and biases of quantized weights: dequantizing in their type is what mlx-lm computes."""

    def to_float32(name: str, value: mx.array) -> mx.array:
        quantized = name.endswith((".scales", ".biases"))
        return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) and not quantized else value

    module.update(tree_map_with_path(to_float32, module.parameters()))


def is_quantized(module: Any) -> bool:
    """Whether any layer is quantized."""
    return any(hasattr(part, "bits") for _, part in module.named_modules())


def _require_known_quantization(module: Any) -> None:
    """Raise ValueError for weights with a global scale (nvfp4), which would be dequantized wrong."""
    scaled = [name for name, part in module.named_modules() if getattr(part, "global_scale", None) is not None]
    if scaled:
        raise ValueError(f"{scaled[0]} is quantized with a global scale, which cannot be dequantized on CPU")


def plain_model(folder: Path, *, in_float32: bool) -> Any:
    """The model as mlx-lm opens it, frozen; in float32 it is dequantized first."""
    module = load(folder)[0]
    if in_float32:
        module = dequantize_model(module)
        cast(module, mx.float32)
    complete(module)
    module.freeze()
    return module
