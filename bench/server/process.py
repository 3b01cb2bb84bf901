"""`headway serve` in a separate process on a free port, with its memory, files and metrics."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.request import urlopen

from bench.harness import ROOT, log
from headway.lab.loadgen.http_client import Address, Client

START_TIMEOUT = 120.0
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class ServerProcess:
    """A server that runs during the block. Memory and files are read from /proc.

    `stderr` replaces the file of the log. `max_file_bytes` limits the size of all files. `program`
    is a module that is run in place of `headway serve`.
    """

    def __init__(
        self, options: list[str], *, stderr: Path | None = None, max_file_bytes: int | None = None,
        program: str = "",
    ) -> None:  # fmt: skip
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = Address("127.0.0.1", free.getsockname()[1], "", False)
        logs = ["--log-level", "warning", "--log-format", "json"]
        self.url = f"http://127.0.0.1:{self.address.port}"
        self._ready = f"{self.url}/v1/models" if program else f"{self.url}/health"
        command = ["-m", program] if program else ["-m", "headway", "serve", *logs]
        command = [sys.executable, *command, *options, "--port", str(self.address.port)]
        file = stderr.open("wb") if stderr else tempfile.TemporaryFile()  # noqa: SIM115
        self._log: IO[bytes] = file  # closed with the server
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=self._log, cwd=ROOT
        )
        self.pid = self._process.pid
        if max_file_bytes is not None:
            limits = (max_file_bytes, max_file_bytes)
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, limits)

    def __enter__(self) -> Self:
        ends_at = time.monotonic() + START_TIMEOUT
        while True:
            try:
                urlopen(self._ready, timeout=10).close()
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > ends_at:
                    self._process.kill()
                    raise SystemExit(f"the server did not start:\n{self._logged()}") from None
                time.sleep(0.1)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            log(self._logged()[-2000:])
        self._process.kill()
        self._process.wait()
        self._log.close()

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self._process.terminate()
        return self._process.wait(60)

    def log_errors(self) -> list[str]:
        """The first warnings and errors in its log, without those about fields of requests."""
        prefixes = ("{", "Traceback")  # other lines are the startup message
        lines = [line for line in self._logged().splitlines() if line.startswith(prefixes)]
        return [line for line in lines if "generation.ignored_fields" not in line][:20]

    def _logged(self) -> str:
        # pread, because seek would move the position at which the server writes.
        size = os.fstat(self._log.fileno()).st_size  # 0 of a device
        return "" if not size else os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    async def weigh(self, seconds: float, note: Callable[[int], object]) -> None:
        """Note the resident memory again and again."""
        while True:
            note(self.resident_bytes())
            await asyncio.sleep(seconds)

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    async def holds_after(self, seconds: float, num_files: int) -> dict[str, float]:
        """Requests, blocks, and files above `num_files` that are still held after `seconds`."""
        ends_at = time.monotonic() + seconds
        while True:
            left = {name: held for name, held in (await self._holds(num_files)).items() if held > 0}
            if not left or time.monotonic() > ends_at:
                return left
            await asyncio.sleep(0.2)

    async def _holds(self, num_files: int) -> dict[str, float]:
        client = Client(self.address)
        load: dict[str, float] = json.loads((await client.get("/load")).body)
        client.close()
        load |= {name: await self.metric(name) for name in GAUGES}
        await asyncio.sleep(0.1)  # until the server has closed its end of the connection
        return load | {"files": self.num_files() - num_files}

    async def metric(self, name: str) -> float:
        """The value of a metric, summed over all labels."""
        client = Client(self.address)
        lines = (await client.get("/metrics")).body.decode().splitlines()
        client.close()
        found = [line for line in lines if line.startswith(f"headway:{name}{{")]
        assert found, f"/metrics has no {name}"
        return sum(float(line.rpartition(" ")[2]) for line in found)
