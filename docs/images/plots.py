"""Make the plots of planner.md: run its commands that have --plot.

    make picture

Plots are written beside this file, under the names that the document gives.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from headway.cli.main import app

FOLDER = Path(__file__).parent


def main() -> None:
    text = (FOLDER.parent / "planner.md").read_text(encoding="utf-8").replace("\\\n", " ")
    os.chdir(FOLDER)
    for command in re.findall(r"^(?:\$ )?headway (sweep .*--plot \S+)$", text, re.MULTILINE):
        app(shlex.split(command), standalone_mode=False)


if __name__ == "__main__":
    main()
