"""What several tests share: the bundled model's file, quiet threads, and kernels without a GPU."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from headway.model.registry import resolve
from tests.support.interpreter import speed_up

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run side by side; set before torch loads
if shutil.which("nvidia-smi") is None:  # known before triton loads, and without loading torch
    os.environ.setdefault("TRITON_INTERPRET", "1")  # its kernels run on the CPU


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The bundled model's GGUF."""
    return resolve("smollm2-135m")


@pytest.fixture
def small_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad passes less: padding rows are cheap on a GPU but slow in the interpreter."""
    if os.environ.get("TRITON_INTERPRET"):
        monkeypatch.setattr("headway.executor.gpu.mixed_pass.MIN_DECODES", 4)
        monkeypatch.setattr("headway.executor.gpu.mixed_pass.MIN_TOKENS", 8)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Make interpreted kernels faster."""
    if os.environ.get("TRITON_INTERPRET") and "triton.runtime.interpreter" in sys.modules:
        speed_up()
