"""Brings a tracker up to what was recorded, once or while a training runs."""

import dataclasses
import importlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted
from safetrain.core.protocol.liveness import GONE_LOOKS, run_lives
from safetrain.core.records.record_files import write_record
from safetrain.core.storage import paths
from safetrain.core.storage.run_files import FLIGHT
from safetrain.watch.trackers.sent import Sent, Target, path_of, read_sent
from safetrain.watch.trackers.tracked import read_tracked

CHILD = "safetrain.watch.trackers"
CHILD_SECONDS = 600.0  # a server that answers nothing holds no pipeline up for longer
GONE_SECONDS = 5.0  # between two looks that see no training: a rung of the memory ladder is there again by then


@dataclass(frozen=True)
class Exported:
    """What an export has done."""

    steps: int
    results: int
    where: str  # for people; empty: there was nothing new


def export(target: Target) -> Exported:
    """Send what ``target`` has not; raises ConfigError where nothing was recorded, or it takes nothing.

    What is there is written down after it was sent: an export that was interrupted is sent again, and the trackers
    keep a step once (see theirs).
    """
    module, sent = _module_of(target.tracker), read_sent(target.tracker)
    place = module.place_of(target)
    if sent is not None and sent.place != place:
        sent = None
    run = read_tracked(sent.last_step, sent.identity, sent.read_bytes) if sent is not None else read_tracked()
    if sent is None or sent.identity != run.identity:
        sent = Sent(module.open_run(run, target), place, run.identity, run.began_seconds)
        write_record(path_of(target.tracker), sent)  # whoever is interrupted goes on in the same run
    if run.results_identity == sent.results:
        run = dataclasses.replace(run, results=())
    if not run.steps and not run.results:
        return Exported(0, 0, "")
    where = module.send(run, sent, target)
    last, read_bytes = run.steps.last_step, run.steps.read_bytes
    results = run.results_identity or sent.results
    now = dataclasses.replace(sent, last_step=last, read_bytes=read_bytes, results=results)
    write_record(path_of(target.tracker), now)
    return Exported(run.steps.count, len(run.results), where)


def follow(target: Target, every_seconds: float, say: Callable[[str], None]) -> None:
    """Export again and again, until no training runs."""
    gone = GONE_LOOKS - 1  # where none runs at the first look, there is nothing to wait for
    while True:
        gone = 0 if run_lives(paths.OUTPUT / FLIGHT) else gone + 1  # asked first: what is recorded after it is sent too
        if 0 < gone < GONE_LOOKS:
            time.sleep(min(every_seconds, GONE_SECONDS))
            continue
        try:
            say(describe(target, export(target)))
        except ConfigError as error:
            if gone >= GONE_LOOKS:
                raise
            say(error.what)
        if gone >= GONE_LOOKS:
            return
        time.sleep(every_seconds)


def describe(target: Target, exported: Exported) -> str:
    """A line for people."""
    if not exported.where:
        return f"{target.tracker} has everything already"
    results = f" and {counted(exported.results, 'result')}" if exported.results else ""
    return f"{counted(exported.steps, 'step')}{results} sent to {target.tracker}: {exported.where}"


def export_apart(tracker: str) -> str:
    """Export in a process of its own, which may fail or hang; gives what it said at last."""
    command = [sys.executable, "-m", CHILD, tracker]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=CHILD_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"warning: {tracker} did not answer for {CHILD_SECONDS:.0f} s; again: safetrain track {tracker}"
    said = done.stdout.strip()
    if done.returncode == 0:
        return said.rpartition("\n")[2]
    return f"warning: not sent to {tracker}; again: safetrain track {tracker}\n{said}"


def _module_of(tracker: str) -> ModuleType:
    """Ours for the tracker; raises ConfigError where its package is not installed."""
    if importlib.util.find_spec(tracker) is None:
        raise ConfigError(
            f"The package {tracker} is not installed.", do=f"pip install -e '.[{tracker}]' -c constraints.txt"
        )
    return importlib.import_module(f"safetrain.watch.trackers.to_{tracker}")
