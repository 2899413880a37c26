"""The monitor's screen: words and curves that rich lays out for a terminal of any size, or a plain line."""

from itertools import pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from safetrain.core.formatting import counted, duration_text, printable, size_text
from safetrain.core.records.run_state import describe_rows
from safetrain.watch.charts import Points, points_of, smoothed
from safetrain.watch.monitor import (
    MonitorView,
    PhaseAge,
    State,
    batch_parts,
    events_of,
    losses_of,
    memory_of,
    speed_of,
)
from safetrain.watch.progress import clock_text, time_left_text

LEAST_PLOT, MOST_PLOT, LABEL_CELLS = 5, 20, 9
EARLY_SHARE, MANY_POINTS = 0.1, 20  # of many points, the first tenth does not stretch the axis
MARK = "◆"  # a validation
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille letter: 4 rows of 2
MARK_STYLE = "bold magenta"
LOOK, WRONG = "look: ", "!! "  # in front of what needs attention
BAD = (State.DIED, State.GONE, State.HUNG, State.ENDING)


def rows_of(view: MonitorView) -> list[tuple[str, str]]:
    """Names and texts, the most important first."""
    if view.state is State.NOTHING:
        return [("next", "nothing has been trained here yet: safetrain run")]
    rows = _ending_rows(view)
    rows.append(("doing", f"stage {view.stage} of the pipeline" if view.state is State.STAGE else ""))
    if view.phase is not None and view.verdict is None and view.state is not State.FINISHED:
        rows.append(("doing" if view.state.is_running else "last", _phase_text(view.phase)))
    rows.append(("loss", _loss_text(view)))
    rows += _numbers(view) if view.verdict is None else []
    saved = view.run.checkpoint
    age = duration_text(max(0.0, view.run.read_at_seconds - saved.saved_seconds)) if saved else ""
    rows.append(("saved", f"step {saved.step}, {age} ago" if saved else "no checkpoint yet"))
    rows += [("unread", f"{LOOK}{file}: {reason}") for file, reason in view.run.unreadable]
    return [(name, printable(text)) for name, text in rows if text]


def _ending_rows(view: MonitorView) -> list[tuple[str, str]]:
    next_row = ("next", view.next_command)
    if view.stopped_early:
        return [("early", f"stopped at step {view.step}: validation no longer improved"), next_row]
    if view.verdict is None:
        return [next_row]
    title, *details = describe_rows(view.verdict)
    return [title, next_row, *details]


def _phase_text(phase: PhaseAge) -> str:
    sign = WRONG if phase.is_silent else ""
    text = phase.label + (f" of step {phase.step}" if phase.step else "")
    text += f" for {age_text(phase.age_seconds)}"
    text += f" (longest {age_text(phase.longest_seconds)})" if phase.longest_seconds is not None else ""
    text += ", it hangs and is being ended" if phase.is_silent else ""
    text += f", micro-batch {phase.micro_batch}" if phase.micro_batch else ""
    text += f", {counted(phase.rows, 'row')}, {counted(phase.tokens, 'token')}" if phase.rows else ""
    return f"{sign}{text}"


def _loss_text(view: MonitorView) -> str:
    losses = losses_of(view.run.steps)
    forms = {
        "train": "train {train:.4f}",
        "valid": "valid {valid:.4f}",
        "best": "best {best:.4f} (step {best_step:.0f})",
        "base": "base {base:.4f}",
    }
    return ", ".join(form.format(**losses) for name, form in forms.items() if losses[name] is not None)


def _numbers(view: MonitorView) -> list[tuple[str, str]]:
    """Speed, memory and batch size."""
    job, memory, numbers = view.run.job, memory_of(view.run), speed_of(view.run.steps)
    forms = {
        "step_seconds": "{:.3g} s/step",
        "labels_per_second": "{:,.0f} labels/s",
        "learning_rate": "learning rate {:.1e}",
        "grad_norm": "gradient norm {:.2f}",
    }
    speed = ", ".join(form.format(numbers[name]) for name, form in forms.items() if numbers[name] is not None)
    batch = "; ".join(batch_parts(job)) if job is not None else ""
    is_changed = job is not None and bool(job.rungs or job.gpu_rungs)
    return [
        ("speed", speed if view.state.is_running else ""),
        ("process", _process_text(view, memory) if memory["process_bytes"] else ""),
        ("mlx", _mlx_text(memory) if memory["mlx_peak_bytes"] else ""),
        ("batch", f"{LOOK}{batch}" if is_changed else batch),
    ]


def _process_text(view: MonitorView, memory: dict[str, int]) -> str:
    used, limit = memory["process_bytes"], memory["process_limit_bytes"]
    job, marker = view.run.job, view.run.marker
    text = _sign(used, limit) + (f"rank 0 of {job.ranks}: " if job is not None and job.ranks > 1 else "")
    text += size_text(used)
    if marker is not None and limit:
        text += f" of {size_text(limit)} ({marker.limit_name})"
    return f"{text}; machine: {size_text(view.available_bytes)} free" if view.available_bytes else text


def _mlx_text(memory: dict[str, int]) -> str:
    peak, predicted, budget = memory["mlx_peak_bytes"], memory["predicted_peak_bytes"], memory["mlx_budget_bytes"]
    sign = _sign(peak, budget) or (LOOK if peak > 1.05 * predicted > 0 else "")
    return f"{sign}peak {size_text(peak)}, predicted {size_text(predicted)}, budget {size_text(budget)}"


def _sign(used: int, limit: int) -> str:
    """The mark in front of memory; a limit of 0 is unknown."""
    if used > limit > 0:
        return WRONG
    return LOOK if used > 0.9 * limit > 0 else ""


def age_text(seconds: float) -> str:
    """``0.3 s``, which ``duration_text`` rounds up to a second."""
    return f"{seconds:.1f} s" if seconds < 9.95 else duration_text(seconds)


def position_text(view: MonitorView) -> str:
    """``step 120 of 312, 38 %, epoch 1.15``."""
    epoch, total = speed_of(view.run.steps)["epoch"], view.run.begun.total_steps if view.run.begun is not None else 0
    parts = [f"step {view.step}"] if view.step else []
    parts = [f"step {view.step} of {total}", f"{100 * view.step / total:.0f} %"] if total else parts
    return ", ".join([*parts, *([f"epoch {epoch:.2f}"] if epoch is not None else [])])


def end_text(view: MonitorView) -> str:
    """``about 3 min left, until 14:32``; empty while unknown."""
    return time_left_text(view.left_seconds, view.run.read_at_seconds) if view.left_seconds is not None else ""


def plain_line(view: MonitorView) -> str:
    """One line, the most important first."""
    start = f"{clock_text(view.run.read_at_seconds, view.run.read_at_seconds)}  {view.state.value}"
    parts = [start, position_text(view), end_text(view), *(f"{name}: {text}" for name, text in rows_of(view))]
    return "  ".join(" ".join(part.split()) for part in parts if part)


class MonitorScreen:
    """Fills a terminal that has braille letters."""

    def __init__(self, view: MonitorView) -> None:
        self._view = view
        train, valid = (points_of(view.run.steps, name) for name in ("train_loss", "valid_loss"))
        self._train, self._valid = smoothed(train) or train, valid  # once, not for each frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(height=options.height or console.height)
        yield from console.render(self._layout(console, options), options)

    def _layout(self, console: Console, options: ConsoleOptions) -> Layout:
        """The rows first; the curve and the events get the lines that are left."""
        height, events = options.height or 0, events_of(self._view.run.journal)

        def line_count(part: RenderableType) -> int:
            return len(console.render_lines(part, options.update(height=None)))

        head, rows = self._head(options.max_width), self._rows()
        top = line_count(head)
        body = min(height - top, line_count(rows))
        spare = height - top - body
        plot = min(MOST_PLOT, spare - min(len(events) + 1, max(4, spare // 3)))
        plot = plot if plot >= LEAST_PLOT and len(self._view.run.steps) > 1 else 0
        newest = events[len(events) - max(0, spare - plot - 1) :] if spare > plot + 1 else []
        title = Text.assemble(("loss", "bold"), "  line: training, ", (MARK, MARK_STYLE), ": validation")
        curve = [Layout(Plot(title, self._train, self._valid), size=plot)] if plot else []
        screen = Layout()
        screen.split_column(Layout(head, size=top), Layout(rows, size=body), *curve, Layout(self._events(newest)))
        return screen

    def _head(self, width: int) -> Group:
        view, job, header = self._view, self._view.run.job, self._view.run.header
        names = [job.base if job is not None else "", header.device if header is not None else ""]
        names += [f"{job.ranks} ranks"] if job is not None and job.ranks > 1 else []
        now = clock_text(view.run.read_at_seconds, view.run.read_at_seconds)
        state = Text(f" {view.state.value.upper()} ", style="bold reverse" if view.state in BAD else "reverse")
        line = Text.assemble(state, f"  {printable('  '.join(filter(None, names)))}", end="")
        line.truncate(width - len(now) - 1, pad=True)
        lines: list[RenderableType] = [Text.assemble(line, f" {now}")]
        lines += [Text(text) for text in (position_text(view), end_text(view)) if text]
        if view.run.begun is not None:
            lines.append(ProgressBar(view.run.begun.total_steps, view.step, style="dim", complete_style="bold"))
        return Group(*lines)

    def _rows(self) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows_of(self._view):
            table.add_row(name, Text(text, style="bold" if text.startswith((LOOK, WRONG)) else ""))
        return table

    def _events(self, events: list[tuple[float, str]]) -> Text:
        now, lines = self._view.run.read_at_seconds, Text(no_wrap=True, overflow="crop")
        lines.append("events" if events else "", style="bold")
        for seconds, text in events:
            lines.append(f"\n{clock_text(seconds, now)}  {printable(text.strip().partition(chr(10))[0])}")
        return lines


class Plot:
    """A curve and single points, drawn in braille letters into the lines and columns that it is given."""

    def __init__(self, title: Text, curve: Points, marks: Points) -> None:
        self._title, self._curve, self._marks = title, curve, marks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, lines = options.max_width - LABEL_CELLS - 1, (options.height or 0) - 2
        points = [*self._curve, *self._marks]
        if columns < 8 or lines < 2 or len(points) < 2:
            return
        first, last, low = min(points)[0], max(points)[0], min(value for _, value in points)
        early = first + EARLY_SHARE * (last - first) if len(points) >= MANY_POINTS else first
        high = max(value for step, value in points if step >= early)
        high = high if high > low else low + abs(low) / 10 + 1e-12

        def places(points: Points, across: int, down: int) -> list[tuple[int, int]]:
            shares = [((x - first) / max(1.0, last - first), (high - y) / (high - low)) for x, y in points]
            return [(round(x * (across - 1)), round(max(0.0, y) * (down - 1))) for x, y in shares]

        letters = _braille_line(places(self._curve, 2 * columns, 4 * lines))
        letters |= dict.fromkeys(places(self._marks, columns, lines), MARK)
        yield self._title
        for row in range(lines):
            is_labelled = row in (0, lines - 1) or (lines >= 7 and row == lines // 2)
            label = f"{high - (high - low) * row / (lines - 1):.4g}" if is_labelled else ""
            line = Text(f"{label:>{LABEL_CELLS}} " + "".join(letters.get((x, row), " ") for x in range(columns)))
            line.highlight_words([MARK], MARK_STYLE)
            yield line
        axis = f"{' ' * LABEL_CELLS}└{first:.0f}"
        yield Text(axis + f"{last:.0f}".rjust(options.max_width - len(axis), "─"))


def _braille_line(places: list[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """The letters of a line through these dots, by column and row; a letter has 2 x 4 dots."""
    dots = set(places)
    for (x, y), (to_x, to_y) in pairwise(places):
        count = max(abs(to_x - x), abs(to_y - y))
        dots |= {(x + (to_x - x) * n // count, y + (to_y - y) * n // count) for n in range(1, count)}
    bits = dict[tuple[int, int], int]()
    for x, y in dots:
        bits[x // 2, y // 4] = bits.get((x // 2, y // 4), 0) | DOTS[y % 4][x % 2]
    return {cell: chr(0x2800 + bit_mask) for cell, bit_mask in bits.items()}
