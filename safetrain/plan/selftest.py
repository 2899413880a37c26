"""`safetrain selftest`: check one pass of a model, or report this machine on one screen, without names or paths."""

import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetrain.core.errors import MachineError, ModelError
from safetrain.core.formatting import size_text
from safetrain.plan.check_report import FAIL, MARKS, PASS
from safetrain.plan.child import ChildFailed, room_bytes, run_json, version_of
from safetrain.plan.machine import Probe, read_machine_now
from safetrain.plan.preflight import engine_checks, environment_checks, packages_check

SECONDS = 600.0
FLOAT32_TOLERANCE, TF32_TOLERANCE, SIXTEEN_BIT_TOLERANCE = 1e-3, 1e-2, 0.1
ROWS, TOKENS = "3", "64"  # of the pass
COLUMNS = 80
FENCE = "```"  # keeps the columns aligned in an issue


def selftest(module: str, model: Path) -> list[tuple[str, str, bool]]:
    """Run one pass of ``model`` in a child, ``python -m module``, and return the results of ``judge``.

    Raises ModelError if the model cannot be trained, and MachineError if the child fails otherwise.
    """
    try:
        return judge(_one_pass(module, model))
    except ChildFailed as error:
        how, _, refusal = str(error).partition(": ")
        if how == f"exit code {ModelError.exit_code}":
            raise ModelError(refusal, where=str(model), do="use another model") from None
        do = "'safetrain preflight' checks the machine; if it ran out of memory, use a smaller model"
        raise MachineError(f"The self-test did not finish: {error}", where=str(model), do=do) from None


def _one_pass(module: str, model: Path) -> dict[str, Any]:
    return run_json(module, ["--pass", str(model), ROWS, TOKENS], SECONDS, room_bytes())


def judge(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Return name, text and verdict of each figure; one without a reference passes. A GPU may use TF32 (19 bits)."""
    limit = FLOAT32_TOLERANCE if found["on_cpu"] else TF32_TOLERANCE
    limit = limit if found["in_float32"] else SIXTEEN_BIT_TOLERANCE
    reference = f"(limit {limit:.0e}) from mlx-lm's layers and plain cross-entropy"
    layout = "packed, without padding" if found["packs_rows"] else "as padded rectangles"
    differences = [(name, found[f"{name}_difference"]) for name in ("loss", "gradient")]
    speed = f"{found['step_seconds']:.3f} s forward and backward, {found['tokens_per_second']:,.0f} tokens/s"
    return [
        *((name, f"differs by {size:.1e} {reference}", size <= limit) for name, size in differences),
        ("rows", f"computed {layout}; adapters on {found['layers_with_adapter']} layers", True),
        ("time", speed, True),
        ("memory", f"{size_text(found['peak_memory_bytes'])} at the peak", True),
    ]


def report_lines(module: str, model: Path) -> Iterator[str]:
    """Yield the report line by line: preflight's checks of the machine, and the results of ``judge``.

    If a child fails, its line says how, and the kind of error, but not the message, which may contain a path.
    """
    yield FENCE
    yield f"safetrain {version_of('safetrain')} selftest --report, {time.strftime('%Y-%m-%d')}"
    figures: dict[str, Callable[[], list[tuple[str, str, bool]]]] = {
        "MACHINE": lambda: _machine(Probe(**run_json(module, [], SECONDS, room_bytes()))),
        "TRAINING": lambda: judge(_one_pass(module, model)),
    }
    for label, measure in figures.items():
        try:
            results = measure()
        except ChildFailed as error:
            results = [(label, ": ".join(str(error).split(": ")[:2]), False)]
        for result in results:
            yield from textwrap.wrap(result_line(*result), COLUMNS, subsequent_indent=" " * 18)
    yield FENCE


def _machine(probe: Probe) -> list[tuple[str, str, bool]]:
    checks = [packages_check(), *engine_checks(read_machine_now(probe), probe), *environment_checks(0)]
    return [(check.id, check.found, check.status == PASS) for check in checks]


def result_line(name: str, text: str, passed: bool) -> str:
    """A result as a line for the terminal, like a check of preflight."""
    return f"{MARKS[PASS if passed else FAIL]} {name:<10} {text}"
