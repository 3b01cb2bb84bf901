"""Soak test: runs the whole suite many times, in random order, with and without load beside it.

Half of the runs share the machine with busy processes, and the number of pytest workers varies. It
lists every test that failed, with the command that repeats its run, and every test that took longer
than half of `tests.support.waiting.LIMIT`: a wait inside such a test may have come near the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.waiting import LIMIT  # noqa: E402

NUM_BUSY = 2  # busy processes beside a loaded run
WORKERS = (3, 3, 1, 3, 2, 2, 4, 3, 3, 3, 3, 2)  # quiet and loaded runs in turn
HEAD = f"{'run':>3} {'seed':>6} {'workers':>7} {'load':>4} {'seconds':>7} {'passed':>6} {'failed':>6} {'skipped':>7} longest test"


@dataclass
class Run:
    """One run of the suite; `exit_status` is pytest's."""

    seed: int
    num_workers: int
    is_loaded: bool
    paths: list[str]  # tests; all if empty
    seconds: float = 0.0
    exit_status: int = -1
    num_passed: int = 0
    num_skipped: int = 0
    failed: list[str] = field(default_factory=list)
    durations: dict[str, float] = field(default_factory=dict)  # seconds, for each test

    @property
    def command(self) -> list[str]:
        options = ["--forks", str(self.num_workers), "--shuffle", str(self.seed)]
        return [sys.executable, "-m", "pytest", *options, "--hypothesis-profile=soak", *self.paths]

    def slow(self) -> dict[str, float]:
        return {name: spent for name, spent in self.durations.items() if spent > LIMIT / 2}

    def read(self, report: Path) -> None:
        """Take the results from a JUnit file."""
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            self.durations[name] = self.durations.get(name, 0.0) + float(case.get("time", 0))
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed.append(name)
            elif case.find("skipped") is not None:
                self.num_skipped += 1
            else:
                self.num_passed += 1

    def row(self, number: int) -> str:
        name, spent = max(self.durations.items(), key=lambda item: item[1], default=("", 0.0))
        load = NUM_BUSY if self.is_loaded else 0
        return (
            f"{number:>3} {self.seed:>6} {self.num_workers:>7} {load:>4} {self.seconds:>7.0f} "
            f"{self.num_passed:>6,} {len(self.failed):>6} {self.num_skipped:>7} {spent:.0f} s {name}"
        )


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def plan(num_runs: int, seed: int, paths: list[str]) -> list[Run]:
    """Quiet and loaded runs in turn, with the worker counts in turn."""
    return [Run(seed + i, WORKERS[i % len(WORKERS)], i % 2 == 1, paths) for i in range(num_runs)]


def execute(run: Run, logs: Path) -> None:
    report, log = logs / f"{run.seed}.xml", logs / f"{run.seed}.log"
    start = time.monotonic()
    with busy_processes(NUM_BUSY if run.is_loaded else 0), log.open("w") as output:
        done = subprocess.run(
            [*run.command, f"--junitxml={report}"], cwd=ROOT, stdout=output, stderr=output
        )
    run.seconds, run.exit_status = time.monotonic() - start, done.returncode
    if report.exists():
        run.read(report)


def print_findings(runs: list[Run], logs: Path) -> None:
    failed = [run for run in runs if run.exit_status]
    for run in failed:
        load = f", {NUM_BUSY} busy processes" if run.is_loaded else ""
        print(f"\nfailed: {' '.join(run.command[1:])}{load}; log: {logs / str(run.seed)}.log")
        for name in run.failed:
            print(f"  {name}")
    slow = [(spent, name, run.seed) for run in runs for name, spent in run.slow().items()]
    if slow:
        print(f"\nlonger than {LIMIT / 2:.0f} s, half of the limit of a wait:")
    for spent, name, seed in sorted(slow, reverse=True):
        print(f"  {spent:.0f} s {name} (seed {seed})")
    num_loaded = sum(run.is_loaded for run in runs)
    print(f"\n{len(runs)} runs, {num_loaded} with load; {len(failed)} failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="files or folders of tests (default: all)")
    parser.add_argument("--runs", type=int, default=12, help="number of runs (default: 12)")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="first seed")
    parser.add_argument("--logs", type=Path, help="folder for output (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON at the end")
    options = parser.parse_args()
    logs = options.logs or Path(tempfile.mkdtemp(prefix="headway-soak-"))
    logs.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PYTEST_ADDOPTS", None)
    runs = plan(options.runs, options.seed, options.paths)
    print(HEAD, flush=True)
    done: list[Run] = []
    try:
        for number, run in enumerate(runs, 1):
            execute(run, logs)
            done.append(run)
            print(run.row(number), flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    print_findings(done, logs)
    if options.json:
        print(json.dumps([asdict(run) | {"durations": run.slow()} for run in done], indent=1))
    return 1 if len(done) < len(runs) or any(run.exit_status for run in done) else 0


if __name__ == "__main__":
    sys.exit(main())
