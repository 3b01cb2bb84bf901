"""A lab, a browser, and pages in it, for the tests of the lab page.

Needs Debian's chromium, which `make test` installs where it may. One browser and one lab serve all
tests of this folder.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.web.app import LabApp
from headway.lab.web.server import LabServer
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler import preset
from tests.support.lab_page import CHROMIUM, VIEWPORT, opened, wait_for_end, wait_for_step
from tests.support.waiting import LIMIT

ARGUMENTS = ("--no-sandbox", "--renderer-process-limit=1", "--disable-site-isolation-trials")
WORKLOAD = "requests=12,prompt=uniform(20,60),output=uniform(8,30)"


@pytest.fixture(scope="package")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run of twelve requests with preemptions."""
    path = tmp_path_factory.mktemp("lab") / "run.trace.jsonl"
    with path.open("wb") as file:
        requests, config = parse_synthetic(WORKLOAD).generate(), preset("vllm_v1", num_blocks=24)
        simulate(requests, config, load_profile("llama3.1-8b-a100-80gb"), trace=file)
    return path


@pytest.fixture(scope="package")
def lab(trace: Path) -> Iterator[LabServer]:
    """A lab with a recorded run and all stories."""
    server = LabServer(LabApp(traces={"run": trace}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="package")  # while it is open, the main thread cannot run an event loop
def browser() -> Iterator[Any]:
    """A browser context; its pages share one process, because a start takes a second of CPU time."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=CHROMIUM, args=ARGUMENTS, timeout=1000 * LIMIT
        )
        context = browser.new_context(viewport=VIEWPORT)
        context.set_default_timeout(1000 * LIMIT)  # also of navigations
        context.new_page()  # stays open and keeps the process
        yield context
        browser.close()


@pytest.fixture
def page(browser: Any, lab: LabServer) -> Iterator[Any]:
    """The lab's page with the recorded run, at its first frame."""
    with opened(browser, lab.url) as page:
        wait_for_step(page, 0)
        wait_for_end(page)
        yield page
