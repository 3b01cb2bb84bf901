"""An exported file holds all that the page needs: script, style, recordings, and the story."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from typing import Any

from headway.lab.recording.reader import RunRecording
from headway.lab.stories import find_story
from headway.lab.web.app import LabApp
from headway.lab.web.export import STATIC

HASH = '#frame=7&request="<b>'


def export(body: dict[str, Any]) -> str:
    response = LabApp().handle("POST", "/api/export", {}, json.dumps(body).encode())
    assert response.status == 200
    return b"".join(response.body).decode()


def script(page: str, id: str) -> str:
    match = re.search(rf'<script type="[^"]*" id="{id}">(.*?)</script>', page, re.DOTALL)
    assert match
    return match[1]


def recording_in(page: str, id: str) -> RunRecording:
    recording = RunRecording()
    recording.read(gzip.decompress(base64.b64decode(script(page, id))))
    return recording


def test_an_export_of_a_story_is_complete() -> None:
    runs = find_story("twenty-blocks").runs
    page = export({"spec": runs["spec"], "other": runs["other"], "hash": HASH})
    steps = []
    for id in ("recording0", "recording1"):
        end = recording_in(page, id).end
        assert end
        steps.append(end["summary"]["steps"])
    assert steps == [110, 90]
    known = json.loads(script(page, "catalog"))
    assert [story["name"] for story in known["stories"]] == ["twenty-blocks"]
    assert {"waiting", "prefill", "decoding", "swapped", "finished"} == set(known["states"])
    assert "{need}" in known["blocked"]["blocks"] and known["not_considered"]
    stored = re.search(r'<meta name="lab-hash" content="([^"]*)">', page)
    assert stored and html.unescape(stored[1]) == HASH


def test_an_export_loads_nothing() -> None:
    page = export({"spec": {"workload": "requests=2", "preset": "vllm_v1"}})
    assert "recording1" not in page.partition("<script>")[0]
    links = re.findall(r'(?:src|href)="([^"]*)"', page.partition("<style>")[0])
    assert set(links) <= {"data:,"}
    assert (STATIC / "app.css").read_text(encoding="utf-8") in page
    assert page.count("</script>") == 3  # recording, catalog, and the page's own script
