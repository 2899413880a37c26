"""Real architectures from mlx-lm with random weights, in the Hugging Face layout. No download, no meaning."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

EMBEDDED = Path(__file__).resolve().parent.parent / "models" / "encyclopedia-3m"
TINY: dict[str, Any] = {  # quick to train
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def build_model(
    folder: Path, *, bits: int | None = None, bfloat16: bool = False, seed: int = 3, **changes: Any
) -> Path:
    """Write a model with the embedded one's config.json and tokenizer, ``changes`` made; ``model_type`` may be any."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_map

    folder.mkdir(parents=True)
    config = {**json.loads((EMBEDDED / "config.json").read_text()), **changes}
    config.pop("quantization")
    mx.random.seed(seed)
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    if bfloat16:
        model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
        config["quantization"] = {"group_size": 64, "bits": bits}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, folder / file)
    return folder
