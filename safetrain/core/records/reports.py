"""The small records that stages hand to each other in files: what the data is, what the machine is."""

import functools
import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.errors import ConfigError, DataError
from safetrain.core.memory.budget import PROCESS_BYTES, MemoryBudget
from safetrain.core.records.forgetting import Forgetting
from safetrain.core.records.record_files import from_json, read_result

BINS_PER_DOUBLING = 4  # of the data report's histograms


@dataclass(frozen=True)
class LengthQuantiles:
    """Token lengths of rendered rows."""

    p50: int
    p90: int
    p95: int
    p99: int
    p99_5: int
    max: int


@dataclass(frozen=True)
class LengthHistogram:
    """A split by length. Count i is of lengths above ``edges[i]``, up to ``edges[i + 1]`` tokens."""

    edges: tuple[int, ...]  # the same for all data, equally far apart on a logarithmic axis
    rows: tuple[int, ...]  # by their tokens
    rows_by_labels: tuple[int, ...]  # by their trained tokens
    labels: tuple[int, ...]  # trained tokens, by their place in the row, from 1


@dataclass(frozen=True)
class SplitReport:
    """One of train, valid, test."""

    rows: int
    tokens: int
    trained_tokens: int
    lengths: LengthQuantiles
    histogram: LengthHistogram
    label_bytes: int = 0  # UTF-8 bytes of the text of all labels, special tokens not counted; 0: not known

    def share_beyond(self, counts: Sequence[int], length: int) -> float:
        """Of what ``counts`` of the histogram count, the share beyond ``length`` tokens.

        Inside a bin as if it were filled evenly.
        """
        edges = (*self.histogram.edges[:-1], self.lengths.max)
        beyond = 0.0
        for (low, high), count in zip(itertools.pairwise(edges), counts, strict=True):
            beyond += count * min(1.0, max(0.0, (high - length) / (high - low)))
        return beyond / sum(counts)


@dataclass(frozen=True)
class Finding:
    """Something found in the data. ``severity``: error, warning or note; ``where`` names the first rows."""

    id: str
    severity: str
    count: int
    where: tuple[str, ...]  # file:line
    message: str
    remedy: str


@dataclass(frozen=True)
class DataReport:
    """data_report.json: what validate_data found."""

    source: str
    format: str
    split: str
    warnings: tuple[str, ...]  # the messages of those findings that are warnings
    findings: tuple[Finding, ...]
    template_date: str  # what chat templates were told is today
    stop_tokens: tuple[str, ...]  # that end an answer, by the model and by what is trained
    opening: str  # how answers are asked for, in words
    train: SplitReport
    valid: SplitReport
    test: SplitReport

    @property
    def splits(self) -> tuple[tuple[str, SplitReport], ...]:
        """With their names."""
        return ("train", self.train), ("valid", self.valid), ("test", self.test)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row that a training sees."""
        return max(self.train.lengths.max, self.valid.lengths.max)


@dataclass(frozen=True)
class Machine:
    """machine.json: the machine as it is every day, and the memory that a training may use."""

    system: str
    architecture: str
    python: str
    chip: str
    physical_cores: int
    backend: str
    device: str
    mlx: str
    mlx_lm: str
    total_memory_bytes: int
    memory_budget_bytes: int  # of the training process
    process_memory_bytes: int = PROCESS_BYTES  # of it, Python and libraries, as measured
    gemm_gflops: float = 0.0  # speed of a product of large float32 matrices; 0: not known
    compute_dtype: str | None = None  # float32 where that is faster than bfloat16; None: the type a base is stored in
    quantized_compute_dtype: str | None = None  # the same for a quantized base

    @property
    def memory_budget(self) -> MemoryBudget:
        """What a process may take."""
        return MemoryBudget(self.memory_budget_bytes, self.process_memory_bytes)


@dataclass(frozen=True)
class RunShape:
    """The settings that a training ended with, after any rungs it took, mlx's peak, and how long it took."""

    batch_size: int
    max_seq_length: int
    dequantize_base: bool
    compute_dtype: str | None
    peak_memory_bytes: int
    predicted_peak_bytes: int
    elapsed_seconds: float  # of its updates
    method: str = "lora"

    @property
    def most_tokens(self) -> int:
        """That were computed together."""
        return self.batch_size * self.max_seq_length

    @property
    def mlx_limit_bytes(self) -> int:
        """What mlx may take to open the model again.

        Of the two, the larger: a training that was continued for its last few updates had a small peak.
        """
        return max(self.peak_memory_bytes, self.predicted_peak_bytes)


def read_run_shape(path: Path) -> RunShape:
    """Of training_summary.json; raises ConfigError."""
    return read_result(path, "train", functools.partial(from_json, RunShape, partly=True))


@dataclass(frozen=True)
class Score:
    """A model on the test file. What is None has no question to be measured on; intervals are of 95 %."""

    loss: float  # nats per trained token
    perplexity: float
    exact_match: float | None  # share of the answered questions
    exact_match_low: float | None
    exact_match_high: float | None
    token_f1: float | None  # means over them, from 0 to 1
    token_f1_low: float | None
    token_f1_high: float | None
    chrf: float | None
    chrf_low: float | None
    chrf_high: float | None


@dataclass(frozen=True)
class Improvement:
    """By how much the tuned model's loss is below the base's, on the same rows."""

    nats_per_label: float
    plus_minus: float | None  # half of its 95 % interval; None of fewer than two rows
    rows: int


@dataclass(frozen=True)
class Sample:
    """One question and what everybody answers. Losses are means of the row, in nats per label."""

    question: str
    expected: str
    base: str
    tuned: str
    where: str  # file:line
    base_loss: float
    tuned_loss: float


@dataclass(frozen=True)
class GroupScore:
    """Of the rows of one category or task, those whose question was answered."""

    name: str
    questions: int
    base_exact_match: float
    tuned_exact_match: float
    tuned_exact_match_low: float
    tuned_exact_match_high: float
    improvement: Improvement


def describe_sample(question: str, base: str, tuned: str) -> str:
    """Three lines for a terminal, each cut to its width."""
    asked, before, after = (textwrap.shorten(text, 140, placeholder=" …") for text in (question, base, tuned))
    return f"  {asked}\n    base:  {before}\n    tuned: {after}"


@dataclass(frozen=True)
class Evaluation:
    """evaluation.json: base and tuned side by side on the same rows."""

    base: Score
    tuned: Score
    improvement: Improvement
    rows: int
    cut_rows: int  # of these, to the length of the training
    questions: int  # in these rows
    answered: int  # of these questions; a seeded sample where they are not all
    adapter: str  # fingerprint of the adapter that was measured
    samples: tuple[Sample, ...]
    worst: tuple[Sample, ...]  # the highest losses of the tuned model
    most_changed: tuple[Sample, ...]  # the largest differences of loss between base and tuned
    groups: tuple[GroupScore, ...]  # the largest; none where no row has a category
    forgetting: Forgetting  # of the general text


def read_data_report(path: Path) -> DataReport:
    """Read data_report.json; raises ConfigError."""
    return read_result(path, "validate_data", functools.partial(from_json, DataReport))


def require_data_of(report: DataReport, source: str) -> None:
    """Raise ConfigError when data/validated was made from other data than ``source``; DataError if that is gone."""
    if report.source != source:
        if not Path(source).exists():
            raise DataError("The data does not exist.", where=source, do="correct data.path")
        raise ConfigError(
            "data/validated was made from other data.",
            expected=source,
            got=report.source,
            do="run validate_data with the same overrides, or safetrain run, which does",
        )


def read_machine(path: Path) -> Machine:
    """Read machine.json; raises ConfigError."""
    return read_result(path, "preflight", functools.partial(from_json, Machine))
