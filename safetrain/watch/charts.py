"""The curves and pictures of a run: matplotlib draws each once, for a PNG file, an SVG file and the report."""

import io
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetrain.core.events import Begun
from safetrain.core.records.evaluation import GroupScore
from safetrain.core.records.metrics import StepRecord
from safetrain.core.run_folder import Run
from safetrain.core.storage.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("loss", "learning_rate", "memory_usage", "speed", "gradient_norm", "row_lengths", "evaluation")
CURVES = {  # title and unit by field of StepRecord
    "valid_loss": ("Validation loss", "nats per label"),
    "train_loss": ("Training loss", "nats per label"),
    "learning_rate": ("Learning rate", ""),
    "labels_per_second": ("Speed", "labels per second"),
    "grad_norm": ("Gradient norm before clipping", ""),
}
SMOOTHED = ("train_loss", "labels_per_second", "grad_norm")
TEXT, DIM, LINE = "#1b1f24", "#5a6370", "#d6dae0"
BLUE, ORANGE, GREEN, RED = "#0b66b0", "#c2570c", "#0a7a55", "#b3261e"
SERIES = ((BLUE, "-"), (ORANGE, "--"), (GREEN, ":"))  # distinguishable even without colours
PAGE_COLOURS = {TEXT: "text", DIM: "dim", LINE: "line", BLUE: "c0", ORANGE: "c1", GREEN: "c2", RED: "c3"}
STYLE: Any = {
    "font.size": 12, "text.color": TEXT, "axes.labelcolor": DIM, "axes.edgecolor": DIM, "xtick.color": DIM,
    "ytick.color": DIM, "grid.color": LINE, "patch.linewidth": 1.7, "legend.frameon": False, "axes.grid": True,
    "axes.unicode_minus": False, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "svg.fonttype": "none", "svg.hashsalt": "safetrain",
}  # fmt: skip
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}  # the same records give the same bytes
MOST_POINTS = 1000  # in a curve
FEW_POINTS = 40  # a curve with so few points has dots too
MOST_LETTERS = 24  # of a category's name
IN_SIGHT = 4  # times the highest value: a higher level would flatten the curves
SMOOTHING_SHARE = 0.02  # share of all points that is the smoothed curve's time constant
LEAST_SMOOTHED = 100  # points; a smoothed curve of fewer points would lag

Points = tuple[tuple[float, float], ...]  # x ascending


def pictures(run: Run) -> "dict[str, Figure]":
    """Draw every picture that the run has records for, by the name of its file."""
    figures = dict[str, Any]()
    with _style():
        if run.steps:
            figures = {
                "loss": _loss(run),
                "learning_rate": _curve([run], "learning_rate"),
                "memory_usage": _memory(run),
                "speed": _curve([run], "labels_per_second"),
                "gradient_norm": _curve([run], "grad_norm"),
            }
        figures |= {"row_lengths": _row_lengths(run), "evaluation": _evaluation(run)}
    return {name: figure for name, figure in figures.items() if figure is not None}


def comparison(first: Run, second: Run) -> "list[Figure]":
    """Draw the curves of two runs over each other."""
    with _style():
        figures = [_curve((first, second), field) for field in CURVES]
    return [figure for figure in figures if figure is not None]


def write_pictures(figures: "Mapping[str, Figure]", folder: Path) -> None:
    """Write each as PNG and SVG, and remove those of an earlier run that this one does not have."""
    kinds: tuple[tuple[str, Any], ...] = (("png", {"Software": None}), ("svg", NO_METADATA))
    with _style():
        for name, (kind, metadata) in product(NAMES, kinds):
            path = folder / f"{name}.{kind}"
            if name in figures:
                write_atomic(path, partial(figures[name].savefig, format=kind, metadata=metadata))
            else:
                path.unlink(missing_ok=True)


def inline_svg(figure: "Figure") -> str:
    """The picture as an element of a page, in the page's own colours, light or dark."""
    buffer = io.StringIO()
    with _style():
        figure.savefig(buffer, format="svg", metadata=NO_METADATA, transparent=True)
    text = "<svg" + buffer.getvalue().partition("<svg")[2]
    text = re.sub(r"<style.*?</style>", "", text, count=1, flags=re.DOTALL)  # it would apply to the whole page
    text = re.sub(r' (?:xmlns|xmlns:xlink|width|height|version)="[^"]*"', "", text, count=5)
    text = re.sub(r'<g id="[^"]*"', "<g", text).replace("xlink:href=", "href=")
    for colour, name in PAGE_COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return text


def points_of(steps: Sequence[StepRecord], field: str) -> Points:
    """(step, value) of the records that have a finite value in this field of StepRecord.

    The learning rate of step 0 and the first speed, which includes compiling, are left out.
    """
    values = [(float(record.step), getattr(record, field)) for record in steps]
    points = tuple((step, float(value)) for step, value in values if value is not None and math.isfinite(value))
    if field == "learning_rate":
        return tuple(point for point in points if point[0])
    return points[1:] if field == "labels_per_second" else points


def smoothed(points: Points) -> Points:
    """The exponential moving average, corrected for its start; empty for few points."""
    if len(points) < LEAST_SMOOTHED:
        return ()
    decay = 1 - 1 / (1 + SMOOTHING_SHARE * len(points))
    mean, weight, averages = 0.0, 0.0, list[tuple[float, float]]()
    for step, value in points:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + 1 - decay
        averages.append((step, mean / weight))
    return tuple(averages)


def thinned(points: Points, most: int) -> Points:
    """Thin to roughly ``most`` points: keep the first, lowest, highest and last of each stretch."""
    if len(points) <= most:
        return points
    size = -(-4 * len(points) // most)
    extremes = list[tuple[float, float]]()
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        low, high = min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])
        extremes += sorted({stretch[0], low, high, stretch[-1]})
    return tuple(extremes)


def rungs_of(run: Run) -> tuple[str, ...]:
    """The settings that the run changed for memory, in words: ``step 7: 2 x 2 rows per update …: out of memory``."""
    if run.summary is not None:
        return run.summary.outcome.memory_rungs
    rungs = run.job.rungs if run.job is not None else ()
    return tuple(f"step {rung.at_step}: {rung.failed}: {rung.evidence}" for rung in rungs)


def predicted_peak(run: Run) -> int:
    """Predicted peak memory of mlx: of the finished training, or the plan's dry run, or its estimate; 0: unknown."""
    if run.summary is not None:
        return run.summary.outcome.predicted_peak_bytes
    return (run.plan.measured_peak_bytes or run.plan.predicted_peak_bytes) if run.plan is not None else 0


def length_limit(run: Run) -> int:
    """Tokens that rows are truncated to; 0: unknown."""
    limits = run.settings or run.plan
    return limits.max_seq_length if limits is not None else 0


def _loss(run: Run) -> Any:
    """Training and validation loss; the best validation and each continuation are marked."""
    figure, axes = _figure("Loss", "nats per label")
    valid = points_of(run.steps, "valid_loss")
    _plot(axes, points_of(run.steps, "train_loss"), BLUE, "training", smooth=True)
    _plot(axes, valid, ORANGE, "validation")
    starts = {entry.event.resumed_from_step for entry in run.journal if isinstance(entry.event, Begun)}
    starts |= {run.summary.outcome.resumed_from_step} if run.summary is not None else set()
    for number, mark in enumerate(sorted(starts - {0})):
        axes.axvline(mark, color=DIM, linestyle="--", linewidth=1, label=None if number else "continued")
    if tuned := [point for point in valid if point[0]]:  # before the first update it is the base
        step, loss = min(tuned, key=lambda point: (point[1], point[0]))
        side = "right" if step > run.steps[-1].step / 2 else "left"
        axes.annotate(f"best {loss:.4g} at step {step:,.0f}", (step, loss), xytext=(0, 34), ha=side,
                      textcoords="offset points", arrowprops={"arrowstyle": "->", "color": DIM})  # fmt: skip
    return _finished(figure, axes)


def _curve(runs: Sequence[Run], field: str) -> Any:
    """One field of the records of a run, or of two runs over each other; None where no record has it."""
    curves = [points_of(run.steps, field) for run in runs]
    if not any(curves):
        return None
    figure, axes = _figure(*CURVES[field])
    for run, points, (colour, dashes) in zip(runs, curves, SERIES, strict=False):
        if len(runs) == 1:
            _plot(axes, points, colour, "each record", smooth=field in SMOOTHED)
        else:
            average = smoothed(points) if field in SMOOTHED else ()
            name = _short(run.name).replace("$", r"\$")  # a $ would begin a formula
            _plot(axes, average or points, colour, name, dashes)
    return _finished(figure, axes)


def _finished(figure: Any, axes: Any) -> Any:
    """The figure from zero up, with a legend where more than one line has a name."""
    axes.set_ylim(bottom=0)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend()
    return figure


def _memory(run: Run) -> Any:
    """mlx's peak and the process's memory next to the prediction and, where it is within sight, the limit."""
    process, peak = points_of(run.steps, "footprint_bytes"), points_of(run.steps, "peak_memory_bytes")
    predicted, limit = predicted_peak(run), run.plan.memory_budget_bytes if run.plan is not None else 0
    highest = max([predicted, *(value for _, value in process + peak)])
    size, unit = (2**30, "GiB") if highest >= 2**30 else (2**20, "MiB")
    figure, axes = _figure("Memory", unit)
    for points, colour, label in ((process, BLUE, "process"), (peak, ORANGE, "peak of mlx so far")):
        _plot(axes, tuple((step, value / size) for step, value in points if value), colour, label)
    if predicted:
        axes.axhline(predicted / size, color=GREEN, linestyle=":", linewidth=1.8, label="predicted peak of mlx")
    if 0 < limit < IN_SIGHT * highest:
        axes.axhline(limit / size, color=RED, linewidth=1.4, label="limit")
    return _finished(figure, axes)


def _row_lengths(run: Run) -> Any:
    """Tokens and labels of a row by split, and what is beyond the length that rows are truncated to."""
    data, limit = run.data, length_limit(run)
    splits = [each for each in data.splits if each[1].rows and each[1].trained_tokens] if data is not None else []
    if data is None or not splits:
        return None
    figure, (by_tokens, by_labels) = _axes("Row lengths", "% of the split's rows", columns=2)
    for (name, split), (colour, dashes) in zip(splits, SERIES, strict=False):
        for axes, counts in ((by_tokens, split.histogram.rows), (by_labels, split.histogram.rows_by_labels)):
            used = [number for number, count in enumerate(counts) if count]
            shares = [100 * count / split.rows for count in counts[used[0] : used[-1] + 1]]
            edges = [max(edge, 0.5) for edge in split.histogram.edges[used[0] : used[-1] + 2]]
            axes.stairs(shares, edges, color=colour, linestyle=dashes, label=f"{name}: {split.rows:,} rows")
    if limit:
        by_tokens.axvline(limit, color=RED, linewidth=1.2)
        by_tokens.set_title(f"max_seq_length {limit:,}", loc="right", color=RED, fontsize="small")
    figure.legend(*by_labels.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    for axes, words in ((by_tokens, "tokens of a row"), (by_labels, "labels of a row")):
        axes.set_xlabel(words)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,g}")
    return figure


def _evaluation(run: Run) -> Any:
    """Exact match of base and tuned model, of all questions and of each category, with the tuned model's interval."""
    scores = run.evaluation
    if scores is None or scores.tuned.exact_match is None:
        return None
    low, high = scores.tuned.exact_match_low or 0.0, scores.tuned.exact_match_high or 1.0
    total = scores.base.exact_match or 0.0, scores.tuned.exact_match, low, high, scores.improvement
    groups = (GroupScore("all", scores.answered, *total), *scores.groups)
    base, tuned = ([100 * getattr(each, f"{name}_exact_match") for each in groups] for name in ("base", "tuned"))
    below = [max(0.0, share - 100 * each.tuned_exact_match_low) for share, each in zip(tuned, groups, strict=True)]
    above = [max(0.0, 100 * each.tuned_exact_match_high - share) for share, each in zip(tuned, groups, strict=True)]
    names = [f"{_short(each.name)} ({each.questions:,})\n{one:.1f} → {other:.1f} %"
             for each, one, other in zip(groups, base, tuned, strict=True)]  # fmt: skip
    figure, (axes,) = _axes("Exact match", "", height=max(2.2, 1.2 + 0.55 * len(groups)))
    places = range(len(groups))
    axes.barh([place - 0.2 for place in places], base, 0.36, color=ORANGE, label="base")
    axes.barh([place + 0.2 for place in places], tuned, 0.36, color=BLUE, label="tuned, 95 % interval",
              xerr=[below, above], error_kw={"ecolor": TEXT, "capsize": 3, "linewidth": 1})  # fmt: skip
    axes.set_yticks(places, names, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the questions")
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def _short(name: str) -> str:
    """A short name on one line, without letters that fonts lack."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in name) or "(none)"
    return plain if len(plain) <= MOST_LETTERS else f"{plain[: MOST_LETTERS - 1]}…"


def _plot(axes: Any, points: Points, colour: str, label: str, dashes: str = "-", *, smooth: bool = False) -> None:
    """A curve, with dots where it has few points; many are faint behind their moving average if ``smooth``."""
    average = smoothed(points) if smooth else ()
    style: Any = {"linewidth": 0.8, "alpha": 0.45} if average else {"linewidth": 1.8}
    style |= {"marker": "o", "markersize": 4} if len(points) <= FEW_POINTS else {}
    if points:
        axes.plot(
            *zip(*thinned(points, MOST_POINTS), strict=True), color=colour, label=label, linestyle=dashes, **style
        )
    if average:
        _plot(axes, average, colour, f"{label}, smoothed")


def _figure(title: str, unit: str) -> tuple[Any, Any]:
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = _axes(title, unit)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure, axes


def _axes(title: str, unit: str, columns: int = 1, height: float = 4.5) -> tuple[Any, Any]:
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # its import reports that it made a font cache
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, height), dpi=120, layout="constrained")  # 900 pixels wide
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    axes[0].set_title(title)
    axes[0].set_ylabel(unit)
    return figure, axes


@contextmanager
def _style() -> Iterator[None]:
    """Our style, without matplotlib's warnings of letters that its own font lacks: readers of an SVG have others."""
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        yield
