"""Evaluations: equal jobs once, a history that survives a kill, and executors that agree."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.errors import ConfigError, FormatError
from headway.lab.cost import load_profile
from headway.lab.planner.evaluate import Evaluator, History, Job, evaluate, queue_growth
from headway.lab.planner.executors import InProcess, OnRay, Processes
from headway.lab.planner.workload import Workload, at_rate, rate_of
from headway.record.timeline import RequestTimeline
from tests.support.waiting import LIMIT

PROFILE = load_profile("llama3.1-8b-a100-80gb")
SMALL = Workload(text="requests=30,arrivals=poisson(40),prompt=uniform(20,90),output=uniform(2,9)")
JOB = Job(profile=PROFILE, workload=SMALL, settings={})
JOBS = [replace(JOB, settings={"max_num_seqs": count}) for count in (2, 4, 8)]


class Counting(InProcess):
    """Counts the jobs that really run."""

    def __init__(self) -> None:
        self.num_run = 0

    def run(self, function: Any, items: Any) -> Any:
        self.num_run += len(items)
        return super().run(function, items)


def test_the_key_follows_everything_that_changes_the_outcome() -> None:
    others = [
        replace(JOB, settings={"max_num_seqs": 7}), replace(JOB, seed=1), replace(JOB, share=0.5),
        replace(JOB, rate=3.0), replace(JOB, profile=replace(PROFILE, kv_tokens=999)),
        replace(JOB, workload=replace(SMALL, speed=2.0)), replace(JOB, async_scheduling=True),
    ]  # fmt: skip
    assert len({JOB.key(), *(job.key() for job in others)}) == 1 + len(others)
    assert replace(JOB, settings={"preset": "headway", "max_num_seqs": 256}).key() == JOB.key()


def test_equal_jobs_run_once_and_cost_once() -> None:
    counting = Counting()
    evaluator = Evaluator(executor=counting)
    first, second = evaluator.run([JOB, replace(JOB, settings={"preset": "headway"})])
    evaluator.run([JOB])
    assert first == second and counting.num_run == 1 and evaluator.cost == 1


def test_a_history_is_used_again_after_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.jsonl"
    fresh = Evaluator(history=History(path)).run(JOBS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:50])  # killed while it wrote
    counting = Counting()
    resumed = Evaluator(executor=counting, history=History(path))
    assert resumed.run(JOBS) == fresh
    assert counting.num_run == 1 and resumed.num_known == 2 and resumed.cost == 3
    assert len(History(path)) == 3


def test_results_of_other_code_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    Evaluator(history=History(path)).run([JOB])
    path.write_text(path.read_text().replace('"code": "', '"code": "0'))
    assert len(History(path)) == 0


def test_a_history_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=tmp_path.name):
        History(tmp_path)


def test_processes_give_the_same_outcomes_in_order() -> None:
    pool = Processes(2)
    try:
        assert Evaluator(executor=pool).run(JOBS) == [evaluate(job) for job in JOBS]
    finally:
        pool.close()


def test_processes_end_in_the_middle_of_an_item() -> None:
    pool = Processes(2)
    results = pool.run(time.sleep, [0, *[10 * LIMIT] * 3])
    assert next(results) == (0, None)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(LIMIT)
    assert not closing.is_alive(), "it waits for the items"
    pool.close()


INTERRUPTED_IMPORT = """
import signal
from headway.lab.planner.executors import Processes

if __name__ == "__main__":
    pool = Processes(2)
    print(sorted(pool.run(abs, [-1, -2])))
    pool.close()
else:
    signal.raise_signal(signal.SIGINT)  # a worker imports this file before it starts
"""


def test_an_interrupt_does_not_reach_workers_that_still_import(tmp_path: Path) -> None:
    path = tmp_path / "interrupted_import.py"
    path.write_text(INTERRUPTED_IMPORT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    result = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=LIMIT, env=environment
    )
    assert (result.stdout, result.stderr) == ("[(0, 1), (1, 2)]\n", "")


class Interrupting:
    """Items; this process is interrupted before each."""

    def __init__(self, items: list[int]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Any:
        for item in self._items:
            signal.raise_signal(signal.SIGINT)
            self.num_sent = item
            yield item


def test_an_interrupt_while_workers_start_is_raised_after_it() -> None:
    pool, items = Processes(2), Interrupting([1, 2, 3])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(pool.run(abs, items))  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, before)
    pool.close()
    assert items.num_sent == 3


def fake_ray() -> Any:
    """As much of Ray's interface as the executor uses; the last task ends first."""
    done: dict[int, Any] = {}

    def remote(function: Any) -> Any:
        def start(item: Any) -> int:
            done[len(done)] = function(item)
            return len(done) - 1

        return SimpleNamespace(remote=start)

    return SimpleNamespace(
        init=lambda **_: None, shutdown=lambda: None, remote=remote, get=done.__getitem__,
        wait=lambda left: (left[-1:], left[:-1]),
    )  # fmt: skip


def test_a_ray_cluster_gives_the_same_outcomes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake_ray())
    assert Evaluator(executor=OnRay()).run(JOBS) == [evaluate(job) for job in JOBS]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"\[ray\]"):
        OnRay()


def test_a_seed_changes_synthetic_lengths_and_rotates_a_file(tmp_path: Path) -> None:
    assert SMALL.requests() == SMALL.requests(0) != SMALL.requests(1)
    path = tmp_path / "trace.csv"
    rows = [f"{0.1 * i:.1f},{20 + i},{3 + i}" for i in range(8)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    recorded = Workload(text=str(path))
    before, after = recorded.requests(), recorded.requests(3)
    assert [r.arrival for r in before] == [r.arrival for r in after]
    lengths = [r.num_output for r in before]
    moved = [r.num_output for r in after]
    at = moved.index(lengths[0])
    assert moved != lengths and moved[at:] + moved[:at] == lengths


def test_arrivals_are_stretched_to_a_rate() -> None:
    requests = at_rate(SMALL.requests(), 5.0)
    assert rate_of(requests) == pytest.approx(5.0)
    with pytest.raises(ConfigError, match="arrivals"):
        at_rate(Workload(text="requests=5").requests(), 1.0)
    with pytest.raises(ConfigError, match="one request"):
        at_rate(Workload(text="requests=1,arrivals=poisson(1)").requests(), 1.0)


@pytest.mark.parametrize(("delay_per_second", "growth"), [(0.0, 0.0), (1.0, 0.5), (0.25, 0.2)])
def test_the_growth_of_the_queue_is_a_share_of_the_arrivals(
    delay_per_second: float, growth: float
) -> None:
    requests = [RequestTimeline(str(i), 0.01 * i, 1) for i in range(1000)]
    for request in requests:
        request.admitted = request.arrival * (1 + delay_per_second)
    assert queue_growth(requests, 9.99) == pytest.approx(growth, abs=0.01)


@pytest.mark.parametrize("end", [1e-320, 1e-200, 1.0, 1e200])
def test_the_growth_of_the_queue_does_not_depend_on_the_unit_of_time(end: float) -> None:
    requests = [RequestTimeline(str(i), end * i / 99, 1) for i in range(100)]
    assert queue_growth(requests, end) == pytest.approx(1.0, abs=0.05), "none is admitted"
    assert queue_growth(requests[:3], end) == 0.0, "too few to be more than chance"
