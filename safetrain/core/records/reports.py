"""Small records that stages pass on in files: reports about the data and the machine."""

from dataclasses import dataclass
from pathlib import Path

from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import similar_path
from safetrain.core.memory.system import PROCESS_BYTES, MemoryBudget


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
class SplitReport:
    """Report on one split: train, valid or test."""

    rows: int  # two for each pair
    tokens: int
    labels: int
    lengths: LengthQuantiles
    label_bytes: int = 0  # UTF-8 bytes of all labels without special tokens; 0: unknown
    pairs: int = 0  # of preference data


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
    """data_report.json: the findings of validate_data, and the sizes of the splits."""

    source: str
    format: str
    split: str
    warnings: tuple[str, ...]  # messages of the findings that are warnings
    findings: tuple[Finding, ...]
    template_date: str  # date that the chat template writes
    stop_tokens: tuple[str, ...]  # stop tokens of the model and of the training rows
    opening: str  # how the generation prompt opens an answer
    train: SplitReport
    valid: SplitReport
    test: SplitReport

    @property
    def splits(self) -> tuple[tuple[str, SplitReport], ...]:
        return ("train", self.train), ("valid", self.valid), ("test", self.test)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row that a training run sees."""
        return max(self.train.lengths.max, self.valid.lengths.max)


@dataclass(frozen=True)
class Machine:
    """machine.json: the machine, and the memory that a training run may use."""

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
    memory_budget_bytes: int  # most memory that the training process may use
    process_memory_bytes: int = PROCESS_BYTES  # part of the budget for Python and libraries
    gemm_gflops: float = 0.0  # speed of a large float32 matrix product; 0: unknown
    compute_dtype: str | None = None  # float32 if faster than bfloat16; None: as the base is stored
    quantized_compute_dtype: str | None = None  # the same for a quantized base
    dequantizing_pays: bool | None = None  # whether a CUDA device is faster with a dequantized base; None: not timed
    labels_at_once: int | None = None  # whose logits it computes as fast together as more
    from_adapter: str = ""  # of train.from_adapter, weights and scale: if they change, DVC plans and trains again

    @property
    def memory_budget(self) -> MemoryBudget:
        return MemoryBudget(self.memory_budget_bytes, self.process_memory_bytes)


def require_data_of(report: DataReport, source: str) -> None:
    """Raise ConfigError if data/validated was not made from ``source``; DataError if ``source`` does not exist."""
    if report.source != source:
        require_source(source)
        what = "data/validated was made from different data."
        do = "run validate_data with the same values, or all stages: safetrain run KEY=VALUE"
        raise ConfigError(what, expected=source, got=report.source, do=do)


def require_source(source: str) -> None:
    """Raise DataError if data.path is missing."""
    if not Path(source).exists():
        raise DataError("data.path does not exist.", where=source, do=similar_path(Path(source)) or "correct data.path")
