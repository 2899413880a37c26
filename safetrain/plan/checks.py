"""Preflight checks, their report, and the checks of software, machine and shell; none changes anything."""

import dataclasses
import difflib
import platform
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from safetrain.core.errors import ConfigError, PreflightError, SafetrainError
from safetrain.core.formatting import counted
from safetrain.core.formatting import size_text as size
from safetrain.core.memory.system import (
    CRITICAL,
    FREE_PERCENT,
    GIB,
    PRESSURE_LEVEL,
    PROCESS_BYTES,
    REPORTS,
    memory_groups,
    memory_limit_bytes,
    memory_room_bytes,
    reports_since,
    sysctl_number,
)
from safetrain.core.records.reports import Machine
from safetrain.core.storage import paths
from safetrain.plan.child import NOT_INSTALLED, version_of
from safetrain.plan.machine import Probe

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"
MARKS = {PASS: "[ok]  ", WARN: "[warn]", FAIL: "[FAIL]", SKIP: "[skip]"}
SCHEMA = 1
DEPENDENCIES = ("mlx", "mlx-lm", "hydra-core", "omegaconf", "dvc", "psutil", "transformers", "tokenizers", "matplotlib")
MIN_MLX = (0, 32, 0)
MIN_PYTHON = (3, 11)
LEAST_BUDGET_BYTES, GOOD_BUDGET_BYTES = GIB // 4, GIB
SLOW_GFLOPS = 10.0  # float32 matrix product; the reference BLAS reaches 3 to 7 (measured: benchmarks/bench_blas)
SWAP_BYTES, SWAP_SHARE = GIB, 0.25  # with this much swap in use, the machine is already short of memory
# An idle 8 GB M1 has 54 or more; at 44, a run of 11 GB did not fit in 24 GB (john-rocky/apple-silicon-llm-bench #7).
LITTLE_FREE_PERCENT = 45
LEVELS = {1: "normal", 2: "warning", CRITICAL: "critical"}
PANIC_HOURS = 72
WATCHDOG_SINCE = 26  # since this macOS, GPU work that blocks the screen is killed (mlx#3267)


@dataclass(frozen=True)
class Check:
    """One check and its verdict. A critical check stops the pipeline if it fails; if skipped, the result is open."""

    id: str  # stable; preflight.downgrade names it
    name: str
    status: str
    critical: bool
    found: str
    needed: str = ""  # the threshold
    source: str = ""  # where the value comes from
    remedy: str = ""  # one thing to do, if possible a command


@dataclass(frozen=True)
class PreflightReport:
    """Content of preflight_report.json."""

    schema: int
    status: str  # pass, fail, open
    exit_code: int  # 0: pass, 1: a critical check failed, 2: a critical check was skipped
    level: str
    seconds: float
    passed: int
    failed: int
    warnings: int
    skipped: int
    critical_failures: int
    available_memory_bytes: int
    total_memory_bytes: int
    free_disk_bytes: int
    checks: tuple[Check, ...]


def verdict(
    identifier: str, name: str, ok: bool, critical: bool, found: str, needed: str = "", source: str = "",
    remedy: str = "",
) -> Check:  # fmt: skip
    """A check that passes if ``ok``; else it fails if critical, or warns."""
    status = PASS if ok else FAIL if critical else WARN
    return Check(identifier, name, status, critical, found, needed, source, "" if ok else remedy)


def graded(
    identifier: str, name: str, value: float, thresholds: tuple[float, float], found: str, needed: str, source: str,
    remedy: str,
) -> Check:  # fmt: skip
    """A critical check that fails below the first threshold and warns below the second."""
    status = FAIL if value < thresholds[0] else WARN if value < thresholds[1] else PASS
    return Check(identifier, name, status, True, found, needed, source, "" if status == PASS else remedy)


def skipped(identifier: str, name: str, why: str, *, critical: bool = False) -> Check:
    """A check that was not run. ``critical``: this level requires its result."""
    return Check(identifier, name, SKIP, critical, f"not checked: {why}")


def from_error(identifier: str, name: str, error: SafetrainError) -> Check:
    """A failed check with the error's text."""
    parts = [part for part in (error.what.rstrip("."), error.where, error.got) if part]
    return Check(identifier, name, FAIL, True, "; ".join(parts), error.expected, "", error.do)


def require_known(identifiers: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown check ID."""
    for identifier in identifiers:
        if identifier not in names:
            near = difflib.get_close_matches(identifier.upper(), names, n=1)
            raise ConfigError(
                f"Unknown check {identifier}.",
                where="preflight.downgrade",
                expected="" if near else f"one of {', '.join(names)}",
                do=f"did you mean {near[0]}?" if near else "",
            )


def downgrade(checks: Sequence[Check], identifiers: Sequence[str]) -> list[Check]:
    """Turn failures of the named checks into warnings."""
    return [_lowered(check) if check.id in identifiers else check for check in checks]


def _lowered(check: Check) -> Check:
    if check.status == FAIL:
        return dataclasses.replace(check, status=WARN, critical=False, found=f"{check.found} (downgraded by you)")
    return dataclasses.replace(check, critical=False)


def summarise(
    checks: Sequence[Check], level: str, seconds: float, total_memory_bytes: int | None = None
) -> PreflightReport:
    """Build the report: counts of verdicts, and current readings."""
    memory, folder = psutil.virtual_memory(), paths.OUTPUT if paths.OUTPUT.is_dir() else Path()
    count = {status: sum(check.status == status for check in checks) for status in MARKS}
    critical = sum(check.status == FAIL and check.critical for check in checks)
    unanswered = any(check.status == SKIP and check.critical for check in checks)
    code = 1 if critical else 2 if unanswered else 0
    return PreflightReport(
        schema=SCHEMA,
        status=("pass", "fail", "open")[code],
        exit_code=code,
        level=level,
        seconds=round(seconds, 2),
        passed=count[PASS],
        failed=count[FAIL],
        warnings=count[WARN],
        skipped=count[SKIP],
        critical_failures=critical,
        available_memory_bytes=memory.available,
        total_memory_bytes=total_memory_bytes or memory.total,
        free_disk_bytes=shutil.disk_usage(folder).free,
        checks=tuple(checks),
    )


def failure(report: PreflightReport) -> PreflightError:
    """The error that stops the pipeline: which checks failed or were not possible, and what to do."""
    failed = [check.id for check in report.checks if check.status == FAIL]
    unanswered = [check.id for check in report.checks if check.status == SKIP and check.critical]
    if report.exit_code == 2:
        return PreflightError(f"Checks not possible: {', '.join(unanswered)}.", do="see their lines above", exit_code=2)
    matter_of_judgement = all(name.startswith(("HW-RAM", "ENV-", "MEM-STATIC", "DISK-")) for name in failed)
    anyway = f", or make it a warning: preflight.downgrade=[{','.join(failed)}]" if matter_of_judgement else ""
    return PreflightError(f"Checks failed: {', '.join(failed)}.", do=f"see the remedies above{anyway}")


def render(report: PreflightReport) -> str:
    """The report as text: mark, check and finding; below a failed check or warning, the requirement and the remedy."""
    lines = []
    for check in report.checks:
        lines.append(f"{MARKS[check.status]} {check.id:<16} {check.found}")
        if check.status in (WARN, FAIL):
            needed = f"{check.needed} ({check.source})" if check.source else check.needed
            lines += [f"       {'':<16} needed: {needed}"] if check.needed else []
            lines += [f"       {'':<16} do: {check.remedy}"] if check.remedy else []
    lines.append(
        f"{report.passed} passed, {report.failed} failed ({report.critical_failures} critical), "
        f"{counted(report.warnings, 'warning')}, {report.skipped} skipped; level {report.level}, {report.seconds:.1f} s"
    )
    return "\n".join(lines)


def software_checks() -> list[Check]:
    """Check the versions of Python and all dependencies."""
    ok = sys.version_info >= MIN_PYTHON
    needed, remedy = "3.11 or newer", "install Python 3.11 or newer, then 'make clean && make'"
    return [
        verdict("PY-VERSION", "Python", ok, True, platform.python_version(), needed, sys.executable, remedy),
        *map(_dependency, DEPENDENCIES),
    ]


def _dependency(name: str) -> Check:
    identifier, source = f"DEP-{name.upper()}", "installed packages"
    version = version_of(name)
    if version == NOT_INSTALLED:
        return Check(identifier, name, FAIL, True, NOT_INSTALLED, "installed", source, "run 'make clean && make'")
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if name == "mlx" and numbers < MIN_MLX:
        why = "0.32 or newer; older versions abort if the GPU runs out of memory"
        return Check(identifier, name, FAIL, True, version, why, source, "run 'make clean && make'")
    return Check(identifier, name, PASS, True, version, source=source)


def engine_checks(machine: Machine, probe: Probe) -> list[Check]:
    """Check chip, memory, backend and BLAS."""
    memory = psutil.virtual_memory()
    gpu = machine.backend != "cpu"
    cores = f"{machine.chip}, {machine.physical_cores} cores, {machine.architecture}"
    room = f"budget {size(machine.memory_budget_bytes)}; {size(memory.available)} available of {size(memory.total)}"
    device = f": {machine.device}" if machine.device else ""
    backend = f"{machine.backend}{device}" if gpu else "cpu (no GPU: fine for tests and small models)"
    needed = f"at least {size(LEAST_BUDGET_BYTES)}, better {size(GOOD_BUDGET_BYTES)}"
    checks = [
        Check("HW-CHIP", "chip", PASS, False, cores),
        graded("HW-RAM", "memory", machine.memory_budget_bytes, (LEAST_BUDGET_BYTES, GOOD_BUDGET_BYTES), room, needed,
               "free memory, minus a reserve", "close other programs, or raise the limits in the ENV-* checks"),
        verdict("HW-GPU", "backend", gpu or sys.platform != "darwin", False, backend, "Metal on a Mac", "mlx",
                "install mlx's Metal wheels: 'make clean && make'"),
    ]  # fmt: skip
    if machine.backend == "cpu":
        fast = probe.blas_is_fast and probe.gemm_gflops >= SLOW_GFLOPS
        text = f"{probe.blas}, {probe.gemm_gflops:.0f} GFLOP/s in float32"
        text = text if probe.blas_is_fast else f"{text}; {probe.blas_reason}"
        checks.append(verdict("CPU-BLAS", "BLAS", fast, False, text, f"a fast BLAS, {SLOW_GFLOPS:.0f} GFLOP/s",
                              "product of two 1024 x 1024 matrices", "run 'make clean && make'"))  # fmt: skip
    return checks


def environment_checks(static_bytes: int) -> list[Check]:
    """Check limits of container and shell, and memory used by other programs."""
    memory = mac_checks() if sys.platform == "darwin" else [_swap_check()]
    return [_cgroup_check(static_bytes), _ulimit_check(static_bytes), *memory]


def _cgroup_check(static_bytes: int) -> Check:
    groups = memory_groups()
    limit, room = memory_limit_bytes(groups), memory_room_bytes(groups)
    if limit is None or room is None:
        return Check("ENV-CGROUP", "container", PASS, True, "no limit", source="cgroup")
    least = static_bytes + PROCESS_BYTES
    return verdict("ENV-CGROUP", "container", room >= least, True, f"{size(room)} left of a limit of {size(limit)}",
                   f"{size(least)} for weights and process", f"cgroup {groups[0]}",
                   "raise the container's limit (docker run --memory=…, systemd MemoryMax=…)")  # fmt: skip


def _ulimit_check(static_bytes: int) -> Check:
    names = {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA}
    limits = {flag: resource.getrlimit(kind)[0] for flag, kind in names.items()}
    limited = {flag: limit for flag, limit in limits.items() if limit != resource.RLIM_INFINITY}
    if not limited:
        return Check("ENV-ULIMIT", "ulimit", PASS, True, "no limit", source="getrlimit")
    flag, least = min(limited, key=lambda flag: limited[flag]), static_bytes + PROCESS_BYTES
    least += (
        psutil.Process().memory_info().vms if flag == "-v" else 0
    )  # it also counts memory that libraries map but never use
    status = FAIL if limited[flag] < least else WARN
    return Check("ENV-ULIMIT", "ulimit", status, True, f"ulimit {flag} is {size(limited[flag])}",
                 f"no limit, or at least {size(least)}; on CPU, mlx crashes if an allocation fails", "getrlimit",
                 f"ulimit {flag} unlimited")  # fmt: skip


def _swap_check() -> Check:
    swap = psutil.swap_memory()
    short = swap.used >= SWAP_BYTES and swap.used >= SWAP_SHARE * swap.total
    text = f"{size(swap.used)} used of {size(swap.total)}" if swap.total else "none"
    return verdict("ENV-SWAP", "swap", not short, False, text, f"less than {size(SWAP_BYTES)} or a quarter in use",
                   "psutil", "close other programs: training that swaps is ten times slower")  # fmt: skip


def mac_checks() -> list[Check]:
    """Run the macOS-only checks."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    checks = [
        pressure_check(sysctl_number(PRESSURE_LEVEL), sysctl_number(FREE_PERCENT)),
        watchdog_check(platform.mac_ver()[0], reports_since("*.panic", time.time() - 3600 * PANIC_HOURS)),
    ]
    return checks if battery is None else [*checks, power_check(bool(battery.power_plugged), battery.percent)]


def pressure_check(level: int, free_percent: int) -> Check:
    """Check macOS's own measure of memory pressure.

    Swap in use means nothing: macOS swaps idle pages even with half of its memory free, and enlarges swap on demand.
    Level 2 means little: 8 GB machines stay there with 46 % free.
    """
    short = level >= CRITICAL or 0 < free_percent < LITTLE_FREE_PERCENT
    reading = f"pressure {LEVELS[level]}, {free_percent} % free" if level in LEVELS else "unknown"
    return verdict("ENV-SWAP", "memory pressure", not short, False, reading,
                   f"not critical, at least {LITTLE_FREE_PERCENT} % free", f"sysctl {PRESSURE_LEVEL}, {FREE_PERCENT}",
                   "close other programs: training that swaps is ten times slower")  # fmt: skip


def power_check(plugged: bool, percent: float) -> Check:
    """Warn about a laptop on battery."""
    text = "mains" if plugged else f"battery, {percent:.0f} %"
    return verdict("MAC-POWER", "power", plugged, False, text, "mains", "psutil", "plug it in, and leave the lid open")


def watchdog_check(version: str, panics: Sequence[Path]) -> Check:
    """Warn about recent kernel panics, which GPU work can cause (mlx#3186)."""
    watched = int(version.partition(".")[0] or 0) >= WATCHDOG_SINCE
    text = f"macOS {version}"
    if watched:
        text += " may kill GPU work while the screen is in use (training then continues with shorter GPU calls)"
    if panics:
        names = ", ".join(path.name for path in panics[-3:])
        text += f"; {counted(len(panics), 'kernel panic')} in {PANIC_HOURS} hours: {names}"
    return verdict("MAC-WATCHDOG", "GPU watchdog", not panics, False, text, "no recent kernel panic",
                   str(REPORTS), "let the display sleep during training; after a crash, "
                   "the same command resumes the run")  # fmt: skip
