"""The resolved settings of one training run: the user's keys over the recommendation."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted
from safetrain.core.memory.system import MemoryBudget, own_limit_bytes
from safetrain.core.records.schema import PAIRED, WHOLE, Lora, Train

ALL_LINEAR = "all-linear"
DRY_RUN_TIMED_SECONDS = 1.5  # of updates of mean size
DRY_RUN_SLOW_SECONDS = 10.0  # a slower update is the only one that a dry run makes
MEMORY_ONLY = ("batch_size", "gradient_accumulation", "gradient_checkpointing", "dequantize_base", "stream_base")
ROUNDING_ONLY = (*MEMORY_ONLY, "threads")  # these change results only by rounding and dropout's random numbers
PLANNED = (
    "lora", "gradient_checkpointing", "dequantize_base", "batch_size", "gradient_accumulation", "max_seq_length",
    "compute_dtype", "stream_base",
)  # fmt: skip
SETTINGS = (*PLANNED, "method", "optimizer")  # these decide how much memory a run needs
UPDATE = ("longest", "tokens", "labels")


@dataclass(frozen=True)
class LoraSettings:
    """The adapter's shape. ``targets`` are names of linear layers, or the one word all-linear."""

    rank: int
    scale: float
    dropout: float
    num_layers: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class TrainSettings:
    """Everything that decides what a training run computes. Steps are optimizer updates."""

    method: str  # lora, dora, full, pretrain, dpo, orpo
    optimizer: str
    schedule: str
    batch_size: int
    gradient_accumulation: int
    max_seq_length: int
    learning_rate: float
    num_epochs: int
    max_steps: int | None
    max_examples: int | None
    warmup_steps: int
    save_steps: int
    eval_steps: int
    log_steps: int
    max_grad_norm: float
    weight_decay: float
    early_stopping_patience: int | None  # validations without a new best
    max_loss_jump: float | None  # nats per label
    dequantize_base: bool
    gradient_checkpointing: bool
    seed: int
    lora: LoraSettings
    compute_dtype: str | None = None  # on a GPU; None: the type of the base's files. A CPU computes in float32
    stream_base: bool = False  # the base stays on disk, and each block is read when it is computed
    beta: float = 0.1  # of dpo and orpo
    from_adapter: str | None = None  # folder of the adapter that training begins with; None: a new one
    threads: int | None = None  # of a CPU, at most; None: all cores

    @property
    def rows_per_update(self) -> int:
        """Rows whose tokens are averaged into one optimizer update."""
        return self.batch_size * self.gradient_accumulation

    @property
    def adapter(self) -> str:
        """The kind of what is trained: lora, dora, full or pretrain."""
        return "lora" if self.method in PAIRED else self.method

    @property
    def window(self) -> str:
        """Rows of an update, as ``batch size x accumulation``."""
        return f"{self.batch_size} x {self.gradient_accumulation}"

    def __str__(self) -> str:
        """Describe the settings that decide the memory of an update."""
        extra = ", blocks recomputed" if self.gradient_checkpointing else ""
        extra += ", base dequantized" if self.dequantize_base else ""
        extra += ", base on disk" if self.stream_base else ""
        return f"{self.window} rows per update, at most {self.max_seq_length} tokens each{extra}"


@dataclass(frozen=True)
class MemoryTerm:
    """One line of the memory estimate."""

    name: str
    size_bytes: int
    exact: bool = False  # whether the size is known, not estimated


@dataclass(frozen=True)
class LargestUpdate:
    """Size of a run's largest update, with truncated rows (core/data/training_rows.py)."""

    rows: int
    longest: int  # input tokens of the longest row, in training or validation
    tokens: int  # input tokens of all its rows
    labels: int


@dataclass(frozen=True)
class OwnOrder:
    """The largest update in the row order of the run's own seed, and its measured peak."""

    largest_update: LargestUpdate
    peak_bytes: int  # of mlx's allocator


@dataclass(frozen=True)
class DryRun:
    """Peak memory and time of a training run's largest updates, in bytes and seconds."""

    peak_bytes: int  # of mlx's allocator, over the updates
    footprint_bytes: int  # of the process (core/memory/system.py), loading and validating included
    update_seconds: float  # of an update of mean size
    device: str
    own_seconds: float  # of the whole dry run, without the start of Python
    own_order: OwnOrder | None  # None if updates are so slow that the dry run makes only one
    threads: int | None = None  # with which updates are fastest on this CPU


@dataclass(frozen=True)
class Recommendation:
    """recommended_config.json: values at the top level (DVC tracks them by key), reasons, and the memory needed."""

    batch_size: int
    gradient_accumulation: int
    max_seq_length: int
    learning_rate: float
    num_epochs: int
    warmup_steps: int
    save_steps: int
    eval_steps: int
    log_steps: int
    dequantize_base: bool
    gradient_checkpointing: bool
    stream_base: bool
    compute_dtype: str | None  # None: as the base is stored
    lora: LoraSettings
    test_tokens: int  # most tokens of test rows that evaluate measures; more rows are sampled
    answer_tokens: int  # the same for a model's answers
    general_tokens: int  # the same for the general text
    largest_update: LargestUpdate  # step that the memory is predicted for
    planned_method: str
    planned_optimizer: str
    planned_model: str
    planned_backend: str
    planned_adapter: str  # weights and scale of train.from_adapter, as a hash; empty: a new adapter
    reasons: dict[str, str]  # by key: train keys without a prefix, adapter keys as lora.rank
    predicted_peak_bytes: int
    mlx_limit_bytes: int  # value for mx.set_memory_limit
    memory_terms: tuple[MemoryTerm, ...]
    memory_budget_bytes: int
    process_memory_bytes: int  # part of the budget outside mlx's allocator
    margin_bytes: int  # reserve on top of the predicted peak
    basis: str  # closed form, or dry run
    step_seconds: float | None  # time of a step of mean size, by a dry run
    total_seconds: float | None  # time of all steps, validations and the evaluation
    disk_bytes: int  # space for checkpoints and adapter
    measured_peak_bytes: int | None  # peak in the dry run, over the largest steps of several row orders
    own_order: OwnOrder | None  # largest step and peak in the order of train.seed; None: not measured
    measured_footprint_bytes: int | None  # memory of the dry run's process
    verified: bool  # whether a dry run fits the budget
    max_steps: int | None = None  # steps after which the run ends; None: num_epochs applies
    threads: int | None = None  # of a CPU, as measured by the dry run; None: all cores

    @property
    def memory_budget(self) -> MemoryBudget:
        """Memory that a process may use."""
        return MemoryBudget(self.memory_budget_bytes, self.process_memory_bytes)

    @property
    def dry_run_peak_bytes(self) -> int | None:
        """Peak of mlx's allocator in a dry run that fitted the budget; None without one."""
        peak = self.measured_peak_bytes
        return peak if self.verified and peak is not None and peak <= self.memory_budget_bytes else None

    def planned_settings(self, settings: TrainSettings) -> TrainSettings:
        """The settings of the dry run; keys that the plan does not fix come from ``settings``."""
        planned = {key: getattr(self, key) for key in PLANNED}
        return dataclasses.replace(settings, method=self.planned_method, optimizer=self.planned_optimizer, **planned)

    def covers(self, settings: TrainSettings, largest: LargestUpdate) -> bool:
        """Whether the dry run is valid for a run: equal settings for memory, and no larger update."""
        is_larger = any(getattr(largest, key) > getattr(self.largest_update, key) for key in UPDATE)
        return self.planned_settings(settings) == settings and not is_larger


def require_plan_for(recommendation: Recommendation, method: str, model: str) -> None:
    """Raise ConfigError if the recommendation is for another model, or a method that needs another learning rate."""
    is_other_whole = method != recommendation.planned_method and {method, recommendation.planned_method} & set(WHOLE)
    if is_other_whole or model != recommendation.planned_model:
        raise ConfigError(
            "The recommended configuration is for another model or method.",
            expected=f"train.method={method} on {model}",
            got=f"{recommendation.planned_method} on {recommendation.planned_model}",
            do="run recommend_config with the same overrides, or train with 'dvc exp run -S', which plans again",
        )


def resolve(train: Train, lora: Lora, recommendation: Recommendation) -> TrainSettings:
    """Take each setting from the user's keys, else from the recommendation. Raises ConfigError if it divides pairs."""
    values = {**_pins_over(train, recommendation, TrainSettings), "lora": resolve_lora(lora, recommendation.lora)}
    settings = TrainSettings(**values)
    if settings.method in PAIRED and settings.rows_per_update % 2:
        what = f"train.batch_size x gradient_accumulation is odd; with {settings.method}, two rows are a pair."
        do = "run recommend_config with the same overrides, or set train.gradient_accumulation to an even number"
        raise ConfigError(what, got=settings.window, do=do)
    return settings


def resolve_lora(pins: Lora, recommended: LoraSettings) -> LoraSettings:
    """Take each LoRA setting from the user's keys, or from the recommendation if the key is null."""
    values = _pins_over(pins, recommended, LoraSettings)
    return LoraSettings(**{**values, "targets": tuple(values["targets"])})


def _pins_over(pins: object, recommended: object, kind: type[Any]) -> dict[str, Any]:
    """Values for the fields of ``kind``: the user's, or the recommended value where the user's is None."""
    values = ((field.name, getattr(pins, field.name, None)) for field in dataclasses.fields(kind))
    return {name: getattr(recommended, name, None) if pin is None else pin for name, pin in values}


def is_target(layer: str, target: str) -> bool:
    """Whether ``target`` names the layer (self_attn.q_proj inside a block) in full or by its end (q_proj)."""
    return layer == target or layer.endswith(f".{target}")


def updates_per_epoch(rows: int, rows_per_update: int) -> int:
    """Updates in one pass; the last one may be smaller."""
    return -(-rows // rows_per_update)


def usual_warmup(updates: int) -> int:
    """Updates of a recommended warm-up: a twentieth of the run."""
    return min(updates, max(1, round(0.05 * updates))) if updates > 1 else 0


def require_short_warmup(warmup_steps: int | None, updates: int) -> None:
    """Raise ConfigError if the user's warm-up fills the run: the learning rate would hardly reach its peak."""
    if warmup_steps and warmup_steps >= updates:
        what = f"The warm-up does not end before the run: train.warmup_steps is {warmup_steps}."
        do = f"set train.warmup_steps=null (here: {usual_warmup(updates)}), or train longer"
        raise ConfigError(what, expected=f"less than the {counted(updates, 'step')} of the run", do=do)


def total_updates(rows: int, rows_per_update: int, num_epochs: int, max_steps: int | None) -> int:
    """Optimizer updates of a whole run."""
    updates = num_epochs * updates_per_epoch(rows, rows_per_update)
    return updates if max_steps is None else min(updates, max_steps)


@dataclass(frozen=True)
class Rung:
    """One step down the memory ladder."""

    failed: TrainSettings  # settings that did not fit
    at_step: int
    evidence: str


@dataclass(frozen=True)
class TrainJob:
    """flight/job.json: a resolved training run, which the supervisor gives to the training process.

    The fields after ``planned`` change no results, only how a run survives and what it reports.
    """

    base: str
    settings: TrainSettings
    warmup_is_recommended: bool  # whether it is the plan's, and not set by the user
    memory_budget: MemoryBudget
    planned: Recommendation | None  # plan with its dry run; None: use the estimate
    trace: bool = False  # time forward, loss, backward and optimizer separately
    keep_checkpoints: int = 2
    memory_limit_bytes: int | None = None  # of the training process, set by the user
    rungs: tuple[Rung, ...] = ()  # rungs so far
    mlx_limit_bytes: int | None = None  # set if less memory is free than planned; None: by core/memory/estimate.py
    gpu_rungs: tuple[str, ...] = ()  # changes after the GPU watchdog, in words; they do not change memory
    ranks: int = 1  # processes that share each update's rows
    rank_backend: str = "ring"  # mlx's backend for the exchange between ranks: ring, nccl, jaccl


def shared_by(job: TrainJob, ranks_here: int) -> TrainJob:
    """Give one of ``ranks_here`` ranks on this machine its share of the memory budget.

    train.memory_limit_gb is per rank already.
    """
    if ranks_here == 1 or job.memory_limit_bytes is not None:
        return job
    budget = dataclasses.replace(job.memory_budget, total_bytes=job.memory_budget.total_bytes // ranks_here)
    return dataclasses.replace(job, memory_budget=budget)


def identity_of(settings: TrainSettings) -> str:
    """The settings that decide the results, as text: an unfinished run resumes only with the same ones.

    They exclude the first adapter, which RunIdentity.base_model includes, how often a run logs or saves, the limit for
    bad updates (after one, a run may continue with another limit), and ROUNDING_ONLY.
    """
    value = dataclasses.asdict(dataclasses.replace(settings, log_steps=1, save_steps=1, max_loss_jump=None))
    unused = ("from_adapter",) if settings.method in PAIRED else ("from_adapter", "beta")
    identity = {key: setting for key, setting in value.items() if key not in (*ROUNDING_ONLY, *unused)}
    return json.dumps({**identity, "rows_per_update": settings.rows_per_update}, sort_keys=True)


def job_of(model: str, train: Train, lora: Lora, recommendation: Recommendation) -> TrainJob:
    """Make the job of a training run from the user's keys and the recommendation."""
    return TrainJob(
        base=model,
        settings=resolve(train, lora, recommendation),
        warmup_is_recommended=train.warmup_steps is None,
        memory_budget=recommendation.memory_budget,
        planned=recommendation,
        trace=train.trace == "phases",
        keep_checkpoints=train.keep_checkpoints,
        memory_limit_bytes=own_limit_bytes(train.memory_limit_gb),
        ranks=train.ranks,
    )
