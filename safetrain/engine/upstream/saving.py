"""Model folders as mlx-lm writes, quantizes and opens them."""

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.convert import convert
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, load_adapters, save_config
from mlx_lm.utils import load as load_with_tokenizer

from safetrain.core.errors import ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.storage.files import replace_directory
from safetrain.engine.backend import device
from safetrain.engine.upstream.loading import errors_told

OWN_FILES = (
    "config.json",
    "hf_quant_config.json",
    "*.index.json",
    "*.safetensors",
)  # files that a new model writes itself
GENERATION = "generation_config.json"


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
    """Tokenizer, template and licence of a model, and its generation settings with further tokens that end answers."""
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


def logits_for_a_consumer(folder: Path, ids: list[int]) -> mx.array:
    """Logits (tokens, vocabulary) of a few tokens by the model that ``mlx_lm.load`` opens, with its tokenizer.

    In float32 where safetrain computes so: rounding to 16 bits in every layer would look like another model. Raises
    ModelError where it opens nothing.
    """
    with errors_told("open the model", str(folder)):
        module: Any = load_with_tokenizer(str(folder), lazy=True)[0]
        if device().computes_in_float32:
            module.set_dtype(mx.float32)
        logits = module(mx.array([ids]))[0].astype(mx.float32)
        mx.eval(logits)
        return logits


def holds_adapters(module: Any, method: str) -> bool:
    """Whether mlx-lm can put adapters of ``method`` on the module: its DoRA takes no base of 3, 5 or 6 bits."""
    return method != "dora" or all(32 % getattr(layer, "bits", 32) == 0 for _, layer in module.named_modules())


def adapt_for_a_consumer(module: Any, adapter: Path) -> None:
    """Put the adapter folder on a base as ``mlx_lm.load`` does with ``adapter_path``; raises ModelError."""
    with errors_told("open the adapter", str(adapter)):
        load_adapters(module, str(adapter)).eval()
        mx.eval(module.parameters())


def takes_bits(module: Any, group_size: int) -> list[str]:
    """Paths of the layers that mlx-lm would quantize in groups of ``group_size``."""
    may = getattr(module, "quant_predicate", None) or (lambda _path, _layer: True)
    return [
        path
        for path, layer in module.named_modules()
        if hasattr(layer, "to_quantized") and layer.weight.shape[-1] % group_size == 0 and may(path, layer)
    ]
