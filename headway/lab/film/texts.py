"""The sentences of a film: every decision of a step, with what the scheduler compared.

A reason to wait is given when it changes, not in every step.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.lab.film.recorder import Answers
from headway.observe.trace import Line
from headway.record.packing import num_packed

Sentence = tuple[str, str, str]  # kind, request id or "", text


class FilmTexts:
    """Follows a trace line by line."""

    def __init__(self, header: Line) -> None:
        self.config = dict(header["config"])
        self._reasons: dict[str, str] = {}  # the latest reason of each waiting request, "" the rest
        self._has_deferred = False

    def follow(self, line: Line, answers: Answers | None = None) -> list[Sentence]:
        """The sentences of the next line."""
        return list(self._sentences(line, answers))

    def _sentences(self, line: Line, answers: Answers | None) -> Iterator[Sentence]:
        for entry in line.get("added", ()):
            num_prompt = num_packed(entry["prompt"])
            yield "arrived", entry["id"], explain.arrived(entry["id"], num_prompt)
        yield from self._preempted(line, answers)
        if reset := line.get("reset"):
            yield "reset", "", explain.reset(bool(reset[1]))
        for id, num_cached, num_swapped, is_resume in line.get("admitted", ()):
            self._reasons.pop(id, None)
            text = explain.admitted(id, num_cached, num_swapped, bool(is_resume))
            yield "admitted", id, text
        if line["step"] >= 0:
            yield from self._waiting(line, answers)
        deferred = line.get("deferred", ())
        if deferred and not self._has_deferred:
            yield "deferred", "", explain.deferred(len(deferred))
        self._has_deferred = bool(deferred)
        if line.get("copied_out") or line.get("copied_in"):
            text = explain.copied(line.get("copied_out", 0), line.get("copied_in", 0))
            yield "copied", "", text
        for end in line.get("finished", ()):
            self._reasons.pop(end["id"], None)
            text = explain.finished(end["id"], num_packed(end["output"]), end["finish_reason"])
            yield "finished", end["id"], text

    def _preempted(self, line: Line, answers: Answers | None) -> Iterator[Sentence]:
        preempted = line.get("preempted", ())
        shorts = line.get("short_of_blocks") or [(0, 0)] * len(preempted)
        groups = list(answers.victims) if answers else []
        for (id, how, num_lost, is_priority), short in zip(preempted, shorts, strict=True):
            candidates = next((g for g in groups if id in dict(g)), None)
            alternatives = None
            if answers and candidates and short[0]:
                groups.remove(candidates)
                seconds = answers.swap_seconds.get(id)
                rule = str(self.config["victim"])
                alternatives = explain.Alternatives(rule, len(candidates), seconds)
            text = explain.preempted(
                id, how == "swap", num_lost, bool(is_priority), line["step"], tuple(short),
                alternatives, how == "discard",
            )  # fmt: skip
            yield "preempted", id, text

    def _waiting(self, line: Line, answers: Answers | None) -> Iterator[Sentence]:
        headroom, rule = answers.headroom if answers else {}, str(self.config["headroom"])
        for id, reason, need, have in line.get("blocked", ()):
            if self._reasons.get(id) != reason:
                self._reasons[id] = reason
                text = explain.waits(id, reason, need, have, headroom.get(id), rule)
                yield "waiting", id, text
        rest = line.get("not_considered")
        if not rest:
            self._reasons.pop("", None)
        elif self._reasons.get("") != rest[0]:
            self._reasons[""] = rest[0]
            limit = int(self.config["max_num_seqs"])
            yield "waiting", "", explain.not_considered(rest[0], rest[1], limit)
