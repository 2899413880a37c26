"""Runs that a real supervisor has watched to their end, whatever that was; and one that this process is in."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetrain.core.errors import SafetrainError
from safetrain.core.events import STARTED, EventPipe, Journal, parse_event
from safetrain.core.memory.budget import MemoryBudget
from safetrain.core.records.job import MemoryShape, Rung, Survival, TrainJob
from safetrain.core.records.record_files import write_record
from safetrain.core.storage.run_files import FLIGHT, JOB, JOURNAL
from safetrain.guard.keep_going import RunOptions, keep_going
from safetrain.guard.ladder import PlannedUpdate
from safetrain.guard.postmortem import open_marker
from safetrain.guard.sampling import Limit
from tests.support.recorded_child import Pretended
from tests.support.settings import SETTINGS
from tests.updates import worst_update

GIB = 2**30
MODEL = Path(__file__).resolve().parent.parent.parent / "models" / "encyclopedia-3m"
USUAL = dataclasses.replace(SETTINGS, batch_size=1, gradient_accumulation=8, gradient_checkpointing=True,
                            dequantize_base=False, eval_steps=10)  # fmt: skip
JOB_OF_ALL = TrainJob(str(MODEL), USUAL, True, MemoryBudget(GIB), None, Survival(False, False, 2, None), ())
RUNG = Rung(MemoryShape(8, 1, False, True, 64), 12, "out of memory")
HANG_SECONDS = 0.4


def record_ending(output: Path, ending: str, job: TrainJob = JOB_OF_ALL) -> SafetrainError | None:
    """Let a training end so, watched; the error that its command would tell."""
    command = (sys.executable, "-m", "tests.support.recorded_child", ending)
    options = RunOptions(command, output, (), HANG_SECONDS if ending == "hang" else 60.0, may_shorten=False,
                         planned=PlannedUpdate("cpu", worst_update(40, 8)))  # fmt: skip
    before, sys.argv = sys.argv, ["train"]  # the verdict names the command again
    try:
        keep_going(job, options, lambda _event: None, lambda _text: None)
    except SafetrainError as error:
        return error
    finally:
        sys.argv = before
    return None


@contextmanager
def under_way(output: Path, *, updates: int, job: TrainJob = JOB_OF_ALL) -> Iterator[Pretended]:
    """A training in this process, some updates old, with its supervisor in it too."""
    (output / FLIGHT).mkdir(parents=True)
    write_record(output / FLIGHT / JOB, job)
    journal = Journal(output / FLIGHT / JOURNAL)
    journal.note(STARTED)
    open_marker(output, "dvc repro", 600.0, Limit(16 * GIB, "the machine's memory"))
    read, write = os.pipe()
    try:
        pretended = Pretended(output, EventPipe(write))
        pretended.begin()
        for step in range(1, updates + 1):
            pretended.update(step)
        for line in os.read(read, 2**16).splitlines():
            event = parse_event(line)
            if event is not None:
                journal.keep(event)
        yield pretended
    finally:
        os.close(read)
        os.close(write)
