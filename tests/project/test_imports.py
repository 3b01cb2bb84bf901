"""The rooms of the house: who may import whom. DESIGN is the plan; this walks the building."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The words of a request and a plan, which every other part may use.
TYPES = ("errors", "request", "plan", "config", "grammar", "sampling_params")
# What each part of the package may import of it; a part is the longest prefix that is listed.
MAY_SEE: dict[str, tuple[str, ...]] = {
    "": (*TYPES, "kv", "scheduler", "executor", "engine", "observe", "lab", "llm"),  # the exports
    "errors": (),
    "request": ("errors",),
    "grammar": ("errors", "grammar"),
    "grammar.sandbox": (),
    "sampling_params": ("errors", "grammar"),
    "plan": ("request",),
    "config": ("errors", "request", "plan"),
    "kv": (*TYPES, "kv"),
    "scheduler": (*TYPES, "kv", "scheduler"),
    "text": (*TYPES, "text"),
    "model": (*TYPES, "model"),
    "executor": (*TYPES, "executor", "model"),
    "executor.base": TYPES,
    "executor.simulated": TYPES,
    "observe": (*TYPES, "kv", "scheduler", "executor.base", "engine", "observe"),
    "observe.explain": (*TYPES, "scheduler"),
    "observe.trace": (*TYPES, "scheduler", "observe"),
    "engine": (*TYPES, "kv", "scheduler", "executor.base", "text", "observe", "engine"),
    "loading": (*TYPES, "scheduler", "model", "text", "engine"),
    "llm": (
        *TYPES, "scheduler", "executor", "model", "text", "engine", "observe", "loading",
    ),
    "lab": (
        *TYPES, "kv", "scheduler", "executor.base", "executor.simulated", "engine", "observe", "lab",
    ),
    "server": (
        *TYPES, "kv", "scheduler", "executor", "model", "text", "engine", "observe", "lab", "server",
    ),
    "cli": (
        *TYPES, "kv", "scheduler", "executor", "model", "text", "engine", "observe", "loading", "llm",
        "lab", "server", "cli",
    ),
    "__main__": ("cli",),
}  # fmt: skip
TORCH = (
    "executor.cpu", "executor.row_table", "executor.pooling", "executor.extra", "executor.factory",
    "executor.gpu", "executor.sampling", "model",
)  # fmt: skip
# Other packages' modules, and the only parts that may import them.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "torch": TORCH,
    "triton": TORCH,
    "fastapi": ("server",),
    "starlette": ("server",),
    "uvicorn": ("server", "cli"),
    "matplotlib": ("lab.plots",),
    "typer": ("cli",),
    "rich": ("cli", "llm"),
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
        ("executor.gpu.graphs", "import torch\nfrom headway.model import layers"),
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
