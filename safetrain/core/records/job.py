"""The job file: the settings that the supervising process hands to the training process."""

import dataclasses
import json
from dataclasses import dataclass

from safetrain.core.memory.budget import MemoryBudget, own_limit_bytes, within_data_limit
from safetrain.core.memory.run import PlannedMemory, planned_memory
from safetrain.core.records.schema import Lora, Train
from safetrain.core.records.settings import Recommendation, TrainSettings, resolve

NEARLY = 0.95  # of what train.memory_limit_gb leaves: the plan was made under it
MEMORY_ONLY = ("batch_size", "gradient_accumulation", "gradient_checkpointing", "dequantize_base")


@dataclass(frozen=True)
class MemoryShape:
    """The settings that decide how much memory an update takes; they change only rounding, and what dropout draws."""

    batch_size: int
    gradient_accumulation: int
    gradient_checkpointing: bool
    dequantize_base: bool
    max_seq_length: int

    @property
    def window(self) -> str:
        """An update's rows, in words."""
        return f"{self.batch_size} x {self.gradient_accumulation}"

    def __str__(self) -> str:
        extra = [", blocks recomputed"] if self.gradient_checkpointing else []
        extra += [", base dequantized"] if self.dequantize_base else []
        return f"{self.window} rows per update, at most {self.max_seq_length} tokens each{''.join(extra)}"


@dataclass(frozen=True)
class Rung:
    """One step down the memory ladder."""

    failed: MemoryShape  # what did not fit
    at_step: int
    evidence: str


@dataclass(frozen=True)
class Survival:
    """Settings that change nothing of what a run computes, only how it survives and what it reports."""

    trace: bool
    keep_checkpoints: int
    memory_limit_bytes: int | None  # of the training process; None: no limit of our own


@dataclass(frozen=True)
class TrainJob:
    """A training, resolved."""

    base: str
    settings: TrainSettings
    warmup_is_recommended: bool  # for the planned number of updates, not set by a person
    memory_budget: MemoryBudget
    planned: PlannedMemory | None  # by a dry run; None: to be estimated
    survival: Survival
    rungs: tuple[Rung, ...]  # taken so far
    mlx_limit_bytes: int | None = None  # set where less memory is free than planned; None: by core/memory/run.py
    gpu_rungs: tuple[str, ...] = ()  # steps taken after the GPU watchdog, in words; they do not change memory
    ranks: int = 1  # processes that share each update's rows
    rank_backend: str = "ring"  # of mlx, by which they exchange numbers: ring, nccl, jaccl, or any that is set up


def shared_by(job: TrainJob, ranks_here: int) -> TrainJob:
    """The job of one of ``ranks_here`` ranks on this machine: each may take its share of the machine's budget.

    A budget that train.memory_limit_gb sets is each rank's already.
    """
    budget, own = job.memory_budget, job.survival.memory_limit_bytes
    is_own = own is not None and budget.total_bytes >= NEARLY * within_data_limit(own, own)
    if ranks_here == 1 or is_own:
        return job
    return dataclasses.replace(
        job, memory_budget=dataclasses.replace(budget, total_bytes=budget.total_bytes // ranks_here)
    )


def memory_shape(settings: TrainSettings) -> MemoryShape:
    """The part of the settings that the ladder may change."""
    return MemoryShape(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(MemoryShape)})


def identity_of(settings: TrainSettings) -> str:
    """The settings that decide what is computed, as text: an unfinished run is continued only by the same ones.

    Not among them: how often it is logged or saved; what a bad update is (a run that one has stopped can go on with
    another answer); what only takes more or less memory, because it changes only rounding and what
    dropout draws.
    """
    neutral = dataclasses.replace(settings, log_steps=1, save_steps=1, max_loss_jump=None)
    value = dataclasses.asdict(neutral)
    identity = {key: setting for key, setting in value.items() if key not in MEMORY_ONLY}
    identity["rows_per_update"] = settings.rows_per_update
    return json.dumps(identity, sort_keys=True)


def job_of(model: str, train: Train, lora: Lora, recommendation: Recommendation) -> TrainJob:
    """The training that a person's pins and the recommendation make together."""
    settings = resolve(train, lora, recommendation)
    survival = Survival(
        trace=train.trace == "phases",
        keep_checkpoints=train.keep_checkpoints,
        memory_limit_bytes=own_limit_bytes(train.memory_limit_gb),
    )
    return TrainJob(
        base=model,
        settings=settings,
        warmup_is_recommended=train.warmup_steps is None,
        memory_budget=recommendation.memory_budget,
        planned=planned_memory(settings, recommendation),
        survival=survival,
        rungs=(),
        ranks=train.ranks,
        rank_backend="ring" if train.hostfile is None else "any",
    )
