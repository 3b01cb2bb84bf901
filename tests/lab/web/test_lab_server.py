"""The lab's server: recordings of described and recorded runs, errors as sentences, no foreign pages."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from headway.lab.cost import load_profile
from headway.lab.recording.fork import fork
from headway.lab.recording.reader import RunRecording
from headway.lab.recording.run import recording_of_journal, recording_of_replay
from headway.lab.recording.spec import read_spec
from headway.lab.simulate import SimulatedEngine, simulate, with_profile
from headway.lab.web.app import ROUTES, LabApp
from headway.lab.web.server import LabServer
from headway.lab.workload.synthetic import parse_synthetic
from headway.plan import Plan
from headway.record.reader import parse_journal
from headway.scheduler import preset
from tests.support.journals import Lines, Recorder
from tests.support.waiting import LIMIT

WORKLOAD = "requests=12,prompt=uniform(20,60),output=uniform(8,30)"
SPEC = {"workload": WORKLOAD, "preset": "vllm_v1", "set": {"num_blocks": 24}}


PROFILE = load_profile("llama3.1-8b-a100-80gb")
CONFIG = with_profile(preset("vllm_v1", num_blocks=24), PROFILE)


def record(**options: Any) -> Lines:
    lines = Lines()
    simulate(parse_synthetic(WORKLOAD).generate(), CONFIG, PROFILE, trace=lines, **options)
    return lines


@pytest.fixture(scope="module")
def trace() -> Lines:
    return record()


@pytest.fixture(scope="module")
def running(trace: Lines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    path = tmp_path_factory.mktemp("lab") / "run.trace.jsonl"
    path.write_bytes(b"".join(trace))
    server = LabServer(LabApp(traces={"run": path}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def server(running: LabServer, monkeypatch: pytest.MonkeyPatch) -> LabServer:
    """The lab with its recorded run, without what other tests upload."""
    monkeypatch.setattr(running.app, "traces", dict(running.app.traces))
    return running


def ask(
    server: LabServer,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=LIMIT)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data if body is not None else None, headers or {})
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def recording_of(data: bytes) -> RunRecording:
    recording = RunRecording()
    assert recording.read(data) == len(data) and recording.end is not None
    return recording


def error_of(found: tuple[int, bytes], status: int = 400) -> str:
    assert found[0] == status
    return str(json.loads(found[1])["error"])


def test_the_catalog_has_all_that_can_be_chosen(server: LabServer) -> None:
    status, data = ask(server, "GET", "/api/catalog")
    catalog = json.loads(data)
    assert status == 200 and catalog["mode"] == "lab"
    assert catalog["presets"]["vllm_v1"]["victim"] == "newest"
    values = [each["value"] for each in catalog["slots"]["victim"]["values"]]
    assert "least_work" in values and catalog["numbers"]["num_blocks"]["low"] == 1
    assert [each["name"] for each in catalog["traces"]] == ["run"]


def test_the_page_starts_with_the_run_of_the_command_line() -> None:
    app = LabApp(default=SPEC)
    (data,) = app.handle("GET", "/api/catalog", {}, b"").body
    assert json.loads(data)["default"] == SPEC


def test_a_described_run_is_recorded(server: LabServer) -> None:
    status, data = ask(server, "POST", "/api/recording", SPEC)
    recording = recording_of(data)
    assert status == 200 and recording.end is not None
    assert recording.end["summary"]["completed"] == 12 and not recording.end["error"]
    assert recording.header["config"]["num_blocks"] == 24 and recording.header["has_blocks"]


def test_edits_change_the_future_only(server: LabServer) -> None:
    plain = recording_of(ask(server, "POST", "/api/recording", SPEC)[1])
    edits = [
        {"step": 5, "add": {"id": "new", "prompt": 30, "output": 4}}, {"step": 7, "abort": "3"},
        {"step": 9, "set": {"victim": "least_work", "queue": "shortest_first"}},
    ]  # fmt: skip
    edited = recording_of(ask(server, "POST", "/api/recording", {**SPEC, "edits": edits})[1])
    for frame in range(5):
        assert plain.ops(frame) == edited.ops(frame)
    ids = [request[0] for request in edited.requests]
    assert "new" in ids and len(ids) == 13
    assert edited.end and edited.end["summary"]["finish_reasons"]["abort"] == 1


@pytest.mark.parametrize("way", ["opened", "uploaded"])
def test_a_recorded_run_shows_the_states_of_the_run_itself(
    server: LabServer, trace: Lines, way: str
) -> None:
    if way == "opened":
        status, data = ask(server, "POST", "/api/recording", {"trace": "run"})
    else:
        status, data = ask(server, "POST", "/api/trace?name=run", b"".join(trace))
    recording, run = (
        recording_of(data),
        recording_of(ask(server, "POST", "/api/recording", SPEC)[1]),
    )
    assert status == 200 and recording.num_frames == run.num_frames
    assert all(recording.ops(frame) == run.ops(frame) for frame in range(recording.num_frames))


def test_every_uploaded_run_keeps_its_own_trace(server: LabServer, trace: Lines) -> None:
    """Also after another run with the same name was uploaded."""
    shorter = trace[: len(trace) // 2]
    for name, lines in (("a", shorter), ("a", trace), ("b", shorter)):
        assert ask(server, "POST", f"/api/trace?name={name}", b"".join(lines))[0] == 200
    a, b = (
        recording_of(ask(server, "POST", "/api/recording", {"trace": name})[1]) for name in "ab"
    )
    assert a.num_frames > b.num_frames > 1


def test_a_recorded_run_can_have_another_future(server: LabServer) -> None:
    plain = recording_of(ask(server, "POST", "/api/recording", {"trace": "run"})[1])
    edits = [{"step": 9, "set": {"victim": "least_work"}}, {"step": 9, "abort": "2"},
             {"step": 14, "add": {"id": "new", "prompt": 30, "output": 4}}]  # fmt: skip
    forked = recording_of(
        ask(server, "POST", "/api/recording", {"trace": "run", "edits": edits})[1]
    )
    assert forked.end and not forked.end["error"] and forked.header["source"] == "fork"
    assert all(plain.ops(frame) == forked.ops(frame) for frame in range(9))
    reasons = forked.end["summary"]["finish_reasons"]
    assert reasons == {"abort": 1, "length": 12}


@pytest.mark.parametrize("is_async", [False, True])
def test_without_a_change_that_matters_the_future_is_the_recorded_one(is_async: bool) -> None:
    """But for its times."""
    journal = record(async_scheduling=is_async).read()
    plain = recording_of(b"".join(recording_of_replay(journal)))
    for step in (0, 1, 9, 30):
        edits = [{"step": step, "set": {"victim": "newest"}}]
        again = recording_of(b"".join(fork(journal, read_spec({"trace": "t", "edits": edits}))))
        assert again.num_frames == plain.num_frames
        assert all(plain.ops(frame) == again.ops(frame) for frame in range(plain.num_frames)), step


def test_a_redacted_trace_is_shown_from_its_lines_and_cannot_be_edited(
    server: LabServer, trace: Lines, tmp_path: Path
) -> None:
    text = b"".join(record(trace_blocks=True, trace_redact=True))
    assert b"[[1048" not in text and b"[[1048" in b"".join(trace)
    recording = recording_of(ask(server, "POST", "/api/trace", text)[1])
    run = recording_of(ask(server, "POST", "/api/recording", SPEC)[1])
    assert all(recording.ops(frame) == run.ops(frame) for frame in range(recording.num_frames))
    path = tmp_path / "redacted"
    path.write_bytes(text)
    edits = [{"step": 9, "set": {"victim": "least_work"}}]
    body = json.dumps({"trace": "t", "edits": edits}).encode()
    refused = LabApp(traces={"t": path}).handle("POST", "/api/recording", {}, body)
    assert refused.status == 400 and b"redacted" in b"".join(refused.body)


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ([], "object"), ({}, "workload"), ({"workload": "x"}, "x"), ({**SPEC, "extra": 1}, "extra"),
        ({**SPEC, "preset": "vlm"}, "vllm"), ({**SPEC, "set": {"victim": "nowhere:rule"}}, "nowhere"),
        ({"workload": "requests=1000000"}, "20000"), ({"trace": "gone"}, "gone"),
        ({**SPEC, "edits": [{"step": -1, "abort": "1"}]}, "step"),
        ({**SPEC, "edits": [{"step": 1}]}, "add"), ({**SPEC, "profile": "gone"}, "gone"),
        ({"requests": [{"prompt": 0}]}, "prompt"), ({"requests": [{"size": 1}]}, "size"),
    ],
)  # fmt: skip
def test_a_wrong_description_is_refused_with_a_reason(
    server: LabServer, spec: Any, part: str
) -> None:
    assert part in error_of(ask(server, "POST", "/api/recording", spec))


def test_a_wrong_trace_is_refused_with_its_line(server: LabServer, trace: Lines) -> None:
    header, first, *_ = trace
    old = json.dumps({**json.loads(header), "headway_trace": 1}).encode()
    for text, part in {b"": ":1:", b"{}": ":1:", old: "version 1"}.items():
        assert part in error_of(ask(server, "POST", "/api/trace?name=t", text))
    cut = b"".join([header, first, first[:50]])
    recording = recording_of(ask(server, "POST", "/api/trace?name=t", cut)[1])
    assert (
        recording.num_frames >= 1 and recording.end is not None and ":3:" in recording.end["error"]
    )


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_with_a_failed_step_can_be_edited_before_and_after_it(
    tmp_path: Path, is_async: bool
) -> None:
    path, failed = tmp_path / "failed", 9
    path.write_bytes(b"".join(failing(failed, is_async)))
    app = LabApp(traces={"t": path})

    def recording(**spec: Any) -> RunRecording:
        response = app.handle(
            "POST", "/api/recording", {}, json.dumps({"trace": "t", **spec}).encode()
        )
        return recording_of(b"".join(response.body))

    plain = recording()
    for step in (2, failed, failed + 5):
        edited = recording(edits=[{"step": step, "set": {"victim": "least_work"}}])
        assert edited.end and not edited.end["error"]
        reasons = edited.end["summary"]["finish_reasons"]
        assert sum(reasons.values()) == 12 and ("error" in reasons) == (step > failed)
        assert edited.num_frames > step
        assert all(plain.ops(frame) == edited.ops(frame) for frame in range(step))


def failing(step: int, is_async: bool) -> Lines:
    """The trace of a run in which the executor fails at a step."""
    record = Recorder(CONFIG, is_async, profile=PROFILE.name)
    engine = SimulatedEngine(CONFIG, PROFILE, is_async, observers=[record]).engine
    launch = engine.executor.launch

    class Failing:
        def launch(self, plan: Plan) -> Any:
            if plan.step == step:
                raise RuntimeError("device lost")
            return launch(plan)

    engine.executor = Failing()
    for each in parse_synthetic(WORKLOAD).generate():
        engine.add(each.id, each.prompt(), each.params(), each.arrival)
    engine.run()
    return record.lines


def test_a_long_trace_is_shown_up_to_the_limit(
    trace: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.lab.recording.run.MAX_FRAMES", 20)
    recording = recording_of(b"".join(recording_of_journal(parse_journal("t", trace))))
    assert recording.end and "at most 20 steps" in recording.end["error"]
    assert recording.column("step", 19) == 19 and recording.num_frames <= 21


def test_a_policy_with_other_arguments_is_refused() -> None:
    spec = {**SPEC, "set": {"num_blocks": 24, "headroom": "os:getcwd"}}
    body = json.dumps(spec).encode()
    answer = LabApp(own=["os:getcwd"]).handle("POST", "/api/recording", {}, body)
    assert "headroom" in error_of((answer.status, b"".join(answer.body)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Origin", "http://elsewhere.example"),
        ("Origin", "null"),
        ("Origin", "http://127.0.0.1:1"),
        ("Host", "elsewhere.example"),
    ],
)
def test_other_pages_must_not_use_the_server(server: LabServer, name: str, value: str) -> None:
    for method, path in ROUTES:
        assert value in error_of(ask(server, method, f"/{path}", SPEC, {name: value}), 403)


def test_unknown_paths_are_404(server: LabServer) -> None:
    for path in ("/api/none", "/../setup.py", "/static/../app.py", "/none.js"):
        assert error_of(ask(server, "GET", path), 404)
