"""Programs: servers in separate processes, and scripts in this one."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from multiprocessing import forkserver, get_context, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.waiting import LIMIT

ROOT = Path(__file__).parents[2]
MAIN = "import sys; from tests.support.scripted import main; main(sys.argv[1])"
PATIENT = {"head_timeout": LIMIT, "keep_alive_timeout": LIMIT, "stall_timeout": LIMIT}
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.wire.server", "tests.support.forked_ranks"])


def start_forks() -> None:
    """Start the server of FORKS as a fork of this process, which has imported what it needs.

    By itself, it is a new program, which imports everything again: 3 s of CPU for each process of
    pytest. This one must have a single thread, except for one of pytest-xdist.
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # because of that thread
        patch.setattr(forkserver.util, "spawnv_passfds", _fork_program)  # type: ignore[attr-defined]
        forkserver.ensure_running()


def _fork_program(_path: str, arguments: list[str], files: list[int]) -> int:
    """What starts `python -c`, with a fork."""
    if pid := os.fork():
        return pid
    try:
        _become_new(files)
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def _become_new(files: list[int]) -> None:
    """Share nothing with the process that was forked, except for these files and what is printed."""
    with open(os.devnull, "r+b", buffering=0) as nothing:
        kept = {0, 1, 2, nothing.fileno(), *files}
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
            os.dup2(nothing.fileno(), number, inheritable=False)  # so that nothing else gets it
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    logging.root.handlers.clear()
    forkserver._forkserver.__init__()  # type: ignore[misc]


def stable_port() -> int:
    """A free port that the system gives to no other process, so that it stays free."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    given = range(low, high + 1)
    ports = [port for port in range(10_000, 1 << 16) if port not in given] or [*given]
    while True:
        port = random.SystemRandom().choice(ports)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def refuses_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), LIMIT).close()
    except OSError:
        return True
    return False


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
    with _announced(process) as said:
        yield process, said


@contextmanager
def serving_forked(
    *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Forked, str]]:
    """The same with forks of a process that has imported everything."""
    process = Forked(_serve_command, options, {**(environment or {})})
    with _announced(process) as said:
        yield process, said


def _serve_command(options: tuple[str, ...], environment: dict[str, str]) -> None:
    from headway.cli.main import main

    os.environ.update(environment)
    sys.argv = ["headway", "serve", "--port", "0", *options]
    main()


@contextmanager
def _announced(process: subprocess.Popen[str] | Forked) -> Iterator[str]:
    """The first line of a server that starts; it is killed at the end."""
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        if " at http://" not in said:
            process.terminate()
            raise AssertionError(said + process.stderr.read())
        yield said
    finally:
        process.kill()
        process.communicate()


def printed_by(script: str, *arguments: str) -> str:
    """The output of a script of the repository, run in this process, which has imported torch."""
    path, printed = ROOT / script, io.StringIO()
    before, sys.argv = sys.argv, [str(path), *arguments]
    try:
        with redirect_stdout(printed):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


class Forked:
    """A server forked from a process that has imported everything; its interface is Popen's."""

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        pipes = [FORKS.Pipe(duplex=False) for _ in range(2)]
        self.stdout, self.stderr = (os.fdopen(os.dup(reader.fileno())) for reader, _ in pipes)
        writers = [writer for _, writer in pipes]
        self._process = FORKS.Process(target=run_forked, args=(writers, main, *arguments))
        self._process.start()
        for end in (end for pipe in pipes for end in pipe):
            end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = LIMIT) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"it still runs after {timeout} s"
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def communicate(self, timeout: float = LIMIT) -> tuple[str, str]:
        """Wait for the exit; returns what is left in its pipes."""
        self.wait(timeout)
        streams = (self.stdout, self.stderr)
        found = ["" if stream.closed else stream.read() for stream in streams]
        for stream in streams:
            stream.close()
        return found[0], found[1]


def run_forked(writers: list[Connection], main: Callable[..., None], *arguments: Any) -> None:
    """Main function of a forked server."""
    from headway.server.process import workers

    for number, end in enumerate(writers, start=1):
        os.dup2(end.fileno(), number)
        end.close()
    workers.CONTEXT = SameSurroundings()  # type: ignore[assignment]
    # In Python 3.11, a child process would start another fork server.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    main(*arguments)


class SameSurroundings:
    """FORKS, whose processes have the environment of this one and write to its streams."""

    def __getattr__(self, name: str) -> Any:
        return getattr(FORKS, name)

    def Process(self, *, target: Any, args: Any, **more: Any) -> Any:  # noqa: N802
        streams = [reduction.DupFd(number) for number in (1, 2)]
        return FORKS.Process(
            target=_run_with, args=(streams, {**os.environ}, target, *args), **more
        )


def _run_with(
    streams: list[Any], environment: dict[str, str], target: Callable[..., None], *arguments: Any
) -> None:
    os.environ.update(environment)
    for number, stream in enumerate(streams, start=1):
        os.dup2(end := stream.detach(), number)
        os.close(end)
    target(*arguments)


def _main(options: str) -> None:
    from tests.support.scripted import main

    main(options)


def _spawned(options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


class Server:
    """A server process; `with` waits until it is ready, and kills it at the end."""

    def __init__(
        self,
        *,
        num_workers: int = 0,
        seconds: float = 0.0,
        grace: float = LIMIT,
        port: int = 0,
        is_real: bool = False,
        trace: str | None = None,
        factory: str | None = None,
        max_descriptors: int | None = None,
        is_forked: bool = True,
        **connections: Any,
    ) -> None:
        """`factory` is `module:function`; `connections` are fields of Settings."""
        options = {
            "num_workers": num_workers, "seconds": seconds, "grace": grace, "port": port,
            "is_real": is_real, "trace": trace, "factory": factory,
            "connections": {**PATIENT, **connections}, "max_descriptors": max_descriptors,
        }  # fmt: skip
        self.process: Forked | subprocess.Popen[str] = (
            Forked(_main, json.dumps(options)) if is_forked else _spawned(json.dumps(options))
        )
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
        """The ids of its child processes, if it was not forked."""
        number = self.process.pid
        return [int(n) for n in Path(f"/proc/{number}/task/{number}/children").read_text().split()]

    def pids(self) -> dict[str, int]:
        """The ids of the engine's process and of one worker."""
        found = httpx.get(self.url, timeout=LIMIT).json()
        return {name: found[name] for name in ("engine", "worker")}

    def is_serving(self) -> bool:
        try:
            return httpx.get(self.url, timeout=LIMIT).is_success
        except httpx.HTTPError:
            return False

    def generate(self, id: str, num_output: int) -> list[dict[str, Any]]:
        """All response lines of one request to the small app."""
        asked = {"id": id, "prompt": [1, 2, 3], "num_output": num_output}
        with httpx.stream("POST", self.url, json=asked, timeout=LIMIT) as response:
            return [json.loads(line) for line in response.iter_lines()]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait, and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(LIMIT)
