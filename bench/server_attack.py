"""Attacks on a server: how much longer 32 ordinary streams wait for a token, and what else fails.

    python bench/server_attack.py                    about 25 minutes, one JSON object
    python bench/server_attack.py --quick            about ten minutes
    python bench/server_attack.py --only huge_text   some attacks

Starts `headway serve` with the bundled model on this machine. While the streams run, quiet windows
and attack windows alternate. For each attack:

added_ms        the longest wait for a token minus the longest in the quiet windows before and
                after; also for the 99th percentile
health_ms       the slowest response of /health; null if one failed
memory_mb       resident memory before, at most, and after
files           open files before and after
answers         counts of statuses or other outcomes
ok              no more than 200 ms are added, no response is 5xx, /health always succeeds, and no
                file stays open

The attacks in server_checks.py start servers of their own and have their own criteria, given there.
`ok` of the whole is true if each attack is ok, no server logs an error, and all exit with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from server_attacks import Attack, attacks
from server_checks import checks
from server_process import ServerProcess

from headway.lab.loadgen.http_client import Address, Client

NUM_STREAMS = 32
SETTLE_SECONDS = 30.0
QUIET_SECONDS = 4.0
ATTACK_SECONDS = 4.0  # at least, and at least one second after the last response
MAX_ADDED_MS = 200.0
NUM_FILES = 1024  # file descriptors of the server
# Short steps, and few blocks, because the first use of a block adds to the resident memory.
SERVER = ["--quantization", "int8", "--max-num-batched-tokens", "64", "--num-blocks", "640"]
CLOSE_TIMEOUT = 20.0  # seconds for files to be closed after an attack


@dataclass
class Window:
    """Measurements of one time window."""

    gaps: list[float] = field(default_factory=list)  # seconds between two tokens of a stream
    health: list[float] = field(default_factory=list)  # seconds
    num_unhealthy: int = 0
    resident: list[int] = field(default_factory=list)  # bytes
    start: float = field(default_factory=time.monotonic)

    def gap(self, share: float) -> float:
        """A quantile of the gaps in ms; 1 is the maximum."""
        ordered = sorted(self.gaps) or [0.0]
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Monitor:
    """Runs streams, polls /health and memory, and records them in the current window."""

    def __init__(self, server: ServerProcess) -> None:
        self.window = Window()
        self._server = server
        self._client = Client(server.address)

    def open(self) -> Window:
        self.window = Window()
        return self.window

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        work = [self._stream(number) for number in range(NUM_STREAMS)]
        tasks = [asyncio.create_task(each) for each in (*work, self._ask_health(), self._weigh())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._client.close()

    async def _stream(self, number: int) -> None:
        """Send one streaming request after another."""
        fields = {"max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}
        body = json.dumps({"prompt": f"{number}: Once upon a time", **fields}).encode()
        while True:
            latest: float | None = None

            def receive(_: bytes) -> None:
                nonlocal latest
                now = time.monotonic()
                if latest is not None and latest > self.window.start:
                    self.window.gaps.append(now - latest)
                latest = now

            try:
                await self._client.post("/v1/completions", body, receive)
            except Exception as error:
                print(f"a stream failed: {error!r}", file=sys.stderr)
                await asyncio.sleep(0.5)

    async def _ask_health(self) -> None:
        while True:
            start, window = time.monotonic(), self.window
            try:
                async with asyncio.timeout(30.0):
                    is_well = (await self._client.get("/health")).status == 200
            except Exception:
                is_well = False
            window.num_unhealthy += not is_well
            window.health.append(time.monotonic() - start)
            await asyncio.sleep(0.2)

    async def _weigh(self) -> None:
        while True:
            self.window.resident.append(self._server.resident_bytes())
            await asyncio.sleep(0.05)


async def _quiet(watch: Monitor) -> Window:
    window = watch.open()
    await asyncio.sleep(QUIET_SECONDS)
    return window


async def _attacked(
    watch: Monitor, attack: Attack, address: Address
) -> tuple[Window, Counter[str]]:
    window = watch.open()
    answers = await attack(address)
    await asyncio.sleep(max(1.0, ATTACK_SECONDS - (time.monotonic() - window.start)))
    watch.open()
    return window, answers


async def _files_after(server: ServerProcess, before: int) -> int:
    """Number of open files, after waiting for those of the attack to be closed."""
    ends_at = time.monotonic() + CLOSE_TIMEOUT
    while server.num_files() > before and time.monotonic() < ends_at:
        await asyncio.sleep(0.2)
    return server.num_files()


def _compared(window: Window, quiet: list[Window]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, share in (("max", 1.0), ("p99", 0.99)):
        without = max(each.gap(share) for each in quiet)
        found[f"gap_ms_{name}"] = [round(without), round(window.gap(share))]
        found[f"added_ms_{name}"] = round(window.gap(share) - without)
    is_well = window.health and not window.num_unhealthy
    found["health_ms"] = round(1000 * max(window.health)) if is_well else None
    return found


async def measure(server: ServerProcess, names: list[str], settle_seconds: float) -> dict[str, Any]:
    watch, results = Monitor(server), dict[str, Any]()
    async with watch.running():
        await asyncio.sleep(settle_seconds)  # until the streams are out of step
        await attacks()["grammars"]()(server.address)  # start the processes that check grammars
        quiets = [await _quiet(watch)]
        for name in names:
            attack = attacks()[name]()
            await asyncio.sleep(0.5)  # preparing the attack belongs to no window
            before, num_files = quiets[-1].resident[-1], server.num_files()
            window, answers = await _attacked(watch, attack, server.address)
            del attack
            files = [num_files, await _files_after(server, num_files)]
            quiets.append(await _quiet(watch))
            weights = (before, max(window.resident), quiets[-1].resident[-1])
            results[name] = _compared(window, quiets[-2:]) | {
                "seconds": round(time.monotonic() - window.start, 1), "answers": dict(answers),
                "memory_mb": [round(size / 1e6) for size in weights], "files": files,
            }  # fmt: skip
            results[name]["ok"] = is_ok(results[name])
            print(name, results[name], file=sys.stderr, flush=True)
    return results


def is_ok(found: dict[str, Any]) -> bool:
    num_failed = sum(n for status, n in found["answers"].items() if status.startswith("5"))
    is_quick = found["added_ms_max"] <= MAX_ADDED_MS and found["health_ms"] is not None
    return is_quick and not num_failed and found["files"][1] <= found["files"][0]


def run_attacks(names: list[str], settle_seconds: float) -> dict[str, Any]:
    """Run the attacks on one server with 32 streams."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The server inherits this limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(NUM_FILES, hard), hard))
    with ServerProcess(SERVER) as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        found = asyncio.run(measure(server, names, settle_seconds))
        return {"attacks": found, "log_errors": server.log_errors(), "exit_code": server.stop()}


def run_checks(names: list[str], is_quick: bool) -> dict[str, Any]:
    """Run the attacks that start their own servers."""
    found = {}
    for name in names:
        found[name] = asyncio.run(checks()[name](is_quick))
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [*attacks(), *checks()]
    parser.add_argument(
        "--only", nargs="+", action="extend", choices=names, metavar="NAME",
        help=f"Run only these attacks, of {', '.join(names)}.",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="Send less and wait for less.")
    asked = parser.parse_args()
    chosen = asked.only or names
    result: dict[str, Any] = {"attacks": {}, "log_errors": [], "exit_code": 0}
    if with_streams := [name for name in chosen if name in attacks()]:
        result = run_attacks(with_streams, 5.0 if asked.quick else SETTLE_SECONDS)
    result["checks"] = run_checks([name for name in chosen if name in checks()], asked.quick)
    everything = result["attacks"] | result["checks"]
    result["failed"] = [name for name, found in everything.items() if not found["ok"]]
    result["ok"] = not (result["failed"] or result["log_errors"] or result["exit_code"])
    print(json.dumps(result, indent=2))
    sys.exit(not result["ok"])


if __name__ == "__main__":
    main()
