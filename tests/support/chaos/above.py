"""Endings that come from above the training process: its supervisor, dvc, the machine."""

import json
import os
import signal
from collections.abc import Iterator

from tests.support.chaos.ending import LATE_CALL, Ending, Ground, hit
from tests.support.chaos.project import left_over

STALE = ".dvc/tmp/rwlock"


def above(ground: Ground) -> Iterator[Ending]:
    """All of them."""
    yield supervisor_killed(ground, rebooted=False)
    yield supervisor_killed(ground, rebooted=True)
    yield from (dvc_killed(ground, action) for action in ("signal from outside", "hang"))


def supervisor_killed(ground: Ground, *, rebooted: bool) -> Ending:
    """kill -9 of the stage; with another boot id in the marker it looks like a reboot."""
    project = ground.project
    ending = Ending("kill -9 of the supervisor" + (", and another boot id since" if rebooted else ""))
    process = project.start_training(plan=hit("hang"), anew=True)
    project.wait_until_hit(process)
    os.kill(process.pid, signal.SIGKILL)
    done = project.finish(process)
    ending.require(done.code == -signal.SIGKILL, f"exit code {done.code}")
    ending.require(not (left := left_over(project.folder)), f"still there after 5 s: {left}")
    if rebooted:
        marker = project.flight / "run.json"
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {"boot_id": "another"}))
    truth = project.read_truth() or {}
    again = project.train()
    told = project.json("postmortem.json")
    cause, confidence = ("reboot", "confirmed") if rebooted else ("supervisor_killed", "likely")
    ending.expect(
        told, cause=cause, confidence=confidence, is_memory=False, exit_code=137, phase="gradient",
        step=truth["step"] + 1,
    )  # fmt: skip
    ending.require("ended suddenly" in again.out, "the next start does not say so")
    ending.compare(project, ground.reference, again)
    promised, found = told.get("resumes_from_step"), again.continued_from
    ending.require(bool(found) and found == promised, f"continued from step {found}, promised was {promised}")
    return ending


def dvc_killed(ground: Ground, action: str) -> Ending:
    """kill -9 of dvc while it reproduces the stage; the training stops by itself, also when it hangs."""
    project = ground.project
    hangs = action == "hang"
    ending = Ending("kill -9 of 'dvc repro'" + (" while the gradient hangs" if hangs else ""))
    if not (project.folder / ".git").exists():
        for command in (("init", "-q"), ("config", "user.name", "T"), ("config", "user.email", "t@localhost")):
            project.succeed("git", *command)
    project.succeed("git", "add", "-A")
    project.succeed("git", "commit", "-q", "--allow-empty", "-m", "start")
    project.succeed("safetrain", "discard")
    project.truth.unlink(missing_ok=True)
    plan = hit(action, occurrence=LATE_CALL // 2) | {"truth": str(project.truth)}
    (project.output / "postmortem.json").unlink(missing_ok=True)
    process = project.start("dvc", "repro", "-f", "-s", "train", plan=plan)
    project.wait_until_hit(process)
    os.kill(process.pid, signal.SIGKILL)
    project.finish(process)  # collects it: a zombie would count as alive for DVC's own lock
    ending.require(not (left := left_over(project.folder)), f"still there after 5 s: {left}")
    truth, told = project.read_truth() or {}, project.json("postmortem.json")
    phase = "gradient" if hangs else "after save"
    ending.expect(told, cause="orphaned", confidence="confirmed", is_memory=False, phase=phase)
    found = go_on_with_dvc(ground, ending)
    promised = told.get("resumes_from_step")
    ending.require(bool(found) and found == promised, f"continued from step {found}, promised was {promised}")
    if not hangs:
        ending.require((found or 0) > truth["step"], "a stop lost steps")
    return ending


def go_on_with_dvc(ground: Ground, ending: Ending) -> int | None:
    """The next ``dvc repro``; returns the step that it continued from."""
    project = ground.project
    done = project.finish(project.start("dvc", "repro", "-s", "-f", "train"))
    if done.code and "rwlock" in done.out:
        ending.faults.append("DVC's own lock is still held by the dead dvc")
        (project.folder / STALE).unlink(missing_ok=True)
        done = project.finish(project.start("dvc", "repro", "-s", "-f", "train"))
    ending.compare(project, ground.reference, done)
    return project.json("training_summary.json").get("resumed_from_step")
