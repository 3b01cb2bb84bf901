"""Limits of CPU time that hold on slow machines, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headway.executor.sampling import grammar
from headway.grammar import sandbox
from headway.grammar.grammar import CHECKER
from tests.support.grammar_bombs import SLOW, be_patient


@pytest.fixture(scope="package", autouse=True)
def patient_limits() -> Iterator[None]:
    """Tests of a limit start processes of their own, or set it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MAX_COMPILE_SECONDS", "MAX_MASK_SECONDS", "MAX_PROBE_SECONDS"):
            patch.setattr(sandbox, name, getattr(sandbox, name))
        be_patient()
        CHECKER.close()  # its process has the usual limits
        patch.setattr(grammar, "MAX_MASK_SECONDS", SLOW * grammar.MAX_MASK_SECONDS)
        yield
    CHECKER.close()
