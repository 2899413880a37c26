"""A curve in a few lines of text: braille dots, or plain letters where a terminal has no more."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from safetrain.watch.monitor_curves import Point

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille letter, rows of two
EARLY_SHARE, ENOUGH = 0.1, 20  # of the points may lie above the edge, where there are so many
LABEL_CELLS = 9


@dataclass(frozen=True)
class Glyphs:
    """The letters of a drawing. Both are told apart without colour."""

    braille: bool
    line: str  # of a curve, where there is no braille
    mark: str  # of a value that stands alone
    edge: str
    corner: str
    base: str
    full: str  # of a bar
    empty: str
    cut: str  # at the end of what is too long


UNICODE = Glyphs(True, "•", "◆", "│", "└", "─", "█", "░", "…")
ASCII = Glyphs(False, ".", "o", "|", "+", "-", "#", ".", "~")


@dataclass(frozen=True)
class Cell:
    """A letter of a chart: whether it is a mark, which is drawn over the curve."""

    letter: str
    is_mark: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines of cells behind their labels, and the axis."""

    labels: tuple[str, ...]
    lines: tuple[tuple[Cell, ...], ...]
    axis: str


def chart_of(
    line: Sequence[Point], marks: Sequence[Point], width: int, height: int, glyphs: Glyphs, text: str = "{:.4g}"
) -> Chart | None:
    """A curve and single values in ``height`` lines and an axis; None where there is nothing to draw, or no room.

    The first tenth may lie above the upper edge and is drawn on it: a loss falls steeply first, and what comes
    afterwards is what one wants to see.
    """
    columns, drawn = width - LABEL_CELLS - 1, [*line, *marks]
    if height < 2 or columns < 8 or not drawn or not all(math.isfinite(point.value) for point in drawn):
        return None
    first, last = min(point.step for point in drawn), max(point.step for point in drawn)
    low, high = _range(drawn, first, last)

    def place(point: Point, across: int, down: int) -> tuple[int, int]:
        x = (point.step - first) / max(1, last - first)
        y = (high - point.value) / (high - low)
        return round(min(1.0, max(0.0, x)) * (across - 1)), round(min(1.0, max(0.0, y)) * (down - 1))

    cells = _curve([place(p, *_grid(columns, height, glyphs)) for p in line], columns, height, glyphs)
    for point in marks:
        x, y = place(point, columns, height)
        cells[y][x] = Cell(glyphs.mark, True)
    labels = [""] * height
    labels[0], labels[-1] = text.format(high), text.format(low)
    if height >= 7:
        labels[height // 2] = text.format(high - (high - low) * (height // 2) / (height - 1))
    axis = f"{' ' * LABEL_CELLS}{glyphs.corner}{first}"
    end = str(last)
    axis += glyphs.base * max(1, width - len(axis) - len(end)) + end
    return Chart(tuple(f"{label:>{LABEL_CELLS}}" for label in labels), tuple(map(tuple, cells)), axis[:width])


def _range(drawn: Sequence[Point], first: int, last: int) -> tuple[float, float]:
    later = [p.value for p in drawn if p.step >= first + EARLY_SHARE * (last - first)]
    values = later if len(drawn) >= ENOUGH and later else [p.value for p in drawn]
    low = min(min(values), min(p.value for p in drawn))
    high = max(values)
    return (low, high) if high > low else (low - abs(low) / 10 - 1e-12, high + abs(high) / 10 + 1e-12)


def _grid(columns: int, height: int, glyphs: Glyphs) -> tuple[int, int]:
    return (2 * columns, 4 * height) if glyphs.braille else (columns, height)


def _curve(places: list[tuple[int, int]], columns: int, height: int, glyphs: Glyphs) -> list[list[Cell]]:
    """Dots at the places, and lines between those in neighbouring columns of dots."""
    dots = set(places)
    for (x, y), (to_x, to_y) in pairwise(places):
        steps = max(abs(to_x - x), abs(to_y - y))
        dots |= {(x + (to_x - x) * n // steps, y + (to_y - y) * n // steps) for n in range(1, steps)}
    cells = [[Cell(" ")] * columns for _ in range(height)]
    if not glyphs.braille:
        for x, y in dots:
            cells[y][x] = Cell(glyphs.line)
        return cells
    made: dict[tuple[int, int], int] = {}
    for x, y in dots:
        cell = y // 4, x // 2
        made[cell] = made.get(cell, 0) | DOTS[y % 4][x % 2]
    for (y, x), bits in made.items():
        cells[y][x] = Cell(chr(0x2800 + bits))
    return cells
