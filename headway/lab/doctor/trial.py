"""Try a change of the configuration: simulate the recent requests of a run before and after it.

    python -m headway.lab.doctor.trial < pickled input      prints one JSON object; see `main`

The requests arrive when they did, and generate as many tokens. The costs of a step are fitted to the
recorded steps where these suffice; otherwise they come from a profile. Both runs are simulated, with
the same costs, so that a difference between them comes from the change alone. Lengths suffice in
place of token ids: tokens that the prefix cache had are then modelled as one shared prefix.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections import defaultdict, deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from msgspec.structs import replace as changed

from headway.config import Config
from headway.engine.queries import Document, TrialStart
from headway.errors import ConfigError, HeadwayError
from headway.events import Added
from headway.lab.cost import Model, Profile, load_profile
from headway.lab.doctor.diagnose import diagnose
from headway.lab.profiling.fit import fit, observations, predict
from headway.lab.simulate import simulate
from headway.lab.summary import Summary, summarize
from headway.lab.workload.files import row_reader
from headway.lab.workload.recorded import added_in, prompts
from headway.lab.workload.request import WorkloadRequest
from headway.lab.workload.rows import Row
from headway.record.lines import (
    AddedLine,
    CompletedLine,
    EndLine,
    HeaderLine,
    Line,
    PlannedLine,
    RequestLine,
    ends_of,
    time_of,
)
from headway.record.packing import num_packed
from headway.record.reader import EventReader
from headway.record.stats import RunStats
from headway.scheduler.policies.presets import own_policies, read_changes, read_preset
from headway.scheduler.policies.text import READY_MADE

MAX_FITTED = 2000  # steps; more make the fit slower, not better
MAX_LEAD = 60.0  # seconds; requests that are open at the start arrive at most this long before it


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The recent steps of a run, and the requests that were open before them."""

    header: HeaderLine
    lines: Sequence[Line]
    # With the tokens found in the cache, None: not known yet.
    before: Sequence[tuple[RequestLine, int | None]] = ()
    is_partial: bool = False  # the first lines of the run are missing
    generated: Mapping[str, int] | None = None  # tokens of the requests that are open at the end
    model: Model | None = None

    @property
    def start(self) -> float:
        return time_of(self.lines[0])


def try_changes(
    recording: Recording,
    changes: Mapping[str, str],
    profile: str | None = None,
    own: Container[str] = READY_MADE,
) -> Document:
    """The recorded run, the simulated run, and the simulated run with these changes.

    `own` has the `module:function` that may be imported. ConfigError if a change is wrong, no
    requests arrived, or the costs are not known.
    """
    config, is_async = recording.header.config, recording.header.async_scheduling
    changed = {**config, **read_changes(changes)}
    configs = {"before": read_preset(config, own=own), "after": read_preset(changed, own=own)}
    requests, lead = workload(recording)
    costs, about = _costs(recording, profile)
    runs = {k: _simulated(requests, lead, each, costs, is_async) for k, each in configs.items()}
    measured = _measured(recording)
    return {
        "changes": dict(changes), "costs": about,
        "seconds": measured["seconds"], "steps": measured["steps"], "requests": len(requests),
        "measured": measured, **runs, "error": _error(runs["before"], measured),
        "findings": [each._asdict() for each in diagnose(runs["after"], changed)],
    }  # fmt: skip


def workload(recording: Recording) -> tuple[list[WorkloadRequest], float]:
    """The requests, with arrivals from 0 on, and the time from there to the first recorded step."""
    if not recording.lines:
        raise ConfigError("no steps are recorded yet; send requests first")
    earliest = recording.start - MAX_LEAD
    known = [changed(e, arrival=max(e.arrival, earliest)) for e, _ in recording.before]
    ends = CompletedLine(step=-1, start=0.0, end=0.0, finished=_open_ends(recording))
    lines = [AddedLine(recording.start, known), *recording.lines, ends]
    rows = prompts(recording.header.config, lines)
    if not rows:
        raise ConfigError("no requests are recorded yet; send requests first")
    begin = min(row["arrival"] for row in rows)
    for row, num_cached in zip(rows, _cached(recording), strict=True):
        row |= {key: max(0.0, row[key] - begin) for key in ("arrival", "deadline") if key in row}
        prompt = row["prompt"]
        if isinstance(prompt, int) and (num_shared := min(num_cached, prompt - 1)) > 0:
            row |= {"prefix": "cached", "prefix_tokens": num_shared, "prompt": prompt - num_shared}
    make = row_reader()
    requests = sorted((make(Row(row)) for row in rows), key=lambda each: each.arrival)
    return requests, recording.start - begin


def _open_ends(recording: Recording) -> list[EndLine]:
    """Output lengths of requests that have not ended: their tokens so far, or a typical number."""
    ended = [num_packed(end.output) for line in recording.lines for end in ends_of(line)]
    typical, generated = round(median(ended or [1])), recording.generated or {}
    return [EndLine(id=id, finish_reason="", output=n or typical) for id, n in generated.items()]


def _cached(recording: Recording) -> list[int]:
    """The tokens that the cache had for each request without a parent, in the order of arrival."""
    admissions = defaultdict[str, deque[int]](deque)
    plans = (line for line in recording.lines if isinstance(line, PlannedLine))
    for id, num_cached, _, is_resume in (each for plan in plans for each in plan.admitted):
        if not is_resume:
            admissions[id].append(num_cached)
    later = ((entry, None) for entry in added_in(recording.lines))
    found = []
    for entry, known in (*recording.before, *later):
        coming = admissions[entry.id]
        num_cached = known if known is not None else coming.popleft() if coming else 0
        if entry.parent is None:
            found.append(num_cached)
    return found


def _costs(recording: Recording, profile: str | None) -> tuple[Profile, Document]:
    """Costs fitted to the steps, or those of a profile, and a description of them.

    Half of the steps are fitted; the error is that of the other half.
    """
    chosen = None if profile is None else load_profile(profile)
    model = recording.model or (chosen.model if chosen else None)
    problem = "the model's sizes are not known"
    try:
        if model is not None:
            return _fitted(recording, model)
    except ConfigError as error:
        problem = str(error)
    if chosen is None:
        raise ConfigError(f"the costs of a step are not known: {problem}; give a profile")
    return chosen, {"source": "profile", "name": chosen.name, "because": problem}


def _fitted(recording: Recording, model: Model) -> tuple[Profile, Document]:
    seen, config = observations(recording.lines), recording.header.config
    stride = max(1, len(seen.seconds) // (2 * MAX_FITTED))
    places = np.arange(len(seen.seconds)) % (2 * stride)
    is_fitted = (places == 0) | (seen.copies[:, 0] > 0)  # copies are rare: all are fitted
    found = fit(seen.select(is_fitted), model, config["block_size"])
    costs = Profile(
        name="fitted", description=f"Fitted to {int(is_fitted.sum())} recent steps.",
        kv_tokens=config["num_blocks"] * config["block_size"], model=model, machine=found.machine,
    )  # fmt: skip
    others = seen.select(seen.is_plain & (places == stride))
    ratios = predict(costs, others) / others.seconds
    return costs, {
        "source": "fitted", "steps": int(is_fitted.sum()), "warnings": found.warnings,
        "median_error": float(np.median(np.abs(ratios - 1))) if len(ratios) else None,
    }  # fmt: skip


def _simulated(
    requests: list[WorkloadRequest], lead: float, config: Config, costs: Profile, is_async: bool
) -> Summary:
    """The summary of the recorded time; earlier requests only fill the engine."""
    result = simulate(requests, config, costs, async_scheduling=is_async)
    stats = result.metrics
    stats.requests = [each for each in stats.requests if each.arrival >= lead]
    stats.started_at = lead
    return summarize(stats, len(result.rejected))


def _measured(recording: Recording) -> Summary:
    """The summary of the recorded steps. Requests from before have no times of their start."""
    stats = RunStats(recording.header, recording.start)
    before = [entry for entry, _ in recording.before] if recording.is_partial else None
    reader = EventReader(recording.header, before)
    stats(Added(list(reader.open.values()), recording.start))
    num_before = len(stats.requests)
    for line in recording.lines:
        stats(reader.event(line))
    stats.streams = stats.requests[num_before:]
    return summarize(stats)


def _error(simulated: Summary, measured: Summary) -> dict[str, float | None]:
    """Relative errors of the simulated run; positive is too slow, None is not measured."""
    medians = {
        each: measured[each]["p50"] for each in ("ttft", "time_between_tokens", "end_to_end")
    }
    return {
        f"{name}_p50": simulated[name]["p50"] / median - 1 if median else None
        for name, median in medians.items()
    }


def main() -> None:
    """Read pickled parts from stdin, try the changes, and print the result or {"error": ...}.

    The first part has what starts a trial, and the changes, the profile and the niceness of this
    process; lists of lines follow.
    """
    source = sys.stdin.buffer
    start: TrialStart
    start, asked = pickle.load(source)
    os.nice(asked["niceness"])
    lines = list[Line]()
    while part := pickle.load(source):
        lines += part
    try:
        model = None if start.model is None else Model(**start.model)
        recording = Recording(
            header=start.header, lines=lines, before=start.before, generated=start.generated,
            model=model, is_partial=True,
        )  # fmt: skip
        own = own_policies(start.header.config)  # of the scheduler that runs
        result = try_changes(recording, asked["changes"], asked["profile"], own)
    except HeadwayError as error:
        result = {"error": str(error)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
