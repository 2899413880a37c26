"""Check that several ranks can train together: the machines of train.hostfile, and memory for ranks on this machine.

Preflight runs ``python -m safetrain.plan.hosts MODEL`` on every other machine by ssh; it prints what must be equal.
"""

import contextlib
import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetrain.core.data.store import open_store, store_path
from safetrain.core.errors import ConfigError, MachineError, SafetrainError
from safetrain.core.formatting import counted, size_text
from safetrain.core.memory.terms import usable_cores
from safetrain.core.model.files import read_model_files
from safetrain.core.records.hostfile import Hosts, hosts_of, is_here
from safetrain.core.records.schema import Lora, Train
from safetrain.core.storage import paths
from safetrain.plan.candidates import PlanInputs, ask
from safetrain.plan.checks import Check, from_error, skipped, verdict
from safetrain.plan.child import version_of
from safetrain.plan.remedies import best_fit

MODULE = "safetrain.plan.hosts"
CONNECT_SECONDS, ANSWER_SECONDS = 10, 60
MOST_AT_ONCE = 32
NOT_REACHED = 255  # ssh's own exit code; any other is the command's
PACKAGES = ("safetrain", "mlx", "mlx-lm", "numpy")
DATA, MODEL, NONE_THERE = "data/validated", "base model", "none"  # facts that are digests
Facts = dict[str, str]


def is_shared(train: Train) -> bool:
    """Whether training uses several ranks or a hostfile."""
    return train.ranks > 1 or train.hostfile is not None


def facts_here(model: Path) -> Facts:
    """The facts of this machine and folder that must be equal on all ranks."""
    facts = {"Python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
    facts |= {DATA: NONE_THERE, MODEL: NONE_THERE}
    with contextlib.suppress(OSError, SafetrainError):
        facts[DATA] = " ".join(open_store(store_path(paths.VALIDATED, split)).digest for split in ("train", "valid"))
    with contextlib.suppress(OSError, SafetrainError):
        facts[MODEL] = read_model_files(model).fingerprint
    return facts


def host_checks(train: Train, model: Path) -> tuple[list[Check], Hosts | None]:
    """Check the hostfile and every other machine in it; the hosts are None if the file is invalid."""
    try:
        hosts = hosts_of(train.hostfile, train.ranks)
    except ConfigError as error:
        return [from_error("HOSTS-FILE", "hostfile", error)], None
    count = counted(train.ranks, "rank")
    file = Check("HOSTS-FILE", "hostfile", "pass", True, f"{count}, {hosts.ranks_here} on this machine",
                 source=train.hostfile or "train.ranks")  # fmt: skip
    others = sorted({name for name in hosts.names if not is_here(name)})
    if not others:
        return [file], hosts
    with ThreadPoolExecutor(min(MOST_AT_ONCE, len(others))) as pool:
        answers = dict(zip(others, pool.map(lambda name: ask_host(name, model), others), strict=True))
    return [file, _reached(answers), _equal(answers, facts_here(model))], hosts


def ask_host(name: str, model: Path) -> Facts | str:
    """Ask a machine for its facts by ssh (no password, same folder and Python as here); return a text if that fails."""
    passed = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if os.environ.get("PYTHONPATH") else []
    there = shlex.join(["env", *passed, sys.executable, "-m", MODULE, str(model)])
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
    command = ["ssh", *options, "--", name, f"cd {shlex.quote(str(Path.cwd()))} && {there}"]
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=ANSWER_SECONDS, check=False,
        )  # fmt: skip
        if process.returncode == 0:  # login scripts may print text before the answer
            return {str(key): str(value) for key, value in json.loads(process.stdout.strip().splitlines()[-1]).items()}
    except subprocess.TimeoutExpired:
        return f"ssh: no answer within {ANSWER_SECONDS} s"
    except OSError as error:
        return f"ssh cannot be started: {error.strerror}"
    except (ValueError, IndexError, AttributeError):
        return "its answer cannot be read"
    why = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1].strip()
    return f"ssh: {why.removeprefix('ssh: ')}" if process.returncode == NOT_REACHED else why


def _reached(answers: Mapping[str, Facts | str]) -> Check:
    silent = {name: why for name, why in answers.items() if isinstance(why, str)}
    text = "; ".join(f"{name}: {why}" for name, why in silent.items()) or f"{counted(len(answers), 'machine')} answered"
    unreached = next((name for name, why in silent.items() if why.startswith("ssh")), None)
    return verdict("HOSTS-REACHED", "other machines", not silent, True, text,
                   "each answers ssh without a password, and has the project", "train.hostfile",
                   f"ssh-copy-id {unreached}, until 'ssh -o BatchMode=yes {unreached} true' works"
                   if unreached is not None
                   else f"install the project and its environment there too, in {Path.cwd()}")  # fmt: skip


def _equal(answers: Mapping[str, Facts | str], here: Facts) -> Check:
    facts_by_host = {name: facts for name, facts in answers.items() if not isinstance(facts, str)}
    if not facts_by_host:
        return skipped("HOSTS-EQUAL", "the same on all machines", "no other machine answered")
    texts = [text for name, facts in facts_by_host.items() for text in differences(name, facts, here)]
    same = f"versions, data and model are equal on {1 + len(facts_by_host)} machines"
    return verdict("HOSTS-EQUAL", "the same on all machines", not texts, True, "; ".join(texts) or same,
                   f"{', '.join(here)} as on this machine", MODULE,
                   "copy data/validated and the model there, and install the same packages: "
                   "pip install -e . -c constraints.txt")  # fmt: skip


def differences(name: str, there: Facts, here: Facts) -> list[str]:
    """Describe the facts in which a machine differs from this one."""
    others = {key: there.get(key, NONE_THERE) for key in here if there.get(key, NONE_THERE) != here[key]}
    return [
        f"{name} has {'no' if theirs == NONE_THERE else 'a different'} {key}"
        if key in (DATA, MODEL)
        else f"{name} has {key} {theirs}, this machine {here[key]}"
        for key, theirs in others.items()
    ]


def room_checks(hosts: Hosts, inputs: PlanInputs, train: Train, lora: Lora) -> list[Check]:
    """Check that each rank on this machine has a core, and that its training fits its share of the memory.

    Each CUDA rank has its own device. Raises ConfigError if pinned settings contradict the model.
    """
    ranks, cores = hosts.ranks_here, usable_cores()
    if ranks < 2 or inputs.machine.backend == "cuda":
        return []
    share = inputs.machine.memory_budget_bytes // ranks  # each rank has all weights
    machine = dataclasses.replace(inputs.machine, memory_budget_bytes=share)
    try:
        needed = best_fit(ask(dataclasses.replace(inputs, machine=machine), train, lora)).needed_bytes
        fits, text = True, f"{size_text(needed)} each"
    except MachineError as error:
        fits, text = False, error.got
    count = f"{counted(ranks, 'rank')} on this machine"
    return [
        verdict("RANKS-CORES", "cores for ranks", cores >= ranks, False,
                f"{counted(ranks, 'rank')} on {counted(cores, 'core')}", "a core for each rank on this machine",
                "the system", f"train.ranks={cores}: more ranks than cores only wait for each other"),
        verdict("RANKS-ROOM", "memory for ranks", fits, True, text,
                f"at most {size_text(share)}, the budget shared by {count}",
                "the closed form, machine.json", "lower train.ranks, or put ranks on other machines"),
    ]  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(facts_here(Path(sys.argv[1]))))
