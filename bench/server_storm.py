"""Stress test: 200 streaming clients that disconnect early, send invalid requests, and check texts.

    python bench/server_storm.py                  three minutes; exit status 1 unless `ok`
    python bench/server_storm.py --seconds 20     shorter

Starts `headway serve` with the bundled model and prints one JSON object. Every client sends one
request after another. Most responses are read completely. Some clients disconnect in mid-stream,
before the first token, or after half of the body; some requests are too large, not JSON, or have a
wrong field. Afterwards:

unexpected     responses of another kind: 5xx, lost connections, interrupted streams
different      greedy texts that differ from the same request sent alone
leaked         requests, blocks and files that the server still holds at the end
growth         resident memory: median of the last third over median of the second third
exit_code      after SIGTERM

`ok` is true if the first three are empty, the log has no errors, growth is below 1.02, and the exit
code is 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from server_process import ServerProcess

from headway.lab.loadgen.http_client import Address, Client, EventReader, HttpResponse

PATHS = ("/v1/completions", "/v1/chat/completions")
MAX_BODY = 65_536
NUM_BLOCKS = 96  # few, so that all are soon in use: memory is then stable, and blocks run out
REQUEST_TIMEOUT = 300.0  # seconds
MAX_GROWTH = 1.02
OPENINGS = (
    "The capital of France is", "Once upon a time there was", "Water boils when", "1, 2, 3, 4,",
    "def add(a, b):", "The three largest oceans are", "In 1969, people first", "To bake bread,",
)  # fmt: skip
WRONG = (  # path, body, status
    (0, b"", 400), (0, b"{", 400), (1, b"[1, 2]", 400), (1, b"\xff\xfe{}", 400),
    (0, b'{"prompt": "a", "max_tokens": }', 400), (1, b'{"messages": "hello"}', 400),
    (0, b'{"prompt": "a", "max_tokens": -1}', 400), (0, b'{"prompt": [99999999]}', 400),
    (0, b'{"prompt": "a", "temperature": "hot"}', 400), (0, b'{"prompt": {}}', 400),
    (1, b'{"messages": [], "stream": true}', 400), (0, b'{"prompt": "a", "n": 0}', 400),
    (0, b'{"prompt": "a", "model": "gpt-17"}', 404), (0, b'{"prompt": "\\ud800", "n": 1e9}', 400),
)  # fmt: skip


class Disconnected(Exception):
    """The client has disconnected on purpose."""


def requests(seed: int) -> list[tuple[str, bytes]]:
    """Greedy requests of various lengths for both endpoints."""
    source, asked = random.Random(seed), []
    for number in range(24):
        text = OPENINGS[number % len(OPENINGS)]
        text = " ".join([text] * source.choice((1, 1, 4, 20)))
        chat = [{"role": "user", "content": text}]
        fields: dict[str, Any] = {"messages": chat} if number % 2 else {"prompt": text}
        fields |= {
            "temperature": 0, "max_tokens": source.randint(4, 40), "stream": True,
            "ignore_eos": number % 3 == 0,
        }  # fmt: skip
        asked.append((PATHS[number % 2], json.dumps(fields).encode()))
    return asked


def text_of(body: bytes) -> str:
    """The text of a streamed response; ValueError if it is incomplete or has an error."""
    events = EventReader().feed(body)
    if not events or events.pop() != b"[DONE]":
        raise ValueError("incomplete stream")
    text, is_finished = "", False
    for event in map(json.loads, events):
        for choice in event.get("choices", ()):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            is_finished |= choice["finish_reason"] in ("stop", "length")
        if "error" in event:
            raise ValueError("error in stream")
    if not is_finished:
        raise ValueError("no finish reason")
    return text


class Storm:
    """Random clients of one server, and counts of the outcomes."""

    def __init__(self, address: Address, seed: int) -> None:
        self.client = Client(address)
        self.counts: Counter[str] = Counter()
        self.unexpected: Counter[str] = Counter()
        self.texts: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by request
        self._requests = requests(seed)
        self._source = random.Random(seed)

    async def run(self, num_clients: int, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        await asyncio.gather(*(self._one_client(ends_at) for _ in range(num_clients)))
        self.client.close()

    async def _one_client(self, ends_at: float) -> None:
        kinds = {self.read: 55, self.leave: 18, self.abort: 10, self.wrong: 10, self.oversized: 4,
                 self.half: 3}  # fmt: skip
        while time.monotonic() < ends_at:
            (act,) = self._source.choices(list(kinds), list(kinds.values()))
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT):
                    outcome = await act()
                self.counts[f"{act.__name__}: {outcome}"] += 1
            except Exception as error:  # count any failure and continue
                problem = str(error) if isinstance(error, ValueError) else type(error).__name__
                self.unexpected[f"{act.__name__}: {problem}"] += 1
            await asyncio.sleep(self._source.uniform(0, 0.1))

    async def read(self) -> str:
        """Read a complete response and record its text."""
        number = self._source.randrange(len(self._requests))
        self.texts[number][await self.ask(number)] += 1
        return "completed"

    async def ask(self, number: int) -> str:
        pieces: list[bytes] = []
        path, body = self._requests[number]
        _expect(await self.client.post(path, body, pieces.append), 200)
        return text_of(b"".join(pieces))

    async def leave(self) -> str:
        """Disconnect after some events."""
        max_events, num_events = self._source.randint(1, 20), 0

        def receive(piece: bytes) -> None:
            nonlocal num_events
            num_events += piece.count(b"data:")
            if num_events >= max_events:
                raise Disconnected

        try:
            _expect(await self.client.post(*self._source.choice(self._requests), receive), 200)
        except Disconnected:
            return "disconnected in mid-stream"
        return "completed before"

    async def abort(self) -> str:
        """Disconnect within half a second."""
        try:
            async with asyncio.timeout(self._source.choice((0.0, 0.01, 0.1, 0.5))):
                _expect(await self.client.post(*self._source.choice(self._requests)), 200)
        except TimeoutError:
            return "aborted"
        return "completed before"

    async def wrong(self) -> str:
        path, body, status = self._source.choice(WRONG)
        reply = await self.client.post(PATHS[path], body)
        _expect(reply, status)
        has_message = bool(json.loads(reply.body)["error"]["message"])
        return f"refused with {status}" if has_message else "no message"

    async def oversized(self) -> str:
        body = json.dumps({"prompt": "a" * self._source.choice((MAX_BODY, 20 * MAX_BODY))})
        _expect(await self.client.post(PATHS[0], body.encode()), 413)
        return "refused with 413"

    async def half(self) -> str:
        """Announce a body, send a part of it, and disconnect."""
        address = self.client.address
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(
            f"POST {PATHS[0]} HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{{".encode()
        )
        await asyncio.sleep(self._source.uniform(0, 0.2))
        writer.close()
        return "disconnected"

    async def differences(self) -> int:
        """Number of completed texts that differ from the same request sent alone to an idle server."""
        different = 0
        for number, texts in sorted(self.texts.items()):
            alone = await self.ask(number)
            different += texts.total() - texts[alone]
        self.client.close()
        return different


def _expect(reply: HttpResponse, status: int) -> None:
    if reply.status != status:
        raise ValueError(f"HTTP {reply.status}, not {status}: {reply.body[:200]!r}")


async def watch(server: ServerProcess, sizes: list[int]) -> None:
    """Record the server's memory twice per second."""
    while True:
        sizes.append(server.resident_bytes())
        await asyncio.sleep(0.5)


async def measure(server: ServerProcess, num_clients: int, seconds: float) -> dict[str, Any]:
    storm = Storm(server.address, seed=0)
    sizes: list[int] = []
    num_files = server.num_files()
    watching = asyncio.create_task(watch(server, sizes))
    begun = time.monotonic()
    await storm.run(num_clients, seconds)
    watching.cancel()
    took = time.monotonic() - begun
    leaked = await server.holds_after(20.0, num_files)
    third = len(sizes) // 3
    middle, last = statistics.median(sizes[third:-third]), statistics.median(sizes[-third:])
    return {
        "clients": num_clients, "seconds": took, "counts": dict(sorted(storm.counts.items())),
        "unexpected": dict(storm.unexpected), "leaked": leaked,
        "distinct": len(storm.texts), "different": await storm.differences(),
        "resident_mb": [size / 1e6 for size in (sizes[0], middle, last, max(sizes))],
        "growth": last / middle,
        "preemptions": await server.metric("num_preemptions_total"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=180, help="Duration.")
    parser.add_argument("--clients", type=int, default=200, help="Number of clients.")
    parser.add_argument("--quantization", default="int8", help="Quantization of the bundled model.")
    asked = parser.parse_args()
    options = ["--quantization", asked.quantization, "--max-body", str(MAX_BODY)]
    options += ["--num-blocks", str(NUM_BLOCKS), "--max-model-len", "512"]
    with ServerProcess(options) as server:
        result = asyncio.run(measure(server, asked.clients, asked.seconds))
        result |= {"exit_code": server.stop(), "log_errors": server.log_errors()}
    result["ok"] = (
        result["growth"] < MAX_GROWTH
        and not any(result[name] for name in
                    ("unexpected", "leaked", "different", "exit_code", "log_errors"))
    )  # fmt: skip
    print(json.dumps(result, indent=2))
    sys.exit(not result["ok"])


if __name__ == "__main__":
    main()
