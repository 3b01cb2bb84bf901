"""Predicted against measured: the figures of two summaries side by side."""

from __future__ import annotations

from typing import NamedTuple

from headway.lab.summary import Summary

FIGURES = {
    "output tokens/s": ("output_tokens_per_second",), "TTFT p50": ("ttft", "p50"),
    "TTFT p99": ("ttft", "p99"), "time between tokens p50": ("time_between_tokens", "p50"),
    "time between tokens p99": ("time_between_tokens", "p99"), "end to end p50": ("end_to_end", "p50"),
}  # fmt: skip


class Verified(NamedTuple):
    """One figure, predicted and measured."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to the measured value."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


def compare(predicted: Summary, measured: Summary) -> list[Verified]:
    """The figures of two summaries side by side."""
    rows = []
    for name, path in FIGURES.items():
        pair = []
        for summary in (predicted, measured):
            value = summary
            for key in path:
                value = value[key]
            pair.append(float(value))  # type: ignore[arg-type]
        rows.append(Verified(name, *pair))
    return rows
