"""Draws a finished or running training, its rows and its result, each as PNG and SVG. Looks at records only."""

import logging
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetrain.core.formatting import size_text
from safetrain.core.records.evaluation import Evaluation, GroupScore
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.reports import BINS_PER_DOUBLING, DataReport
from safetrain.core.storage.files import write_atomic
from safetrain.watch.curves import Points, per_second, points_of, smoothed, speeds_of, thinned, train_loss
from safetrain.watch.long_runs import MetricsRead

BLUE, ORANGE, GREEN, GREY, RED = "#0b66b0", "#c2570c", "#0a7a55", "#6b7280", "#b3261e"
SPLITS = ((BLUE, "-"), (ORANGE, "--"), (GREEN, ":"))  # told apart without colours too
SIZE_INCHES, DOTS_PER_INCH = (7.5, 4.5), 120  # 900 pixels wide; at 600 its letters are nine pixels high
MOST_POINTS = 2000  # of a curve
MOST_LETTERS = 24  # of a category's name
MIB, GIB = 2**20, 2**30
IN_SIGHT = 4  # times the highest: a budget beyond that would press the curves flat
FIXED_DATE = {"Date": None}  # an SVG without it is the same for the same records


def draw_loss(recorded: MetricsRead, path: Path, restarts: Sequence[float] = ()) -> None:
    """Training and validation loss over updates; the best validation, and where a process continued, are marked."""
    figure, axes = _figure("Loss", "nats per label")
    train, smooth = points_of(recorded.steps, train_loss), smoothed(recorded, train_loss)
    valid = points_of(recorded.steps, lambda record: record.valid_loss)
    _plot_smoothed(axes, train, smooth, "training")
    _plot(axes, valid, ORANGE, "validation", linewidth=1.8, marker="o" if len(valid) <= 40 else None, markersize=4)
    for number, step in enumerate(restarts):
        axes.axvline(step, color=GREY, linestyle="--", linewidth=1, label=None if number else "continued")
    if tuned := [point for point in valid if point[0]]:  # before the first update it is the base
        _mark_best(axes, tuned, recorded.steps[-1].step)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _save(figure, path)


def _mark_best(axes: Any, valid: Sequence[tuple[float, float]], last_step: int) -> None:
    step, loss = min(valid, key=lambda point: (point[1], point[0]))
    axes.annotate(
        f"best {loss:.4f} at step {step:,.0f}",
        (step, loss),
        xytext=(0, 28),
        textcoords="offset points",
        ha="right" if step > last_step / 2 else "left",
        arrowprops={"arrowstyle": "->", "color": GREY},
    )


def draw_learning_rate(records: Sequence[StepRecord], path: Path) -> None:
    """The learning rate of each recorded update, from nothing before the first."""
    figure, axes = _figure("Learning rate", "")
    _plot(axes, points_of(records, lambda record: record.learning_rate), BLUE, "learning rate", linewidth=1.8)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    axes.set_ylim(bottom=0)
    _save(figure, path)


def draw_memory(records: Sequence[StepRecord], predicted_bytes: int, budget_bytes: int, path: Path) -> None:
    """mlx's peak and the process's footprint beside the prediction; the budget where it is within sight."""
    highest = max([predicted_bytes, *(max(record.footprint_bytes, record.peak_memory_bytes) for record in records)])
    size, unit = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    figure, axes = _figure("Memory", unit)
    footprint = points_of(records, lambda record: record.footprint_bytes / size)
    peak = points_of(records, lambda record: record.peak_memory_bytes / size or None)
    _plot(axes, footprint, BLUE, "process", linewidth=1.8)
    _plot(axes, peak, ORANGE, "peak of mlx so far", linewidth=1.8)
    axes.axhline(predicted_bytes / size, color=GREEN, linestyle="--", linewidth=1.4, label="predicted peak of mlx")
    if budget_bytes < IN_SIGHT * highest:
        axes.axhline(budget_bytes / size, color=RED, linewidth=1.4, label="budget")
    else:
        axes.set_xlabel(f"optimizer update (the budget, {size_text(budget_bytes)}, is far above)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _save(figure, path)


def draw_speed(recorded: MetricsRead, path: Path) -> None:
    """Labels per second between records."""
    figure, axes = _figure("Speed", "labels per second")
    _plot_smoothed(axes, speeds_of(recorded.steps), smoothed(recorded, per_second), "labels per second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _save(figure, path)


def draw_evaluation(found: Evaluation, path: Path) -> None:
    """Exact answers of base and tuned, of all questions and of each category, with the tuned model's interval."""
    exact, low, high = found.tuned.exact_match, found.tuned.exact_match_low, found.tuned.exact_match_high
    if exact is None or low is None or high is None:
        return
    whole = GroupScore("all", found.answered, found.base.exact_match or 0.0, exact, low, high, found.improvement)
    groups = (whole, *found.groups)
    figure, (axes,) = _axes("Exact answers", "", 1, bars=len(groups))
    places = [float(number) for number in range(len(groups))]
    above, below = [place - 0.2 for place in places], [place + 0.2 for place in places]
    axes.barh(above, [100 * group.base_exact_match for group in groups], 0.36, color=ORANGE, label="base")
    tuned = [100 * group.tuned_exact_match for group in groups]
    lows = [100 * min(group.tuned_exact_match_low, group.tuned_exact_match) for group in groups]
    highs = [100 * max(group.tuned_exact_match_high, group.tuned_exact_match) for group in groups]
    reach = [[t - low for t, low in zip(tuned, lows, strict=True)], [h - t for t, h in zip(tuned, highs, strict=True)]]
    whiskers = {"ecolor": "black", "capsize": 3, "linewidth": 1}
    axes.barh(below, tuned, 0.36, color=BLUE, label="tuned, 95 % interval", xerr=reach, error_kw=whiskers)
    axes.set_yticks(places, [_bar_name(group) for group in groups], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the questions")
    figure.legend(frameon=False, loc="outside upper right", ncols=2)
    _save(figure, path)


def draw_row_lengths(data: DataReport, max_seq_length: int, path: Path) -> None:
    """Tokens and labels of a row by split, and what is beyond the length that rows are cut to."""
    figure, (by_tokens, by_labels) = _axes("Row lengths", "% of the split's rows", 2)
    for (name, split), (colour, dashes) in zip(data.splits, SPLITS, strict=True):
        for axes, counts in ((by_tokens, split.histogram.rows), (by_labels, split.histogram.rows_by_labels)):
            label = f"{name}: {split.rows:,} rows"
            _draw_bins(axes, split.histogram.edges, counts, color=colour, linestyle=dashes, label=label)
    counted = data.train.histogram
    rows, labels = (_share_text(data.train.share_beyond(of, max_seq_length)) for of in (counted.rows, counted.labels))
    by_tokens.axvline(max_seq_length, color=RED, linewidth=1.2)
    beyond = f"beyond max_seq_length {max_seq_length:,}:\n{rows} of train's rows, {labels} of its labels"
    by_labels.set_title(beyond, loc="right", color=RED, fontsize="medium")
    figure.legend(*by_labels.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=3)
    for axes, words in ((by_tokens, "tokens of a row"), (by_labels, "labels of a row")):
        axes.set_xlabel(words)
        _use_doublings(axes)
    _save(figure, path)


def _draw_bins(axes: Any, edges: Sequence[int], counts: Sequence[int], **drawn: str) -> None:
    """Shares, as high as if all bins were equally wide on a logarithmic axis: small whole numbers leave gaps."""
    used = [number for number, count in enumerate(counts) if count]
    kept = slice(used[0], used[-1] + 1)
    lows = [max(edge, 0.5) for edge in edges[kept.start : kept.stop + 1]]
    shares = [100 * count / sum(counts) for count in counts[kept]]
    heights = [
        share / (BINS_PER_DOUBLING * math.log2(high / low))
        for share, (low, high) in zip(shares, pairwise(lows), strict=True)
    ]
    axes.stairs(heights, lows, linewidth=1.7, **drawn)


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


def _short(name: str) -> str:
    """What a font can draw of a name, on a line of its own."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in name) or "(none)"
    return plain if len(plain) <= MOST_LETTERS else f"{plain[: MOST_LETTERS - 1]}…"


def _bar_name(group: GroupScore) -> str:
    exact = f"{100 * group.base_exact_match:.1f} → {100 * group.tuned_exact_match:.1f} %"
    return f"{_short(group.name)} ({group.questions:,})\n{exact}"


def _plot(axes: Any, points: Points, colour: str, label: str, **drawn: Any) -> None:
    kept = thinned(points, MOST_POINTS)
    axes.plot([x for x, _ in kept], [y for _, y in kept], color=colour, label=label, **drawn)


def _plot_smoothed(axes: Any, points: Points, smooth: Points, label: str) -> None:
    """The points faintly, and smoothed over them; few points alone."""
    faint: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.45} if smooth else {"linewidth": 1.8}
    _plot(axes, points, BLUE, label, marker="o" if len(points) < 3 else None, **faint)
    if smooth:
        _plot(axes, smooth, BLUE, f"{label}, smoothed", linewidth=2)


def _figure(title: str, unit: str) -> tuple[Any, Any]:
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = _axes(title, unit, 1)
    axes.set_xlabel("optimizer update")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure, axes


def _axes(title: str, unit: str, columns: int, bars: int = 0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it reports that it made its font cache
    size = SIZE_INCHES[0], max(SIZE_INCHES[1] if not bars else 2.2, 1.2 + 0.5 * bars)
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
    beside = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    beside[0].set_title(title, loc="left", fontweight="bold")
    beside[0].set_ylabel(unit)
    for axes in beside:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, beside


def _save(figure: Any, path: Path) -> None:
    """As ``path``, which is a PNG, and as an SVG beside it."""
    from matplotlib import rc_context

    write_atomic(path, lambda temporary: figure.savefig(temporary, format="png", metadata={"Software": None}))
    figure.set_layout_engine("none")  # it stays as it is laid out
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        svg = path.with_suffix(".svg")
        write_atomic(svg, lambda temporary: figure.savefig(temporary, format="svg", metadata=FIXED_DATE))
