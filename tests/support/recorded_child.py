"""A training process that computes nothing, but records all that a real one does, and ends as it is told."""

import math
import os
import signal
import sys
import time
from pathlib import Path

from safetrain.core.events import Begun, EventPipe, Failed, Finished, Recorded, Said
from safetrain.core.recorder import Allocator, Edge, Phase, Recorder, Work
from safetrain.core.records.job import TrainJob
from safetrain.core.records.metrics import StepRecord, append_csv, start_csv
from safetrain.core.records.record_files import read_record
from safetrain.core.storage import paths
from safetrain.core.storage.checkpoint_files import name_of, write_manifest
from safetrain.core.storage.files import write_json
from safetrain.core.storage.run_files import JOB, POINTER, RECORDER
from safetrain.engine.child_process import set_up_child

MIB = 2**20
TOTAL, SAVED_AT, ENDS_AT = 40, 20, 30  # updates
FITTING_ROWS = 4
TOLD = {  # kind, message, exit code
    "nan": ("BadUpdateError", "The loss is not a number at step 31.", 7),
    "disk": ("DiskFullError", "The disk is full.", 8),
    "ctrl-c": ("InterruptedRun", "Stopped at step 30 of 40; the state is saved.", 130),
}


def main(arguments: list[str]) -> int:
    """``arguments``: how to end, then what a training process is given."""
    ending, flight = arguments[0], Path(arguments[1])
    set_up_child(int(arguments[3]), flight, None)
    if ending == "oom-once":  # with what was planned; what follows fits
        planned = read_record(flight / JOB, TrainJob).settings.batch_size
        ending = "oom" if planned > FITTING_ROWS else "finished"
    return Pretended(flight.parent, EventPipe(int(arguments[2]))).run(ending)


def loss_at(step: int) -> float:
    """A curve as it usually is."""
    return 0.6 + 2.0 * math.exp(-step / 6) + 0.03 * math.sin(step)


class Pretended:
    """The records of one training in ``output``."""

    def __init__(self, output: Path, pipe: EventPipe) -> None:
        self.output, self.pipe = output, pipe
        self.recorder = Recorder(output / "flight" / RECORDER)
        self.recorder.device("cpu")
        self.recorder.predicted_peak_bytes = 150 * MIB
        self.recorder.read_allocator = lambda: Allocator(90 * MIB, 140 * MIB, 10 * MIB)
        self.records: list[StepRecord] = []

    def run(self, ending: str) -> int:
        """To the ending."""
        self.begin()
        for step in range(1, ENDS_AT + 1):
            self.update(step)
        self.recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(ENDS_AT + 1, 1, 8, 214, (3, 9, 27)))
        return self.end(ending)

    def begin(self) -> None:
        """What comes before the first update."""
        for phase in (Phase.LOAD_DATA, Phase.LOAD_MODEL, Phase.RESUME):
            with self.recorder.phase(phase):
                pass
        start_csv(self.output / paths.METRICS_CSV.name, [])
        self.pipe.send(Begun(TOTAL, 0, "training on 160 rows: 8 x 1 rows per update, 40 updates"))
        self.record(0, 2.7)

    def update(self, step: int) -> None:
        """One update, its validation and its checkpoint where they are due."""
        for micro_batch in range(2):
            self.recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(step, micro_batch, 8, 200, (1, 2)))
            time.sleep(0.001)
        self.recorder.write(Phase.GRADIENT, Edge.AFTER, Work(step, 1, 8, 200, (1, 2)))
        with self.recorder.phase(Phase.OPTIMIZER, Work(step)):
            pass
        validates = step % 10 == 0
        if validates:
            with self.recorder.phase(Phase.EVALUATE, Work(step)):
                self.recorder.write(Phase.EVALUATE, Edge.BEFORE, Work(step, 0, 8, 210))
        self.record(step, loss_at(step) + 0.05 if validates else None)
        if step == SAVED_AT:
            self.save(step)

    def record(self, step: int, valid: float | None) -> None:
        """A line of metrics."""
        train = loss_at(step) if step else None
        self.records.append(
            StepRecord(step, step / 20, train, valid, 2e-4 if step else 0.0, 0.8, 200 * step, 950.0 if step else None,
                       140 * MIB, 400 * MIB, 0.02 * step)
        )  # fmt: skip
        append_csv(self.output / paths.METRICS_CSV.name, self.records[-1])
        self.pipe.send(Recorded(self.records[-1]))

    def save(self, step: int) -> None:
        """A checkpoint."""
        with self.recorder.phase(Phase.SAVE, Work(step)):
            folder = self.output / name_of(1, step)
            folder.mkdir(exist_ok=True)
            (folder / "weights").write_bytes(b"weights")
            write_manifest(folder)
            self.point(step, finished=False)

    def point(self, step: int, *, finished: bool) -> None:
        """Where the run stands."""
        write_json(self.output / POINTER, {"finished": finished, "checkpoint": name_of(1, SAVED_AT), "step": step})

    def end(self, ending: str) -> int:
        """In one of the ways."""
        if ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if ending == "oom":
            print("std::bad_alloc", file=sys.stderr, flush=True)
            os.abort()
        if ending == "hang":
            time.sleep(600)
        if ending in TOLD:
            self.pipe.send(Said("update 31 is written down"))
            self.pipe.send(Failed(*TOLD[ending]))
            return TOLD[ending][2]
        return self.finish(stopped_early=ending == "early")

    def finish(self, *, stopped_early: bool) -> int:
        """Everything is written."""
        last = self.records[-1]
        best, steps = last.valid_loss or 0.0, last.step
        with self.recorder.phase(Phase.FINISH):
            summary = {"steps": steps, "best_step": steps, "best_valid_loss": best, "base_valid_loss": 2.7,
                       "stopped_early": stopped_early, "optimizer": "adam"}  # fmt: skip
            write_json(self.output / paths.SUMMARY.name, summary)
            self.point(steps, finished=True)
        self.pipe.send(Finished(best, steps, steps, TOTAL, 0, stopped_early, 2.7))
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
