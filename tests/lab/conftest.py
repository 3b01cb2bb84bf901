"""Films of stories that several modules need."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from headway.lab.film.run import FilmedRun

FILMS: dict[str, list[bytes]] = {}  # by the description of the run


@pytest.fixture(scope="module")
def shared_films(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run every story once; later its film is read from memory, or in other processes from a file."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "films"
    folder.mkdir(exist_ok=True)
    film = FilmedRun.film

    def shared(run: FilmedRun, **more: Any) -> Iterator[bytes]:
        key = repr((run._spec, more))
        path = folder / hashlib.sha256(key.encode()).hexdigest()
        if run._spec.story and key not in FILMS and path.exists():
            FILMS[key] = pickle.loads(path.read_bytes())
        if not run._spec.story or key in FILMS:
            yield from FILMS.get(key) or film(run, **more)
            return
        chunks: list[bytes] = []
        for chunk in film(run, **more):
            chunks.append(chunk)
            yield chunk
        FILMS[key] = chunks
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(chunks))
        part.replace(path)  # whole, for processes that look for it now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FilmedRun, "film", shared)
        yield
