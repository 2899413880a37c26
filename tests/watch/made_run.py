"""Records of a run as the stages, the training process and its supervisor write them, while it runs and at any end."""

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetrain.core.events import Begun, Died, Failed, Finished, Journal, Started
from safetrain.core.lock import training_lock
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.postmortem import PostMortem
from safetrain.core.recorder import Edge, Phase, Recorder, RunMarker, Work, boot_id
from safetrain.core.records.adapter_files import fingerprint
from safetrain.core.records.evaluation import (
    Evaluation,
    Forgetting,
    Improvement,
    Likeness,
    PartLoss,
    Sample,
    Score,
    ScoreGain,
)
from safetrain.core.records.metrics import Proof, StepRecord, TrainingSummary, append_csv, csv_of
from safetrain.core.records.reports import DataReport, Finding, LengthQuantiles, Machine, SplitReport
from safetrain.core.records.run_state import RunIdentity, RunState, name_of, write_manifest
from safetrain.core.records.settings import DryRun, Recommendation, Rung, Shape, TrainJob, TrainSettings
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record, write_text
from safetrain.core.storage.paths import FLIGHT, JOB, JOURNAL, MARKER, POINTER, POSTMORTEM, RECORDER
from tests.support.settings import SETTINGS

GIB = 2**30
UPDATES = 30
PLAN = Recommendation(
    settings=SETTINGS,
    reasons={"learning_rate": "width 64 and its scale", "lora.rank": "enough for 9 rows", "batch_size": "it fits"},
    base="models/tiny", start="", backend="cpu", longest_row=41, largest_update=Shape(4, 40, 120, 60),
    predicted_peak_bytes=2 * GIB, margin_bytes=0, memory_terms={"base weights": GIB},
    memory_budget=MemoryBudget(8 * GIB, GIB // 8), measured=DryRun(GIB, GIB, 1.0, "cpu", None), verified=True,
    total_seconds=30.0, disk_bytes=9, test_tokens=4096, answer_tokens=512, general_tokens=2048,
)  # fmt: skip
PROOF = Proof(9, 90, 1.0, Likeness(3.0, 1.0, 0.0, 0, 9, 0), Likeness(1.0, 0.0, 1.0, 9, 0, 0), "mlx-lm")
SUMMARY = TrainingSummary(
    **vars(SETTINGS), final_train_loss=0.5, valid_loss=0.46, best_valid_loss=0.45, best_step=25, steps=UPDATES,
    base_model="models/tiny", train_rows=40, trainable_parameters=1234, resumed_from_step=0, labels=999,
    elapsed_seconds=30.0, tokens_per_second=321.0, peak_memory_bytes=int(1.8 * GIB), peak_footprint_bytes=2 * GIB,
    predicted_peak_bytes=2 * GIB, blas="OpenBLAS", padding_share=0.0, stopped_early=False,
    base_valid_loss=3.0, memory_rungs=(), gpu_rungs=(), proof=PROOF,
)  # fmt: skip
DEATH = PostMortem(
    cause="oom_kill", title="the system killed it for lack of memory", confidence="confirmed", is_memory=True,
    evidence=("Killed process 4711",), advice="shorter rows", phase="gradient", step=17, micro_batch=1, rows=2,
    tokens=80, row_ids=(3, 17), footprint_bytes=7 * GIB, limit_bytes=8 * GIB, limit_name="the machine's memory",
    predicted_peak_bytes=2 * GIB, mlx_active_bytes=GIB, mlx_peak_bytes=GIB, loss=1.5, resumes_from_step=16,
    next_command="dvc repro", exit_code=137, ended_seconds=1.8e9,
)  # fmt: skip


def sample(text: str, number: int = 1) -> Sample:
    """A question whose base answers otherwise and whose tuned model is right."""
    return Sample(text, "expected " + text, "base " + text, "expected " + text, f"data/test.jsonl:{number}", 2.0, 1.0)


def evaluation(samples: tuple[Sample, ...], gain: float = 1.5) -> Evaluation:
    """Of nine rows; the gain has an interval of ± 0.25."""
    base, tuned = (
        Score(loss=loss, perplexity=2.7, score=0.1, score_low=0.05, score_high=0.3, parts={"token_f1": 0.5})
        for loss in (3.0, 3.0 - gain)
    )  # fmt: skip
    parts = tuple(PartLoss(name, 0.1, 0.02) for name in ("English", "Portuguese", "code"))
    return Evaluation(
        improvement=Improvement(gain, 0.25, 9), base=base, tuned=tuned, forgetting=Forgetting(0.1, 0.02, (), parts),
        rows=9, rows_available=9, cut_rows=0, questions=9, answered=9, adapter=("",), samples=samples, worst=samples,
        score_gain=ScoreGain(0.0, -0.1, 0.1),
    )  # fmt: skip


def data_report(findings: tuple[Finding, ...] = (), rows: int = 40) -> DataReport:
    """Three splits of the same lengths."""
    split = SplitReport(rows, 400, 100, LengthQuantiles(9, 10, 11, 12, 12, 12))
    return DataReport("data/mine.jsonl", "chat", "as given", (), findings, "2026-01-01", ("<|end|>",), "as asked",
                      split, split, split)  # fmt: skip


def steps(count: int = UPDATES) -> list[StepRecord]:
    """A loss that falls; every fifth update is validated."""
    return [
        StepRecord(step, step / 10, 3.0 / (1 + step / 5), 3.2 / (1 + step / 5) if step % 5 == 0 else None, 1e-3, 0.5,
                   step * 9, 300.0 + step, GIB, 2 * GIB, float(step))
        for step in range(count + 1)
    ]  # fmt: skip


def make_run(
    folder: Path, *, settings: TrainSettings = SETTINGS, found: Evaluation | None = None, **outcome: Any
) -> Path:
    """Write a finished and evaluated run into ``folder``; its checkpoints_qlora."""
    output = folder / paths.OUTPUT
    adapter = folder / paths.ADAPTERS
    adapter.mkdir(parents=True)
    (adapter / "adapters.safetensors").write_bytes(b"weights")
    (folder / "params.yaml").write_text("{}")
    write_record(folder / paths.DATA_REPORT, data_report())
    machine = Machine("Linux", "x86_64", "3.11", "chip", 2, "cpu", "", "0.32", "0.32", 16 * GIB, 8 * GIB)
    write_record(folder / paths.MACHINE, machine)
    write_record(folder / paths.RECOMMENDED_CONFIG, PLAN)
    write_text(folder / paths.METRICS_CSV, csv_of(steps()))
    write_record(folder / paths.SUMMARY, dataclasses.replace(SUMMARY, **{**vars(settings), **outcome}))
    measured = found or evaluation((sample("What is it?"),))
    write_record(folder / paths.EVALUATION, dataclasses.replace(measured, adapter=(fingerprint(adapter),)))
    return output


def make_dead(folder: Path) -> Path:
    """Write a run that died in update 17, in the middle of a line of its metrics."""
    output = make_run(folder)
    for name in (paths.SUMMARY, paths.EVALUATION):
        (folder / name).unlink()
    write_record(output / "postmortem.json", DEATH)
    text = (folder / paths.METRICS_CSV).read_text()
    lines = text.splitlines(keepends=True)
    (folder / paths.METRICS_CSV).write_text("".join(lines[:18]) + lines[18][:12])
    return output


def change(path: Path, **values: Any) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def journal(output: Path, *entries: tuple[float, str, dict[str, Any]]) -> None:
    """Write flight/journal.jsonl: time, type and fields of each entry."""
    begun = {"total_steps": UPDATES, "description": ""}
    lines = [
        {"type": kind, "wall_seconds": when, "monotonic_seconds": 1.0, **(begun if kind == "Begun" else {}), **fields}
        for when, kind, fields in entries
    ]
    (output / "flight/journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"type": "Di')


MIB = 2**20
TOTAL, SAVED_AT, ENDS_AT = 40, 20, 30  # updates
JOB_OF_ALL = TrainJob(
    "models/encyclopedia-3m",
    dataclasses.replace(SETTINGS, batch_size=2, gradient_accumulation=8, eval_steps=10),
    True, MemoryBudget(GIB), None,
)  # fmt: skip
RUNG = Rung(dataclasses.replace(SETTINGS, batch_size=4, gradient_accumulation=4), 12, "out of memory")
KILLED = dataclasses.replace(
    DEATH, cause="killed", title="Killed from outside (SIGKILL)", is_memory=False,
    evidence=("signal 9", "8.00 GiB were free"), advice="", step=ENDS_AT + 1, rows=8, tokens=214, row_ids=(3, 9, 27),
    footprint_bytes=400 * MIB, limit_bytes=16 * GIB, predicted_peak_bytes=150 * MIB, mlx_active_bytes=90 * MIB,
    mlx_peak_bytes=140 * MIB, loss=0.6, resumes_from_step=SAVED_AT, ended_seconds=0.0,
)  # fmt: skip
ENDINGS = {  # cause and title of the verdict
    "killed": (KILLED.cause, KILLED.title),
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
        marker = RunMarker(boot_id(), "dvc repro", time.time(), *limit)
        write_record(output / FLIGHT / MARKER, marker)
        self.recorder = Recorder(output / FLIGHT / RECORDER)
        self.recorder.device("cpu")
        self.recorder.predicted_peak_bytes = 150 * MIB
        self.recorder.read_allocator = lambda: (90 * MIB, 140 * MIB, 10 * MIB)

    def begin(self) -> None:
        """Write what comes before the first update."""
        for phase in (Phase.LOAD_DATA, Phase.LOAD_MODEL, Phase.RESUME):
            with self.recorder.phase(phase):
                pass
        write_text(self.output / paths.METRICS_CSV.name, csv_of([]))
        self.journal.write(Begun(TOTAL, 0, "training on 160 rows", 10, 2.0))
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
        self.journal.write(found)

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
        write_record(
            self.output / POINTER, RunState(finished, name_of(1, SAVED_AT), step, RunIdentity("", "", "", "{}"))
        )

    def end(self, ending: str) -> None:
        """End in one of ENDINGS, or ``finished``."""
        if ending == "finished":
            with self.recorder.phase(Phase.FINISH):
                self.point(ENDS_AT, finished=True)
            self.journal.write(Finished(ENDS_AT))
        else:
            self.recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(ENDS_AT + 1, 1, 8, 214, (3, 9, 27)))
            cause, title = ENDINGS[ending]
            if ending not in ("killed", "oom", "hang"):
                self.journal.write(Failed("Error", title, 1))
            verdict = dataclasses.replace(KILLED, cause=cause, title=title, ended_seconds=time.time())
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
