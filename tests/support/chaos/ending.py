"""One way for a training to end that is staged once, and what all of them need."""

import json
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.chaos.kills import RANKS
from tests.support.chaos.project import Done, Fingerprint, Project, left_over

LATE_CALL = 16  # of "micro-batch": somewhere in the middle of the training, with two checkpoints behind it


@dataclass(frozen=True)
class Ground:
    """Where endings are staged."""

    project: Project
    reference: Fingerprint
    folder: Path  # for projects of another kind


@dataclass
class Ending:
    """What was done, what was said of it, and what is wrong with that."""

    what: str
    verdict: str = ""  # cause and confidence
    phase: str = "–"
    resumed: str = "–"
    faults: list[str] = field(default_factory=list)

    def expect(self, told: dict[str, Any], **expected: object) -> None:
        """Compare a post-mortem with what it has to say."""
        self.verdict = f"{told.get('cause')} ({told.get('confidence')})"
        for key, value in expected.items():
            if told.get(key) != value:
                self.faults.append(f"{key} is {told.get(key)!r} and not {value!r}")
        if "phase" in expected:
            self.phase = "right" if told.get("phase") == expected["phase"] else f"wrong: {told.get('phase')}"

    def require(self, condition: bool, otherwise: str) -> None:
        """Note a fault unless ``condition`` holds."""
        if not condition:
            self.faults.append(otherwise)

    def compare(self, project: Project, reference: Fingerprint, done: Done) -> None:
        """Whether a training that has ended well ended as the one that nobody disturbed."""
        if done.code:
            self.resumed = "no"
            self.faults.append(f"ended with {done.code}: {done.last_line}")
            return
        same = project.fingerprint() == reference
        self.resumed = "bit for bit" if same else "differs"
        self.require(same, f"other results: {project.fingerprint()} and not {reference}")


def hit(action: str, site: str = "micro-batch", occurrence: int = LATE_CALL, **more: object) -> dict[str, Any]:
    """A plan for the injection: something else than a signal."""
    return {"action": action, "site": site, "occurrence": occurrence, "place": "entry", **more}


MIDDLE = 8  # call of "micro-batch" of a rank, with two checkpoints behind it
THROUGH_MLX_LAUNCH = """
import sys
from safetrain.core.hosts import Hosts
Hosts.all_here = property(lambda _self: False)
sys.argv = ["stages.train", *sys.argv[1:]]
from stages.train import main
main()
"""


def through_mlx_launch(ground: Ground, rank: int) -> Ending:
    """The ranks are started as on several machines, all of which are this one; one is killed, then all goes on."""
    project = ground.project
    ending = Ending(f"SIGKILL of rank {rank}, started by mlx.launch")
    hostfile = project.folder / "hosts.json"
    hostfile.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * RANKS))
    command = (sys.executable, "-c", THROUGH_MLX_LAUNCH)
    project.truth.unlink(missing_ok=True)
    plan = hit("signal", occurrence=MIDDLE, signal=int(signal.SIGKILL), rank=rank) | {"truth": str(project.truth)}
    project.discard()
    done = project.finish(project.start(*command, plan=plan))
    truth = project.read_truth() or {"step": -1}
    ending.expect(
        project.json("postmortem.json"), cause="killed", rank=rank, ranks=RANKS, phase="gradient",
        step=truth["step"] + 1, exit_code=137,
    )  # fmt: skip
    ending.require(done.code == 137, f"exit code {done.code}: {done.last_line}")
    ending.require(not (left := left_over(project.folder)), f"still there: {left}")
    again = project.finish(project.start(*command))
    ending.compare(project, ground.reference, again)
    ending.require(bool(again.continued_from), "it began anew")
    hostfile.unlink()
    return ending
