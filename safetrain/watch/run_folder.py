"""Reads a run's folder, checkpoints_qlora: every record in it, and whether a run is in progress.

Reading takes no lock and changes nothing. Missing and unreadable records are None; the unreadable ones are listed.
"""

import contextlib
import dataclasses
import functools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from safetrain.core.events import Begun, Finished, JournalEntry, parse_journal
from safetrain.core.lock import is_locked
from safetrain.core.memory.system import footprint_bytes
from safetrain.core.postmortem import PostMortem
from safetrain.core.recorder import FlightHeader, FlightRecord, RunMarker, boot_id, living_process, read_flight
from safetrain.core.records.adapter_files import fingerprint
from safetrain.core.records.evaluation import Evaluation
from safetrain.core.records.metrics import StepRecord, TrainingSummary, parse_csv
from safetrain.core.records.reports import DataReport, Machine
from safetrain.core.records.run_state import Checkpoint, RunState, checkpoints_in
from safetrain.core.records.search import Search
from safetrain.core.records.settings import Recommendation, TrainJob, TrainSettings
from safetrain.core.storage import paths
from safetrain.core.storage.files import Kind, damage_of, from_json
from safetrain.core.storage.paths import FLIGHT, JOB, JOURNAL, KEPT, MARKER, POINTER, POSTMORTEM, RECORDER, UNFINISHED


@dataclass(frozen=True)
class Run:
    """Everything that a run's folder holds."""

    data: DataReport | None = None
    machine: Machine | None = None
    plan: Recommendation | None = None
    job: TrainJob | None = None  # of the newest training process
    state: RunState | None = None
    steps: tuple[StepRecord, ...] = ()
    summary: TrainingSummary | None = None
    evaluation: Evaluation | None = None  # of this adapter
    has_stale_evaluation: bool = False  # evaluation.json measures another adapter
    postmortem: PostMortem | None = None
    journal: tuple[JournalEntry, ...] = ()  # entries of this run only
    checkpoint: Checkpoint | None = None  # the newest one; only its hashes prove that it is whole
    marker: RunMarker | None = None
    header: FlightHeader | None = None
    flight: tuple[FlightRecord, ...] = ()
    is_locked: bool = False  # the supervisor or the training process is alive
    worker_lives: bool = False
    worker_is_stopped: bool = False  # by Ctrl-Z or a debugger
    worker_footprint_bytes: int = 0
    read_at_seconds: float = 0.0  # wall clock
    read_at_monotonic_seconds: float = 0.0
    unreadable: tuple[tuple[str, str], ...] = ()  # file, reason
    newer_step: int | None = None  # reached by a newer, unfinished run, if this one is finished

    @property
    def settings(self) -> TrainSettings | None:
        if self.summary is None and self.job is not None and (self.steps or self.postmortem):
            return self.job.settings
        return self.summary

    @property
    def newer_run(self) -> str:
        """A remark that these are not the results of the newest run; empty if they are."""
        if self.newer_step is None:
            return ""
        return (
            f"This is the last evaluated run. A newer run is {'in progress' if self.is_locked else 'unfinished'}, "
            f"at step {self.newer_step:,}: "
            f"{'safetrain monitor' if self.is_locked else 'the command that started it continues it'}."
        )

    @property
    def is_running(self) -> bool:
        """Whether a training run is in progress in this folder."""
        return self.marker is not None and self.is_locked

    @property
    def is_finished(self) -> bool:
        """Whether training_state.json calls the run complete."""
        return self.state is not None and self.state.finished

    @property
    def begun(self) -> Begun | None:
        """The newest event of a training process that has loaded everything; None if there is none."""
        return next((entry.event for entry in reversed(self.journal) if isinstance(entry.event, Begun)), None)


class RunReader:
    def __init__(self, output: Path) -> None:
        self.output = output
        self._unreadable = list[tuple[str, str]]()

    def file(self, name: str) -> bytes | None:
        """Read a file of the run's folder; None if it is missing. Raises OSError for a failing disk."""
        try:
            return (self.output / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def adapter(self) -> str:
        """Fingerprint of the trained adapter; empty if there is no adapter."""
        folder = self.output / paths.ADAPTERS.name
        try:
            facts = (folder / "adapters.safetensors").stat()
            return _fingerprint(folder, facts.st_mtime_ns, facts.st_size)
        except OSError:
            return ""

    def read(self, *, finished: bool = False) -> Run:
        """Read the current state of the run, or with ``finished`` of the last finished one. Raises OSError.

        Without a finished run, ``finished`` also reads the current one.
        """
        self._unreadable = []
        has_newer, live = (self.output / UNFINISHED).is_dir(), f"{UNFINISHED}/{paths.METRICS_CSV.name}"
        newer = self._steps(live) if has_newer else ()
        shows_newer = has_newer and not (finished and (self.output / paths.SUMMARY.name).is_file())
        run = Run(
            data=self._record(paths.DATA_REPORT.name, DataReport),
            machine=self._record(paths.MACHINE.name, Machine),
            plan=self._record(paths.RECOMMENDED_CONFIG.name, Recommendation),
            read_at_seconds=time.time(),
            read_at_monotonic_seconds=time.monotonic(),
            **({"steps": newer} if shows_newer else self._results()),
        )
        if has_newer and not shows_newer:
            run = dataclasses.replace(run, newer_step=newer[-1].step if newer else 0, is_locked=is_locked(self.output))
        else:
            run = dataclasses.replace(run, **self._progress(run.summary))
        return dataclasses.replace(run, unreadable=tuple(self._unreadable))

    def search(self) -> Search | None:
        """The search of this folder; None if there is none."""
        return self._record(f"{paths.SEARCH.name}/{paths.STANDINGS}", Search)

    def _results(self) -> dict[str, Any]:
        """Read what a finished run left."""
        summary = self._record(paths.SUMMARY.name, TrainingSummary)
        evaluation = self._record(paths.EVALUATION.name, Evaluation)
        stale = evaluation is not None and (summary is None or self.adapter() not in evaluation.adapter)
        steps, evaluation = self._steps(paths.METRICS_CSV.name), None if stale else evaluation
        return {"steps": steps, "summary": summary, "evaluation": evaluation, "has_stale_evaluation": stale}

    def _progress(self, summary: TrainingSummary | None) -> dict[str, Any]:
        """Read what the newest training process left, and find its processes; ``summary`` is of its run, or None."""
        recorder = read_flight(self.output / FLIGHT / RECORDER)
        header, flight = recorder.header, tuple(recorder.records)
        marker = self._record(f"{FLIGHT}/{MARKER}", RunMarker)
        job = self._record(f"{FLIGHT}/{JOB}", TrainJob)
        journal = parse_journal(self.file(f"{FLIGHT}/{JOURNAL}") or b"")
        postmortem = self._record(POSTMORTEM, PostMortem)
        if marker is None and summary is not None and _is_of_another_run(summary, job, journal):
            job, journal, header, flight, postmortem = None, (), None, (), None
        return {
            "job": job,
            "state": self._record(POINTER, RunState),
            "postmortem": postmortem,
            "journal": journal,
            "checkpoint": next(iter(checkpoints_in(self.output)), None),
            "marker": marker,
            "header": header,
            "flight": flight,
            **_processes(self.output, header),
        }

    def _steps(self, name: str) -> tuple[StepRecord, ...]:
        try:
            return tuple(parse_csv((self.file(name) or b"").decode("utf-8", "replace")))
        except ValueError as error:
            self._unreadable.append((str(paths.OUTPUT / name), str(error)))
            return ()

    def _record(self, name: str, kind: type[Kind]) -> Kind | None:
        """Read a record; None if it is missing or unreadable."""
        content = self.file(name)
        if content is None:
            return None
        try:
            return from_json(kind, json.loads(content))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._unreadable.append((str(paths.OUTPUT / name), damage_of(error)))
            return None


@functools.lru_cache(maxsize=1)  # the file may be as large as a model
def _fingerprint(folder: Path, _time: int, _size: int) -> str:
    return fingerprint(folder)


def read_run(output: Path = paths.OUTPUT) -> Run:
    """Read the last finished run of a folder; the current one if none has finished."""
    return RunReader(output).read(finished=True)


def read_evaluated() -> Run:
    """Read the last evaluated run; the last one if none was evaluated."""
    run, kept = read_run(), read_run(paths.OUTPUT / KEPT)
    if run.evaluation is not None or kept.evaluation is None:
        return run
    return dataclasses.replace(kept, newer_step=run.summary.steps if run.summary else 0)


def _is_of_another_run(summary: TrainingSummary, job: TrainJob | None, journal: tuple[JournalEntry, ...]) -> bool:
    """Whether DVC restored the results of a run other than the one in flight/.

    A run removes the old summary when it begins, and ends its journal after writing the new summary.
    """
    marks = [entry.event for entry in journal if isinstance(entry.event, Begun | Finished)]
    same = job is not None and vars(job.settings).items() <= vars(summary).items()
    return bool(marks) and not (same and marks[-1] == Finished(summary.steps))


def _processes(output: Path, header: FlightHeader | None) -> dict[str, Any]:
    """Find the run's processes. The lock shows whether they live: the kernel releases it when they die."""
    if not is_locked(output):
        return {}
    found: dict[str, Any] = {"is_locked": True}
    process = living_process(header.pid) if header is not None and header.boot_id == boot_id() else None
    with contextlib.suppress(psutil.Error):  # it has just ended
        if process is not None:
            stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            memory = footprint_bytes(process.pid)
            found |= {"worker_lives": True, "worker_is_stopped": stopped, "worker_footprint_bytes": memory}
    return found
