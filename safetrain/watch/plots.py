"""Draws a finished or running training from its metrics file. Looks at files only."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetrain.core.records.metrics import StepRecord
from safetrain.core.storage.files import write_atomic

BLUE, ORANGE, GREY = "#2563a8", "#d9730d", "#8a8f98"
SIZE_INCHES, DOTS_PER_INCH = (8, 4.5), 120
GIB = 2**30


def draw_loss(records: Sequence[StepRecord], path: Path) -> None:
    """Training and validation loss over updates, the best validation marked."""
    figure, axes = _figure("Loss", "nats per trained token")
    train = [(r.step, r.train_loss) for r in records if r.train_loss is not None]
    valid = [(r.step, r.valid_loss) for r in records if r.valid_loss is not None]
    axes.plot(*_columns(train), color=BLUE, linewidth=1.5, marker="o" if len(train) < 3 else None, label="training")
    axes.plot(*_columns(valid), color=ORANGE, linewidth=1.5, marker="o", markersize=4, label="validation")
    if valid:
        best_step, best_loss = min(valid, key=lambda pair: pair[1])
        axes.annotate(
            f"best {best_loss:.4f} at step {best_step}",
            (best_step, best_loss),
            xytext=(0, 28),
            textcoords="offset points",
            ha="right" if best_step > records[-1].step / 2 else "left",
            arrowprops={"arrowstyle": "->", "color": GREY},
        )
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _save(figure, path)


def draw_learning_rate(records: Sequence[StepRecord], path: Path) -> None:
    """The learning rate of each recorded update, from nothing before the first."""
    figure, axes = _figure("Learning rate", "")
    axes.plot(*_columns([(r.step, r.learning_rate) for r in records]), color=BLUE, linewidth=1.5)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    axes.set_ylim(bottom=0)
    _save(figure, path)


def draw_memory(records: Sequence[StepRecord], predicted_bytes: int, budget_bytes: int, path: Path) -> None:
    """mlx's peak and the process's footprint beside the prediction; the budget where it is within sight."""
    figure, axes = _figure("Memory", "GiB")
    peak = [(r.step, r.peak_memory_bytes / GIB) for r in records]
    footprint = [(r.step, r.footprint_bytes / GIB) for r in records]
    axes.plot(*_columns(footprint), color=BLUE, linewidth=1.5, label="process footprint")
    axes.plot(*_columns(peak), color=ORANGE, linewidth=1.5, label="mlx peak so far")
    axes.axhline(predicted_bytes / GIB, color=GREY, linestyle="--", linewidth=1.2, label="predicted peak")
    highest = max([predicted_bytes / GIB, *(value for _, value in peak + footprint)])
    if budget_bytes / GIB < 4 * highest:
        axes.axhline(budget_bytes / GIB, color="#b91c1c", linewidth=1.2, label="budget")
    else:
        axes.set_xlabel(f"optimizer update (the budget, {budget_bytes / GIB:.1f} GiB, is far above)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _save(figure, path)


def _figure(title: str, unit: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it reports that it made its font cache
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_ylabel(unit)
    axes.set_xlabel("optimizer update")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _columns(pairs: Sequence[tuple[int, float | None]]) -> tuple[list[int], list[float | None]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _save(figure: Any, path: Path) -> None:
    write_atomic(path, lambda temporary: figure.savefig(temporary, format="png", metadata={"Software": None}))
