"""What to try after running out of memory: the same rows per update with less memory, one rung at a time."""

import dataclasses
from pathlib import Path

from safetrain.core.records.job import MemoryShape, Rung, memory_shape
from safetrain.core.records.settings import TrainSettings
from safetrain.core.storage.records import read_record
from safetrain.core.storage.run_files import LADDER

MOST_RUNGS = 12
SHORTEST_ROWS = 64  # tokens; shorter ones teach little


def next_settings(
    settings: TrainSettings, *, quantized: bool, may_shorten: bool, loading: bool = False
) -> TrainSettings | None:
    """The settings of the next rung, None at the bottom.

    In this order: half the micro-batch and twice the accumulation (an odd one is divided by its smallest factor);
    blocks recomputed in the backward pass; a base left quantized; and, only with consent, rows half as long. The
    loss is always computed in chunks. All but the last give the same update but for rounding.
    """
    if loading:  # before the first update, only the base itself can take less
        return dataclasses.replace(settings, dequantize_base=False) if quantized and settings.dequantize_base else None
    if settings.batch_size > 1:
        factor = next(f for f in range(2, settings.batch_size + 1) if settings.batch_size % f == 0)
        return dataclasses.replace(
            settings,
            batch_size=settings.batch_size // factor,
            gradient_accumulation=settings.gradient_accumulation * factor,
        )
    if not settings.gradient_checkpointing:
        return dataclasses.replace(settings, gradient_checkpointing=True)
    if quantized and settings.dequantize_base:
        return dataclasses.replace(settings, dequantize_base=False)
    if may_shorten and settings.max_seq_length // 2 >= SHORTEST_ROWS:
        return dataclasses.replace(settings, max_seq_length=settings.max_seq_length // 2)
    return None


def describe_change(before: MemoryShape, after: MemoryShape) -> str:
    """What takes less memory now, in words."""
    found = []
    if after.batch_size != before.batch_size:
        found.append(f"{after.window} rows per update instead of {before.window}")
    if after.gradient_checkpointing and not before.gradient_checkpointing:
        found.append("blocks recomputed in the backward pass")
    if before.dequantize_base and not after.dequantize_base:
        found.append("the base left quantized")
    if after.max_seq_length < before.max_seq_length:
        found.append(f"rows cut to {after.max_seq_length} tokens instead of {before.max_seq_length}")
    return ", ".join(found) or str(after)


@dataclasses.dataclass(frozen=True)
class Ladder:
    """How far down an unfinished run is: what was asked for, what is tried now, and the rungs between that failed."""

    asked: MemoryShape
    limit_bytes: int  # of the memory that it did not fit into
    now: MemoryShape
    rungs: tuple[Rung, ...]
    gpu_rungs: tuple[str, ...] = ()  # after the GPU watchdog


def read_ladder(output: Path, asked: TrainSettings, limit_bytes: int, *, may_shorten: bool) -> Ladder | None:
    """The ladder of a run of these settings; None for other settings, for more memory, or without consent."""
    try:
        ladder = read_record(output / LADDER, Ladder)
    except (FileNotFoundError, ValueError, TypeError):
        return None
    same = ladder.asked == memory_shape(asked)
    allowed = may_shorten or ladder.now.max_seq_length == asked.max_seq_length
    return ladder if same and allowed and limit_bytes <= ladder.limit_bytes else None


def on_rung(settings: TrainSettings, shape: MemoryShape) -> TrainSettings:
    """The settings with another memory shape."""
    return dataclasses.replace(settings, **dataclasses.asdict(shape))
