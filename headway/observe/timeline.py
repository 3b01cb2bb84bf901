"""Everything a report counts, from trace lines alone: live or from a file, the same numbers.

An observer of a run feeds it `describe_step(report)`. Memory grows by a few numbers per request
and per step, whatever their size.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.observe.trace import Line

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Life:
    """One request's times, seconds; what it asked for and what it got."""

    arrival: float
    client: str
    deadline: float | None
    num_prompt: int
    admitted: float = -1.0
    first_token: float = -1.0
    finished: float = -1.0
    num_output: int = 0
    reason: str = ""


class Metrics:
    """Feed it the header, then every step; ask for the summary at any time."""

    def __init__(self, header: Line) -> None:
        self.config: dict[str, Any] = header["config"]
        self.totals: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()  # steps in which somebody waited for this
        self.lives: dict[str, Life] = {}
        self.steps: dict[str, array[float]] = {
            name: array("d")
            for name in ("running", "waiting", "tokens", "prefill", "free", "busy", "decodes")
        }
        self._gaps, self._gap_counts = array("d"), array("d")
        self._last_decode = 0.0
        self._fresh: dict[str, float] = {}  # decoding, but not in the latest decode step
        self._parked: dict[str, float] = {}  # preempted after their first token
        self.ended_at = 0.0

    def add(self, line: Line) -> None:
        """One step."""
        for asked in line.get("added", ()):
            self._begin(asked)
        for id, how, _, is_priority in line.get("preempted", ()):
            self._preempt(id, how, is_priority)
        aborted = (*line.get("aborted", ()), *line.get("interrupted", ()))
        gone = {id for id, _ in aborted}  # they took nothing of this step
        for id in gone:
            self._fresh.pop(id, None)
        for id, num_cached, num_swapped, is_resume in line.get("admitted", ()):
            self._admit(line, id, num_cached, num_swapped, is_resume)
        if line["step"] >= 0:
            self._count_step(line)
        if line["decodes"]:
            self._decode(line)
        for id, _, _, is_last in line.get("chunks", ()):
            if is_last and id not in gone:
                self._first_token(id, line["end"])
        for end in line.get("finished", ()):
            self._finish(end, line["end"] or line["t"])

    def _begin(self, asked: Line) -> None:
        id = asked["id"]
        if id in self.lives:  # it has come back
            self.lives[f"{id}, before {len(self.lives)}"] = self.lives[id]
        self.lives[id] = Life(
            asked["arrival"], asked.get("client", ""), asked.get("deadline"),
            sum(item[1] if isinstance(item, list) else 1 for item in asked["prompt"]),
        )  # fmt: skip

    def _preempt(self, id: str, how: str, is_priority: int) -> None:
        self.totals["swaps" if how == "swap" else "recomputes"] += 1
        self.totals["priority_preemptions"] += is_priority
        if self.lives[id].first_token >= 0:  # twice in a row: the first token counts from before
            self._parked.setdefault(id, self._fresh.pop(id, self._last_decode))

    def _admit(self, line: Line, id: str, cached: int, swapped: int, is_resume: int) -> None:
        life = self.lives[id]
        if life.admitted < 0:
            life.admitted = line["t"]
        if is_resume:
            self.totals["resumes"] += 1
        else:
            self.totals["prompt_tokens"] += life.num_prompt
            self.totals["cached_tokens"] += cached
        self.totals["swapped_tokens"] += swapped

    def _count_step(self, line: Line) -> None:
        prefill = sum(end - start for _, start, end, _ in line.get("chunks", ()))
        decodes, num_steps = line["decodes"], line.get("steps", 1)
        values = {
            "running": line["running"], "waiting": line["waiting"], "free": line["free"],
            "tokens": prefill + decodes, "prefill": prefill, "decodes": decodes * num_steps,
            "busy": line["end"] - line["start"],
        }  # fmt: skip
        for name, value in values.items():
            self.steps[name].append(value)
        self.totals["computed_tokens"] += prefill + decodes * num_steps
        self.totals["blocks_out"] += line.get("copied_out", 0)
        self.totals["blocks_in"] += line.get("copied_in", 0)
        self.ended_at = max(self.ended_at, line["end"])
        behind = line.get("behind")
        for reason in {b[1] for b in line.get("blocked", ())} | set(behind[:1] if behind else ()):
            self.reasons[reason] += 1

    def _decode(self, line: Line) -> None:
        """Times between tokens; those who decoded in the latest decode step share one."""
        now, num_steps = line["end"], line.get("steps", 1)
        deferred = set(line.get("deferred", ()))
        late = [id for id in self._fresh if id not in deferred]
        num_idle, num_unused = line.get("dropped", (0, 0))
        num_rows, num_tokens = line["decodes"] - num_idle, line["decodes"] * num_steps - num_unused
        for id in late:
            self._gap(now - self._fresh.pop(id), 1)
        self._gap(now - self._last_decode, num_rows - len(late))
        self._gap(0.0, num_tokens - num_rows)  # the others of a multi-step come with the first
        for id in deferred:
            if id not in self._parked and self.lives[id].finished < 0:
                self._fresh.setdefault(id, self._last_decode)
        self._last_decode = now

    def _gap(self, seconds: float, count: int) -> None:
        if count > 0:
            self._gaps.append(seconds)
            self._gap_counts.append(count)

    def _first_token(self, id: str, now: float) -> None:
        """A prompt, or what was preempted, is computed to its end: a token comes of it."""
        life = self.lives[id]
        if life.first_token < 0:
            life.first_token = now
        elif id in self._parked:
            self._gap(now - self._parked.pop(id), 1)
        self._fresh[id] = now

    def _finish(self, end: Line, now: float) -> None:
        id, life = end["id"], self.lives[end["id"]]
        life.finished, life.reason = now, end["reason"]
        life.num_output = sum(i[1] if isinstance(i, list) else 1 for i in end["output"])
        self._fresh.pop(id, None)
        self._parked.pop(id, None)
        self.totals["recomputed_tokens"] += end.get("recomputed", 0)
        self.totals["output_tokens"] += life.num_output
        self.totals[f"finished_{life.reason}"] += 1

    def gap_percentile(self, percent: float) -> float:
        """Of the times between tokens, each counted as often as it was waited."""
        gaps, counts = np.asarray(self._gaps), np.asarray(self._gap_counts)
        if not len(gaps):
            return 0.0
        order = np.argsort(gaps)
        reached = np.cumsum(counts[order]) >= percent / 100 * counts.sum()
        return float(gaps[order][int(np.argmax(reached))])

    def mean_gap(self) -> float:
        return float(np.average(self._gaps, weights=self._gap_counts)) if self._gaps else 0.0


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Mean and percentiles; zeros if there is nothing to count."""
    array_: npt.NDArray[np.float64] = np.fromiter(values, dtype=np.float64)
    if not len(array_):
        return {"mean": 0.0, **{f"p{p}": 0.0 for p in PERCENTILES}}
    marks = np.percentile(array_, PERCENTILES)
    return {"mean": float(array_.mean())} | {
        f"p{p}": float(mark) for p, mark in zip(PERCENTILES, marks, strict=True)
    }
