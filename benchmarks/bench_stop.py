"""How soon Ctrl-C is answered and obeyed in each part of a training, at the shape of a 0.5B model in 4 bits.

    python -m benchmarks.bench_stop

Seconds from the signal to the first word, and to the end of the command, with the longest micro-batch for comparison.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import write_result
from safetrain.core.recorder import Edge, FlightReader, Phase, read_flight
from tests.support.chaos.project import Project

SHAPE = {
    "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
ROWS = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{n} plus 1 " * 40}]}
    for n in range(60)
]
SETTINGS = {"batch_size": 1, "gradient_accumulation": 6, "max_steps": 2, "eval_steps": 1, "save_steps": 1}


@dataclass(frozen=True)
class Moment:
    """A moment in a training: the first record of a phase, at a step."""

    name: str
    phase: Phase
    step: int


MOMENTS = (
    Moment("validation before the first update", Phase.EVALUATE, 0),
    Moment("an update", Phase.GRADIENT, 2),
    Moment("validation", Phase.EVALUATE, 1),
    Moment("the adapter check", Phase.VERIFY, 2),
)


def main() -> None:
    """Interrupt a training in each part of it, then an evaluation, and write the table."""
    table = list[list[object]]()
    with tempfile.TemporaryDirectory() as scratch:
        project = Project(Path(scratch) / "stopped", rows=ROWS, model=SHAPE, train=SETTINGS)
        project.plan()
        for moment in MOMENTS:
            answered, ended, code = interrupt(project, moment)
            table.append([moment.name, f"{answered:.2f}", f"{ended:.1f}", code, f"{longest_seconds(project):.1f}"])
            print(*table[-1])
        command = [sys.executable, "-m", "stages.train"]
        subprocess.run(command, cwd=project.folder, env=project.environment, check=True, stdout=subprocess.DEVNULL)
        answered, ended, code = interrupt(project, None)
        table.append(["evaluation", f"{answered:.2f}", f"{ended:.1f}", code, ""])
    columns = ["Ctrl-C during", "first word, s", "ended, s", "exit code", "longest micro-batch of the run, s"]
    write_result("bench_stop", "Ctrl-C at 0.5B", columns, table)


def interrupt(project: Project, moment: Moment | None) -> tuple[float, float, int]:
    """Seconds to the first word after SIGINT and to the end, and the exit code. None: in the evaluation."""
    stage = "stages.train" if moment else "stages.evaluate"
    command = [sys.executable, "-u", "-m", stage, *(["train.restart=true"] if moment else [])]
    process = subprocess.Popen(
        command, cwd=project.folder, env=project.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if process.stdout is None:
        raise RuntimeError("the command was started without a pipe")
    os.set_blocking(process.stdout.fileno(), False)
    if moment is None:
        time.sleep(12.0)  # loading takes some seconds, losses the next minute
    else:
        wait_for(project, moment)
        time.sleep(0.3)
    process.stdout.read()
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    answered = 0.0
    while process.poll() is None:
        if not answered and b"stopping" in (process.stdout.read() or b""):
            answered = time.monotonic() - began
        time.sleep(0.01)
    ended = time.monotonic() - began
    process.stdout.close()
    return answered or ended, ended, process.returncode


def wait_for(project: Project, moment: Moment) -> None:
    """Return when the training process has recorded that moment."""
    reader = FlightReader(project.flight / "recorder.bin")
    (project.flight / "recorder.bin").unlink(missing_ok=True)
    while True:
        if any(each.phase is moment.phase and each.work.step == moment.step for each in reader.read()):
            return
        time.sleep(0.02)


def longest_seconds(project: Project) -> float:
    """The longest gradient or validation micro-batch of the last training."""
    records = [each for each in read_flight(project.flight / "recorder.bin").records if each.edge is Edge.BEFORE]
    gaps = [
        after.monotonic_seconds - before.monotonic_seconds
        for before, after in itertools.pairwise(records)
        if before.phase in (Phase.GRADIENT, Phase.EVALUATE, Phase.VERIFY)
    ]
    return max(gaps, default=0.0)


if __name__ == "__main__":
    main()
