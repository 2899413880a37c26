"""Folders of runs as a training process and its supervisor leave them, at any moment and after any ending."""

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetrain.core.events import Begun, Died, Failed, Finished, Journal, Started
from safetrain.core.lock import training_lock
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.recorder import Allocator, Edge, Phase, Recorder, Work, boot_id
from safetrain.core.records.metrics import StepRecord, append_csv, start_csv
from safetrain.core.records.run_state import PostMortem, RunIdentity, RunState, name_of, write_manifest, write_run_state
from safetrain.core.records.settings import MemoryShape, Rung, TrainJob
from safetrain.core.run_folder import RunMarker, write_marker
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.core.storage.paths import FLIGHT, JOB, JOURNAL, MARKER, POSTMORTEM, RECORDER
from tests.support.settings import SETTINGS

GIB, MIB = 2**30, 2**20
TOTAL, SAVED_AT, ENDS_AT = 40, 20, 30  # updates
JOB_OF_ALL = TrainJob(
    "models/encyclopedia-3m",
    dataclasses.replace(SETTINGS, batch_size=2, gradient_accumulation=8, eval_steps=10),
    True, MemoryBudget(GIB), None,
)  # fmt: skip
RUNG = Rung(MemoryShape(4, 4, SETTINGS.gradient_checkpointing, SETTINGS.dequantize_base, SETTINGS.max_seq_length), 12,
            "out of memory")  # fmt: skip
DEATH = PostMortem(
    cause="killed", title="Killed from outside (SIGKILL)", confidence="confirmed", is_memory=False,
    evidence=("signal 9", "8.00 GiB were free"), advice="", phase="gradient", step=ENDS_AT + 1, micro_batch=1, rows=8,
    tokens=214, row_ids=(3, 9, 27), footprint_bytes=400 * MIB, limit_bytes=16 * GIB, limit_name="the machine's memory",
    predicted_peak_bytes=150 * MIB, mlx_active_bytes=90 * MIB, mlx_peak_bytes=140 * MIB, loss=0.6,
    resumes_from_step=SAVED_AT, next_command="dvc repro", exit_code=137, ended_seconds=0.0,
)  # fmt: skip
ENDINGS = {  # cause and title of the verdict
    "killed": (DEATH.cause, DEATH.title),
    "oom": ("out_of_memory", "out of memory (std::bad_alloc)"),
    "hang": ("hang", "It hung for 30 min and was ended"),
    "nan": ("bad_update", "The loss is not a number at step 31"),
    "disk": ("disk_full", "The disk is full"),
    "ctrl-c": ("stopped", "Stopped at step 30 of 40; the state is saved"),
}


def loss_at(step: int) -> float:
    """A curve as it usually is."""
    return 0.6 + 2.0 * math.exp(-step / 6) + 0.03 * math.sin(step)


class RecordedRun:
    """Writes the records of one training into ``output``."""

    def __init__(self, output: Path, job: TrainJob = JOB_OF_ALL) -> None:
        self.output, self.records = output, list[StepRecord]()
        (output / FLIGHT).mkdir(parents=True, exist_ok=True)
        write_record(output / FLIGHT / JOB, job)
        self.journal = Journal(output / FLIGHT / JOURNAL)
        self.journal.write(Started())
        limit = 16 * GIB, "the machine's memory"
        write_marker(output, RunMarker(boot_id(), "dvc repro", time.time(), time.monotonic(), 600.0, *limit))
        self.recorder = Recorder(output / FLIGHT / RECORDER)
        self.recorder.device("cpu")
        self.recorder.predicted_peak_bytes = 150 * MIB
        self.recorder.read_allocator = lambda: Allocator(90 * MIB, 140 * MIB, 10 * MIB)

    def begin(self) -> None:
        """Write what comes before the first update."""
        for phase in (Phase.LOAD_DATA, Phase.LOAD_MODEL, Phase.RESUME):
            with self.recorder.phase(phase):
                pass
        start_csv(self.output / paths.METRICS_CSV.name, [])
        self.journal.take(Begun(TOTAL, 0, "training on 160 rows", 10, 2.0))
        self.record(0, 2.7)

    def update(self, step: int) -> None:
        """Write one update, its validation and its checkpoint where they are due."""
        for micro_batch in range(2):
            self.recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(step, micro_batch, 8, 200, (1, 2)))
        with self.recorder.phase(Phase.OPTIMIZER, Work(step)):
            pass
        validates = step % 10 == 0
        if validates:
            with self.recorder.phase(Phase.EVALUATE, Work(step)):
                pass
        self.record(step, loss_at(step) + 0.05 if validates else None)
        if step == SAVED_AT:
            self.save(step)

    def record(self, step: int, valid: float | None) -> None:
        """Write a line of metrics."""
        loss, rate, speed = (loss_at(step), 2e-4, 950.0) if step else (None, 0.0, None)
        found = StepRecord(step, step / 20, loss, valid, rate, 0.8, 200 * step, speed, 140 * MIB, 400 * MIB, 2.0 * step)
        self.records.append(found)
        append_csv(self.output / paths.METRICS_CSV.name, found)
        self.journal.take(found)

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        with self.recorder.phase(Phase.SAVE, Work(step)):
            folder = self.output / name_of(1, step)
            folder.mkdir(exist_ok=True)
            (folder / "weights").write_bytes(b"weights")
            write_manifest(folder)
            self.point(step, finished=False)

    def point(self, step: int, *, finished: bool) -> None:
        """Write where the run stands."""
        write_run_state(self.output, RunState(finished, name_of(1, SAVED_AT), step, RunIdentity("", "", "", "{}")))

    def end(self, ending: str) -> None:
        """End in one of ENDINGS, or ``finished``."""
        if ending == "finished":
            with self.recorder.phase(Phase.FINISH):
                self.point(ENDS_AT, finished=True)
            self.journal.take(Finished(ENDS_AT))
        else:
            self.recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(ENDS_AT + 1, 1, 8, 214, (3, 9, 27)))
            cause, title = ENDINGS[ending]
            if ending not in ("killed", "oom", "hang"):
                self.journal.take(Failed("Error", title, 1))
            verdict = dataclasses.replace(DEATH, cause=cause, title=title, ended_seconds=time.time())
            write_record(self.output / POSTMORTEM, verdict)
            self.journal.write(Died(title, ENDS_AT + 1))
        (self.output / FLIGHT / MARKER).unlink()


def ended_run(output: Path, ending: str) -> Path:
    """A run that has ended so."""
    made = RecordedRun(output)
    made.begin()
    for step in range(1, ENDS_AT + 1):
        made.update(step)
    made.end(ending)
    return output


@contextmanager
def under_way(output: Path, *, updates: int, job: TrainJob = JOB_OF_ALL) -> Iterator[RecordedRun]:
    """A training in this process, some updates old, that holds the lock."""
    output.mkdir(parents=True, exist_ok=True)
    with training_lock(output):
        made = RecordedRun(output, job)
        made.begin()
        for step in range(1, updates + 1):
            made.update(step)
        yield made


def change(path: Path, **values: object) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
