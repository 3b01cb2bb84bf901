"""Films of stories that several modules need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headway.lab.film.run import FilmedRun

FILMS: dict[str, list[bytes]] = {}  # by the description of the run


@pytest.fixture(scope="module")
def shared_films() -> Iterator[None]:
    """Run every story once per process; later its film is read from memory."""
    film = FilmedRun.film

    def shared(run: FilmedRun, **more: Any) -> Iterator[bytes]:
        key = repr((run._spec, more))
        if not run._spec.story or key in FILMS:
            yield from FILMS.get(key) or film(run, **more)
            return
        chunks: list[bytes] = []
        for chunk in film(run, **more):
            chunks.append(chunk)
            yield chunk
        FILMS[key] = chunks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FilmedRun, "film", shared)
        yield
