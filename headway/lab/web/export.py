"""A run as one HTML file that works from disk: the page, and the recording in it."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable
from html import escape
from pathlib import Path

from headway.lab.stories import Story
from headway.lab.web.catalog import TEXTS

STATIC = Path(__file__).parent / "static"


def exported(recordings: list[bytes], hash: str = "", stories: Iterable[Story] = ()) -> bytes:
    """The page with its script, style and recordings inlined; `hash` is the state it opens with."""
    html, script, style = (
        (STATIC / name).read_text(encoding="utf-8") for name in ("index.html", "app.js", "app.css")
    )
    parts = [f"<style>{style}</style>"]
    for number, recording in enumerate(recordings):
        data = base64.b64encode(gzip.compress(recording, mtime=0)).decode()
        tag = f'<script type="application/octet-stream" id="recording{number}">'
        parts.append(f"{tag}{data}</script>")
    described = [story.describe() for story in stories]
    known = json.dumps({**TEXTS, "stories": described}).replace("</", "<\\/")
    parts.append(f'<script type="application/json" id="catalog">{known}</script>')
    if hash:
        parts.append(f'<meta name="lab-hash" content="{escape(hash)}">')
    head, end = "</head>", "</body>"
    assert head in html and end in html
    lines = html.splitlines(keepends=True)  # without the tags that load script and style
    html = "".join(line for line in lines if "app.js" not in line and "app.css" not in line)
    html = html.replace(head, "\n".join(parts) + head, 1)
    inline = script.replace("</script", "<\\/script")
    return html.replace(end, f"<script>{inline}</script>{end}", 1).encode()
