"""Everything that a run has left, read from wherever its files are: each part, or why it is not there."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetrain.core.errors import ModelError
from safetrain.core.protocol.journal import BEGUN, Entry, parse_entry
from safetrain.core.protocol.liveness import supervisor_of
from safetrain.core.protocol.marker import RunMarker, marker_in
from safetrain.core.records.adapter_files import fingerprint
from safetrain.core.records.evaluation import Evaluation
from safetrain.core.records.job import TrainJob
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.postmortem import PostMortem
from safetrain.core.records.record_files import from_json
from safetrain.core.records.reports import DataReport, Machine, TrainingMetrics, TrainingOutcome
from safetrain.core.records.schema import PRETRAIN
from safetrain.core.records.settings import Recommendation, TrainSettings, recommendation_from
from safetrain.core.storage import paths
from safetrain.core.storage.run_files import FLIGHT, JOB, JOURNAL, MARKER, POSTMORTEM, SAMPLES
from safetrain.watch.long_runs import MetricsRead, read_metrics

Kind = TypeVar("Kind")


class RunFiles(Protocol):
    """Where the files of a run are: a folder, or a revision."""

    @property
    def name(self) -> str:
        """For people."""

    def read(self, path: Path) -> bytes | None:
        """A file by its path in the project; None where there is none."""

    def adapter(self) -> str | None:
        """Fingerprint of the trained adapter; None where it cannot be said."""

    def supervisor_lives(self, marker: RunMarker | None) -> bool:
        """Whether who has written ``marker`` is at work on these files."""


@dataclass(frozen=True)
class FolderFiles:
    """A project's folder."""

    root: Path
    name: str = "this run"

    def read(self, path: Path) -> bytes | None:
        """A file of the folder."""
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def adapter(self) -> str | None:
        """Of the adapter that is there; empty where there is none."""
        try:
            return fingerprint(self.root / paths.ADAPTERS)
        except ModelError:
            return ""

    def supervisor_lives(self, marker: RunMarker | None) -> bool:
        """Asked of this machine."""
        return supervisor_of(marker) is not None


@dataclass(frozen=True)
class RunSummary:
    """training_summary.json."""

    settings: TrainSettings
    metrics: TrainingMetrics
    outcome: TrainingOutcome


@dataclass(frozen=True)
class WrittenText:
    """A line of samples.jsonl: how a model goes on after ``prompt``, which is empty where it begins by itself."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class WholeRun:
    """A run. What is None is not there; ``unreadable`` says of which files that is their own fault."""

    name: str
    data: DataReport | None
    machine: Machine | None
    plan: Recommendation | None
    recorded: MetricsRead
    summary: RunSummary | None
    evaluation: Evaluation | None
    evaluation_is_of_another: bool  # training than the one that the other records are of
    death: PostMortem | None
    job: TrainJob | None  # of the last training process
    happenings: tuple[Entry, ...]  # of this run, as its journal has them
    begun: bool  # a training process was started, and nobody has written down its end
    lives: bool  # and its supervisor is still there
    unreadable: tuple[tuple[str, str], ...]  # file, why
    samples: tuple[WrittenText, ...] = ()  # of a model that was trained from scratch

    @property
    def settings(self) -> TrainSettings | None:
        """That it ran with, or runs."""
        if self.summary is not None:
            return self.summary.settings
        return self.job.settings if self.job is not None and (self.steps or self.death) else None

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """What the training recorded; of a long one a part that has the extremes."""
        return self.recorded.steps


def read_records(files: RunFiles) -> WholeRun:
    """All of them. Raises OSError where the disk does not let a file be read."""
    reader = _Reader(files)
    evaluation = reader.json(paths.EVALUATION, functools.partial(from_json, Evaluation))
    own = files.adapter() if evaluation is not None else None
    summary = reader.json(paths.SUMMARY, _summary)
    stale = evaluation is not None and (summary is None or own not in (None, evaluation.adapter))
    partly = functools.partial(from_json, partly=True)
    marker = files.read(paths.OUTPUT / FLIGHT / MARKER)
    samples = reader.part(paths.OUTPUT / SAMPLES, _samples) if summary and summary.settings.method == PRETRAIN else ()
    return WholeRun(
        name=files.name,
        data=reader.json(paths.DATA_REPORT, functools.partial(from_json, DataReport)),
        machine=reader.json(paths.MACHINE, functools.partial(from_json, Machine)),
        plan=reader.json(paths.RECOMMENDED_CONFIG, recommendation_from),
        recorded=reader.part(paths.METRICS_CSV, read_metrics) or MetricsRead((), ()),
        summary=summary,
        evaluation=None if stale else evaluation,
        evaluation_is_of_another=stale,
        death=reader.json(paths.OUTPUT / POSTMORTEM, functools.partial(partly, PostMortem)),
        job=reader.json(paths.OUTPUT / FLIGHT / JOB, functools.partial(from_json, TrainJob)),
        happenings=_happenings(files.read(paths.OUTPUT / FLIGHT / JOURNAL) or b""),
        begun=marker is not None,
        lives=marker is not None and files.supervisor_lives(marker_in(marker)),
        unreadable=tuple(reader.unreadable),
        samples=samples or (),
    )


class _Reader:
    def __init__(self, files: RunFiles) -> None:
        self._files, self.unreadable = files, list[tuple[str, str]]()

    def json(self, path: Path, build: Callable[[Any], Kind]) -> Kind | None:
        """What ``build`` makes of a file's JSON."""
        return self.part(path, lambda text: build(json.loads(text)))

    def part(self, path: Path, build: Callable[[str], Kind]) -> Kind | None:
        """What ``build`` makes of a file's text; None where there is none, or it cannot be read."""
        content = self._files.read(path)
        if content is None:
            return None
        try:
            return build(content.decode("utf-8"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.unreadable.append((str(path), f"{type(error).__name__}: {error}"))
            return None


def _summary(value: Any) -> RunSummary:
    """The three records that share the file."""
    return RunSummary(
        from_json(TrainSettings, value, partly=True),
        from_json(TrainingMetrics, value, partly=True),
        from_json(TrainingOutcome, value, partly=True),
    )


def _samples(text: str) -> tuple[WrittenText, ...]:
    return tuple(from_json(WrittenText, json.loads(line)) for line in text.splitlines())


def _happenings(content: bytes) -> tuple[Entry, ...]:
    """Of the last run: from where it began anew."""
    found = list[Entry]()
    for entry in map(parse_entry, content.splitlines()):
        if entry is not None:
            found = [] if entry.kind == BEGUN and entry.step == 0 else found
            found.append(entry)
    return tuple(found)
