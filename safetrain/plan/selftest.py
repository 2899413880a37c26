"""Judges what engine/selftest.py measured in a child."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.errors import MachineError
from safetrain.core.formatting import counted, size_text
from safetrain.plan.child import ChildFailed, room_cap, run_json

TIMEOUT_SECONDS = 1800.0
FLOAT32_TOLERANCE, TF32_TOLERANCE, SIXTEEN_BIT_TOLERANCE = 1e-3, 1e-2, 0.1
SLOPE_TOLERANCE, ROUGH_SLOPE_TOLERANCE = 0.05, 0.5  # a finite step is no exact reference


@dataclass(frozen=True)
class Comparison:
    """One comparison: its name, what was found, whether it passed."""

    name: str
    found: str
    passed: bool


def selftest(
    module: str, model: Path, rows: int, tokens: int, limit_bytes: int | None = None
) -> tuple[Comparison, ...]:
    """Run one pass of ``model`` in a child, ``python -m module``, and judge it; raises MachineError when it dies.

    The child takes no more memory than a training may, and no more than ``limit_bytes``.
    """
    limit = [] if limit_bytes is None else [str(limit_bytes)]
    try:
        found = run_json(module, [str(model), str(rows), str(tokens), *limit], TIMEOUT_SECONDS, room_cap(limit_bytes))
    except ChildFailed as error:
        raise MachineError(
            f"The self-test did not come to its end: {error}",
            where=f"{model}, {counted(rows, 'row')} of up to {counted(tokens, 'token')}",
            do="fewer or shorter rows (--rows, --tokens), if it ran out of memory; "
            "'python -m stages.preflight' checks the machine",
        ) from None
    return judge(found)


def largest_difference(*, in_float32: bool, on_cpu: bool) -> float:
    """From the reference, relative: a GPU may multiply float32 numbers in 19 bits (TF32)."""
    if in_float32:
        return FLOAT32_TOLERANCE if on_cpu else TF32_TOLERANCE
    return SIXTEEN_BIT_TOLERANCE


def judge(found: dict[str, Any]) -> tuple[Comparison, ...]:
    """The comparisons, and the figures that have no reference."""
    limit = largest_difference(in_float32=found["in_float32"], on_cpu=found["on_cpu"])
    smooth = found["in_float32"] and not found["has_experts"] and not found["rounds"]
    slope_limit = SLOPE_TOLERANCE if smooth else ROUGH_SLOPE_TOLERANCE
    compared = [
        ("loss", "loss_difference", limit, "mlx-lm's layers and plain cross-entropy"),
        ("gradient", "gradient_difference", limit, "the same"),
        ("slope", "slope_difference", slope_limit, "the loss a small step ahead and behind"),
    ]
    verdicts = [
        Comparison(name, f"{found[key]:.1e} from {reference} (at most {most:.0e})", found[key] <= most)
        for name, key, most, reference in compared
    ]
    layout = "as one list, without padding" if found["packs_rows"] else "as padded rectangles"
    figures = [
        ("rows", f"computed {layout}; adapters on {found['layers_with_adapter']} layers"),
        ("time", f"{found['step_seconds']:.3f} s forward and backward, {found['tokens_per_second']:,.0f} tokens/s"),
        ("memory", f"{size_text(found['peak_memory_bytes'])} at the peak"),
    ]
    return (*verdicts, *(Comparison(name, text, passed=True) for name, text in figures))
