"""A plot as data and as a drawing: SVG, alone or in a page, without any library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT, TOP, RIGHT, BOTTOM = 80, 40, 780, 380  # of the axes, in pixels
WIDTH, LINE = 800, 18
COLORS = ("#1b6ca8", "#c8553d", "#4f772d", "#7b4b94", "#b08900", "#3d3d3d")
NUM_TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Curves over common axes."""

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    labels: tuple[str, ...] = ()  # of x = 0, 1, ...
    is_log: bool = False  # the y axis


def spans_decades(values: Sequence[float]) -> bool:
    """Whether all values are positive and far enough apart for a logarithmic scale."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > 20 * min(finite)


class Axis:
    """Maps values to places from `start` to `end`, linear or logarithmic."""

    def __init__(self, values: Sequence[float], start: int, end: int, *, is_log: bool) -> None:
        self._is_log, self._start, self._end = is_log, start, end
        scaled = [self._scaled(value) for value in values if math.isfinite(value)] or [0.0]
        self._low, self._high = min(scaled), max(scaled)
        if self._high == self._low:
            self._high += 1.0

    def place(self, value: float) -> float:
        share = (self._scaled(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self, count: int = NUM_TICKS) -> list[float]:
        """Values at equal distances, from the start to the end."""
        step = (self._high - self._low) / (count - 1)
        values = [self._low + place * step for place in range(count)]
        return [10**value for value in values] if self._is_log else values

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self._is_log else value


def document(plot: Plot) -> str:
    """The plot as an SVG document."""
    points = [point for curve in plot.curves for point in curve.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    across = Axis(xs, LEFT, RIGHT, is_log=not plot.labels and spans_decades(xs))
    up = Axis(ys if plot.is_log else [0.0, *ys], BOTTOM, TOP, is_log=plot.is_log)
    height = BOTTOM + 60 + LINE * (len(plot.curves) + len(plot.labels))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(LEFT, 24, plot.title, size=15), _text(8, TOP - 12, plot.y),
        _text(RIGHT, BOTTOM + 40, plot.x, anchor="end"),
    ]  # fmt: skip
    for value in up.ticks():
        y = round(up.place(value), 1)
        parts.append(f'<path d="M{LEFT} {y}H{RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{value:,.4g}", anchor="end"))
    for value in range(len(plot.labels)) if plot.labels else across.ticks():
        mark = f"{value:,.4g}" if not plot.labels else str(int(value) + 1)
        parts.append(_text(round(across.place(value), 1), BOTTOM + 20, mark, anchor="middle"))
    for place, curve in enumerate(plot.curves):
        color, y = COLORS[place % len(COLORS)], BOTTOM + 60 + LINE * place
        parts += _curve(curve, across, up, color, bool(plot.labels))
        parts.append(_text(LEFT, y, f"― {curve.name}", color=color))
    for place, label in enumerate(plot.labels):
        y = BOTTOM + 60 + LINE * (len(plot.curves) + place)
        parts.append(_text(LEFT, y, f"{place + 1}: {label}"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _curve(curve: Curve, across: Axis, up: Axis, color: str, has_labels: bool) -> list[str]:
    places = [
        (round(across.place(x), 1), round(up.place(y), 1))
        for x, y in curve.points if math.isfinite(x)
    ]  # fmt: skip
    dots = [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{color}"/>' for x, y in places]
    if has_labels:
        return [
            f'<path d="M{x} {BOTTOM}V{y}" stroke="{color}" stroke-width="9"/>' for x, y in places
        ]
    line = " ".join(f"{x},{y}" for x, y in places)
    return [f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>', *dots]


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, color: str = "#222"
) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{color}">'
        f"{escape(text)}</text>"
    )


def page(plot: Plot) -> str:
    """The plot as an HTML page."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(plot.title)}</title>'
        f"\n{document(plot)}</html>\n"
    )
