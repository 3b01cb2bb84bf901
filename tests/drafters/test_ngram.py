"""The n-gram drafter against a plain definition, on random texts with few different tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headway.checks import MAX_TOKEN_ID
from headway.config import Drafter
from headway.drafters.ngram import ngram
from headway.errors import ConfigError
from headway.request import Request, RequestParams
from headway.scheduler.policies.text import format_policy, named, parse_policy


def request_of(tokens: list[int], num_prompt: int) -> Request:
    request = Request("a", tokens[:num_prompt], RequestParams())
    request.flushed_tokens.extend(tokens[num_prompt:])
    return request


def expected(tokens: list[int], most: int, rule: ngram) -> list[int]:
    """Copy token by token after the latest earlier occurrence of the longest n-gram."""
    for n in range(min(rule.max, len(tokens) - 1), rule.min - 1, -1):
        for place in range(len(tokens) - 1, n - 1, -1):
            if tokens[place - n : place] == tokens[-n:]:
                text = list(tokens)
                for offset in range(most):
                    text.append(text[place + offset])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize("num_letters", [1, 2, 3, 8, 40])
def test_drafts_follow_the_latest_occurrence_of_the_longest_ngram(num_letters: int) -> None:
    chance = random.Random(num_letters)
    alphabet = [0, 256, 65536, MAX_TOKEN_ID, 1, *range(1000, 1035)][:num_letters]
    num_drafts = 0
    for _ in range(300):
        tokens = chance.choices(alphabet, k=chance.randint(1, 40))
        rule = ngram(low := chance.randint(1, 4), chance.randint(low, 6))
        request = request_of(tokens, chance.randint(1, len(tokens)))
        most = chance.randint(0, 12)
        drafts = list(rule().propose(request, most))
        assert drafts == expected(tokens, most, rule), (tokens, rule, most)
        num_drafts += len(drafts)
    assert num_drafts > 100


def test_a_text_that_repeats_is_continued_with_its_period() -> None:
    drafter: Drafter = ngram(2, 4)()
    request = request_of([9, 1, 2, 3, 1, 2, 3, 1, 2], 4)
    assert list(drafter.propose(request, 8)) == [3, 1, 2, 3, 1, 2, 3, 1]
    drafter.forget(request)


def test_bytes_that_match_between_tokens_are_no_occurrence() -> None:
    shifted = [0x10000] * 20 + [0x100] * 2
    assert not ngram(2, 2)().propose(request_of(shifted, 5), 4)


@pytest.mark.parametrize("text", ["ngram", "ngram()", "ngram(2, 5)", "ngram(min=1, max=1)"])
def test_the_rule_has_a_text(text: str) -> None:
    rule = parse_policy("drafter", text, named([ngram]), {})
    assert parse_policy("drafter", format_policy(rule, [ngram]), named([ngram]), {}) == rule


@pytest.mark.parametrize(
    "numbers", [(0, 4), (3, 2), (5,), (2.0, 3), (True, 2), (1, "2"), (1, None)]
)
def test_bad_numbers_are_refused(numbers: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="ngram: (min|max)"):
        ngram(*numbers)
