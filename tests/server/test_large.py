"""Large requests do not delay others: they are refused early or processed in small parts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import AddedToken

from headway.engine.input_processor import InputProcessor
from headway.engine.queue_limits import QueueLimits
from headway.errors import InvalidRequest, RequestTooLong
from headway.sampling_params import Sampling, SamplingParams
from headway.server.generation import request_fields
from headway.server.http import json_body, offload
from headway.server.http.errors import ApiError
from headway.server.http.json_body import json_limit_error, parse_object
from headway.server.http.json_output import large_to_json, to_json
from headway.server.openai.protocol import CompletionRequest, DetokenizeRequest
from headway.text import long_text, tokenizer
from headway.text.tokenizer import Tokenizer, tokenizer_from_gguf
from tests.support.served import Server, letters, server, with_server
from tests.support.waiting import on_loop, until, wait_until
from tests.text.test_tokenizer import CORPUS, bundled, byte_level_metadata, sentencepiece_metadata

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KINDS = ("bundled", "gpt2", "llama3", "qwen2", "smollm", "sentencepiece", "strips")
SPECIAL = ["<|im_end|>", "<|im_start|>", "<s>", "</s>", "<think>", "une ide\u0301e", "une idée"]
BITS = [
    *SPECIAL,
    "a b",
    " ",
    "\n",
    "1",
    "12",
    ".",
    "'s",
    "'S",
    "é",
    "e\u0301",
    "中",
    "。",
    "가.",
    "K",
]
BITS += ["\u0958.", "नमस्ते ", "ที่ ก ", "لا ", "ᄀ", "ᅡ", "ᆨ ", "\u0301.", "Ⅻ.", "½,", "\u1c80 "]
pieces = st.lists(
    st.sampled_from([*CORPUS, *BITS, "\u212aa", "\x04"]) | st.text(max_size=4), max_size=12
).map("".join)
relaxed = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@cache
def made(kind: str, path: Path) -> Tokenizer:
    """A tokenizer of each kind, made once."""
    if kind == "bundled":
        return bundled(path)
    if kind == "sentencepiece":
        return tokenizer_from_gguf(sentencepiece_metadata())
    if kind != "strips":
        return tokenizer_from_gguf(byte_level_metadata(kind))
    found = tokenizer_from_gguf(byte_level_metadata("gpt2"))
    found._backend.add_tokens([
        AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True),
        AddedToken("word", single_word=True),
    ])  # fmt: skip
    return Tokenizer(found._backend)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every text as long, and cut it wherever possible."""
    monkeypatch.setattr(tokenizer, "SHORT", 0)
    monkeypatch.setattr(long_text, "PIECE", 1)
    monkeypatch.setattr(long_text, "WINDOW", 3)


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(text=pieces, special=st.booleans())
@example(text="a <|im_end|> b. une ide\u0301e, <s> x", special=True)
@example(text="a\u0958. b\u0301. 가.", special=False)
@example(text="ab <left> c. <right> d word. word words,word", special=False)
def test_tokens_of_pieces_equal_tokens_of_the_text(
    smollm2: Path, small_pieces: None, kind: str, text: str, special: bool
) -> None:
    ours = made(kind, smollm2)
    theirs = ours._backend.encode(text, add_special_tokens=special)
    assert ours.encode(text, special=special) == theirs.ids


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2", "smollm"])
@relaxed
@given(text=pieces)
@example(text="a\u0958.. b\u0301.. 가..")
def test_every_cut_is_a_boundary_of_the_pre_tokenizer(
    smollm2: Path, small_pieces: None, kind: str, text: str
) -> None:
    """Merges never cross such a boundary, with any vocabulary."""
    backend, cutter = made(kind, smollm2)._backend, made(kind, smollm2)._cutter
    assert cutter is not None and backend.pre_tokenizer is not None

    def split(part: str) -> list[str]:
        normal = backend.normalizer.normalize_str(part) if backend.normalizer else part
        return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]

    assert [each for piece in cutter.pieces(text) for each in split(piece)] == split(text)


@pytest.mark.parametrize("kind", ["bundled", "gpt2", "llama3", "qwen2", "smollm", "strips"])
def test_ordinary_text_is_cut_into_small_pieces(smollm2: Path, kind: str) -> None:
    cutter = made(kind, smollm2)._cutter
    assert cutter is not None
    text = "Some words, and 12 numbers.\n" * 10_000
    found = list(cutter.pieces(text))
    assert "".join(found) == text
    assert all(len(piece) < long_text.PIECE + 100 for piece in found)


def test_text_is_not_cut_where_tokens_could_differ() -> None:
    assert letters()._cutter is None  # merges may cross any position
    assert tokenizer_from_gguf(sentencepiece_metadata())._cutter is None
    backend = tokenizer_from_gguf(byte_level_metadata("qwen2"))._backend
    # appears only after NFC normalization
    backend.add_tokens([AddedToken("idée", normalized=True)])
    assert Tokenizer(backend)._cutter is None


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(text=pieces)
@example(text="\x04" * 50)
@example(text="word   <right>      <left>" + " " * 40)
@example(text="\u1fbe\u0308\u0301" * 20)
def test_the_lower_bound_on_tokens_holds(smollm2: Path, kind: str, text: str) -> None:
    ours = made(kind, smollm2)
    assert ours._bound is not None
    assert ours._bound.least(text.encode()) <= len(ours.encode(text, special=False))


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(text=pieces, max_tokens=st.integers(0, 40))
def test_a_text_is_refused_exactly_if_it_exceeds_the_limit(
    smollm2: Path, small_pieces: None, kind: str, text: str, max_tokens: int
) -> None:
    ours = made(kind, smollm2)
    ids = ours.encode(text)
    if len(ids) <= max_tokens:
        assert ours.encode(text, max_tokens=max_tokens) == ids
    else:
        with pytest.raises(RequestTooLong) as caught:
            ours.encode(text, max_tokens=max_tokens)
        assert max_tokens < caught.value.need <= len(ids) and caught.value.limit == max_tokens


def test_a_long_run_without_cuts_is_refused(smollm2: Path) -> None:
    ours, text = bundled(smollm2), " " * (long_text.MAX_RUN + 10)
    with pytest.raises(InvalidRequest, match=str(long_text.MAX_RUN)):
        ours.encode(text, max_tokens=1 << 20)
    assert ours.decode(ours.encode(text)) == text  # offline, there is no limit


def test_the_lower_bound_of_a_huge_text_exceeds_the_limit(smollm2: Path) -> None:
    bound = bundled(smollm2)._bound
    assert bound is not None
    assert bound.least(b"The quick brown fox. " * 50_000) > 8192
    assert bound.least(b"0123456789" * 1000) == 10_000  # every digit is a token
    assert bound.least(b"\x04" * 1_000_000) == 0  # not in the vocabulary


def ticks_during(work: Any) -> int:
    """How often another thread ran while `work` ran."""
    ticks, is_over = [], threading.Event()

    def tick() -> None:
        while not is_over.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    wait_until(lambda: ticks)
    begun = time.monotonic()
    work()
    ended = time.monotonic()
    is_over.set()
    thread.join()
    return sum(begun < at < ended for at in ticks)


@pytest.mark.parametrize("text", ["The quick brown fox. " * 10_000, "ab" * 100_000])
def test_other_threads_run_while_a_long_text_is_encoded(smollm2: Path, text: str) -> None:
    ours = bundled(smollm2)
    ids = ours.encode(text) * 10
    # More than once: the system may not run the other thread meanwhile although it could.
    wait_until(lambda: ticks_during(lambda: ours.encode(text)) >= 3)
    wait_until(lambda: ticks_during(lambda: ours.decode(ids)) >= 3)


values = st.recursive(
    st.none() | st.integers(0, 9) | st.text(alphabet='[]{},:"\\ a\n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text('a",{\\', max_size=3), inner)
    ),
    max_leaves=20,
)


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


@relaxed
@given(value=values, window=st.integers(2, 9), most=st.integers(1, 10))
def test_containers_and_members_are_counted_exactly(
    monkeypatch: pytest.MonkeyPatch, value: Any, window: int, most: int
) -> None:
    data = json.dumps(value).encode() + b" " * 100
    monkeypatch.setattr(json_body, "WINDOW", window)
    monkeypatch.setattr(json_body, "MAX_CONTAINERS", most)
    monkeypatch.setattr(json_body, "MAX_MEMBERS", most)
    num_containers = len(list(containers(value)))
    num_members = sum(len(each) for each in containers(value) if isinstance(each, dict))
    assert (json_limit_error(data) is None) == (num_containers <= most and num_members <= most)


@relaxed
@given(value=values, window=st.integers(2, 9))
def test_json_within_the_limit_of_values_is_accepted(
    monkeypatch: pytest.MonkeyPatch, value: Any, window: int
) -> None:
    num_values = sum(len(each) for each in containers(value)) + 1
    num_empty = sum(not each for each in containers(value))
    monkeypatch.setattr(json_body, "WINDOW", window)
    monkeypatch.setattr(json_body, "MAX_CONTAINERS", 20)  # so that short texts are counted too
    monkeypatch.setattr(json_body, "MAX_VALUES", num_values + num_empty)
    if len(list(containers(value))) <= 20:
        assert json_limit_error(json.dumps(value).encode() + b" " * 100) is None


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (b'{"prompt": [' + b"[]," * 100_000 + b"[]]}", json_body.MAX_CONTAINERS),
        (b'{"messages": [' + b'{"role": ""},' * 100_000 + b"{}]}", json_body.MAX_CONTAINERS),
        (b'{"prompt": [' + b"1," * 600_000 + b"1]}", json_body.MAX_VALUES),
        (b'{"a": {' + b'"b": 1,' * 100_000 + b'"b": 1}}', json_body.MAX_MEMBERS),
    ],
)
def test_a_body_with_too_many_values_is_not_parsed(body: bytes, limit: int) -> None:
    with pytest.raises(ApiError, match=str(limit)) as caught:
        parse_object(body)
    assert caught.value.status == 400
    with pytest.raises(ApiError, match=str(limit)):
        parse_object(body[:-1])  # not JSON, but it is not parsed


def test_brackets_inside_strings_are_not_counted() -> None:
    text = '[{"a": 1, \\"b\\": [2]}],' * 50_000
    assert parse_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@relaxed
@given(value=values, count=st.integers(30, 70))
def test_json_encoded_in_parts_is_the_same(value: Any, count: int) -> None:
    for whole in (value, [value] * count, {"a": {"b": [value] * count}, "c": value}):
        assert large_to_json(whole) == to_json(whole)


def test_only_the_first_of_many_wrong_items_is_reported() -> None:
    for kind, body in (
        (DetokenizeRequest, {"tokens": ["a"] * 1000}),
        (CompletionRequest, {"prompt": "a", "allowed_token_ids": ["a"] * 1000}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(n): "a" for n in range(5000)}}),
    ):
        with pytest.raises(ValidationError) as caught:
            kind.model_validate(body)
        assert caught.value.error_count() == 1


class FakeTime:
    """A clock that moves only by `sleep`, which is recorded."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@on_loop
async def test_only_offloaded_work_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    time = FakeTime()
    monkeypatch.setattr(offload, "time", time)

    def sliced() -> None:
        offload.yield_gil()
        time.now += 2 * offload.SLICE
        offload.yield_gil()
        offload.yield_gil()

    await offload.offload(1, sliced)
    assert not time.slept
    await offload.offload(10**9, sliced)
    assert time.slept == [pytest.approx(2 * offload.SLICE * offload.PAUSE)]


def long_messages(count: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}] * count}


BOMB = "[" + "[]," * 30_000 + "[]]"
LARGE: list[tuple[str, dict[str, Any], str | None, int]] = [  # path, body, field, limit
    (COMPLETIONS, {"prompt": "a b " * 100_000}, "prompt", 256),
    (COMPLETIONS, {"prompt": [5] * 100_000}, "prompt", 256),
    (COMPLETIONS, {"prompt": ["a", "b" * 10_000]}, "prompt", 256),
    (CHAT, {"messages": [{"role": "user", "content": "a b " * 100_000}]}, "messages", 256),
    (CHAT, long_messages(8193), "messages", 8192),
    (CHAT, long_messages(20_000), None, json_body.MAX_CONTAINERS),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": BOMB}}]}]}, "messages", json_body.MAX_CONTAINERS),
    (COMPLETIONS, {"prompt": "a", "stop": ["x" * 2000] * 5}, "stop", request_fields.MAX_STOP_CHARACTERS),
    (COMPLETIONS, {"prompt": "a", "stop": "x" * 9000}, "stop", request_fields.MAX_STOP_CHARACTERS),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["x" * 2000] * 5}, "bad_words",
     request_fields.MAX_STOP_CHARACTERS),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [1] * 300}, "allowed_token_ids", 260),
    (COMPLETIONS, {"prompt": "a" * 200, "echo": True, "logprobs": 100, "n": 1000}, "logprobs",
     request_fields.MAX_ECHOED_LOGPROBS),
    ("/tokenize", {"prompt": "a b " * 100_000}, "prompt", request_fields.MAX_LISTED_TOKENS),
    ("/tokenize", long_messages(8193), "messages", 8192),
    ("/detokenize", {"tokens": [5] * 300_000}, "tokens", request_fields.MAX_LISTED_TOKENS),
]  # fmt: skip


@with_server()
async def test_large_fields_are_refused_with_field_and_limit(here: Server) -> None:
    for path, body, param, limit in LARGE:
        response = await here.post(path, **body)
        assert response.status_code == 400, (path, list(body), response.text[:200])
        found = response.json()["error"]
        assert (found["param"], str(limit) in found["message"]) == (param, True), found
        is_too_long = limit == 256 or (path == "/tokenize" and param == "prompt")
        assert (found["code"] == "context_length_exceeded") == is_too_long, found
    await here.settled()


@on_loop
async def test_tokenize_and_detokenize_accept_more_than_the_model_length() -> None:
    text = "Some words, and 12 numbers.\n" * 1000
    async with server() as here:
        body = (await here.post("/tokenize", prompt=text, return_token_strs=True)).json()
        assert body["tokens"] == list(text.encode()) and body["token_strs"] == list(text)
        assert body["count"] == len(text) > body["max_model_len"]
        assert (await here.post("/detokenize", tokens=body["tokens"])).json()["prompt"] == text


async def echoed(here: Server, **fields: Any) -> dict[str, Any]:
    body = await here.complete(echo=True, logprobs=5, max_tokens=2, **fields)
    found: dict[str, Any] = body["choices"][0]
    return found


@on_loop
async def test_a_long_echo_equals_short_ones() -> None:
    text = "abc " * 1000
    async with server(max_model_len=5000) as here:
        long = await echoed(here, prompt=text)
        assert long["text"] == text + "AB"
        assert long["logprobs"]["tokens"] == [*text, "A", "B"]
        assert long["logprobs"]["text_offset"] == list(range(len(text) + 2))
        assert all(len(top) == 5 for top in long["logprobs"]["top_logprobs"][1:])
        assert long["logprobs"] == (await echoed(here, prompt=list(text.encode()), n=2))["logprobs"]
        fields = {"prompt": text, "echo": True, "logprobs": 5, "max_tokens": 2, "stream": True}
        events = (await here.post(COMPLETIONS, **fields)).text.split("\n\n")[:-2]
        parts = [json.loads(event[6:])["choices"][0] for event in events]
        assert "".join(part["text"] for part in parts) == long["text"]
        for name, column in long["logprobs"].items():
            assert [each for part in parts for each in part["logprobs"][name]] == column


@pytest.mark.parametrize("limit", ["max_waiting", "max_per_client"])
@on_loop
async def test_more_prompts_than_the_queue_holds_still_run(limit: str) -> None:
    prompts = [f"p{number}" for number in range(100)]
    async with server(QueueLimits(**{limit: 10})) as here:
        here.executor.gate.clear()
        # its step is blocked by the gate
        first = asyncio.create_task(here.complete(prompt="first"))
        rest = asyncio.create_task(here.complete(prompt=prompts, user="one"))
        await until(lambda: here.engine.num_open == len(prompts) + 1)
        here.executor.gate.set()  # all are received before the next step
        texts = [each["text"] for each in (await rest)["choices"]]
        assert texts == [each.upper() for each in prompts]
        await first
        await here.settled()


@with_server(limits=QueueLimits(max_waiting=0))
async def test_several_prompts_get_a_429_if_none_fits_into_the_queue(here: Server) -> None:
    response = await here.post(COMPLETIONS, prompt=["a", "b"])
    assert response.status_code == 429 and "retry-after" in response.headers
    await here.settled()


def test_params_of_many_prompts_are_validated_once() -> None:
    processor = InputProcessor(
        tokenizer=letters(), vocab_size=260, hidden_size=8, eos_ids=frozenset()
    )
    asked = SamplingParams(allowed_token_ids=range(200), bad_words=["ab"])
    found = [params.sampling for params in processor.params_of_each(asked, ["a", "b", "c"])]
    one, *_ = sampled = [each for each in found if isinstance(each, Sampling)]
    assert len(sampled) == 3 and len({each.seed for each in sampled}) == 3
    assert all(each.allowed_tokens is one.allowed_tokens for each in sampled)
    assert all(each.bad_words is one.bad_words for each in sampled)
    fixed = processor.params_of_each(SamplingParams(seed=5), ["a", "b"])
    assert fixed[0] == fixed[1] == processor.params(SamplingParams(seed=5), "c")
