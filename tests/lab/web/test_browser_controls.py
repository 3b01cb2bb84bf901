"""The lab page in a browser: every control, by mouse and by keyboard, and what it shows.

Needs Debian's chromium, which `make test` installs where it may. Every page of these tests must stay
without console errors and must not call another host.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.stories import load_stories
from headway.lab.web.app import LabApp
from headway.lab.web.server import LabServer
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler import preset

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
WORKLOAD = "requests=12,prompt=uniform(20,60),output=uniform(8,30)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    path = tmp_path_factory.mktemp("lab") / "run.trace.jsonl"
    with path.open("w") as file:
        requests, config = parse_synthetic(WORKLOAD).generate(), preset("vllm_v1", num_blocks=24)
        simulate(requests, config, load_profile("llama3.1-8b-a100-80gb"), trace=file)
    stories = [story.describe() for story in load_stories()]
    server = LabServer(LabApp(traces={"run": path}, stories=stories))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, server: LabServer) -> Iterator[Any]:
    """The lab's page with the first frame of a run; fails on console errors and foreign calls."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))

    def check(request: Any) -> None:
        if not request.url.startswith((server.url, "data:", "blob:", "file:")):
            problems.append(f"foreign request {request.url}")

    page.on("request", check)
    page.goto(server.url)
    page.wait_for_selector("#jump")
    wait_for_step(page, 0)
    yield page
    # The browser itself logs a refused description; the page shows the reason.
    assert not [problem for problem in problems if "status of 400" not in problem]
    context.close()


def step(page: Any) -> int:
    return int(page.input_value("#jump"))


def wait_for_step(page: Any, number: int) -> None:
    page.wait_for_function("n => document.querySelector('#jump')?.value === String(n)", arg=number)


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


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
    assert "frame=" in page.url


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
    assert re.search(r"request \S+", page.inner_text("#why"))
    press(page, "Escape", "?")
    assert "run one step" in page.inner_text("body")
    press(page, "?")


def test_play_goes_on_until_it_is_stopped(page: Any) -> None:
    page.click("button[aria-label='Play']")
    page.wait_for_function("() => Number(document.querySelector('#jump').value) > 2")


def test_the_address_has_the_whole_state(page: Any, browser: Any) -> None:
    press(page, "Shift+ArrowRight", "ArrowDown")
    wait_for_step(page, 10)
    page.wait_for_function("() => location.hash.includes('frame=10')")
    other = browser.new_page()
    other.goto(page.url)
    other.wait_for_selector("#jump")
    wait_for_step(other, 10)
    first, second = (each.inner_text("#why").splitlines()[1] for each in (page, other))
    assert first == second != ""
    other.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(page: Any, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.emulate_media(color_scheme=scheme)
    press(page, "Shift+ArrowRight", "ArrowDown")
    wait_for_step(page, 10)
    violations = Axe().run(page).response["violations"]
    assert not [v["id"] for v in violations if v["impact"] in ("serious", "critical")]


def test_a_phone_needs_no_horizontal_scrolling(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    press(page, "ArrowRight")
    wait_for_step(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_wrong_workload_is_an_error_and_the_old_run_stays(page: Any) -> None:
    press(page, "Shift+ArrowRight")
    wait_for_step(page, 10)
    page.fill("#workload", "requests=1000000")
    page.press("#workload", "Control+Enter")
    page.locator("#workload").blur()
    page.wait_for_function("() => document.body.innerText.includes('20000')")
    assert step(page) == 10
