"""Reads a run's records again and again: only what is new of the long ones, only what has changed of the others.

It holds no lock and writes nothing: files are opened to be read, and a training never waits for it.
"""

import dataclasses
import json
import time
from collections import deque
from pathlib import Path
from typing import Any, TypeVar

import psutil

from safetrain.core.memory.process import footprint_bytes
from safetrain.core.protocol.flight import boot_id
from safetrain.core.protocol.flight_tail import FlightTail
from safetrain.core.protocol.journal import BEGUN, MARK, Entry, parse_entry
from safetrain.core.protocol.liveness import living_process, supervisor_of
from safetrain.core.protocol.marker import RunMarker, read_marker
from safetrain.core.records.job import TrainJob
from safetrain.core.records.postmortem import PostMortem
from safetrain.core.records.record_files import from_json
from safetrain.core.storage import paths
from safetrain.core.storage.checkpoint_files import MANIFEST, checkpoints_in
from safetrain.core.storage.run_files import FLIGHT, JOB, JOURNAL, MARKER, POINTER, POSTMORTEM, RECORDER
from safetrain.watch.monitor_metrics import MetricsReader
from safetrain.watch.monitor_records import MachineNow, RunRecords, Saved, Standing, SummaryTold
from safetrain.watch.monitor_stage import stage_here
from safetrain.watch.monitor_tail import Changing, Tail
from safetrain.watch.time_left import Marks

MOST_EVENTS = 64
Value = TypeVar("Value")
Numbered = tuple[int, Entry]  # in the order of the file


class RunReader:
    """The records of one output folder."""

    def __init__(self, output: Path) -> None:
        self._output, self._project = output, output.resolve().parent
        flight = output / FLIGHT
        self._marker = Changing(flight / MARKER, read_marker)
        self._job = Changing(flight / JOB, lambda path: _record(path, TrainJob, partly=False))
        self._verdict = Changing(output / POSTMORTEM, lambda path: _record(path, PostMortem))
        self._standing = Changing(output / POINTER, lambda path: _record(path, Standing))
        self._summary = Changing(output / paths.SUMMARY.name, lambda path: _record(path, SummaryTold))
        self._flight = FlightTail(flight / RECORDER)
        self._journal = Tail(flight / JOURNAL)
        self._events: deque[Numbered] = deque(maxlen=MOST_EVENTS)
        self._begun: Numbered | None = None
        self._marks = Marks[Numbered]()  # since then
        self._entries_read = 0
        self._metrics = MetricsReader(Tail(output / paths.METRICS_CSV.name))

    def read(self, most_seconds: float = 0.1) -> RunRecords:
        """As of now; a long metrics file is read for at most about ``most_seconds``, and the rest the next time."""
        self._flight.read()
        self._read_journal()
        self._metrics.read(most_seconds)
        marker, header = self._marker.value(), self._flight.header
        started = (header.pid, header.started_seconds) if header is not None else (0, 0.0)
        machine = machine_now(marker, *started)
        if not (machine.worker_lives or machine.supervisor_lives):
            machine = dataclasses.replace(machine, stage=stage_here(self._project, machine.wall_seconds))
        return RunRecords(
            machine=machine,
            marker=marker,
            header=header,
            flight=tuple(self._flight.records),
            journal=self._entries(),
            job=self._job.value(),
            curves=self._metrics.curves(),
            saved=newest_saved(self._output),
            standing=self._standing.value(),
            summary=self._summary.value(),
            verdict=self._verdict.value(),
        )

    def _entries(self) -> tuple[Entry, ...]:
        begun = [self._begun] if self._begun is not None else []
        numbered = sorted((*self._events, *begun, *self._marks.kept), key=lambda each: each[0])  # clocks may be set
        return tuple(entry for _, entry in numbered)

    def _read_journal(self) -> None:
        while True:
            lines = self._journal.lines()
            if self._journal.is_new:
                self._events.clear()
                self._begun = None
                self._marks.clear()
            for entry in (entry for line in lines if (entry := parse_entry(line)) is not None):
                self._take(entry)
            if not self._journal.unread_bytes:
                return

    def _take(self, entry: Entry) -> None:
        self._entries_read += 1
        numbered = self._entries_read, entry
        if entry.kind == BEGUN:
            self._begun = numbered
            self._marks.clear()
        elif entry.kind == MARK:
            self._marks.add(numbered)
        else:
            self._events.append(numbered)


def newest_saved(output: Path) -> Saved | None:
    """The newest checkpoint that was written to its end; whether it is whole, only its hashes tell."""
    try:
        for found in checkpoints_in(output):
            manifest = found.folder / MANIFEST
            if manifest.is_file():
                return Saved(found.step, manifest.stat().st_mtime, found.folder.name)
    except OSError:  # removed meanwhile
        pass
    return None


def machine_now(marker: RunMarker | None, worker: int, worker_started: float) -> MachineNow:
    """Readings of this machine, and of the run's two processes; of a run before a reboot, none lives."""
    memory, boot = psutil.virtual_memory(), boot_id()
    here = marker is not None and marker.boot_id == boot
    process = living_process(worker, worker_started) if here or marker is None else None
    footprint, stopped = 0, False
    if process is not None:
        try:
            footprint, stopped = footprint_bytes(process.pid), process.status() == psutil.STATUS_STOPPED
        except psutil.Error:
            process = None
    return MachineNow(
        wall_seconds=time.time(),
        monotonic_seconds=time.monotonic(),
        boot_id=boot,
        supervisor_lives=supervisor_of(marker) is not None,
        worker_lives=process is not None,
        worker_is_stopped=stopped,
        footprint_bytes=footprint,
        total_bytes=memory.total,
        available_bytes=memory.available,
    )


def _record(path: Path, kind: type[Value], *, partly: bool = True) -> Value | None:
    """The record in a file; None where it is another version's, or no record."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        return from_json(kind, value, partly=partly)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
