"""Plots: as text for a terminal, as .svg, .html and .txt files, and by matplotlib as .png or .pdf.

A plot consists of curves of points. One load gives a cumulative distribution of latencies; several
loads give median and p99 over the request rate or the concurrency. A plot with labels has a bar for
each of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.lab import svg
from headway.lab.svg import Curve, Plot, spans_decades

WIDTH, HEIGHT, NUM_POINTS = 64, 11, 101
BAR = 40  # characters of the longest bar
SUFFIXES = (".png", ".svg", ".pdf", ".html", ".txt")
OWN = (".svg", ".html", ".txt")  # written without matplotlib
SIGNS = "o+x*#@"


def distribution(title: str, times: Mapping[str, npt.NDArray[np.float64]]) -> Plot:
    """Cumulative distribution of each kind of latency: the percentage that is at most x."""
    percents = np.linspace(0, 100, NUM_POINTS)
    curves = [
        Curve(name=name, points=tuple(zip(np.percentile(values, percents).tolist(),
                                          percents.tolist(), strict=True)))
        for name, values in times.items() if len(values)
    ]  # fmt: skip
    return Plot(title=title, x="ms", y="%", curves=tuple(curves))


def sweep(
    title: str, x: str, results: Sequence[tuple[float, Mapping[str, float]]], names: Sequence[str]
) -> Plot:
    """Values of reports, such as p99_ttft_ms, over the setting that differs between them."""
    curves = [
        Curve(name=name, points=tuple((at, result[name]) for at, result in results))
        for name in names
    ]
    return Plot(title=title, x=x, y="ms", curves=tuple(curves))


def can_save(path: Path) -> bool:
    """Whether the format of the file's suffix can be written here."""
    return path.suffix in OWN or importlib.util.find_spec("matplotlib") is not None


def save(plot: Plot, path: Path) -> None:
    """Write a file in the format of its suffix; .png and .pdf require matplotlib."""
    if path.suffix in OWN:
        formats = {".txt": text, ".svg": svg.document, ".html": svg.page}
        path.write_text(formats[path.suffix](plot), encoding="utf-8")
        return
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for curve in plot.curves:
        axes.plot(*zip(*curve.points, strict=True), label=curve.name,
                  marker="o" if len(curve.points) < NUM_POINTS else None)  # fmt: skip
    axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
    if plot.labels:
        axes.set_xticks(range(len(plot.labels)), plot.labels, rotation=20, ha="right")
    elif spans_decades([x for curve in plot.curves for x, _ in curve.points]):
        axes.set_xscale("log")
    if plot.is_log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def text(plot: Plot) -> str:
    """The plot as text for a terminal, one sign for each curve."""
    points = [point for curve in plot.curves for point in curve.points if math.isfinite(point[0])]
    if not points:
        return f"{plot.title}: no data\n"
    if plot.labels:
        return _bars(plot)
    xs, ys = zip(*points, strict=True)
    across = svg.Axis(xs, 0, WIDTH - 1, is_log=spans_decades(xs))
    up = svg.Axis(ys if plot.is_log else [0.0, *ys], 0, HEIGHT - 1, is_log=plot.is_log)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for sign, curve in zip(SIGNS, plot.curves, strict=False):
        for x, y in curve.points:
            if math.isfinite(x):
                grid[HEIGHT - 1 - round(up.place(y))][round(across.place(x))] = sign
    legend = "  ".join(f"{s} {c.name}" for s, c in zip(SIGNS, plot.curves, strict=False))
    lines = [f"{plot.title}   {legend}"]
    for number, (row, height) in enumerate(zip(grid, reversed(up.ticks(HEIGHT)), strict=True)):
        is_named = number in (0, HEIGHT // 2, HEIGHT - 1)
        label = f"{height:>9,.4g} ┤" if is_named else f"{'':9} │"
        lines.append(f"{label}{''.join(row)}".rstrip())
    left, *_, right = (f"{value:,.4g}" for value in across.ticks())
    lines.append(f"{plot.y:>9} └{'─' * WIDTH}")
    lines.append(f"{'':11}{left}{f'{right} {plot.x}':>{WIDTH - len(left)}}")
    return "\n".join(lines) + "\n"


def _bars(plot: Plot) -> str:
    """One bar for each label and curve."""
    longest = max((y for curve in plot.curves for _, y in curve.points), default=0.0) or 1.0
    width = max(map(len, plot.labels))
    lines = [f"{plot.title} {plot.y}".rstrip()]
    for curve in plot.curves:
        for x, y in curve.points:
            bar = "█" * max(0, round(BAR * y / longest))
            lines.append(f"{plot.labels[int(x)]:{width}}  {bar} {y:,.4g}")
    return "\n".join(lines) + "\n"
