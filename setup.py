"""Build hook: write the git commit into wheels and sdists; `headway --version` prints it.

All other settings are in pyproject.toml. A build outside a git checkout keeps the file that its
sdist contains; without that file, `headway --version` prints no commit.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
FILE = Path("headway", "_commit.txt")  # relative to the checkout, the sdist and the wheel


def commit() -> str | None:
    """The abbreviated commit, with "-dirty" for uncommitted changes; None outside a checkout."""
    if not (ROOT / ".git").exists():  # an unpacked sdist may lie inside another project's checkout
        return None
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def write(folder: str) -> None:
    if found := commit():
        path = Path(folder, FILE)
        path.unlink(
            missing_ok=True
        )  # in an sdist tree it may be a hard link to the checkout's file
        path.write_text(f"{found}\n", encoding="utf-8")


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable install reads the commit from git
            write(self.build_lib)


class SdistWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write(base_dir)


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
