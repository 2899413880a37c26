"""The resolved settings of one training run: the user's keys over the recommendation."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted
from safetrain.core.hosts import Hosts
from safetrain.core.memory.system import MemoryBudget, own_limit_bytes
from safetrain.core.records.schema import OFF, PAIRED, WHOLE, Lora, Train
from safetrain.core.storage import paths

Kind = TypeVar("Kind", "TrainSettings", "LoraSettings")

ALL_LINEAR = "all-linear"
MOST_VALID_TOKENS = 2**17  # most tokens of a validation: they give the loss to a hundredth in less than an hour
PADDING_TOKENS = 128  # unless a dry run measures it
CHUNKS = 512, 128, 32  # labels whose logits are computed together
MANY_LABELS, FEWEST_LABELS = CHUNKS[1:]  # on a CPU, where there is room and otherwise (measured: benchmarks/bench_cpu)
DRY_RUN_TIMED_SECONDS = 1.5  # of updates of mean size
DRY_RUN_SLOW_SECONDS = 10.0  # a slower update is the only one that a dry run makes
# Settings that decide the memory of a run; the first ones change nothing else
MEMORY_ONLY = (
    "batch_size", "gradient_accumulation", "gradient_checkpointing", "dequantize_base", "stream_base", "labels_at_once"
)  # fmt: skip
MEASURED = ("threads", "labels_at_once", "padding_tokens")  # these follow from the machine, and no key sets them
ROUNDING_ONLY = (*MEMORY_ONLY, *MEASURED)  # these change results only by rounding and dropout's random numbers
# These decide the memory of a run
MEMORY = (*MEMORY_ONLY, "max_seq_length", "compute_dtype", "lora", "method", "optimizer")
EXACT = ("base weights", "trained weights", "optimizer's state", "accumulated gradient")  # terms of the memory
UPDATE = ("longest", "tokens", "labels")
SHORTER = {"MLX_MAX_OPS_PER_BUFFER": "4", "MLX_MAX_MB_PER_BUFFER": "20"}  # mlx's defaults: 20 to 50, 40 to 50
RELAXED = {"AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1"}
# From macOS 26 on, the system ends GPU work that keeps the screen waiting (mlx#3267). Shorter pieces help on some
# machines (ltx-2-mlx#75); the driver's variable helps on most, and the screen stutters (ltx-2-mlx#78).
GPU_RUNGS: tuple[tuple[str, dict[str, str]], ...] = (  # in words, and as environment variables of the training process
    ("shorter pieces of GPU work", SHORTER),
    ("a longer timeout of the GPU driver: the screen will stutter", {**SHORTER, **RELAXED}),
)


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
    valid_tokens: int = MOST_VALID_TOKENS  # that a validation reads at most, of a sample of its rows
    labels_at_once: int = FEWEST_LABELS  # whose logits are in memory together, at least
    padding_tokens: int = PADDING_TOKENS  # as costly as another micro-batch: no rectangle of rows has more padding

    @property
    def rows_per_update(self) -> int:
        """Rows whose tokens are averaged into one optimizer update."""
        return self.batch_size * self.gradient_accumulation

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens that are computed together."""
        return self.batch_size * self.max_seq_length

    @property
    def adapter(self) -> str:
        """The kind of what is trained: lora, dora, full or pretrain."""
        return "lora" if self.method in PAIRED else self.method

    @property
    def batch_text(self) -> str:
        """Rows of an update, as ``batch size x accumulation``."""
        return f"{self.batch_size} x {self.gradient_accumulation}"

    @property
    def recipe(self) -> str:
        """Optimizer, schedule and peak rate in words."""
        return f"{self.optimizer}, {self.schedule} schedule, learning rate {self.learning_rate:g}"

    def __str__(self) -> str:
        """Describe the settings that decide the memory of an update."""
        extra = ", blocks recomputed" if self.gradient_checkpointing else ""
        extra += ", base dequantized" if self.dequantize_base else ""
        extra += ", base on disk" if self.stream_base else ""
        extra += f", {self.labels_at_once} logits at once" if self.labels_at_once > FEWEST_LABELS else ""
        return f"{self.batch_text} rows per update, at most {self.max_seq_length} tokens each{extra}"


SMALLEST = TrainSettings(  # of one step on one row, for a caller to change what it needs
    method="lora", optimizer="adam", schedule="constant", batch_size=1, gradient_accumulation=1, max_seq_length=512,
    learning_rate=1e-4, num_epochs=1, max_steps=1, max_examples=None, warmup_steps=0, save_steps=1, eval_steps=1,
    log_steps=1, max_grad_norm=1.0, weight_decay=0.0, early_stopping_patience=None, max_loss_jump=None,
    dequantize_base=False, gradient_checkpointing=False, seed=0, lora=LoraSettings(16, 2.0, 0.0, 1, (ALL_LINEAR,)),
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The size of an update, or of one of its micro-batches, with truncated rows."""

    rows: int
    longest: int  # input tokens of the longest row: of a micro-batch with padding, of an update also in validation
    tokens: int  # input tokens of all rows
    labels: int
    update_tokens: int = 0  # of a micro-batch: of its whole update

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of several micro-batches are added."""
        return self.update_tokens > self.tokens


@dataclass(frozen=True)
class DryRun:
    """Peak memory and time of a training run's largest updates, in bytes and seconds."""

    peak_bytes: int  # of mlx's allocator, over the updates
    footprint_bytes: int  # of the process (core/memory/system.py), loading and validating included
    update_seconds: float  # of an update of mean size
    device: str
    own_update: Shape | None  # in the order of the run's seed; None: updates are too slow to make several
    own_peak_bytes: int = 0  # its peak
    threads: int | None = None  # with which updates are fastest on this CPU
    padding_tokens: int = PADDING_TOKENS  # as costly as another micro-batch


@dataclass(frozen=True)
class Recommendation:
    """recommended_config.json: the settings that a run is recommended, the reasons, and the memory that it needs."""

    settings: TrainSettings  # DVC tracks them by key
    reasons: dict[str, str]  # of each recommended value: train keys without a prefix, adapter keys as lora.rank
    test_tokens: int  # most tokens of test rows that evaluate measures; more rows are sampled
    answer_tokens: int  # the same for a model's answers
    general_tokens: int  # the same for the general text
    base: str
    start: str  # weights and scale of train.from_adapter, as a hash; empty: a new adapter
    backend: str  # cpu, metal, cuda or gpu
    longest_row: int  # tokens, before truncation
    largest_update: Shape  # that the memory is predicted for
    predicted_peak_bytes: int  # of mlx's allocator, by the closed form
    margin_bytes: int  # reserve on top of it
    memory_terms: dict[str, int]  # bytes by name; their sum is the predicted peak
    memory_budget: MemoryBudget
    measured: DryRun | None  # on the largest updates of several row orders; None: no dry run
    verified: bool  # whether the dry run fits the budget
    total_seconds: float | None  # of all steps, validations and the evaluation
    disk_bytes: int  # of checkpoints and adapter

    @property
    def dry_run_peak_bytes(self) -> int | None:
        """Peak of mlx's allocator in a dry run that fitted the budget; None without one."""
        peak = self.measured.peak_bytes if self.measured is not None else None
        return peak if self.verified and peak is not None and peak <= self.memory_budget.total_bytes else None

    def covers(self, settings: TrainSettings, largest: Shape) -> bool:
        """Whether the dry run is valid for a run: equal settings for memory, and no larger update."""
        is_larger = any(getattr(largest, key) > getattr(self.largest_update, key) for key in UPDATE)
        return not is_larger and all(getattr(settings, key) == getattr(self.settings, key) for key in MEMORY)


def require_plan_for(recommendation: Recommendation, method: str, model: str) -> None:
    """Raise ConfigError if the recommendation is for another model, or a method that needs another learning rate."""
    planned = recommendation.settings.method
    if (method != planned and {method, planned} & set(WHOLE)) or model != recommendation.base:
        what = "The recommended configuration is for another model or method."
        do = "run recommend_config with the same values, or all stages: safetrain run KEY=VALUE"
        asked = f"train.method={method} on {model}"
        raise ConfigError(what, expected=asked, got=f"{planned} on {recommendation.base}", do=do)


def resolve(train: Train, lora: Lora, recommended: TrainSettings) -> TrainSettings:
    """The recommended settings, except for the user's. Raises ConfigError if they divide pairs."""
    settings = dataclasses.replace(with_pins(recommended, train), lora=with_pins(recommended.lora, lora))
    if settings.method in PAIRED and settings.rows_per_update % 2:
        what = f"train.batch_size x gradient_accumulation is odd; with {settings.method}, two rows are a pair."
        do = "run recommend_config with the same overrides, or set train.gradient_accumulation to an even number"
        raise ConfigError(what, got=settings.batch_text, do=do)
    return settings


def with_pins(recommended: Kind, pins: Train | Lora) -> Kind:
    """The settings, except for those that the user has set."""
    names = {field.name for field in dataclasses.fields(recommended)}
    pinned: Any = {key: value for key, value in vars(pins).items() if key in names}
    pinned = {key: value for key, value in pinned.items() if value is not None or key in OFF}
    if "targets" in pinned:
        pinned["targets"] = tuple(pinned["targets"])
    return dataclasses.replace(recommended, **pinned)


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
    ranks_here: int = 1  # that share this machine's memory
    rank_backend: str = "ring"  # mlx's backend for the exchange between ranks: ring, nccl, jaccl
    folder: str = str(paths.OUTPUT)  # of checkpoints and results
    stop_at_step: int | None = None  # of a search's candidate, which saves its state there and ends


def gpu_environment(count: int, ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the first ``count`` GPU rungs, without those that ``ours`` sets already."""
    environment = GPU_RUNGS[min(count, len(GPU_RUNGS)) - 1][1] if count else {}
    return {name: value for name, value in environment.items() if name not in ours}


def identity_of(settings: TrainSettings) -> str:
    """The settings that decide the results, as text: an unfinished run resumes only with the same ones.

    They exclude the first adapter, which RunIdentity.base_model includes, how often a run logs or saves, the limit for
    bad updates (after one, a run may continue with another limit), and ROUNDING_ONLY.
    """
    value = dataclasses.asdict(dataclasses.replace(settings, log_steps=1, save_steps=1, max_loss_jump=None))
    unused = ("from_adapter",) if settings.method in PAIRED else ("from_adapter", "beta")
    identity = {key: setting for key, setting in value.items() if key not in (*ROUNDING_ONLY, *unused)}
    return json.dumps({**identity, "rows_per_update": settings.rows_per_update}, sort_keys=True)


def job_of(train: Train, lora: Lora, plan: Recommendation, hosts: Hosts) -> TrainJob:
    """The job of a training run: the user's keys over the recommendation; ranks here share the memory budget."""
    ranks_here = 1 if plan.backend == "cuda" else hosts.ranks_here  # each CUDA rank has its own device
    limit, budget = own_limit_bytes(train.memory_limit_gb), plan.memory_budget
    if limit is None:  # else it is per rank already
        budget = dataclasses.replace(budget, total_bytes=budget.total_bytes // ranks_here)
    return TrainJob(
        base=plan.base,
        settings=resolve(train, lora, plan.settings),
        warmup_is_recommended=train.warmup_steps is None,
        memory_budget=budget,
        planned=plan,
        trace=train.trace == "phases",
        keep_checkpoints=train.keep_checkpoints,
        memory_limit_bytes=limit,
        ranks=train.ranks,
        ranks_here=ranks_here,
        rank_backend=hosts.backend_on(plan.backend),
    )
