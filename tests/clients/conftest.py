"""The bundled model behind `headway serve`, in a process of its own environment."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = "smollm2-135m"


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A server with a tool format, so that tools are described to the model."""
    python = os.environ.get("HEADWAY_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
    command = [python, "-m", "headway", "serve", NAME, "--port", "0", "--num-blocks", "512"]
    process = subprocess.Popen(
        [
            *command, "--quantization", "int8", "--tool-call-parser", "hermes",
            "--disable-additional-properties",  # litellm drops `strict` and `additionalProperties`
        ],
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        found = re.search(r"at (http://127\.0\.0\.1:\d+)", said)
        assert found, said + process.stderr.read()
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=40)
