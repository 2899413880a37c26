"""Opens, builds, quantizes and writes models with mlx-lm, casts their weights, and adapts some of their layers.

Two kinds of layers need special care: experts, and layers whose weights a model reads without calling the layer.
"""

import copy
import glob
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import (
    DEFAULT_ALLOW_PATTERNS,
    dequantize_model,
    load_adapters,
    load_config,
    load_model,
    load_tokenizer,
    quantize_model,
    save,
    save_config,
)

from safetrain.core.errors import EngineError, ModelError
from safetrain.core.model.files import EMBEDDING, OTHER_PART, TEMPLATES, read_model_files
from safetrain.core.model.shapes import UNQUANTIZED, quantization_of
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage.files import json_object, write_folder, write_json
from safetrain.engine.backend import device
from safetrain.engine.cpu.kernels import PER_USE, dequantizing_twice
from safetrain.engine.layers import Dropout, Randomness, change_classes, dequantized
from safetrain.engine.upstream.family import (
    PARAMETERS,
    TEXT,
    as_computed,
    build,
    text_part,
    unread_setting,
    with_older_keys,
)

NO_MEMORY = re.compile(r"allocate|memory|maximum allowed buffer|Resource temporarily unavailable", re.IGNORECASE)
OWN_WEIGHTS = "use the config.json that belongs to the weights, or fetch the model again: safetrain fetch HUB_ID"
MOST_CHARACTERS = 300  # of a message of mlx-lm, which may list every tensor
UNFIT = ("Received ", "Missing ", "Expected shape")  # mlx's messages about weights that do not fit the model
HEAD = re.compile(r"(?:^|\.)lm_head\.weight$")
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
CLIPPED = ("prediction_coefs", "correction_coefs")  # by Gemma 3n's AltUp
# Layers of Gemma 3n and Kimi K3; tests/engine/test_upstream.py looks for more in all of mlx-lm's models.
READ_DIRECTLY = frozenset({*CLIPPED, "self_attention_res_proj", "mlp_res_proj"})
JAMBA = "Jamba cannot be trained: in mlx-lm its recurrence needs time and memory quadratic in a row's length"
FOREIGN = (  # that mlx-lm's code raises
    ValueError, LookupError, TypeError, AttributeError, OSError, RuntimeError, ArithmeticError, MemoryError,
    AssertionError, NameError, ImportError,
)  # fmt: skip
# Files that are written for a new model, not copied; and a copied file that may get more stop tokens.
OWN_FILES = ("config.json", "hf_quant_config.json", "*.index.json", "*.safetensors")
GENERATION = "generation_config.json"


@contextmanager
def errors_told(doing: str, where: Path | str = "") -> Iterator[None]:
    """Turn what mlx-lm raises while it opens a model into ModelError, or EngineError if memory runs out."""
    try:
        yield
    except FOREIGN as error:
        if NO_MEMORY.search(str(error)):
            raise EngineError(f"mlx ran out of memory, so it cannot {doing}: {error}", where=where) from error
        raise ModelError(f"mlx-lm cannot {doing}: {shorten(str(error), MOST_CHARACTERS)}", where=where) from error


def training_refusal(folder: Path) -> str:
    """Why this model family cannot be trained, read from its config.json; empty if it can."""
    return JAMBA if json_object(folder / "config.json").get("model_type") == "jamba" else ""


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Open a model as stored, without reading its weights; returns the model and its config.json."""
    if glob.escape(str(folder)) != str(folder):
        what, do = "mlx-lm cannot open a folder with [, * or ? in its path.", "rename the folder"
        raise ModelError(what, where=folder, do=do)
    config = load_config(folder)
    if setting := unread_setting(json.dumps(config, sort_keys=True)):
        what = f"{config['model_type']} in mlx-lm does not read {setting}, so it would compute another model."
        raise ModelError(what, where=folder / "config.json", do="use a model of another family")
    given, entry = with_older_keys(config), quantization_of(config)
    if entry and not entry.get("quant_method"):  # mlx-lm's own format, under either key
        given["quantization"] = entry
    try:
        module, config = load_model(folder, lazy=True, model_config=copy.deepcopy(given))  # some families change it
    except FOREIGN as error:
        method, family = entry.get("quant_method"), config["model_type"]
        if NO_MEMORY.search(str(error)) or not (method or str(error).startswith(UNFIT)):
            raise
        what = f"mlx-lm's {family} does not have these weights: {OWN_WEIGHTS}"  # checks show this line alone
        if method:
            what = f"The checkpoint is quantized by {method}, which mlx-lm cannot read for {family}: {UNQUANTIZED}"
        raise ModelError(what, where=folder, got=shorten(str(error), MOST_CHARACTERS)) from None
    config |= {key: given[key] for key in (TEXT, PARAMETERS) if key in given}
    if any(getattr(part, "global_scale", None) is not None for _, part in module.named_modules()):
        raise ValueError("experts quantized with a global scale (nvfp4) are not supported")
    return module, config


def require_own_head(module: Any, config: Mapping[str, Any], folder: Path) -> None:
    """Raise ModelError if the model ties its head to the embedding, and the folder has a different head."""
    names = [name for name, _ in tree_flatten(module.parameters())]
    if not text_part(config).get("tie_word_embeddings", True) or any(HEAD.search(name) for name in names):
        return
    stored: dict[str, Any] = {}
    for path in folder.glob("model*.safetensors"):
        stored |= mx.load(str(path))  # type: ignore[arg-type]
    heads = [value for name, value in stored.items() if HEAD.search(name) and not OTHER_PART.match(name)]
    embeddings = [value for name, value in stored.items() if EMBEDDING.search(name)]
    if heads and not any(mx.array_equal(heads[0], each).item() for each in embeddings):
        what = "The weights have a head (lm_head.weight) other than the embedding, but config.json ties the two."
        do = "set tie_word_embeddings to false in config.json, or remove lm_head.weight"
        raise ModelError(what, where=folder, do=do)


def rebuilt(config: dict[str, Any], arrays: dict[str, mx.array]) -> Any:
    """Build a model from its config.json and arrays; raises ValueError if arrays are missing or left over.

    Layers with scales among the arrays have 8 bits, in groups of 32 weights.
    """
    module = build(config)
    arrays = module.sanitize(arrays) if hasattr(module, "sanitize") else arrays
    nn.quantize(module, group_size=32, bits=8, class_predicate=lambda path, _layer: f"{path}.scales" in arrays)
    module.load_weights(list(arrays.items()))
    return module


def ready_to_compute(
    module: Any, *, dequantize: bool = False, compute_dtype: str | None = None, read: bool = True
) -> Any:
    """Read all weights in the backend's compute type, dequantized now or at each use.

    Without ``read`` they stay lazy.
    """
    here = device()
    if compute_dtype is not None and not here.on_cpu:
        cast(module, getattr(mx, compute_dtype))  # dequantizing after the cast is as exact as quantized products
    if dequantize:
        module = dequantize_model(module)
    if here.on_cpu:
        change_classes(module, {**PER_USE, QuantizedSwitchLinear: ExpertsDequantizedPerUse})
        # scales and biases keep their type, because mlx-lm dequantizes in it
        cast(module, mx.float32, lambda name: not name.endswith((".scales", ".biases")))
    if read:
        mx.eval(module.parameters())
    return module


def cast(module: Any, dtype: Any, may_cast: Callable[[str], bool] | None = None) -> None:
    """Cast floating parameters, also scales and biases of quantized weights, except those that mlx-lm never casts."""
    may: Any = may_cast or getattr(module, "cast_predicate", bool)

    def to_dtype(name: str, value: mx.array) -> mx.array:
        return value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) and may(name) else value

    module.update(tree_map_with_path(to_dtype, module.parameters()))


def plain_model(folder: Path, lora: LoraSettings, keys: list[str], *, in_float32: bool) -> Any:
    """Open a model with mlx-lm's own LoRA on the layers ``keys``. ``in_float32`` also dequantizes it."""
    module = load(folder)[0]
    if in_float32:
        module = dequantize_model(module)
        cast(module, mx.float32)
    complete(module)
    module.freeze()
    shape = {"rank": lora.rank, "scale": lora.scale, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(module, lora.num_layers, shape)
    return module


def quantize(source: Path, target: Path, bits: int, group_size: int) -> None:
    """Write ``source`` with ``bits`` per weight to ``target``; raises ModelError."""

    def write(folder: Path) -> None:
        with errors_told("convert the model", source):
            module, config = load(source)
            if (name := config.get("torch_dtype")) in ("float16", "bfloat16", "float32"):
                cast(module, getattr(mx, name))
            module, config = quantize_model(module, config, group_size, bits)
            save(folder, source, module, load_tokenizer(source), config)
        read_model_files(folder)

    write_folder(target, write)


def write_config(module: Any, config: dict[str, Any], folder: Path) -> None:
    """Write config.json of ``module``; "quantization" in ``config`` says how each layer is stored."""
    keeps_vision = "vision_tower" in getattr(module, "model", {})
    save_config(as_computed(config), folder / "config.json", keep_vision_config=keeps_vision)


def copy_beside(source: Path, folder: Path, stop_ids: Sequence[int]) -> None:
    """Copy a model's tokenizer, template and licence, and its generation settings with added stop tokens."""
    for file in sorted(source.iterdir()):
        is_usual = any(map(file.match, (*DEFAULT_ALLOW_PATTERNS, "LICENSE*", "NOTICE*")))
        if file.is_file() and is_usual and not any(map(file.match, OWN_FILES)):
            shutil.copyfile(file, folder / file.name)
    for file in source.glob(TEMPLATES):  # named ones
        (folder / file.parent.name).mkdir(exist_ok=True)
        shutil.copyfile(file, folder / file.parent.name / file.name)
    if not stop_ids:
        return
    settings = json_object(source / GENERATION)
    own = settings.get("eos_token_id", json_object(source / "config.json").get("eos_token_id"))
    ends = {*stop_ids, *(own if isinstance(own, list) else [own] if own is not None else [])}
    write_json(folder / GENERATION, {**settings, "eos_token_id": sorted(ends)})


def holds_adapters(module: Any, method: str) -> bool:
    """Whether mlx-lm can put adapters of ``method`` on a model: its DoRA does not support 3, 5 or 6 bits."""
    return method != "dora" or all(32 % getattr(layer, "bits", 32) == 0 for _, layer in module.named_modules())


def adapt_for_a_consumer(module: Any, adapter: Path) -> None:
    """Load the adapter folder onto a base as ``mlx_lm.load`` does with ``adapter_path``; raises ModelError."""
    with errors_told("open the adapter", adapter):
        load_adapters(module, str(adapter)).eval()
        mx.eval(module.trainable_parameters())


class ExpertsDequantizedPerUse(QuantizedSwitchLinear):
    """Quantized experts that dequantize at each use. Made by changing a layer's class, so names and weights stay."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        def plain(x: mx.array) -> mx.array:
            weight = dequantized(self).astype(x.dtype).swapaxes(-1, -2)
            return mx.gather_mm(x, weight, rhs_indices=indices, sorted_indices=sorted_indices)

        y = dequantizing_twice(plain)(x)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


class LoraExperts(LoRASwitchLinear):
    """mlx-lm's LoRA on the experts of a mixture, with this engine's dropout."""

    def __init__(self, linear: Any, lora: LoraSettings, source: Randomness) -> None:
        super().__init__(linear.input_dims, linear.output_dims, linear.num_experts, r=lora.rank, scale=lora.scale)
        self.linear, self.dropout = linear, Dropout(lora.dropout, source)


def without_adapter(block: Any) -> set[str]:
    """Names in ``block`` of layers that get no adapter: they are read directly, or mlx-lm adapts them itself (AFM)."""
    return {
        name
        for name, part in block.named_modules()
        if hasattr(part, "to_lora") or name.rpartition(".")[2] in READ_DIRECTLY
    }


def clip_once(module: Any) -> None:
    """Clip now what Gemma 3n clips in each pass: while a gradient is traced, its clipping would store placeholders."""
    parts = [part for _, part in module.named_modules() if all(name in part for name in CLIPPED)]
    for part in parts:
        limit = part.config.altup_coef_clip
        for name in CLIPPED:
            weight = part[name].weight.astype(mx.float32)
            part[name].weight = weight if limit is None else mx.clip(weight, -limit, limit)
    for part in parts:  # they share a config
        part.config.altup_coef_clip = None


def complete(module: Any) -> None:
    """Add an attribute that parts lack if their class skips the ``__init__`` of mlx's modules (RecurrentGemma)."""
    for _, part in module.named_modules():
        if "_no_grad" not in vars(part):
            part._no_grad = set()
