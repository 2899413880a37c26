"""The parts of `safetrain selftest --report` that need mlx: ``python -m safetrain.engine.report SECTION MODEL_FOLDER``.

Each section in a process of its own, because what it looks for may kill it. Prints a line of JSON per finding, as it
goes.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from safetrain.core.memory.process import footprint_bytes
from safetrain.core.protocol.selftest import DeviceFacts, Line
from safetrain.core.storage.records import to_line
from safetrain.engine.blas import Blas, load_fast_blas
from safetrain.engine.child_process import die_with_parent, prefer_for_oom_kill


def main(section: str, model: Path) -> None:
    """Print what a section finds; one of them opens the model."""
    die_with_parent(os.getppid())
    prefer_for_oom_kill()
    blas = load_fast_blas()
    from safetrain.engine.limits import keep_to_room

    keep_to_room()
    for line in sections(blas, model)[section]():
        print(to_line(line), flush=True)


def sections(blas: Blas, model: Path) -> dict[str, Callable[[], Iterator[Line]]]:
    """By name, in plan/report.py's order."""
    from safetrain.engine import report_operations, report_updates

    sizes = report_operations.sizes()
    return {
        "device": lambda: device(blas),
        "products": lambda: report_operations.products(sizes),
        "attention": lambda: report_operations.attention(sizes),
        "rows": report_updates.long_rows,
        "kernels": report_updates.kernels,
        "exactness": report_updates.exactness,
        "model": lambda: report_updates.exactness_of(model),
        "update": report_updates.update,
        "mlx_lm": report_updates.update_of_mlx_lm,
    }


def device(blas: Blas) -> Iterator[Line]:
    """What mlx says it runs on; no UUID, which would name the machine."""
    import safetrain.engine.training  # noqa: F401 all that a training loads
    from safetrain.engine import backend

    here = backend.device()
    info = here.facts
    major, minor = info.get("compute_capability_major"), info.get("compute_capability_minor")
    yield DeviceFacts(
        backend=here.name,
        device=str(info.get("device_name", "")),
        architecture=str(info.get("architecture", "")) if major is None else f"compute capability {major}.{minor}",
        working_set_bytes=int(info.get("max_recommended_working_set_size", 0)),
        free_bytes=int(info.get("free_memory", 0)),
        process_bytes=footprint_bytes(os.getpid()),
        blas=blas.name,
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
