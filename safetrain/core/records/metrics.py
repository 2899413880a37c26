"""A run's measurements: training_metrics.csv (a line per record), training_metrics.json, training_summary.json."""

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from safetrain.core.records.evaluation import Likeness
from safetrain.core.records.search import Candidate
from safetrain.core.records.settings import TrainSettings

LEAST_PROVED, MOST_PROVED, TRAINED_TO_PROVED = 2**9, 2**12, 100  # tokens in an adapter check; trained tokens for each


@dataclass(frozen=True, slots=True)  # there may be a hundred thousand
class StepRecord:
    """One line of training_metrics.csv. ``None`` is an empty field: not measured at that step."""

    step: int  # steps so far
    epoch: float  # epochs so far
    train_loss: float | None  # mean per label (preference training: per pair) since the last record
    valid_loss: float | None  # mean per label (preference training: per pair) over the validation rows
    learning_rate: float | None  # at the last step
    grad_norm: float | None  # gradient norm of the last step, before clipping
    labels: int  # labels seen since the start of the run
    labels_per_second: float | None  # speed since the last record
    peak_memory_bytes: int  # peak memory of mlx over all steps
    footprint_bytes: int  # memory of the process (macOS: its footprint)
    elapsed_seconds: float  # time of the steps, without validation and saving
    # preference training: means over the validation pairs; rewards and log-probabilities in nats
    valid_accuracy: float | None = None  # share of pairs whose chosen answer has the higher reward
    valid_margin: float | None = None  # reward of the chosen answer minus that of the rejected one
    chosen_logp: float | None = None  # log-probability of a chosen answer
    rejected_logp: float | None = None


KINDS: dict[str, Any] = {column.name: int if column.type is int else float for column in fields(StepRecord)}


@dataclass(frozen=True, kw_only=True)
class TrainingMetrics:
    """training_metrics.json: the numbers for comparing runs. Losses in nats per label, or per pair of answers."""

    final_train_loss: float  # mean over the last tenth of the steps, at most 32
    valid_loss: float  # after the last step
    best_valid_loss: float
    best_step: int
    steps: int
    best_valid_bits_per_byte: float | None = None  # pretraining only: comparable between tokenizers


@dataclass(frozen=True)
class Proof:
    """``proof`` in training_summary.json: the base model without and with the saved adapter, on validation rows."""

    rows: int
    labels: int
    tuned_loss: float  # loss of the model in memory at its best step
    base: Likeness
    opened: Likeness
    opened_by: str  # mlx-lm; safetrain for DoRA on a base of 3, 5 or 6 bits


@dataclass(frozen=True, kw_only=True)
class TrainingSummary(TrainingMetrics, TrainSettings):
    """training_summary.json: settings, metrics and other results of a finished training run."""

    base_model: str
    train_rows: int
    trainable_parameters: int
    resumed_from_step: int  # 0: never interrupted
    labels: int  # labels
    elapsed_seconds: float  # time of the steps, without loading, validation and saving
    tokens_per_second: float  # speed in input tokens, without padding
    peak_memory_bytes: int  # peak memory of mlx over all steps
    peak_footprint_bytes: int  # peak memory of the process
    predicted_peak_bytes: int  # predicted peak memory of mlx
    blas: str
    padding_share: float  # share of padding in all computed tokens
    stopped_early: bool
    base_valid_loss: float  # validation loss before the first step
    memory_rungs: tuple[str, ...]  # configurations that ran out of memory
    gpu_rungs: tuple[str, ...]  # changes after the GPU watchdog
    valid_rows: int = 0  # rows of each validation; 0: unknown
    valid_rows_available: int = 0
    cut_rows: int | None = None  # training rows truncated to max_seq_length; None: unknown
    candidates: tuple[Candidate, ...] = ()  # of the search that this run comes from
    proof: Proof

    @property
    def mlx_limit_bytes(self) -> int:
        """mlx's memory limit: the larger of the measured and predicted peaks (a resumed run may measure too little)."""
        return max(self.peak_memory_bytes, self.predicted_peak_bytes)


def csv_of(records: Sequence[StepRecord]) -> str:
    """A metrics file with its header."""
    return "".join([",".join(KINDS) + "\n", *map(_line_of, records)])


def append_csv(path: Path, record: StepRecord) -> None:
    """Append one line; if that raises OSError, the file is unchanged. A reader may tail it."""
    size = path.stat().st_size
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(_line_of(record))
    except OSError:
        os.truncate(path, size)
        raise


def _line_of(record: StepRecord) -> str:
    return ",".join("" if value is None else str(value) for value in astuple(record)) + "\n"


def parse_csv(text: str) -> list[StepRecord]:
    """Parse a metrics file, without a torn last line. Raises ValueError for anything else."""
    head, *lines = [line.split(",") for line in text.split("\n")[:-1]] or [list(KINDS)]
    if head != list(KINDS):
        raise ValueError(f"its columns are {', '.join(head)}")
    records = list[StepRecord]()
    for line in lines:
        values: list[Any] = [kind(cell) if cell else None for kind, cell in zip(KINDS.values(), line, strict=True)]
        records.append(StepRecord(*values))
    return records


def proved_tokens(labels: int) -> int:
    """Maximum number of validation tokens for the adapter check, so that it takes 1 % of the training's time."""
    return min(MOST_PROVED, max(LEAST_PROVED, labels // TRAINED_TO_PROVED))


def proof_passes(labels: int, valid_tokens: int) -> float:
    """Time of the adapter check, in validations: three passes over a sample of the rows."""
    return 3 * min(1.0, proved_tokens(labels) / max(1, valid_tokens))
