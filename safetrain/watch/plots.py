"""Draws a finished or running training from its metrics file, and how long its rows are. Looks at files only."""

import logging
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.reports import BINS_PER_DOUBLING, DataReport
from safetrain.core.storage.files import write_atomic

BLUE, ORANGE, GREY, RED = "#2563a8", "#d9730d", "#8a8f98", "#b91c1c"
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
        axes.axhline(budget_bytes / GIB, color=RED, linewidth=1.2, label="budget")
    else:
        axes.set_xlabel(f"optimizer update (the budget, {budget_bytes / GIB:.1f} GiB, is far above)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _save(figure, path)


def draw_row_lengths(data: DataReport, max_seq_length: int, path: Path) -> None:
    """Tokens and labels of a row by split, and what is beyond the length that rows are cut to."""
    figure, (by_tokens, by_labels) = _axes("Row lengths", "% of the split's rows", 2)
    for (name, split), colour in zip(data.splits, (BLUE, ORANGE, GREY), strict=True):
        for axes, counts in ((by_tokens, split.histogram.rows), (by_labels, split.histogram.rows_by_labels)):
            _draw_bins(axes, split.histogram.edges, counts, colour, f"{name}: {split.rows:,} rows")
    counted = data.train.histogram
    rows, labels = (_share_text(data.train.share_beyond(of, max_seq_length)) for of in (counted.rows, counted.labels))
    by_tokens.axvline(max_seq_length, color=RED, linewidth=1.2)
    beyond = f"beyond max_seq_length {max_seq_length:,}: {rows} of train's rows, {labels} of its labels"
    by_labels.set_title(beyond, loc="right", color=RED, fontsize="medium")
    by_labels.legend(frameon=False)
    for axes, words in ((by_tokens, "tokens of a row"), (by_labels, "labels of a row")):
        axes.set_xlabel(words)
        _use_doublings(axes)
    _save(figure, path)


def _draw_bins(axes: Any, edges: Sequence[int], counts: Sequence[int], colour: str, label: str) -> None:
    """Shares, as high as if all bins were equally wide on a logarithmic axis: small whole numbers leave gaps."""
    used = [number for number, count in enumerate(counts) if count]
    kept = slice(used[0], used[-1] + 1)
    lows = [max(edge, 0.5) for edge in edges[kept.start : kept.stop + 1]]
    shares = [100 * count / sum(counts) for count in counts[kept]]
    heights = [
        share / (BINS_PER_DOUBLING * math.log2(high / low))
        for share, (low, high) in zip(shares, pairwise(lows), strict=True)
    ]
    axes.stairs(heights, lows, color=colour, linewidth=1.5, label=label)


def _use_doublings(axes: Any) -> None:
    """A logarithmic axis from one power of two to another."""
    from matplotlib.ticker import LogLocator

    low, high = (math.log2(value) for value in axes.dataLim.intervalx)
    axes.set_xscale("log", base=2)
    axes.set_xlim(2 ** (math.floor(low) - 0.1), 2 ** (math.ceil(high) + 0.1))
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=7))
    axes.xaxis.set_major_formatter("{x:,g}")


def _share_text(share: float) -> str:
    return "none" if share == 0 else f"{100 * share:.2g} %"


def _figure(title: str, unit: str) -> tuple[Any, Any]:
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = _axes(title, unit, 1)
    axes.set_xlabel("optimizer update")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _axes(title: str, unit: str, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it reports that it made its font cache
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    beside = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    beside[0].set_title(title, loc="left", fontweight="bold")
    beside[0].set_ylabel(unit)
    for axes in beside:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, beside


def _columns(pairs: Sequence[tuple[int, float | None]]) -> tuple[list[int], list[float | None]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _save(figure: Any, path: Path) -> None:
    write_atomic(path, lambda temporary: figure.savefig(temporary, format="png", metadata={"Software": None}))
