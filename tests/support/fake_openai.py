"""A server with enough of OpenAI's API for load tests; the model name selects its behaviour.

    with FakeServer() as server: server.url, server.asked

Models: "good"; "busy" returns 429; "broken" disconnects mid-stream; "mute" never responds; "failing"
sends an error event; "garbage" sends no HTTP; "odd" sends events that are not objects; "aborting"
finishes with abort; "closing" closes the connection after every response; "rude" does so unannounced.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

from tests.support.waiting import LIMIT

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"


class FakeServer:
    """Runs on its own thread; `asked` has the received bodies in order of arrival."""

    def __init__(self, gap: float = 0.0, model: str = "good", api_key: str | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.num_connections = 0
        self.most_open = 0
        self._num_open = 0
        self._gap, self._model, self._api_key = gap, model, api_key
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(LIMIT)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Handle one request; return False to close the connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        if self._api_key is not None and f"Bearer {self._api_key}" not in head:
            return self._plain(writer, 401, {"error": {"message": "wrong key"}})
        if head.startswith("GET"):
            return self._plain(writer, 200, {"data": [{"id": self._model}]})
        self.asked.append(asked := json.loads(body))
        self.times.append(time.perf_counter())
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        try:
            return await self._generate(asked, writer)
        finally:
            self._num_open -= 1

    def _plain(self, writer: asyncio.StreamWriter, status: int, value: Any) -> bool:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} Well\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return True

    async def _generate(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        model, count = asked["model"], asked["max_tokens"]
        if model == "busy":
            return self._plain(writer, 429, {"error": {"message": "too much waits"}})
        if model == "garbage":
            writer.write(b"220 this is a mail server\r\n\r\n")
            return True
        if model == "mute":
            await self._stop.wait()
        writer.write(HEAD + (b"Connection: close\r\n\r\n" if model == "closing" else b"\r\n"))
        if "messages" in asked:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(count):
            await asyncio.sleep(self._gap)
            if number == count // 2 and model in ("broken", "failing", "odd"):
                return self._fail(writer, model)
            self._event(writer, {"choices": [_choice(asked, " word", None)]})
            await writer.drain()
        self._event(writer, {"choices": [_choice(asked, "", _reason(model))]})
        usage = {"prompt_tokens": _length(asked), "completion_tokens": count}
        self._event(writer, {"choices": [], "usage": usage})
        self._event(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")
        return model not in ("closing", "rude")

    def _fail(self, writer: asyncio.StreamWriter, model: str) -> bool:
        if model == "failing":
            self._event(writer, {"error": {"message": "the engine died"}})
            writer.write(b"0\r\n\r\n")
        if model == "odd":
            self._event(writer, ["no", "object"])
        return False

    def _event(self, writer: asyncio.StreamWriter, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        event = b"data: " + data + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))


def _choice(asked: dict[str, Any], text: str, reason: str | None) -> dict[str, Any]:
    said: dict[str, Any] = {"delta": {"content": text}} if "messages" in asked else {"text": text}
    return {"index": 0, "finish_reason": reason, **said}


def _reason(model: str) -> str:
    return "abort" if model == "aborting" else "length"


def _length(asked: dict[str, Any]) -> int:
    if "messages" in asked:
        return len(asked["messages"][0]["content"].split()) + 10  # as added by a chat template
    prompt = asked["prompt"]
    return len(prompt.split() if isinstance(prompt, str) else prompt)
