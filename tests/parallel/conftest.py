"""A fixture for groups of processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headway.parallel import watch
from tests.support.waiting import LIMIT


@pytest.fixture(scope="module")
def patient_watch() -> Iterator[None]:
    """No rank of a group counts as stopped or late, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MAX_STOPPED", "MAX_SILENT", "MAX_LATE"):
            patch.setattr(watch, name, 10 * LIMIT)
        yield
