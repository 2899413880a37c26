"""The curves of a run as PNG pictures, for files and for the report."""

import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetrain.core.events import Begun
from safetrain.core.records.metrics import StepRecord, TrainingSummary
from safetrain.core.records.schema import PAIRED
from safetrain.core.storage.files import write_folder
from safetrain.watch.run_folder import Run
from safetrain.watch.standings import values_that_differ

CURVES = {  # title, unit and field of StepRecord by the name of the picture
    "accuracy": ("Pairs whose chosen answer is preferred", "share of the validation pairs", "valid_accuracy"),
    "learning_rate": ("Learning rate", "", "learning_rate"),
    "speed": ("Speed", "labels per second", "labels_per_second"),
    "gradient_norm": ("Gradient norm before clipping", "", "grad_norm"),
}
TEXT, DIM, LINE = "#1b1f24", "#5a6370", "#d6dae0"
BLUE, ORANGE, GREEN = "#0b66b0", "#c2570c", "#0a7a55"
STYLE: Any = {
    "font.size": 12, "text.color": TEXT, "axes.labelcolor": DIM, "axes.edgecolor": DIM, "xtick.color": DIM,
    "ytick.color": DIM, "grid.color": LINE, "legend.frameon": False, "axes.grid": True, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titleweight": "bold",
    "agg.path.chunksize": 10_000,
}  # fmt: skip
WIDE = 20  # a larger ratio of losses is drawn on a logarithmic axis
MOST_NAMED, MOST_LETTERS = 3, 60
FEW_POINTS = 40  # a curve with so few points has dots too
GIB = 2**30
SMOOTHING_SHARE = 0.02  # share of all points that is the smoothed curve's time constant
LEAST_SMOOTHED = 100  # points; a smoothed curve of fewer points would lag

Points = tuple[tuple[float, float], ...]  # x ascending


def pictures(run: Run) -> dict[str, bytes]:
    """Draw every picture that the run has records for, keyed by file name."""
    if not run.steps:
        return {}
    unit = "nats per pair" if run.settings is not None and run.settings.method in PAIRED else "nats per label"
    drawn = {
        "loss": _draw("Loss", unit, partial(_add_loss, run)),
        "memory_usage": _draw("Memory", "GiB", partial(_add_memory, run)),
    }
    if run.summary is not None and run.summary.candidates:
        drawn["search"] = _draw("Best validation loss of the candidates", unit, partial(_add_candidates, run.summary))
    for name, (title, unit, field) in CURVES.items():
        if points := points_of(run.steps, field):
            curve = partial(_plot, points=points, colour=BLUE, label="recorded", smooth=field != "learning_rate")
            drawn[name] = _draw(title, unit, curve)
    return drawn


def write_pictures(drawn: Mapping[str, bytes], folder: Path) -> None:
    """Replace the folder of an earlier run's pictures by one with a PNG file for each picture."""

    def write(temporary: Path) -> None:
        for name, content in drawn.items():
            (temporary / f"{name}.png").write_bytes(content)

    write_folder(folder, write)


def points_of(steps: Sequence[StepRecord], field: str) -> Points:
    """Return (step, value) of each record whose value in this field of StepRecord is finite.

    The first speed, which includes compiling, is left out.
    """
    values = [(float(record.step), getattr(record, field)) for record in steps]
    points = tuple((step, float(value)) for step, value in values if value is not None and math.isfinite(value))
    return points[1:] if field == "labels_per_second" else points


def smoothed(points: Points) -> Points:
    """Return the bias-corrected exponential moving average; empty for few points."""
    if len(points) < LEAST_SMOOTHED:
        return ()
    decay = 1 - 1 / (1 + SMOOTHING_SHARE * len(points))
    mean, weight, averages = 0.0, 0.0, list[tuple[float, float]]()
    for step, value in points:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + 1 - decay
        averages.append((step, mean / weight))
    return tuple(averages)


def rungs_of(run: Run) -> tuple[str, ...]:
    """Describe the settings that ran out of memory, as in ``step 7: 2 x 2 rows per update …: out of memory``."""
    if run.summary is not None:
        return run.summary.memory_rungs
    rungs = run.job.rungs if run.job is not None else ()
    return tuple(f"step {rung.at_step}: {rung.failed}: {rung.evidence}" for rung in rungs)


def predicted_peak(run: Run) -> int:
    """Return mlx's predicted peak memory in bytes: from the finished run, or from the plan; 0 if unknown."""
    if run.summary is not None:
        return run.summary.predicted_peak_bytes
    if run.plan is None:
        return 0
    return run.plan.measured.peak_bytes if run.plan.measured is not None else run.plan.predicted_peak_bytes


def _add_loss(run: Run, axes: Any) -> None:
    """Add the training and validation loss, the best validation to the legend, and a line at each continuation."""
    valid = points_of(run.steps, "valid_loss")
    tuned = [(loss, step) for step, loss in valid if step]  # before the first update it is the base's loss
    best = f", best {min(tuned)[0]:.4g} at step {min(tuned)[1]:,.0f}" if tuned else ""
    _plot(axes, points_of(run.steps, "train_loss"), BLUE, "training", smooth=True)
    _plot(axes, valid, ORANGE, f"validation{best}")
    losses = [loss for _, loss in (*valid, *points_of(run.steps, "train_loss")) if loss > 0]
    if losses and max(losses) > WIDE * min(losses):  # else the end is a flat line at the bottom
        axes.set_yscale("log")
    starts = {entry.event.resumed_from_step for entry in run.journal if isinstance(entry.event, Begun)}
    starts |= {run.summary.resumed_from_step} if run.summary is not None else set()
    for number, mark in enumerate(sorted(starts - {0})):
        axes.axvline(mark, color=DIM, linestyle="--", linewidth=1, label=None if number else "continued")


def _add_candidates(summary: TrainingSummary, axes: Any) -> None:
    """Add each candidate's validation losses at its rungs; the few that trained longest are named."""
    trained, names = [each for each in summary.candidates if each.losses], values_that_differ(summary.candidates)
    order = sorted(trained, key=lambda each: (-each.steps, each.losses[-1][1]))
    for number, each in enumerate(order):
        colour = (BLUE, ORANGE, GREEN, *[DIM] * len(order))[number]
        label = names[each.name][:MOST_LETTERS] if number < MOST_NAMED else None
        axes.plot(*zip(*each.losses, strict=True), color=colour, marker="o", markersize=4, label=label)
    losses = [loss for each in order for _, loss in each.losses]
    if losses and 0 < min(losses) < max(losses) / WIDE:
        axes.set_yscale("log")


def _add_memory(run: Run, axes: Any) -> None:
    """Add mlx's peak, the process's memory, and the predicted peak."""
    curves = ("footprint_bytes", BLUE, "process"), ("peak_memory_bytes", ORANGE, "mlx's peak so far")
    for field, colour, label in curves:
        points = points_of(run.steps, field)
        _plot(axes, tuple((step, value / GIB) for step, value in points if value), colour, label)
    if predicted := predicted_peak(run):
        axes.axhline(predicted / GIB, color=GREEN, linestyle=":", linewidth=1.8, label="predicted peak of mlx")


def _plot(axes: Any, points: Points, colour: str, label: str, *, smooth: bool = False) -> None:
    """Add a curve, with dots if it has few points; if ``smooth``, many points are faint behind their moving average."""
    average = smoothed(points) if smooth else ()
    style: Any = {"linewidth": 0.8, "alpha": 0.45} if average else {"linewidth": 1.8}
    style |= {"marker": "o", "markersize": 4} if len(points) <= FEW_POINTS else {}
    if points:
        axes.plot(*zip(*points, strict=True), color=colour, label=label, **style)
    if average:
        _plot(axes, average, colour, f"{label}, smoothed")


def _draw(title: str, unit: str, add: Callable[[Any], None]) -> bytes:
    """Draw a PNG picture of what ``add`` adds to the axes, from zero up; several lines get a legend."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # its import reports that it made a font cache
    os.environ.pop("MPLBACKEND", None)  # a notebook's commands inherit its own: missing here, the import fails
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # characters that its own font lacks
        figure, buffer = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained"), io.BytesIO()
        axes = figure.subplots()
        axes.set(title=title, xlabel="step", ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        add(axes)
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend()
        figure.savefig(buffer, format="png", metadata={"Software": None})  # the same records give the same bytes
    return buffer.getvalue()
