"""What to try after the GPU watchdog: shorter pieces of work, then a driver that waits longer. Never from the start.

From macOS 26 on, the system ends GPU work that keeps the screen waiting (mlx#3267). Shorter pieces help on some
machines and not on others (ltx-2-mlx#75); the driver's variable helps on most, and the screen suffers (ltx-2-mlx#78).
"""

from collections.abc import Mapping
from dataclasses import dataclass

GPU_CAUSES = ("gpu_watchdog", "gpu_timeout")
SHORTER = {"MLX_MAX_OPS_PER_BUFFER": "4", "MLX_MAX_MB_PER_BUFFER": "20"}  # mlx's own, by machine: 20 to 50, 40 to 50
RELAXED = {"AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1"}


@dataclass(frozen=True)
class GpuRung:
    """One step: what the training process is started with."""

    environment: Mapping[str, str]
    words: str


RUNGS = (
    GpuRung(SHORTER, "shorter pieces of GPU work"),
    GpuRung({**SHORTER, **RELAXED}, "a GPU driver that waits longer: the screen will stutter meanwhile"),
)


def next_gpu_rung(taken: int) -> GpuRung | None:
    """The rung after ``taken`` ones; None at the end."""
    return RUNGS[taken] if taken < len(RUNGS) else None


def gpu_environment(taken: int, ours: Mapping[str, str]) -> dict[str, str]:
    """Variables for the training process after ``taken`` rungs; those that are set already (``ours``) stay."""
    wanted = RUNGS[min(taken, len(RUNGS)) - 1].environment if taken else {}
    return {name: value for name, value in wanted.items() if name not in ours}


def in_words(rung: GpuRung) -> str:
    """For the terminal and the summary."""
    return f"{rung.words} ({' '.join(f'{name}={value}' for name, value in rung.environment.items())})"
