"""Laws of `headway serve`: both process layouts behave alike; errors appear before the model loads."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.cli.options.serve import ServeOptions
from headway.model import devices
from headway.record.reader import read_journal
from headway.server.process.serve import bind
from tests.cli.test_cli import sentence
from tests.support.collector import HEADER, Receiver, check_exported
from tests.support.processes import FORKS, ROOT, serving, serving_forked
from tests.support.waiting import LIMIT, wait_until


def ask(url: str, path: str, more: Mapping[str, str] | None = None, **fields: Any) -> Any:
    headers = {"Authorization": "Bearer sesame", **(more or {})}
    response = httpx.post(url + path, json=fields, headers=headers, timeout=LIMIT)
    assert response.status_code == 200, response.text
    return response.json()


def answer(response: httpx.Response) -> httpx.Response | None:
    return response if response.is_success else None


@pytest.mark.parametrize(
    "layout", [(), ("--api-server-count", "2", "--spans")], ids=["one process", "several"]
)
def test_a_model_is_served_until_sigterm(
    tiny: list[str], layout: tuple[str, ...], tmp_path: Path
) -> None:
    """With several processes, it also exports spans of the requests."""
    trace, template = tmp_path / "trace.jsonl", tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    options = (
        "--api-key", "sesame", "--trace-out", str(trace), "--num-blocks", "64",
        "--chat-template", str(template), "--tool-call-parser", "hermes",
        "--preset", "vllm", "--max-model-len", "48",
    )  # fmt: skip
    exporting = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
    with (
        Receiver() as receiver,
        (serving_forked if layout else serving)(
            *tiny, *options, *layout,
            environment={**exporting, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url},
        ) as (process, said),
    ):  # fmt: skip
        found = re.search(r"at (http://127.0.0.1:\d+); .* 64 KV blocks of \d+ tokens", said)
        assert found and "vllm" in said and "max_model_len 48" in said, said
        url = found[1]
        get = partial(httpx.get, timeout=LIMIT)
        assert get(f"{url}/v1/models").status_code == 401
        asked = {"prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        for parent in (HEADER, "invalid"):
            body = ask(url, "/v1/completions", {"traceparent": parent}, **asked)
            assert body["usage"]["completion_tokens"] == 5 and body["model"] == Path(tiny[1]).name
        talk = [{"role": "user", "content": "abc"}]
        tokens = ask(url, "/tokenize", messages=talk)["tokens"]
        assert ask(url, "/detokenize", tokens=tokens)["prompt"].strip() == "<abc>"
        wait_until(lambda: get(f"{url}/health").json() == {"status": "ok"})
        assert body["system_fingerprint"].startswith("fp_")
        key = {"Authorization": "Bearer sesame"}
        # The engine's process has a second or two for an answer, and may be late.
        shown = {
            name: wait_until(lambda name=name: answer(get(f"{url}/{name}", headers=key)))
            for name in ("metrics", "live")
        }
        assert "headway:generation_tokens_total" in shown["metrics"].text
        assert shown["live"].json()["kv_blocks"]["total"] == 64
        if "--spans" in layout:  # at the end of the server, exporting them has a limit of time
            wait_until(lambda: sum(each.name == "llm_request" for each in receiver.spans()) == 2)
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=LIMIT)
        assert process.returncode == 0 and "sesame" not in said + rest
        assert "Traceback" not in rest and rest.count("SIGTERM") == 1, rest
        if "--spans" in layout:
            assert receiver.resource()["service.name"] == "headway"
            check_exported(receiver.spans(), Path(tiny[1]).name)
        assert bool(receiver.requests) == ("--spans" in layout)
    assert len(list(read_journal(trace))) > 1


def test_errors_are_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:  # by a server that is not ready yet
        port = str(taken.getsockname()[1])
        assert "Address already in use" in sentence("serve", "--port", port)
    assert "no.such.host" in sentence("serve", "--host", "no.such.host.invalid")
    several = ["--api-server-count", "2", "--no-engine-process"]
    assert "--no-engine-process" in sentence("serve", *several)
    assert "--log-format" in sentence("serve", "--log-format", "xml")
    assert "cannot be read" in sentence("serve", "--api-key-file", tmp_path / "none")
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for")
    for path in (tmp_path / "none", broken):
        assert "--chat-template" in sentence("serve", "--chat-template", path)
    assert "--tool-call-parser" in sentence("serve", "--tool-call-parser", "xml")
    assert "ASCII" in sentence("serve", "--api-key", "schlüssel")


def test_missing_packages_are_reported_with_the_install_command() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['fastapi'] = None\n"
        "sys.argv = ['headway', 'serve']\n"
        "from headway.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 2 and "torch, fastapi" in done.stderr
    assert "pip install '.[torch,server]'" in done.stderr


def test_an_error_of_the_engine_process_is_reported_as_in_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.server.process.workers.CONTEXT", FORKS)
    for layout in ((), ("--engine-process",)):
        text = sentence("serve", "/no/such/model", "--port", "0", *layout)
        assert "/no/such/model" in text


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_engine_process_depends_on_device_api_servers_and_option(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "why_no_cuda", lambda: None if has_gpu else "no GPU")
    used = {"auto": has_gpu, "cuda": True, "cuda:1": True, "cpu": False}
    for device, is_used in used.items():
        assert ServeOptions().has_engine_process(device) == is_used
        assert ServeOptions(api_server_count=2).has_engine_process(device)
        assert ServeOptions(engine_process=True).has_engine_process(device)
        assert not ServeOptions(engine_process=False).has_engine_process(device)


def test_the_default_address_accepts_only_this_machine() -> None:
    assert ServeOptions().host == "127.0.0.1"
