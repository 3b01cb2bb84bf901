"""A trial simulates the recent requests of a run before and after a change."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

from headway import Engine, Scheduler, VirtualClock, preset
from headway.engine.loop import EngineLoop
from headway.engine.queries import GetDiagnosis, TrialStart
from headway.errors import ConfigError
from headway.executor.simulated import SimulatedExecutor
from headway.lab.cost import load_profile
from headway.lab.doctor import live as live_doctor
from headway.lab.doctor.live import RecentTrace
from headway.lab.doctor.trial import Recording, try_changes, workload
from headway.lab.simulate import simulate, with_profile
from headway.lab.summary import summarize
from headway.lab.workload.recorded import added_in
from headway.lab.workload.synthetic import parse_synthetic
from headway.observe.server_metrics import ServerMetrics
from headway.record.lines import Line, ends_of, time_of
from headway.record.stats import stats_of

PROFILE = load_profile("llama3.1-8b-a100-80gb")
LONG_PROMPTS = (
    "requests=60,arrivals=poisson(12),prompt=0.9*uniform(50,300)+0.1*fixed(9000),"
    "output=uniform(20,120),max_tokens=200,prefix=1x128@0.5"
)
CONFIG = {"num_blocks": 4000, "max_num_batched_tokens": 16384, "max_model_len": 16384}


class Run:
    """A simulated engine with the doctor of a running one."""

    def __init__(self, **changes: Any) -> None:
        self.clock = VirtualClock()
        config = with_profile(preset("vllm_v1", **{**CONFIG, **changes}), PROFILE)
        executor = SimulatedExecutor(
            self.clock, lambda plan: PROFILE.step_seconds(plan), PROFILE.machine.host_seconds
        )
        self.engine = Engine(Scheduler(config), executor, self.clock)
        self.loop = EngineLoop(self.engine, lambda _: None)
        self.metrics = ServerMetrics(self.loop, "tiny")
        live_doctor.install(self.loop, self.metrics, PROFILE.model)
        self.trace = next(x for x in self.engine.observers if isinstance(x, RecentTrace))

    def serve(self, text: str, start: float = 0.0, until: float | None = None) -> None:
        """Run requests that arrive from `start` on; stop at `until`, or when all have ended."""
        coming = parse_synthetic(text).generate()[::-1]
        while coming or self.engine.has_work:
            if until is not None and self.clock.now() > until:
                return
            while coming and start + coming[-1].arrival <= self.clock.now():
                each = coming.pop()
                id = f"{start}-{each.id}"
                self.engine.add(id, each.prompt(), each.params(start), start + each.arrival)
            if self.engine.has_work:
                self.engine.step()
            else:
                self.clock.advance_to(start + coming[-1].arrival)

    def recording(self) -> Recording:
        started = self.trace.start()
        assert started is not None
        lines, first = list[Line](), started.first
        while first < started.end:
            lines += self.trace.lines(first)
            first += live_doctor.NUM_PER_QUERY
        self.trace.end()
        return Recording(
            header=started.header, lines=lines, before=started.before,
            generated=started.generated, model=PROFILE.model, is_partial=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def whole() -> Run:
    """A run that long prompts stop again and again."""
    run = Run()
    run.serve(LONG_PROMPTS)
    return run


@pytest.fixture(scope="module")
def tried(whole: Run) -> dict[str, Any]:
    return try_changes(whole.recording(), {"chunk": "at_most(512)"})


def test_a_trial_shows_that_chunks_shorten_stalls_and_cost_time_to_first_token(
    tried: dict[str, Any],
) -> None:
    before, after = tried["before"], tried["after"]
    assert after["longest_stall"]["max"] < before["longest_stall"]["max"] / 4
    assert after["ttft_by_prompt"][-1]["p50"] > before["ttft_by_prompt"][-1]["p50"]
    assert tried["requests"] == before["completed"] == after["completed"] == 60


def test_the_doctors_remedy_for_stalls_cures_them_in_a_trial(whole: Run) -> None:
    found = whole.loop.reply(GetDiagnosis()).value
    (stalls,) = [f for f in found["findings"] if "pause" in f["symptom"]]
    slot, _, value = stalls["changes"][0].partition("=")
    assert value == "hold_tbt(0.05)" and value in stalls["remedy"]
    tried = try_changes(whole.recording(), {slot: value})
    assert tried["after"]["longest_stall"]["max"] < 1.05 * 0.05
    assert not any("pause" in finding["symptom"] for finding in tried["findings"])


def test_fitted_costs_simulate_the_recorded_run(tried: dict[str, Any], whole: Run) -> None:
    assert tried["costs"]["source"] == "fitted" and tried["costs"]["median_error"] < 0.02
    for name in ("ttft", "time_between_tokens", "longest_stall", "end_to_end"):
        for mark in ("mean", "p90", "max"):
            real, simulated = tried["measured"][name][mark], tried["before"][name][mark]
            assert simulated == pytest.approx(real, rel=0.02), (name, mark)
    assert all(abs(error) < 0.2 for error in tried["error"].values())
    simulated, real = (tried[run]["cache_hit_ratio"] for run in ("before", "measured"))
    assert simulated == pytest.approx(real, abs=0.03)


def test_recent_lines_give_the_numbers_of_the_whole_run(tried: dict[str, Any]) -> None:
    config = with_profile(preset("vllm_v1", **CONFIG), PROFILE)
    real = summarize(simulate(parse_synthetic(LONG_PROMPTS).generate(), config, PROFILE).metrics)
    for name in ("ttft", "time_between_tokens", "longest_stall", "end_to_end", "queue_time"):
        assert tried["measured"][name] == pytest.approx(real[name]), name
    assert tried["measured"]["output_tokens"] == real["output_tokens"]


def test_a_recording_that_begins_in_the_middle_keeps_the_open_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_doctor, "MAX_LINES", 120)
    run = Run()
    run.serve("requests=30,arrivals=poisson(40),prompt=100,output=uniform(30,90),max_tokens=99",
              until=1.2)  # fmt: skip
    recording = run.recording()
    assert len(recording.lines) == 120 and recording.before
    open_now = set(run.engine.scheduler.requests)
    assert set(recording.generated or ()) == open_now and open_now
    requests, lead = workload(recording)
    num_added = len(list(added_in(recording.lines)))
    assert len(requests) == num_added + len(recording.before) and 0 < lead < 60
    assert requests[0].arrival == 0.0 and all(r.num_output <= 99 for r in requests)
    tried = try_changes(recording, {"max_num_seqs": "4"}, PROFILE.name)
    assert tried["after"]["queue_time"]["p50"] > tried["before"]["queue_time"]["p50"]
    assert tried["measured"]["time_between_tokens"]["max"] < 1.0
    assert tried["costs"]["source"] == "profile" and tried["costs"]["because"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"chunks": "whole"}, "chunk"), ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"max_num_seqs": "0"}, "max_num_seqs"), ({"queue": "nonsense"}, "nonsense"),
    ],
)  # fmt: skip
def test_a_wrong_change_is_refused(whole: Run, changes: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        try_changes(whole.recording(), changes)


def test_without_requests_or_costs_a_trial_says_what_is_missing(whole: Run) -> None:
    with pytest.raises(ConfigError, match="no steps"):
        try_changes(Run().recording(), {"max_num_seqs": "4"})
    steady = Run()
    steady.serve("requests=2,prompt=20,output=50")
    with pytest.raises(ConfigError, match="cannot be fitted.*give a profile"):
        try_changes(steady.recording(), {"max_num_seqs": "4"})


def test_only_one_trial_runs_at_a_time() -> None:
    run = Run()
    assert run.trace.start() is not None and run.trace.start() is None
    run.trace.end()
    assert run.trace.start() is not None
    run.clock.advance_to(live_doctor.TRIAL_SECONDS + 1)
    assert run.trace.start() is not None, "a trial that never ended does not block others"


def test_kept_steps_have_no_token_ids_and_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_doctor, "MAX_SECONDS", 5.0)
    run = Run()
    run.serve("requests=8,prompt=9,output=20")
    run.serve("requests=1,prompt=9,output=300", start=run.clock.now() + 3)
    recording = run.recording()
    assert time_of(recording.lines[-1]) - time_of(recording.lines[0]) <= 5.0
    assert not recording.before or len(recording.before) == 1
    entries = [*added_in(recording.lines), *(entry for entry, _ in recording.before)]
    assert entries and all(entry.prompt == 9 for entry in entries)
    ends = [end for line in recording.lines for end in ends_of(line)]
    assert all(isinstance(end.output, int) for end in ends)


def test_the_doctor_of_an_engine_finds_the_stalls_of_the_last_minute(whole: Run) -> None:
    found = whole.loop.reply(GetDiagnosis()).value
    assert any("pause" in finding["symptom"] for finding in found["findings"])
    vitals, summary = {v["name"]: v for v in found["vitals"]}, found["summary"]
    for name, value in {
        "longest stall, max": summary["time_between_tokens"]["max"],
        "longest stall, p99": summary["longest_stall"]["p99"],
    }.items():
        assert not vitals[name]["is_healthy"], name
        assert vitals[name]["value"] == pytest.approx(value, abs=1e-5), name
    later = Run()
    later.serve("requests=3,prompt=20,output=9")
    later.clock.advance_to(later.clock.now() + 100)
    assert later.loop.reply(GetDiagnosis()).value["findings"] == []
    assert later.loop.reply(GetDiagnosis()).value["summary"]["steps"] == 0


def test_the_last_minute_equals_the_statistics_of_the_run(whole: Run) -> None:
    summary = whole.loop.reply(GetDiagnosis()).value["summary"]
    recording = whole.recording()
    real = summarize(stats_of([recording.header, *recording.lines]))
    for name in ("ttft", "time_between_tokens", "longest_stall", "end_to_end", "swap_in"):
        assert summary[name] == pytest.approx(real[name]), name
    assert summary["completed"] == real["completed"] == 60


def test_the_command_reads_parts_and_prints_json(whole: Run) -> None:
    recording, data = whole.recording(), io.BytesIO()
    start = TrialStart(
        header=recording.header, model=asdict(PROFILE.model), before=[], generated={}, first=0,
        end=len(recording.lines),
    )  # fmt: skip
    asked = {"changes": {"max_num_seqs": "none"}, "profile": None, "niceness": 0}
    for part in ((start, asked), recording.lines[:5], recording.lines[5:], None):
        pickle.dump(part, data)
    command = [sys.executable, "-m", "headway.lab.doctor.trial"]
    done = subprocess.run(command, input=data.getvalue(), capture_output=True, check=True)
    assert "max_num_seqs must be a whole number" in json.loads(done.stdout)["error"]
