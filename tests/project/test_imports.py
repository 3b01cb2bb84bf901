"""The import rules: which part of the package may import which, and where heavy packages belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import SLOW

ROOT = Path(__file__).parents[2]
# Data types, which every other part may use.
TYPES = (
    "errors", "checks", "request", "plan", "step_cost", "config", "events", "grammar",
    "sampling_params",
)  # fmt: skip
# The parts that each part may import. A module belongs to the longest prefix listed here.
MAY_SEE: dict[str, tuple[str, ...]] = {
    "": (*TYPES, "kv", "scheduler", "executor", "engine", "observe", "lab", "llm", "record"),  # the exports
    "errors": (),
    "checks": ("errors",),
    "version": (),
    "request": ("errors", "checks"),
    "grammar": ("errors", "grammar"),
    "grammar.sandbox": (),
    "sampling_params": ("errors", "checks", "grammar", "request"),
    "plan": ("request",),
    "config": ("errors", "checks", "request", "plan", "step_cost"),
    "events": ("request", "plan", "config"),
    "record": (*TYPES, "scheduler", "record"),
    "step_cost": ("plan",),
    "drafters": ("errors", "checks", "request", "plan", "drafters"),
    "kv": (*TYPES, "kv"),
    "scheduler": (*TYPES, "drafters", "kv", "scheduler"),
    "scheduler.policies": (*TYPES, "drafters", "scheduler.policies"),  # no mechanism
    "text": (*TYPES, "text"),
    "model": (*TYPES, "model"),
    "executor": (*TYPES, "executor", "model"),
    "executor.base": TYPES,
    "executor.simulated": TYPES,
    "observe": (*TYPES, "kv", "scheduler", "executor.base", "engine", "observe", "record"),
    "engine": (*TYPES, "kv", "scheduler", "executor.base", "text", "engine", "record"),
    "parallel": (*TYPES, "executor", "model", "parallel", "remote.tls"),
    "options": ("errors", "checks", "parallel.progress", "scheduler.policies"),
    "draft_loading": (*TYPES, "drafters", "scheduler", "model", "options"),
    "loading": (*TYPES, "draft_loading", "kv", "scheduler", "model", "text", "engine", "parallel", "options"),
    "engine_setup": (
        *TYPES, "scheduler", "executor", "engine", "record", "loading", "parallel", "options",
    ),
    "llm": (
        *TYPES, "executor.factory", "text", "engine", "loading", "engine_setup", "options",
        "parallel.launch",
    ),
    "remote": (*TYPES, "executor.simulated", "engine", "remote"),
    "remote.tls": ("errors",),
    "fleet": (*TYPES, "kv", "scheduler", "engine", "remote", "fleet"),
    "fleet.routing": (*TYPES, "scheduler"),
    "fleet.prefixes": (*TYPES, "kv", "fleet.prefixes"),
    "fleet.prefixes.key_table": TYPES,
    "fleet.router": (*TYPES, "fleet.routing", "fleet.prefixes"),
    "lab": (
        *TYPES, "drafters", "kv", "scheduler", "executor.base", "executor.simulated", "engine", "observe",
        "fleet.routing", "fleet.router", "fleet.prefixes", "lab", "record",
    ),
    "lab.real": (
        *TYPES, "engine", "scheduler", "executor", "record", "lab", "llm", "model.config",
    ),
    "on_ray": (*TYPES, "engine", "remote", "fleet", "server", "on_ray"),
    "on_ray.ranks": ("parallel.launch", "on_ray.options"),
    "server": (
        *TYPES, "kv", "scheduler", "executor", "model", "text", "engine", "remote", "observe",
        "record", "lab", "server",
    ),
    "server.serving": (
        *TYPES, "model.devices", "model.precision", "engine", "observe", "options", "llm", "lab",
        "server",
    ),
    "cli": (
        *TYPES, "kv", "scheduler", "executor", "model", "text", "engine", "observe", "record",
        "loading", "llm", "fleet", "on_ray", "lab", "server", "cli", "options", "version",
    ),
    "__main__": ("cli",),
}  # fmt: skip
TORCH = (
    "executor.cpu", "executor.draft_model", "executor.kv_blocks", "executor.row_table", "executor.pooling",
    "executor.factory", "executor.gpu", "executor.sampling", "model", "parallel.group",
    "parallel.link", "parallel.ranks",
)  # fmt: skip
# Packages, and the only parts that may import them.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "torch": TORCH,
    "triton": TORCH,
    "fastapi": ("server",),
    "starlette": ("server",),
    "ray": (
        "on_ray.serve",
        "on_ray.cluster",
        "on_ray.directory",
        "on_ray.keeper",
        "on_ray.private",
        "on_ray.ranks",
        "lab.planner",
    ),
    "uvicorn": ("server", "cli"),
    "matplotlib": ("lab.plots",),
    "typer": ("cli",),
    "rich": ("cli", "engine.progress_bar"),
}
CLOCKLESS = ("kv", "scheduler", "request", "plan", "step_cost", "config", "errors")
CLOCKS = ("time", "datetime", "random", "asyncio", "threading", "secrets")


def is_within(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def part_of(module: str) -> str:
    """The longest listed prefix of a module; "" for the package itself, "?" if none is listed."""
    return max((part for part in MAY_SEE if is_within(module, part)), key=len, default="?")


def statements(block: list[ast.AST], is_typing: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All statements of a block, at any depth, and whether only type checkers see them.

    Expressions, which most nodes are, have no import.
    """
    for statement in block:
        yield statement, is_typing
        test = getattr(statement, "test", None)
        is_check = isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            hidden = is_typing or (is_check and name == "body")
            yield from statements(getattr(statement, name, []), hidden)


@cache
def import_statements(source: str) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """The imports of a source, which several tests read, and whether only type checkers see them."""
    kinds = (ast.Import, ast.ImportFrom)
    return [(s, hidden) for s, hidden in statements([ast.parse(source)]) if isinstance(s, kinds)]


def imports_of(
    module: str, is_package: bool, source: str, *, is_typing: bool = True
) -> Iterator[str]:
    """Absolute names of all imports of a module, at any depth of its code."""
    parents = f"headway.{module}".rstrip(".").split(".")
    for node, is_hidden in import_statements(source):
        if is_hidden and not is_typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = node.module or ""
            if node.level:
                kept = parents[: len(parents) - node.level + is_package]
                base = ".".join([*kept, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def wrong_imports(module: str, source: str, is_package: bool = False) -> list[str]:
    """Imports of a module (named without the package) that the rules forbid."""
    part, wrong = part_of(module), []
    for name in imports_of(module, is_package, source):
        top, _, inner = name.partition(".")
        if top == "headway":
            if inner.split(".")[0] in ("__version__", ""):
                continue
            is_fine = any(is_within(inner, seen) for seen in MAY_SEE.get(part, ()))
        elif top in ONLY_IN:
            is_fine = any(is_within(module, allowed) for allowed in ONLY_IN[top])
        else:
            is_fine = not (part in CLOCKLESS and top in CLOCKS)
        if not is_fine:
            wrong.append(f"headway.{module} imports {name}")
    return wrong


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / "headway").rglob("*.py")):
        names = path.relative_to(ROOT / "headway").with_suffix("").parts
        yield ".".join(n for n in names if n != "__init__"), path


def graph(node_of: Callable[[str], str], *, is_typing: bool = True) -> dict[str, set[str]]:
    """What each file or package imports, at any depth; the exports of `headway` are left out."""
    files = dict(modules())
    edges: dict[str, set[str]] = {}
    for module, path in files.items():
        source, is_package = path.read_text(encoding="utf-8"), path.name == "__init__.py"
        for name in imports_of(module, is_package, source, is_typing=is_typing):
            _, _, inner = name.partition("headway.")
            while inner and inner not in files:
                inner = inner.rpartition(".")[0]
            if module and inner and node_of(module) != node_of(inner):
                edges.setdefault(node_of(module), set()).add(node_of(inner))
    return edges


def circles(edges: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of nodes that reach each other."""
    reached = {node: reachable(node, edges) for node in edges}
    return sorted(
        {
            tuple(sorted(other for other in found if node in reached.get(other, ())))
            for node, found in reached.items()
            if node in found
        }
    )


def reachable(node: str, edges: dict[str, set[str]]) -> set[str]:
    found, left = set[str](), [node]
    while left:
        new = edges.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def test_no_import_breaks_the_rules() -> None:
    wrong: list[str] = []
    for module, path in modules():
        source = path.read_text(encoding="utf-8")
        wrong += wrong_imports(module, source, path.name == "__init__.py")
    assert not wrong, "\n".join(wrong)


def test_no_packages_import_each_other_in_a_circle() -> None:
    assert circles(graph(lambda module: module.split(".")[0])) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(graph(lambda module: module, is_typing=False)) == []


def test_a_circle_is_found() -> None:
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set[str](), "e": {"d"}}
    assert circles(edges) == [("a", "b", "c")]


def test_every_module_belongs_to_a_listed_part() -> None:
    assert [module for module, _ in modules() if part_of(module) == "?"] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kv.pool", "from headway.scheduler import Scheduler"),
        ("kv.pool", "def f():\n    import time"),
        ("scheduler.policies.queue", "from headway.scheduler.queue import WaitingQueue"),
        ("scheduler.step", "from datetime import datetime"),
        ("scheduler.step", "import random"),
        ("scheduler.step", "from headway.record.replay import Replay"),
        ("scheduler.step", "from ..engine import trace"),
        ("scheduler.step", "from .. import engine"),
        ("request", "from headway.plan import Plan"),
        ("plan", "from headway.kv.pool import BlockPool"),
        ("executor.base", "from headway.scheduler import Scheduler"),
        ("executor.simulated", "from headway.engine.clock import VirtualClock"),
        ("engine.engine", "from headway.lab.cost import Profile"),
        ("engine.engine", "from headway.executor.factory import CpuExecutor"),
        ("lab.simulate", "from headway.cli import options"),
        ("lab.simulate", "import headway.cli.main"),
        ("lab.simulate", "import matplotlib.pyplot as plt"),
        ("lab.simulate", "from rich.table import Table"),
        ("engine.engine", "import torch"),
        ("executor.simulated", "import torch.nn"),
        ("cli.serve", "from fastapi import FastAPI"),
        ("kv.pool", "if 1:\n    pass\nelse:\n    import time"),
        ("kv.pool", "try:\n    pass\nexcept KeyError:\n    import time"),
        ("kv.pool", "try:\n    pass\nfinally:\n    import time"),
        ("kv.pool", "class C:\n    async def f():\n        with a:\n            import time"),
        ("kv.pool", "match a:\n    case 1:\n        for _ in a:\n            import time"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(wrong_imports(module, source)) == 1


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
        ("lab.cost", "from headway.scheduler.policies.swap import swap_if_cheaper"),
    ],
)
def test_allowed_imports_pass(module: str, source: str) -> None:
    assert wrong_imports(module, source) == []


HEAVY = ("torch", "fastapi", "matplotlib", "transformers", "triton")


def test_the_scheduler_the_simulator_and_all_commands_import_no_heavy_package() -> None:
    code = (
        "import importlib, sys\n"
        "for module in ('headway', 'headway.lab.simulate', 'headway.cli.main'):\n"
        "    importlib.import_module(module)\n"
        f"    print(module, [m for m in {HEAVY!r} if m in sys.modules])\n"
        "from headway.cli.main import COMMANDS, load_command\n"
        "print([m for m in sys.modules if m.startswith('headway.cli.commands')])\n"
        "print(len([load_command(name) for name in COMMANDS]) >= 20)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "headway []", "headway.lab.simulate []", "headway.cli.main []",
        "[]", "True", "[]",  # a command is imported when it is used, also without heavy packages
    ]  # fmt: skip


def test_the_tests_of_the_scheduler_need_no_heavy_package() -> None:
    """`make mutate` has none, and `make test-fast` would wait for it."""
    code = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r})); import tests.conftest"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_slow_test_files_exist() -> None:
    """`make test-fast` leaves out files by name; a file that moves must not become fast unseen."""
    assert [name for name in SLOW if not (ROOT / "tests" / name).exists()] == []
