"""Machines of a hostfile: asked by ssh, compared with this one, before a training over all of them begins."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.model.files import read_model_files
from safetrain.core.records.hostfile import Hosts
from safetrain.plan import hosts, preflight
from safetrain.plan.candidates import PlanInputs
from safetrain.plan.checks import Check
from safetrain.plan.hosts import differences, facts_here, host_checks, is_shared, room_checks
from safetrain.plan.machine import read_machine_now
from tests.conftest import EMBEDDED
from tests.plan.test_preflight import CPU
from tests.plan.test_recommend import NO_LORA_PINS, OPEN, data

SSH = """#!/bin/sh
test "$1 $2 $3" = "-o BatchMode=yes -o" && test "$5" = "--" || exit 99
case "$6" in
  gone) echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255 ;;
  asks) echo "me@asks: Permission denied (publickey,password)." >&2; exit 255 ;;
  bare) echo "sh: 1: cd: can't cd to /project" >&2; exit 2 ;;
  mute) echo "Welcome!" ;;
  older) sh -c "$7" | sed 's/"mlx": "[^"]*"/"mlx": "0.1.0"/' ;;
  *) echo "Welcome to $6"; exec sh -c "$7" ;;
esac
"""


def by_id(checks: list[Check]) -> dict[str, Check]:
    assert {check.id for check in checks} <= set(preflight.IDS)
    return {check.id: check for check in checks}


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called ssh that runs the command here, in the tests' project."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    project = tmp_path / "a project's folder"
    project.mkdir()
    monkeypatch.chdir(project)
    return project


def found_on(project: Path, *names: str) -> dict[str, Check]:
    entries = [{"ssh": name, "ips": [f"10.0.0.{place}"]} for place, name in enumerate(("127.0.0.1", *names))]
    (project / "hosts.json").write_text(json.dumps(entries))
    train = dataclasses.replace(OPEN, ranks=len(entries), hostfile="hosts.json")
    assert is_shared(train)
    return by_id(host_checks(train, EMBEDDED)[0])


def test_hosts_are_asked_by_ssh_and_compared(ssh: Path) -> None:
    checks = found_on(ssh, "mac2", "older")
    assert {name: check.status for name, check in checks.items()} == {
        "HOSTS-FILE": "pass", "HOSTS-REACHED": "pass", "HOSTS-EQUAL": "fail",
    }  # fmt: skip
    assert checks["HOSTS-EQUAL"].critical
    assert "older has mlx 0.1.0" in checks["HOSTS-EQUAL"].found
    assert "mac2" not in checks["HOSTS-EQUAL"].found


@pytest.mark.parametrize(
    ("name", "why", "do"),
    [
        ("gone", "No route to host", "'ssh -o BatchMode=yes gone true' works"),
        ("asks", "Permission denied", "ssh-copy-id asks"),
        ("bare", "can't cd", "install the project"),
        ("mute", "cannot be read", "install the project"),
    ],
)
def test_a_host_that_does_not_answer_fails_with_what_ssh_said(ssh: Path, name: str, why: str, do: str) -> None:
    checks = found_on(ssh, name)
    assert checks["HOSTS-REACHED"].status == "fail"
    assert f"{name}: " in checks["HOSTS-REACHED"].found
    assert why in checks["HOSTS-REACHED"].found
    assert do in checks["HOSTS-REACHED"].remedy
    assert checks["HOSTS-EQUAL"].status == "skip"


def test_a_hostfile_of_another_number_of_ranks_is_refused_and_nobody_is_asked(ssh: Path) -> None:
    (ssh / "hosts.json").write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}]))
    checks, where = host_checks(dataclasses.replace(OPEN, ranks=3, hostfile="hosts.json"), EMBEDDED)
    assert [(check.id, check.status) for check in checks] == [("HOSTS-FILE", "fail")]
    assert where is None


def test_what_differs_is_named_with_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = {**facts_here(EMBEDDED), "data/validated": "a1 b2"}
    assert here["base model"] == read_model_files(EMBEDDED).fingerprint
    there = {**facts_here(tmp_path), "Python": "3.12.1"}
    assert differences("mac2", there, here) == [
        f"mac2 has Python 3.12.1, this machine {here['Python']}", "mac2 has no data/validated",
        "mac2 has no base model",
    ]  # fmt: skip
    assert differences("mac2", {**here, "data/validated": "c3"}, here) == ["mac2 has a different data/validated"]


def test_the_memory_is_needed_as_often_as_there_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(budget: int, cores: int = 2) -> dict[str, Check]:
        monkeypatch.setattr(hosts, "usable_cores", lambda: cores)
        machine = dataclasses.replace(read_machine_now(CPU), memory_budget_bytes=budget, process_memory_bytes=2**27)
        rows = TokenRows.of([token_row(list(range(5)), [True] * 5)] * 8)
        inputs = PlanInputs(data(64), machine, read_model_files(EMBEDDED), TrainingRows(rows, rows, "t", "v"))
        assert not room_checks(Hosts(("127.0.0.1", "mac2")), inputs, OPEN, NO_LORA_PINS)
        return by_id(room_checks(Hosts(("127.0.0.1", "127.0.0.1")), inputs, OPEN, NO_LORA_PINS))

    roomy, tight = found(2**32), found(2**27, cores=1)
    assert (roomy["RANKS-ROOM"].status, roomy["RANKS-CORES"].status) == ("pass", "pass")
    assert (tight["RANKS-ROOM"].status, tight["RANKS-CORES"].status) == ("fail", "warn")
    assert "2 ranks" in tight["RANKS-ROOM"].needed
