"""The stories on the lab page, in a browser: their numbers, and all of one by keyboard."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from headway.lab.recording.run import SimulatedRun
from headway.lab.recording.spec import read_spec
from headway.lab.stories import Story, load_stories
from headway.lab.web.server import LabServer
from tests.support.lab_page import link, opened, press, step, wait_for_end, wait_for_step

STORIES = load_stories()
NUMBERS = """() => Object.fromEntries(
  [...document.querySelectorAll('dd[data-metric]')].map(e => [e.dataset.metric, e.dataset.value])
)"""
ARRIVED = """n => {
  const found = [...document.querySelectorAll('dd[data-metric]')];
  return found.length === n && found.every(e => e.dataset.value !== '');
}"""


@pytest.fixture(scope="module")
def stories(browser: Any, lab: LabServer, shared_recordings: None) -> Iterator[Any]:
    """One page for all stories. It reads recordings that are complete: while one arrives, the page
    draws itself 16 times a second."""
    for story in STORIES:
        for spec in story.runs.values():
            deque(SimulatedRun(read_spec(spec)).record(), maxlen=0)
    with opened(browser, lab.url) as page:
        wait_for_step(page, 0)
        yield page


@pytest.mark.parametrize("story", STORIES, ids=[story.name for story in STORIES])
def test_the_page_shows_the_numbers_of_a_story(stories: Any, story: Story) -> None:
    """tests/lab/test_stories.py checks that the runs give the same values."""
    stories.select_option("#story", story.name)
    assert stories.locator("dd[data-metric]").count() == 0, "the numbers come after the guess"
    stories.click(f".choices button >> nth={story.question.answer}")
    assert stories.locator(".choices .right").count() == 1
    assert stories.locator(".choices .wrong").count() == 0
    stories.wait_for_function(ARRIVED, arg=len(story.numbers))
    shown = {label: float(value) for label, value in stories.evaluate(NUMBERS).items()}
    assert shown == {number.label: number.value for number in story.numbers}
    for number in story.numbers:
        assert number.shown in stories.inner_text(f"dd[data-metric='{number.label}']")
    look = story.looks[-1]
    stories.click(".looks button >> nth=-1")
    side = "b" if look.run != "spec" else "a"
    wait_for_end(stories)
    if stories.locator(".half").count():
        assert stories.inner_text(f"[data-side={side}] h2.side small") == f"step {look.step}"
    else:
        assert step(stories) == look.step


def test_the_budget_shows_cached_tokens_where_they_are_charged(stories: Any) -> None:
    stories.select_option("#story", "cached-budget")
    stories.click(".choices .plain")
    stories.wait_for_selector("[data-side=b] .budget .charged")
    assert "1,056 of 1,056" in stories.inner_text("[data-side=b] .budget")
    assert "752 of 1,056" in stories.inner_text("[data-side=a] .budget")


def test_two_runs_of_a_story_can_be_compared_by_time(stories: Any) -> None:
    stories.select_option("#story", "multi-step")
    stories.click(".choices .plain")
    stories.wait_for_selector("#part")
    wait_for_end(stories)
    assert stories.is_checked("text=same time")
    press(stories, "End")
    steps = stories.locator("h2.side small").all_inner_texts()
    assert steps == ["step 299", "step 39"]


def test_from_a_story_to_a_fork_by_keyboard(page: Any, browser: Any) -> None:
    press(page, "m")
    press(page, "T")  # a list chooses by the first letter: "Twenty blocks"
    page.wait_for_selector(".question")
    press(page, "Tab")
    assert page.evaluate("document.activeElement.innerText") == "step 1"
    press(page, "Enter")
    page.wait_for_selector(".choices .right")
    press(page, "Escape")
    wait_for_end(page)
    press(page, "]")
    assert step(page) == 1, "the first preemption"
    press(page, "ArrowLeft", "f")
    page.wait_for_selector("dialog[open]")
    press(page, "h")  # headroom
    press(page, "Tab")
    page.keyboard.type("watermark(0.1)")
    press(page, "Enter")
    page.wait_for_selector("dialog[open]", state="detached")
    page.wait_for_selector(".edits li")
    wait_for_end(page)
    press(page, "p")
    assert page.locator(".half").count() == 2
    assert "headroom watermark(0.1)" in page.inner_text("[data-side=b] h2.side")
    with opened(browser, link(page)) as linked:
        linked.wait_for_selector("[data-side=b]")
        assert linked.locator(".choices .right").count() == 1
        assert linked.inner_text("[data-side=b] h2.side") == page.inner_text(
            "[data-side=b] h2.side"
        )
