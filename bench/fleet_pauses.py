"""What a fault of a replica costs its streams: the parts of their pauses, in seconds.

The client measures when events come, the gateway logs when it noticed the fault and when a moved
request continued. Both clocks are those of this machine.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from bench.fleet_streams import Stream

CONTINUES = re.compile(r"request (\S+) continues on replica \S+ after (\S+) s")


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Pauses:
    """The streams of all rounds. `moved` is the pause of a stream that had to move, from the event
    before the fault to the next one; the parts below it add up to it.
    """

    moved: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)  # from the event to the fault
    noticed: list[float] = field(default_factory=list)  # from the fault until the gateway knows
    resent: list[float] = field(default_factory=list)  # until the request is sent to a replica
    resume: list[float] = field(
        default_factory=list
    )  # until that replica's first token: re-prefill
    shown: list[float] = field(default_factory=list)  # until the client's next event
    added: list[float] = field(default_factory=list)  # by the fault: noticed, resent and shown
    others: list[float] = field(default_factory=list)  # longest gap of streams that did not move

    def add(self, streams: Iterable[Stream], fault: float, lines: Iterable[str]) -> None:
        """Add a round; `fault` is a time of perf_counter, `lines` are the gateway's log as JSON."""
        offset = time.time() - time.perf_counter()
        log = [json.loads(line) for line in lines if line.startswith("{")]
        times = [datetime.fromisoformat(each["time"]).timestamp() - offset for each in log]
        texts = [each["message"] for each in log]
        lost = next(at for at, text in zip(times, texts, strict=True) if "was lost" in text)
        found = [(at, CONTINUES.search(text)) for at, text in zip(times, texts, strict=True)]
        resumed = {match[1]: (at, float(match[2])) for at, match in found if match}
        for stream in streams:
            gaps = stream.gaps_after(fault)
            ends = [each for id, each in resumed.items() if id.startswith(stream.id)]
            moved = [gap for gap in gaps if ends and gap[0] <= ends[0][0] - ends[0][1] < gap[1]]
            if moved:
                self._add_moved(*moved[0], fault, lost, *ends[0])
            elif gaps and not ends:
                self.others.append(max(after - before for before, after in gaps))

    def _add_moved(
        self,
        event: float,
        next_event: float,
        fault: float,
        lost: float,
        token: float,
        resume: float,
    ) -> None:
        sent = token - resume
        self.moved.append(next_event - event)
        self.before.append(fault - event)
        self.noticed.append(lost - fault)
        self.resent.append(sent - lost)
        self.resume.append(resume)
        self.shown.append(next_event - token)
        self.added.append(next_event - fault - resume)

    def summary(self) -> dict[str, Any]:
        """Median, 99th percentile and maximum of each, and the parts of the largest `added`."""
        values = {name: each for name, each in asdict(self).items() if each}
        found: dict[str, Any] = {
            name: {
                "p50": statistics.median(each), "p99": percentile(each, 0.99), "max": max(each),
            }
            for name, each in values.items()
        }  # fmt: skip
        if self.added:
            place = self.added.index(max(self.added))
            found["largest_added"] = {
                name: each[place] for name, each in values.items() if name != "others"
            }
        return found
