"""Checks pass, warn and fail where they should; the summary counts them."""

import dataclasses
from pathlib import Path

from safetrain.core.model_files import read_model_files
from safetrain.plan import preflight
from safetrain.plan.machine import read_machine_now
from tests.conftest import EMBEDDED
from tests.plan.test_machine import CPU
from tests.plan.test_recommend import data

MODEL = read_model_files(EMBEDDED)


def test_this_installation_passes() -> None:
    checks = [*preflight.software_checks(), *preflight.machine_checks(read_machine_now(CPU), CPU)]
    assert {"PY-VERSION", "DEP-MLX", "DEP-DVC", "HW-CHIP", "HW-RAM", "HW-GPU", "CPU-BLAS"} <= {c.id for c in checks}
    assert all(check.status == "pass" for check in checks if check.critical)
    assert len({check.id for check in checks}) == len(checks)


def test_a_model_that_does_not_load_fails_with_its_reason_and_remedy() -> None:
    broken = dataclasses.replace(CPU, loads=False, load_error="Model type xyz not supported.")
    check = preflight.model_checks(MODEL, broken)[-1]
    assert (check.status, check.critical) == ("fail", True)
    assert "xyz" in check.found
    assert check.remedy


def test_what_was_not_tried_is_not_called_passed() -> None:
    assert preflight.model_checks(MODEL, CPU)[-1].status == "skip"


def test_weights_larger_than_the_budget_fail() -> None:
    small = dataclasses.replace(read_machine_now(CPU), memory_budget_bytes=10**6)
    assert preflight.memory_check(MODEL, small).status == "fail"


def test_data_warnings_warn_and_empty_splits_fail() -> None:
    assert preflight.data_check(data()).status == "pass"
    assert preflight.data_check(dataclasses.replace(data(), warnings=("x",))).status == "warn"
    empty = dataclasses.replace(data(), test=dataclasses.replace(data().test, rows=0))
    assert preflight.data_check(empty).status == "fail"


def test_a_full_disk_fails_and_the_summary_counts(tmp_path: Path) -> None:
    full = preflight.disk_check(tmp_path, 2**60)
    fine = preflight.disk_check(tmp_path, 1)
    slow = preflight.machine_checks(
        read_machine_now(CPU), dataclasses.replace(CPU, blas_is_fast=False, blas_reason="patchelf is not installed")
    )[-1]
    report = preflight.summarise([full, fine, slow], read_machine_now(CPU), tmp_path)
    assert (report.passed, report.failed, report.warnings, report.critical_failures) == (1, 1, 1, 1)
    text = preflight.render(report.checks, report)
    assert "1 passed, 1 failed (1 critical), 1 warnings" in text
    assert "do: free some disk space" in text
    assert "patchelf is not installed" in text
