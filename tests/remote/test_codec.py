"""Messages of every type arrive unchanged, and bytes that are not a message are refused."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine import messages, queries
from headway.engine.messages import Query
from headway.errors import ExecutorError
from headway.executor.simulated import Acceptance, Script
from headway.grammar.grammar import Grammar
from headway.remote import codec
from headway.remote.codec import HELLO, Hello
from headway.request import RequestParams, SamplingOptions
from headway.sampling_params import Sampling, TokenLogprobs, pack_top
from tests.support.waiting import on_loop

SCORE = TokenLogprobs(7, -0.1, 1, pack_top([(7, -0.1), (9, -math.inf)]))
END = messages.FinishInfo("stop", 3, None, 16, 0, 0.1, 0.2, 0.3, None, 12, 7)
PARAMS = RequestParams(
    eos_ids=frozenset({2}), stop_ids=frozenset({5, 6}), n=2, deadline=1.5, salt="a",
    prediction=array("i", [7, 1 << 20]),
    sampling=Sampling(
        temperature=0.5, logit_bias={3: -1.5}, seed=2**64 - 1, logprobs=2, bad_words=((1, 2),),
        allowed_tokens=frozenset({1, 2, 3}), grammar=Grammar.json_schema({"type": "object"}),
    ),
)  # fmt: skip
SUBMIT = messages.Submit("r", array("i", [1, 2, 3]), PARAMS, "00-trace", ((4, 5), None))
SENT: dict[type[Any], Callable[[], codec.Decoder[Any]]] = {
    **dict.fromkeys([messages.Submit, messages.Cancel], codec.to_engine),
    **dict.fromkeys(Query.__subclasses__(), codec.to_engine),
    **dict.fromkeys(get_args(messages.FromLoop), codec.from_engine),
}


def same(value: Any, other: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(value) is not type(other):
        return False
    if isinstance(value, msgspec.Struct):
        return same(msgspec.structs.astuple(value), msgspec.structs.astuple(other))
    if is_dataclass(value):
        names = [f.name for f in fields(value)]
        return all(same(getattr(value, name), getattr(other, name)) for name in names)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, dict):
        return same(list(value.items()), list(other.items()))
    if isinstance(value, np.ndarray):
        return value.dtype == other.dtype and value.tobytes() == other.tobytes()
    return bool(value == other)


TOKENS = st.integers(-(1 << 31), (1 << 31) - 1)
ATOMS = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1)
ATOMS |= st.floats(allow_nan=False) | st.text() | st.binary()
DOCUMENTS = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.integers(0, 1 << 40), inner, max_size=3)
    ),
    max_leaves=12,
)
KNOWN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(), bool: st.booleans(), int: st.integers(-(1 << 63), (1 << 64) - 1), Any: DOCUMENTS,
    float: st.floats(allow_nan=False), bytes: st.binary(), type(None): st.none(),
    messages.Key: st.binary(min_size=16, max_size=16),
    messages.Number: st.integers(0, (1 << 48) - 1),
    array: st.lists(TOKENS, max_size=9).map(lambda ids: array("i", ids)),
    messages.Embedding: st.lists(st.floats(width=32), max_size=9).map(np.float32),
    Grammar: st.sampled_from([Grammar.regex("a+"), Grammar.json_object()]),
    Acceptance: st.none(),  # of a simulation, which sends nothing
}  # fmt: skip


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type that a message can have."""
    if kind in KNOWN:
        return KNOWN[kind]
    if kind is SamplingOptions:
        return values(Sampling) | values(Script)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return st.one_of(*map(values, inner))
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is list:
        return st.lists(values(inner[0]), max_size=4)
    if origin is frozenset:
        return st.frozensets(values(inner[0]), max_size=4)
    if origin in (dict, Mapping):
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=4)
    if origin is tuple and inner[-1] is ...:
        return st.lists(values(inner[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, inner))
    hints = get_type_hints(kind, include_extras=True)
    names = getattr(kind, "__struct_fields__", None) or getattr(kind, "_fields", None)
    names = names or [f.name for f in fields(kind)]
    return st.builds(kind, **{name: values(hints[name]) for name in names})


@pytest.mark.parametrize("kind", SENT, ids=lambda kind: kind.__name__)
def test_any_message_arrives_as_it_was_sent(kind: type[Any]) -> None:
    @settings(max_examples=20, deadline=None)
    @given(st.lists(values(kind), max_size=3))
    def check(sent: list[Any]) -> None:
        assert same(SENT[kind]().decode(codec.encode(sent)), sent)

    check()


@given(values(Hello))
def test_a_handshake_arrives_as_it_was_sent(hello: Hello) -> None:
    assert HELLO.decode(codec.encode(hello)) == hello


def test_a_prompt_may_be_a_list() -> None:
    (got,) = codec.to_engine().decode(codec.encode([messages.Submit("r", [1, 2, 3], PARAMS)]))
    assert isinstance(got, messages.Submit) and got.prompt == array("i", [1, 2, 3])


def refused_or_decoded(decode: Callable[[bytes], Any], data: bytes) -> None:
    try:
        decode(data)
    except ExecutorError as error:
        assert f"{len(data)} bytes" in str(error)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=40),
    st.integers(0, 200),
    st.sampled_from([codec.to_engine, codec.from_engine, lambda: HELLO]),
)
def test_other_bytes_are_refused_or_decoded_but_never_run(
    noise: bytes, cut: int, decoder: Callable[[], codec.Decoder[Any]]
) -> None:
    whole = codec.encode([SUBMIT])
    for data in (noise, whole[:cut], whole[:cut] + noise, whole[:cut] + noise + whole[cut:]):
        refused_or_decoded(decoder().decode, data)


@given(st.data())
def test_values_of_other_types_are_refused(data: st.DataObject) -> None:
    """Plain data in the place of any field of a message."""
    kind = data.draw(st.sampled_from([*SENT]))
    given = [kind.__name__, *data.draw(st.lists(DOCUMENTS, max_size=6))]
    refused_or_decoded(SENT[kind]().decode, codec.encode([given]))


def test_an_announced_length_allocates_nothing() -> None:
    code = (
        "import resource\n"
        "from headway.errors import ExecutorError\n"
        "from headway.remote import codec\n"
        "used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for decoder in (codec.to_engine(), codec.from_engine()):\n"
        "    for head in (b'', b'\\x91', b'\\x91\\x93\\xaaTokenBatch', b'\\x91\\x94\\xa6Submit\\xa1r'):\n"
        "        for tag in b'\\xc6\\xc9\\xdb\\xdd\\xdf':\n"
        "            try: decoder.decode(head + bytes([tag]) + b'\\xff' * 4)\n"
        "            except ExecutorError: pass\n"
        "try: decoder.decode(b'\\x91' * 1_000_000)\n"
        "except ExecutorError: pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20_000  # KiB


@on_loop
async def test_a_frame_above_the_limit_is_refused_before_it_is_read() -> None:
    head = bytearray(codec.LENGTH.pack(codec.MAX_FRAME + 1))
    with pytest.raises(ExecutorError, match=str(codec.MAX_FRAME)):
        codec.take_items(head, codec.to_engine())
    reader = asyncio.StreamReader()
    reader.feed_data(codec.LENGTH.pack(101))
    with pytest.raises(ExecutorError, match=r"101 bytes \(limit 100\)"):
        await codec.read_frame(reader, HELLO, 100)


BATCHES = st.lists(
    st.lists(st.builds(messages.Cancel, st.text(max_size=300), st.integers(0, 9)), max_size=3),
    max_size=8,
)


@given(BATCHES, st.lists(st.integers(0, 4000), max_size=12))
def test_frames_are_decoded_from_any_parts(
    sent: list[list[messages.Cancel]], cuts: list[int]
) -> None:
    data = b"".join(map(codec.frame, sent))
    received, found = bytearray(), list[Any]()
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, end in pairwise(places):
        received += data[start:end]
        found += codec.take_items(received, codec.to_engine())
    assert found == [message for batch in sent for message in batch]


def test_an_answer_has_the_type_that_its_query_names() -> None:
    def received(query: type[Query[Any]], value: Any) -> messages.QueryResult:
        data = codec.encode([messages.QueryResult(3, value)])
        (result,) = codec.from_engine().decode(data)
        assert isinstance(result, messages.QueryResult)
        return codec.typed_answer(query, result)

    load = queries.EngineLoad(1, 2, 0.5)
    assert received(queries.GetLoad, load).value == load
    assert received(queries.GetProblem, None) == messages.QueryResult(3)
    assert "wrong type" in (received(queries.GetTime, "noon").error or "")
    failed = messages.QueryResult(3, None, "it failed")
    assert codec.typed_answer(queries.GetLoad, failed) is failed


def test_a_type_that_no_message_has_cannot_be_sent() -> None:
    for value, word in ((2j, "complex"), (array("q", [1]), "array")):
        with pytest.raises(TypeError, match=word):
            codec.encode([1, value])


def test_the_tokens_of_256_requests_take_less_than_40_bytes_each() -> None:
    batch = messages.TokenBatch(
        [f"chatcmpl-{n:020d}" for n in range(256)], [[n] for n in range(256)]
    )
    assert len(codec.frame([batch])) < 256 * 40


def test_a_prompt_takes_4_bytes_for_each_token() -> None:
    prompt = array("i", [1 << 20] * 4000)
    assert len(codec.frame([messages.Submit("r", prompt, PARAMS)])) < 4000 * 4 + 1000
