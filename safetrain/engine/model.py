"""Opens a base model with mlx-lm, puts LoRA layers on it, reads and writes adapters in mlx-lm's format."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import dequantize_model, load_model

from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.files import replace_directory
from safetrain.core.model_files import ModelFiles
from safetrain.core.settings import ALL_LINEAR, LoraSettings, is_target
from safetrain.engine.arrays import save_arrays

LINEAR_TYPES = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)
ADAPTER_FILE, ADAPTER_CONFIG = "adapters.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class BaseModel:
    """A model ready for use, and the ids that end its answers."""

    module: Any  # an mlx_lm model: called with (rows, tokens) ids, returns (rows, tokens, vocabulary) logits
    eos_ids: frozenset[int]


def on_cpu() -> bool:
    """Whether mlx computes on the CPU here."""
    return mx.default_device().type == mx.DeviceType.cpu


def open_base(folder: Path, *, dequantize: bool) -> BaseModel:
    """Load the model in ``folder``; raises ModelError when mlx-lm cannot.

    With ``dequantize`` packed weights are unpacked once. On CPU everything that is unpacked becomes float32, because
    only float32 products go through the BLAS there (measured: 16-bit ones run at 6 GFLOP/s).
    """
    try:
        module, config = load_model(folder, lazy=True)
        if dequantize:
            module = dequantize_model(module)
        if on_cpu() and (dequantize or not _is_quantized(module)):
            module.update(tree_map(_to_float32, module.parameters()))
        mx.eval(module.parameters())
        eos_ids = _eos_ids(folder, config)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError) as error:
        raise ModelError(f"mlx-lm cannot load the model: {error}", where=str(folder)) from error
    module.freeze()
    module.eval()
    return BaseModel(module, eos_ids)


def unpack_to_answer(files: ModelFiles) -> bool:
    """Whether to unpack a quantized base to generate: on CPU, while that takes at most a quarter of the memory."""
    return on_cpu() and 4 * files.parameters <= psutil.virtual_memory().available // 4


def add_lora(model: BaseModel, lora: LoraSettings, seed: int) -> None:
    """Put LoRA layers on the linear layers that ``lora`` names; raises ConfigError when there are none such.

    Only the new parameters are trainable. Their initial values depend on ``seed`` alone.
    """
    layers = model.module.layers
    if lora.num_layers > len(layers):
        raise ConfigError(f"lora.num_layers is {lora.num_layers}.", expected=f"at most {len(layers)}, the model's")
    mx.random.seed(seed)
    linear_to_lora_layers(model.module, lora.num_layers, _lora_parameters(model, lora))
    if not tree_flatten(model.module.trainable_parameters()):
        raise ModelError(f"mlx-lm puts no LoRA layer on this model's {', '.join(lora.targets)}.")
    mx.eval(model.module.parameters())


def apply_adapter(model: BaseModel, folder: Path) -> None:
    """Put the adapter in ``folder`` on the model; raises ModelError when it is missing or does not fit."""
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_FILE) if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"There is no adapter: {', '.join(missing)} missing.", where=str(folder), do="train: dvc repro"
        )
    try:
        load_adapters(model.module, str(folder))
    except (ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelError(f"The adapter does not fit this model: {error}", where=str(folder)) from error
    model.module.eval()
    mx.eval(model.module.parameters())


def adapter_weights(model: BaseModel) -> dict[str, mx.array]:
    """The trainable parameters by name."""
    return dict(tree_flatten(model.module.trainable_parameters()))


def set_adapter_weights(model: BaseModel, weights: dict[str, mx.array]) -> None:
    """Put trainable parameters back; raises ModelError unless names and shapes are exactly those of the model."""
    own = adapter_weights(model)
    wrong = sorted(
        name for name in own.keys() | weights.keys()
        if name not in own or name not in weights or own[name].shape != weights[name].shape
    )  # fmt: skip
    if wrong:
        raise ModelError(f"{len(wrong)} adapter tensors do not fit the model, the first: {wrong[0]}.")
    model.module.update(tree_unflatten(list(weights.items())))


def save_adapter(model: BaseModel, lora: LoraSettings, base: Path, folder: Path) -> None:
    """Write the adapter as mlx-lm reads it, the folder whole or not at all."""
    config = {
        "fine_tune_type": "lora",
        "model": str(base),
        "num_layers": lora.num_layers,
        "lora_parameters": _lora_parameters(model, lora, adapted=True),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".adapter-") as scratch:
        temporary = Path(scratch) / "new"
        temporary.mkdir()
        save_arrays(temporary / ADAPTER_FILE, adapter_weights(model))
        (temporary / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        replace_directory(temporary, folder)


def _lora_parameters(model: BaseModel, lora: LoraSettings, *, adapted: bool = False) -> dict[str, Any]:
    """mlx-lm's description of the LoRA layers; without ``keys`` it adapts every linear layer."""
    parameters: dict[str, Any] = {"rank": lora.rank, "scale": lora.scale, "dropout": lora.dropout}
    if lora.targets != (ALL_LINEAR,):
        parameters["keys"] = _target_keys(model, lora.targets, adapted)
    return parameters


def _target_keys(model: BaseModel, targets: tuple[str, ...], adapted: bool) -> list[str]:
    """Full names inside a block (self_attn.q_proj) of the layers that ``targets`` names in full or by their end."""
    wanted: Callable[[Any], bool] = (
        (lambda m: hasattr(m, "lora_a")) if adapted else (lambda m: isinstance(m, LINEAR_TYPES))
    )
    blocks = model.module.layers
    names = sorted({name for block in blocks for name, module in block.named_modules() if wanted(module)})
    keys = {name for name in names for target in targets if is_target(name, target)}
    unmatched = [t for t in targets if not any(is_target(name, t) for name in names)]
    if unmatched:
        raise ConfigError(
            f"lora.targets names layers that the model does not have: {', '.join(unmatched)}.",
            expected=f"some of {', '.join(names)}, or null for all",
        )
    return sorted(keys)


def _is_quantized(module: Any) -> bool:
    return any(hasattr(part, "bits") for _, part in module.named_modules())


def _to_float32(value: mx.array) -> mx.array:
    return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value


def _eos_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Ids that end an answer: those of generation_config.json where it has some, else of config.json."""
    generation = folder / "generation_config.json"
    if generation.is_file():
        config = {**config, **json.loads(generation.read_text(encoding="utf-8"))}
    ids = config.get("eos_token_id")
    return frozenset(ids if isinstance(ids, list) else [ids] if ids is not None else [])
