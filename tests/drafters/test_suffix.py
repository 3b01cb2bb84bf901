"""The suffix drafter against plain definitions, on random texts with few different tokens."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.config import Drafter
from headway.drafters import suffix as module
from headway.drafters.suffix import MAX_ADDED, MAX_CONTEXT, MAX_INDEXED, SuffixAutomaton, suffix
from headway.errors import ConfigError
from headway.request import Request, RequestParams
from headway.scheduler.policies.text import format_policy, named, parse_policy

ROOT = Path(__file__).parents[2]
Text = list[int]


def request_of(tokens: Text, num_prompt: int | None = None, salt: str = "") -> Request:
    request = Request("a", tokens[:num_prompt], RequestParams(salt=salt))
    if num_prompt is not None:
        request.flushed_tokens.extend(tokens[num_prompt:])
    return request


def followers(texts: list[Text], string: Text) -> dict[int, tuple[int, int]]:
    """The tokens that follow a string: how often, and where last."""
    found: dict[int, tuple[int, int]] = {}
    place, size = 0, len(string)
    for text in texts:
        for end in range(size, len(text)):
            if text[end - size : end] == string:
                found[text[end]] = (found.get(text[end], (0, 0))[0] + 1, place + end)
        place += len(text)
    return found


def longest(texts: list[Text], context: Text, limit: int = 1000) -> Text:
    """The longest suffix of a text, at most `limit` tokens, that some token follows."""
    for size in range(min(len(context), limit), 0, -1):
        if followers(texts, context[-size:]):
            return context[-size:]
    return []


def expected(texts: list[Text], string: Text, most: int, rule: suffix) -> Text:
    """The drafts after a string of the texts."""
    drafts, probability = Text(), 1.0
    most = min(most, max(1, int(rule.factor * len(string))))
    while len(drafts) < most and len(string) >= rule.min:
        if found := followers(texts, string):
            token = max(found, key=lambda token: found[token])
            probability *= found[token][0] / sum(num for num, _ in found.values())
            if probability < rule.min_probability:
                break
            drafts.append(token)
            string = [*string, token]
        else:
            string = longest(texts, string)
    return drafts


def random_text(chance: random.Random, size: int) -> Text:
    """Random tokens, with copies of earlier parts; no long period."""
    text = Text()
    num_letters = chance.choice([2, 3, 6])
    while len(text) < size:
        start = chance.randrange(len(text) + 1)
        text += text[start : start + chance.randrange(8)]
        text += [chance.randrange(num_letters) for _ in range(chance.randint(1, 4))]
    return text[:size]


def random_rule(chance: random.Random, *, shared: bool) -> suffix:
    factor, probability = chance.choice([0, 0.25, 1, 2.5]), chance.choice([0, 0.1, 0.5, 1])
    return suffix(chance.randint(1, 3), factor, probability, shared)


def grown(chance: random.Random, request: Request, text: Text) -> bool:
    """Add one to three tokens of the text to a request; False if it has them all."""
    start = request.num_known
    request.flushed_tokens.extend(text[start : start + chance.randint(1, 3)])
    return start < len(text)


def test_drafts_are_the_most_frequent_continuation_of_the_longest_repeat() -> None:
    chance = random.Random(1)
    num_drafts = 0
    for _ in range(40):
        rule, text = random_rule(chance, shared=False), random_text(chance, chance.randint(2, 60))
        drafter: Drafter = rule()
        request = request_of(text[: chance.randint(1, len(text))])
        while grown(chance, request, text):
            tokens, most = list(request.tokens), chance.randint(0, 9)
            drafts = drafter.propose(request, most)
            assert drafts == expected([tokens], longest([tokens], tokens), most, rule), tokens
            num_drafts += len(drafts)
    assert num_drafts > 300


def test_drafts_come_from_the_longer_match_of_own_text_and_finished_outputs() -> None:
    chance = random.Random(2)
    num_shared = 0
    for _ in range(40):
        rule, drafter = random_rule(chance, shared=True), suffix()()
        drafter.rule = rule
        outputs = [random_text(chance, chance.randint(1, 40)) for _ in range(chance.randint(0, 4))]
        for output in outputs:
            drafter.forget(request_of([5, *output], 1))
        text = random_text(chance, 45)
        if outputs:
            text[8:38] = outputs[-1][:30]
        request = request_of(text[:2])
        while grown(chance, request, text):
            tokens = list(request.tokens)
            own, other = longest([tokens], tokens), longest(outputs, tokens, MAX_CONTEXT)
            is_shared = len(other) > len(own) and len(own) < MAX_CONTEXT
            source = (outputs, other) if is_shared else ([tokens], own)
            assert drafter.propose(request, 5) == expected(*source, 5, rule), (outputs, tokens)
            num_shared += is_shared
    assert num_shared > 100


def test_an_automaton_finds_the_longest_suffix() -> None:
    chance = random.Random(3)
    for _ in range(60):
        texts = [random_text(chance, chance.randint(1, 30)) for _ in range(3)]
        automaton = SuffixAutomaton()
        for text in texts:
            automaton.start_text()
            automaton.extend(text)
        context = random_text(chance, 20)
        assert automaton.match(context).length == len(longest(texts, context))
        single = SuffixAutomaton()
        single.extend(texts[0])
        assert single.repeated().length == len(longest(texts[:1], texts[0]))


def test_a_request_that_grows_has_the_drafts_of_a_new_one() -> None:
    chance = random.Random(4)
    text = random_text(chance, 400)
    request, drafter = request_of(text[:100]), suffix()()
    while grown(chance, request, text):
        known = request_of(list(request.tokens))
        assert drafter.propose(request, 8) == suffix()().propose(known, 8)


def test_a_discarded_output_is_forgotten() -> None:
    chance = random.Random(5)
    for _ in range(50):
        text = random_text(chance, 60)
        request, drafter = request_of(text, 20), suffix()()
        drafter.propose(request, 8)
        keep, num_new = chance.randrange(40), chance.randrange(40)
        request.flushed_tokens = request.flushed_tokens[:keep]
        # No token of the new text is one of those before.
        request.flushed_tokens.extend([10 + token for token in random_text(chance, num_new)])
        known = request_of(list(request.tokens))
        assert drafter.propose(request, 8) == suffix()().propose(known, 8)


def test_an_output_that_was_replaced_is_noticed_if_its_last_token_is_the_same() -> None:
    request, drafter = request_of([1, 2, 3, 4, 5, 6], 2), suffix()()
    drafter.propose(request, 4)
    request.flushed_tokens.append(9)
    drafter.propose(request, 4)
    request.flushed_tokens = request.flushed_tokens[:0]
    request.flushed_tokens.extend([7, 8, 1, 2, 9, 1, 2])
    assert drafter.propose(request, 1) == [9]
    assert drafter._own[request].automaton.size == 9


def test_a_text_with_a_period_is_continued_with_it() -> None:
    for period in ([7], [1, 2], [1, 2, 3, 4, 1]):
        text = period * 100
        assert suffix()().propose(request_of(text), 8) == (period * 8)[:8]


def test_ties_go_to_the_latest_continuation() -> None:
    assert suffix()().propose(request_of([1, 2, 3, 1, 2, 4, 1, 2]), 1) == [4]
    assert suffix()().propose(request_of([1, 2, 4, 1, 2, 3, 1, 2]), 1) == [3]


def test_only_finished_outputs_without_salt_are_shared() -> None:
    story, question = [1, 2, 3, 4, 5, 6], [9, 1, 2, 3]
    for learns, rule, salts in [
        (True, suffix(shared=True), ("", "")),
        (False, suffix(shared=False), ("", "")),
        (False, suffix(shared=True), ("a", "")),
        (False, suffix(shared=True), ("", "a")),
        (False, suffix(shared=True), ("a", "a")),
    ]:
        drafter = rule()
        teacher = request_of([8, *story], 1, salts[0])
        drafter.propose(teacher, 4)
        asking = request_of(question, None, salts[1])
        assert drafter.propose(asking, 4) == []  # it has not finished
        drafter.forget(teacher)
        assert drafter.propose(asking, 4) == ([4, 5, 6] if learns else [])
    prompt = suffix(shared=True)()
    prompt.forget(request_of(story))
    assert prompt.propose(request_of(question), 4) == []


def num_own(drafter: module.SuffixDrafter) -> int:
    return sum(index.automaton.size for index in drafter._own.values())


def test_at_most_max_tokens_of_requests_are_kept() -> None:
    chance = random.Random(6)
    rule = suffix(max_tokens=2100)
    drafter, requests = rule(), [request_of([n] * 5) for n in range(12)]
    sizes, text = list[int](), [*range(50)] * 20
    for _ in range(300):
        request = chance.choice(requests)
        request.flushed_tokens.extend(text[: chance.randrange(150)])
        drafter.propose(request, 4)
        sizes.append(num_own(drafter))
    assert 1000 < max(sizes) <= rule.max_tokens
    for request in requests[1:]:
        drafter.forget(request)
    requests[0].flushed_tokens.extend(text)
    assert drafter.propose(requests[0], 4) == [0, 1, 2, 3]


def test_all_of_max_tokens_can_be_used() -> None:
    drafter, request, other = suffix(max_tokens=1100)(), request_of([1]), request_of([2])
    for token in range(1023):
        request.flushed_tokens.append(token)
        drafter.propose(request, 4)
    assert num_own(drafter) == 1024
    for token in range(300):
        other.flushed_tokens.append(token)
        drafter.propose(other, 4)
        assert num_own(drafter) <= 1100


def test_at_most_max_tokens_of_outputs_are_kept_and_the_oldest_are_dropped() -> None:
    rule = suffix(shared=True, max_tokens=1000)
    drafter = rule()
    for first in range(0, 10_000, 100):
        drafter.forget(request_of([1, *range(first, first + 100)], 1))
        assert sum(automaton.size for automaton in drafter._shared) <= rule.max_tokens
        for age in range(first // 100 + 1):
            start = first - 100 * age
            drafts = drafter.propose(request_of([start + 1, start + 2]), 2)
            assert drafts == ([start + 3, start + 4] if drafts else [])
            assert drafts or age >= 5
            assert not drafts or age < 10
    drafter.forget(request_of([1, *range(5000)], 1))  # only its latest part
    assert sum(automaton.size for automaton in drafter._shared) <= rule.max_tokens
    assert drafter.propose(request_of([4990, 4991]), 2) == [4992, 4993]


def test_a_request_that_ended_leaves_nothing() -> None:
    drafter = suffix()()
    request, dropped = request_of([1, 2] * 5), request_of([1, 2] * 5)
    for each in (request, dropped):
        drafter.propose(each, 4)
    assert num_own(drafter) == 20
    drafter.forget(request)
    drafter.forget(request_of([3]))  # unknown
    assert num_own(drafter) == 10
    del dropped, each
    gc.collect()
    assert len(drafter._own) == 0


def test_a_long_prompt_is_added_in_parts() -> None:
    part = [*range(1000)]
    drafter, request = suffix()(), request_of(part * 10)
    calls = [drafter.propose(request, 2) for _ in range(4)]
    assert calls == [[], [], [0, 1], [0, 1]]
    assert len(part) * 10 > 2 * MAX_ADDED


def test_of_a_longer_prompt_the_latest_part_is_added() -> None:
    text = [*range(1000)] * (MAX_INDEXED // 1000) + [*range(2000, 2800), 2000, 2001]
    drafter, request = suffix()(), request_of(text)
    for _ in range(MAX_INDEXED // MAX_ADDED + 1):
        drafts = drafter.propose(request, 2)
    assert drafts == [2002, 2003]
    assert 0 < num_own(drafter) <= MAX_INDEXED // 2


SCRIPT = """
import random
from headway.drafters.suffix import suffix
from headway.request import Request, RequestParams
chance, drafter, drafts = random.Random(7), suffix(shared=True)(), []
for _ in range(20):
    request = Request("a", chance.choices(range(4), k=30), RequestParams())
    for _ in range(20):
        request.flushed_tokens.append(chance.randrange(4))
        drafts.append(drafter.propose(request, 4))
    drafter.forget(request)
print(drafts)
"""


def test_drafts_do_not_depend_on_the_hash_seed(capsys: pytest.CaptureFixture[str]) -> None:
    exec(SCRIPT, {})
    environment = os.environ | {"PYTHONHASHSEED": "1234"}
    other = subprocess.check_output([sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment)
    drafts = capsys.readouterr().out
    assert drafts == other.decode()
    assert len(drafts) > 1000


@pytest.mark.parametrize(
    "text", ["suffix", "suffix(3, 0.5)", "suffix(shared=True, max_tokens=512)"]
)
def test_the_rule_has_a_text(text: str) -> None:
    rule = parse_policy("drafter", text, named([suffix]), {})
    assert parse_policy("drafter", format_policy(rule, [suffix]), named([suffix]), {}) == rule


@pytest.mark.parametrize(
    "numbers",
    [
        {"min": 0}, {"min": 1.5}, {"factor": -1}, {"factor": float("inf")}, {"min_probability": 1.1},
        {"min_probability": "0.1"}, {"shared": 1}, {"max_tokens": 100}, {"max_tokens": None},
    ],
)  # fmt: skip
def test_bad_numbers_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"suffix: {next(iter(numbers))} must be"):
        suffix(**numbers)
