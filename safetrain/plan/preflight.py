"""The checks before a training. Each is a small function from facts to a verdict; nothing here changes anything."""

import importlib.metadata
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from safetrain.core.model_files import ModelFiles
from safetrain.core.reports import DataReport, Machine
from safetrain.plan.machine import Probe

GIB = 2**30
DEPENDENCIES = ("mlx", "mlx-lm", "hydra-core", "omegaconf", "dvc", "psutil", "transformers", "tokenizers", "matplotlib")
MIN_MLX = (0, 32, 0)
MIN_PYTHON = (3, 11)
PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"


@dataclass(frozen=True)
class Check:
    """One check and its verdict. A critical one that fails stops the pipeline."""

    id: str
    name: str
    status: str
    critical: bool
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class PreflightReport:
    """preflight_report.json: today's readings."""

    passed: int
    failed: int
    warnings: int
    skipped: int
    critical_failures: int
    available_memory_bytes: int
    total_memory_bytes: int
    free_disk_bytes: int
    checks: tuple[Check, ...]


def summarise(checks: Sequence[Check], machine: Machine, folder: Path) -> PreflightReport:
    """Count the verdicts."""
    count = {status: sum(check.status == status for check in checks) for status in (PASS, WARN, FAIL, SKIP)}
    return PreflightReport(
        passed=count[PASS],
        failed=count[FAIL],
        warnings=count[WARN],
        skipped=count[SKIP],
        critical_failures=sum(check.status == FAIL and check.critical for check in checks),
        available_memory_bytes=psutil.virtual_memory().available,
        total_memory_bytes=machine.total_memory_bytes,
        free_disk_bytes=shutil.disk_usage(folder).free,
        checks=tuple(checks),
    )


def software_checks() -> list[Check]:
    """Python, and every dependency with its version."""
    version = platform.python_version()
    python = _check(
        "PY-VERSION",
        "Python",
        sys.version_info >= MIN_PYTHON,
        True,
        version,
        "install Python 3.11 or newer, then 'make'",
    )
    return [python, *map(_dependency, DEPENDENCIES)]


def machine_checks(machine: Machine, probe: Probe) -> list[Check]:
    """Chip, memory, backend, BLAS."""
    memory = psutil.virtual_memory()
    native = not (sys.platform == "darwin" and platform.machine() == "x86_64")
    gpu = machine.backend != "cpu"
    cores = f"{machine.chip}, {machine.physical_cores} cores, {machine.architecture}"
    room = (
        f"{memory.available / GIB:.1f} GiB available of {memory.total / GIB:.1f}, budget "
        f"{machine.memory_budget_bytes / GIB:.1f}, swap {psutil.swap_memory().used / GIB:.1f} GiB used"
    )
    device = f": {machine.device}" if machine.device else ""
    backend = f"{machine.backend}{device}" if gpu else "cpu (no GPU: fine for tests and small models)"
    rosetta = "this Python runs under Rosetta: install an arm64 Python, then 'rm -rf .venv && make'"
    metal = "install the Metal wheels of mlx: 'rm -rf .venv && make'"
    enough = machine.memory_budget_bytes >= GIB
    checks = [
        Check("HW-CHIP", "chip", PASS, False, cores),
        _check("PY-NATIVE", "native Python", native, True, machine.architecture, rosetta),
        _check("HW-RAM", "memory", enough, False, room, "close other programs"),
        _check("HW-GPU", "backend", gpu or sys.platform != "darwin", False, backend, metal),
    ]
    if machine.backend == "cpu":
        speed = f"{probe.blas}, {probe.gemm_gflops:.0f} GFLOP/s in float32"
        found = speed if probe.blas_is_fast else f"{speed}; {probe.blas_reason}"
        checks.append(_check("CPU-BLAS", "BLAS", probe.blas_is_fast, False, found, "run 'make' again to reinstall"))
    return checks


def data_check(report: DataReport) -> Check:
    """The files and their counts, from validate_data."""
    found = f"{report.train.rows} train, {report.valid.rows} valid, {report.test.rows} test rows from {report.source}"
    ok = min(report.train.rows, report.valid.rows, report.test.rows) > 0
    status = FAIL if not ok else WARN if report.warnings else PASS
    notes = "; ".join(report.warnings)
    return Check("DATA-FILES", "data", status, True, f"{found}; {notes}" if notes else found, "see data_report.json")


def model_checks(model: ModelFiles, probe: Probe) -> list[Check]:
    """Complete, its size, and whether mlx-lm opens it."""
    bits = f"{model.quantization_bits}-bit" if model.quantization_bits else "not quantized"
    files = f"{model.folder}: {model.model_type}, {model.parameters / 1e6:.1f}M parameters, {bits}, " + _size(
        model.static_bytes
    )
    complete = Check("MODEL-FILES", "model complete", PASS, True, files)
    if probe.loads is None:
        return [complete, Check("MODEL-LOAD", "model loads", SKIP, True, "not tried")]
    found = f"in {probe.load_seconds:.1f} s" if probe.loads else probe.load_error
    remedy = "use a model that mlx-lm supports, or fetch it again: safetrain fetch HUB_ID"
    return [complete, _check("MODEL-LOAD", "model loads", probe.loads, True, found, remedy)]


def memory_check(model: ModelFiles, machine: Machine) -> Check:
    """Whether the weights alone fit; recommend_config answers for the whole training."""
    fits = model.static_bytes < machine.memory_budget_bytes
    found = f"weights {_size(model.static_bytes)} of a budget of {_size(machine.memory_budget_bytes)}"
    return _check("MEM-STATIC", "weights fit", fits, True, found, "use a smaller or more strongly quantized model")


def disk_check(folder: Path, needed_bytes: int) -> Check:
    """Free disk for checkpoints, adapters and reports."""
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free, {needed_bytes / GIB:.1f} wanted"
    return _check("DISK-FREE", "disk", free >= needed_bytes, True, found, "free some disk space")


def render(checks: Sequence[Check], report: PreflightReport) -> str:
    """The report as text: a mark, the check, what was found; the remedy under what did not pass."""
    marks = {PASS: "[ok]  ", WARN: "[warn]", FAIL: "[FAIL]", SKIP: "[skip]"}
    lines = []
    for check in checks:
        lines.append(f"{marks[check.status]} {check.name:<16} {check.found}")
        if check.status in (WARN, FAIL) and check.remedy:
            lines.append(f"       {'':<16} do: {check.remedy}")
    lines.append(
        f"{report.passed} passed, {report.failed} failed ({report.critical_failures} critical), "
        f"{report.warnings} warnings, {report.skipped} skipped"
    )
    return "\n".join(lines)


def _dependency(name: str) -> Check:
    identifier = f"DEP-{name.upper()}"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(identifier, name, FAIL, True, "not installed", "run 'make'")
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if name == "mlx" and numbers < MIN_MLX:
        return Check(identifier, name, FAIL, True, f"{version}; 0.32 or newer is needed, before it a GPU out of memory "
                     "aborts the process", "run 'make'")  # fmt: skip
    return Check(identifier, name, PASS, True, version)


def _check(identifier: str, name: str, ok: bool, critical: bool, found: str, remedy: str) -> Check:
    """Pass, or fail when critical and warn when not."""
    status = PASS if ok else FAIL if critical else WARN
    return Check(identifier, name, status, critical, found, "" if ok else remedy)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / 2**20:.1f} MiB"
