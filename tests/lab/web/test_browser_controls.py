"""The controls of the lab page, by mouse and by keyboard, in a browser."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.lab_page import press, step, wait_for_end, wait_for_step

PLACES = """() => [...document.querySelectorAll('.card, .transport')].map(e => {
  const {x, y, width, height} = e.getBoundingClientRect();
  return [e.className, x, y + scrollY, width, height].join(' ');
})"""


def test_step_back_jump_and_end(page: Any) -> None:
    for _ in range(3):
        page.click("button[aria-label='Run one step']")
    wait_for_step(page, 3)
    page.click("button[aria-label='Back one step']")
    wait_for_step(page, 2)
    page.fill("#jump", "20")
    page.press("#jump", "Enter")
    wait_for_step(page, 20)
    page.click("button[aria-label='Last step']")
    last = step(page)
    assert last > 40
    page.click("button[aria-label='First step']")
    wait_for_step(page, 0)
    page.click("button[aria-label='Next decision']")
    assert 0 < step(page) < last
    page.wait_for_url("**frame=*")  # the page writes it a moment after a change


def test_everything_works_by_keyboard(page: Any) -> None:
    press(page, "ArrowRight", "n", "ArrowLeft")
    wait_for_step(page, 1)
    press(page, "Shift+ArrowRight")
    wait_for_step(page, 11)
    press(page, "End")
    last = step(page)
    press(page, "Home", "]")
    assert 0 < step(page) < last
    press(page, "ArrowDown", "w")
    assert re.search(r"Request \S+", page.inner_text("#why"))
    press(page, "Escape", "?")
    assert "run one step" in page.inner_text("body")
    press(page, "?")


def test_play_goes_on_until_it_is_stopped(page: Any) -> None:
    page.click("button[aria-label='Play']")
    page.wait_for_function("() => Number(document.querySelector('#jump').value) > 2")


WITH_REASON = "text => document.querySelector('#why').innerText.split('\\n')[1] === text"


def test_the_address_has_the_whole_state(page: Any, browser: Any) -> None:
    press(page, "Shift+ArrowRight", "ArrowDown")
    wait_for_step(page, 10)
    page.wait_for_function("() => /frame=10&(.*&)?request=/.test(location.hash)")
    other = browser.new_page()
    other.goto(page.url)
    other.wait_for_selector("#jump")
    wait_for_step(other, 10)
    reason = page.inner_text("#why").splitlines()[1]
    assert reason
    other.wait_for_function(WITH_REASON, arg=reason)
    other.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(page: Any, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.emulate_media(color_scheme=scheme)
    if scheme == "dark":  # also a story, and two schedulers
        page.select_option("#story", "twenty-blocks")
        page.click(".choices .plain")
        page.wait_for_selector(".half")
        wait_for_end(page)
        page.locator("#story").blur()
    press(page, "Shift+ArrowRight", "ArrowDown")
    wait_for_step(page, 10)
    violations = Axe().run(page).response["violations"]
    assert not [v["id"] for v in violations if v["impact"] in ("serious", "critical")]


@pytest.mark.parametrize("width", [1440, 360])
def test_steps_move_nothing_and_need_no_horizontal_scrolling(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    wait_for_end(page)
    places = []
    for key in ("ArrowRight", "]", "End", "Home"):
        press(page, key)
        places.append(page.evaluate(PLACES))
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert len(places[0]) > 10 and places == [places[0]] * len(places)


def test_a_wrong_workload_is_an_error_and_the_old_run_stays(page: Any) -> None:
    press(page, "Shift+ArrowRight")
    wait_for_step(page, 10)
    page.fill("#workload", "requests=1000000")
    page.press("#workload", "Control+Enter")
    page.locator("#workload").blur()
    page.wait_for_function("() => document.body.innerText.includes('20000')")
    assert step(page) == 10
