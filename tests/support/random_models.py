"""Real architectures from mlx-lm with random weights, in the Hugging Face layout. No download, no meaning."""

import importlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safetrain.engine.model import BaseModel

EMBEDDED = Path(__file__).resolve().parents[2] / "models" / "encyclopedia-3m"
TINY: dict[str, Any] = {  # quick to train
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def build_model(
    folder: Path, *, bits: int | None = None, bfloat16: bool = False, seed: int = 3, group_size: int = 64,
    mode: Any = "affine", **more: Any,
) -> Path:  # fmt: skip
    """Write a model with the embedded one's tokenizer and config.json, but for ``more``; ``model_type`` may be any."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_map

    folder.mkdir(parents=True)
    embedded = json.loads((EMBEDDED / "config.json").read_text())
    config = {key: value for key, value in embedded.items() if key not in ("quantization", "hidden_act")} | more
    mx.random.seed(seed)
    model = unfilled(config)
    if bfloat16:
        model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    if bits:
        nn.quantize(model, group_size=group_size, bits=bits, mode=mode)
        config["quantization"] = {"group_size": group_size, "bits": bits, "mode": mode}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, folder / file)
    return folder


def unfilled(config: dict[str, Any]) -> Any:
    """A model of mlx-lm, in the module that it takes for this type: mistral is its llama."""
    from mlx_lm.utils import MODEL_REMAPPING

    kind = config["model_type"]
    architecture = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    return architecture.Model(architecture.ModelArgs.from_dict(config))


def open_skeleton(config: dict[str, Any]) -> "BaseModel":
    """A model of this config.json with weights that mean nothing, made in memory."""
    from safetrain.engine.model import BaseModel
    from safetrain.engine.upstream.adaptation import adapt
    from safetrain.engine.upstream.family import build
    from safetrain.engine.upstream.loading import ready_to_compute

    module = ready_to_compute(build(config))
    return BaseModel(module, frozenset(), *adapt(module))
