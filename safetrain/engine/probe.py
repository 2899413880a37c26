"""Asks mlx what it runs on, and whether a model can be trained: ``python -m safetrain.engine.probe [FOLDER [LIMIT]]``.

A separate process, because a failed load may kill it, under the memory limit of a training. Prints one JSON object.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetrain.core.data.row_order import Cursor
from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.errors import SafetrainError
from safetrain.core.memory.process import footprint_bytes
from safetrain.core.records.settings import ALL_LINEAR, LoraSettings
from safetrain.core.storage.files import in_one_line
from safetrain.engine.cpu.blas import load_fast_blas

if TYPE_CHECKING:
    from safetrain.engine.model import BaseModel  # loads mlx

GEMM_SIZE, TRIED_TOKENS = 1024, 8


def main() -> None:
    """Print the backend, and with a model folder whether one forward pass works and how long loading takes."""
    blas = load_fast_blas()
    import safetrain.engine.training  # noqa: F401 all that a training loads
    from safetrain.engine.backend import device, keep_to_room

    process_bytes = footprint_bytes(os.getpid())
    from safetrain.engine.dtypes import probed_dtype

    here = device()
    info, metal = here.facts, here.name == "metal"
    answer: dict[str, object] = {
        "backend": here.name,
        "device": str(info.get("device_name", "")),
        "working_set_bytes": int(info.get("max_recommended_working_set_size", 0)),
        "device_total_bytes": int(info.get("total_memory", 0)),
        "device_free_bytes": int(info.get("free_memory", 0)),
        "process_bytes": process_bytes,
        "blas": blas.name,
        "blas_is_fast": blas.fast,
        "blas_reason": blas.reason,
        "gemm_gflops": round(measure_gemm_gflops(), 1),
        "compute_dtype": probed_dtype(info, metal=metal, quantized=False),
        "quantized_compute_dtype": probed_dtype(info, metal=metal, quantized=True),
    }
    if len(sys.argv) > 1:
        keep_to_room(int(sys.argv[2]) if len(sys.argv) > 2 else None)
        answer |= load(Path(sys.argv[1]))
    print(json.dumps(answer))


def measure_gemm_gflops() -> float:
    """Speed of a float32 matrix product, the better of two."""
    import mlx.core as mx

    a, b = mx.ones((GEMM_SIZE, GEMM_SIZE)), mx.ones((GEMM_SIZE, GEMM_SIZE))
    mx.eval(a, b)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        mx.eval(a @ b)
        seconds.append(time.perf_counter() - began)
    return 2 * GEMM_SIZE**3 / min(seconds[1:]) / 1e9


def load(folder: Path) -> dict[str, object]:
    """Open the model as it is stored, run one token through it, then a few, and their gradient.

    Through few of its blocks, one of each kind at least, if it lets us: a large model takes long.
    """
    from safetrain.engine.model import open_base
    from safetrain.engine.upstream.loading import training_refusal
    from safetrain.engine.upstream.probing import few_blocks

    if refusal := training_refusal(folder):  # before it is opened, which takes long
        fault = {"load_error": refusal, "train_error": refusal}
        return {"loads": False, "load_seconds": 0.0, "trains": False, **fault}
    began = time.perf_counter()
    try:
        model = open_base(folder, dequantize=False)
        with few_blocks(model.module) as fewer:
            result = try_tokens(model, began)
        if not fewer or result.get("trains") is not False:
            return result
        del model  # two would not fit
        return try_tokens(open_base(folder, dequantize=False), began)
    except SafetrainError as error:
        return {"loads": False, "load_error": in_one_line(error), "load_seconds": 0.0}


def try_tokens(model: "BaseModel", began: float) -> dict[str, object]:
    """Whether one token goes through the model, and a gradient comes back."""
    import mlx.core as mx

    from safetrain.engine.upstream.loading import NO_MEMORY
    from safetrain.engine.upstream.probing import Refusal, asked

    try:
        logits = asked(model.module, mx.array([[0]]))
        finite = not bool(mx.any(mx.isnan(logits)).item())  # some models rule tokens out by minus infinity
        fault = "" if finite else "one token through the model gives NaN"
    except Refusal as error:
        if NO_MEMORY.search(str(error)):
            return {"loads": None}
        fault = f"one token does not go through the model: {error}"
    result = {"loads": not fault, "load_error": fault, "load_seconds": round(time.perf_counter() - began, 3)}
    if fault:
        return {**result, "trains": False, "train_error": fault}
    refusal = training_fault(model)
    if NO_MEMORY.search(refusal):
        return {**result, "trains": None}
    return {**result, "trains": not refusal, "train_error": refusal}


def training_fault(model: "BaseModel") -> str:
    """Why the model cannot be trained here; empty where it can."""
    from safetrain.engine.upstream.probing import Refusal

    try:
        ahead = looks_ahead(model.module)
    except Refusal as error:
        return f"{TRIED_TOKENS} tokens do not go through the model: {error}"
    return "its tokens see those that come after them, in mlx-lm" if ahead else gradient_fault(model)


def looks_ahead(module: Any) -> bool:
    """Whether the logits of a token depend on later ones, which are the labels."""
    import mlx.core as mx

    from safetrain.engine.upstream.probing import asked, tolerance_of

    row = list(range(1, TRIED_TOKENS + 1))
    logits = asked(module, mx.array([row, [*row[:-1], row[-1] + 1]]))[:, :-1]
    one, other = logits.astype(mx.float32)
    difference = mx.where(one == other, 0.0, mx.abs(one - other)).max()
    size = mx.where(mx.isfinite(one), mx.abs(one), 0.0).max()
    return bool((difference > tolerance_of(logits.dtype) * size).item())


def gradient_fault(model: "BaseModel") -> str:
    """Why no gradient comes through the blocks that the model has now; empty where one does."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from safetrain.engine.batches import update_at
    from safetrain.engine.layout import training_layout
    from safetrain.engine.selftest import settings_of
    from safetrain.engine.update import equip
    from safetrain.engine.upstream.probing import Refusal, refusals

    lora = LoraSettings(1, 1.0, 0.0, len(model.module.layers), (ALL_LINEAR,))
    settings = settings_of(lora, 1, TRIED_TOKENS)
    data = TokenRows.of([token_row(range(TRIED_TOKENS), [True] * TRIED_TOKENS)])
    try:
        gradients = equip(model, settings)
        model.module.train()
        update = update_at(data, Cursor(0, 0), 1, 1, training_layout(model, 1, data.inputs()))
        with refusals():
            loss, gradient = gradients.of(update, 0)
            mx.eval(loss, gradient)
    except SafetrainError as error:
        return error.what
    except Refusal as error:
        return f"mlx-lm's model has no gradient here: {error}"
    finite = all(bool(mx.all(mx.isfinite(part)).item()) for part in [loss, *(g for _, g in tree_flatten(gradient))])
    return "" if finite else f"the gradient of {TRIED_TOKENS} tokens is NaN"


if __name__ == "__main__":
    main()
