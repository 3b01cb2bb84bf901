"""`headway serve` as a process of its own, on a free port, and what it holds."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headway.errors import ConfigError
from headway.lab.loadgen.http_client import Address, Client
from headway.lab.loadgen.load import find_model

STARTS_WITHIN = 120.0
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class ServerProcess:
    """A server that runs while the block does. Memory and files are read from /proc."""

    def __init__(self, options: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = Address("127.0.0.1", free.getsockname()[1], "", False)
        command = [sys.executable, "-m", "headway", "serve", *options]
        command += ["--port", str(self.address.port), "--log-level", "warning"]
        command += ["--log-format", "json"]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=self._log, cwd=Path(__file__).parent.parent
        )

    def __enter__(self) -> Self:
        ends_at = time.monotonic() + STARTS_WITHIN
        while True:
            try:
                find_model(self.address)
                return self
            except ConfigError:
                if self._process.poll() is not None or time.monotonic() > ends_at:
                    self._process.kill()
                    raise SystemExit(f"the server did not start:\n{self._logged()}") from None
                time.sleep(0.1)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self._logged()[-2000:], file=sys.stderr)
        self._process.kill()
        self._process.wait()
        self._log.close()

    def stop(self) -> int:
        """Its exit code after SIGTERM."""
        self._process.terminate()
        return self._process.wait(60)

    def log_errors(self) -> list[str]:
        """The first of its warnings and errors."""
        marks = ("{", "Traceback")  # all else is what it tells a person at a terminal
        return [line for line in self._logged().splitlines() if line.startswith(marks)][:20]

    def _logged(self) -> str:
        # Not by seek: the server writes at the same place of the same open file.
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    async def holds_after(self, seconds: float, num_files: int) -> dict[str, float]:
        """What is left within so long: requests, blocks, files beyond so many. Empty: nothing."""
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
        await asyncio.sleep(0.1)  # until the server has seen that we left, and closed its end
        return load | {"files": self.num_files() - num_files}

    async def metric(self, name: str) -> float:
        """What /metrics says of it, all labels together."""
        client = Client(self.address)
        lines = (await client.get("/metrics")).body.decode().splitlines()
        client.close()
        found = [line for line in lines if line.startswith(f"headway:{name}{{")]
        assert found, f"/metrics has no {name}"
        return sum(float(line.rpartition(" ")[2]) for line in found)
