"""Attacks on a server: how much longer 32 ordinary streams wait for a token, and what else fails.

    python -m bench.server.attack                    about 28 minutes, one JSON object
    python -m bench.server.attack --quick            about ten minutes
    python -m bench.server.attack --only huge_text   some attacks
    python -m bench.server.attack --only storm --seconds 20

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

The attacks in checks.py and storm.py start servers of their own and have their own criteria, given
there.
`ok` of the whole is true if each attack is ok, no server logs an error, and all exit with 0.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bench.harness import Bench, Figures, log, percentile
from bench.server.attack_bodies import Attack, attacks
from bench.server.checks import EVERY
from bench.server.process import ServerProcess
from bench.server.storm import storm
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
        return 1000 * percentile(self.gaps or [0.0], share)


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
        weigh = self._server.weigh(0.05, lambda size: self.window.resident.append(size))
        tasks = [asyncio.create_task(each) for each in (*work, self._ask_health(), weigh)]
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
                log(f"a stream failed: {error!r}")
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


def _compared(window: Window, quiet: list[Window]) -> Figures:
    found: Figures = {}
    for name, share in (("max", 1.0), ("p99", 0.99)):
        without = max(each.gap(share) for each in quiet)
        found[f"gap_ms_{name}"] = [round(without), round(window.gap(share))]
        found[f"added_ms_{name}"] = round(window.gap(share) - without)
    is_well = window.health and not window.num_unhealthy
    found["health_ms"] = round(1000 * max(window.health)) if is_well else None
    return found


async def measure(server: ServerProcess, names: list[str], settle_seconds: float) -> Figures:
    watch, results = Monitor(server), Figures()
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
            log(f"{name} {results[name]}")
    return results


def is_ok(found: Figures) -> bool:
    num_failed = sum(n for status, n in found["answers"].items() if status.startswith("5"))
    is_quick = found["added_ms_max"] <= MAX_ADDED_MS and found["health_ms"] is not None
    return is_quick and not num_failed and found["files"][1] <= found["files"][0]


def run_attacks(names: list[str], settle_seconds: float) -> Figures:
    """Run the attacks on one server with 32 streams."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The server inherits this limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(NUM_FILES, hard), hard))
    with ServerProcess(SERVER) as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        found = asyncio.run(measure(server, names, settle_seconds))
        return {"attacks": found, "log_errors": server.log_errors(), "exit_code": server.stop()}


def measure_all(asked: Namespace) -> Figures:
    chosen = asked.only or NAMES
    result: Figures = {"attacks": {}, "log_errors": [], "exit_code": 0, "checks": {}}
    if with_streams := [name for name in chosen if name in attacks()]:
        result |= run_attacks(with_streams, 5.0 if asked.quick else SETTLE_SECONDS)
    for name in [name for name in chosen if name in CHECKS]:
        result["checks"][name] = asyncio.run(CHECKS[name](asked))
        log(f"{name} {result['checks'][name]}")
    everything = result["attacks"] | result["checks"]
    result["failed"] = [name for name, found in everything.items() if not found["ok"]]
    result["ok"] = not (result["failed"] or result["log_errors"] or result["exit_code"])
    return result


CHECKS = {each.__name__: each for each in (*EVERY, storm)}
NAMES = [*attacks(), *CHECKS]

if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option(
        "--only", nargs="+", action="extend", choices=NAMES, metavar="NAME",
        help=f"run only these attacks, of {', '.join(NAMES)}",
    )  # fmt: skip
    bench.option("--quick", action="store_true", help="send less and wait for less")
    bench.option("--seconds", type=float, default=180, help="duration of storm")
    bench.option("--clients", type=int, default=200, help="of storm")
    bench.main(measure_all)
