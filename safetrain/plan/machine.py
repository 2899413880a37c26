"""What this machine is, and how much memory a training may use on it; a child process reads mlx's facts."""

import os
import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from safetrain.core.errors import MachineError
from safetrain.core.memory.budget import DeviceMemory, budget_bytes, read_memory
from safetrain.core.memory.cgroup import memory_groups, memory_limit_bytes
from safetrain.core.memory.macos import sysctl_number, sysctl_text
from safetrain.core.memory.terms import backend_of, base_bytes, usable_cores
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import Machine
from safetrain.plan.child import (
    ChildFailed,
    answers_about,
    keep_answer,
    ran_out_of_memory,
    read_answer,
    room_bytes,
    run_json,
    version_of,
)

GIB = 2**30
TIMEOUT_SECONDS = 600
BUDGET_STEP_BYTES, PROCESS_STEP_BYTES = GIB // 16, GIB // 32  # so that noise does not show
PROCESS_GROWTH_BYTES = 64 * 2**20  # by which Python and libraries grow in a training (measured, Linux CPU)
NOISY_SPEED = 0.5  # a smaller change of the measured speed is noise
LESS_COUNTS, MORE_COUNTS = 0.10, 0.25  # smaller changes of the budget are noise: train looks again when it starts


@dataclass(frozen=True)
class Probe:
    """What the engine's probe said; ``loads`` and ``trains`` are None if no model was given."""

    backend: str
    device: str
    working_set_bytes: int
    device_total_bytes: int
    device_free_bytes: int
    process_bytes: int  # of a process that has loaded mlx and the engine, and no model
    blas: str
    blas_is_fast: bool
    blas_reason: str
    gemm_gflops: float
    loads: bool | None = None
    load_error: str = ""
    load_seconds: float = 0.0
    compute_dtype: str | None = None  # as in core/records/reports.py
    quantized_compute_dtype: str | None = None
    trains: bool | None = None  # whether a gradient comes through it
    train_error: str = ""


def read_machine_now(probe: Probe) -> Machine:
    """The machine as it is at this moment."""
    device = DeviceMemory(probe.backend, probe.working_set_bytes, probe.device_free_bytes)
    process_bytes = -(-(probe.process_bytes + PROCESS_GROWTH_BYTES) // PROCESS_STEP_BYTES) * PROCESS_STEP_BYTES
    budget = budget_bytes(device, read_memory(), process_bytes)
    memory, limit = psutil.virtual_memory(), memory_limit_bytes(memory_groups())
    return Machine(
        system=f"{platform.system()} {platform.release()}" if sys.platform == "darwin" else platform.system(),
        architecture=platform.machine(),
        python=platform.python_version(),
        chip=chip_name(),
        physical_cores=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        backend=probe.backend,
        device=probe.device,
        mlx=version_of("mlx"),
        mlx_lm=version_of("mlx-lm"),
        total_memory_bytes=probe.device_total_bytes or min(memory.total, limit or memory.total),
        memory_budget_bytes=budget // BUDGET_STEP_BYTES * BUDGET_STEP_BYTES or budget,
        process_memory_bytes=process_bytes,
        gemm_gflops=probe.gemm_gflops,
        compute_dtype=probe.compute_dtype,
        quantized_compute_dtype=probe.quantized_compute_dtype,
    )


def measured_machine(module: str) -> Machine:
    """This machine by the answer of ``python -m module``; raises MachineError where mlx does not work."""
    probe, why = ask_engine(module, None, "quick", None)
    if probe is None:
        raise MachineError(f"mlx does not work here: {why}", do="safetrain preflight says more")
    return read_machine_now(probe)


def settle(now: Machine, before: Machine | None) -> Machine:
    """``now``, with values of ``before`` where the two differ by noise only, so that no plan changes for it.

    A type that was once measured to be slow stays so for the same device and mlx.
    """
    if before is None:
        return now
    if before.gemm_gflops and abs(now.gemm_gflops / before.gemm_gflops - 1) <= NOISY_SPEED:
        now = replace(now, gemm_gflops=before.gemm_gflops)
    if (now.backend, now.device, now.mlx) == (before.backend, before.device, before.mlx):
        quantized = before.quantized_compute_dtype or now.quantized_compute_dtype
        dtype = before.compute_dtype or now.compute_dtype
        now = replace(now, compute_dtype=dtype, quantized_compute_dtype=quantized)
    if abs(now.process_memory_bytes - before.process_memory_bytes) <= 2 * PROCESS_STEP_BYTES:
        now = replace(now, process_memory_bytes=before.process_memory_bytes)
    ratio = now.memory_budget_bytes / max(1, before.memory_budget_bytes)
    if 1 - LESS_COUNTS <= ratio <= 1 + MORE_COUNTS:
        return replace(now, memory_budget_bytes=before.memory_budget_bytes)
    return now


def chip_name() -> str:
    """The processor's own name, or its architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        name = sysctl_text("machdep.cpu.brand_string")
        if name:
            return name
    return platform.processor() or platform.machine()


def ask_engine(module: str, model: ModelFiles | None, level: str, own_limit: int | None) -> tuple[Probe | None, str]:
    """The answer of ``python -m module``; None and the reason where mlx does not work.

    Whether the model loads and trains is tried once for this model and installation. A model larger than the memory
    that is left is not loaded: the checks say so, and the machine does not swap.
    """
    path = answer_path(model.fingerprint) if model else None
    cached = read_answer(path, Probe) if path else None
    if cached is not None and cached.backend != "cuda":
        return cached, ""
    try:
        probe = Probe(**run_json(module, [], TIMEOUT_SECONDS))
    except ChildFailed as error:
        return None, str(error)
    if cached is not None:  # free GPU memory is read every time
        return replace(probe, loads=cached.loads, load_seconds=cached.load_seconds, trains=cached.trains), ""
    if model is None or path is None or level == "quick":
        return probe, ""
    opened_bytes = base_bytes(model, backend_of(model, probe.backend, dequantize_base=False))
    if opened_bytes >= read_machine_now(probe).memory_budget.mlx_bytes:
        return probe, ""
    try:
        arguments = [str(model.folder), *([] if own_limit is None else [str(own_limit)])]
        probe = Probe(**run_json(module, arguments, TIMEOUT_SECONDS, room_bytes(own_limit)))
    except ChildFailed as error:
        return (probe if ran_out_of_memory(str(error)) else replace(probe, loads=False, load_error=str(error))), ""
    if probe.loads and probe.trains:
        keep_answer(path, probe)
    return probe, ""


def answer_path(model_fingerprint: str) -> Path:
    """Where the answer for this model on this machine is kept."""
    words = (model_fingerprint, chip_name(), str(usable_cores()), *_graphics())
    return answers_about("probes", *words).with_suffix(".json")


def _graphics() -> list[str]:
    """What decides whether mlx finds a GPU, and how much of its memory it may have: macOS 26 allows more than 15."""
    if sys.platform == "darwin":
        return [str(sysctl_number("iogpu.wired_limit_mb")), platform.release()]
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return [*devices, os.environ.get("CUDA_VISIBLE_DEVICES", "all")]
