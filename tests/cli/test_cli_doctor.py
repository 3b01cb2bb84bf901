"""`headway doctor` on a trace and on a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from headway.lab.doctor.text import ROWS, show
from tests.cli.test_cli import headway, sentence

WORK = (
    "requests=40,arrivals=poisson(12),prompt=0.9*uniform(50,300)+0.1*fixed(9000),"
    "output=uniform(10,60)"
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("doctor") / "run.jsonl"
    headway("simulate", WORK, "--preset", "vllm_v1", "--trace-out", file, "--trace-redact")
    return file


def test_the_doctor_of_a_trace_finds_what_the_report_finds(trace: Path) -> None:
    report = json.loads(headway("trace", trace, "--json").out)
    found = json.loads(headway("doctor", trace, "--json").out)
    assert found["findings"] == report["doctor"] and found["config"] == report["config"]
    text = " ".join(headway("doctor", trace).out.split())
    assert all(finding["symptom"] in text for finding in report["doctor"])
    assert all(change in text for f in report["doctor"] for change in f["changes"])


def test_a_trial_of_a_trace_shows_before_and_after(trace: Path) -> None:
    arguments = ("doctor", trace, "--try", "max_num_batched_tokens=1024", "--try", "queue=fcfs")
    tried = json.loads(headway(*arguments, "--json").out)
    assert tried["changes"] == {"max_num_batched_tokens": "1024", "queue": "fcfs"}
    before, after = tried["before"], tried["after"]
    assert after["longest_stall"]["max"] < before["longest_stall"]["max"] / 3
    text = headway(*arguments).out
    for name, (key, mark, unit) in ROWS.items():
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        assert line.endswith(show(after[key][mark] if mark else after[key], unit))


def test_wrong_arguments_are_refused_in_one_sentence(trace: Path) -> None:
    assert "slot=value" in sentence("doctor", str(trace), "--try", "chunk")
    assert "max_num_seqs" in sentence("doctor", str(trace), "--try", "max_num_seqs=no")


def test_a_missing_file_is_not_taken_for_a_server(tmp_path: Path) -> None:
    for name in ("nosuch.jsonl", "nosuch.jsonl.gz", "runs/nosuch", str(tmp_path / "missing")):
        for more in ((), ("--try", "queue=fcfs")):
            assert f"{name}: no such trace file" in sentence("doctor", name, *more)
    for url in ("127.0.0.1:1", "127.0.0.1:1/path", "http://127.0.0.1:1/a.jsonl", "[::1]:1"):
        assert "cannot reach" in sentence("doctor", url)


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """A server that answers both paths, and the bodies that it has received."""
    received: list[Any] = []
    vital = {
        "name": "longest stall", "value": 0.5, "unit": "s", "healthy": "short", "is_healthy": False,
    }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"seconds": 60.0, "vitals": [vital], "findings": []})

        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer({"error": {"message": "another trial runs"}}, 409)

        def _answer(self, body: Any, status: int = 200) -> None:
            is_known = self.headers["Authorization"] == "Bearer key" and "doctor" in self.path
            self.send_response(status if is_known else 418)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    found = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield f"127.0.0.1:{found.server_port}", received
    found.shutdown()
    found.server_close()


def test_the_doctor_of_a_server_is_shown_as_text_or_json(server: tuple[str, list[Any]]) -> None:
    url, received = server
    text = headway("doctor", url, "--api-key", "key").out
    assert "longest stall  500.0 ms  short    !" in text and "no problems" in text
    assert json.loads(headway("doctor", url, "--api-key", "key", "--json").out)["seconds"] == 60.0
    arguments = ("doctor", url, "--api-key", "key", "--try", "max_num_seqs=4")
    assert "another trial runs" in sentence(*arguments)
    assert received == [{"changes": {"max_num_seqs": "4"}, "profile": None}]
