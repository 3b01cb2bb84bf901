"""The rooms of the house: who may import whom. DESIGN is the plan; this walks the building."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GRAMMAR = ("grammar", "grammar_checker", "grammar_sandbox", "json_schema")
NOUNS = ("errors", "request", "plan", "config", "slots", *GRAMMAR, "sampling")
# What each part of the package may import of it; a part is the longest prefix that is listed.
MAY_SEE: dict[str, tuple[str, ...]] = {
    "": (*NOUNS, "kv", "scheduler", "executor", "engine", "lab", "llm"),  # the package's exports
    "errors": (),
    "request": ("errors",),
    "slots": ("errors",),
    "grammar": ("errors", *GRAMMAR),
    "grammar_checker": ("errors", "grammar_sandbox"),
    "grammar_sandbox": (),
    "json_schema": (),
    "sampling": ("errors", "grammar"),
    "plan": ("request",),
    "config": ("errors", "request", "plan"),
    "kv": (*NOUNS, "kv"),
    "scheduler": (*NOUNS, "kv", "scheduler"),
    "executor": NOUNS,
    "executor.torch": (*NOUNS, "executor", "model"),
    "model": (*NOUNS, "model"),
    "engine": (*NOUNS, "kv", "scheduler", "executor.base", "engine"),
    "loading": (*NOUNS, "scheduler", "model", "engine"),
    "gatherer": (*NOUNS, "executor", "engine"),
    "llm": (*NOUNS, "scheduler", "executor", "model", "engine", "loading", "gatherer"),
    "lab": (*NOUNS, "kv", "scheduler", "executor.base", "executor.simulated", "engine", "lab"),
    "server": (*NOUNS, "kv", "scheduler", "executor", "model", "engine", "lab", "server"),
    "cli": (
        *NOUNS,
        "kv",
        "scheduler",
        "executor",
        "model",
        "engine",
        "loading",
        "llm",
        "lab",
        "server",
        "cli",
    ),
    "__main__": ("cli",),
}
# Foreign modules, and the only parts that may import them.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "torch": ("executor.torch", "model"),
    "triton": ("executor.torch", "model"),
    "fastapi": ("server",),
    "starlette": ("server",),
    "uvicorn": ("server", "cli"),
    "matplotlib": ("lab.plots",),
    "typer": ("cli",),
    "rich": ("cli",),
}
CLOCKLESS = ("kv", "scheduler", "request", "plan", "config", "errors")
CLOCKS = ("time", "datetime", "random", "asyncio", "threading", "secrets")


def is_within(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def part_of(module: str) -> str:
    """The longest listed part that a module lies in; the package itself is ""."""
    return max((part for part in MAY_SEE if is_within(module, part)), key=len, default="?")


def imports_of(module: str, is_package: bool, source: str) -> Iterator[str]:
    """Full names of all that a module imports, wherever in it; relative ones made absolute."""
    parents = f"headway.{module}".rstrip(".").split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = parents[: len(parents) - node.level + is_package]
                base = ".".join([*kept, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def wrong_arrows(module: str, source: str, is_package: bool = False) -> list[str]:
    """What a module (named without the package) must not import but does."""
    part, wrong = part_of(module), []
    for name in imports_of(module, is_package, source):
        top, _, inner = name.partition(".")
        if top == "headway":
            if inner.split(".")[0] in ("__version__", ""):
                continue
            is_fine = any(is_within(inner, seen) for seen in MAY_SEE.get(part, ()))
        elif top in ONLY_IN:
            is_fine = any(is_within(module, room) for room in ONLY_IN[top])
        else:
            is_fine = not (part in CLOCKLESS and top in CLOCKS)
        if not is_fine:
            wrong.append(f"headway.{module} imports {name}")
    return wrong


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / "headway").rglob("*.py")):
        names = path.relative_to(ROOT / "headway").with_suffix("").parts
        yield ".".join(n for n in names if n != "__init__"), path


def test_no_arrow_points_the_wrong_way() -> None:
    wrong: list[str] = []
    for module, path in modules():
        source = path.read_text(encoding="utf-8")
        wrong += wrong_arrows(module, source, path.name == "__init__.py")
    assert not wrong, "\n".join(wrong)


def test_every_module_lies_in_a_known_room() -> None:
    assert [module for module, _ in modules() if part_of(module) == "?"] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kv.pool", "from headway.scheduler import Scheduler"),
        ("kv.pool", "def f():\n    import time"),
        ("scheduler.step", "from datetime import datetime"),
        ("scheduler.step", "import random"),
        ("scheduler.step", "from headway.observe.trace import runs"),
        ("scheduler.step", "from ..engine import trace"),
        ("scheduler.step", "from .. import engine"),
        ("request", "from headway.plan import Plan"),
        ("plan", "from headway.kv.pool import BlockPool"),
        ("executor.base", "from headway.scheduler import Scheduler"),
        ("executor.simulated", "from headway.engine.clock import VirtualClock"),
        ("engine.engine", "from headway.lab.cost import Profile"),
        ("engine.engine", "from headway.executor.factory import TorchExecutor"),
        ("lab.simulate", "from headway.cli import options"),
        ("lab.simulate", "import headway.cli.main"),
        ("lab.simulate", "import matplotlib.pyplot as plt"),
        ("lab.simulate", "from rich.table import Table"),
        ("engine.engine", "import torch"),
        ("executor.simulated", "import torch.nn"),
        ("cli.serve", "from fastapi import FastAPI"),
    ],
)
def test_the_walk_notices_a_wrong_arrow(module: str, source: str) -> None:
    assert len(wrong_arrows(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kv.pool", "from headway.kv.prefix_index import PrefixIndex\nimport numpy"),
        ("scheduler.step", "from headway.plan import Plan\nfrom . import queues"),
        ("engine.clock", "import time"),
        ("executor.torch.graphs", "import torch\nfrom headway.model import layers"),
        ("model.layers", "import torch"),
        ("lab.plots", "import matplotlib.pyplot"),
        ("lab.plots.lines", "import matplotlib"),
        ("server.app", "import fastapi\nfrom headway.engine.engine import Engine"),
        ("cli.main", "from headway import __version__\nimport typer"),
        ("lab.cost", "from headway.scheduler.policies import cheaper"),
    ],
)
def test_the_walk_lets_right_arrows_pass(module: str, source: str) -> None:
    assert wrong_arrows(module, source) == []


HEAVY = ("torch", "fastapi", "matplotlib", "transformers", "triton")


@pytest.mark.parametrize("module", ["headway", "headway.cli.main", "headway.lab.simulate"])
def test_the_scheduler_and_the_simulator_load_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
