"""Requests whose client is lost: another client continues them; without one they end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from headway.engine import messages
from headway.engine.async_engine import OnMessages
from headway.engine.clock import VirtualClock
from headway.engine.messages import (
    Cancel,
    FinishInfo,
    FromLoop,
    Goodbye,
    Refusal,
    Resume,
    SampleUpdate,
    Submit,
    TokenBatch,
    ToLoop,
)
from headway.engine.queries import FindRequest
from headway.remote import codec, service
from headway.remote.journal import Journal
from headway.remote.service import ClientConnection, EngineService
from headway.request import RequestParams
from headway.sampling_params import Sampling, TokenLogprobs
from tests.remote.test_sockets import connect, patient, replica, submit
from tests.support.waiting import on_loop, until

__all__ = ["patient"]
SECONDS = 10.0
ENDED = FinishInfo("length", None, None, 0, 0, 0.0, 0.0, 0.0)


class Written:
    """The writer of a connection: decodes what is written."""

    def __init__(self) -> None:
        self.data, self.is_closed = bytearray(), False
        self.transport = self

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def take(self) -> list[FromLoop]:
        return codec.take_items(self.data, codec.from_engine())


@dataclass
class View:
    """What a client has of one request."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    ends: list[FinishInfo | None]

    @classmethod
    def of(cls, n: int) -> View:
        return cls([[] for _ in range(n)], [[] for _ in range(n)], [None] * n)

    def add(self, update: SampleUpdate) -> None:
        assert self.ends[update.sample] is None, "nothing follows an end"
        self.tokens[update.sample] += update.tokens
        self.logprobs[update.sample] += [each.logprob for each in update.logprobs or ()]
        self.ends[update.sample] = update.end


@dataclass(eq=False)
class Made:
    """A request as the world knows it: what the engine has made, and who has it."""

    submit: Submit
    made: View
    owner: Client | None
    expires: float | None = None  # the world's clock
    is_cancelled: bool = False

    @property
    def is_ended(self) -> bool:
        return all(self.made.ends)


@dataclass(eq=False)
class Client:
    connection: ClientConnection
    written: Written = field(default_factory=Written)
    views: dict[str, View] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    def read(self) -> None:
        for message in self.written.take():
            if isinstance(message, TokenBatch):
                for id, tokens in zip(message.ids, message.tokens, strict=True):
                    if id in self.views:
                        self.views[id].add(SampleUpdate(id, 0, tokens))
            elif isinstance(message, SampleUpdate) and message.id in self.views:
                self.views[message.id].add(message)
            elif isinstance(message, Refusal):
                self.refused.append(message.id)
                self.views.pop(message.id, None)
            elif isinstance(message, messages.QueryResult):
                self.answers.append(message.value)


class World:
    """A service with an engine that makes random tokens, and clients that come and go."""

    def __init__(self, seed: int) -> None:
        self.choose, self.clock = random.Random(seed), VirtualClock()
        self.service = EngineService(self, journal=Journal(SECONDS, self.clock.now))
        self.clients: list[Client] = []
        self.requests: dict[str, Made] = {}  # by id; the latest move of each
        self.running: dict[str, Made] = {}  # by the engine's ids
        self.cancelled: set[str] = set()  # by the engine

    # The engine.

    async def open(self, on_messages: OnMessages) -> None: ...

    async def close(self) -> None: ...

    def send(self, sent: list[ToLoop]) -> None:
        for message in sent:
            if isinstance(message, Submit):
                _, _, id = message.id.partition("-")
                self.running[message.id] = self.requests[id]
            elif isinstance(message, Cancel) and message.id in self.running:
                made = self.running.pop(message.id)
                self.cancelled.add(made.submit.id)
                left = [n for n, end in enumerate(made.made.ends) if end is None]
                ends = [SampleUpdate(message.id, n, [], end=ENDED) for n in left]
                for each in ends if made.owner is not None else ():
                    made.made.add(each)
                self.service._receive([*ends])

    def step(self) -> None:
        batch, updates = TokenBatch([], []), list[FromLoop]()
        for engine_id, made in list(self.running.items()):
            has_scores = made.submit.params.sampling is not None
            for number, ended in enumerate([*made.made.ends]):
                if ended is not None or self.choose.random() < 0.3:
                    continue
                new = [self.choose.randrange(999) for _ in range(self.choose.randint(1, 3))]
                end = ENDED if self.choose.random() < 0.1 else None
                scores = [TokenLogprobs(t, -float(t), 1, b"") for t in new] if has_scores else None
                update = SampleUpdate(engine_id, number, new, scores, end=end)
                made.made.add(update)
                if made.submit.params.n == 1 and not has_scores and end is None:
                    batch.ids.append(engine_id)
                    batch.tokens.append(new)
                else:
                    updates.append(update)
            if made.is_ended:
                del self.running[engine_id]
                made.owner, made.expires = None, self.clock.now() + SECONDS
        self.service._receive([batch, *updates])
        for client in self.clients:
            client.read()

    # Clients.

    def give(self, client: Client, *sent: ToLoop) -> None:
        self.send([*self.service._to_engine(client.connection, list(sent))])
        client.read()

    def connect(self) -> Client:
        written = Written()
        connection = self.service._connected(written)  # type: ignore[arg-type]
        self.clients.append(Client(connection, written))
        return self.clients[-1]

    def submit(self, client: Client) -> None:
        n = self.choose.choice([1, 1, 2, 3])
        sampling = Sampling(logprobs=1) if self.choose.random() < 0.3 else None
        id = f"r{len(self.requests)}" + self.choose.choice(["", "~1", "~2"])
        params = RequestParams(n=n, sampling=sampling, deadline=5.0)
        made = Made(Submit(id, [1, 2, len(id)], params), View.of(n), client)
        self.requests[id], client.views[id] = made, View.of(n)
        self.give(client, made.submit)

    def lose(self, client: Client) -> None:
        self.service.journal.orphan(client.connection)
        self.leave(client)

    def leave(self, client: Client) -> None:
        self.clients.remove(client)
        del self.service.clients[client.connection.number]
        for made in self.requests.values():
            if made.owner is client:
                made.owner, made.expires = None, self.clock.now() + SECONDS

    def say_goodbye(self, client: Client) -> None:
        for made in self.requests.values():
            made.is_cancelled |= made.owner is client
        self.give(client, Goodbye())
        assert client.written.is_closed
        self.leave(client)

    def cancel(self, client: Client) -> None:
        if mine := [m for m in self.requests.values() if m.owner is client]:
            made = self.choose.choice(mine)
            made.is_cancelled = True
            self.give(client, Cancel(made.submit.id))

    def resume(self, client: Client) -> None:
        if not self.requests:
            return
        made = self.choose.choice([*self.requests.values()])
        id, before = made.submit.id, made.owner
        due = made.expires is not None and made.expires <= self.clock.now()
        can = not (made.is_cancelled or due)
        if before is client:
            return
        self.give(client, FindRequest(id.partition("~")[0], number=1))
        assert client.answers.pop() == (["engine", id] if can else None)
        client.views[id] = View.of(made.submit.params.n)
        again = Submit(id, [1, 2, len(id)], RequestParams(
            n=made.submit.params.n, sampling=made.submit.params.sampling, deadline=7.0,
        ))  # fmt: skip
        self.give(client, Resume(again, id))
        if not can:
            assert client.refused[-1] == id
            return
        assert client.views[id] == made.made, "all that the engine has made"
        if before is not None:
            before.read()
            assert before.refused[-1] == id
        if not made.is_ended:
            made.owner, made.expires = client, None

    def check(self) -> None:
        for client in self.clients:
            for id, view in client.views.items():
                if self.requests[id].owner is client:
                    assert view == self.requests[id].made
        for made in self.requests.values():
            due = made.expires is not None and made.expires <= self.clock.now()
            if due and not made.is_ended:
                assert made.submit.id in self.cancelled


@pytest.mark.parametrize("seed", range(40))
def test_a_request_has_one_owner_who_gets_all_of_it(seed: int) -> None:
    world = World(seed)
    acts = [world.submit, world.submit, world.resume, world.resume, world.cancel]
    for _ in range(150):
        if not world.clients or world.choose.random() < 0.1:
            world.connect()
        client = world.choose.choice(world.clients)
        world.choose.choice([*acts, *[world.lose, world.say_goodbye] * (len(world.clients) > 1)])(
            client
        )
        world.clock.advance_to(world.clock.now() + world.choose.choice([0.0, 1.0, 4.0]))
        world.step()
        world.check()
    for client in [*world.clients]:
        world.lose(client)
    for _ in range(2):  # some end in the first of these steps
        world.clock.advance_to(world.clock.now() + SECONDS)
        world.step()
    assert not world.service.journal.requests and not world.running


def abort(client: object) -> None:
    """End a connection as if the client's process were killed."""
    client._writer.transport.abort()  # type: ignore[attr-defined]


@on_loop
async def test_another_client_continues_the_request_of_a_lost_one() -> None:
    async with replica() as (server, address, executor):
        (one, first), (two, second) = await connect(address), await connect(address)
        executor.num_free_steps = 2
        one.send([submit("r")])
        await until(lambda: len(first.tokens("r")) == 2)
        abort(one)
        await until(lambda: len(server.clients) == 1)
        two.send([Resume(submit("r"), "r")])
        await until(lambda: second.tokens("r"))
        assert second.tokens("r") == b"HE" and server.num_open == 1
        executor.gate.set()
        await until(lambda: second.has_ended("r"))
        assert second.tokens("r") == b"HELLO" and server.num_open == 0
        await one.close()
        await two.close()


@on_loop
async def test_a_client_that_does_not_read_is_lost_with_what_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another client continues its request, and gets all of it."""
    monkeypatch.setattr(service, "MAX_UNSENT", 1 << 20)
    async with replica() as (server, address, executor):
        (one, first), (two, second) = await connect(address), await connect(address)
        executor.num_free_steps = 2
        one.send([submit("r")])
        await until(lambda: len(first.tokens("r")) == 2)
        one._writer.transport.pause_reading()  # type: ignore[union-attr]
        slow = server.clients["0"]
        for _ in range(1000):  # also what the system holds
            if slow.writer.is_closing():
                break
            slow.send([messages.QueryResult(1, "x" * (1 << 18))])
            assert slow.writer.transport.get_write_buffer_size() < 2 << 20
        await until(lambda: list(server.clients) == ["1"])
        executor.gate.set()
        two.send([Resume(submit("r"), "r")])
        await until(lambda: second.has_ended("r"))
        assert second.tokens("r") == b"HELLO" and server.num_open == 0
        await one.close()
        await two.close()


@on_loop
async def test_a_client_that_closes_takes_its_requests_with_it() -> None:
    async with replica() as (server, address, executor):
        (one, _), (two, second) = await connect(address), await connect(address)
        executor.gate.clear()
        one.send([submit("r")])
        await until(lambda: server.num_open == 1)
        await one.close()
        await until(lambda: len(server.clients) == 1)
        assert server.num_open == 0
        two.send([FindRequest("r", number=3), Resume(submit("r"), "r")])
        await until(lambda: second.of(Refusal))
        (answer,), (refusal,) = second.of(messages.QueryResult), second.of(Refusal)
        assert answer.value is None and refusal.kind == "NotResumable"  # type: ignore[attr-defined]
        await two.close()


@on_loop
async def test_a_client_that_sends_wrong_frames_leaves_no_orphan() -> None:
    async with replica() as (server, address, executor):
        client, received = await connect(address)
        executor.gate.clear()
        client.send([submit("r")])
        await until(lambda: server.num_open == 1)
        client._writer.write(codec.frame(["odd"]))  # type: ignore[union-attr]
        await until(lambda: received.of(messages.EngineStopped))
        assert server.num_open == 0
        await client.close()


@on_loop
async def test_a_request_is_resumed_only_with_its_own_prompt_and_params() -> None:
    async with replica() as (_, address, executor):
        (one, first), (two, second) = await connect(address), await connect(address)
        executor.gate.clear()
        one.send([submit("r")])
        await until(lambda: executor.is_blocked)
        other = Submit("r", submit("r").prompt, RequestParams(max_tokens=4, ignore_eos=True))
        two.send([Resume(submit("r", b"other"), "r"), Resume(other, "r")])
        await until(lambda: len(second.of(Refusal)) == 2)
        assert all(each.fields["differs"] for each in second.of(Refusal))  # type: ignore[attr-defined]
        executor.gate.set()
        await until(lambda: first.has_ended("r"))
        await one.close()
        await two.close()
