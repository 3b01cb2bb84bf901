"""Shared fixtures, the marker `slow`, and the environment: one thread, kernels without a GPU."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from headway.model.registry import resolve
from tests.support.interpreter import speed_up

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel; set before torch is imported
if shutil.which("nvidia-smi") is None:  # checked without torch, before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU

# `make test-fast` leaves these out: they load the model, start processes or simulate long runs.
SLOW = (
    "lab/test_fit.py",
    "lab/test_loadgen.py",
    "observe/test_explain.py",
    "observe/test_live.py",
    "observe/test_observe.py",
    "observe/test_prometheus.py",
    "observe/test_spans.py",
    "scheduler/test_fairness.py",
    "model/test_batch_invariance.py",
    "scheduler/test_listings.py",
    "scheduler/test_output_lengths.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.as_posix().endswith(SLOW):
            item.add_marker("slow")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the default model."""
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
