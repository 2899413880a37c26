"""Machines to plan for: this one, probed by a child process, and those described in conf/machines.yaml."""

import os
import platform
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.foreign import told
from safetrain.core.memory.system import (
    GIB,
    memory_groups,
    memory_limit_bytes,
    read_memory,
    sysctl_number,
    sysctl_text,
    within_data_limit,
)
from safetrain.core.memory.terms import FLOAT32, usable_cores
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import Machine
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_or_none, read_result
from safetrain.plan.child import (
    ChildFailed,
    answers_about,
    budget_bytes,
    cuda_budget_bytes,
    keep_answer,
    metal_budget_bytes,
    ran_out_of_memory,
    room_bytes,
    run_json,
    version_of,
)

TIMEOUT_SECONDS = 600
LEAST_BYTES = 300 * 2**20  # of a limit: with less, mlx's readers of files may wait for ever for their threads
SLOW_GFLOPS = 10.0  # float32 matrix product; the reference BLAS reaches 3 to 7 (measured: benchmarks/bench_blas)
BUDGET_STEP_BYTES, PROCESS_STEP_BYTES = GIB // 16, GIB // 32  # rounding steps that hide noise
PROCESS_GROWTH_BYTES = 64 * 2**20  # growth of Python and libraries during training (measured, Linux CPU)
NOISY_SPEED = 0.5  # smaller changes of the measured speed are noise
LESS_COUNTS, MORE_COUNTS = 0.10, 0.25  # smaller changes of the budget are noise; train checks again when it starts
MACHINES = Path("conf/machines.yaml")
EXAMPLE = "mine: {chip: CPU, backend: cpu, total_memory_gb: 16, usable_memory_gb: 14}"
HERE = "this machine"
TIMED = "compute_dtype", "quantized_compute_dtype", "dequantizing_pays", "labels_at_once"
ANY_GPU = Machine("", "", "", "a GPU", 8, "gpu", "", "", "", 2**60, 2**60)


@dataclass(frozen=True)
class Probe:
    """The answer of the engine's probe; ``loads`` and ``trains`` are None if no model was given."""

    backend: str
    device: str
    working_set_bytes: int
    device_total_bytes: int
    device_free_bytes: int
    process_bytes: int  # of a process with mlx and the engine, without a model
    blas: str
    blas_is_fast: bool
    blas_reason: str
    gemm_gflops: float
    loads: bool | None = None
    load_error: str = ""
    load_seconds: float = 0.0
    compute_dtype: str | None = None  # as in core/records/reports.py
    quantized_compute_dtype: str | None = None
    dequantizing_pays: bool | None = None
    labels_at_once: int | None = None
    trains: bool | None = None  # whether the backward pass works
    train_error: str = ""


def read_machine_now(probe: Probe) -> Machine:
    device_bytes = probe.device_free_bytes if probe.backend == "cuda" else probe.working_set_bytes
    process_bytes = -(-(probe.process_bytes + PROCESS_GROWTH_BYTES) // PROCESS_STEP_BYTES) * PROCESS_STEP_BYTES
    budget = budget_bytes(probe.backend, device_bytes, read_memory(), process_bytes)
    memory, limit = psutil.virtual_memory(), memory_limit_bytes(memory_groups())
    return Machine(
        system=f"{platform.system()} {platform.release()}" if sys.platform == "darwin" else platform.system(),
        architecture=platform.machine(),
        python=platform.python_version(),
        chip=chip_name(),
        physical_cores=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        mlx=version_of("mlx"),
        mlx_lm=version_of("mlx-lm"),
        total_memory_bytes=probe.device_total_bytes or min(memory.total, limit or memory.total),
        memory_budget_bytes=budget // BUDGET_STEP_BYTES * BUDGET_STEP_BYTES or budget,
        process_memory_bytes=process_bytes,
        **{name: getattr(probe, name) for name in ("backend", "device", "gemm_gflops", *TIMED)},
    )


def settle(now: Machine, before: Machine | None) -> Machine:
    """``now``, but with values from ``before`` where they differ only by noise, so that plans do not change.

    What was timed is kept for the same device and mlx version.
    """
    if before is None:
        return now
    kept = dict[str, Any]()
    if before.gemm_gflops and abs(now.gemm_gflops / before.gemm_gflops - 1) <= NOISY_SPEED:
        kept["gemm_gflops"] = before.gemm_gflops
    if (now.backend, now.device, now.mlx) == (before.backend, before.device, before.mlx):
        kept |= {name: value for name in TIMED if (value := getattr(before, name)) is not None}
    if abs(now.process_memory_bytes - before.process_memory_bytes) <= 2 * PROCESS_STEP_BYTES:
        kept["process_memory_bytes"] = before.process_memory_bytes
    if 1 - LESS_COUNTS <= now.memory_budget_bytes / max(1, before.memory_budget_bytes) <= 1 + MORE_COUNTS:
        kept["memory_budget_bytes"] = before.memory_budget_bytes
    return replace(now, **kept)


def chip_name() -> str:
    """The processor's name, or its architecture if the system gives no name."""
    if sys.platform == "darwin":
        return sysctl_text("machdep.cpu.brand_string") or platform.machine()
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    name = re.search(r"^model name\s*:(.*)$", cpuinfo, re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()


def ask_engine(module: str, model: ModelFiles | None, level: str, own_limit: int | None) -> tuple[Probe | None, str]:
    """Run the probe ``python -m module``; None and the reason if mlx does not work.

    Loading and training are tried once per model and installation, then cached, unless the machine was busy. A model
    larger than the memory budget is not loaded, so that the machine does not swap; the checks report it.
    """
    path = answer_path(model.fingerprint) if model else None
    cached = read_or_none(path, Probe) if path else None
    if cached is not None and cached.backend != "cuda":
        return cached, ""
    try:
        probe = Probe(**run_json(module, [], TIMEOUT_SECONDS))
    except ChildFailed as error:
        return None, str(error)
    if cached is not None:  # free GPU memory is read every time
        return replace(cached, device_free_bytes=probe.device_free_bytes), ""
    if model is None or path is None or level == "quick":
        return probe, ""
    opens_as_stored = probe.backend != "cpu" or model.quantization_bits is not None
    opened_bytes = model.static_bytes if opens_as_stored else FLOAT32 * model.parameters
    if opened_bytes >= read_machine_now(probe).memory_budget.mlx_bytes or (own_limit or GIB) < LEAST_BYTES:
        return probe, ""
    try:
        arguments = ["--model", str(model.folder), *([] if own_limit is None else [str(own_limit)])]
        probe = Probe(**run_json(module, arguments, TIMEOUT_SECONDS, room_bytes(own_limit)))
    except ChildFailed as error:
        return (probe if ran_out_of_memory(str(error)) else replace(probe, loads=False, load_error=str(error))), ""
    if probe.loads and probe.trains and (probe.backend != "cpu" or probe.gemm_gflops >= SLOW_GFLOPS):
        keep_answer(path, probe)
    return probe, ""


def answer_path(model_fingerprint: str) -> Path:
    """Path of the cached answer for this model on this machine.

    It depends on what decides whether mlx finds a GPU and how much memory it may use (macOS 26 allows more than 15).
    """
    if sys.platform == "darwin":
        graphics = [str(sysctl_number("iogpu.wired_limit_mb")), platform.release()]
    else:
        devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
        graphics = [*devices, os.environ.get("CUDA_VISIBLE_DEVICES", "all")]
    return answers_about("probes", model_fingerprint, chip_name(), str(usable_cores()), *graphics).with_suffix(".json")


def machine_to_plan_for(name: str | None, memory_gb: float | None, probe_module: str) -> Machine:
    """A machine of conf/machines.yaml, or this one if ``name`` is None.

    This machine is read from preflight's record, else probed now by ``probe_module`` (about two seconds). Raises
    ConfigError for an unknown name, MachineError if mlx does not work.
    """
    if name:
        machine = machine_named(name)
    elif paths.MACHINE.is_file():
        machine = read_result(paths.MACHINE, Machine)
    else:
        probe, why = ask_engine(probe_module, None, "quick", None)
        if probe is None:
            raise MachineError(f"mlx does not work here: {why}", do="run safetrain preflight for details")
        machine = read_machine_now(probe)
    budget = int(memory_gb * GIB) if memory_gb else machine.memory_budget_bytes
    if memory_gb and not name and machine.backend != "cuda":
        budget = within_data_limit(budget, budget)  # as with train.memory_limit_gb
    return replace(machine, memory_budget_bytes=budget)


def described_machines() -> dict[str, Any]:
    """The machines that safetrain knows, and those of the project's own conf/machines.yaml, by name."""
    machines = dict[str, Any]()
    for path in (paths.shipped(str(MACHINES)), MACHINES):
        if path.is_file():
            with told("The machines cannot be read", path, f"describe each as in {EXAMPLE}", ConfigError):
                machines.update(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    return machines


def machine_named(name: str) -> Machine:
    """The record that preflight would write on an idle machine of this name; the budget follows preflight's rules.

    Raises ConfigError for an unknown machine, or one that is described incompletely.
    """
    machines = described_machines()
    if name not in machines:
        do = f"describe it there, e.g. {EXAMPLE}; or use --memory-gb"
        expected = f"one of {', '.join(sorted(machines))}"
        raise ConfigError(f"Unknown machine {name}.", where=MACHINES, expected=expected, do=do)
    with told(f"The machine {name} cannot be read", MACHINES, f"describe it as in {EXAMPLE}", ConfigError):
        chip, backend, dtype = (machines[name].get(key) for key in ("chip", "backend", "compute_dtype"))
        usable, total = (int(float(machines[name][f"{part}_memory_gb"]) * GIB) for part in ("usable", "total"))
        budgets = {"metal": metal_budget_bytes(usable, total), "cuda": cuda_budget_bytes(usable), "cpu": usable}
        budget = budgets[backend]
    return replace(
        ANY_GPU, chip=str(chip), backend=backend, device=str(chip), total_memory_bytes=total,
        memory_budget_bytes=budget, compute_dtype=dtype, quantized_compute_dtype=dtype,
    )  # fmt: skip
