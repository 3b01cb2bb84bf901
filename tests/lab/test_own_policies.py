"""A link, a trace or a request must not import a module or read a file of its choice."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import httpx
import pytest

from headway.errors import ConfigError, OwnPolicyError
from headway.lab.cost import load_profile, save_profile
from headway.lab.recording.reader import RunRecording, read_recording
from headway.lab.web.app import ROUTES, LabApp
from headway.record.reader import read_journal
from headway.record.replay import check_replay
from headway.scheduler import preset
from headway.scheduler.policies.presets import read_preset, slot
from headway.scheduler.policies.text import ANY
from headway.server import lab
from tests.cli.test_cli import headway, sentence
from tests.support.own_module import WORKLOAD, OwnModule, own_module
from tests.support.served import server
from tests.support.waiting import LIMIT, on_loop

ROOT = Path(__file__).parents[2]
FLAG = "--allow-own-policies"
JSON = {"Content-Type": "application/json"}
SHORT = "requests=4,prompt=uniform(20,60),output=6"
PLAIN: dict[str, Any] = {"workload": SHORT, "preset": "vllm_v1", "set": {"num_blocks": 24}}
TEXTS = ["evil:q", " evil:q", "evil:q(1)", "custom(evil:q)", "evil:q.__class__", "evil:", "evil:("]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[OwnModule]:
    with own_module(tmp_path) as module:
        yield module


def spec(text: str) -> dict[str, Any]:
    return {**PLAIN, "set": {"num_blocks": 24, "queue": text}}


def edited(text: str) -> dict[str, Any]:
    return {**PLAIN, "edits": [{"step": 3, "set": {"queue": text}}]}


def ask(app: LabApp, path: str, body: Any, method: str = "POST") -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = app.handle(method, path, {"name": "uploaded"}, data)
    return answer.status, b"".join(answer.body)


def error_of(found: tuple[int, bytes]) -> str:
    assert found[0] == 400
    return str(json.loads(found[1])["error"])


def recording_of(found: tuple[int, bytes]) -> RunRecording:
    assert found[0] == 200
    return read_recording([found[1]])


def bodies(text: str, module: OwnModule) -> list[Any]:
    """Every form in which a request can name a policy."""
    specs: list[dict[str, Any]] = [spec(text), edited(text), {"trace": "run"}]
    specs += [
        {"trace": "run", "edits": [{"step": 3, "set": {key: text}}]} for key in ("queue", "swap")
    ]
    exports = [{"spec": each} for each in specs] + [
        {"spec": PLAIN, "other": each} for each in specs
    ]
    return [*specs, *exports, {"default": spec(text)}, module.trace(text).read_bytes()]


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_no_route_imports_what_a_request_names(own: OwnModule, text: str, asks: bool) -> None:
    app = LabApp(traces={"run": own.trace(text)}, stories=[], asks=asks, own=["evil:other"])
    for (method, path), body in product(ROUTES, bodies(text, own)):
        ask(app, path, body, method)
        assert not own.is_imported, (path, body)


@pytest.mark.parametrize("make", [spec, edited])
def test_the_refusal_names_the_policy_and_the_flag(own: OwnModule, make: Any) -> None:
    for path, body in {
        "api/recording": make("evil:q"),
        "api/export": {"spec": make("evil:q")},
    }.items():
        error = error_of(ask(LabApp(stories=[]), path, body))
        assert "evil:q" in error and "ready-made" in error and FLAG in error


def test_a_trace_that_names_own_code_is_shown_from_its_lines(own: OwnModule) -> None:
    path, app = own.trace(), LabApp(stories=[])
    app.traces["run"] = path
    uploaded = recording_of(ask(app, "api/trace", path.read_bytes()))
    for recording in (recording_of(ask(app, "api/recording", {"trace": "run"})), uploaded):
        assert recording.header["own"] == ["evil:q"] and FLAG in recording.header["notice"]
        assert recording.end and recording.end["summary"]["completed"] == 12
    for name in ("run", "uploaded"):
        fork = {"trace": name, "edits": [{"step": 3, "set": {"victim": "least_work"}}]}
        assert "evil:q" in error_of(ask(app, "api/recording", fork))
    assert not own.is_imported


def test_a_trace_cannot_say_itself_what_the_page_asks_for(own: OwnModule) -> None:
    head, *steps = own.trace("fcfs").read_text().splitlines(keepends=True)
    header = json.dumps({**json.loads(head), "own": ["evil:q"], "is_redacted": True}) + "\n"
    recording = recording_of(
        ask(LabApp(stories=[]), "api/trace", "".join([header, *steps]).encode())
    )
    assert not recording.header["own"]


def test_a_confirmed_policy_runs_and_no_other(own: OwnModule) -> None:
    app = LabApp(traces={"run": own.trace()}, stories=[], asks=True)
    status, data = ask(app, "api/recording", spec("evil:q"))
    assert status == 400 and json.loads(data)["own"] == ["evil:q"]
    assert ask(app, "api/allow", {"own": ["evil:q"]})[0] == 200 and not own.is_imported
    recording = recording_of(ask(app, "api/recording", spec("evil:q")))
    assert own.is_imported and recording.end and not recording.end["error"]
    assert recording_of(ask(app, "api/recording", {"trace": "run"})).header["source"] == "replay"
    edits = [{"step": 3, "set": {"victim": "least_work"}}]
    fork = recording_of(ask(app, "api/recording", {"trace": "run", "edits": edits}))
    assert fork.end and not fork.end["error"]
    assert "evil:other" in error_of(ask(app, "api/recording", spec("evil:other")))


@pytest.mark.parametrize("body", [{"own": ["evil:q"]}, {"own": "evil:q"}, {"own": [1]}, [], None])
def test_without_the_flag_nothing_can_be_confirmed(own: OwnModule, body: Any) -> None:
    app = LabApp(stories=[])
    error_of(ask(app, "api/allow", body))
    error_of(ask(app, "api/recording", spec("evil:q")))
    assert not own.is_imported


def test_a_link_cannot_name_a_profile_file(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    save_profile(load_profile("llama3.1-8b-a100-80gb"), path)
    described = {**PLAIN, "profile": str(path)}
    assert str(path) in error_of(ask(LabApp(stories=[]), "api/recording", described))
    assert ask(LabApp(stories=[], default=described), "api/recording", described)[0] == 200


def test_a_trace_cannot_name_a_profile_file(own: OwnModule, tmp_path: Path) -> None:
    profile, path = tmp_path / "own.json", own.trace("fcfs")
    save_profile(load_profile("llama3.1-8b-a100-80gb"), profile)
    head, *steps = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join([json.dumps({**json.loads(head), "profile": str(profile)}), "\n", *steps])
    )
    trial = ["doctor", path, "--try", "max_num_seqs=4"]
    assert "give a profile" in sentence(*trial)
    assert headway(*trial, "--profile", profile).code == 0


@pytest.mark.parametrize("key", ["workload", "trace", "story", "preset"])
def test_a_link_cannot_name_another_file(own: OwnModule, key: str) -> None:
    path = str(own.trace("fcfs"))
    found = ask(LabApp(stories=[]), "api/recording", {**PLAIN, "workload": "", key: path})
    assert "headway_trace" not in error_of(found)


def test_a_lab_allows_the_policies_of_its_command_line_and_no_other(own: OwnModule) -> None:
    options = ["lab", WORKLOAD, "--queue", "evil:q", "--no-open", "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "headway", *options],
        cwd=own.folder,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[4]
            for name, status in {"evil:q": 200, "evil:other": 400}.items():
                request = Request(f"{url}api/recording", json.dumps(spec(name)).encode())
                assert status_of(request) == status
        finally:
            process.kill()
    assert own.is_imported


def status_of(request: Request) -> int:
    try:
        with urlopen(request, timeout=LIMIT) as answer:
            answer.read()
            return int(answer.status)
    except OSError as error:
        return int(getattr(error, "code", 0))


@pytest.mark.parametrize("command", [["trace", "--replay"], ["doctor", "--try", "max_num_seqs=4"]])
def test_a_command_repeats_a_trace_with_own_code_only_with_the_flag(
    own: OwnModule, command: list[str]
) -> None:
    name, *options = command
    error = sentence(name, own.trace(), *options)
    assert "evil:q" in error and FLAG in error and not own.is_imported
    done = headway(name, own.trace(), *options, FLAG)
    assert own.is_imported and done.code == 0, done


def test_a_summary_of_a_trace_imports_nothing(own: OwnModule) -> None:
    for options in ([], ["--diff", own.trace()], ["--perfetto", own.folder / "out.json"]):
        assert headway("trace", own.trace(), *options).code == 0
    assert headway("doctor", own.trace()).code == 0
    assert not own.is_imported


@pytest.mark.parametrize("options", [[FLAG], ["--queue", "evil:q"]])
def test_an_export_of_a_trace_repeats_own_code_that_the_user_allows(
    own: OwnModule, options: list[str]
) -> None:
    page = own.folder / "run.html"
    done = headway("lab", own.trace(), "--export", page)
    assert done.code == 0 and "evil:q" in done.err and FLAG in done.err and not own.is_imported
    done = headway("lab", own.trace(), "--export", page, *options)
    assert done.code == 0 and not done.err and own.is_imported


@on_loop
async def test_the_lab_of_a_server_runs_nothing(tmp_path: Path) -> None:
    with own_module(tmp_path) as module:
        async with server() as served:
            served.app.include_router(lab.router(served.app.state.context))
            client: httpx.AsyncClient = served.client
            for (method, path), body in product(ROUTES, bodies("evil:q", module)):
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                if method == "POST":
                    answer = await client.post(f"/lab/{path}", content=data, headers=JSON)
                    assert answer.status_code in (404, 405)
        assert not module.is_imported


def test_texts_of_data_import_only_what_the_caller_allows(own: OwnModule) -> None:
    for refused in ({"queue": "evil:q"}, {"victim": " evil:other(1)"}):
        with pytest.raises(OwnPolicyError, match="evil.*ready-made"):
            read_preset(refused, own={"evil", "evil:"})
        ((key, text),) = refused.items()
        with pytest.raises(OwnPolicyError):
            slot(key, text)
    with pytest.raises(OwnPolicyError) as error:
        check_replay(read_journal(own.trace()))
    assert error.value.names == ("evil:q",) and not own.is_imported
    with pytest.raises(ConfigError, match="custom"):  # a module of this name is not imported
        read_preset({"queue": "custom(evil:q)"}, own=ANY)
    assert read_preset({"queue": "evil:q"}, own={"evil:q"}) == preset(queue="evil:q")
    assert check_replay(read_journal(own.trace()), {"evil:q"}) > 10


@pytest.mark.parametrize("folder", ["lab", "server", "fleet", "observe", "record"])
def test_settings_from_data_are_read_with_a_permission(folder: str) -> None:
    """`preset` imports what its arguments name; here it gets no arguments that are data."""
    for path in (ROOT / "headway" / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "preset":
                assert not node.keywords, f"{path}:{node.lineno}: use read_preset"
