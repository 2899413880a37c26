"""An adapter to PEFT, by family: how far its logits are from the tuned model's, in float32.

    python -m benchmarks.bench_export_peft [family ...]

Small random models that transformers makes and both sides open. PyTorch and PEFT are needed: the extra `peft`.
"""

import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import show_result, write_result
from safetrain.engine.cpu.blas import load_fast_blas
from tests.support.random_models import EMBEDDED

load_fast_blas()  # before mlx
from safetrain.export.peft import SAME_NAMES  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
ASKED_FOR = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")  # first
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 32},
    "gemma4_text": {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 32, "num_hidden_layers": 6},
}
IDS = [[5, 9, 13, 21, 34, 55, 89, 144, 233, 8]]
HEADER = ["family", "largest logit", "base", "out: LoRA, top 2 blocks", "out: DoRA"]


def main(families: list[str]) -> None:
    """One table."""
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    notes = [
        "Largest difference of a logit, all in float32. Base: transformers' from mlx-lm's, without any adapter, which "
        "the others contain. Out: what `safetrain export peft` writes, opened by PEFT, from the tuned model. On 10 "
        "tokens."
    ]
    show = show_result if families else write_result
    rows: list[list[object]] = []
    for family in families or (*ASKED_FOR, *(name for name in SAME_NAMES if name not in ASKED_FOR)):
        rows.append(row_of(family))
        show("bench_export_peft", "Adapters to PEFT: logits beside the tuned model's", HEADER, rows, notes)


def row_of(family: str) -> list[object]:
    """Of one family, in a folder of its own."""
    import mlx.core as mx
    import torch
    import transformers

    from safetrain.engine.model import open_base

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = random_model(folder / "base", family)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        ours = np.array(open_base(base, dequantize=False).module(mx.array(IDS)))
        logits = theirs(torch.tensor(IDS)).logits.detach().numpy()
        found = [f"{np.abs(logits - ours).max():.1e}"]
        found += [f"{exported(base, folder / method, method):.1e}" for method in ("lora", "dora")]
    return [family, f"{np.abs(logits).max():.1f}", *found]


def random_model(folder: Path, family: str) -> Path:
    """As transformers writes it, in float32; the rotation's base also where mlx-lm reads it."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **OWN.get(family, {})})
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    rope = written.get("rope_parameters") or {}
    written["rope_theta"] = rope.get("full_attention", rope).get("rope_theta", 10000.0)
    path.write_text(json.dumps(written))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, folder / file)
    return folder


def exported(base: Path, folder: Path, method: str) -> float:
    """PEFT's logits from those of a random adapter."""
    import mlx.core as mx
    import peft
    import torch
    import transformers
    from mlx.utils import tree_map_with_path

    from safetrain.core.records.settings import LoraSettings
    from safetrain.engine.adapters import make_trainable
    from safetrain.engine.model import open_base
    from safetrain.engine.weight_files import adapter_arrays, save_adapter
    from safetrain.export.peft import write_peft

    def moved(name: str, value: Any) -> Any:
        return value if name.endswith("lora_a") else value + 0.1 * mx.random.normal(value.shape)

    model = open_base(base, dequantize=False)
    lora = LoraSettings(5, 1.7, 0.0, 2 if method == "lora" else len(model.module.layers), ("all-linear",))
    make_trainable(model, method, lora, 1)
    model.module.update(tree_map_with_path(moved, model.module.trainable_parameters()))
    save_adapter(model, method, lora, base, folder / "own")
    arrays = adapter_arrays(folder / "own")
    (folder / "peft").mkdir()
    write_peft(folder / "own", arrays, str(base), folder / "peft")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    logits = peft.PeftModel.from_pretrained(theirs, folder / "peft").eval()(torch.tensor(IDS)).logits.detach().numpy()
    return float(np.abs(np.array(model.module.eval()(mx.array(IDS))) - logits).max())


if __name__ == "__main__":
    main(sys.argv[1:])
