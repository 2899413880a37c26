"""Curves and histograms as the numbers of an SVG drawing: what the template writes needs no arithmetic. Pure."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from safetrain.watch.curves import Points, thinned

WIDTH, HEIGHT = 480, 264
LEFT, RIGHT, TOP, BOTTOM = 64, 10, 22, 38  # margins
MOST_POINTS, MOST_PLACES = 600, 160  # of a curve; that can be pointed at
FEW_DOTS = 40  # points that are drawn as dots too, where a curve wants that
NEAR = 1e-9


@dataclass(frozen=True)
class Line:
    """One curve. ``style`` is its place among the chart's colours; a ``faint`` one lies behind the others."""

    name: str
    points: Points
    style: int
    faint: bool = False
    dotted: bool = False  # few points, each with a dot


@dataclass(frozen=True)
class MarkedValue:
    """A horizontal line with a name, or a vertical one."""

    name: str
    value: float
    style: int = 4


@dataclass(frozen=True)
class DrawnLine:
    """A curve in the drawing's units."""

    name: str
    style: int
    faint: bool
    path: str
    dots: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class DrawnMark:
    """A straight line in the drawing's units: across at ``place``, or upright there."""

    name: str
    place: float
    style: int
    anchor: str  # of its name


@dataclass(frozen=True)
class HoverStrip:
    """A strip that can be pointed at, and what it then tells."""

    left: float
    width: float
    x: float
    text: str


@dataclass(frozen=True)
class Tick:
    """A place on an axis."""

    place: float
    text: str


@dataclass(frozen=True)
class SvgChart:
    """A drawing of WIDTH by HEIGHT units."""

    title: str
    unit: str
    x_name: str
    lines: tuple[DrawnLine, ...]
    across: tuple[DrawnMark, ...]
    upright: tuple[DrawnMark, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    places: tuple[HoverStrip, ...]
    told: str  # in words, for those who do not see it
    note: str = ""


@dataclass(frozen=True)
class _Scale:
    """From values to the drawing's units."""

    low: float
    high: float
    start: float
    end: float
    doublings: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log2(v) if self.doublings else v for v in (self.low, self.high, value))
        return round(self.start + (at - low) / (high - low) * (self.end - self.start), 1)


def curve_chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    levels: Sequence[MarkedValue] = (),
    marks: Sequence[MarkedValue] = (),
    note: str = "",
    x_name: str = "optimizer update",
) -> SvgChart:
    """Curves over the updates of a training; ``levels`` lie across them, ``marks`` stand at an update."""
    values = [value for line in lines for _, value in line.points] + [level.value for level in levels]
    steps = [step for line in lines for step, _ in line.points]
    x = _Scale(min([0.0, *steps]), max([1.0, *steps]), LEFT, WIDTH - RIGHT)
    y_ticks = round_numbers(min([0.0, *values]), max([*values, 0.0]) or 1.0)
    y = _Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    drawn = tuple(_drawn(line, x, y) for line in lines if line.points)
    return SvgChart(
        title, unit, x_name, drawn,
        across=tuple(DrawnMark(each.name, y(each.value), each.style, "end") for each in levels),
        upright=tuple(_upright(each, x) for each in marks),
        x_ticks=tuple(Tick(x(value), tick_text(value)) for value in round_numbers(x.low, x.high, whole=True)
                      if value <= x.high + NEAR),
        y_ticks=tuple(Tick(y(value), tick_text(value)) for value in y_ticks),
        places=_places([line for line in lines if line.points], x),
        told="; ".join(_in_words(line) for line in lines if line.points),
        note=note,
    )  # fmt: skip


def length_chart(
    title: str, splits: Sequence[tuple[str, Sequence[int], Sequence[int]]], limit: int, x_name: str
) -> SvgChart:
    """Shares of rows by length, on an axis of doublings. Of each split: name, edges of the bins, counts."""
    shares = [(name, edges, [100 * count / sum(counts) for count in counts]) for name, edges, counts in splits]
    used = [edge for _, edges, heights in shares for edge, height in zip(edges[1:], heights, strict=True) if height]
    lows = [
        max(edge, 1) for _, edges, heights in shares for edge, height in zip(edges, heights, strict=False) if height
    ]
    low, high = min(lows), max(*used, 2 * min(lows))
    x = _Scale(low, high, LEFT, WIDTH - RIGHT, doublings=True)
    y_ticks = round_numbers(0.0, max(height for _, _, heights in shares for height in heights))
    y = _Scale(0.0, y_ticks[-1], HEIGHT - BOTTOM, TOP)
    lines = [_stairs(name, edges, heights, style, x, y) for style, (name, edges, heights) in enumerate(shares)]
    limits = [MarkedValue(f"cut at {limit:,}", limit, 3)] if low <= limit <= high else []
    doublings = range(math.ceil(math.log2(low)), math.floor(math.log2(high) + NEAR) + 1)
    every = max(1, len(doublings) // 7)
    return SvgChart(
        title, "% of the split's rows", x_name, tuple(lines), (), tuple(_upright(each, x) for each in limits),
        x_ticks=tuple(Tick(x(2.0**power), f"{2**power:,}") for power in doublings[::every]),
        y_ticks=tuple(Tick(y(value), tick_text(value)) for value in y_ticks),
        places=_bins(shares, x),
        told="; ".join(f"{name}: from {edges[0]:,} to {edges[-1]:,}" for name, edges, _ in shares),
        note="" if limits or not limit else f"Rows are cut at {limit:,} tokens, which is not in sight.",
    )  # fmt: skip


def round_numbers(low: float, high: float, *, whole: bool = False) -> tuple[float, ...]:
    """Five or so round numbers, the first at or below ``low``, the last at or above ``high``."""
    rough = max((high - low) / 5, 1.0 if whole else 1e-12)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - NEAR))
    first, last = math.floor(low / step + NEAR), math.ceil(high / step - NEAR)
    return tuple(number * step for number in range(first, max(last, first + 1) + 1))


def tick_text(value: float) -> str:
    """``1,200``, ``0.0013``, ``1.5e-05``."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def value_text(value: float) -> str:
    """Of a measured number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _upright(mark: MarkedValue, x: _Scale) -> DrawnMark:
    place = x(mark.value)
    return DrawnMark(mark.name, place, mark.style, "start" if place < WIDTH / 2 else "end")


def _drawn(line: Line, x: _Scale, y: _Scale) -> DrawnLine:
    points = [(x(step), y(value)) for step, value in thinned(line.points, MOST_POINTS)]
    dots = tuple(points) if (line.dotted and len(points) <= FEW_DOTS) or len(points) == 1 else ()
    return DrawnLine(line.name, line.style, line.faint, "M" + "L".join(f"{a:g} {b:g}" for a, b in points), dots)


def _stairs(name: str, edges: Sequence[int], heights: Sequence[float], style: int, x: _Scale, y: _Scale) -> DrawnLine:
    parts = [f"M{x(max(edges[0], x.low)):g} {y(0):g}"]
    for (_, end), height in zip(pairwise(edges), heights, strict=True):
        parts.append(f"V{y(height):g}H{x(min(max(end, x.low), x.high)):g}")
    return DrawnLine(name, style, False, "".join([*parts, f"V{y(0):g}"]), ())


def _places(lines: Sequence[Line], x: _Scale) -> tuple[HoverStrip, ...]:
    """Strips side by side, each telling the value of every curve that has one there."""
    steps = sorted({step for line in lines for step, _ in line.points})
    chosen = steps[:: -(-len(steps) // MOST_PLACES)] if steps else []
    bounds = [float("-inf"), *((a + b) / 2 for a, b in pairwise(chosen)), float("inf")]
    found = list[HoverStrip]()
    for step, (low, high) in zip(chosen, pairwise(bounds), strict=True):
        told = [(line.name, _value_near(line.points, step, low, high)) for line in lines]
        left, right = x(max(low, x.low)), x(min(high, x.high))
        text = " · ".join(
            [f"{step:,.0f}", *(f"{name} {value_text(value)}" for name, value in told if value is not None)]
        )
        found.append(HoverStrip(left, round(right - left, 1), x(step), text))
    return tuple(found)


def _value_near(points: Points, step: float, low: float, high: float) -> float | None:
    """That of the point nearest to ``step`` between ``low`` and ``high``."""
    place = bisect_left(points, (step, float("-inf")))
    near = [point for point in points[max(0, place - 1) : place + 1] if low <= point[0] < high]
    return min(near, key=lambda point: abs(point[0] - step))[1] if near else None


def _bins(shares: Sequence[tuple[str, Sequence[int], Sequence[float]]], x: _Scale) -> tuple[HoverStrip, ...]:
    edges = sorted({edge for _, own, _ in shares for edge in own if x.low <= edge <= x.high})
    found = list[HoverStrip]()
    for low, high in pairwise(edges):
        told = [
            f"{name} {height:.3g} %"
            for name, own, heights in shares
            for (start, end), height in zip(pairwise(own), heights, strict=True)
            if start <= low and high <= end
        ]
        words = f"{low + 1:,} tokens" if high == low + 1 else f"{low + 1:,} to {high:,} tokens"
        found.append(HoverStrip(x(low), round(x(high) - x(low), 1), (x(low) + x(high)) / 2, " · ".join([words, *told])))
    return tuple(found)


def _in_words(line: Line) -> str:
    values = [value for _, value in line.points]
    return f"{line.name}: {value_text(values[0])} at first, {value_text(values[-1])} at last"
