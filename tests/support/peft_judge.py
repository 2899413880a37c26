"""PyTorch and PEFT as the judge of an exported adapter: the logits that they compute with it."""

import os
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from safetrain.engine.fuse import FLOAT, Folds, folded, plan_of, quantization_in
from safetrain.engine.upstream.loading import load, write_config
from safetrain.engine.weight_files import save_shards

needs_peft = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("peft") is None,
    reason="PyTorch and PEFT are not installed: the extra peft",
)


def logits_of_peft(base: Path, adapter: Path, ids: list[list[int]]) -> np.ndarray:
    """Logits (rows, tokens, vocabulary) in float32, on a float base."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import peft
    import torch
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        tuned = peft.PeftModel.from_pretrained(model, adapter).eval()
        return tuned(torch.tensor(ids)).logits.detach().numpy()


def dequantized_base(base: Path, folder: Path) -> Path:
    """A float copy of a quantized model, which transformers opens."""
    folder.mkdir()
    (module, config), nothing = load(base), Folds({}, {})
    plan = plan_of(module, nothing, FLOAT)
    write_config(module, quantization_in(config, module, plan), folder)
    save_shards(folder, folded(module, nothing, plan))
    return folder
