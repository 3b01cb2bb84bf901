"""Fixtures for groups of processes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from headway.parallel import group as parallel_group
from headway.parallel import ranks, watch
from tests.support.forked_ranks import ForkedRank
from tests.support.waiting import LIMIT


@pytest.fixture(scope="module")
def patient_watch() -> Iterator[None]:
    """No rank of a group counts as stopped or late, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MAX_STOPPED", "MAX_SILENT", "MAX_SILENT_REMOTE", "MAX_LATE"):
            patch.setattr(watch, name, 10 * LIMIT)
        patch.setattr(parallel_group, "TIMEOUT", timedelta(seconds=LIMIT))
        patch.setattr(ranks, "EXPLAIN_SECONDS", LIMIT)
        yield


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks are forks of a process that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "start_rank", ForkedRank)
        yield
