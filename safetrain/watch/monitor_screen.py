"""What a monitor shows, drawn for a terminal of any size: lines that fit, in the terminal's own colours."""

import textwrap
from collections.abc import Sequence
from time import localtime, strftime
from typing import TYPE_CHECKING

from safetrain.core.formatting import printable
from safetrain.watch.monitor_chart import Chart, Glyphs, chart_of
from safetrain.watch.monitor_curves import Point
from safetrain.watch.monitor_rows import ScreenRow, headline, left_text, progress_text, rows_of, verdict_rows
from safetrain.watch.monitor_state import State
from safetrain.watch.monitor_view import Event, Level, MonitorView
from safetrain.watch.time_left import clock_text

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

WIDE, NARROW = 120, 60  # columns from which charts stand beside the rows; below which everything is shorter
NAME_CELLS, SIGN_CELLS = 9, 5
LEAST_CHART, MOST_CHART = 3, 18  # lines
LEAST_EVENTS = 3
BAD = (State.DIED, State.GONE, State.HUNG, State.ENDING)
MARKED = "bold magenta"  # validation: legible on light and on dark, and another letter besides
GIB = 2**30


def screen_of(view: MonitorView, width: int, height: int, glyphs: Glyphs) -> "Group":
    """Exactly what fits into ``width`` columns and ``height`` lines."""
    from rich.console import Group

    top = _top(view, width, glyphs)
    middle = _wide(view, width, height - len(top), glyphs) if width >= WIDE else None
    lines = middle or _column(view, width, height - len(top), glyphs)
    shown = [*top, *lines][:height]
    for line in shown:  # letters may be two columns wide
        line.no_wrap = True
        line.truncate(width)
    return Group(*shown)


def _top(view: MonitorView, width: int, glyphs: Glyphs) -> "list[Text]":
    from rich.text import Text

    clock = strftime("%H:%M:%S", localtime(view.wall_seconds))
    state = f" {view.state.value.upper()} "
    style = "bold reverse" if view.state in BAD else "reverse"
    rest = headline(view)[len(view.state.value) :].strip()
    first = Text.assemble((state, style), "  ", (_cut(rest, width - len(state) - len(clock) - 4, glyphs), "bold"))
    first.append(" " * max(1, width - first.cell_len - len(clock)) + clock)
    first.truncate(width)
    made, left = progress_text(view), left_text(view, short=width < NARROW)
    lines = [first]
    if made:
        both = f"{made}   {left}" if left else made
        lines += [Text(both)] if len(both) <= width else [Text(_cut(part, width, glyphs)) for part in (made, left)]
        if view.progress.total_steps:
            share = min(1.0, view.progress.step / view.progress.total_steps)
            done = round(share * width)
            lines.append(Text(glyphs.full * done + glyphs.empty * (width - done)))
    if view.curves.unread_bytes:
        lines.append(Text(f"reading the records: {view.curves.unread_bytes / 2**20:,.0f} MiB to go"))
    return lines


def _column(view: MonitorView, width: int, height: int, glyphs: Glyphs) -> "list[Text]":
    """One thing under the other."""
    told = [line for row in verdict_rows(view) for line in _row_lines(row, width, glyphs)]
    rows = [line for row in rows_of(view) for line in _row_lines(row, width, glyphs)]
    lines = [*told, *rows]
    spare = height - len(lines)
    least = LEAST_EVENTS if width >= NARROW else 1
    events = min(len(view.events), max(least, spare // 4)) if spare > 1 else 0
    chart_lines = min(MOST_CHART, spare - events - (1 if events else 0) - 2)
    drawn = _loss_chart(view, width, chart_lines, glyphs) if chart_lines >= LEAST_CHART else []
    events = min(len(view.events), spare - len(drawn) - 1) if spare > 1 else 0
    return [*lines, *drawn, *_event_lines(view.events, events, width, glyphs)]


def _wide(view: MonitorView, width: int, height: int, glyphs: Glyphs) -> "list[Text] | None":
    """Rows beside the curve of the loss, three more curves below where there is room; None where it is too low."""
    left = max(80, width * 45 // 100)
    rows = [*verdict_rows(view), *rows_of(view)]
    words = [line for row in rows for line in _row_lines(row, left - 2, glyphs)]
    beside = max(len(words), min(MOST_CHART, height // 2))
    if height < beside + LEAST_EVENTS:
        return None
    chart = _loss_chart(view, width - left, beside - 2, glyphs)
    lines = _side_by_side([words, chart], [left, width - left], beside)
    spare = height - len(lines) - 1
    if spare >= 6 + 2 + LEAST_EVENTS:
        third, curves = width // 3, view.curves
        tall = min(10, spare - 2 - max(LEAST_EVENTS, spare // 3))
        charts = [
            _titled("learning rate", chart_of(curves.learning_rate, (), third - 2, tall, glyphs, "{:.1e}")),
            _titled("labels/s", chart_of(curves.labels_per_second, (), third - 2, tall, glyphs, "{:,.0f}")),
            _titled("process memory, GiB", chart_of(_in_gib(view), (), third - 2, tall, glyphs, "{:.3g}")),
        ]
        lines += _side_by_side(charts, [third] * 3, max(len(chart) for chart in charts))
    count = min(len(view.events), height - len(lines) - 1)
    return [*lines, *_event_lines(view.events, count, width, glyphs)]


def _in_gib(view: MonitorView) -> "list[Point]":
    return [Point(point.step, point.value / GIB) for point in view.curves.footprint_bytes]


def _side_by_side(columns: "Sequence[list[Text]]", widths: Sequence[int], height: int) -> "list[Text]":
    from rich.text import Text

    lines = []
    for number in range(height):
        line = Text()
        for column, width in zip(columns, widths, strict=True):
            cell = column[number].copy() if number < len(column) else Text()
            cell.truncate(width, pad=True)
            line.append_text(cell)
        lines.append(line)
    return lines


def _row_lines(row: ScreenRow, width: int, glyphs: Glyphs) -> "list[Text]":
    """The name, the sign, and the parts: as many on a line as fit; what is longer than a line is broken."""
    from rich.text import Text

    name_cells = NAME_CELLS if width >= NARROW else NAME_CELLS - 1
    sign_cells = SIGN_CELLS if width >= NARROW else 0
    room = max(10, width - name_cells - sign_cells)
    sign = f"{row.sign} " if row.sign and not sign_cells and row.level is not Level.FINE else ""
    style = {Level.WRONG: "bold reverse", Level.LOOK: "bold"}.get(row.level or Level.FINE, "")
    lines = []
    for number, text in enumerate(_packed([printable(part) for part in row.parts], room, sign)):
        name = row.name if not number else ""
        line = Text(f"{name:<{name_cells}}", style="bold")
        if sign_cells:
            told = row.sign if not number else ""
            line.append(told, style=style)
            line.append(" " * (sign_cells - len(told)))
        line.append(text, style="bold" if row.level in (Level.LOOK, Level.WRONG) else "not bold")
        line.truncate(width)
        lines.append(line)
    return lines if width >= NARROW else lines[: row.narrow_lines]


def _packed(parts: Sequence[str], room: int, sign: str) -> list[str]:
    lines, line = list[str](), sign
    for part in parts:
        joined = f"{line}{'  ' if line and line != sign else ''}{part}"
        if len(joined) <= room:
            line = joined
            continue
        lines += [line] if line.strip() else []
        broken = textwrap.wrap(part.replace("\n", " "), room) or [""]
        lines += broken[:-1]
        line = broken[-1]
    return [*lines, line]


def _loss_chart(view: MonitorView, width: int, height: int, glyphs: Glyphs) -> "list[Text]":
    from rich.text import Text

    curves = view.curves
    chart = chart_of(curves.train_loss, curves.valid_loss, width, height, glyphs)
    if chart is None:
        return []
    title = Text("loss", style="bold")
    title.append(f"  {glyphs.line} training  ", style="not bold")
    title.append(f"{glyphs.mark} validation", style=MARKED)
    if view.curves_are_old:
        title.append("  of the training before", style="not bold")
    title.truncate(width)
    return [title, *_chart_lines(chart)]


def _titled(title: str, chart: Chart | None) -> "list[Text]":
    from rich.text import Text

    return [Text(title, style="bold"), *_chart_lines(chart)] if chart is not None else []


def _chart_lines(chart: Chart) -> "list[Text]":
    from rich.text import Text

    lines = []
    for label, cells in zip(chart.labels, chart.lines, strict=True):
        line = Text(f"{label} ")
        for cell in cells:
            line.append(cell.letter, style=MARKED if cell.is_mark else "")
        lines.append(line)
    return [*lines, Text(chart.axis)]


def _event_lines(events: Sequence[Event], count: int, width: int, glyphs: Glyphs) -> "list[Text]":
    from rich.text import Text

    if count <= 0:
        return []
    title = Text("events", style="bold")
    shown = events[-count:]
    now = shown[-1].wall_seconds
    lines = [f"{clock_text(event.wall_seconds, now)}  {printable(_first_line(event.text))}" for event in shown]
    return [title, *(Text(_cut(line, width, glyphs)) for line in lines)]


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")


def _cut(text: str, width: int, glyphs: Glyphs) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + glyphs.cut
