"""The shape of the scheduler and what it builds on: no import cycle, short functions, few fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "headway"
PARTS = ("request.py", "plan.py", "config.py", "checks.py", "kv", "scheduler")
MAX_FUNCTION_LINES = 35
MAX_SCHEDULER_ATTRIBUTES = 14
MAX_PLAN_FIELDS = 17


def module_files() -> dict[str, Path]:
    """The modules of PARTS by their full names."""
    files: dict[str, Path] = {}
    for part in PARTS:
        path = PACKAGE / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            names = file.relative_to(PACKAGE.parent).with_suffix("").parts
            files[".".join(name for name in names if name != "__init__")] = file
    return files


FILES = module_files()
TREES = {module: ast.parse(file.read_text(encoding="utf-8")) for module, file in FILES.items()}


def imported(tree: ast.Module) -> Iterator[str]:
    """Full names that a module imports, at its top or in a function. Relative ones are not used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in FILES else node.module


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def class_named(name: str, module: str) -> ast.ClassDef:
    return next(
        node for node in TREES[module].body if isinstance(node, ast.ClassDef) and node.name == name
    )


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that the methods of a class assign on self."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def check_acyclic(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"import cycle: {' -> '.join(error.args[1])}") from None


def test_no_import_cycle_exists() -> None:
    check_acyclic(
        {
            module: {name for name in imported(tree) if name in FILES}
            for module, tree in TREES.items()
        }
    )


def test_an_import_cycle_is_detected() -> None:
    with pytest.raises(AssertionError, match=r"\ba\b.*\bb\b"):
        check_acyclic({"a": {"b"}, "b": {"a"}})


@pytest.mark.parametrize("module", FILES)
def test_every_function_is_short(module: str) -> None:
    lengths = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions(TREES[module])}
    long = {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES}
    assert not long, f"more than {MAX_FUNCTION_LINES} lines: {long}"


def test_the_scheduler_has_few_attributes() -> None:
    found = attributes(class_named("Scheduler", "headway.scheduler.scheduler"))
    assert {"config", "state"} <= found and len(found) <= MAX_SCHEDULER_ATTRIBUTES


def test_a_plan_has_few_fields() -> None:
    body = class_named("Plan", "headway.plan").body
    fields = [node.target for node in body if isinstance(node, ast.AnnAssign)]
    assert 0 < len(fields) <= MAX_PLAN_FIELDS
