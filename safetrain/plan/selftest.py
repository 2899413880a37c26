"""`safetrain selftest`: check one pass of a model, or report this machine on one screen, without names or paths."""

import platform
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from safetrain.core.errors import MachineError, ModelError
from safetrain.core.formatting import counted, size_text
from safetrain.plan.child import ChildFailed, room_bytes, run_json, version_of
from safetrain.plan.machine import Probe, chip_name, read_machine_now

SECONDS = 600.0
FLOAT32_TOLERANCE, TF32_TOLERANCE, SIXTEEN_BIT_TOLERANCE = 1e-3, 1e-2, 0.1
ROWS, TOKENS = "3", "64"  # of the pass
COLUMNS, LABEL = 80, 11
FENCE = "```"  # keeps the columns aligned in an issue


def selftest(module: str, model: Path) -> list[tuple[str, str, bool]]:
    """Run one pass of ``model`` in a child, ``python -m module``, and return the results of ``judge``.

    Raises ModelError if the model cannot be trained, and MachineError if the child fails otherwise.
    """
    try:
        return judge(_one_pass(module, model))
    except ChildFailed as error:
        how, _, refusal = str(error).partition(": ")
        if how == f"exit code {ModelError.exit_code}":
            raise ModelError(refusal, where=str(model), do="use another model") from None
        do = "'safetrain preflight' checks the machine; if it ran out of memory, use a smaller model"
        raise MachineError(f"The self-test did not finish: {error}", where=str(model), do=do) from None


def _one_pass(module: str, model: Path) -> dict[str, Any]:
    return run_json(module, ["--pass", str(model), ROWS, TOKENS], SECONDS, room_bytes())


def judge(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Return name, text and verdict of each figure; one without a reference passes. A GPU may use TF32 (19 bits)."""
    limit = FLOAT32_TOLERANCE if found["on_cpu"] else TF32_TOLERANCE
    limit = limit if found["in_float32"] else SIXTEEN_BIT_TOLERANCE
    reference = f"(limit {limit:.0e}) from mlx-lm's layers and plain cross-entropy"
    layout = "packed, without padding" if found["packs_rows"] else "as padded rectangles"
    differences = [(name, found[f"{name}_difference"]) for name in ("loss", "gradient")]
    speed = f"{found['step_seconds']:.3f} s forward and backward, {found['tokens_per_second']:,.0f} tokens/s"
    return [
        *((name, f"differs by {size:.1e} {reference}", size <= limit) for name, size in differences),
        ("rows", f"computed {layout}; adapters on {found['layers_with_adapter']} layers", True),
        ("time", speed, True),
        ("memory", f"{size_text(found['peak_memory_bytes'])} at the peak", True),
    ]


def report_lines(probe: str, model: Path) -> Iterator[str]:
    """Yield the report line by line; child processes measure.

    If a child fails, its line says how, and the kind of error, but not the message, which may contain a path.
    """
    yield FENCE
    yield f"safetrain selftest --report, {time.strftime('%Y-%m-%d')}"
    figures: dict[str, Callable[[], str]] = {
        "system": _system,
        "device": lambda: _device(Probe(**run_json(probe, [], SECONDS, room_bytes()))),
        "training": lambda: "; ".join(f"{name} {text}" for name, text, _ in judge(_one_pass(probe, model))),
    }
    for label, describe in figures.items():
        try:
            text = describe()
        except ChildFailed as error:
            text = f"FAILED: {': '.join(str(error).split(': ')[:2])}"
        yield from textwrap.wrap(f"{label:<{LABEL}}{text}", COLUMNS, subsequent_indent=" " * LABEL)
    yield FENCE


def _system() -> str:
    """Describe the system, the processor and the versions of packages."""
    is_macos, cores = sys.platform == "darwin", psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    system = f"macOS {platform.mac_ver()[0]}" if is_macos else f"{platform.system()} {platform.release()}"
    packages = ", ".join(f"{name} {version_of(name)}" for name in ("mlx", "mlx-lm", "safetrain"))
    machine = f"{system}, {platform.machine()}, {chip_name()}, {counted(cores, 'core')}"
    return f"{machine}; Python {platform.python_version()}, {packages}"


def _device(probe: Probe) -> str:
    """Describe the backend and its memory limits."""
    machine, memory = read_machine_now(probe), psutil.virtual_memory()
    sizes = {
        "memory": memory.total,
        "available": memory.available,
        "working set": probe.working_set_bytes,
        "free on the GPU": probe.device_free_bytes,
        "training may use": machine.memory_budget_bytes,
        "process without a model": machine.process_memory_bytes,
    }
    limits = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items() if size)
    dtype = f", emulates bfloat16, computes in {machine.compute_dtype}" if machine.compute_dtype else ""
    speed = f"matrix products {probe.gemm_gflops:,.0f} GFLOP/s"
    return f"{machine.backend}, {machine.device or probe.blas}{dtype}; {limits}; {speed}"
