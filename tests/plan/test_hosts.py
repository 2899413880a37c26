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
from safetrain.plan.checks import Check
from safetrain.plan.choose import PlanInputs
from safetrain.plan.host_facts import HostFacts, facts_here
from safetrain.plan.hosts import (
    HostAnswer,
    answer_of,
    clock_error,
    cores_check,
    host_checks,
    is_shared,
    judge,
    room_checks,
)
from safetrain.plan.machine import read_machine_now
from tests.conftest import EMBEDDED
from tests.plan.test_machine import CPU
from tests.plan.test_recommend import NO_LORA_PINS, OPEN, data

HERE = HostFacts("3.11.7", "0.9.0", "0.32.4", "0.32.2", "2.4.0", "a1 b2", "c3", 1000.0)
SAME = HostAnswer("mac2", HERE, asked=999.0, answered=1001.0)
SSH = """#!/bin/sh
test "$1 $2 $3" = "-o BatchMode=yes -o" && test "$5" = "--" || exit 99
case "$6" in
  gone) echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255 ;;
  asks) echo "me@asks: Permission denied (publickey,password)." >&2; exit 255 ;;
  bare) echo "sh: 1: cd: can't cd to /project" >&2; exit 2 ;;
  older) sh -c "$7" | sed 's/"mlx": "[^"]*"/"mlx": "0.1.0"/' ;;
  *) echo "Welcome to $6"; exec sh -c "$7" ;;
esac
"""


def by_id(checks: list[Check]) -> dict[str, Check]:
    return {check.id: check for check in checks}


def told(**changes: object) -> HostAnswer:
    return dataclasses.replace(SAME, facts=dataclasses.replace(HERE, **changes))  # type: ignore[arg-type]


def test_machines_that_are_alike_pass() -> None:
    checks = judge([SAME, dataclasses.replace(SAME, name="mac3")], HERE)
    assert [(check.id, check.status) for check in checks] == [
        ("HOSTS-REACHED", "pass"), ("HOSTS-EQUAL", "pass"), ("HOSTS-CLOCK", "pass"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mlx": "0.31.0"}, "mac2 has mlx 0.31.0, this machine 0.32.4"),
        ({"python": "3.12.1"}, "Python 3.12.1"),
        ({"data": "other"}, "mac2 has another data/validated"),
        ({"data": "none"}, "mac2 has no data/validated"),
        ({"model": "none"}, "mac2 has no base model"),
    ],
)
def test_what_differs_is_named_with_its_machine(changes: dict[str, object], said: str) -> None:
    check = by_id(judge([SAME, told(**changes)], HERE))["HOSTS-EQUAL"]
    assert (check.status, check.critical) == ("fail", True)
    assert said in check.found


@pytest.mark.parametrize(
    ("seconds", "off", "status"), [(1000, 0, "pass"), (1005, 4, "pass"), (994, -5, "pass"), (1010, 9, "warn"),
                                   (900, -99, "warn")]
)  # fmt: skip
def test_a_clock_is_off_by_what_the_connection_cannot_explain(seconds: float, off: float, status: str) -> None:
    answer = told(seconds=float(seconds))
    assert clock_error(answer) == off
    assert by_id(judge([answer], HERE))["HOSTS-CLOCK"].status == status


def test_a_login_may_say_things_before_the_answer() -> None:
    said = f"Welcome!\n\n{json.dumps(dataclasses.asdict(HERE))}\n"
    assert answer_of("mac2", 0, said, "", 999.0, 1001.0) == SAME
    assert answer_of("mac2", 0, "Welcome!\n", "", 0, 0).facts is None
    assert answer_of("mac2", 0, '{"python": 3}', "", 0, 0).facts is None
    assert answer_of("mac2", 127, "", "sh: python: not found", 0, 0).connected


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
        "HOSTS-FILE": "pass", "HOSTS-REACHED": "pass", "HOSTS-EQUAL": "fail", "HOSTS-CLOCK": "pass",
    }  # fmt: skip
    assert "older has mlx 0.1.0" in checks["HOSTS-EQUAL"].found
    assert "mac2" not in checks["HOSTS-EQUAL"].found


@pytest.mark.parametrize(
    ("name", "why", "do"),
    [
        ("gone", "No route to host", "'ssh -o BatchMode=yes gone true' works"),
        ("asks", "Permission denied", "ssh-copy-id asks"),
        ("bare", "can't cd", "put the project"),
    ],
)
def test_a_host_that_does_not_answer_fails_with_what_ssh_said(ssh: Path, name: str, why: str, do: str) -> None:
    checks = found_on(ssh, name)
    assert checks["HOSTS-REACHED"].status == "fail"
    assert f"{name}: " in checks["HOSTS-REACHED"].found
    assert why in checks["HOSTS-REACHED"].found
    assert do in checks["HOSTS-REACHED"].remedy
    assert checks["HOSTS-EQUAL"].status == checks["HOSTS-CLOCK"].status == "skip"


def test_a_hostfile_of_another_number_of_ranks_is_refused_and_nobody_is_asked(ssh: Path) -> None:
    (ssh / "hosts.json").write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}]))
    checks, where = host_checks(dataclasses.replace(OPEN, ranks=3, hostfile="hosts.json"), EMBEDDED)
    assert [(check.id, check.status) for check in checks] == [("HOSTS-FILE", "fail")]
    assert where is None


def test_ranks_on_this_machine_alone_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    checks, where = host_checks(dataclasses.replace(OPEN, ranks=2), EMBEDDED)
    assert [check.id for check in checks] == ["HOSTS-FILE"]
    assert where is not None
    assert where.ranks_here == 2
    assert not is_shared(OPEN)


def inputs(budget: int) -> PlanInputs:
    machine = dataclasses.replace(read_machine_now(CPU), memory_budget_bytes=budget, process_memory_bytes=2**27)
    rows = TokenRows.of([token_row(list(range(5)), [True] * 5)] * 8)
    return PlanInputs(data(longest=64), machine, read_model_files(EMBEDDED), TrainingRows(rows, rows, "t", "v"))


def test_the_memory_is_needed_as_often_as_there_are_ranks() -> None:
    both = Hosts(("127.0.0.1", "127.0.0.1"))
    roomy, tight = (by_id(room_checks(both, inputs(size), OPEN, NO_LORA_PINS)) for size in (2**32, 2**27))
    assert roomy["RANKS-ROOM"].status == "pass"
    assert tight["RANKS-ROOM"].status == "fail"
    assert "2 ranks" in tight["RANKS-ROOM"].needed
    assert not room_checks(Hosts(("127.0.0.1", "mac2")), inputs(2**32), OPEN, NO_LORA_PINS)


def test_more_ranks_than_cores_only_warn() -> None:
    assert cores_check(2, 2).status == "pass"
    assert (cores_check(3, 2).status, cores_check(3, 2).critical) == ("warn", False)


def test_every_check_has_its_name_in_the_list_of_all() -> None:
    assert {check.id for check in judge([SAME], HERE)} <= set(preflight.IDS)
    assert {"HOSTS-FILE", "RANKS-CORES", "RANKS-ROOM"} <= set(preflight.IDS)


def test_facts_without_data_or_model_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = facts_here(tmp_path)
    assert (found.data, found.model) == ("none", "none")
    assert facts_here(EMBEDDED).model == read_model_files(EMBEDDED).fingerprint
    assert hosts.differences("mac2", found, HERE)
