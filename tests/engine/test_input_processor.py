"""Prompts as lists of token ids become lists of Python integers, or are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engine.input_processor import InputProcessor, is_single
from headway.errors import InvalidRequest, shorten
from headway.sampling_params import Sampling, SamplingParams

SIZE = 300
PROCESSOR = InputProcessor(tokenizer=None, vocab_size=SIZE, hidden_size=8, eos_ids=frozenset())

ids = st.integers(0, SIZE - 1)
good = st.one_of(ids, st.booleans(), ids.map(np.int64), ids.map(np.uint16))
bad = st.one_of(
    st.integers(max_value=-1), st.integers(min_value=SIZE), st.just(np.int32(-1)),
    st.floats(), ids.map(float), ids.map(str), ids.map(np.float32), ids.map(lambda i: [i]),
    st.none(), ids.map(lambda i: np.array([i])),
)  # fmt: skip
if np.lib.NumpyVersion(np.__version__) >= "2.3.0":  # earlier it is 0 or 1, as Python's booleans are
    bad |= st.just(np.bool_(True))


@given(st.lists(good))
def test_integers_of_any_type_become_python_integers(prompt: list[Any]) -> None:
    tokens = PROCESSOR.tokens(prompt)
    assert tokens == [int(token) for token in prompt]
    assert all(type(token) is int for token in tokens)


@pytest.mark.parametrize(
    "prompt", [(3, 5), b"\3\5", range(3, 6, 2), np.array([3, 5]), np.array([3, 5], np.uint8)]
)
def test_any_sequence_of_ids_is_accepted(prompt: Any) -> None:
    assert PROCESSOR.tokens(prompt) == [3, 5]


@given(st.lists(good), bad, st.lists(st.one_of(good, bad)))
def test_the_error_names_the_first_wrong_token_and_the_range(
    before: list[Any], wrong: Any, after: list[Any]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        PROCESSOR.tokens([*before, wrong, *after])
    message = str(refused.value)
    assert f"token id {shorten(wrong)} " in message and f"below {SIZE}" in message


def test_a_very_large_number_is_described_by_its_size() -> None:
    with pytest.raises(InvalidRequest, match="16610 bits"):
        PROCESSOR.tokens([3, 10**5000])


@pytest.mark.parametrize(
    "prompt",
    [None, 7, {3, 5}, iter([3]), np.array(3), np.zeros((0, 3), int), memoryview(np.ones((2, 2)))],
)
def test_a_prompt_that_is_not_a_sequence_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt must be text or a list of token ids"):
        PROCESSOR.tokens(prompt)


@pytest.mark.parametrize("prompts", ["a", "", [1, 2], {"prompt": "a"}, np.array([1, 2]), None, 7])
def test_one_prompt_is_recognized(prompts: Any) -> None:
    assert is_single(prompts)


@pytest.mark.parametrize("prompts", [[], ["a"], [[1], "a"], [{"prompt": "a"}], np.ones((2, 2))])
def test_a_list_of_prompts_is_recognized(prompts: Any) -> None:
    assert not is_single(prompts)


def test_seeds_are_drawn_only_for_requests_without_one() -> None:
    drawn = iter(range(100, 200))
    processor = InputProcessor(
        tokenizer=None, vocab_size=SIZE, hidden_size=8, eos_ids=frozenset(),
        new_seed=lambda: next(drawn),
    )  # fmt: skip

    def seeds(params: SamplingParams) -> list[int]:
        made = processor.params_of_each(params, ["a", "b", "c"])
        samplings = [each.sampling for each in made]
        return [each.seed for each in samplings if isinstance(each, Sampling)]

    assert seeds(SamplingParams()) == [100, 101, 102]
    assert seeds(SamplingParams(seed=7)) == [7, 7, 7]
    assert next(drawn) == 103
