"""Checks pass, warn and fail where they should, say why and what to do; the summary counts them."""

import dataclasses
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.reports import Machine
from safetrain.core.records.run_state import RunIdentity, RunState
from safetrain.core.records.schema import Train
from safetrain.core.records.settings import Recommendation
from safetrain.core.storage.files import write_record
from safetrain.core.storage.paths import POINTER
from safetrain.plan import preflight
from safetrain.plan.check_report import CHECKS, Check, downgrade, render, require_known, skipped, summarise
from safetrain.plan.machine import Probe, read_machine_now, settle
from safetrain.plan.preflight import (
    engine_checks,
    environment_checks,
    judge,
    model_checks,
    packages_check,
    pressure_check,
    report_lines,
    selftest,
)
from tests.conftest import EMBEDDED, ROOT
from tests.plan.test_recommend import OPEN, data, plan

CPU = Probe("cpu", "", 0, 0, 0, 140 * 2**20, "OpenBLAS", True, "", 200.0)
MODEL = read_model_files(EMBEDDED)
MACHINE = read_machine_now(CPU)


def fit(planned: Recommendation, *, by_dry_run: bool = False) -> Check:
    return preflight.fit_check(planned, by_dry_run=by_dry_run)


def of_model(name: str, probe: Probe = CPU, machine: Machine = MACHINE, train: Train = OPEN) -> Check:
    return next(check for check in model_checks(MODEL, machine, probe, train) if check.id == name)


def summary(*checks: Check) -> tuple[str, int]:
    report = summarise(checks, "probe", 1.0)
    return report.status, report.exit_code


def test_this_installation_passes() -> None:
    checks = [
        packages_check(), *engine_checks(MACHINE, CPU), *environment_checks(10**6),
        preflight.data_check(data()), preflight.model_files(EMBEDDED)[1],
        fit(plan()), *model_checks(MODEL, MACHINE, dataclasses.replace(CPU, loads=True, trains=True), OPEN),
    ]  # fmt: skip
    assert {check.id for check in checks} <= set(CHECKS)
    assert all(check.status == "pass" for check in checks if check.critical)
    assert len({check.id for check in checks}) == len(checks)


def test_a_model_that_does_not_load_or_has_no_gradient_fails_with_its_reason_and_remedy() -> None:
    why = "mlx-lm's model has no gradient here: [Primitive::vjp] Not implemented for CustomKernel."
    broken = dataclasses.replace(CPU, loads=False, load_error="Model type xyz not supported.")
    frozen = dataclasses.replace(CPU, loads=True, trains=False, train_error=why)
    for check, said in (
        (of_model("MODEL-LOAD", broken), "xyz"), (of_model("MODEL-TRAIN", frozen), f"llama: {why}"),
    ):  # fmt: skip
        assert (check.status, check.critical, said in check.found, bool(check.remedy)) == ("fail", True, True, True)
    assert [of_model(each).status for each in ("MODEL-LOAD", "MODEL-TRAIN")] == ["skip", "skip"], "not called passed"


def test_a_package_that_is_missing_fails_and_another_version_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    for requires, expected in (
        (["numpy>=2", "torch; extra == 'peft'"], ("pass", "")),
        (["numpy>=2", "dvc==1.0"], ("warn", "dvc==1.0")),
        (["numpy>=2", "no-such-package"], ("fail", "no-such-package")),
    ):
        monkeypatch.setattr(importlib.metadata, "requires", lambda _name, lines=requires: lines)
        check = packages_check()
        assert (check.status, check.needed) == expected
        assert f"numpy {importlib.metadata.version('numpy')}" in check.found


IDENTITY = RunIdentity("model", "rows", "valid", "{}")


def test_an_unfinished_run_of_other_rows_fails_before_train_would_refuse_it(tmp_path: Path) -> None:
    other = dataclasses.replace(IDENTITY, training_rows="new")
    write_record(tmp_path / POINTER, RunState(False, "", 57, IDENTITY))
    assert preflight.previous_run_check(tmp_path, other).status == "pass"  # no checkpoint to be refused
    (tmp_path / "checkpoint_epoch_0_step_57").mkdir()
    check = preflight.previous_run_check(tmp_path, other)
    assert (check.status, check.critical) == ("fail", True)
    assert check.found.endswith("stopped at step 57, and this run differs in: training rows")
    assert check.remedy.startswith("safetrain discard")
    for planned in (IDENTITY, None):
        assert preflight.previous_run_check(tmp_path, planned).status == "pass"
    write_record(tmp_path / POINTER, RunState(True, "", 57, IDENTITY))
    assert preflight.previous_run_check(tmp_path, other).status == "pass"


def test_the_summary_counts_and_the_text_says_what_to_do(tmp_path: Path) -> None:
    full = preflight.disk_check(tmp_path, 2**60)
    slow = list(engine_checks(MACHINE, dataclasses.replace(CPU, blas_is_fast=False, blas_reason="no patchelf")))[-1]
    report = summarise([full, preflight.disk_check(tmp_path, 1), slow], "quick", 0.5)
    assert report.warnings == 1
    text = render(report)
    for said in ("1 passed, 1 failed (1 critical), 1 warning, 0 skipped", "do: free some space", "no patchelf",
                 "needed: 1,073,741,824.00 GiB for checkpoints"):  # fmt: skip
        assert said in text
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert preflight.disk_check(tmp_path, free - 2**29).status == "warn"


def test_a_failure_is_exit_1_an_open_question_2_a_warning_0_and_names_can_be_lowered(tmp_path: Path) -> None:
    good, bad = Check("A", "pass", True, ""), Check("B", "fail", True, "")
    warning, unasked = Check("C", "warn", False, ""), skipped("D", "not at this level")
    assert summary(good, warning, unasked) == ("pass", 0)
    assert summary(good, bad) == ("fail", 1)
    assert summary(good, skipped("D", "mlx does not work", critical=True)) == ("open", 2)
    [lowered] = downgrade([bad], ["B"])
    assert (lowered.status, lowered.critical, "downgraded" in lowered.found) == ("warn", False, True)
    assert downgrade([bad], ["HW-RAM"]) == [bad]
    with pytest.raises(ConfigError, match=r"one of .*DISK-FREE"):
        require_known(["disk-fre"])


def test_a_mac_under_pressure_is_told() -> None:
    pressure = {(1, 54): "pass", (2, 46): "pass", (2, 14): "warn", (4, 30): "warn", (0, 0): "pass"}  # not by swap
    assert {at: pressure_check(*at).status for at in pressure} == pressure


def test_small_changes_of_the_budget_are_ignored_and_large_ones_are_not() -> None:
    before = read_machine_now(CPU)

    def now(share: float) -> Machine:
        return dataclasses.replace(before, memory_budget_bytes=int(share * before.memory_budget_bytes))

    assert settle(now(0.92), before) == before
    assert settle(now(1.2), before) == before
    assert settle(now(0.88), before) == now(0.88)
    assert settle(now(1.4), before) == now(1.4)
    assert settle(dataclasses.replace(now(1.1), mlx="9"), before) == dataclasses.replace(before, mlx="9")
    assert settle(now(0.5), None) == now(0.5)
    for timed, again in ((False, True), (True, False)):
        first, second = (dataclasses.replace(now(1.0), dequantizing_pays=each) for each in (timed, again))
        assert settle(second, first).dequantizing_pays is timed, "a plan does not change with what is close"
        assert settle(second, now(1.0)).dequantizing_pays is again, "a record of before knows nothing of it"
    assert before.process_memory_bytes == 224 * 2**20  # 140 and 64, up to a multiple of 32
    a_little_more = read_machine_now(dataclasses.replace(CPU, process_bytes=170 * 2**20))
    assert settle(a_little_more, before).process_memory_bytes == before.process_memory_bytes


def command(*words: str) -> str:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_wrong_gradient_fails() -> None:
    found = {
        "in_float32": True, "on_cpu": True, "loss_difference": 1e-7, "gradient_difference": 0.2, "packs_rows": True,
        "layers_with_adapter": 2, "step_seconds": 1.0, "tokens_per_second": 1.0, "peak_memory_bytes": 1,
    }  # fmt: skip
    assert [name for name, _, passed in judge(found) if not passed] == ["gradient"]


def test_the_command_says_what_it_found() -> None:
    said = command("selftest")
    assert said.count("[ok]") == 5
    assert said.endswith("the self-test passed\n")


def test_the_report_is_one_screen_without_names() -> None:
    said = command("selftest", "--report")
    lines = said.splitlines()
    assert lines[0] == lines[-1] == "```"
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert [name for name in ("PACKAGES", "HW-RAM", "HW-GPU", "gradient") if name not in said] == []
    assert "[FAIL]" not in said
    for name in ("loss ", "gradient "):
        assert float(" ".join(said.split()).partition(f"{name}differs by")[2].split()[0]) < 1e-5  # from mlx-lm's own
    for name in (str(Path.home()), str(ROOT), platform.node(), sys.prefix):
        assert name not in said


def test_a_child_that_dies_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying_child.py").write_text(
        "import os, sys\n"
        "print('a banner', flush=True)\n"
        "if len(sys.argv) > 1: raise OSError(f'{os.getcwd()}/secret is missing')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(MachineError, match="did not finish"):
        selftest("dying_child", tmp_path / "nowhere")
    text = "\n".join(report_lines("dying_child", tmp_path))
    assert "[FAIL] MACHINE    the child process gave no readable answer\n" in text
    assert "[FAIL] TRAINING   exit code 1: OSError\n" in text
    assert "secret" not in text
    assert "banner" not in text
