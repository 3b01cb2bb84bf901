"""The lab page without a lab behind it: on a server, attached to one, and as a file on disk."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from headway.lab.recording import live
from headway.lab.web.app import LabApp
from headway.lab.web.attach import follow
from headway.lab.web.server import LabServer
from headway.server import lab
from tests.support.lab_page import (
    PAINTED,
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
)
from tests.support.served import Capitals, server
from tests.support.waiting import LIMIT


class Serving:
    """The server of tests.support.served on a local port; a real engine over a scripted executor."""

    executor: Capitals
    url: str

    def __init__(self) -> None:
        self._started, self._pool = threading.Event(), ThreadPoolExecutor(4)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Serving:
        self._thread.start()
        assert self._started.wait(LIMIT), "the server has not started"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(LIMIT)
        self._pool.shutdown()
        assert not self._thread.is_alive(), "the server has not stopped"

    async def _serve(self) -> None:
        async with server() as served:
            live.install(served.engine_client.loop)
            served.app.include_router(lab.router(served.app.state.context))
            self.executor = served.executor
            self._server = uvicorn.Server(
                uvicorn.Config(served.app, port=0, log_level="error", lifespan="off")
            )
            serving = asyncio.create_task(self._server.serve())
            while not self._server.started:
                await asyncio.sleep(0.01)
            port = self._server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}/"
            self._started.set()
            await serving

    def complete(self, prompt: str, max_tokens: int) -> Future[str]:
        """The text of a completion, from another thread."""
        body = json.dumps({"model": "letters", "prompt": prompt, "max_tokens": max_tokens})
        request = urllib.request.Request(
            f"{self.url}v1/completions", body.encode(), {"Content-Type": "application/json"}
        )
        return self._pool.submit(
            lambda: json.load(urllib.request.urlopen(request, timeout=LIMIT))["choices"][0]["text"]
        )


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving() as serving:
        yield serving


@pytest.fixture(scope="module")
def attached(serving: Serving) -> Iterator[LabServer]:
    """`headway lab --attach` to that server."""
    server = LabServer(LabApp("attach", live=partial(follow, serving.url)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("way", ["served", "attached"])
def test_the_page_follows_a_server(
    browser: Any, serving: Serving, attached: LabServer, way: str
) -> None:
    url = f"{serving.url}lab/" if way == "served" else attached.url
    serving.executor.seconds = 1.0  # two minutes in all, until the page shows two running requests
    with opened(browser, url) as page:
        page.wait_for_selector(".live.on")
        assert "server" in pane(page, "Decisions").inner_text(), "says what it waits for"
        texts = [serving.complete("a" * length, 120) for length in (120, 130)]
        page.wait_for_function("() => document.querySelectorAll('.running .row').length === 2")
        page.evaluate(PAINTED)
        assert "admitted" in pane(page, "Decisions").inner_text()
        serving.executor.seconds = 0.0
        assert [text.result() for text in texts] == ["A" * 120, "A" * 120]
        page.wait_for_function("() => document.querySelectorAll('.finished .row').length === 2")
        last = step(page)
        press(page, "ArrowLeft", "ArrowLeft")
        assert step(page) == last - 1, "the past stays; the last frame is after the last step"
        assert page.locator(".live.on").count() == 0
        late = serving.complete("b" * 30, 3).result()
        assert late == "BBB"
        assert step(page) == last - 1
        page.click(".live")
        page.wait_for_function("() => document.querySelectorAll('.finished .row').length === 3")
        assert page.is_disabled("nav >> text=Fork"), "a live run cannot be changed"


def test_an_exported_file_works_without_a_server(browser: Any, page: Any, tmp_path: Path) -> None:
    page.select_option("#story", "twenty-blocks")
    page.click(".choices .plain")
    page.wait_for_selector(".half")
    wait_for_end(page)
    jump(page, 2)
    with page.expect_download() as download:
        press(page, "e")
    path = tmp_path / "run.html"
    download.value.save_as(path)
    with opened(browser, path.as_uri()) as saved:
        wait_for_step(saved, 2)
        for group in ("running", "waiting"):
            for side in SIDES:
                assert ids(saved, group, side) == ids(page, group, side)
        press(saved, "ArrowRight", "ArrowLeft", "ArrowRight")
        wait_for_step(saved, 3)
        assert "60" in saved.inner_text("dd[data-metric='nano_vllm: output of F']")
        jump(saved, 19)
        assert "D" in ids(saved, "waiting", SIDES[0])
        press(saved, "End")
        assert saved.locator("h2.side small").all_inner_texts() == ["step 109", "step 89"]
        press(saved, "p")
        wait_for_step(saved, 0)
        assert saved.is_disabled("nav >> text=Fork")
        saved.goto(f"{path.as_uri()}#frame=40")
        saved.reload()
        wait_for_step(saved, 40)


def test_the_page_does_not_replace_a_link_that_the_user_opens(page: Any) -> None:
    page.evaluate(
        """() => {
          const plain = window.setTimeout;
          window.setTimeout = (work, delay) => {
            if (delay === 150) window.write = work;
            return plain(work, delay);
          };
        }"""
    )
    jump(page, 3)
    page.wait_for_function("() => location.hash.includes('frame=3')")
    # The page writes its address when the user has changed it, and before it gets the event.
    page.evaluate(
        """() => {
          location.hash = location.hash.replace("frame=3", "frame=7");
          window.write();
        }"""
    )
    wait_for_step(page, 7)
    assert "frame=7" in link(page)
