"""The native kernels are there wherever they can be: other tests skip only where they cannot."""

from __future__ import annotations

import shutil

import pytest

from headway.model.precision import why_not_native


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_where_there_is_a_compiler_there_are_kernels() -> None:
    assert why_not_native() is None
