"""What several tests share: the bundled model's file, fetched once, and quiet threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.model.names import resolve

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run side by side; set before torch loads


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The bundled model's GGUF."""
    return resolve("smollm2-135m")
