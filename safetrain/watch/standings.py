"""The candidates of a search: a table for a terminal, the report and the monitor, and a line for each event."""

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.live import Live
from rich.table import Table

from safetrain.core.formatting import Tell, counted, duration_text, printable
from safetrain.core.records.search import (
    BEHIND,
    BEST,
    DROPPED,
    FINISHED,
    LEFT_OUT,
    TRAINING,
    WAITING,
    Candidate,
    Search,
)

STATES = (BEST, FINISHED, TRAINING, WAITING, BEHIND, DROPPED, LEFT_OUT)  # in the table's order


class Standings:
    """Shows a search: as a table that changes on a terminal, as lines in a log, and as JSON to ``tell``."""

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell
        self._live: Live | None = None

    def __enter__(self) -> "Standings":
        screen = Console(highlight=False, markup=False, emoji=False)
        if sys.stdout.isatty() and not screen.is_dumb_terminal:
            self._live = Live(console=screen, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, event: str, search: Search, candidate: Candidate | None) -> None:
        """Show an event: planned, training, step, rung, dropped, joined, ranked or stopped."""
        if self._tell is not None:
            self._tell({"event": event, **asdict(search if candidate is None else candidate)})
        if event == "planned":
            print("\n".join(described_plan(search)), flush=True)
        if self._live is not None:
            self._live.update(table_of(search), refresh=True)
        elif event in ("rung", "dropped") and candidate is not None:
            row = next(row for each, row in rows_of(search.candidates) if each.name == candidate.name)
            print(" · ".join(filter(None, row)), flush=True)
        elif event == "ranked":
            Console(highlight=False, markup=False, emoji=False, width=120).print(table_of(search))


def described_plan(search: Search) -> list[str]:
    """How many candidates there are, how far they train, and how long that takes; then what is left out."""
    lines, remaining = list[str](), search.remaining
    if remaining:
        longest = max(remaining, key=lambda each: each.total_steps)
        total, count = longest.total_steps, counted(len(remaining), "candidate")
        count += ", then two ranks" if search.joins_ranks else ""
        shares = ", ".join(f"{100 * step / total:.0f}" for step in dict.fromkeys(map(longest.step_at, search.rungs)))
        time = f"about {duration_text(search.planned_seconds)} of {search.minutes:g} min"
        lines.append(f"{count}, rungs at {shares} % of {counted(total, 'step')}, {time}")
    left = [each for each in search.candidates if each.state in (LEFT_OUT, DROPPED)]
    return lines + [printable(f"{' '.join(each.values)} is {each.state}: {each.why}") for each in left]


def table_of(search: Search) -> Table:
    """The candidates, the best first."""
    title = f"search, {duration_text(search.spent_seconds)} of {search.minutes:g} min"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(("candidate", "steps", f"validation {search.by}", "behind by", "state")):
        table.add_column(name, justify="right" if number in (1, 2, 3) else "left", overflow="fold")
    for _, row in rows_of(search.candidates):
        table.add_row(*map(printable, row))
    return table


def values_that_differ(candidates: Sequence[Candidate]) -> dict[str, str]:
    """The values in which candidates differ, as a short text, by the candidate's name."""
    common = set.intersection(*(set(each.values) for each in candidates)) if len(candidates) > 1 else set()
    own = {each.name: [value for value in each.values if value not in common] for each in candidates}
    return {name: " ".join(re.sub(r"^train\.", "", value) for value in values) for name, values in own.items()}


def rows_of(candidates: Sequence[Candidate]) -> list[tuple[Candidate, tuple[str, ...]]]:
    """Each candidate with its values, steps, loss or score, distance to the best, and state; the best first."""
    order = sorted(candidates, key=lambda each: (-len(each.losses), STATES.index(each.state), each.behind_by or 0.0))
    names, rows = values_that_differ(candidates), list[tuple[Candidate, tuple[str, ...]]]()
    for each in order:
        found = "" if not each.losses else f"{each.losses[-1][1]:.4f}"
        found = found if each.score is None else f"{100 * each.score:.1f} %"
        behind = "" if not each.behind_by else f"{each.behind_by:.4f}"
        behind += "" if each.plus_minus is None else f" ± {each.plus_minus:.4f}"
        state = f"{each.state}: {each.why}" if each.why else each.state
        rows.append((each, (names[each.name], f"{each.steps} of {each.total_steps}", found, behind, state)))
    return rows
