"""Tries out this machine, a model or a training run, in a separate process, which may run out of memory and die.

``python -m safetrain.engine.dry_run`` prints one line of JSON: without arguments about mlx's device, with ``--model
FOLDER [LIMIT]`` also whether that model can be trained, in LIMIT bytes at most. ``--pass FOLDER ROWS TOKENS`` compares
a pass with mlx-lm's own. ``JOB SCRATCH`` makes the largest updates of a training run, with its model, rows and limits,
and everything else a training run does; it writes only into the scratch folder.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from safetrain.core.errors import SafetrainError
from safetrain.core.memory.system import footprint_bytes
from safetrain.core.records.settings import TrainJob
from safetrain.core.storage.files import read_record, with_traceback
from safetrain.engine.child_process import die_with_parent, limit_memory, prefer_for_oom_kill
from safetrain.engine.cpu.blas import load_fast_blas
from safetrain.engine.job import load_job


def main(arguments: list[str]) -> int:
    """Print the result as JSON. For an error that a user can act on, print one line and return its exit code."""
    die_with_parent(os.getppid())
    prefer_for_oom_kill()
    try:
        match arguments:
            case [] | ["--model", *_]:
                answer = probe(*arguments[1:])
            case ["--pass", folder, rows, tokens]:
                load_fast_blas()  # before anything imports mlx
                from safetrain.engine.backend import keep_to_room
                from safetrain.engine.selftest import examine

                keep_to_room()
                answer = examine(Path(folder), int(rows), int(tokens))
            case [job_path, scratch]:
                asked = read_record(Path(job_path), TrainJob)
                limit_memory(asked.memory_limit_bytes)
                job = load_job(asked)
                load_fast_blas()  # before anything imports mlx
                from safetrain.engine.backend import keep_to_room
                from safetrain.engine.selftest import dry_run

                keep_to_room(asked.memory_limit_bytes)
                answer = dataclasses.asdict(dry_run(job, Path(scratch)))
    except SafetrainError as error:
        print(with_traceback(error, in_one_line=True), file=sys.stderr)
        return error.exit_code
    print(json.dumps(answer), flush=True)
    return 0


def probe(folder: str = "", limit: str = "") -> dict[str, Any]:
    """Describe the backend and, with a model's folder, whether a pass works and how long loading takes."""
    blas = load_fast_blas()  # before anything imports mlx
    import safetrain.engine.training  # noqa: F401 loads every module of a training run

    process_bytes = footprint_bytes(os.getpid())
    from safetrain.engine.backend import (
        dequantizing_pays,
        device,
        keep_to_room,
        labels_at_once,
        probed_dtype,
        product_gflops,
    )
    from safetrain.engine.selftest import load

    info = device().facts
    answer: dict[str, Any] = {
        "backend": device().name,
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
        "dequantizing_pays": dequantizing_pays(info),
        "labels_at_once": labels_at_once(info),
    }
    if folder:
        keep_to_room(int(limit) if limit else None)
        answer |= load(Path(folder))
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
