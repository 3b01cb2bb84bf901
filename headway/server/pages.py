"""HTML pages: one self-contained document each, with inline style and script.

The Content-Security-Policy allows no other scripts and no requests to other hosts.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from fastapi.responses import HTMLResponse

PAGE = Path(__file__).parent / "page"


def page(document: str, style: str, script: str) -> HTMLResponse:
    """Build a page from three files in page/, with its security headers."""
    html, css, js = (
        (PAGE / name).read_text(encoding="utf-8") for name in (document, style, script)
    )
    policy = (
        f"default-src 'none'; style-src {_digest(css)}; script-src {_digest(js)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Frame-Options": "DENY"}
    return HTMLResponse(html.replace("/*STYLE*/", css).replace("/*SCRIPT*/", js), headers=headers)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
