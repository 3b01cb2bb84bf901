"""A recording of a run with drafts: states, drafts of each step, repeated, forked, and in text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from headway.events import Completed, Planned
from headway.executor.simulated import Independent
from headway.lab.recording.describe import frame_lines
from headway.lab.recording.fork import fork
from headway.lab.recording.format import RecordingWriter, header_record
from headway.lab.recording.live import LiveRecordings
from headway.lab.recording.reader import RunRecording, read_recording
from headway.lab.recording.run import SimulatedRun, recording_of_journal, recording_of_replay
from headway.lab.recording.spec import Edit, RunSpec
from headway.lab.recording.state import RecordedState, split
from headway.lab.workload.synthetic import parse_synthetic
from headway.record.lines import AbortedLine, CompletedLine
from headway.record.reader import split_header
from headway.record.stats import stats_of
from headway.request import RequestParams
from headway.scheduler import PRESETS, preset
from headway.scheduler.policies.text import ANY
from tests.support.drafted_runs import DraftedRun, drafted_run
from tests.support.journals import PROFILE, of_kind, simulated
from tests.support.recorded_states import shown

NUM_SEEKS = 12
FAILING = frozenset({9, 17, 31})
Drafts = list[tuple[str, int, int]]  # request, drafts, those that were right or -1


def drafts_of(run: DraftedRun) -> dict[int, Drafts]:
    """The drafts of each step."""
    found: dict[int, Drafts] = {}
    for event in run.events:
        if isinstance(event, Planned):
            found[event.plan.step] = [(d.request.id, d.count, -1) for d in event.plan.drafts]
        elif isinstance(event, Completed):
            drafts = zip(event.plan.drafts, event.result.draft_tokens, strict=True)
            found[event.plan.step] = [(d.request.id, d.count, len(t) - 1) for d, t in drafts]
    return found


def check(recording: RunRecording, run: DraftedRun) -> None:
    """States by play are those of the scheduler, and those by seek; drafts are those of the plans."""
    ids = [request[0] for request in recording.requests]
    played, drafts = RecordedState(run.engine.scheduler.config.block_size), drafts_of(run)
    rng = random.Random(recording.num_frames)
    seeks = {rng.randrange(recording.num_frames) for _ in range(NUM_SEEKS)}
    for frame in range(recording.num_frames):
        for op, args in split(recording.ops(frame)):
            played.apply(op, args)
        if frame in seeks:
            assert shown(recording.state(frame), ids) == shown(played, ids), f"frame {frame}"
        step = recording.column("step", frame)
        if step < 0:
            continue
        assert shown(played, ids) == run.states[step], f"step {step}"
        mine = [(ids[r], number, right) for r, number, right in recording.drafts(frame)]
        assert mine == drafts[step], f"step {step}"
        assert recording.column("drafting", frame) == len(mine)
        assert recording.column("drafted", frame) == sum(number for _, number, _ in mine)
        assert recording.column("accepted", frame) == sum(max(0, right) for *_, right in mine)
    assert not played.requests and not played.refs


def recording_of(pieces: Iterable[bytes]) -> RunRecording:
    recording = read_recording(pieces)
    assert recording.end and not recording.end["error"]
    return recording


@pytest.mark.parametrize("failing", [frozenset(), FAILING], ids=["", "failed steps"])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_a_recording_shows_drafts_and_what_the_scheduler_knew(
    name: str, async_scheduling: bool, failing: frozenset[int]
) -> None:
    for seed in (1, 4):
        run = drafted_run(seed, name, async_scheduling, failing=failing, num_blocks=26)
        recording = recording_of(recording_of_journal(run.journal))
        check(recording, run)
        replayed = recording_of(recording_of_replay(run.journal))
        assert replayed.num_frames == recording.num_frames
        for frame in range(recording.num_frames):
            assert replayed.ops(frame) == recording.ops(frame), f"frame {frame}"
            for column in recording.header["columns"]:
                assert replayed.column(column, frame) == recording.column(column, frame), column


@pytest.mark.parametrize("after", range(1, 40, 3))
def test_a_recording_that_starts_among_drafts_shows_the_same_states(after: int) -> None:
    run, data = drafted_run(after, async_scheduling=True), b""
    engine = run.engine
    live, scheduler = LiveRecordings(engine), engine.scheduler
    for number in range(6):
        params = RequestParams(max_tokens=30, sampling=number)
        engine.add(f"more {number}", [1, 2, 3, 1, 2, 3][number:], params)
    for _ in range(after):
        engine.step()
    in_flight = {planned.plan.step for planned in scheduler.in_flight}
    viewer, data = (found := live.start()).viewer, found.header
    first = scheduler.num_steps
    while engine.has_work:
        engine.step()
    recording = read_recording([data, live.take(viewer)])
    ids = [request[0] for request in recording.requests]
    frames = {recording.column("step", f): f for f in range(recording.num_frames)}
    wanted = {step for step in run.states if step >= first and step not in in_flight}
    assert wanted <= set(frames)
    for step in wanted:
        assert shown(recording.state(frames[step]), ids) == run.states[step], f"step {step}"


def test_a_chunk_can_end_while_drafts_are_in_flight() -> None:
    run = drafted_run(2)
    writer, recording = RecordingWriter(run.header.config), RunRecording()
    recording.read(header_record(run.header))
    for event in run.events:
        recording.read(writer.follow(event) + writer.flush())
    recording.read(writer.finish())
    assert len(recording.chunks) > len(run.states) / 2
    check(recording, run)


def lines_at(recording: RunRecording, wanted: Callable[[int], bool]) -> list[str]:
    frame = next(frame for frame in range(recording.num_frames) if wanted(frame))
    return list(frame_lines(recording, frame))


def test_the_text_of_a_frame_has_its_drafts() -> None:
    recording = recording_of(recording_of_journal(drafted_run(0).journal))
    found = lines_at(recording, lambda frame: recording.column("accepted", frame) > 0)
    assert any(" accepted" in line and "draft" in line for line in found)
    none = lines_at(recording, lambda frame: not recording.column("drafting", frame))
    assert not any("draft" in line for line in none)


def forked(run: DraftedRun, step: int, **edit: Any) -> RunRecording:
    spec = RunSpec(trace="x", edits=[Edit(step=step, **edit)])
    return recording_of(fork(run.journal, spec))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_forked_run_drafts_as_recorded_before_the_edit_and_goes_on_with_drafts(
    async_scheduling: bool,
) -> None:
    accepted = 0
    for seed in range(4):
        run = drafted_run(seed, async_scheduling=async_scheduling)
        drafts = drafts_of(run)
        for step in (8, 20, 33):
            recording = forked(run, step, set={"victim": "least_work"})
            ids = [request[0] for request in recording.requests]
            for frame in range(recording.num_frames):
                mine = [(ids[r], n, right) for r, n, right in recording.drafts(frame)]
                if 0 <= recording.column("step", frame) < step - 1:
                    assert mine == drafts[recording.column("step", frame)]
                accepted += recording.column("accepted", frame) * (frame > step)
    assert accepted > 50


def test_a_fork_generates_the_recorded_tokens() -> None:
    """Also where it decodes tokens that were drafted, and drafts tokens that were decoded."""
    run = drafted_run(0)
    aborted = {line.end.id for line in of_kind(AbortedLine, run.journal)}
    ends = [end for line in of_kind(CompletedLine, run.journal) for end in line.finished]
    reasons = {end.id: end.finish_reason for end in ends}
    assert set(reasons.values()) == {"stop", "length"}
    for draft in ("none", "fixed(5)"):
        recording = forked(run, 12, set={"draft": draft})
        names = recording.header["finish_reasons"]
        for frame in range(recording.num_frames):
            for op, args in split(recording.ops(frame)):
                id = recording.requests[args[0]][0] if op.name == "FINISH" else ""
                if id and id not in aborted:
                    assert names[args[1]] == reasons[id], id


@pytest.mark.parametrize("is_simulated", [True, False], ids=["simulation", "model drafts"])
def test_drafts_without_tokens_are_right_as_often_after_a_fork_as_before(
    is_simulated: bool,
) -> None:
    jobs = parse_synthetic("requests=6,prompt=30,output=60").generate()
    jobs = [replace(job, accept=Independent(0.5)) for job in jobs]
    config = preset("vllm_v1", draft="fixed(4)", num_blocks=99)
    journal = simulated(jobs, config, PROFILE)
    if not is_simulated:  # as if a model had made the drafts
        head = split_header(journal)[0]
        head.profile, head.config["drafter"] = "", "model('tiny')"
    spec = RunSpec(trace="x", edits=[Edit(step=6, set={"victim": "least_work"})])
    recording = recording_of(fork(journal, spec, ANY))
    steps = range(recording.num_frames)
    drafted, accepted = (
        sum(recording.column(name, frame) for frame in steps) for name in ("drafted", "accepted")
    )
    stats = stats_of(journal).totals
    assert accepted / drafted == pytest.approx(
        stats["num_accepted"] / stats["num_drafted"], rel=0.01
    )


def test_a_simulated_run_of_the_lab_can_have_drafts() -> None:
    spec = RunSpec(
        workload="requests=9,prompt=30,output=20", preset="vllm_v1", set={"draft": "fixed(3)"},
        edits=[Edit(step=12, set={"draft": "none"})],
    )  # fmt: skip
    recording = recording_of(SimulatedRun(spec).record())
    frames = range(recording.num_frames)
    drafting = [f for f in frames if recording.column("drafting", f)]
    assert drafting and max(recording.column("step", f) for f in drafting) < 12
