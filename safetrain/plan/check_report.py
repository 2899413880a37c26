"""A preflight check, its report, and how both are printed."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from safetrain.core.errors import ConfigError, SafetrainError
from safetrain.core.formatting import counted
from safetrain.core.storage import paths

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"
MARKS = {PASS: "[ok]  ", WARN: "[warn]", FAIL: "[FAIL]", SKIP: "[skip]"}
REINSTALL = "install safetrain again; in a clone: make clean && make BACKEND=NAME, with the backend of this machine"
CHECKS = {  # what to do if the check fails; empty if the finding itself says it
    "PACKAGES": REINSTALL,
    "HW-RAM": "close other programs, or raise the memory limit of the container or shell",
    "HW-GPU": REINSTALL,
    "CPU-BLAS": f"if other programs were busy, run this again; else {REINSTALL}",
    "ENV-ULIMIT": "remove the limit from your profile or job script, and start a new terminal",
    "ENV-SWAP": "close other programs: training that swaps is ten times slower",
    "MODEL-FILES": "",
    "DATA-FILES": f"see {paths.DATA_REPORT}",
    "RUN-PREV": "safetrain discard (deletes that run), or use its data and model again",
    "HOSTS-FILE": "",
    "MODEL-LOAD": "use a model that mlx-lm supports: safetrain fetch HUB_ID",
    "TOOL-CALLS": "answers with calls are scored as texts, unless evaluate.checker is set; training is not affected",
    "MODEL-TRAIN": "train a model of another family; a newer mlx-lm may train this one",
    "MEM-STATIC": "use a smaller or more strongly quantized model: safetrain estimate MODEL",
    "DISK-FREE": f"free some space: du -sh {paths.OUTPUT}/*",
    "MEM-FIT": "",
}


@dataclass(frozen=True)
class Check:
    """A check and its verdict. A failed critical check stops the pipeline; a skipped one leaves the report open."""

    id: str  # one of CHECKS; preflight.downgrade names it
    status: str
    critical: bool
    found: str
    needed: str = ""  # the threshold
    remedy: str = ""  # one thing to do, if possible a command


@dataclass(frozen=True)
class PreflightReport:
    """Content of preflight_report.json."""

    status: str  # pass, fail, open
    exit_code: int  # 0: pass, 1: a critical check failed, 2: a critical check was skipped
    level: str
    seconds: float
    passed: int
    failed: int
    critical_failures: int
    warnings: int
    skipped: int
    checks: tuple[Check, ...]


def verdict(identifier: str, ok: bool, critical: bool, found: str, needed: str = "") -> Check:
    """A check that passes if ``ok``; else it fails if it is critical, and warns if not."""
    status = PASS if ok else FAIL if critical else WARN
    return Check(identifier, status, critical, found, needed, "" if ok else CHECKS[identifier])


def skipped(identifier: str, why: str, *, critical: bool = False) -> Check:
    """A check that was not run. ``critical``: the preflight level requires its result."""
    return Check(identifier, SKIP, critical, f"not checked: {why}")


def from_error(identifier: str, error: SafetrainError) -> Check:
    parts = [part for part in (error.what.rstrip("."), error.where, error.got) if part]
    return Check(identifier, FAIL, True, "; ".join(parts), error.expected, error.do)


def require_known(identifiers: Sequence[str]) -> None:
    """Raise ConfigError for an unknown check ID."""
    for identifier in sorted(set(identifiers) - set(CHECKS)):
        expected = f"one of {', '.join(CHECKS)}"
        raise ConfigError(f"Unknown check {identifier}.", where="preflight.downgrade", expected=expected)


def downgrade(checks: Sequence[Check], identifiers: Sequence[str]) -> list[Check]:
    """Turn failures of the named checks into warnings."""
    lowered = []
    for check in checks:
        if check.id in identifiers:
            check = dataclasses.replace(check, critical=False)
            if check.status == FAIL:
                check = dataclasses.replace(check, status=WARN, found=f"{check.found} (downgraded by you)")
        lowered.append(check)
    return lowered


def summarise(checks: Sequence[Check], level: str, seconds: float) -> PreflightReport:
    critical = [check.status for check in checks if check.critical]
    code = 1 if FAIL in critical else 2 if SKIP in critical else 0
    passed, warnings, failed, not_run = (sum(check.status == status for check in checks) for status in MARKS)
    return PreflightReport(
        ("pass", "fail", "open")[code], code, level, round(seconds, 2), passed, failed, critical.count(FAIL), warnings,
        not_run, tuple(checks),
    )  # fmt: skip


def failure(report: PreflightReport) -> SafetrainError:
    """The error that stops the pipeline, with the names of the checks that failed or were not possible."""
    status, what = (FAIL, "failed") if report.exit_code == 1 else (SKIP, "not possible")
    names = ", ".join(check.id for check in report.checks if check.status == status and check.critical)
    return SafetrainError(f"Checks {what}: {names}.", do="see their lines above", exit_code=report.exit_code)


def render(report: PreflightReport) -> str:
    """The report as text: mark, check and finding; below a failed check or warning, the requirement and the remedy."""
    lines = []
    for check in report.checks:
        lines.append(f"{MARKS[check.status]} {check.id:<16} {check.found}")
        if check.status in (WARN, FAIL):
            lines += [f"       {'':<16} needed: {check.needed}"] if check.needed else []
            lines += [f"       {'':<16} do: {check.remedy}"] if check.remedy else []
    counts = f"{report.passed} passed, {report.failed} failed ({report.critical_failures} critical), "
    counts += f"{counted(report.warnings, 'warning')}, {report.skipped} skipped"
    return "\n".join([*lines, f"{counts}; level {report.level}, {report.seconds:.1f} s"])
