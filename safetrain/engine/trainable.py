"""Makes a base model trainable: its trainable part, what computes its gradients, its optimizer."""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.memory.estimate import require_trainable
from safetrain.core.recorder import Recorder
from safetrain.core.records.schema import PRETRAIN
from safetrain.core.records.settings import ALL_LINEAR, LoraSettings, TrainSettings, is_target
from safetrain.engine.adapters import LINEAR, add_layers, measure_rows
from safetrain.engine.backend import device
from safetrain.engine.checkpointing import checkpoint
from safetrain.engine.model import BaseModel, open_base
from safetrain.engine.update import Gradients, Tracer
from safetrain.engine.upstream.layers import EXPERTS, without_adapter
from safetrain.engine.upstream.loading import is_quantized, training_refusal


def prepare(
    base: Path, settings: TrainSettings, recorder: Recorder | None = None, tracer: Tracer | None = None
) -> tuple[BaseModel, Gradients]:
    """Open the base as the settings want it, its trainable part in place, and what computes its gradients.

    Raises ModelError for a family that is not trained.
    """
    if refusal := training_refusal(base):
        raise ModelError(f"{refusal}.", where=str(base), do="train a model of another family")
    model = open_base(base, dequantize=settings.dequantize_base, compute_dtype=settings.compute_dtype)
    return model, equip(model, settings, recorder, tracer)


def equip(
    model: BaseModel, settings: TrainSettings, recorder: Recorder | None = None, tracer: Tracer | None = None
) -> Gradients:
    """Put a model's trainable part in place; returns what computes its gradients."""
    make_trainable(model, settings.method, settings.lora, settings.seed)
    is_whole = settings.method == PRETRAIN
    if settings.gradient_checkpointing:
        for block in model.module.layers[0 if is_whole else -settings.lora.num_layers :]:
            checkpoint(block)
    dtype = _pass_dtype(settings) if is_whole else None
    return Gradients(model, settings.seed, recorder=recorder, tracer=tracer, whole_model=dtype)


def _pass_dtype(settings: TrainSettings) -> mx.Dtype:
    """What a model that is trained whole computes in."""
    name = settings.compute_dtype
    return mx.float32 if name is None or device().computes_in_float32 else getattr(mx, name)


def make_trainable(model: BaseModel, method: str, lora: LoraSettings, seed: int) -> None:
    """Put LoRA or DoRA layers on the linear layers that ``lora`` names, or unfreeze blocks (full) or all (pretrain).

    Only the top ``lora.num_layers`` blocks train, except in pretraining. Trained weights are float32 whatever the
    base is; adapters' initial values depend only on ``seed``. Raises ConfigError or ModelError where there is nothing
    to train.
    """
    blocks = model.module.layers
    if lora.num_layers > len(blocks):
        raise ConfigError(f"lora.num_layers is {lora.num_layers}.", expected=f"at most {len(blocks)}, the model's")
    mx.random.seed(seed)
    if method == PRETRAIN:
        _unfreeze(model, [model.module])
    elif method == "full":
        _unfreeze(model, blocks[-lora.num_layers :])
    else:
        names = set(_target_names(model, lora.targets))
        for block in blocks[-lora.num_layers :]:
            add_layers(block, names, method, lora, model.randomness, model.lengths)
    if not tree_flatten(model.module.trainable_parameters()):
        raise ModelError(f"There is nothing to train in this model's {', '.join(lora.targets)}.")
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
    measure_rows(model.module)


def adapted_names(model: BaseModel) -> list[str]:
    """Full names inside a block of the layers that carry adapters."""
    return sorted({name for block in model.module.layers for name, m in block.named_modules() if "lora_a" in m})


def _unfreeze(model: BaseModel, blocks: list[Any]) -> None:
    require_trainable("full", quantized=is_quantized(model.module))
    for block in blocks:
        block.unfreeze()
        block.update(tree_map(lambda w: w.astype(mx.float32), block.trainable_parameters()))


def _target_names(model: BaseModel, targets: tuple[str, ...]) -> list[str]:
    """Full names inside a block (self_attn.q_proj) of the layers that ``targets`` names in full or by their end."""
    names = sorted(
        {
            name
            for block in model.module.layers
            for name, m in block.named_modules()
            if isinstance(m, (*LINEAR, *EXPERTS))
        }
    )
    left_out = set[str]().union(*(without_adapter(block) for block in model.module.layers))
    names = [name for name in names if name not in left_out]
    if targets == (ALL_LINEAR,):
        return names
    unmatched = [t for t in targets if not any(is_target(name, t) for name in names)]
    if unmatched:
        raise ConfigError(
            f"lora.targets names layers that the model does not have: {', '.join(unmatched)}.",
            expected=f"some of {', '.join(names)}, or null for all",
        )
    return [name for name in names if any(is_target(name, target) for target in targets)]
