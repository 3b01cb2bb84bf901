"""OpenAI's JavaScript SDK against a running server. Needs node, npm and, once, a network."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Server
from tests.support.served import MODEL
from tests.support.wire.server import saying

HERE = Path(__file__).parent
PLAIN = "grüße 世界 🙂"
ARGUMENTS = {"place": "Paris", "note": "a </tool_call> b"}
CALL = json.dumps({"name": "weather", "arguments": ARGUMENTS})


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    """A folder with the SDK as the lock pins it; kept in pytest's cache."""
    assert shutil.which("npm"), "npm is not installed"
    assert pytestconfig.cache is not None
    place = Path(pytestconfig.cache.mkdir("node_clients"))
    lock = (HERE / "package-lock.json").read_text()
    done = place / "installed.json"
    if not done.exists() or done.read_text() != lock:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, place)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(command, cwd=place, check=True, timeout=300)
        done.write_text(lock)
    return place


@pytest.fixture(scope="module")
def said(folder: Path) -> Any:
    """What the SDK made of a server's answers."""
    shutil.copy(HERE / "openai_node.mjs", folder)  # it imports from node_modules beside it
    call = f"<tool_call>\n{CALL}\n</tool_call>"
    with Server(factory="tests.support.wire.server:wire_factory") as server:
        prompts = [saying(PLAIN), saying(call)]
        command = ["node", "openai_node.mjs", f"{server.url}v1", *prompts]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_chats_completions_and_models(said: Any) -> None:
    assert said["chat"] == said["completion"] == PLAIN
    assert said["models"] == [MODEL]


def test_streams(said: Any) -> None:
    assert said["streamed"] == PLAIN and said["usage"] == len(PLAIN.encode()) + 1


@pytest.mark.parametrize(
    ("call", "reason"), [("called", "calledReason"), ("streamedCall", "streamedReason")]
)
def test_tool_calls(said: Any, call: str, reason: str) -> None:
    assert said[call]["name"] == "weather" and said[reason] == "tool_calls"
    assert json.loads(said[call]["arguments"]) == ARGUMENTS


def test_errors(said: Any) -> None:
    assert said["wrong"] == {"status": 400, "param": "temperature", "kind": "BadRequestError"}
