"""Servers in separate processes: start them, send requests and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
MAIN = "import sys; from tests.support.scripted import main; main(sys.argv[1])"


@contextmanager
def serving(
    *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`headway serve` on a free port, and its first line of output; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "serve", "--port", "0", *options],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert " at http://" in said, said + process.stderr.read()
        yield process, said
    finally:
        process.kill()
        process.communicate()


class Server:
    """A server process; `with` waits until it is ready, and kills it at the end."""

    def __init__(
        self,
        *,
        num_workers: int = 0,
        seconds: float = 0.0,
        grace: float = 5.0,
        port: int = 0,
        is_real: bool = False,
        trace: str | None = None,
        factory: str | None = None,
        max_descriptors: int | None = None,
        **connections: Any,
    ) -> None:
        """`factory` is `module:function`; `connections` are fields of ConnectionSettings."""
        options = {
            "num_workers": num_workers, "seconds": seconds, "grace": grace, "port": port,
            "is_real": is_real, "trace": trace, "factory": factory, "connections": connections,
            "max_descriptors": max_descriptors,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, json.dumps(options)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self.port, self.url = 0, ""

    def __enter__(self) -> Server:
        assert self.process.stdout is not None and self.process.stderr is not None
        said = self.process.stdout.readline()
        assert said, self.process.stderr.read()
        self.port = int(said)
        self.url = f"http://127.0.0.1:{self.port}/"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def children(self) -> list[int]:
        """The ids of its child processes."""
        number = self.process.pid
        return [int(n) for n in Path(f"/proc/{number}/task/{number}/children").read_text().split()]

    def pids(self) -> dict[str, int]:
        """The ids of the engine's process and of one worker."""
        found = httpx.get(self.url).json()
        return {name: found[name] for name in ("engine", "worker")}

    def is_serving(self) -> bool:
        try:
            return httpx.get(self.url).is_success
        except httpx.HTTPError:
            return False

    def generate(self, id: str, num_output: int) -> list[dict[str, Any]]:
        """All response lines of one request to the small app."""
        asked = {"id": id, "prompt": [1, 2, 3], "num_output": num_output}
        with httpx.stream("POST", self.url, json=asked, timeout=20) as response:
            return [json.loads(line) for line in response.iter_lines()]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait, and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(20)
