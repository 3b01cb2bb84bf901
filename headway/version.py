"""The commit that this package was built from."""

from __future__ import annotations

import subprocess
from pathlib import Path

PACKAGE = Path(__file__).parent


def commit(package: Path = PACKAGE) -> str | None:
    """The abbreviated commit: from _commit.txt, which a build writes, or from the git checkout.

    None if there is neither, for example in a package that was built outside a checkout.
    """
    file = package / "_commit.txt"
    if file.exists():
        return file.read_text(encoding="utf-8").strip() or None
    command = ["git", "-C", str(package), "rev-parse", "--show-toplevel", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    root, _, found = done.stdout.strip().partition("\n")
    # An installed package may lie in another project's checkout.
    return found if Path(root) == package.resolve().parent else None
