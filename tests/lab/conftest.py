"""Recordings of stories that several modules need."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from headway.lab.recording.run import SimulatedRun

RECORDINGS: dict[str, list[bytes]] = {}  # by the description of the run


@pytest.fixture(scope="module")
def shared_recordings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run every story once; later its recording is read from memory, or in other processes from a file."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "recordings"
    folder.mkdir(exist_ok=True)
    recording = SimulatedRun.record

    def shared(run: SimulatedRun, **more: Any) -> Iterator[bytes]:
        key = repr((run._spec, more))
        path = folder / hashlib.sha256(key.encode()).hexdigest()
        if run._spec.story and key not in RECORDINGS and path.exists():
            RECORDINGS[key] = pickle.loads(path.read_bytes())
        if not run._spec.story or key in RECORDINGS:
            yield from RECORDINGS.get(key) or recording(run, **more)
            return
        chunks: list[bytes] = []
        for chunk in recording(run, **more):
            chunks.append(chunk)
            yield chunk
        RECORDINGS[key] = chunks
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(chunks))
        part.replace(path)  # whole, for processes that look for it now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedRun, "record", shared)
        yield
