"""Opens a base model with mlx-lm, makes a part of it trainable, reads and writes adapters in mlx-lm's format."""

import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from safetrain.core.errors import ConfigError, ModelError, SafetrainError
from safetrain.core.memory.estimate import require_trainable
from safetrain.core.memory.terms import WIDTH_STEP, padded
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.adapter_files import BASE_FINGERPRINT, Taught, write_taught
from safetrain.core.records.settings import ALL_LINEAR, LoraSettings, is_target
from safetrain.core.storage.files import replace_directory
from safetrain.engine.adapters import LINEAR, RowLengths, add_layers, measure_rows
from safetrain.engine.arrays import load_arrays, require_same, save_arrays
from safetrain.engine.backend import device
from safetrain.engine.batches import BatchLayout
from safetrain.engine.kernels import FUSED_BACKWARD_STEP, FusedAttention, fused_attention
from safetrain.engine.randomness import NoisyEmbedding, Randomness
from safetrain.engine.row_attention import Way
from safetrain.engine.shapes import plan_widths
from safetrain.engine.upstream.adaptation import Adaptation, adapt
from safetrain.engine.upstream.experts import EXPERTS
from safetrain.engine.upstream.loading import build, errors_told, is_quantized, load, ready_to_compute
from safetrain.engine.upstream.parts import head_size, replace_embedding
from safetrain.engine.upstream.weight_readers import without_adapter

ADAPTER_FILE, ADAPTER_CONFIG = "adapters.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class BaseModel:
    """A model ready for use, and the ids that end its answers."""

    module: Any  # an mlx_lm model: called with (rows, tokens) ids, returns (rows, tokens, vocabulary) logits
    eos_ids: frozenset[int]
    adaptation: Adaptation
    randomness: Randomness = field(default_factory=Randomness)
    lengths: RowLengths = field(default_factory=RowLengths)  # of the weights under DoRA

    @property
    def packs_rows(self) -> bool:
        """Whether rows of different lengths go through it as one list of tokens."""
        return not self.adaptation.packing_refusal


def layout_for(model: BaseModel, most_tokens: int) -> BatchLayout:
    """How rows are laid out here to be measured: on CPU without padding, one shard a core; on a GPU in rectangles."""
    here = device()
    if here.packs_without_padding:
        return BatchLayout(most_tokens, shards=here.shards, rectangles=not model.packs_rows)
    fused_step = 1 if _attention_kernels(model).forward else 0
    return BatchLayout(most_tokens, rectangles=True, way=Way.SOFTMAX, fused_step=fused_step)


def training_layout(model: BaseModel, batch_size: int, inputs: np.ndarray) -> BatchLayout:
    """How rows that feed ``inputs`` (rows,) tokens lie to be trained on, ``batch_size`` of the longest at once.

    On a GPU in rectangles of few shapes, so that few programs are compiled.
    """
    if device().packs_without_padding:
        return layout_for(model, batch_size * padded(int(inputs.max())))
    fused_step = FUSED_BACKWARD_STEP if _attention_kernels(model).backward else 0
    widths = plan_widths(inputs, long_step=fused_step or WIDTH_STEP)
    return BatchLayout(batch_size * widths[-1], rectangles=True, widths=widths, way=Way.SOFTMAX, fused_step=fused_step)


def _attention_kernels(model: BaseModel) -> FusedAttention:
    here = device()
    if not model.packs_rows or here.packs_without_padding:
        return FusedAttention(forward=False, backward=False)
    was_training = model.module.training
    model.module.eval()  # dropout has no random numbers yet
    in_float32 = model.module(mx.array([[0]])).dtype == mx.float32
    model.module.train(was_training)
    size, metal = head_size(model.module), here.name == "metal"
    return fused_attention(here.facts, metal=metal, head_size=size, in_float32=in_float32)


def open_base(folder: Path, *, dequantize: bool, compute_dtype: str | None = None) -> BaseModel:
    """Load the model in ``folder``; raises ModelError when mlx-lm cannot.

    A GPU computes in ``compute_dtype``, None for the type that the model is stored in.

    With ``dequantize`` quantized weights are dequantized once; on CPU they are otherwise dequantized at each use. There
    everything that is dequantized becomes float32, because only float32 products go through the BLAS (measured: 16-bit
    ones run at 6 GFLOP/s).
    """
    with errors_told("load the model", str(folder)):
        module, config = load(folder)
        eos_ids = _eos_ids(folder, config)
        module = ready_to_compute(module, dequantize=dequantize, compute_dtype=compute_dtype)
        return BaseModel(module, eos_ids, adapt(module))


def open_skeleton(config: dict[str, Any], *, float32: bool) -> BaseModel:
    """A model of this config.json with weights that mean nothing, made in memory: for measuring.

    ``float32``: its own type, else bfloat16. Raises ModelError when mlx-lm does not know the architecture.
    """
    with errors_told("build this architecture"):
        module = ready_to_compute(build(config, bfloat16=not float32))
        return BaseModel(module, frozenset(), adapt(module))


def dequantize_to_answer(files: ModelFiles) -> bool:
    """Whether to dequantize a quantized base to generate: on CPU, while that takes at most a quarter of the memory."""
    return device().dequantizes_per_use and 4 * files.parameters <= psutil.virtual_memory().available // 4


def make_trainable(model: BaseModel, method: str, lora: LoraSettings, seed: int) -> None:
    """Put LoRA or DoRA layers on the linear layers that ``lora`` names, or unfreeze whole blocks (``full``).

    Only the top ``lora.num_layers`` blocks are concerned. What is trained is float32 whatever the base is, and its
    initial values depend on ``seed`` alone. Raises ConfigError or ModelError when there is nothing to train.
    """
    blocks = model.module.layers
    if lora.num_layers > len(blocks):
        raise ConfigError(f"lora.num_layers is {lora.num_layers}.", expected=f"at most {len(blocks)}, the model's")
    mx.random.seed(seed)
    if method == "full":
        _unfreeze(model, blocks[-lora.num_layers :])
    else:
        names = set(_target_names(model, lora.targets))
        for block in blocks[-lora.num_layers :]:
            add_layers(block, names, method, lora, model.randomness, model.lengths)
    if not tree_flatten(model.module.trainable_parameters()):
        raise ModelError(f"There is nothing to train in this model's {', '.join(lora.targets)}.")
    mx.eval(model.module.parameters())


def add_embedding_noise(model: BaseModel, alpha: float) -> NoisyEmbedding:
    """Let the embedding add noise while training; raises ConfigError when the model's embedding is not found."""
    noise = replace_embedding(model.module, lambda embedding: NoisyEmbedding(embedding, alpha, model.randomness))
    if noise is None:
        raise ConfigError("train.neftune_alpha: this model's embedding is not called model.embed_tokens.")
    return noise


def apply_adapter(model: BaseModel, folder: Path) -> None:
    """Put the adapter in ``folder`` on the model; raises ModelError when it is missing or does not fit."""
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_FILE) if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"There is no adapter: {', '.join(missing)} missing.", where=str(folder), do="train: dvc repro"
        )
    weights = adapter_arrays(folder)
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        method = config.get("fine_tune_type", "lora")
        shape = config.get("lora_parameters", {})
        targets = tuple(shape.get("keys") or (ALL_LINEAR,))
        layers = config["num_layers"] if config["num_layers"] > 0 else len(model.module.layers)  # mlx-lm: -1 is all
        lora = LoraSettings(shape.get("rank", 1), shape.get("scale", 1.0), 0.0, layers, targets)
        make_trainable(model, method, lora, seed=0)
        set_adapter_weights(model, weights)
    except (ValueError, KeyError, AttributeError, RuntimeError, TypeError, SafetrainError) as error:
        raise ModelError(f"The adapter does not fit this model: {error}", where=str(folder)) from error
    model.module.freeze()
    model.module.eval()
    mx.eval(model.module.parameters())


def adapter_arrays(folder: Path) -> dict[str, mx.array]:
    """What is in an adapter's folder, by name; raises ModelError where its file is not whole."""
    path = folder / ADAPTER_FILE
    try:
        return load_arrays(path)
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            f"The adapter's weights cannot be read: {error}",
            where=str(path),
            do="the file is damaged or half written: train again, or copy it again from where it is whole",
        ) from error


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


def save_adapter(
    model: BaseModel,
    method: str,
    lora: LoraSettings,
    base: Path,
    folder: Path,
    taught: Taught | None = None,
    weights: Path | None = None,
    base_fingerprint: str = "",
) -> None:
    """Write the adapter as mlx-lm reads it, and what it was taught beside it; the folder whole or not at all.

    ``weights``: a file to copy, where they are not the model's own. ``base_fingerprint``: of the base's files. Raises
    TrainingError when the disk returns other numbers than it was given, OSError when it refuses.
    """
    shape: dict[str, Any] = {"rank": lora.rank, "scale": lora.scale, "dropout": lora.dropout}
    if lora.targets != (ALL_LINEAR,) or any(without_adapter(block) for block in model.module.layers):
        shape["keys"] = adapted_names(model)  # without keys mlx-lm takes every linear layer
    config = {"fine_tune_type": method, "model": str(base), "num_layers": lora.num_layers, "lora_parameters": shape}
    config |= {BASE_FINGERPRINT: base_fingerprint} if base_fingerprint else {}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".adapter-") as scratch:
        temporary = Path(scratch) / "new"
        temporary.mkdir()
        if weights is None:
            save_arrays(temporary / ADAPTER_FILE, adapter_weights(model))
            require_same(temporary / ADAPTER_FILE, adapter_weights(model))
        else:
            shutil.copyfile(weights, temporary / ADAPTER_FILE)
        (temporary / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if taught is not None:
            write_taught(temporary, taught)
        replace_directory(temporary, folder)


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


def _eos_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Ids that end an answer: those of generation_config.json where it has some, else of config.json."""
    generation = folder / "generation_config.json"
    if generation.is_file():
        config = {**config, **json.loads(generation.read_text(encoding="utf-8"))}
    ids = config.get("eos_token_id")
    return frozenset(ids if isinstance(ids, list) else [ids] if ids is not None else [])
