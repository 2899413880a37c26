"""Asks mlx what it runs on, and whether it opens a model: ``python -m safetrain.engine.probe [MODEL_FOLDER]``.

A process of its own, because a failed load may kill it. Prints one JSON object.
"""

import json
import os
import sys
import time
from pathlib import Path

from safetrain.core.process_memory import footprint_bytes
from safetrain.engine.blas import load_fast_blas

GEMM_SIZE = 1024


def main() -> None:
    """Print the backend, and with a model folder whether one forward pass works and how long loading takes."""
    blas = load_fast_blas()
    import mlx.core as mx

    cpu = mx.default_device().type == mx.DeviceType.cpu
    import safetrain.engine.training  # noqa: F401 all that a training loads

    process_bytes = footprint_bytes(os.getpid())
    info = mx.device_info() if not cpu else {}
    answer: dict[str, object] = {
        "backend": "cpu" if cpu else "metal" if mx.metal.is_available() else "cuda",
        "device": str(info.get("device_name", "")),
        "working_set_bytes": int(info.get("max_recommended_working_set_size", 0)),
        "device_total_bytes": int(info.get("total_memory", 0)),
        "device_free_bytes": int(info.get("free_memory", 0)),
        "process_bytes": process_bytes,
        "blas": blas.name,
        "blas_is_fast": blas.fast,
        "blas_reason": blas.reason,
        "gemm_gflops": round(measure_gemm_gflops(), 1),
    }
    if len(sys.argv) > 1:
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
    """Open the model as it is stored and run one token through it."""
    import mlx.core as mx

    from safetrain.core.errors import SafetrainError
    from safetrain.core.tracebacks import keep_traceback
    from safetrain.engine.model import open_base

    began = time.perf_counter()
    try:
        model = open_base(folder, dequantize=False)
    except SafetrainError as error:
        kept = keep_traceback(error)
        told = f"{error.what} (traceback: {kept})" if kept else error.what
        return {"loads": False, "load_error": told, "load_seconds": 0.0}
    logits = model.module(mx.array([[0]]))
    finite = bool(mx.all(mx.isfinite(logits)).item())
    fault = "" if finite else "one token through the model gives NaN"
    return {"loads": finite, "load_error": fault, "load_seconds": round(time.perf_counter() - began, 3)}


if __name__ == "__main__":
    main()
