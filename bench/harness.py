"""What the benchmarks share: options, parts, repetition, and the report as one JSON object.

A benchmark is a module with a `Bench`, run with `python -m`. Progress goes to stderr.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ROOT / "bench" / "shapes"
Figures = dict[str, Any]
Part = Callable[[Namespace], Any]  # figures
T = TypeVar("T")


class Bench:
    """The options and parts of a benchmark; `main` runs the parts and reports their figures.

    The report has the command, the commit and the machine, then the figures of each part under its
    name. A part that fails has `skipped` with the reason, and the others still run. The exit status
    is 1 if a part has failed or its figures have a false `ok`. --out writes the report after each part.
    """

    def __init__(self, doc: str | None) -> None:
        self.parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
        self.option = self.parser.add_argument
        self.parts: dict[str, Part] = {}
        self.on_demand: set[str] = set()  # parts that run only if --only names them
        self.report: Figures = {}
        self._out: Path | None = None

    def part(self, work: Part) -> Part:
        """Add a function as the part of its name."""
        self.parts[work.__name__] = work
        return work

    def main(self, whole: Part | None = None, start: Part = lambda _: {}) -> None:
        """Run the chosen parts, or `whole`, whose figures have no name; `start` is run before."""
        self.option("--out", type=Path, help="also write the JSON here")
        if self.parts:
            self.option(
                "--only", nargs="+", action="extend", choices=list(self.parts), metavar="PART",
                help=f"of {', '.join(self.parts)}",
            )  # fmt: skip
        asked = self.parser.parse_args()
        self._out = asked.out
        self.report |= about() | start(asked)
        if whole is not None:
            self.report |= whole(asked)
        only = getattr(asked, "only", None) or [n for n in self.parts if n not in self.on_demand]
        for name in [name for name in self.parts if name in only]:
            begun = perf_counter()
            found = attempt(self.parts[name], asked)
            self.report[name] = found | {"ok": False} if "skipped" in found else found
            self.report.setdefault("took_seconds", {})[name] = round(perf_counter() - begun, 1)
            self.save()
        self.save()
        print(json.dumps(self.report, indent=2))
        if not all(is_ok(each) for each in (self.report, *self.report.values())):
            sys.exit(1)

    def save(self) -> None:
        """Write the report so far, if --out is given."""
        if self._out:
            self._out.write_text(json.dumps(self.report, indent=2) + "\n", encoding="utf-8")


def attempt(work: Callable[..., Figures], *arguments: Any) -> Figures:
    """The figures; {"skipped": reason} if the function fails."""
    try:
        return work(*arguments)
    except Exception as error:
        log(f"skipped: {type(error).__name__}: {error}")
        return {"skipped": f"{type(error).__name__}: {error}"}


def is_ok(figures: Any) -> bool:
    return not isinstance(figures, dict) or figures.get("ok", True)


def about() -> Figures:
    """The command, the commit and the machine."""
    module = Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("").parts
    report: Figures = {
        "command": shlex.join(["python", "-m", ".".join(module), *sys.argv[1:]]),
        "commit": printed("git", "describe", "--always", "--dirty"),
        "machine": f"{cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    report |= {name: sys.modules[name].__version__ for name in ("torch", "triton")
               if name in sys.modules}  # fmt: skip
    # Not asked of torch, which would start CUDA in this process.
    gpu = printed("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").partition("\n")[0]
    return report | ({"gpu": gpu} if gpu else {})


def printed(*command: str) -> str:
    """The output of a program; nothing if it is not installed."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def log(text: object) -> None:
    print(text, file=sys.stderr, flush=True)


def medians(found: list[Figures]) -> Figures:
    """The median of each value, also of nested ones."""
    return {
        name: medians([each[name] for each in found]) if isinstance(value, dict)
        else statistics.median(each[name] for each in found)
        for name, value in found[0].items()
    }  # fmt: skip


def percentile(values: Iterable[float], share: float) -> float:
    """The value above this share of all; the maximum for 1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def in_new_process(work: Callable[..., T], *arguments: Any, **variables: str) -> T:
    """Call a function in a process of its own with these environment variables; raises its error."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(work, *arguments).result()
    finally:
        os.environ.clear()
        os.environ.update(before)
