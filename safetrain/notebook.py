"""The pipeline from a notebook: it runs in a separate process, which outlives cell, browser and kernel."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable

from safetrain.core.storage import paths

LOG = paths.OUTPUT / "notebook.log"
COMMAND, TAIL_LINES = (sys.executable, "-m", "safetrain.cli"), 12
Pipeline = subprocess.Popen[bytes]


def start(*overrides: str) -> Pipeline:
    """Start `safetrain run` with these overrides; what it prints goes to LOG."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("wb") as log:
        command = [*COMMAND, "run", *overrides]
        return Pipeline(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def follow(pipeline: Pipeline, every_seconds: float = 2.0, until: Callable[[], bool] = lambda: False) -> None:
    """Show the pipeline's status until it ends or ``until()`` is true. An interrupt leaves the pipeline running."""
    from IPython.display import display

    output = display({"text/plain": status_of(pipeline)}, raw=True, display_id=True)
    try:
        while pipeline.poll() is None and not until():
            time.sleep(every_seconds)
            output.update({"text/plain": status_of(pipeline)}, raw=True)
    except KeyboardInterrupt:
        print("The training continues. Run this cell again to watch it; stop(pipeline) saves and ends it.")
        return
    output.update({"text/plain": status_of(pipeline)}, raw=True)
    if pipeline.poll():
        print("\n".join(printed_lines()[-TAIL_LINES:]))


def stop(pipeline: Pipeline) -> None:
    """Ask the pipeline to save a checkpoint and end, and wait for that. The same start() continues from there."""
    pipeline.send_signal(signal.SIGTERM)  # does nothing if it has ended
    pipeline.wait()


def status_of(pipeline: Pipeline) -> str:
    """Describe the current stage, or the end, and the last training step."""
    stages, code = ["starting", *printed_lines("== ")], pipeline.poll()
    end = "finished" if code == 0 else f"ended with exit code {code}"
    steps = [line for line in printed_lines("step ") if line.startswith("step ")]
    if code is None:
        return "   ".join([stages[-1].replace("== ", "stage "), *steps[-1:]])
    return "   ".join([end, *(step.split(" · ", 1)[0] for step in steps[-1:])])


def call(*words: str) -> None:
    """Run a command of safetrain and show what it prints."""
    done = subprocess.run(
        [*COMMAND, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    print(done.stdout.decode(errors="replace").strip())


def printed_lines(words: str = "") -> list[str]:
    """Find the lines with these words in the pipeline's output."""
    lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines() if LOG.is_file() else []
    return [line for line in lines if words in line]
