"""Runs on the lab page, in a browser: two schedulers, forks, edits and trace files.

What the page shows is compared with recordings that Python makes of the same descriptions.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.lab.recording.fork import fork
from headway.lab.recording.reader import RunRecording
from headway.lab.recording.run import SimulatedRun, recording_of_file
from headway.lab.recording.spec import read_spec
from headway.lab.recording.state import Op, split
from headway.lab.web.server import LabServer
from headway.record.reader import read_journal
from tests.support.lab_page import (
    SIDES,
    ids,
    jump,
    link,
    opened,
    pane,
    press,
    step,
    wait_for_end,
    wait_for_step,
    wait_for_summary,
)

SPEC = {
    "workload": "requests=12,prompt=uniform(20,60),output=uniform(8,30)",
    "preset": "vllm_v1", "set": {"num_blocks": 24},
}  # fmt: skip


def recording(data: Iterator[bytes]) -> RunRecording:
    recording = RunRecording()
    recording.read(b"".join(data))
    return recording


def recorded(**changes: Any) -> RunRecording:
    return recording(SimulatedRun(read_spec({**SPEC, **changes})).record())


def frame(recording: RunRecording, number: int) -> tuple[list[int], list[Any]]:
    """What a frame decides: its numbers and operations, without the reasons for waiting."""
    columns = recording.chunk_of(number).columns.keys() - {"blocked", "marks"}
    ops = [each for each in split(recording.ops(number)) if each[0] not in (Op.WAIT, Op.REST)]
    return [recording.column(name, number) for name in sorted(columns)], ops


def parting(first: RunRecording, second: RunRecording) -> int:
    """The first frame in which two recordings differ."""
    shared = range(min(first.num_frames, second.num_frames))
    return next(number for number in shared if frame(first, number) != frame(second, number))


def last_step(recording: RunRecording) -> int:
    assert recording.end
    return int(recording.end["summary"]["steps"]) - 1


def step_at(recording: RunRecording, time: float) -> int:
    """The last step that was planned at this time or before."""
    planned = [time for chunk in recording.chunks for time in chunk.times[:, 0]]
    return min(last_step(recording), max(n for n, each in enumerate(planned) if each <= time))


@pytest.fixture
def run(browser: Any, lab: LabServer) -> Iterator[Any]:
    """A page that shows SPEC, from a link."""
    packed = base64.urlsafe_b64encode(json.dumps(SPEC).encode()).decode().rstrip("=")
    with opened(browser, f"{lab.url}#spec={packed}") as page:
        wait_for_step(page, 0)
        wait_for_end(page)
        yield page


def both(page: Any) -> list[int]:
    """The steps of the two schedulers."""
    return [int(text.split()[-1]) for text in page.locator("h2.side small").all_inner_texts()]


def parts(page: Any) -> int:
    """Where the page says that the two part, once both runs have ended."""
    wait_for_end(page)
    return int(page.get_attribute("#part", "data-frame"))


def rows(page: Any, side: str) -> list[list[str]]:
    return [ids(page, group, side) for group in ("running", "waiting", "swapped", "finished")]


def test_two_schedulers_side_by_side_and_where_they_part(run: Any) -> None:
    run.check("#compare")
    run.select_option("#preset2", "deep_dive")
    first, second = recorded(), recorded(preset="deep_dive")
    expected = parting(first, second)
    run.wait_for_function("n => document.querySelector('#part').dataset.frame == n", arg=expected)
    wait_for_end(run)
    assert last_step(first) < last_step(second)
    wait_for_summary(run, "steps", last_step(first) + 1)
    jump(run, last_step(first))
    jump(run, last_step(second))
    assert both(run) == [last_step(first), last_step(second)], "beyond the end of the first run"
    run.click("#part")
    assert both(run) == [expected] * 2
    assert rows(run, SIDES[0]) != rows(run, SIDES[1])
    if expected:
        press(run, "ArrowLeft")
        assert rows(run, SIDES[0]) == rows(run, SIDES[1])
    run.check("text=same time")
    press(run, "End")  # of the longer run; a key works while the radio button has the focus
    assert both(run) == [last_step(first), last_step(second)]
    press(run, "p")
    assert both(run) == [expected] * 2
    press(run, "Shift+ArrowRight")
    match = re.search(r"clock=([\d.]+)", link(run))
    assert match
    assert both(run) == [step_at(recording, float(match[1])) for recording in (first, second)]
    press(run, "s")
    assert len(set(both(run))) == 1
    run.uncheck("#compare")
    assert run.locator(".half").count() == 0


def test_a_typed_step_stays_while_another_run_loads(run: Any) -> None:
    wait_for_end(run)
    run.fill("#jump", "9")
    longer = {**SPEC, "workload": "requests=15,prompt=uniform(20,60),output=uniform(8,30)"}
    packed = base64.urlsafe_b64encode(json.dumps(longer).encode()).decode().rstrip("=")
    before = run.inner_text(".where")
    run.evaluate("hash => { location.hash = hash }", f"spec={packed}")
    run.wait_for_function("old => document.querySelector('.where').innerText !== old", arg=before)
    wait_for_end(run)
    assert step(run) == 9
    run.press("#jump", "Enter")
    wait_for_step(run, 9)
    assert run.locator(".where").get_attribute("data-step") == "9"


def test_a_fork_shows_both_futures(run: Any) -> None:
    jump(run, 9)
    run.click("nav >> text=Fork")
    run.select_option("dialog select", "queue")
    run.fill("dialog input", "shortest_first")
    run.keyboard.press("Enter")
    edits = [{"step": 10, "set": {"queue": "shortest_first"}}]
    expected = parting(recorded(), recorded(edits=edits))
    run.wait_for_selector("#part")
    assert parts(run) == expected > 9
    assert both(run) == [9, 9] and rows(run, SIDES[0]) == rows(run, SIDES[1])
    press(run, "p")
    assert both(run) == [expected] * 2 and rows(run, SIDES[0]) != rows(run, SIDES[1])
    run.click("button[aria-label^='remove: step 10']")
    run.wait_for_selector(".half", state="detached")


def test_a_recorded_run_can_be_forked(page: Any, trace: Path) -> None:
    jump(page, 9)
    press(page, "f")
    page.select_option("dialog select", "num_scheduler_steps")
    page.fill("dialog input", "4")
    page.keyboard.press("Enter")
    page.wait_for_selector("#part")
    edits = [{"step": 10, "set": {"num_scheduler_steps": 4}}]
    forked = recording(fork(list(read_journal(trace)), read_spec({"trace": "run", "edits": edits})))
    expected = parting(recording(recording_of_file(trace)), forked)
    assert parts(page) == expected
    press(page, "End")
    assert both(page)[1] == last_step(forked)
    assert "num_scheduler_steps" in page.inner_text("[data-side=b] h2.side")


def test_add_a_request_and_abort_one_in_the_middle(run: Any) -> None:
    jump(run, 5)
    run.click("nav >> text=Add")
    for label, value in {"id": "extra", "prompt tokens": "30", "output tokens": "9"}.items():
        run.get_by_label(label, exact=True).fill(value)
    run.keyboard.press("Enter")
    wait_for_step(run, 6)
    wait_for_end(run)
    assert "extra" in ids(run, "running") + ids(run, "waiting")
    wait_for_summary(run, "completed", 13)
    victim = ids(run, "running")[0]
    pane(run, "Requests").locator(".running .row").first.click()
    run.click(f"text=Abort {victim} here")
    wait_for_step(run, 7)
    wait_for_end(run)
    wait_for_summary(run, "completed", 12)
    assert victim in ids(run, "finished")
    assert "abort" in pane(run, "Requests").locator(".finished").inner_text()
    edits = [
        {"step": 6, "add": {"id": "extra", "prompt": 30, "output": 9}},
        {"step": 7, "abort": victim},
    ]
    wait_for_summary(run, "steps", last_step(recorded(edits=edits)) + 1)
    assert run.locator(".edits li").count() == 2
    press(run, "r")
    wait_for_step(run, 0)
    wait_for_end(run)
    wait_for_summary(run, "completed", 12)
    assert run.locator(".edits li").count() == 0


def test_a_trace_file_is_read_from_the_page(run: Any, trace: Path, tmp_path: Path) -> None:
    press(run, "ArrowDown", "Shift+ArrowRight")
    run.set_input_files("#trace", trace)
    recorded = recording(recording_of_file(trace))
    wait_for_step(run, 0)
    wait_for_end(run)
    wait_for_summary(run, "steps", last_step(recorded) + 1)
    press(run, "End")
    wait_for_step(run, last_step(recorded))
    pane(run, "Requests").locator(".finished .id").nth(11).wait_for(state="attached")
    assert len(ids(run, "finished")) == 12
    press(run, "f")
    run.select_option("dialog select", "queue")
    run.fill("dialog input", "shortest_first")
    run.keyboard.press("Enter")
    run.wait_for_selector("#part")
    press(run, "Escape")
    bad = tmp_path / "bad.trace.jsonl"
    bad.write_text("".join(trace.read_text().splitlines(keepends=True)[:4]) + '{"step":')
    run.set_input_files("#trace", bad)
    run.wait_for_selector(".banner")
    assert ":5:" in run.inner_text(".banner")  # the number of the line
