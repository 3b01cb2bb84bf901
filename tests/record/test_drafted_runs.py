"""Runs with drafts: what is written and read again, repeated, counted, compared and exported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
from msgspec.structs import replace

from headway.errors import FormatError, OwnPolicyError, ReplayMismatch
from headway.events import Aborted, Added, Completed, Planned, ended_by
from headway.plan import Plan
from headway.record.diff import diff
from headway.record.lines import CompletedLine, HeaderLine, PlannedLine
from headway.record.perfetto import to_perfetto
from headway.record.reader import HIDDEN, EventReader, complete, events_of
from headway.record.replay import check_replay
from headway.record.sentences import explain
from headway.record.stats import stats_of
from headway.record.writer import LineMaker
from headway.request import Request
from headway.scheduler import PRESETS
from headway.scheduler.policies.text import ANY
from tests.support.drafted_runs import DraftedRun, drafted_run
from tests.support.journals import Journal, of_kind

each_scheduling = pytest.mark.parametrize("async_scheduling", [False, True])
each_preset = pytest.mark.parametrize("name", PRESETS)


def plans_of(events: Sequence[object]) -> list[Plan]:
    return [event.plan for event in of_kind(Planned, events)]


@each_scheduling
@each_preset
def test_a_run_with_drafts_replays(name: str, async_scheduling: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        run = drafted_run(seed, name, async_scheduling, swap="swap" if seed % 3 else "recompute")
        steps = of_kind(CompletedLine, run.journal)
        assert check_replay(run.journal) == len(steps)
        for completed in of_kind(Completed, run.events):
            for draft, num_right in completed.verified():
                seen["right"] += num_right
                seen["wrong"] += draft.count - num_right
                seen["ended"] += draft.request in completed.finished
            seen["gone"] += [] in completed.result.draft_tokens
    assert min(seen[kind] for kind in ("right", "wrong", "ended")) > 8, seen
    assert seen["gone"] or not async_scheduling


@each_scheduling
def test_a_run_with_drafts_and_failed_steps_replays(async_scheduling: bool) -> None:
    for seed in range(4):
        run = drafted_run(seed, "vllm_v1", async_scheduling, failing=frozenset({9, 17, 31}))
        check_replay(run.journal)


@each_scheduling
@each_preset
def test_a_journal_gives_the_drafts_of_the_live_run(name: str, async_scheduling: bool) -> None:
    run = drafted_run(3, name, async_scheduling, num_blocks=26)
    read = list(events_of(run.journal))
    for mine, other in zip(plans_of(run.events), plans_of(read), strict=True):
        for one, two in zip(mine.drafts, other.drafts, strict=True):
            assert (one.request.id, one.start, one.count) == (two.request.id, two.start, two.count)
        new = [[(r.id, block) for r, block in plan.new_blocks] for plan in (mine, other)]
        assert new[0] == new[1]
        assert [r.id for r in mine.requests] == [r.id for r in other.requests]
    gained: Counter[Request] = Counter()
    for live, again in zip(run.events, read, strict=True):
        if isinstance(live, Completed) and isinstance(again, Completed):
            counts = list(map(len, live.result.draft_tokens))
            assert again.result.draft_tokens == [[HIDDEN] * count for count in counts]
            gained.update({d.request: right for d, right in again.verified()})
            kept, drafted = again.plan.tokens_kept, [d.request for d in again.plan.drafts]
            assert [kept.get(r) for r in drafted] == [
                live.plan.tokens_kept.get(d.request) for d in live.plan.drafts
            ]
            for one, two in zip(live.finished, again.finished, strict=True):
                assert one.history.num_drafted == two.history.num_drafted
                assert gained[two] == two.history.num_accepted
    assert sum(gained.values()) > 20


def change_gained(journal: Journal) -> None:
    line = next(x for x in of_kind(CompletedLine, journal) if max(x.gained, default=0) > 1)
    line.gained = [max(1, count - 1) for count in line.gained]


def change_count(journal: Journal) -> None:
    line = next(x for x in of_kind(PlannedLine, journal) if x.drafts and x.drafts[0][2] > 1)
    line.drafts = [(id, start, max(1, count - 1)) for id, start, count in line.drafts]


def drop_drafts(journal: Journal) -> None:
    next(line for line in of_kind(PlannedLine, journal) if line.drafts).drafts = []


@pytest.mark.parametrize("tamper", [change_gained, change_count, drop_drafts])
def test_a_changed_draft_is_a_mismatch(tamper: Callable[[Journal], None]) -> None:
    changed = deepcopy(drafted_run(0).journal)
    tamper(changed)
    with pytest.raises(ReplayMismatch, match="step"):
        check_replay(changed)


@pytest.mark.parametrize(
    ("start", "count"), [(-1, 2), (3, 0), (3, -2), (3, 1 << 60)], ids=lambda value: str(value)
)
def test_drafts_that_cannot_be_make_a_file_malformed(start: int, count: int) -> None:
    journal = deepcopy(drafted_run(0).journal)
    line = next(line for line in of_kind(PlannedLine, journal) if line.drafts)
    line.drafts = [(line.drafts[0][0], start, count)]
    with pytest.raises(FormatError, match="not a complete"), complete("x"):
        list(events_of(journal))


@pytest.mark.parametrize("gained", [[], [1 << 60], [1, 1, 1, 1, 1, 1, 1, 1]])
def test_tokens_of_drafts_that_cannot_be_make_a_file_malformed(gained: list[int]) -> None:
    journal = deepcopy(drafted_run(0).journal)
    next(line for line in of_kind(CompletedLine, journal) if line.gained).gained = gained
    with pytest.raises(FormatError, match="not a complete"), complete("x"):
        list(events_of(journal))


class EveryThird:
    """Drafts that follow from the place of a token."""

    def propose(self, request: Request, most: int) -> list[int]:
        place = request.num_computed + 1
        return [1 + (place + number) % 3 for number in range(min(2, most))]

    def forget(self, request: Request) -> None: ...


def every_third() -> EveryThird:
    """A user's drafter."""
    return EveryThird()


def test_the_drafter_of_another_module_is_imported_only_with_a_permission() -> None:
    run = drafted_run(0, drafter=every_third)
    assert run.header.config["drafter"] == f"{__name__}:every_third"
    with pytest.raises(OwnPolicyError, match="every_third"):
        check_replay(run.journal)
    own = {f"{__name__}:every_third"}
    assert check_replay(run.journal, own) == check_replay(run.journal, ANY) > 20
    assert any(sum(line.gained) > len(line.gained) for line in of_kind(CompletedLine, run.journal))


def test_a_journal_without_drafts_has_no_fields_of_drafts() -> None:
    run = drafted_run(0, draft="none")
    for line in (*of_kind(PlannedLine, run.journal), *of_kind(CompletedLine, run.journal)):
        assert not getattr(line, "drafts", ()) and not getattr(line, "gained", ())


def totals_of(run: DraftedRun) -> Counter[str]:
    """What the statistics count, straight from the events."""
    totals: Counter[str] = Counter()
    for completed in of_kind(Completed, run.events):
        plan = completed.plan
        totals["computed_tokens"] += sum(chunk.end - chunk.start for chunk in plan.chunks)
        totals["computed_tokens"] += len(plan.decodes) * plan.num_steps
        for draft, tokens in zip(plan.drafts, completed.result.draft_tokens, strict=True):
            totals["computed_tokens"] += 1 + draft.count
            if tokens:
                totals["num_draft_steps"] += 1
                totals["num_drafted"] += draft.count
                totals["num_accepted"] += len(tokens) - 1
    return totals


@each_scheduling
def test_the_statistics_count_drafts(async_scheduling: bool) -> None:
    run = drafted_run(2, "vllm_v1", async_scheduling)
    stats, expected = stats_of(run.journal), totals_of(run)
    assert {name: stats.totals[name] for name in expected} == expected
    assert 0 < stats.totals["num_accepted"] < stats.totals["num_drafted"]
    tokens = [event.plan.num_tokens for event in of_kind(Completed, run.events)]
    assert list(stats.steps["tokens"]) == tokens


def test_the_first_step_with_other_drafts_is_named_with_its_drafts() -> None:
    mine = drafted_run(0).journal
    changed = deepcopy(mine)
    change_gained(changed)
    line = next(x for x in of_kind(CompletedLine, mine) if max(x.gained, default=0) > 1)
    step, lines = diff(mine, changed, ("one", "two"))
    assert step == line.step
    drafts = next(x for x in of_kind(PlannedLine, mine) if x.step == line.step).drafts
    (id, _, count), gained = next(
        (draft, number) for draft, number in zip(drafts, line.gained, strict=True) if number > 1
    )
    plural = "drafts" if count > 1 else "draft"
    assert f"one: {count} {plural} for request {id}, {gained - 1} accepted" in lines
    assert f"two: {count} {plural} for request {id}, {gained - 2} accepted" in lines
    other = diff(mine, drafted_run(0, draft="fixed(1)").journal, ("one", "two"))
    assert other.step is not None and any("verifies 3 drafts" in text for text in other.lines)


def test_exported_steps_have_their_drafts() -> None:
    journal = drafted_run(0).journal
    steps = [each for each in to_perfetto(journal) if each["ph"] == "X"]
    lines = of_kind(CompletedLine, journal)
    for step, line in zip(steps, lines, strict=True):
        args: Any = step["args"]
        assert ("drafts" in str(step["name"])) == bool(line.gained) == ("drafts" in args)
        assert args.get("gained", []) == list(line.gained)


def test_the_present_state_says_how_many_drafts_were_accepted() -> None:
    run = drafted_run(0)
    scheduler = run.engine.scheduler
    assert "draft" not in explain(scheduler, 0, 0.0, None)
    (request,) = run.engine.add("last", [1, 2, 3, 1, 2, 3, 1, 2], run.events[0].requests[0].params)
    while request.history.num_drafted < 2:
        run.engine.step()
    history = request.history
    text = f"{history.num_drafted} drafts for them, {history.num_accepted} accepted"
    assert text in explain(scheduler, 0, 0.0, None)


def test_aborted_requests_gain_no_token_of_their_drafts() -> None:
    """A plan in flight whose request is aborted keeps its place in the lines."""
    for seed in range(20):
        run = drafted_run(seed, "vllm_v1", async_scheduling=True)
        lines = [line for line in of_kind(CompletedLine, run.journal) if 0 in line.gained]
        if lines:
            break
    assert lines and of_kind(Aborted, run.events)
    head = run.journal[0]
    assert isinstance(head, HeaderLine)
    assert check_replay([replace(head, async_scheduling=True), *run.journal[1:]])


@each_scheduling
def test_a_journal_without_its_first_lines_can_be_read(async_scheduling: bool) -> None:
    """The doctor keeps the latest steps of a server, and the requests that were open before them."""
    run = drafted_run(1, async_scheduling=async_scheduling)
    maker, lines = LineMaker(redact=True), run.journal[1:]
    for first in range(1, len(lines), 7):
        open_: dict[str, Request] = {}
        for event in run.events[:first]:
            open_ |= {
                request.id: request
                for added in of_kind(Added, [event])
                for request in added.requests
            }
            for request in ended_by(event):
                del open_[request.id]
        reader = EventReader(run.header, [maker.request(request) for request in open_.values()])
        for event in run.events[first:]:
            reader.event(maker.line(event))
        assert not reader.open
