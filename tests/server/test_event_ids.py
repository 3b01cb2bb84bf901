"""A stream that is cut anywhere continues on another server, with nothing twice or missing."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from headway import Engine, Scheduler, preset
from headway.engine.async_engine import AsyncEngine
from headway.engine.input_processor import InputProcessor
from headway.engine.thread_client import ThreadClient
from headway.remote import auth
from headway.remote.client import SocketClient
from headway.remote.service import EngineService
from headway.server.app import create_app
from headway.server.context import Context
from headway.server.generation import prompt_runs
from headway.server.settings import Settings
from tests.support.served import END, MODEL, TEMPLATE, TOOL_TEMPLATE, VOCAB_SIZE, Capitals, letters
from tests.support.waiting import LIMIT, on_loop

EVENTS = {"accept": "text/event-stream"}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
SAYS = b'so <tool_call>\n{"name": "f", "arguments": {"x": "yz"}}\n</tool_call>'
THOUGHT = b"<think>hm</think>yes"
CHAT = {"messages": [{"role": "user", "content": "hey you"}], "max_tokens": 9}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("completions", {"prompt": "hello"}),
    "usage": ("completions", {"prompt": "hello", "stream_options": {"include_usage": True}}),
    "samples": ("completions", {"prompt": "hello", "n": 2, "return_token_ids": True}),
    "prompts": ("completions", {"prompt": ["hello", "you"], "return_token_ids": True}),
    "echo": ("completions", {"prompt": "hello", "echo": True, "logprobs": 1}),
    "stop": ("completions", {"prompt": "hello", "stop": ["LO"], "max_tokens": 9}),
    "chat": ("chat/completions", {**CHAT, "n": 2, "stream_options": {"include_usage": True}}),
    "chat scores": ("chat/completions", {**CHAT, "logprobs": True, "return_token_ids": True}),
    "chat tools": ("chat/completions", {
        **CHAT, "max_tokens": 99, "n": 2, "tools": [{"type": "function", "function": TOOL}],
    }),
    "chat reasoning": ("chat/completions", {
        **CHAT, "max_tokens": 19, "logprobs": True, "stream_options": {"include_usage": True},
    }),
    "messages reasoning": ("messages", {**CHAT, "max_tokens": 19}),
    "responses": ("responses", {"input": "hey you", "max_output_tokens": 9}),
    "responses scores": ("responses", {
        "input": "hey you", "include": ["message.output_text.logprobs"], "stop": ["UX", "YX"],
        "max_output_tokens": 9,
    }),
    "responses tools": ("responses", {"input": "hey", "tools": [{"type": "function", **TOOL}]}),
    "messages": ("messages", {**CHAT, "stop_sequences": ["Y"]}),
    "messages tools": ("messages", {
        **CHAT, "max_tokens": 99, "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
    }),
}  # fmt: skip


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "HANDSHAKE_SECONDS", LIMIT)


@dataclass
class Gateways:
    """Two servers of one engine."""

    clients: list[httpx.AsyncClient]
    engines: list[AsyncEngine]
    executor: Capitals

    async def post(self, which: int, path: str, headers: dict[str, str], **body: Any) -> Any:
        body = {"model": MODEL, "stream": True} | body
        return await self.clients[which].post(f"/v1/{path}", json=body, headers=headers)


@asynccontextmanager
async def gateways(
    folder: Path, says: bytes | None = None, **settings: Any
) -> AsyncIterator[Gateways]:
    executor = Capitals()
    executor.says = says
    config = preset("headway", max_model_len=256, num_blocks=256, block_size=16)
    service = EngineService(ThreadClient(Engine(Scheduler(config), executor)))
    path = folder / "engine"
    await service.start(path)
    engines = [AsyncEngine(SocketClient(path)) for _ in range(2)]
    apps = []
    for engine in engines:
        processor = InputProcessor(
            tokenizer=letters(TOOL_TEMPLATE if says else TEMPLATE), hidden_size=8,
            vocab_size=VOCAB_SIZE, eos_ids=frozenset({END}),
        )  # fmt: skip
        context = Context(
            engine=engine,
            input_processor=processor,
            model_name=MODEL,
            max_model_len=256,
            settings=Settings(**settings),
        )
        apps.append(create_app(context))
    for engine in engines:
        await engine.start()
    try:
        yield Gateways([client_of(app) for app in apps], engines, executor)
    finally:
        executor.gate.set()
        for engine in engines:
            await engine.close()
        await service.close()


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


def split(text: str) -> list[tuple[str, str]]:
    """The events: id and all other lines."""
    found = []
    for event in text.split("\n\n")[:-1]:
        first, _, rest = event.partition("\n")
        assert first.startswith("id: ")
        found.append((first.removeprefix("id: "), rest))
    return found


@pytest.mark.parametrize("kind", BODIES)
def test_a_stream_continues_behind_any_event(kind: str, tmp_path: Path) -> None:
    @on_loop
    async def run() -> None:
        path, body = BODIES[kind]
        says = SAYS if "tools" in kind else THOUGHT if "reasoning" in kind else None
        parser = "qwen3" if "reasoning" in kind else None
        async with gateways(tmp_path, says, reasoning_parser=parser) as here:
            response = await here.post(0, path, EVENTS, **body)
            assert response.status_code == 200, response.text
            whole = split(response.text)
            assert len({id for id, _ in whole}) == len(whole)
            plain = await here.post(0, path, {}, **body)
            assert "id: " not in plain.text.replace('"id: ', "")
            for place, (id, _) in enumerate(whole):
                again = await here.post(1, path, {"last-event-id": id}, **body)
                assert again.status_code == 200, again.text
                rest = split(again.text)
                assert content(whole[: place + 1] + rest) == content(whole), (place, id)
                ids = {each for each, _ in whole[: place + 1]}
                assert not ids & {each for each, _ in rest}
            assert not here.engines[1].num_open

    run()


@on_loop
async def test_an_event_that_was_cut_is_sent_again(tmp_path: Path) -> None:
    """The id of an event counts once the whole event has arrived."""
    path, body = BODIES["usage"]
    async with gateways(tmp_path) as here:
        text = (await here.post(0, path, EVENTS, **body)).text
        whole, end = split(text), text.index("\n\n", text.index("\n\n") + 2) + 2
        for cut in (end - 1, end, end + 2, text.index("\n", end), text.index("data: ", end) + 9):
            known = split(text[:cut])
            again = await here.post(1, path, {"last-event-id": known[-1][0]}, **body)
            assert content(known + split(again.text)) == content(whole), text[:cut]


def content(events: list[tuple[str, str]]) -> Any:
    """What a client makes of events, however the text is divided."""
    texts: dict[str, Any] = {}
    others: list[str] = []
    for _, event in events:
        data = event.partition("data: ")[2]
        value = {} if data == "[DONE]" else json.loads(data)
        value.pop("sequence_number", None)
        parts = {f"{name} {place}": part for place, name, part in parts_of(value)}
        if not parts:
            others.append(json.dumps(value, sort_keys=True) if value else data)
        for key, part in parts.items():
            texts[key] = texts[key] + part if key in texts else part
    return texts, sorted(others)


def parts_of(value: dict[str, Any]) -> Iterator[tuple[int, str, Any]]:
    """Place, name and value of all that is added to earlier parts."""
    delta = value.get("delta")
    if isinstance(delta, str):
        yield value["output_index"], "delta", delta
        yield value["output_index"], "scores", value.get("logprobs", [])
    elif value.get("type") == "content_block_delta":
        yield value["index"], "block", next(text for name, text in delta.items() if name != "type")
    for choice in value.get("choices", ()):
        where, delta = choice["index"], choice.get("delta", {})
        found = {"text": choice.get("text"), "content": delta.get("content")}
        found |= {"reasoning": delta.get("reasoning")}
        found |= {"ids": choice.get("token_ids"), "end": choice["finish_reason"]}
        found |= {f"scores {name}": each for name, each in (choice["logprobs"] or {}).items()}
        for call in delta.get("tool_calls", ()):
            found |= {"call": call.get("id"), "arguments": call["function"]["arguments"]}
        yield from ((where, name, part) for name, part in found.items() if part is not None)


def test_sequence_numbers_continue(tmp_path: Path) -> None:
    @on_loop
    async def run() -> None:
        async with gateways(tmp_path) as here:
            path, body = BODIES["responses"]
            whole = split((await here.post(0, path, EVENTS, **body)).text)
            for place, (id, _) in enumerate(whole[:-1]):
                again = split((await here.post(1, path, {"last-event-id": id}, **body)).text)
                numbers = [int(re.findall(r'"sequence_number":(\d+)', e)[0]) for _, e in again]
                assert numbers == list(range(place + 1, place + 1 + len(numbers)))

    run()


def test_what_cannot_be_resumed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_runs, "SEARCH_SECONDS", 0.0)

    @on_loop
    async def run() -> None:
        async with gateways(tmp_path) as here:
            path, body = BODIES["completion"]
            ids = [id for id, _ in split((await here.post(0, path, EVENTS, **body)).text)]
            unknown = re.sub("-.{24}/", "-" + "0" * 24 + "/", ids[-2])
            cases = [
                (400, "odd", body), (400, f"{ids[0]}\x7f", body), (410, unknown, body),
                (409, ids[-2], {"prompt": "other"}), (409, ids[-2], {**body, "max_tokens": 3}),
                (409, ids[-2], {**body, "n": 2}),
            ]  # fmt: skip
            for status, id, sent in cases:
                again = await here.post(1, path, {"last-event-id": id}, **sent)
                assert again.status_code == status, (id, again.text)
            path, body = BODIES["chat"]
            again = await here.post(1, path, {"last-event-id": ids[-2]}, **body)
            assert again.status_code == 409
            path, body = BODIES["completion"]
            again = await here.post(1, path, {"last-event-id": "odd"}, **body, stream=False)
            assert again.status_code == 200, "only streams can be resumed"

    run()
