"""Prompts at the door: lists of token ids of any make become plain numbers, or are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engine.input_processor import InputProcessor
from headway.errors import InvalidRequest

SIZE = 300
ASKING = InputProcessor(tokenizer=None, vocab_size=SIZE, hidden_size=8, eos_ids=frozenset())

ids = st.integers(0, SIZE - 1)
good = st.one_of(ids, st.booleans(), ids.map(np.int64), ids.map(np.uint16))
bad = st.one_of(
    st.integers(max_value=-1), st.integers(min_value=SIZE), st.just(np.int32(-1)),
    st.floats(), ids.map(float), ids.map(str), ids.map(np.float32), ids.map(lambda i: [i]),
    st.none(), st.just(np.bool_(True)), ids.map(lambda i: np.array([i])),
)  # fmt: skip


@given(st.lists(good))
def test_whole_numbers_of_any_make_become_plain_ones(prompt: list[Any]) -> None:
    tokens = ASKING.tokens(prompt)
    assert tokens == [int(token) for token in prompt]
    assert all(type(token) is int for token in tokens)


@pytest.mark.parametrize(
    "prompt", [(3, 5), b"\3\5", range(3, 6, 2), np.array([3, 5]), np.array([3, 5], np.uint8)]
)
def test_any_sequence_will_do(prompt: Any) -> None:
    assert ASKING.tokens(prompt) == [3, 5]


@given(st.lists(good), bad, st.lists(st.one_of(good, bad)))
def test_the_first_that_is_no_token_is_named(
    before: list[Any], wrong: Any, after: list[Any]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ASKING.tokens([*before, wrong, *after])
    named = f"prompt: token id {wrong!r} is not a whole number of at least 0 and below {SIZE}"
    assert str(refused.value) == named


def test_a_number_too_long_to_be_written_is_told_by_its_length() -> None:
    with pytest.raises(InvalidRequest, match="token id of 16610 bits is not a whole number"):
        ASKING.tokens([3, 10**5000])


@pytest.mark.parametrize(
    "prompt",
    [None, 7, {3, 5}, iter([3]), np.array(3), np.zeros((0, 3), int), memoryview(np.ones((2, 2)))],
)
def test_what_is_no_sequence_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt must be text or a list of token ids, not "):
        ASKING.tokens(prompt)
