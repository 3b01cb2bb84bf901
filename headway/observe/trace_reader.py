"""Converts trace lines to the step records that the timeline reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.observe.trace import Line
from headway.record.packing import num_packed
from headway.record.timeline import RequestTimeline, StepRecord

FINISHED = RequestTimeline("", 0.0, 0)  # never part of a timeline


class TraceReader:
    """Converts the lines of one trace to records. A request that reuses an id is a new request."""

    def __init__(self) -> None:
        self._open: dict[str, RequestTimeline] = {}

    def read(self, line: Line) -> StepRecord[RequestTimeline]:
        """The record of the next line."""
        added = [_times_in(each) for each in line.get("added", ())]
        # An id that is added while it is open belongs to a request aborted before this plan.
        replaced = {each.id: self._open[each.id] for each in added if each.id in self._open}
        self._open.update({each.id: each for each in added})
        ids = [id for id, _ in (*line.get("aborted", ()), *line.get("aborted_in_flight", ()))]
        aborted = self._find(ids, replaced)
        gone, not_considered = set(aborted), line.get("not_considered", ())
        return StepRecord(
            step=line["step"], planned=line["t"], started=line["start"],
            ended=line["end"] or line["t"], num_running=line["running"],
            num_waiting=line["waiting"], num_free=line["free"],
            num_prefill=sum(end - start for _, start, end, _ in line.get("chunks", ())),
            num_decodes=line["decodes"], num_steps=line.get("num_steps", 1),
            dropped=tuple(line.get("dropped", (0, 0))),
            copies=(line.get("copied_out", 0), line.get("copied_in", 0)),
            swap_in=line.get("swap_in", 0.0),
            reasons={*(blocked[1] for blocked in line.get("blocked", ())), *not_considered[:1]},
            added=[(each, each) for each in added], aborted=aborted,
            preempted=[
                (self._get(id), how == "swap", bool(is_priority))
                for id, how, _, is_priority in line.get("preempted", ())
            ],
            admitted=[
                (self._get(id), num_cached, bool(is_resume))
                for id, num_cached, _, is_resume in line.get("admitted", ())
            ],
            chunks=[
                (self._get(id), bool(is_last) and self._get(id) not in gone, 0)
                for id, _, _, is_last in line.get("chunks", ())
            ],
            deferred=[self._get(id) for id in line.get("deferred", ())],
            finished=self._finished(line.get("finished", ()), replaced),
        )  # fmt: skip

    def _finished(
        self, ends: Sequence[Line], replaced: dict[str, RequestTimeline]
    ) -> list[tuple[RequestTimeline, str, int, int]]:
        found = self._find([end["id"] for end in ends], replaced)
        for times in found:
            if self._open.get(times.id) is times:
                del self._open[times.id]
        return [
            (times, end["finish_reason"], num_packed(end["output"]), end.get("recomputed", 0))
            for times, end in zip(found, ends, strict=True)
        ]

    def _get(self, id: str) -> RequestTimeline:
        """The open request with this id. A plan may include requests that have finished since."""
        return self._open.get(id, FINISHED)

    def _find(
        self, ids: Iterable[str], replaced: dict[str, RequestTimeline]
    ) -> list[RequestTimeline]:
        """The request of each id. Of two requests with one id, the replaced one ends first."""
        earlier = dict(replaced)
        return [earlier.pop(id) if id in earlier else self._open[id] for id in ids]


def _times_in(added: Line) -> RequestTimeline:
    return RequestTimeline(
        added["id"], added["arrival"], num_packed(added["prompt"]), added.get("client", ""),
        added.get("deadline"), "pooling" in added, added.get("reads_cache", True),
        "output" in added,
    )  # fmt: skip
