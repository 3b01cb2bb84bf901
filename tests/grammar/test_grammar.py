"""Grammars: a finished output satisfies its grammar, and other requests are not affected."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import LLM, AsyncEngine, Engine, Grammar, Request, SamplingParams, Scheduler, preset
from headway.engine.input_processor import InputProcessor
from headway.errors import InvalidRequest
from headway.executor.cpu import CpuExecutor
from headway.executor.sampling.grammar import Grammars, unpacked, unpacked_on_device
from headway.executor.sampling.sampler import Sampler
from headway.grammar.grammar import MAX_CHARACTERS, check_grammar
from headway.grammar.sandbox import make_tokenizer
from headway.loading import find_tokenizer
from headway.model.backends.plain import PlainBackend
from headway.model.decoder import Decoder
from headway.model.loader import open_checkpoint
from headway.request import RequestParams
from headway.sampling_params import Sampling
from tests.support import real
from tests.support.events import Events
from tests.support.waiting import LIMIT, until

pytest.importorskip("llguidance")
torch.set_num_threads(1)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PATTERN = "[a-c]{2}(-[0-9]{1,3})?!"
CHOICES = ["yes", "yesterday", 'ünï "q" /\n\\', "<end>"]
DEAD_END = Grammar.lark('start: "a" NEVER\nNEVER: /[^\\s\\S]/\n')  # fails only after the a


# All bytes, a few longer tokens and an end token; further logits belong to no token.


class Spelled(NamedTuple):
    spelled: bytes


class Letters:
    """A tokenizer made without files."""

    def __init__(self) -> None:
        longer = [b'{"', b'": ', b'"}', b"yes", b"ster", b"-1", b"a-", b"\n  ", "ü".encode()]
        self.pieces = [bytes([byte]) for byte in range(256)] + longer
        self.end = len(self.pieces)
        self.special_ids = frozenset({self.end})
        self.vocab_size = self.end + 1

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        parts = text.split("<end>")  # the text of a special token is encoded as that token
        return [t for part in parts for t in (self.end, *part.encode())][1:]

    def spell(self, id: int) -> Spelled:
        if id == self.end:
            return Spelled(b"<end>")
        return Spelled(self.pieces[id] if id < self.end else b"")

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens if token != self.end).decode()


LETTERS = Letters()
WIDTH = 300  # logits; more than tokens


def a_sampler(num_rows: int) -> Sampler:
    sampler = Sampler(num_rows, WIDTH)
    sampler.grammars.matchers.use(LETTERS, {LETTERS.end})
    return sampler


def a_request(grammar: Grammar | None, id: str = "r", **sampling: Any) -> Request:
    params = RequestParams(
        eos_ids=frozenset({LETTERS.end}), sampling=Sampling(grammar=grammar, **sampling)
    )
    return Request(id, [0], params)


def noise(seed: int, num_steps: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_steps, WIDTH), generator=generator) * scale


def answer(sampler: Sampler, row: int, steps: torch.Tensor) -> list[int]:
    """The tokens up to the end, or `num_steps` tokens."""
    tokens: list[int] = []
    for logits in steps:
        tokens.append(int(sampler.sample(logits[None], np.array([row]))[0]))
        if tokens[-1] == LETTERS.end:
            break
    return tokens


def satisfies(grammar: Grammar, text: str) -> bool:
    if grammar.kind == "regex":
        return re.fullmatch(grammar.text, text) is not None
    if grammar.kind == "choice":
        return text in json.loads(grammar.text)
    value = json.loads(text)
    if grammar.kind == "json_object":
        return isinstance(value, dict)
    return (
        set(value) == {"name", "age", "tags"}
        and len(value["name"]) <= 8
        and 0 <= value["age"] <= 120
        and set(value["tags"]) <= {"a", "b"}
    )


GRAMMARS = [
    Grammar.json_schema(PERSON), Grammar.json_object(), Grammar.regex(PATTERN),
    Grammar.choice(CHOICES),
]  # fmt: skip
samplings = st.fixed_dictionaries({
    "temperature": st.sampled_from([0.0, 0.5, 1.0, 5.0, 100.0]),
    "top_k": st.sampled_from([0, 1, 40]),
    "top_p": st.sampled_from([1.0, 0.5]),
    "seed": st.integers(0, 2**32),
    "frequency_penalty": st.sampled_from([0.0, 1.5]),
    "logit_bias": st.sampled_from([{}, {ord("a"): -100.0, LETTERS.end: 100.0}]),
})  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(grammar=st.sampled_from(GRAMMARS), sampling=samplings, seed=st.integers(0, 10**6))
def test_a_finished_output_satisfies_its_grammar(
    grammar: Grammar, sampling: dict[str, Any], seed: int
) -> None:
    sampler = a_sampler(1)
    sampler.add_request(0, a_request(grammar, **sampling), [0])
    tokens = answer(sampler, 0, noise(seed, 120))
    assert sampler.grammars.take_failed() == {}
    assert all(token <= LETTERS.end for token in tokens), "logits without a token are never sampled"
    if tokens[-1] == LETTERS.end:
        assert satisfies(grammar, LETTERS.text(tokens))


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: str(grammar.kind))
def test_an_eager_end_comes_as_soon_as_allowed_and_not_before(grammar: Grammar) -> None:
    steps = noise(1, 200, scale=0.5)
    steps[:, LETTERS.end] = 50.0
    steps[:, [ord("}"), ord('"')]] += 20.0  # or a string might never end
    sampler = a_sampler(1)
    sampler.add_request(0, a_request(grammar, temperature=1.0), [0])
    tokens = answer(sampler, 0, steps)
    assert tokens[-1] == LETTERS.end and satisfies(grammar, LETTERS.text(tokens))


@pytest.mark.parametrize("text", ["aa!", "yes", "no"])
def test_output_ends_when_nothing_else_is_allowed(text: str) -> None:
    steps = noise(2, 40)
    steps[:, LETTERS.end] = -1e4
    sampler = a_sampler(1)
    sampler.add_request(0, a_request(Grammar.choice([text])), [0])
    tokens = answer(sampler, 0, steps)
    assert tokens[-1] == LETTERS.end and LETTERS.text(tokens) == text


def test_the_text_of_a_special_token_does_not_end_the_output() -> None:
    sampler = a_sampler(1)
    sampler.add_request(0, a_request(Grammar.choice(["<end>!"])), [0])
    assert LETTERS.text(answer(sampler, 0, noise(3, 30))) == "<end>!"


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0.0, 1.0]))
def test_a_grammar_does_not_affect_other_rows(seed: int, temperature: float) -> None:
    plain = a_request(None, temperature=temperature, seed=seed)
    alone, company = a_sampler(1), a_sampler(3)
    alone.add_request(0, plain, [0])
    for row, request in enumerate((a_request(GRAMMARS[0]), plain, a_request(GRAMMARS[2]))):
        company.add_request(row, request, [0])
    for logits in noise(seed, 12):
        expected = alone.sample(logits[None], np.array([0]))
        found = company.sample(logits.expand(3, -1), np.array([0, 1, 2]))
        assert int(found[1]) == int(expected[0])


@settings(max_examples=25, deadline=None)
@given(grammar=st.sampled_from(GRAMMARS), seed=st.integers(0, 10**6), cut=st.integers(0, 30))
def test_a_readmitted_request_continues_as_if_never_preempted(
    grammar: Grammar, seed: int, cut: int
) -> None:
    steps, request = noise(seed, 60), a_request(grammar, seed=seed)
    sampler = a_sampler(2)
    sampler.add_request(0, request, [0])
    whole = answer(sampler, 0, steps)
    cut = min(cut, len(whole) - 1)
    sampler.add_request(1, request, [0, *whole[:cut]])
    assert whole[:cut] + answer(sampler, 1, steps[cut:]) == whole


def test_a_row_drops_the_grammar_of_its_previous_request() -> None:
    sampler, steps, rows = a_sampler(2), noise(5, 20), np.array([0, 1])
    sampler.add_request(0, a_request(None, seed=9), [0])
    free = [int(sampler.sample(logits[None], rows[:1])[0]) for logits in steps]
    for row in (0, 1):  # the second request stays, so that masks are computed
        sampler.add_request(row, a_request(GRAMMARS[1]), [0])
    sampler.sample(steps[:2], rows)
    sampler.add_request(0, a_request(None, seed=9), [0])
    found = [int(sampler.sample(logits.expand(2, -1), rows)[0]) for logits in steps]
    assert found == free


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_tokens": frozenset({ord("x")})},
        {"bad_words": tuple((token,) for token in range(256))},
    ],
)
def test_a_grammar_overrides_options_that_leave_no_token(options: dict[str, Any]) -> None:
    sampler = a_sampler(1)
    sampler.add_request(0, a_request(Grammar.choice(["no"]), **options), [0])
    assert LETTERS.text(answer(sampler, 0, noise(6, 9))) == "no"


def test_a_row_with_a_grammar_needs_the_host_for_every_token() -> None:
    sampler = a_sampler(2)
    sampler.add_request(0, a_request(GRAMMARS[1]), [0])
    sampler.add_request(1, a_request(None), [0])
    assert sampler.needs_host(0) and not sampler.needs_host(1)
    sampler.sample(noise(0, 2), np.array([0, 1]))
    assert sampler.needs_host(0)


def test_masks_are_unpacked_alike_on_host_and_device() -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (5, 7), dtype=np.int32)
    for size in (7 * 32, 7 * 32 - 13):
        truths = unpacked(words, size, torch.device("cpu"))
        assert truths.shape == (5, size) and 0 < truths.sum() < truths.numel()
        assert torch.equal(truths, unpacked_on_device(torch.from_numpy(words), size))


def allowed_texts(grammar: Grammar, most: int = 1000) -> set[bytes]:
    """All texts that a grammar allows, enumerated byte by byte."""
    from llguidance import LLMatcher, LLParserLimits

    tokenizer, limits = make_tokenizer(None), LLParserLimits(**grammar.limits)
    first = LLMatcher(tokenizer, grammar.source, log_level=0, limits=limits)
    found, waiting = set[bytes](), [(b"", first)]
    while waiting and len(found) < most:
        text, matcher = waiting.pop()
        assert not matcher.is_error(), matcher.get_error()
        if matcher.is_accepting():
            found.add(text)
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        for byte in (byte for byte in range(256) if bits >> byte & 1):
            copy = matcher.deep_copy()
            assert copy.consume_token(byte)
            waiting.append((text + bytes([byte]), copy))
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=12))
def test_a_choice_allows_exactly_its_texts(texts: list[str]) -> None:
    grammar = Grammar.choice(texts)
    if texts == [""] * len(texts):
        return  # llguidance requires at least one character
    assert allowed_texts(grammar) == {text.encode() for text in texts}


@pytest.mark.parametrize(
    "texts",
    [
        CHOICES,
        ["", "a", "ab"],
        ["\\", '"', "\\u0041", "a|b", "/x/i", "[a-z]+", "\x00\x7f", "🎉🎊", "ß", "%ignore /a/"],
    ],
)
def test_a_choice_treats_its_texts_literally(texts: list[str]) -> None:
    assert allowed_texts(Grammar.choice(texts)) == {text.encode() for text in texts}


@pytest.mark.parametrize("num_texts", [2010, 10_000])
def test_a_choice_may_have_thousands_of_texts(num_texts: int) -> None:
    texts = [f"item {number}" for number in range(num_texts)]
    sampler, request = a_sampler(1), a_request(Grammar.choice(texts), temperature=1.0)
    check_grammar(Grammar.choice(texts))
    sampler.add_request(0, request, [0])
    steps = noise(4, 20)
    steps[:, LETTERS.end] = -1e4  # never ends by itself
    assert LETTERS.text(answer(sampler, 0, steps)) in texts
    assert sampler.grammars.take_failed() == {}


def test_a_dead_end_is_reported_and_allows_only_the_end() -> None:
    sampler, request = a_sampler(1), a_request(DEAD_END)
    sampler.add_request(0, request, [0])
    assert LETTERS.text(answer(sampler, 0, noise(7, 9))) == "a"
    failed = sampler.grammars.take_failed()
    assert list(failed) == [request] and "cannot be followed" in failed[request].reason
    assert sampler.grammars.take_failed() == {}, "reported once"


def test_a_grammar_that_exceeds_parser_limits_is_reported() -> None:
    many_ways = Grammar.lark('start: s\ns: s s | s s s | s s s s | "x"\n')
    check_grammar(many_ways)
    steps = noise(9, 60)
    steps[:, LETTERS.end] = -1e4
    sampler, request = a_sampler(1), a_request(many_ways)
    sampler.add_request(0, request, [0])
    tokens = answer(sampler, 0, steps)
    assert 1 < len(tokens) < 60 and tokens[-1] == LETTERS.end
    assert "items" in sampler.grammars.take_failed()[request].reason


def test_a_failure_has_the_error_code_grammar() -> None:
    sampler, request = a_sampler(1), a_request(DEAD_END)
    sampler.add_request(0, request, [0])
    answer(sampler, 0, noise(7, 9))
    assert sampler.grammars.take_failed(3)[request][::2] == (3, "grammar")


def test_a_slow_mask_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = a_sampler(2)
    requests = [a_request(Grammar.regex("[a-z]{30}"), id) for id in ("slow", "other")]
    for row, request in enumerate(requests):
        sampler.add_request(row, request, [0])
    assert len(answer(sampler, 0, noise(1, 5))) == 5
    monkeypatch.setattr("headway.executor.sampling.grammar.MAX_MASK_SECONDS", -1.0)
    assert len(answer(sampler, 0, noise(1, 1))) == 1
    assert answer(sampler, 0, noise(1, 1)) == [LETTERS.end]
    failed = sampler.grammars.take_failed()
    assert list(failed) == requests[:1] and "CPU time" in failed[requests[0]].reason
    monkeypatch.undo()
    assert len(answer(sampler, 1, noise(1, 5))) == 5


def with_few_states(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    values = {"max_items_in_row": 2000, "max_lexer_states": most, "verbose_errors": False}
    monkeypatch.setattr(Grammar, "limits", values)


GREEDY = Grammar.regex("[ab]*a[ab]{50}c")  # nearly every text needs a new state


def test_requests_continue_when_others_have_filled_the_lexer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each request needs less than the limit; all of them together need more."""
    with_few_states(monkeypatch, 300)
    sampler, steps, lexers = a_sampler(2), noise(3, 80), set()
    for number in range(8):
        sampler.add_request(number % 2, a_request(GREEDY, str(number), seed=number), [0])
        tokens = answer(sampler, number % 2, steps)
        assert tokens[-1] == LETTERS.end and satisfies(GREEDY, LETTERS.text(tokens))
        assert sampler.grammars.take_failed() == {}
        lexers.add(id(sampler.grammars.matchers.read(GREEDY).first))
    assert len(lexers) > 1, "the first lexer was never full"


def test_a_request_that_fills_every_lexer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with_few_states(monkeypatch, 60)
    sampler, request = a_sampler(1), a_request(GREEDY)
    sampler.add_request(0, request, [0])
    tokens = answer(sampler, 0, noise(3, 80))
    assert len(tokens) < 50 and tokens[-1] == LETTERS.end
    assert "states" in sampler.grammars.take_failed()[request].reason


@pytest.mark.parametrize(
    ("speller", "ends", "reason"), [(None, {1}, "no tokenizer"), (LETTERS, set(), "no end token")]
)
def test_a_grammar_that_cannot_be_compiled_is_reported(
    speller: Any, ends: Any, reason: str
) -> None:
    sampler, request = a_sampler(1), a_request(GRAMMARS[0])
    sampler.grammars.matchers.use(speller, ends)
    sampler.add_request(0, request, [0])
    assert answer(sampler, 0, noise(8, 1)) == [LETTERS.end]
    assert reason in sampler.grammars.take_failed()[request].reason


def test_the_matcher_cache_is_bounded() -> None:
    grammars = Grammars(WIDTH)
    grammars.matchers.use(LETTERS, {LETTERS.end})
    for number in range(100):
        asked = Sampling(grammar=Grammar.choice([f"number {number}"]))
        grammars.add_request(number % 3, a_request(None), asked)
    assert len(grammars.matchers._cache) <= 32 and len(grammars._states) == 3


def test_a_prepared_request_carries_its_matcher() -> None:
    grammars = Grammars(WIDTH)
    grammars.matchers.use(LETTERS, {LETTERS.end})
    plain = RequestParams(sampling=Sampling())
    assert grammars.matchers.ready(plain) is plain
    asked = RequestParams(sampling=Sampling(grammar=Grammar.choice(["ab"])))
    assert grammars.matchers.ready(asked) is None
    made = grammars.matchers.make_ready(asked)
    assert grammars.matchers.ready(made) == made == grammars.matchers.ready(asked)
    assert made == replace(asked, sampling=made.sampling) and isinstance(made.sampling, Sampling)
    grammars.matchers.use(None, ())  # from here on compiling fails
    for row, params in enumerate((made, made, asked)):
        request = Request(str(row), [0], params)
        grammars.add_request(row, request, params.sampling)  # type: ignore[arg-type]
        assert (request in grammars.take_failed()) == (params is asked)
    words = grammars._words([grammars._states[0]])
    allowed = np.flatnonzero(unpacked(words, WIDTH, torch.device("cpu"))[0].numpy())
    spelled = [LETTERS.spell(id).spelled for id in allowed.tolist()]
    assert spelled and all(b"ab".startswith(each) for each in spelled)


@pytest.mark.parametrize("async_scheduling", [0, 1])
@pytest.mark.parametrize("num_scheduler_steps", [1, 3])
def test_a_failed_grammar_ends_only_its_request(
    tiny: str, async_scheduling: int, num_scheduler_steps: int
) -> None:
    config = preset("headway", block_size=4, num_blocks=64, max_model_len=64, max_num_seqs=4,
                    max_num_batched_tokens=64, num_scheduler_steps=num_scheduler_steps)  # fmt: skip
    tokenizer = find_tokenizer(Path(tiny))
    assert tokenizer is not None
    ends = frozenset({1})

    def outputs(*asked: tuple[str, Grammar | None]) -> dict[str, Request]:
        executor = CpuExecutor(Decoder(open_checkpoint(Path(tiny)), PlainBackend()), config)
        executor.sampler.grammars.matchers.use(tokenizer, ends)
        engine = Engine(Scheduler(config), executor, async_scheduling=async_scheduling)
        found = {}
        for id, grammar in asked:
            sampling = Sampling(temperature=0.0, grammar=grammar)
            params = RequestParams(max_tokens=12, eos_ids=ends, sampling=sampling)
            found[id] = engine.add(id, [5, 6, 7], params)[0]
        engine.run()
        assert engine.is_healthy and engine.scheduler.num_free == config.num_blocks
        return found

    found = outputs(("bad", DEAD_END), ("plain", None), ("good", Grammar.choice(["ab"])))
    assert found["bad"].finish_reason == "error"
    assert "cannot be followed" in (found["bad"].error or "")
    assert found["good"].finish_reason == "stop" and found["good"].error is None
    assert tokenizer.decode(found["good"].output) == "ab"
    assert found["plain"].output == outputs(("plain", None))["plain"].output


@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_a_dead_end_after_the_last_token_is_ignored(tiny: str, num_scheduler_steps: int) -> None:
    """The steps of a plan continue after a request has reached its length."""
    config = preset("headway", block_size=4, num_blocks=64, max_model_len=64, max_num_seqs=4,
                    max_num_batched_tokens=64, num_scheduler_steps=num_scheduler_steps)  # fmt: skip
    executor, ends = CpuExecutor(Decoder(open_checkpoint(Path(tiny)), PlainBackend()), config), {1}
    executor.sampler.grammars.matchers.use(find_tokenizer(Path(tiny)), ends)
    engine, reasons = Engine(Scheduler(config), executor), {}
    late = Grammar.lark('start: "a" "b" NEVER\nNEVER: /[^\\s\\S]/\n')
    for length in (1, 2, 3, 4):
        sampling = Sampling(temperature=0.0, grammar=late)
        params = RequestParams(max_tokens=length, eos_ids=frozenset(ends), sampling=sampling)
        (reasons[length],) = engine.add(str(length), [5, 6, 7], params)
    engine.add("other", [3, 4], RequestParams(max_tokens=12))
    engine.run()
    found = {length: request.finish_reason for length, request in reasons.items()}
    assert found == {1: "length", 2: "length", 3: "error", 4: "error"}


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Grammar.regex("["), "regex .*unclosed"),
        (lambda: Grammar.regex("(?=a)b"), "look-around"),
        (lambda: Grammar.regex("[^\\s\\S]"), "no text satisfies it"),
        (lambda: Grammar.regex(3), "regex .*3"),
        (lambda: Grammar.regex("a" * (MAX_CHARACTERS + 1)), "regex .*100000.*100001"),
        (lambda: Grammar.choice([]), "choice must be a list"),
        (lambda: Grammar.choice("yes"), "choice must be a list"),
        (lambda: Grammar.choice(["a", 3]), "choice must be a list"),
        (lambda: Grammar.choice(["a", "\ud800"]), "choice .*surrogate"),
        (lambda: Grammar.choice(["a" * 500_000]), "choice .*500000.*500004"),
        (lambda: Grammar.json_schema({"type": "person"}), "json_schema .*person"),
        (lambda: Grammar.json_schema({"uniqueItems": True}), "uniqueItems"),
        (lambda: Grammar.json_schema({"$ref": "http://a.b/c"}), "http://a.b/c"),
        (lambda: Grammar.json_schema("{"), "json_schema is not JSON"),
        (lambda: Grammar.json_schema("[]"), "json_schema must be an object"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "json_schema .*JSON"),
        (lambda: Grammar.json_schema({"x-guidance": 3}), "x-guidance .*object.*3"),
        (lambda: Grammar.lark("start: nothing"), "lark .*nothing"),
        (lambda: Grammar("xml", ""), "json_schema, .*'xml'"),
    ],
)  # fmt: skip
def test_an_invalid_grammar_is_refused_with_the_reason(make: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s){problem}"):
        check_grammar(make())


def test_params_that_exclude_a_grammar_are_refused() -> None:
    for more in ({"ignore_eos": True}, {"min_tokens": 3}):
        with pytest.raises(InvalidRequest, match=f"{next(iter(more))}.*grammar"):
            SamplingParams(grammar=Grammar.json_object(), **more)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="^grammar .*'x'"):
        SamplingParams(grammar="x")  # type: ignore[arg-type]


def test_validation_names_what_the_model_lacks() -> None:
    asked = SamplingParams(grammar=Grammar.regex("["))
    without = InputProcessor(tokenizer=None, vocab_size=9, hidden_size=8, eos_ids=frozenset({1}))
    with pytest.raises(InvalidRequest, match="request 'r7': .*no tokenizer"):
        without.params(asked, "r7")
    with pytest.raises(InvalidRequest, match="regex.*no token"):
        replace(without, tokenizer=LETTERS, eos_ids=frozenset()).params(asked, "r7")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="request 'r7': regex "):
        replace(without, tokenizer=LETTERS).params(asked, "r7")  # type: ignore[arg-type]


def test_a_grammar_can_be_pickled() -> None:
    for grammar in GRAMMARS:
        assert pickle.loads(pickle.dumps(Sampling(grammar=grammar))).grammar == grammar
        assert hash(grammar) == hash(Grammar(grammar.kind, grammar.text))


def test_the_bundled_model_satisfies_grammars_under_preemption(smollm2: Path) -> None:
    tight = {"block_size": 4, "num_blocks": 32, "max_num_seqs": 7, "num_scheduler_steps": 2}
    trial = real.Trial(real.decoder(), "vllm_v1", async_scheduling=1, **tight)
    trial.engine.executor.sampler.grammars.matchers.use(real.tokenizer(), {2})  # type: ignore[attr-defined]
    prompt = real.tokenizer().encode("Ada was born in 1815. As JSON:")
    asked = {}
    for number, grammar in enumerate((GRAMMARS[0], GRAMMARS[2], Grammar.choice(["yes", "no"]))):
        for temperature in (0.0, 3.0):
            sampling = Sampling(grammar=grammar, temperature=temperature, seed=number)
            params = RequestParams(max_tokens=60, eos_ids=frozenset({2}), sampling=sampling, n=2)
            added = trial.engine.add(f"{number} {temperature}", prompt, params)
            asked.update(dict.fromkeys(added, grammar))
    plain = trial.engine.add("plain", real.prompts()["capital"], RequestParams(max_tokens=24))[0]
    trial.engine.run()
    trial.check_empty()
    assert trial.engine.is_healthy and trial.seen.num_recomputed + trial.seen.num_swapped > 0
    for request, grammar in asked.items():
        assert request.finish_reason == "stop", request
        assert satisfies(grammar, real.tokenizer().decode(request.output)), request
    assert not real.unlike_reference({"capital": plain.output})


def test_the_offline_api_accepts_a_grammar(tiny: str) -> None:
    with LLM(tiny, kv_memory="4MiB", threads=1) as llm:
        asked = SamplingParams(grammar=Grammar.choice(["red", "blue"]), n=3, max_tokens=20)
        (result,) = llm.generate("The", asked)
        assert {sample.text for sample in result.outputs} <= {"red", "blue"}
        assert {sample.finish_reason for sample in result.outputs} == {"stop"}
        broken = llm.generate("The", SamplingParams(grammar=DEAD_END, max_tokens=20))
        assert broken[0].outputs[0].finish_reason == "error"
        assert "cannot be followed" in (broken[0].outputs[0].error or "")


def huge(number: int) -> Grammar:
    """A schema that takes at least 0.1 s to compile."""
    kinds = [
        {
            "type": "object",
            "properties": {
                f"k{number}_{i}": {"type": "integer", "minimum": i, "maximum": i * 1000 + 7},
                f"m{i}": {"type": "string", "format": "date-time"},
            },
            "required": [f"k{number}_{i}"],
        }
        for i in range(250)
    ]
    return Grammar.json_schema({"anyOf": kinds})


def test_an_engine_continues_while_huge_grammars_are_compiled(tiny: str) -> None:
    with LLM(tiny, kv_memory="4MiB", threads=1) as llm:
        matchers = llm.executor.sampler.grammars.matchers
        matchers.warm_up()
        llm.engine.observers.append(events := Events())
        seen: list[int] = []  # steps while a grammar was compiled

        class Watched:
            ready = staticmethod(matchers.ready)

            def make_ready(self, params: RequestParams) -> RequestParams:
                before = len(events.completed)
                made = matchers.make_ready(params)
                seen.append(len(events.completed) - before)
                return made

        llm.engine.preparation = Watched()

        async def answer(engine: AsyncEngine, id: str, params: RequestParams) -> list[int]:
            stream = engine.stream(id, [1, 2, 3], params)
            return [token async for updates in stream for u in updates for token in u.tokens]

        async def work() -> None:
            engine = AsyncEngine(llm.engine)
            await engine.start()
            numbers = count()
            ends = {"max_tokens": 8, "eos_ids": llm.input_processor.eos_ids}
            # 0 if the engine's thread compiles them; few if the system does not run that thread.
            while sum(seen) < 4:
                num_before, name = len(events.completed), f"other {next(numbers)}"
                other = asyncio.create_task(answer(engine, name, RequestParams(max_tokens=400)))
                await until(lambda: len(events.completed) >= num_before + 3)  # noqa: B023
                asked = {
                    str(n): RequestParams(sampling=Sampling(grammar=huge(n)), **ends)
                    for n in (next(numbers), next(numbers))
                }
                found = await asyncio.gather(*(answer(engine, *each) for each in asked.items()))
                assert all(llm.tokenizer.decode(each).startswith("{") for each in found)
                other.cancel()
                await asyncio.wait([other])
            await engine.close()

        asyncio.run(asyncio.wait_for(work(), LIMIT))


class Digits:
    """A vocabulary of an end token, ten digits, and letters."""

    special_ids = frozenset({0})

    def __init__(self, vocab_size: int) -> None:
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
        self.pieces = ["<end>", *"0123456789", *letters][:vocab_size]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [self.pieces.index(letter) for letter in text if letter in self.pieces]

    def spell(self, id: int) -> Spelled:
        return Spelled(self.pieces[id].encode() if id < len(self.pieces) else b"")


def test_async_scheduling_waits_for_grammars() -> None:
    pytest.importorskip("triton")
    from tests.executor.test_gpu import model, on_device, plain
    from tests.executor.test_gpu import settings as few

    config, about = few(), model()

    def outputs(make: Any, async_scheduling: int) -> list[list[int]]:
        executor = make(config, about)
        executor.sampler.grammars.matchers.use(Digits(about.vocab_size), {0})
        engine = Engine(Scheduler(config), executor, async_scheduling=async_scheduling)
        requests = []
        for number, grammar in enumerate((Grammar.regex("[0-9]{2}"), None, DEAD_END)):
            sampling = Sampling(grammar=grammar, temperature=0.0)
            params = RequestParams(max_tokens=4, eos_ids=frozenset({0}), sampling=sampling)
            requests += engine.add(str(number), [3, 4, 5 + number], params)
        engine.run()
        assert engine.fault is None and requests[2].finish_reason == "error"
        return [list(request.output) for request in requests]

    found = outputs(on_device, 1)
    assert found == outputs(plain, 0)
    assert len(found[0]) == 3 and found[0][2] == 0 and all(1 <= t <= 10 for t in found[0][:2])
