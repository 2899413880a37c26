"""The monitor's screen: words and curves that rich lays out for a terminal of any size, or a plain line."""

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from safetrain.core.formatting import counted, duration_text, printable, size_text
from safetrain.core.postmortem import describe_rows
from safetrain.core.recorder import Phase
from safetrain.watch.charts import Points, points_of, smoothed
from safetrain.watch.monitor import SPEEDS, MonitorView, State, batch_parts, losses_of, speed_of
from safetrain.watch.progress import clock_text, describe_pairs, time_left_text
from safetrain.watch.run_folder import Run

CURVE_CELLS, BLOCKS = 32, "▁▂▃▄▅▆▇█"
LOOK, WRONG = "look: ", "!! "  # in front of what needs attention
PHASES = {Phase.WAIT: "waiting for room on the disk", Phase.VERIFY: "checking the adapter"}  # where the name is no word
BAD = (State.DIED, State.GONE)
LOSSES = {
    "train": "train {train:.4f}",
    "valid": "valid {valid:.4f}",
    "best": "best {best:.4f} (step {best_step:.0f})",
    "base": "base {base:.4f}",
}


def rows_of(view: MonitorView) -> list[tuple[str, str]]:
    """Names and texts of the screen's rows, the most important first."""
    if view.state is State.NOTHING:
        return [("next", "nothing has been trained here yet: safetrain run")]
    run, saved, rows = view.run, view.run.checkpoint, list[tuple[str, str]]()
    if view.stopped_early:
        rows.append(("early", f"stopped at step {view.step}: validation no longer improved"))
    verdict = describe_rows(view.verdict) if view.verdict is not None else []
    rows += [*verdict[:1], ("next", view.next_command), *verdict[1:]]
    rows.append(("doing", f"stage {view.stage} of the pipeline" if view.state is State.STAGE else ""))
    if run.flight and not verdict and view.state not in (State.FINISHED, State.STAGE):
        rows.append(("doing" if view.state.is_running else "last", _phase_text(run)))
    rows.append(("loss", _numbers(LOSSES, losses_of(run.steps))))
    pairs = next((record for record in reversed(run.steps) if record.valid_accuracy is not None), None)
    rows.append(("pairs", ", ".join(describe_pairs(pairs))))
    if not verdict:
        rows.append(("speed", _numbers(SPEEDS, speed_of(run.steps)) if view.state.is_running else ""))
        rows += _memory_rows(view)
        if run.job is not None:
            sign = LOOK if run.job.rungs or run.job.gpu_rungs else ""
            rows.append(("batch", sign + "; ".join(batch_parts(run.job))))
    age = duration_text(max(0.0, run.read_at_seconds - saved.saved_seconds)) if saved else ""
    rows.append(("saved", f"step {saved.step}, {age} ago" if saved else "no checkpoint yet"))
    rows += [("unread", f"{LOOK}{file}: {reason}") for file, reason in run.unreadable]
    return [(name, printable(text)) for name, text in rows if text]


def _phase_text(run: Run) -> str:
    last = run.flight[-1]
    text = PHASES.get(last.phase, last.phase_label) + (f" of step {last.work.step}" if last.work.step else "")
    if run.is_running and run.worker_lives:
        text += f" for {duration_text(max(0.0, run.read_at_monotonic_seconds - last.monotonic_seconds))}"
    rows, tokens = last.work.rows, last.work.tokens
    return text + (f", {counted(rows, 'row')}, {counted(tokens, 'token')}" if rows else "")


def _numbers(forms: dict[str, str], numbers: dict[str, float | None]) -> str:
    """Format the numbers that are known."""
    return ", ".join(form.format(**numbers) for name, form in forms.items() if numbers[name] is not None)


def _memory_rows(view: MonitorView) -> list[tuple[str, str]]:
    run, job, marker = view.run, view.run.job, view.run.marker
    used = run.worker_footprint_bytes or max((record.footprint_bytes for record in run.flight[-1:]), default=0)
    limit = marker.limit_bytes if marker is not None else 0
    process = _sign(used, limit) + (f"rank 0 of {job.ranks}: " if job is not None and job.ranks > 1 else "")
    process += size_text(used)
    process += f" of {size_text(limit)} ({marker.limit_name})" if marker is not None and limit else ""
    process += f"; machine: {size_text(view.available_bytes)} free" if view.available_bytes else ""
    peaks = [record.peak_bytes for record in run.flight]
    peak = max([*peaks, *(record.peak_memory_bytes for record in run.steps[-1:])], default=0)
    predicted = max((record.predicted_peak_bytes for record in run.flight), default=0)
    budget = job.memory_budget.mlx_bytes if job is not None else 0
    sign = _sign(peak, budget) or (LOOK if peak > 1.05 * predicted > 0 else "")
    mlx = f"{sign}peak {size_text(peak)}, predicted {size_text(predicted)}, budget {size_text(budget)}"
    return [("process", process if used else ""), ("mlx", mlx if peak else "")]


def _sign(used: int, limit: int) -> str:
    """Return the mark for memory in use near or above its limit; a limit of 0 is unknown."""
    if used > limit > 0:
        return WRONG
    return LOOK if used > 0.9 * limit > 0 else ""


def place_lines(view: MonitorView) -> list[str]:
    """Return ``step 120 of 312, 38 %, epoch 1.15`` and ``about 3 min left, until 14:32``, as far as known."""
    epoch, total = speed_of(view.run.steps)["epoch"], view.run.begun.total_steps if view.run.begun is not None else 0
    parts = [f"step {view.step}"] if view.step else []
    parts = [f"step {view.step} of {total}", f"{100 * view.step / total:.0f} %"] if total else parts
    parts += [f"epoch {epoch:.2f}"] if epoch is not None else []
    left = time_left_text(view.left_seconds, view.run.read_at_seconds) if view.left_seconds is not None else ""
    return [text for text in (", ".join(parts), left) if text]


def plain_line(view: MonitorView) -> str:
    """Return the view as one line, with the most important values first."""
    start = f"{clock_text(view.run.read_at_seconds, view.run.read_at_seconds)}  {view.state.value}"
    parts = [start, *place_lines(view), *(f"{name}: {text}" for name, text in rows_of(view))]
    return "  ".join(" ".join(part.split()) for part in parts)


class MonitorScreen:
    """Fills a terminal."""

    def __init__(self, view: MonitorView) -> None:
        self._view = view
        train = points_of(view.run.steps, "train_loss")
        self._curve = curve_of(smoothed(train) or train)  # computed once, not for each frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the rows, the most important first, as far as there is room."""
        free = options.update(height=None)
        lines = console.render_lines(self._head(options.max_width), free) + console.render_lines(self._rows(), free)
        for line in lines[: options.height or console.height]:
            yield from line
            yield Segment.line()

    def _head(self, width: int) -> Group:
        view, job, header = self._view, self._view.run.job, self._view.run.header
        names = [job.base if job is not None else "", header.device if header is not None else ""]
        names += [f"{job.ranks} ranks"] if job is not None and job.ranks > 1 else []
        now = clock_text(view.run.read_at_seconds, view.run.read_at_seconds)
        state = Text(f" {view.state.value.upper()} ", style="bold reverse" if view.state in BAD else "reverse")
        line = Text.assemble(state, f"  {printable('  '.join(filter(None, names)))}", end="")
        line.truncate(width - len(now) - 1, pad=True)
        lines: list[RenderableType] = [Text.assemble(line, f" {now}"), *map(Text, place_lines(view))]
        if view.run.begun is not None:
            lines.append(ProgressBar(view.run.begun.total_steps, view.step, style="dim", complete_style="bold"))
        return Group(*lines)

    def _rows(self) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in [*rows_of(self._view), *([("curve", self._curve)] if self._curve else [])]:
            table.add_row(name, Text(text, style="bold" if text.startswith((LOOK, WRONG)) else ""))
        return table


def curve_of(points: Points) -> str:
    """Draw a curve as one line of block characters, from its lowest to its highest value; empty for one point."""
    if len(points) < 2:
        return ""
    values = [points[len(points) * cell // CURVE_CELLS][1] for cell in range(CURVE_CELLS)]
    low, high = min(values), max(values)
    blocks = [BLOCKS[round((len(BLOCKS) - 1) * (value - low) / ((high - low) or 1))] for value in values]
    return f"{''.join(blocks)} training loss, {low:.4g} to {high:.4g}"
