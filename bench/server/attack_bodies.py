"""Malicious requests: each attack sends them to one local server. Random request bodies.

An attack returns counts of HTTP statuses or other outcomes. All attacks are bounded in number and
time. Random bodies are valid ones of /v1/messages and /v1/responses with a few members changed;
they depend only on the path, the seed and their number.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import resource
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from headway.lab.loadgen.http_client import Address, Client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = "The quick brown fox, jumps over the lazy dog. "
HUGE = 15_900_000  # bytes; just below the server's limit
NUM_SOCKETS = 300
HOLD_SECONDS = 4.0  # for which idle sockets stay open
REQUEST_TIMEOUT = 240.0
Attack = Callable[[Address], Awaitable[Counter[str]]]
Make = Callable[[], Iterable[tuple[str, bytes]]]  # paths and bodies


def post(path: str, **fields: Any) -> tuple[str, bytes]:
    return path, json.dumps(fields).encode()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(arguments: str) -> dict[str, Any]:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def huge_text() -> Iterable[tuple[str, bytes]]:
    yield post(COMPLETIONS, prompt=(WORDS * HUGE)[:HUGE])
    yield post(CHAT, messages=[user("a" * HUGE)])
    odd = json.dumps({"prompt": "😀" + "a b" * (HUGE // 3)}, ensure_ascii=False)
    yield COMPLETIONS, odd.encode()


def tokenize() -> Iterable[tuple[str, bytes]]:
    yield post("/tokenize", prompt=(WORDS * HUGE)[:HUGE])
    yield post("/tokenize", prompt="\n" * (HUGE // 2), return_token_strs=True)
    yield post("/tokenize", prompt=WORDS * 20_000, return_token_strs=True)


def detokenize() -> Iterable[tuple[str, bytes]]:
    yield post("/detokenize", tokens=[5000] * (HUGE // 6))
    yield post("/detokenize", tokens=[5000] * 262_144)
    yield post("/detokenize", tokens=["a"] * 500_000)


def many_values() -> Iterable[tuple[str, bytes]]:
    yield COMPLETIONS, b'{"prompt": [' + b"[]," * 5_000_000 + b"[]]}"
    yield post(COMPLETIONS, prompt="a", logit_bias={str(number): "a" for number in range(500_000)})
    yield post(COMPLETIONS, prompt="a", allowed_token_ids=[1] * 500_000)
    yield post(CHAT, messages=[call("[" + "[]," * 5_000_000 + "[]]"), user("a")])


def many_messages() -> Iterable[tuple[str, bytes]]:
    yield post(CHAT, messages=[user("a")] * 300_000)
    yield post(CHAT, messages=[user("a")] * 8000)
    yield post(CHAT, messages=[user([{"type": "text", "text": "a"}] * 15_000)])


def long_stops() -> Iterable[tuple[str, bytes]]:
    yield post(COMPLETIONS, prompt="a", stop=["ab" * 100_000] * 64)
    yield post(COMPLETIONS, prompt="a", bad_words=["ab" * 100_000] * 64)
    stops = [f"{number:02}" + "a" * 120 for number in range(64)]
    yield post(COMPLETIONS, prompt="a", stop=stops, n=32, max_tokens=2)


def echo() -> Iterable[tuple[str, bytes]]:
    fields = {"prompt": WORDS * 120, "echo": True, "logprobs": 100, "max_tokens": 1}
    yield post(COMPLETIONS, **fields)
    yield post(COMPLETIONS, **fields, n=1000)


def grammars() -> Iterable[tuple[str, bytes]]:
    lark = "start: " + " ".join(f"r{number}" for number in range(2000)) + "\n"
    lark += "\n".join(f'r{number}: ("a" | "b" r{number})*' for number in range(2000))
    for form in (
        {"choice": [f"a choice of {number}" for number in range(2010)]},
        {"regex": "(((a{1,200}){1,200}){1,200}){1,200}"},
        {"regex": "(a|b|ab)*" * 2000},
        {"grammar": lark},
    ):
        yield post(COMPLETIONS, prompt="a", max_tokens=2, structured_outputs=form)


def referring_tool() -> Iterable[tuple[str, bytes]]:
    node = {"type": "object", "properties": {"next": {"$ref": "#"}, "other": {"$ref": "#/$defs/x"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": node}}
    yield post(CHAT, messages=[user("a")], tools=[tool], tool_choice="required", max_tokens=2)


def many_prompts() -> Iterable[tuple[str, bytes]]:
    yield post(COMPLETIONS, prompt=[f"{number}" for number in range(1025)], max_tokens=1)


def odd_values() -> Iterable[tuple[str, bytes]]:
    yield post(CHAT, messages=[user("a"), call("{}"), user("b")], max_tokens=2)
    for value in ("1e999", "-1e999", "NaN", "9" * 5000, "-1", "0.5", "1e308", "null", "true"):
        for name in ("max_tokens", "n", "temperature", "top_k", "seed", "priority", "deadline"):
            yield COMPLETIONS, f'{{"prompt": "a", "max_tokens": 1, "{name}": {value}}}'.encode()
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        for depth in (900, 5000, 1_000_000):
            nested = opening * depth + b"1" + closing * depth
            yield COMPLETIONS, b'{"prompt": "a", "max_tokens": 1, "x": ' + nested + b"}"
    yield COMPLETIONS, rb'{"prompt": "a\ud800"}'
    yield CHAT, rb'{"messages": [{"role": "user", "content": "\udfff\ud800"}]}'
    yield COMPLETIONS, b'{"prompt": [' + rb'"\ud83d\ude00",' * 400_000 + rb'"\ud83d"]}'


async def status(client: Client, path: str, body: bytes | None = None) -> str:
    """The status of a response, or the kind of failure."""
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT):
            asked = client.get(path) if body is None else client.post(path, body)
            return str((await asked).status)
    except Exception as error:  # count any failure
        return type(error).__name__


def posts(make: Make) -> Attack:
    """An attack that sends one body after the other; the bodies are made beforehand."""

    async def attack(address: Address) -> Counter[str]:
        client = Client(address)
        outcomes = Counter([await status(client, path, body) for path, body in made])
        client.close()
        return outcomes

    made = list(make())
    return attack


async def _connect(address: Address, count: int, first: bytes) -> list[asyncio.StreamWriter]:
    writers = []
    for _ in range(count):
        try:
            async with asyncio.timeout(2.0):
                _, writer = await asyncio.open_connection(address.host, address.port)
        except OSError:  # includes TimeoutError
            break
        writer.write(first)
        writers.append(writer)
    return writers


def sockets(count: int, first: bytes) -> Attack:
    """An attack that opens connections, sends the beginning of a request, and keeps them open."""

    async def attack(address: Address) -> Counter[str]:
        writers = await _connect(address, count, first)
        await asyncio.sleep(HOLD_SECONDS)
        for writer in writers:
            writer.close()
        return Counter({"connected": len(writers)})

    return attack


async def dripped_body(address: Address) -> Counter[str]:
    """Send bodies byte by byte on a few connections."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    writers = await _connect(address, 20, f"{head}Content-Length: 100000\r\n\r\n".encode())
    for _ in range(80):
        for writer in writers:
            writer.write(b" ")
        await asyncio.sleep(HOLD_SECONDS / 80)
    for writer in writers:
        writer.close()
    return Counter({"connected": len(writers)})


def beyond_descriptors() -> Attack:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sockets(min(limit, 1024) + 200, b"")


def attacks() -> dict[str, Callable[[], Attack]]:
    """Factories of attacks by name."""
    bodies: list[Make] = [
        huge_text, tokenize, detokenize, many_values, many_messages, long_stops, echo, grammars,
        referring_tool, many_prompts, odd_values,
    ]  # fmt: skip
    return {make.__name__: lambda make=make: posts(make) for make in bodies} | {
        "partial_heads": lambda: sockets(NUM_SOCKETS, b"POST /v1/completions HTTP/1.1\r\nHost"),
        "silent_sockets": lambda: sockets(NUM_SOCKETS, b""),
        "beyond_descriptors": beyond_descriptors,
        "dripped_body": lambda: dripped_body,
    }


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
MAX_CHANGES = 3  # of one body
DEPTHS = (3, 60, 250)  # of nested values
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PARTS = [{"type": "text", "text": "Name a"}, {"type": "text", "text": "city."}]
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {
        "model": "smollm2-135m", "max_tokens": 2, "stream": False, "system": "Be brief.",
        "messages": [
            {"role": "user", "content": PARTS},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
        ],
        "tools": [{"name": "weather", "description": "Weather.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low"}, "thinking": {"type": "disabled"},
        "stop_sequences": ["\n\n"], "temperature": 0.5, "top_k": 5, "top_p": 0.9,
        "metadata": {"user_id": "someone"},
    },
    RESPONSES: {
        "model": "smollm2-135m", "max_output_tokens": 2, "stream": False,
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Name a city."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather",
             "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}],
        "tool_choice": "auto", "parallel_tool_calls": False, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"], "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "disabled",
        "temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}, "store": False,
    },
}  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.5, 1e308, float("inf"), float("nan"), 2**31, 2**63, -(2**64),
    10**400, "", "a", "9" * 400, "a" * 20_000, "\x00", "\ud800", "\udfff\ud800", "😀\u202e\ufeff",
    [], {}, [None], [[]], [{}], {"": None}, {"type": None}, {"type": "text"}, {"type": "image"},
    {"type": "json_schema", "schema": {}}, {"type": "json_schema", "schema": {"$ref": "#"}},
    {"$ref": "#/none"}, "user", "assistant", "system", "developer", "tool", "robot", "required",
    "any", "json_object", {"type": "function", "name": "weather"}, {"type": "tool", "name": "a"},
)  # fmt: skip
UNKNOWN = ("n", "best_of", "extra", "logit_bias", "stop", "seed", "priority", "cache_control", "")


def random_bodies(path: str, count: int, seed: int) -> Iterator[bytes]:
    """Bodies for a path; a string or number in them may be one that JSON does not allow."""
    for number in range(count):
        source = random.Random(f"{path} {seed} {number}")
        body = copy.deepcopy(BODIES[path])
        body["stream"] = source.random() < 0.5
        for _ in range(source.randint(1, MAX_CHANGES)):
            _change(body, source)
        data = json.dumps(body, ensure_ascii=source.random() < 0.8)
        yield data.encode("utf-8", "surrogatepass")


def _change(body: dict[str, Any], source: random.Random) -> None:
    """Replace, remove, repeat, wrap or add one member of a random object or list."""
    at = source.choice(list(_containers(body)))
    keys = list(at) if isinstance(at, dict) else list(range(len(at)))
    key = source.choice(keys) if keys else None
    kind = source.choice(("replace", "replace", "replace", "remove", "repeat", "wrap", "add"))
    if kind == "add" or key is None:
        value = source.choice(VALUES)
        if isinstance(at, dict):
            at[source.choice(UNKNOWN)] = value
        else:
            at.append(value)
    elif kind == "replace":
        at[key] = copy.deepcopy(source.choice(VALUES))
    elif kind == "remove":
        del at[key]
    elif kind == "repeat":
        at[key] = [copy.deepcopy(at[key]) for _ in range(source.choice((2, 100)))]
    else:
        for _ in range(source.choice(DEPTHS)):
            at[key] = [at[key]] if source.random() < 0.5 else {"a": at[key]}


def _containers(value: Any) -> Iterator[Any]:
    """All objects and lists in a value that is not deeply nested."""
    waiting = [value]
    while waiting:
        at = waiting.pop()
        if isinstance(at, dict | list):
            yield at
            waiting.extend(at.values() if isinstance(at, dict) else at)
