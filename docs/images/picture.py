"""Make run.svg: what a terminal shows during `headway run`, for the README.

    make picture

Runs `headway run` in a pseudo-terminal, keeps the first frame in which three requests are done, and
writes it as an SVG without external fonts. Fails if the program shows no such frame.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

COLUMNS, LINES = 100, 40
WANTED = re.compile(r"\b3 of 10 done")
REDRAW = re.compile(r"(?:\r?\x1b\[2K|\x1b\[1A)+")  # rich erases the lines of the frame before
MODES = re.compile(r"\x1b\[\?\d+[hl]")  # cursor on and off
FILE = Path(__file__).with_name("run.svg")


def record() -> str:
    """All bytes that `headway run` writes to a terminal, as text."""
    main, side = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "headway", "run"]
    with subprocess.Popen(command, stdout=side, stderr=side, env=os.environ | size):
        os.close(side)
        parts = []
        while True:
            try:
                part = os.read(main, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            parts.append(part)
    os.close(main)
    return b"".join(parts).decode("utf-8", errors="replace").replace("\r\n", "\n")


def frame(recorded: str) -> str:
    found = [MODES.sub("", f) for f in REDRAW.split(recorded) if WANTED.search(f)]
    if not found:
        raise SystemExit(f"`headway run` showed no frame with {WANTED.pattern!r}")
    return found[0].strip("\n")


def main() -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(frame(record())))
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S)
    svg = console.export_svg(title="make run", code_format=plain, unique_id="run")
    FILE.write_text(svg.replace("Fira Code, monospace", "monospace"), encoding="utf-8")


if __name__ == "__main__":
    main()
