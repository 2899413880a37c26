"""The pipeline from a notebook: it runs in a process of its own, and cells only read what it records.

A cell that is interrupted, a browser that is closed or a kernel that dies stops no training.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.storage import paths

LOG = paths.OUTPUT / "notebook.log"
TAIL_BYTES, TAIL_LINES = 16_384, 12


@dataclass(frozen=True)
class StartedPipeline:
    """A pipeline that was started from here."""

    process: subprocess.Popen[bytes]
    log: Path


def start(*overrides: str) -> StartedPipeline:
    """Start `safetrain run` with these overrides, apart from the kernel; what it prints goes to a file."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "safetrain.cli", "run", *overrides],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return StartedPipeline(process, LOG)


def follow(pipeline: StartedPipeline, every_seconds: float = 2.0, until: Callable[[], bool] = lambda: False) -> None:
    """Show where it is, in place, to its end or until ``until`` says so. Interrupt it as you like."""
    from IPython.display import display

    shown = display({"text/plain": where(pipeline)}, raw=True, display_id=True)
    try:
        while pipeline.process.poll() is None and not until():
            time.sleep(every_seconds)
            shown.update({"text/plain": where(pipeline)}, raw=True)
    except KeyboardInterrupt:
        print("The training goes on. Run this cell again to look at it; stop(pipeline) saves and ends it.")
        return
    shown.update({"text/plain": where(pipeline)}, raw=True)
    if pipeline.process.poll() not in (None, 0):
        print("\n".join(_tail(pipeline.log)[-TAIL_LINES:]))


def stop(pipeline: StartedPipeline) -> None:
    """Ask it to save a checkpoint and end, and wait until it has. The same start() continues there."""
    if pipeline.process.poll() is None:
        pipeline.process.send_signal(signal.SIGTERM)
    pipeline.process.wait()


def where(pipeline: StartedPipeline) -> str:
    """The stage, and the last step that the training has told."""
    lines = _text(pipeline.log).splitlines()
    stages = [line.removeprefix("== ") for line in lines if line.startswith("== ")]
    steps = [line for line in lines if line.startswith("step ")]
    code = pipeline.process.poll()
    told = _ended(code) if code is not None else f"stage {stages[-1]}" if stages else "starting"
    return "   ".join([told, *steps[-1:]])


def call(*words: str) -> None:
    """Run a command of safetrain and show what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "safetrain.cli", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    print(done.stdout.strip())


def said(pipeline: StartedPipeline, words: str) -> list[str]:
    """The lines with these words that it has printed."""
    return [line for line in _text(pipeline.log).splitlines() if words in line]


def _ended(code: int) -> str:
    return "finished" if code == 0 else f"ended with exit code {code}"


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""


def _tail(log: Path) -> list[str]:
    return _text(log)[-TAIL_BYTES:].splitlines()
