"""Preflight checks as values: a verdict, what was found, what is needed and by which source, and one remedy."""

import dataclasses
import difflib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from safetrain.core.errors import ConfigError, PreflightError, SafetrainError
from safetrain.core.formatting import counted
from safetrain.core.storage import paths

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"
MARKS = {PASS: "[ok]  ", WARN: "[warn]", FAIL: "[FAIL]", SKIP: "[skip]"}
SCHEMA = 1


@dataclass(frozen=True)
class Check:
    """One check and its verdict. A critical one that fails stops the pipeline; skipped, it leaves a question open."""

    id: str  # stable, to be named in preflight.downgrade
    name: str
    status: str
    critical: bool
    found: str
    needed: str = ""  # the threshold
    source: str = ""  # where the value was read
    remedy: str = ""  # one thing to do, a command where there is one


@dataclass(frozen=True)
class PreflightReport:
    """preflight_report.json: today's readings."""

    schema: int
    status: str  # pass, fail, open
    exit_code: int  # 0 pass, 1 a critical check failed, 2 one could not be answered
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
    """Pass, or fail when critical and warn when not."""
    status = PASS if ok else FAIL if critical else WARN
    return Check(identifier, name, status, critical, found, needed, source, "" if ok else remedy)


def graded(
    identifier: str, name: str, value: float, thresholds: tuple[float, float], found: str, needed: str, source: str,
    remedy: str,
) -> Check:  # fmt: skip
    """Fail below the first threshold, warn below the second."""
    status = FAIL if value < thresholds[0] else WARN if value < thresholds[1] else PASS
    return Check(identifier, name, status, True, found, needed, source, "" if status == PASS else remedy)


def skipped(identifier: str, name: str, why: str, *, critical: bool = False) -> Check:
    """Not executed. ``critical``: this level asks for it, and it could not be answered."""
    return Check(identifier, name, SKIP, critical, f"not checked: {why}")


def from_error(identifier: str, name: str, error: SafetrainError) -> Check:
    """A failed check that says what the error says."""
    parts = [part for part in (error.what.rstrip("."), error.where, error.got) if part]
    return Check(identifier, name, FAIL, True, "; ".join(parts), error.expected, "", error.do)


def require_known(identifiers: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError for a name that no check has."""
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
    """Failures of the named checks as warnings."""
    return [_lowered(check) if check.id in identifiers else check for check in checks]


def _lowered(check: Check) -> Check:
    if check.status == FAIL:
        return dataclasses.replace(check, status=WARN, critical=False, found=f"{check.found} (downgraded by you)")
    return dataclasses.replace(check, critical=False)


def summarise(
    checks: Sequence[Check], level: str, seconds: float, total_memory_bytes: int | None = None
) -> PreflightReport:
    """Count the verdicts, with today's readings."""
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
    """The error that ends the pipeline: which checks failed or could not be answered, and what to do."""
    failed = [check.id for check in report.checks if check.status == FAIL]
    unanswered = [check.id for check in report.checks if check.status == SKIP and check.critical]
    if report.exit_code == 2:
        return PreflightError(2, f"Could not be checked: {', '.join(unanswered)}.", do="see their lines above")
    matter_of_judgement = all(name.startswith(("HW-RAM", "ENV-", "MEM-STATIC", "DISK-")) for name in failed)
    anyway = f", or take it as a warning: preflight.downgrade=[{','.join(failed)}]" if matter_of_judgement else ""
    return PreflightError(1, f"Checks failed: {', '.join(failed)}.", do=f"see the remedies above{anyway}")


def render(report: PreflightReport) -> str:
    """The report as text: mark, check and finding; below a check that did not pass, what is needed and the remedy."""
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
