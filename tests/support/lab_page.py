"""The lab page in a browser: what the tests read from it and do with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The headless shell needs a fifth less CPU time.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
VIEWPORT = {"width": 1400, "height": 1000}
INLINE = ("data:", "blob:")
PAINTED = "() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
WRITTEN = "() => new Promise(done => setTimeout(() => done(location.href), 200))"
SIDES = (", first scheduler", ", second scheduler")  # ends of the labels of panes


@contextmanager
def opened(context: Any, url: str) -> Iterator[Any]:
    """A page at this address; at its end it must have no console error and no foreign request."""
    page, problems = context.new_page(), list[str]()
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    own = url.partition("#")[0]

    def check(request: Any) -> None:
        if not request.url.startswith((own, *INLINE)):
            problems.append(f"foreign request {request.url}")

    page.on("request", check)
    page.goto(url)
    page.wait_for_selector("#jump")
    try:
        yield page
        # The browser itself logs a refused description; the page shows the reason.
        found = [problem for problem in problems if "status of 400" not in problem]
        assert not found, found
    finally:
        page.close()


def step(page: Any) -> int:
    return int(page.input_value("#jump"))


def wait_for_step(page: Any, number: int) -> None:
    page.wait_for_function("n => document.querySelector('#jump')?.value === String(n)", arg=number)


def wait_for_end(page: Any) -> None:
    """Wait until no run is loading."""
    page.wait_for_function("() => document.querySelector('.where .loading').innerText === ''")


def press(page: Any, *keys: str) -> None:
    """Press keys, and wait until panes off the screen show the result, too."""
    for key in keys:
        page.keyboard.press(key)
    page.evaluate(PAINTED)


def jump(page: Any, number: int) -> None:
    """Go to a step by its number, once the run has all its steps."""
    wait_for_end(page)
    page.fill("#jump", str(number))
    page.press("#jump", "Enter")
    page.locator("#jump").blur()
    wait_for_step(page, number)


def link(page: Any) -> str:
    """The address with the present state.

    The page writes it by a timer that begins at a change. A longer one that begins later, in the
    page, ends after it.
    """
    address: str = page.evaluate(WRITTEN)
    return address


def pane(page: Any, name: str) -> Any:
    """A pane by its label; beside a second scheduler, labels end with its side."""
    return page.locator(f"section[aria-label='{name}']")


def ids(page: Any, group: str, side: str = "") -> list[str]:
    """The requests in a group of the Requests pane, such as "running"."""
    found: list[str] = pane(page, f"Requests{side}").locator(f".{group} .id").all_inner_texts()
    return found


def wait_for_summary(page: Any, name: str, value: float) -> None:
    """Wait until a figure in the result of the first run has this value.

    The result of the run before may be shown until the page has read the next one.
    """
    page.wait_for_function(
        "([name, value]) => document.querySelector(`[data-summary=${name}]`)?.dataset.value == value",
        arg=[name, value],
    )
