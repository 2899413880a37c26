"""Real architectures from mlx-lm with random weights, in the Hugging Face layout. No download, no meaning."""

import json
import shutil
from pathlib import Path
from typing import Any

EMBEDDED = Path(__file__).resolve().parent.parent / "models" / "encyclopedia-3m"


def build_llama(folder: Path, *, bits: int | None = None, seed: int = 3, **changes: Any) -> Path:
    """Write a Llama like the embedded one, with the embedded tokenizer and ``changes`` to its config.json."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    folder.mkdir(parents=True)
    config = {**json.loads((EMBEDDED / "config.json").read_text()), **changes}
    config.pop("quantization")
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(config))
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
        config["quantization"] = {"group_size": 64, "bits": bits}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, folder / file)
    return folder
