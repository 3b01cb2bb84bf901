"""What several tests share: the bundled model's file, quiet threads, and kernels without a GPU."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.model.names import resolve

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run side by side; set before torch loads
if shutil.which("nvidia-smi") is None:  # known before triton loads, and without loading torch
    os.environ.setdefault("TRITON_INTERPRET", "1")  # its kernels run on the CPU


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The bundled model's GGUF."""
    return resolve("smollm2-135m")


@pytest.fixture
def few_rows_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU hardly notices them; interpreted kernels do."""
    if os.environ.get("TRITON_INTERPRET"):
        monkeypatch.setattr("headway.executor.torch.mixed.LEAST_DECODES", 4)
        monkeypatch.setattr("headway.executor.torch.mixed.LEAST_TOKENS", 8)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Triton's interpreter prepares its language anew for every call of a function in a kernel.

    Once for each function does: what it changed then stays changed. It also looks for overflow in
    every sum and product of integers, by dozens of its own operations, and says nothing if there is
    some: ours takes a few of numpy's, and does.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not os.environ.get("TRITON_INTERPRET"):
        return
    prepare, prepared = interpreter.InterpretedFunction.__call__, set[object]()

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.fn in prepared:
            return self.rewrite()(*args, **options)
        prepared.add(self.fn)
        return prepare(self, *args, **options)

    def check(_self: Any, left: Any, right: Any, operation: Any) -> None:
        kind, name = left.type.scalar, operation.__name__
        if kind.int_bitwidth < 64:
            numbers = (np.asarray(each.handle.data, np.float64) for each in (left, right))
            found = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name](*numbers)
            low, high = kind.get_int_min_value(), kind.get_int_max_value()
            assert low <= found.min() and found.max() <= high, f"{name}: {kind} is too narrow"

    interpreter.InterpretedFunction.__call__ = call
    sys.modules["triton.language.semantic"].TritonSemantic.binary_op_sanitize_overflow_impl = check
