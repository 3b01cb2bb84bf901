"""Mutation testing: does a test fail when a line of the scheduler is wrong?

Cosmic Ray makes the mutants: one changed operator, number, condition or loop each. One more kind is
added here, a deleted statement. A fixed sample of them is tested, one at a time in each process, in
copies of the repository, so the checkout never changes. A mutant is killed if a test fails, or if the tests need
much more CPU time than without it (an endless loop). `equivalent.toml` lists mutants that change
nothing that a caller can see, with the reason; they do not count.

Each run of the tests is a fork of this process, which has imported pytest and numpy already.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import cosmic_ray.ast
import cosmic_ray.mutating
import cosmic_ray.plugins
import hypothesis.extra.numpy  # noqa: F401  imported once, for all forks
import numpy as np  # noqa: F401
import parso.python.tree as tree
import pytest
import xxhash  # noqa: F401
from cosmic_ray.operators.operator import Operator

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
CONFIG = tomllib.loads(Path(__file__).with_name("mutate.toml").read_text())
COPIED = ("headway", "tests", "docs", "pyproject.toml")
PYTEST_OPTIONS = (
    "-x", "-p", "no:cacheprovider", "--tb=line", "--hypothesis-profile=ci",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",  # hypothesis is imported before the fork
)  # fmt: skip
MAX_GROUP_SECONDS = 3600.0
WAITING = 10  # wall-clock seconds per second of CPU time; a mutant that waits for longer is killed
MAX_MEMORY = 4 << 30  # bytes of address space; a mutant that allocates without end is killed


class DeleteStatement(Operator):  # type: ignore[misc]
    """Replaces a statement with `pass`: a call, or a change of an attribute or an item."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if _is_effect(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return tree.Name("pass", node.start_pos, prefix=node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def _is_effect(node: Any) -> bool:
    """Whether a node is a statement that is there for what it changes."""
    if node.parent is None or node.parent.type != "simple_stmt":
        return False
    if node.type == "expr_stmt":
        targets = getattr(node.children[0], "children", [node.children[0]])
        is_local = all(isinstance(leaf, tree.Name | tree.Operator) for leaf in targets)
        is_augmented = node.children[1].type == "operator" and node.children[1].value != "="
        return node.children[1].type != "annassign" and (is_augmented or not is_local)
    return node.type in ("atom_expr", "power", "del_stmt")


@dataclass(frozen=True)
class Mutant:
    """One change: the occurrence of an operator's pattern in a file."""

    path: str
    operator: str
    occurrence: int
    line: int

    def apply(self, source: str) -> str:
        mutated = cosmic_ray.mutating.mutate_code(source, OPERATORS[self.operator], self.occurrence)
        assert mutated is not None, f"{self} changes nothing"
        return str(mutated)

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator.removeprefix('core/')}"


OPERATORS: dict[str, Any] = {
    name: cosmic_ray.plugins.get_operator(name)()
    for name in (f"core/{name}" for name in CONFIG["operators"])
} | {"DeleteStatement": DeleteStatement()}


def find_mutants() -> list[Mutant]:
    """All mutants, in a fixed order."""
    paths = [p for pattern in CONFIG["files"] for p in sorted(ROOT.glob(pattern))]
    return [m for path in paths for m in _mutants_of(path)]


def _mutants_of(path: Path) -> Iterator[Mutant]:
    module = cosmic_ray.ast.get_ast(path.read_text())
    nodes = list(cosmic_ray.ast.ast_nodes(module))
    name = str(path.relative_to(ROOT))
    for operator_name, operator in OPERATORS.items():
        places = [(node, p) for node in nodes for p in operator.mutation_positions(node)]
        for occurrence, (node, (start, _)) in enumerate(places):
            if _changes_behaviour(node, operator_name):
                yield Mutant(name, operator_name, occurrence, start[0])


def _changes_behaviour(node: Any, operator_name: str) -> bool:
    """False for arguments of decorators (slots=True), and for `*` that is no multiplication."""
    if node.search_ancestor("decorator") is not None:
        return False
    return "Operator_Mul" not in operator_name or node.parent.type == "term"


def changed_lines(before: str, after: str) -> tuple[str, str]:
    """The lines that differ, without indentation, as text."""
    old, new = before.splitlines(), after.splitlines()
    while old and new and old[0] == new[0]:
        old, new = old[1:], new[1:]
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    return _joined(old), _joined(new)


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)


class Outcome(NamedTuple):
    """What became of a mutant: "killed", "survived" or "equivalent"."""

    name: str
    mutant: Mutant
    before: str
    after: str
    seconds: float


class Bench:
    """A copy of the repository in which one file at a time is changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, root / name, ignore=ignored)
            else:
                shutil.copy2(source, root / name)

    def measure(self, groups: list[list[str]]) -> list[float]:
        """Seconds of CPU time that each group of tests needs without a mutant; all must pass."""
        seconds = []
        for tests in groups:
            start = _seconds_of_children()
            if not self._passes(tests, MAX_GROUP_SECONDS, may_cache=True):
                print((self.root / "tests.log").read_text()[-3000:])
                raise SystemExit("the tests fail without a mutant")
            seconds.append(_seconds_of_children() - start)
        return seconds

    def kills(self, mutant: Mutant, groups: list[list[str]], limits: list[float]) -> bool:
        """Whether a group of tests fails with this mutant, or needs more than its limit."""
        path = self.root / mutant.path
        before, times = path.read_text(), path.stat()
        try:
            path.write_text(mutant.apply(before))
            return not all(map(self._passes, groups, limits))
        finally:
            path.write_text(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # cached bytecode stays valid

    def _passes(self, tests: list[str], limit: float, may_cache: bool = False) -> bool:
        child = os.fork()
        if not child:
            _run_tests(self.root, tests, limit, may_cache)
        end = time.monotonic() + WAITING * limit
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return not status
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return False


def _seconds_of_children() -> float:
    """CPU time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run_tests(root: Path, tests: list[str], limit: float, may_cache: bool) -> None:
    """In a child process: run the tests, then exit with their status."""
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        os.chdir(root)
        sys.path[:] = [str(root), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
        sys.dont_write_bytecode = not may_cache  # a mutant's bytecode must not outlive it
        log = os.open(root / "tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = int(pytest.main([*PYTEST_OPTIONS, *tests]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def read_equivalents() -> dict[tuple[str, str, str], str]:
    """Reasons by file, line and changed line."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])
    for entry in entries:
        if not entry["why"].strip():
            raise SystemExit(f"{EQUIVALENT.name}: {entry['line']!r} has no reason")
    return {(e["file"], e["line"], e["mutant"]): e["why"] for e in entries}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, default=200, help="Number of mutants to test.")
    parser.add_argument("--all", action="store_true", help="Test all mutants.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the sample.")
    parser.add_argument("--only", default="", help="Test only mutants whose name contains this.")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="Number of mutants tested at a time."
    )
    parser.add_argument("--groups", type=int, help="Run only the first N groups of tests.")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    mutants = [mutant for mutant in find_mutants() if arguments.only in str(mutant)]
    print(f"{len(mutants)} mutants in {len({mutant.path for mutant in mutants})} files")
    random.Random(arguments.seed).shuffle(mutants)  # a larger sample contains the smaller ones
    mutants = mutants if arguments.all else mutants[: arguments.sample]
    groups = [group["run"] for group in CONFIG["tests"]][: arguments.groups]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        seconds = Bench(Path(folder) / "unchanged").measure(groups)
        print(f"without a mutant the tests need {sum(seconds):.0f} s of CPU time", flush=True)
        limits = [3 * each + 20 for each in seconds]
        with get_context("fork").Pool(arguments.jobs) as pool:
            trial = partial(try_one, root=Path(folder), groups=groups, limits=limits)
            outcomes = list(printed(pool.imap_unordered(trial, mutants), len(mutants)))
    return summarize(outcomes, time.monotonic() - start)


def try_one(mutant: Mutant, root: Path, groups: list[list[str]], limits: list[float]) -> Outcome:
    """Test one mutant in this process's own copy of the repository."""
    bench, start = bench_of_process(root), time.monotonic()
    source = (bench.root / mutant.path).read_text()
    before, after = changed_lines(source, mutant.apply(source))
    first = CONFIG["first"].get(mutant.path)
    if (mutant.path, before, after) in read_equivalents():
        name = "equivalent"
    elif first and bench.kills(mutant, [first], [max(limits)]):
        name = "killed"
    else:
        name = "killed" if bench.kills(mutant, groups, limits) else "survived"
    return Outcome(name, mutant, before, after, time.monotonic() - start)


@cache
def bench_of_process(root: Path) -> Bench:
    return Bench(root / str(os.getpid()))


def printed(outcomes: Iterator[Outcome], total: int) -> Iterator[Outcome]:
    """Print each outcome when it is known."""
    for number, outcome in enumerate(outcomes, 1):
        print(f"{number}/{total} {outcome.name} {outcome.mutant} ({outcome.seconds:.1f} s)")
        if outcome.name == "survived":
            print(f"    - {outcome.before}\n    + {outcome.after}")
        sys.stdout.flush()
        yield outcome


def summarize(outcomes: list[Outcome], seconds: float) -> int:
    """Print the survivors and the score; 1 if it is below the minimum."""
    for outcome in (o for o in outcomes if o.name == "survived"):
        print(f"\nsurvived: {outcome.mutant}\n- {outcome.before}\n+ {outcome.after}")
    count = Counter(outcome.name for outcome in outcomes)
    num_tested = count["killed"] + count["survived"]
    score = 100 * count["killed"] / max(1, num_tested)
    print(
        f"\n{count['killed']} of {num_tested} mutants killed: {score:.1f} % "
        f"(at least {CONFIG['min_score']} %); {count['survived']} survived, "
        f"{count['equivalent']} equivalent, {seconds / 60:.0f} minutes"
    )
    return int(score < CONFIG["min_score"])


if __name__ == "__main__":
    sys.exit(main())
