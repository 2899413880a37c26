"""Whether several ranks can train together: the machines of train.hostfile, and room for those that share this one."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.formatting import counted, size_text
from safetrain.core.memory.terms import usable_cores
from safetrain.core.records.hostfile import Hosts, hosts_of, is_here
from safetrain.core.records.schema import Lora, Train
from safetrain.core.storage.files import from_json
from safetrain.plan.candidates import best_fit
from safetrain.plan.checks import Check, skipped, verdict
from safetrain.plan.choose import PlanInputs, question_of
from safetrain.plan.host_facts import NONE_THERE, HostFacts, facts_here

MODULE = "safetrain.plan.host_facts"
CONNECT_SECONDS, ANSWER_SECONDS = 10, 60
MOST_AT_ONCE = 32
CLOCK_SECONDS = 5.0
NOT_REACHED = 255  # ssh's own exit code; any other is the command's
PASSED_ON = ("PYTHONPATH",)  # as the training passes it on
EQUAL = {"safetrain": "safetrain", "mlx": "mlx", "mlx_lm": "mlx-lm", "numpy": "numpy", "python": "Python",
         "data": "data/validated", "model": "the base model"}  # fmt: skip
DIGESTS = ("data", "model")  # which say nothing to a person


@dataclass(frozen=True)
class HostAnswer:
    """What a machine said, or why it did not; when it was asked and when it had answered, by the clock of this one."""

    name: str
    facts: HostFacts | None
    why: str = ""
    connected: bool = True
    asked: float = 0.0
    answered: float = 0.0


def is_shared(train: Train) -> bool:
    """Whether these checks apply."""
    return train.ranks > 1 or train.hostfile is not None


def host_checks(train: Train, model: Path) -> tuple[list[Check], Hosts | None]:
    """The hostfile, and every other machine that it names; and where the ranks are, None where the file is wrong."""
    try:
        hosts = hosts_of(train.hostfile, train.ranks)
    except ConfigError as error:
        found = "; ".join(part for part in (error.what.rstrip("."), error.got) if part)
        return [Check("HOSTS-FILE", "hostfile", "fail", True, found, error.expected, error.where, error.do)], None
    named = counted(train.ranks, "rank")
    file = Check("HOSTS-FILE", "hostfile", "pass", True, f"{named}, {hosts.ranks_here} on this machine",
                 source=train.hostfile or "train.ranks")  # fmt: skip
    others = sorted({name for name in hosts.names if not is_here(name)})
    if not others:
        return [file], hosts
    with ThreadPoolExecutor(min(MOST_AT_ONCE, len(others))) as pool:
        answers = list(pool.map(lambda name: ask_host(name, model), others))
    return [file, *judge(answers, facts_here(model))], hosts


def ask_host(name: str, model: Path) -> HostAnswer:
    """Its facts, by ssh without a password, in the same folder and with the same Python as here."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
    command = ["ssh", *options, "--", name, remote_command(model)]
    asked = time.time()
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=ANSWER_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return HostAnswer(name, None, f"no answer within {ANSWER_SECONDS} s", connected=False)
    except OSError as error:
        return HostAnswer(name, None, f"ssh cannot be started: {error.strerror}", connected=False)
    return answer_of(name, done.returncode, done.stdout, done.stderr, asked, time.time())


def remote_command(model: Path) -> str:
    """For the shell at the other end, which ssh always asks; every word is quoted."""
    passed = [f"{name}={os.environ[name]}" for name in PASSED_ON if os.environ.get(name)]
    words = ["env", *passed, sys.executable, "-m", MODULE, str(model)]
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"


def answer_of(name: str, code: int, said: str, complained: str, asked: float, answered: float) -> HostAnswer:
    """From what ssh has left: the last line that was said is the answer, whatever a login prints before it."""
    lines = [line for line in said.splitlines() if line.strip()]
    if code == 0 and lines:
        try:
            facts = from_json(HostFacts, json.loads(lines[-1]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return HostAnswer(name, None, f"its answer cannot be read: {lines[-1][:80]}")
        return HostAnswer(name, facts, asked=asked, answered=answered)
    words = [line.strip() for line in complained.splitlines() if line.strip()]
    why = words[-1] if words else f"exit code {code}"
    return HostAnswer(name, None, why, connected=code != NOT_REACHED)


def judge(answers: Sequence[HostAnswer], here: HostFacts) -> list[Check]:
    """Whether every machine answers, has the same as this one, and the same time."""
    return [_reached(answers), _equal(answers, here), _clock(answers)]


def _remedy(unreached: HostAnswer) -> str:
    """For a machine that ssh does not reach."""
    name = shlex.quote(unreached.name)
    if "denied" in unreached.why.lower():
        return f"ssh-copy-id {name}, until 'ssh -o BatchMode=yes {name} true' asks nothing"
    return f"see its name in train.hostfile, and that 'ssh -o BatchMode=yes {name} true' works"


def _reached(answers: Sequence[HostAnswer]) -> Check:
    silent = [each for each in answers if each.facts is None]
    found = "; ".join(f"{each.name}: {each.why}" for each in silent) or f"{counted(len(answers), 'machine')} answered"
    unreached = next((each for each in silent if not each.connected), None)
    return verdict("HOSTS-REACHED", "other machines", not silent, True, found,
                   "each answers ssh without a password, and has the project", "train.hostfile",
                   _remedy(unreached)
                   if unreached is not None
                   else f"put the project and its environment there too, in {Path.cwd()}")  # fmt: skip


def _equal(answers: Sequence[HostAnswer], here: HostFacts) -> Check:
    if not any(each.facts for each in answers):
        return skipped("HOSTS-EQUAL", "the same on all machines", "no other machine answered")
    found = [text for each in answers if each.facts for text in differences(each.name, each.facts, here)]
    same = f"versions, data and model are alike on {1 + sum(each.facts is not None for each in answers)} machines"
    return verdict("HOSTS-EQUAL", "the same on all machines", not found, True, "; ".join(found) or same,
                   ", ".join(EQUAL.values()) + " as on this machine", MODULE,
                   "copy data/validated and the model there, and install the same packages: "
                   "pip install -e . -c constraints.txt")  # fmt: skip


def differences(name: str, there: HostFacts, here: HostFacts) -> list[str]:
    """In which of the facts a machine differs from this one, in words."""
    found = []
    for key, word in EQUAL.items():
        theirs, ours = getattr(there, key), getattr(here, key)
        if theirs == ours:
            continue
        if key in DIGESTS:
            found.append(f"{name} has {'no' if theirs == NONE_THERE else 'another'} {word.removeprefix('the ')}")
        else:
            found.append(f"{name} has {word} {theirs}, this machine {ours}")
    return found


def _clock(answers: Sequence[HostAnswer]) -> Check:
    off = {each.name: clock_error(each) for each in answers if each.facts}
    if not off:
        return skipped("HOSTS-CLOCK", "clocks", "no other machine answered")
    wrong = {name: seconds for name, seconds in off.items() if abs(seconds) > CLOCK_SECONDS}
    found = ", ".join(f"{name} {seconds:+.0f} s" for name, seconds in wrong.items()) or "none is off"
    return verdict("HOSTS-CLOCK", "clocks", not wrong, False, found, f"within {CLOCK_SECONDS:g} s of this machine's",
                   MODULE, "let the system set the clock (NTP): times in logs and records are compared")  # fmt: skip


def clock_error(answer: HostAnswer) -> float:
    """Seconds by which its clock is off at the least: it was read between the question and the answer."""
    if answer.facts is None:
        return 0.0
    read = answer.facts.seconds
    return read - answer.asked if read < answer.asked else max(0.0, read - answer.answered)


def room_checks(hosts: Hosts, inputs: PlanInputs, train: Train, lora: Lora) -> list[Check]:
    """Whether ranks that share this machine have a core each, and each a training that fits its share of the memory.

    Those on CUDA have a device each. Raises ConfigError where the pins contradict the model.
    """
    if hosts.ranks_here < 2 or inputs.machine.backend == "cuda":
        return []
    share = inputs.machine.memory_budget_bytes // hosts.ranks_here
    machine = dataclasses.replace(inputs.machine, memory_budget_bytes=share)
    try:
        needed = best_fit(question_of(dataclasses.replace(inputs, machine=machine), train, lora)).needed_bytes
        fits, text = True, f"{size_text(needed + machine.process_memory_bytes)} each"
    except MachineError as error:
        fits, text = False, error.got
    return [cores_check(hosts.ranks_here, usable_cores()), share_check(hosts.ranks_here, share, text, fits=fits)]


def cores_check(ranks: int, cores: int) -> Check:
    """A core for each rank."""
    return verdict("RANKS-CORES", "cores for ranks", cores >= ranks, False,
                   f"{counted(ranks, 'rank')} on {counted(cores, 'core')}", "a core for each rank on this machine",
                   "the system", f"train.ranks={cores}: more only wait for each other")  # fmt: skip


def share_check(ranks: int, share_bytes: int, found: str, *, fits: bool) -> Check:
    """Each rank has all weights, so that the memory is needed as often as there are ranks."""
    return verdict("RANKS-ROOM", "memory for ranks", fits, True, found,
                   f"at most {size_text(share_bytes)}, the budget shared by {counted(ranks, 'rank')} on this machine",
                   "the closed form, machine.json", "lower train.ranks, or put ranks on other machines")  # fmt: skip
