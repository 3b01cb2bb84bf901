"""Random exchanges over real sockets, read by an independent HTTP parser.

    python -m tests.support.wire.fuzz --conversations 2000

Every byte of every connection must belong to a response that h11 can parse, and every
response must equal that of the same request sent alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import struct
import time
from dataclasses import dataclass, field

import h11

from tests.support.processes import Server
from tests.support.waiting import LIMIT
from tests.support.wire.answers import Answer, Choices, answer, events_of, joined, streamed_answer
from tests.support.wire.cases import MESSAGES, RESPONSES, Case, cases
from tests.support.wire.reader import Exchange, Responses

NUM_CASES, AT_ONCE = 60, 16
GARBAGE = (
    b"\x00\x01 nonsense\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST / HTTP/1.1\r\nA B\r\n\r\n",
)


@dataclass(slots=True)
class Report:
    """Counts of the exchanges, and the problems found."""

    num_responses: int = 0
    num_bytes: int = 0
    num_misplaced: int = 0  # bytes outside of responses, or of unreadable ones
    problems: list[str] = field(default_factory=list)


def written(case: Case, chance: random.Random, *, is_last: bool) -> Exchange:
    """A request as bytes, in one of several valid forms."""
    body, lines = case.body, [b"Host: 127.0.0.1", b"Content-Type: %s" % case.kind.encode()]
    version = b"1.0" if is_last and chance.random() < 0.3 else b"1.1"
    closes = version == b"1.0" or (is_last and chance.random() < 0.3)
    if closes and version == b"1.1":
        lines.append(b"Connection: close")
    if version == b"1.1" and body and chance.random() < 0.2:
        lines.append(b"Transfer-Encoding: chunked")
        cut = chance.randint(1, len(body))
        pieces = [piece for piece in (body[:cut], body[cut:]) if piece]
        body = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
    elif body or case.method == "POST":
        lines.append(b"Content-Length: %d" % len(body))
    if version == b"1.1" and body and chance.random() < 0.05:
        lines.append(b"Expect: 100-continue")
    first = b"%b %b HTTP/%b" % (case.method.encode(), case.path.encode(), version)
    return Exchange(case, b"\r\n".join([first, *lines, b"", body]), version, closes)


def planned(chance: random.Random, known: list[Case]) -> list[list[Exchange]]:
    """Groups of pipelined requests; each group is sent after the responses to the previous one."""
    sizes = [chance.choice((1, 1, 2, 4)) for _ in range(chance.randint(1, 3))]
    groups = []
    for number, size in enumerate(sizes):
        group = []
        for place in range(size):
            case = chance.choice(known)
            is_last = number == len(sizes) - 1 and place == size - 1
            chosen = case.streamed() if chance.random() < 0.6 else case
            group.append(written(chosen, chance, is_last=is_last))
        groups.append(group)
    if not groups[-1][-1].closes and chance.random() < 0.1:
        groups[-1].append(Exchange(None, chance.choice(GARBAGE), closes=True))
    return groups


class Conversation:
    """One connection of a random client."""

    def __init__(self, port: int, chance: random.Random, groups: list[list[Exchange]]) -> None:
        self._port, self._chance, self._groups = port, chance, groups
        self.responses = Responses()
        self.num_read = 0
        self._sizes = chance.choice(((1, 5, 500), (100, 5000), (5000,)))  # bytes of one read
        # The client disconnects after this many bytes of the last group's responses.
        self._leaves_at = chance.randint(0, 3000) if chance.random() < 0.15 else None
        self.has_left = False

    async def hold(self) -> None:
        """Send, read and close; TimeoutError if the server does not respond."""
        async with asyncio.timeout(LIMIT):
            await self._hold()

    async def _hold(self) -> None:
        limit = self._chance.choice((64, 1024, 1 << 16))
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=limit)
        try:
            for number, group in enumerate(self._groups):
                is_last = number == len(self._groups) - 1
                self.responses.expected += group
                await self._send(writer, b"".join(exchange.raw for exchange in group))
                await self._read(reader, self._leaves_at if is_last else None)
            if not self.has_left:
                if not self._groups[-1][-1].closes:
                    writer.write_eof()  # the server closes its side too
                await self._read_rest(reader)
        finally:
            self._leave(writer)

    async def _send(self, writer: asyncio.StreamWriter, raw: bytes) -> None:
        start = 0
        while start < len(raw):
            is_cut = self._chance.random() < 0.3
            end = start + self._chance.randint(1, 400) if is_cut else len(raw)
            writer.write(raw[start:end])
            start = end
            await asyncio.sleep(self._chance.choice((0, 0.001)))

    async def _read(self, reader: asyncio.StreamReader, leaves_at: int | None) -> None:
        """Read until all requests have responses or the client disconnects."""
        num_read = 0
        while self.responses.num_done < len(self.responses.expected):
            if leaves_at is not None and num_read >= leaves_at:
                self.has_left = True
                return
            data = await reader.read(self._chance.choice(self._sizes))
            num_read += len(data)
            self._feed(data)
            if not data:
                return

    async def _read_rest(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(5000):
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        self.num_read += len(data)
        self.responses.feed(data)

    def _leave(self, writer: asyncio.StreamWriter) -> None:
        """Close with a reset or gracefully."""
        if self.has_left and self._chance.random() < 0.5:
            kernel = writer.get_extra_info("socket")
            kernel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


class Fuzz:
    """Runs random exchanges with one server and compares the responses with single requests."""

    def __init__(self, port: int, seed: int) -> None:
        self._port, self._seed = port, seed
        self._known = cases(seed, NUM_CASES)
        self._alone: dict[int, Answer] = {}  # by the index of a case
        self.report = Report()

    async def run(self, num_conversations: int) -> Report:
        for place, case in enumerate(self._known):
            self._alone[place] = await self._ask_alone(case)
        free = asyncio.Semaphore(AT_ONCE)

        async def hold(number: int) -> None:
            async with free:
                await self._converse(number)

        await asyncio.gather(*(hold(number) for number in range(num_conversations)))
        return self.report

    async def _ask_alone(self, case: Case) -> Answer:
        exchange = written(case, random.Random(1), is_last=False)
        conversation = Conversation(self._port, random.Random(0), [[exchange]])
        conversation._leaves_at = None
        await conversation.hold()
        return answer(exchange.status, exchange.body)

    async def _converse(self, number: int) -> None:
        chance = random.Random(self._seed * 1_000_003 + number)
        groups = planned(chance, self._known)
        conversation = Conversation(self._port, chance, groups)
        report, responses = self.report, conversation.responses
        try:
            await conversation.hold()
            for exchange in responses.expected[: responses.num_done]:
                self._compare(exchange)
            if conversation.has_left:
                self._compare_begun(responses)
            else:
                assert responses.num_done == len(responses.expected), "a response is missing"
                assert not responses.num_misplaced, "bytes after the last response"
        except (AssertionError, h11.ProtocolError, OSError, TimeoutError, ValueError) as error:
            report.problems.append(f"conversation {number}: {type(error).__name__} {error}"[:600])
            report.num_misplaced += responses.num_misplaced
        report.num_responses += responses.num_done
        report.num_bytes += conversation.num_read

    def _compare(self, exchange: Exchange) -> None:
        """AssertionError if a response differs from the one to the same request alone."""
        if exchange.case is None:
            assert exchange.status == 400 and exchange.headers[b"connection"] == b"close"
            assert answer(400, exchange.body).rest["error"]["message"]
            return
        if exchange.version == b"1.0":
            assert b"transfer-encoding" not in exchange.headers, "chunks for HTTP/1.0"
        alone = self._answer_alone(exchange.case)
        if exchange.case.is_streamed and alone.status == 200:
            found = streamed_answer(exchange.status, exchange.body)
            fields = exchange.case.fields or {}
            options = fields.get("stream_options") or {}
            is_named = exchange.case.path in (RESPONSES, MESSAGES)  # these always have the usage
            assert (found.usage is not None) == (is_named or bool(options.get("include_usage")))
            alone = alone._replace(usage=found.usage and alone.usage)
        else:
            found = answer(exchange.status, exchange.body)
        assert found == alone, f"{exchange.case}\nalone {alone}\nfound {found}"

    def _compare_begun(self, responses: Responses) -> None:
        """AssertionError unless an incomplete response is a prefix of the complete one."""
        if responses.num_done == len(responses.expected):
            return
        exchange = responses.expected[responses.num_done]
        if exchange.case is None or not exchange.case.is_streamed or exchange.status != 200:
            return
        alone = self._answer_alone(exchange.case).choices
        events = [event for event in events_of(exchange.body) if event != "[DONE]"]
        begun: Choices = joined(events)
        for index, choice in begun.items():
            assert alone[index]["text"].startswith(choice["text"].rstrip()), (alone, begun)
            if exchange.case.path != MESSAGES:  # complete responses have arguments as objects
                _check_begun(choice["calls"], alone[index]["calls"])

    def _answer_alone(self, case: Case) -> Answer:
        places = (n for n, known in enumerate(self._known) if case in (known, known.streamed()))
        return self._alone[next(places)]


def _check_begun(begun: list[dict[str, str]], alone: list[dict[str, str]]) -> None:
    """Check the calls of an interrupted stream: all but the last are complete."""
    for number, call in enumerate(begun):
        is_last = number == len(begun) - 1
        whole = alone[number]
        assert call["name"] == whole["name"], (begun, alone)
        arguments = call["arguments"]
        is_right = whole["arguments"].startswith(arguments) if is_last else call == whole
        assert is_right, (begun, alone)


def fuzz(num_conversations: int, seed: int, num_workers: int = 0) -> Report:
    """Start a server, run random exchanges, and return a report."""
    factory = "tests.support.wire.server:wire_factory"
    with Server(factory=factory, num_workers=num_workers) as server:
        return asyncio.run(Fuzz(server.port, seed).run(num_conversations))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--conversations", type=int, default=2000, help="Number of random exchanges."
    )
    parser.add_argument("--seed", type=int, default=0, help="Random seed.")
    parser.add_argument(
        "--workers", type=int, default=0, help="Number of API processes; 0: a single process."
    )
    options = parser.parse_args()
    begun = time.perf_counter()
    report = fuzz(options.conversations, options.seed, options.workers)
    seconds = time.perf_counter() - begun
    print(f"{options.conversations} exchanges in {seconds:.0f} s: ", end="")
    print(f"{report.num_responses} complete responses, {report.num_bytes} bytes", end=", ")
    print(f"{report.num_misplaced} misplaced bytes, {len(report.problems)} failed exchanges")
    for problem in report.problems[:10]:
        print(problem)
    raise SystemExit(bool(report.problems))


if __name__ == "__main__":
    main()
