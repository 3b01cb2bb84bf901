"""Links and files that name policies of other modules, in a browser: the page asks, or refuses."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.lab.web.app import LabApp
from headway.lab.web.server import LabServer
from tests.support.lab_page import opened, wait_for_end, wait_for_summary
from tests.support.own_module import WORKLOAD, OwnModule, own_module
from tests.support.waiting import wait_until

FLAG = "--allow-own-policies"
ASKS = "dialog[aria-label='Import own policies?'][open]"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[OwnModule]:
    with own_module(tmp_path) as module:
        yield module


@contextmanager
def lab(**options: Any) -> Iterator[LabServer]:
    server = LabServer(LabApp(stories=[], **options))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def packed(queue: str) -> str:
    spec = {"workload": WORKLOAD, "preset": "vllm_v1", "set": {"num_blocks": 24, "queue": queue}}
    return base64.urlsafe_b64encode(json.dumps(spec).encode()).decode().rstrip("=")


@contextmanager
def linked(browser: Any, server: LabServer, queue: str, other: str = "") -> Iterator[Any]:
    """The page of a link that names this queue, and another one for the second scheduler."""
    second = f"&other={packed(other)}" if other else ""
    with opened(browser, f"{server.url}#spec={packed(queue)}{second}") as page:
        yield page


def test_a_link_imports_nothing_and_the_page_says_why(browser: Any, own: OwnModule) -> None:
    with lab() as server, linked(browser, server, "evil:q") as page:
        page.wait_for_selector(".banner")
        reason = page.inner_text(".banner")
        assert "evil:q" in reason and "ready-made" in reason and FLAG in reason
        page.click("#run")
        wait_for_end(page)
        assert not page.locator(ASKS).count()
    assert not own.is_imported


@pytest.mark.parametrize("way", ["button", "Escape", "close"])
def test_a_refused_import_does_not_happen(browser: Any, own: OwnModule, way: str) -> None:
    with lab(asks=True) as server, linked(browser, server, "evil:q", "evil:other") as page:
        page.wait_for_selector(ASKS)
        page.wait_for_function("() => document.querySelectorAll('.own code').length === 2")
        assert set(page.locator(".own code").all_inner_texts()) == {"evil:q", "evil:other"}
        assert not own.is_imported, "the page asks first"
        if way == "Escape":
            page.keyboard.press("Escape")
        else:
            page.click(f"{ASKS} >> " + ("text=Do not import" if way == "button" else ".close"))
        page.wait_for_selector(".banner")
        assert "evil:q" in page.inner_text(".banner") and not page.locator(ASKS).count()
        wait_for_end(page)
    assert not own.is_imported


def test_a_confirmed_import_runs_both_schedulers(browser: Any, own: OwnModule) -> None:
    with lab(asks=True) as server, linked(browser, server, "evil:q", "evil:other") as page:
        page.wait_for_selector(ASKS)
        page.wait_for_function("() => document.querySelectorAll('.own code').length === 2")
        assert not own.is_imported
        page.click(f"{ASKS} >> text=Import and run")
        wait_for_summary(page, "completed", 12)
        page.wait_for_selector("#part:enabled")  # the two queues decide differently
        assert own.is_imported and not page.locator(".banner").count()


def test_a_trace_file_is_shown_before_its_policies_are_imported(
    browser: Any, own: OwnModule
) -> None:
    with lab(asks=True) as server, opened(browser, server.url) as page:
        wait_for_end(page)
        page.set_input_files("#trace", own.trace())
        page.wait_for_selector(ASKS)
        wait_for_summary(page, "completed", 12)
        assert not own.is_imported
        assert "evil:q" in page.inner_text(".banner")
        page.click(f"{ASKS} >> text=Import and run")
        page.wait_for_selector(".banner", state="detached")
        wait_until(lambda: own.is_imported)


def test_policies_of_the_command_line_need_no_confirmation(browser: Any, own: OwnModule) -> None:
    with lab(own=["evil:q"]) as server, linked(browser, server, "evil:q") as page:
        wait_for_summary(page, "completed", 12)
        assert own.is_imported and not page.locator(".banner").count()
