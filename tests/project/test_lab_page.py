"""The built lab page belongs to its sources, is small, and loads nothing from elsewhere."""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.lab_recordings import write_recordings
from tests.support.waiting import LIMIT

ROOT = Path(__file__).parents[2]
SOURCES, BUILT = ROOT / "lab-page", ROOT / "headway/lab/web/static"
MAX_BYTES, MAX_PACKED = 250_000, 80_000
PAGE = ("index.html", "app.js", "app.css")
needs_node = pytest.mark.skipif(
    not shutil.which("node") or not (SOURCES / "node_modules/esbuild").is_dir(),
    reason="node or lab-page/node_modules is missing: run `make packages`",
)


def hash_of_sources() -> str:
    """As build.mjs computes it: every path and its bytes, in the order of the paths."""
    digest = hashlib.sha256()
    names = [p.relative_to(SOURCES) for p in SOURCES.rglob("*") if p.is_file()]
    for name in sorted(n.as_posix() for n in names if "node_modules" not in n.parts):
        digest.update(f"{name}\0".encode() + (SOURCES / name).read_bytes() + b"\0")
    return digest.hexdigest()


def test_the_build_belongs_to_the_sources() -> None:
    built = (BUILT / "SOURCES.sha256").read_text().strip()
    assert built == hash_of_sources(), "the lab page is stale: run `make page`"


def test_the_page_is_small() -> None:
    parts = [(BUILT / name).read_bytes() for name in PAGE]
    assert 0 < sum(map(len, parts)) <= MAX_BYTES
    assert sum(len(gzip.compress(part)) for part in parts) <= MAX_PACKED


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere() -> None:
    html = (BUILT / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", html)
    links = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert {"app.js", "app.css"} <= set(links) <= {"app.js", "app.css", "data:,"}
    style = (BUILT / "app.css").read_text(encoding="utf-8")
    assert "url(" not in style and "@import" not in style


@needs_node
def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    subprocess.run(["node", "build.mjs", str(tmp_path)], cwd=SOURCES, check=True, timeout=LIMIT)
    for file in sorted(BUILT.iterdir()):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


@needs_node
def test_the_page_reads_recordings_that_python_wrote(tmp_path: Path) -> None:
    write_recordings(tmp_path)
    env = {
        "PATH": f"{Path(shutil.which('node') or '').parent}:/usr/bin:/bin",
        "RECORDINGS": str(tmp_path),
    }
    done = subprocess.run(
        ["node", "test.mjs"], cwd=SOURCES, env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "# fail 0" in done.stdout or "fail 0" in done.stdout
