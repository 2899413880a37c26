"""Probes mlx's device and a model, in a separate process because a probe may crash.

``python -m safetrain.engine.probe [FOLDER [LIMIT]]`` prints one JSON object about the machine and, with a model's
folder, whether it can be trained; ``--pass FOLDER ROWS TOKENS [LIMIT]`` compares a pass with mlx-lm's own. Memory is
limited as in training, and to LIMIT.
"""

import json
import os
import sys
from pathlib import Path

from safetrain.core.memory.system import footprint_bytes
from safetrain.engine.child_process import die_with_parent, prefer_for_oom_kill
from safetrain.engine.cpu.blas import Blas, load_fast_blas


def main(arguments: list[str]) -> None:
    """Print the requested result."""
    blas = load_fast_blas()  # before anything imports mlx
    if arguments[:1] != ["--pass"]:
        print(json.dumps(probe(blas, *arguments)))
        return
    die_with_parent(os.getppid())
    prefer_for_oom_kill()
    from safetrain.engine.backend import keep_to_room
    from safetrain.engine.selftest import examine

    _, folder, rows, tokens, *limit = arguments
    keep_to_room(int(limit[0]) if limit else None)
    print(json.dumps(examine(Path(folder), int(rows), int(tokens))))


def probe(blas: Blas, folder: str = "", limit: str = "") -> dict[str, object]:
    """Describe the backend and, with a model's folder, whether a pass works and how long loading takes."""
    import safetrain.engine.training  # noqa: F401 loads every module of a training

    process_bytes = footprint_bytes(os.getpid())
    from safetrain.engine.backend import device, keep_to_room
    from safetrain.engine.selftest import load, probed_dtype, product_gflops

    here = device()
    info = here.facts
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
        "gemm_gflops": round(product_gflops(1024), 1),
        "compute_dtype": probed_dtype(info, quantized=False),
        "quantized_compute_dtype": probed_dtype(info, quantized=True),
    }
    if folder:
        keep_to_room(int(limit) if limit else None)
        answer |= load(Path(folder))
    return answer


if __name__ == "__main__":
    main(sys.argv[1:])
