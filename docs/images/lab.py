"""Make the pictures of the lab page, light and dark, for docs/lab.md and the course.

    make picture

Runs the lab and a browser on this machine. A picture is a scene: a story, then steps to take on the
page. Fails if a picture is larger than MAX_BYTES.
"""

from __future__ import annotations

import base64
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from headway.lab.web.app import LabApp
from headway.lab.web.server import LabServer

FOLDER = Path(__file__).parent
SIZE = {"width": 1280, "height": 860}
MAX_BYTES = 150_000
DONE = "() => document.querySelector('.where .loading').innerText === ''"


def show(page: Page, story: str) -> None:
    page.select_option("#story", story)
    page.wait_for_selector(".question")
    page.wait_for_function(DONE)


def jump(page: Page, step: int) -> None:
    page.fill("#jump", str(step))
    page.press("#jump", "Enter")
    page.locator("#jump").blur()


def run(page: Page) -> None:
    """The example, where a request waits for blocks."""
    jump(page, 55)
    page.click(".waiting .row")
    page.mouse.move(0, 0)


def story(page: Page) -> None:
    """A question, before the guess."""
    show(page, "twenty-blocks")


def compare(page: Page) -> None:
    """Two schedulers on the same requests, at a preemption."""
    show(page, "cascade")
    page.click(".choices button >> nth=1")
    page.wait_for_selector("#part")
    page.wait_for_function(DONE)
    jump(page, 17)


SCENES: dict[str, Callable[[Page], None]] = {"run": run, "story": story, "compare": compare}


def picture(page: Page) -> bytes:
    """What the page shows, as WebP."""
    page.wait_for_timeout(400)  # charts are drawn a moment later
    session = page.context.new_cdp_session(page)
    options: dict[str, Any] = {"format": "webp", "quality": 75}
    return base64.b64decode(session.send("Page.captureScreenshot", options)["data"])


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    server = LabServer(LabApp())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            for name, scene in SCENES.items():
                page = browser.new_page(viewport=SIZE, color_scheme=theme)  # type: ignore[arg-type]
                page.goto(server.url)
                page.wait_for_selector("#jump:enabled")
                page.wait_for_function(DONE)
                scene(page)
                data = picture(page)
                if len(data) > MAX_BYTES:
                    raise SystemExit(f"lab-{name} has {len(data)} bytes (limit {MAX_BYTES})")
                (FOLDER / f"lab-{name}-{theme}.webp").write_bytes(data)
                page.close()
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    main()
