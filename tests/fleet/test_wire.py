"""Messages survive the wire unchanged, and bytes that are not a message are refused."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine import messages
from headway.errors import ExecutorError
from headway.fleet.transport import wire
from headway.grammar.grammar import Grammar
from headway.request import RequestParams
from headway.sampling_params import Sampling, TokenLogprobs, pack_top

SCORE = TokenLogprobs(7, -0.1, 1, pack_top([(7, -0.1), (9, -math.inf)]))
END = messages.FinishInfo("stop", 3, None, 16, 0, 0.1, 0.2, 0.3)
PARAMS = RequestParams(
    eos_ids=frozenset({2}), stop_ids=frozenset({5, 6}), n=2, deadline=1.5, salt="a",
    sampling=Sampling(
        temperature=0.5, logit_bias={3: -1.5}, seed=2**64 - 1, logprobs=2, bad_words=((1, 2),),
        allowed_tokens=frozenset({1, 2, 3}), grammar=Grammar.json_schema({"type": "object"}),
    ),
)  # fmt: skip
MESSAGES: list[Any] = [
    messages.Submit("r", [1, 2, 3], PARAMS, "00-trace", ((4, 5), None)),
    messages.Cancel("r"), messages.Cancel("r", 1), messages.Query(3, "film_lines", 4),
    messages.TokenBatch(["a", "b", "c"], [[1], [], [2, 3]]), messages.TokenBatch([], []),
    messages.TokenBatch(["", "b"], [[1], [2]]),
    messages.SampleUpdate("r", 1, [7], [SCORE], [(1, SCORE)], END),
    messages.Refusal("r", "RequestTooLong", "too long", {"need": 3, "limit": 2}),
    messages.QueryResult(3, {"rates": [1.5, None], 3: (True, b"x", {"deep": [[]]})}),
    messages.LoadReport(1, 2, 3, 4, 5, 6), messages.CacheDelta([b"k" * 16], [], True),
    messages.EngineStopped("stop() was called"), wire.Hello("r", "1", "m", 16, b"n"),
    wire.Proof(b"d"), wire.Drain("bye"),
]  # fmt: skip


def same(value: Any, other: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(value) is not type(other):
        return False
    if is_dataclass(value):
        names = [f.name for f in fields(value)]
        return all(same(getattr(value, name), getattr(other, name)) for name in names)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, dict):
        return same(list(value.items()), list(other.items()))
    return bool(value == other)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    assert same(wire.decode(wire.encode(message)), message)


def test_a_batch_arrives_as_it_was_sent() -> None:
    assert same(wire.decode(wire.encode(MESSAGES)), MESSAGES)


def test_an_embedding_arrives_bit_for_bit() -> None:
    sent = np.array([0.1, -0.0, 1e-38], dtype=np.float32)
    update = messages.SampleUpdate("r", 0, [], embedding=sent)
    got = wire.decode(wire.encode(update)).embedding
    assert got.dtype == np.float32 and got.tobytes() == sent.tobytes()


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(PLAIN)
def test_any_plain_value_arrives_as_it_was_sent(value: Any) -> None:
    assert same(wire.decode(wire.encode(value)), value)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 200))
def test_other_bytes_are_refused_or_decoded_but_never_run(noise: bytes, cut: int) -> None:
    whole = wire.encode(MESSAGES[0])
    for data in (noise, whole[:cut], whole[:cut] + noise):
        try:
            wire.decode(data)
        except ExecutorError as error:
            assert f"{len(data)} bytes" in str(error)


def test_a_type_that_is_not_listed_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="complex"):
        wire.encode([1, 2j])


def test_the_tokens_of_256_requests_take_less_than_40_bytes_each() -> None:
    batch = messages.TokenBatch(
        [f"chatcmpl-{n:020d}" for n in range(256)], [[n] for n in range(256)]
    )
    assert len(wire.frame([batch])) < 256 * 40
