"""Curves, memory and length of a training, ready to be shown. Pure."""

from safetrain.core.formatting import duration_text, size_text
from safetrain.watch.curves import per_second, points_of, smoothed, speeds_of, train_loss
from safetrain.watch.plots import GIB, IN_SIGHT, MIB
from safetrain.watch.report_page.charts import Line, MarkedValue, SvgChart, curve_chart
from safetrain.watch.report_page.endings_shown import continuations
from safetrain.watch.report_page.run_records import WholeRun
from safetrain.watch.report_page.shown import AbsentPart, MemoryBar, MemoryShown, Table

TRAIN = "dvc repro"


def loss_shown(records: WholeRun) -> SvgChart | AbsentPart:
    """Training and validation loss."""
    if not records.steps:
        return AbsentPart("No training has recorded anything here yet.", TRAIN)
    train, smooth = points_of(records.steps, train_loss), smoothed(records.recorded, train_loss)
    valid = points_of(records.steps, lambda record: record.valid_loss)
    lines = [Line("training, smoothed", smooth, 0)] if smooth else []
    lines = [Line("training", train, 0, faint=bool(smooth)), *lines, Line("validation", valid, 1, dotted=True)]
    marks = list(continuations(records))
    note = ""
    tuned = [point for point in valid if point[0]]  # before the first update it is the base
    if tuned:
        step, loss = min(tuned, key=lambda point: (point[1], point[0]))
        marks.append(MarkedValue(f"best {loss:.4g}", step, 2))
    if len(marks) > bool(tuned):
        note = "Upright dashed lines: a process continued there, after an interruption or with less memory."
    return curve_chart("Loss", "nats per label", lines, marks=marks, note=note)


def curves_shown(records: WholeRun) -> tuple[SvgChart, ...]:
    """Learning rate, gradient norm, memory and speed."""
    steps = records.steps
    if not steps:
        return ()
    rate = points_of(steps, lambda record: record.learning_rate)
    found = [curve_chart("Learning rate", "", [Line("learning rate", rate, 0)]), _memory_curves(records)]
    speed = speeds_of(steps)
    if speed:
        smooth = smoothed(records.recorded, per_second)
        lines = [Line("labels per second", speed, 0, faint=bool(smooth))]
        lines += [Line("smoothed", smooth, 0)] if smooth else []
        found.append(curve_chart("Speed", "labels per second", lines))
    norm = points_of(steps, lambda record: record.grad_norm)
    if norm:
        note = "Before clipping."
        levels = list[MarkedValue]()
        if records.summary is not None and records.summary.settings.max_grad_norm < IN_SIGHT * max(v for _, v in norm):
            levels.append(MarkedValue("max_grad_norm", records.summary.settings.max_grad_norm, 3))
        found.append(curve_chart("Gradient norm", "", [Line("gradient norm", norm, 0)], levels=levels, note=note))
    return tuple(found)


def _memory_curves(records: WholeRun) -> SvgChart:
    footprint = points_of(records.steps, lambda record: record.footprint_bytes)
    peak = points_of(records.steps, lambda record: record.peak_memory_bytes or None)
    highest = max(value for _, value in footprint + peak) if footprint or peak else 0.0
    levels, note = list[tuple[str, float, int]](), ""
    if records.plan is not None:
        levels.append(("predicted peak of mlx", predicted_peak(records), 2))
        budget = records.plan.memory_budget_bytes
        if budget < IN_SIGHT * highest:
            levels.append(("budget", budget, 3))
        else:
            note = f"The budget, {size_text(budget)}, is far above."
    size, unit = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    lines = [Line("process", tuple((step, value / size) for step, value in footprint), 0),
             Line("peak of mlx", tuple((step, value / size) for step, value in peak), 1)]  # fmt: skip
    return curve_chart(
        "Memory",
        unit,
        lines,
        levels=[MarkedValue(name, value / size, style) for name, value, style in levels],
        note=note,
    )


def predicted_peak(records: WholeRun) -> int:
    """Of mlx's peak: that of the training itself; where it has not finished, what the plan measured, or estimated."""
    if records.summary is not None:
        return records.summary.outcome.predicted_peak_bytes
    plan = records.plan
    if plan is None:
        return 0
    return plan.predicted_peak_bytes if plan.measured_peak_bytes is None else plan.measured_peak_bytes


def memory_shown(records: WholeRun) -> MemoryShown | AbsentPart:
    """Measured beside predicted and budget."""
    plan, summary = records.plan, records.summary
    if plan is None:
        return AbsentPart("Nothing has been planned here yet.", "dvc repro recommend_config")
    sizes = [("predicted peak of mlx", predicted_peak(records), _basis(records), False)]
    peaks = [record.peak_memory_bytes for record in records.steps]
    measured = summary.outcome.peak_memory_bytes if summary is not None else max(peaks, default=0)
    if measured:
        share = measured / predicted_peak(records)
        sizes.append(("measured peak of mlx", measured, f"{100 * share:.0f} % of the prediction", False))
    footprints = [record.footprint_bytes for record in records.steps]
    whole = max([*footprints, summary.outcome.peak_footprint_bytes if summary is not None else 0])
    if whole:
        of_process = size_text(plan.process_memory_bytes)
        sizes.append(
            ("process, highest", whole, f"Python and libraries were expected to take {of_process} of it", False)
        )
    sizes.append(("budget", plan.memory_budget_bytes, "the most that the training process may take", True))
    most = max(size for _, size, _, _ in sizes)
    bars = tuple(MemoryBar(name, size_text(size), round(100 * size / most, 1), note, limit)
                 for name, size, note, limit in sizes)  # fmt: skip
    terms = tuple((term.name, size_text(term.size_bytes), "counted" if term.exact else "estimated")
                  for term in plan.memory_terms)  # fmt: skip
    table = Table(("term", "size", "how"), terms, caption="The closed form of the prediction, term by term")
    note = f"Planning expected {duration_text(plan.total_seconds)} of updates." if plan.total_seconds else ""
    if summary is not None:
        note += f" They took {duration_text(summary.outcome.elapsed_seconds)}."
    return MemoryShown(bars, table if terms else None, note.strip())


def _basis(records: WholeRun) -> str:
    if records.plan is None:
        return ""
    verified = "tried out with the model itself" if records.plan.verified else "not tried out"
    return f"by {records.plan.basis}, {verified}"
