"""The offline API with a real executor: traces, interrupts, errors, streams and sampling."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headway import LLM, PRESETS, Request, SamplingParams
from headway.engine.outputs import OutputBuilder, RequestOutput
from headway.errors import ConfigError, FormatError, InvalidRequest, RequestError, RequestTooLong
from headway.events import Completed, Event
from headway.loading import parse_size
from headway.model.backends.base import PassOutput
from headway.model.decoder import Decoder
from headway.record.lines import AddedLine, CompletedLine, PlannedLine, ResetLine
from headway.record.reader import read_journal
from headway.record.replay import check_replay
from tests.support import real
from tests.support.journals import all_ends, of_kind

PROMPTS = [
    "Marta", "The harbour master", real.STORY, "1. Item number", real.CODE, "crème brûlée",
    real.STORY[:100], "🎉", real.LIST[:200], "two suitcases and", real.CODE[:80], "北京",
]  # fmt: skip
MODES = pytest.mark.parametrize(
    "mode",
    [{"async_scheduling": a, "num_scheduler_steps": n} for n in (1, 4) for a in (0, 1)],
    ids=["0-1", "1-1", "0-4", "1-4"],
)


def open_llm(tiny: str, **settings: Any) -> LLM:
    return LLM(tiny, **{"num_blocks": 200, **settings})


def sampled(num_prompts: int = len(PROMPTS), **more: Any) -> list[SamplingParams]:
    """Random sampling, with another seed for each prompt."""
    return [SamplingParams(**{"max_tokens": 24, "seed": s, **more}) for s in range(num_prompts)]


Outcome = list[tuple[str, list[int], str | None, str | int | None]]


def outcome(results: list[RequestOutput]) -> Outcome:
    """Everything that must not depend on settings or other requests."""
    samples = [sample for result in results for sample in result.outputs]
    return [(s.text, s.token_ids, s.finish_reason, s.stop_reason) for s in samples]


def check_idle(llm: LLM) -> None:
    """No request, block or result is left."""
    scheduler = llm.engine.scheduler
    assert not (
        llm.engine.has_work or scheduler.requests or scheduler.running or scheduler.in_flight
    )
    assert llm._runner.is_idle
    assert scheduler.num_free == scheduler.config.num_blocks
    assert scheduler.kv.host.num_free == llm.config.num_host_blocks


@pytest.fixture(scope="module")
def expected(tiny: str) -> Outcome:
    """The outcome of all prompts, which no setting and no earlier interrupt changes."""
    with open_llm(tiny) as llm:
        return outcome(llm.generate(PROMPTS, sampled()))


@pytest.fixture(scope="module")
def stops(tiny: str) -> list[str]:
    """For every prompt, four characters from the middle of its output."""
    with open_llm(tiny) as llm:
        results = llm.generate(PROMPTS, sampled(ignore_eos=True))
    return [result.outputs[0].text[10:14] for result in results]


@MODES
@pytest.mark.parametrize("swap", ["recompute", "swap"])
def test_a_recorded_run_replays_with_the_same_decisions(
    tiny: str, stops: list[str], tmp_path: Path, swap: str, mode: dict[str, int]
) -> None:
    path = tmp_path / "trace.jsonl"
    cramped = {"preset": "vllm_v1", "swap": swap, "num_blocks": 24, "num_host_blocks": 60}
    with open_llm(tiny, **mode, trace_out=path, **cramped) as llm:
        params = [
            SamplingParams(seed=s, max_tokens=60, n=1 + s % 2, stop=None if s % 3 else stop)
            for s, stop in enumerate(stops)
        ]
        llm.generate(PROMPTS, params)
        for number, _ in enumerate(llm.stream(PROMPTS[:7], sampled(7, n=2))):
            if number == 60:
                break
        llm.generate(PROMPTS[:3], sampled(3))
        check_idle(llm)
    journal = list(read_journal(path))
    plans = of_kind(PlannedLine, journal)
    preempted = [each.kind for plan in plans for each in plan.preempted]
    ends = Counter(end.finish_reason for end in all_ends(journal))
    assert set(preempted) >= {swap} and len(preempted) >= 5
    assert ends["stop"] >= 4 and ends["abort"] >= 7 and ends["length"] >= 4
    assert any(plan.num_steps > 1 for plan in plans) == (mode["num_scheduler_steps"] > 1)
    assert check_replay(journal) == len(of_kind(CompletedLine, journal)) > 30


@MODES
def test_a_run_is_recorded_to_its_end_however_it_ends(
    tiny: str, tmp_path: Path, mode: dict[str, int]
) -> None:
    """The last request may end while another step with it is still in flight."""
    path = tmp_path / "trace.jsonl"
    with open_llm(tiny, **mode, trace_out=path) as llm:
        soon = {"logit_bias": dict.fromkeys(llm.loaded.eos_ids, 5.0)}
        for number in range(3):
            results = llm.generate(PROMPTS[number::3], sampled(4, **soon))
            assert {sample[2] for sample in outcome(results)} == {"stop"}
            check_idle(llm)
        assert llm.reset_cache()
    journal = list(read_journal(path))
    assert isinstance(journal[-1], ResetLine)
    assert check_replay(journal) == len(of_kind(CompletedLine, journal))
    num_added = sum(len(line.requests) for line in of_kind(AddedLine, journal))
    assert len(all_ends(journal)) == num_added


class FailingDecoder:
    """A decoder that raises once, in its nth forward pass."""

    def __init__(self, decoder: Decoder, error: BaseException, calls: int) -> None:
        self._decoder, self._error, self._left = decoder, error, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def prepared(self, *arguments: Any, **options: Any) -> Callable[[], PassOutput]:
        run = self._decoder.prepared(*arguments, **options)

        def run_or_fail() -> PassOutput:
            self._left -= 1
            if self._left == 0:
                raise self._error
            return run()

        return run_or_fail


def fail_once(llm: LLM, error: BaseException, calls: int) -> None:
    decoder: Any = FailingDecoder(llm.loaded.decoder, error, calls)
    llm.executor.decoder = decoder


CRAMPED = {"num_blocks": 30, "num_host_blocks": 20, "preset": "vllm", "swap": "swap"}


@MODES
@pytest.mark.parametrize("calls", [1, 2, 15])
def test_an_interrupted_step_leaves_nothing_behind(
    tiny: str, expected: Outcome, mode: dict[str, int], calls: int
) -> None:
    with open_llm(tiny, **mode, **CRAMPED) as llm:
        fail_once(llm, KeyboardInterrupt(), calls)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, sampled())
        check_idle(llm)
        assert outcome(llm.generate(PROMPTS, sampled())) == expected


def test_repeated_interrupts_leave_nothing_behind(tiny: str, expected: Outcome) -> None:
    with open_llm(tiny) as llm:
        assert outcome(llm.generate(PROMPTS, sampled())) == expected
        for _ in range(5):
            fail_once(llm, KeyboardInterrupt(), 1)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, sampled())
            check_idle(llm)
        assert outcome(llm.generate(PROMPTS, sampled())) == expected


@pytest.mark.parametrize("async_scheduling", [0, 1])
@pytest.mark.parametrize("place", ["observer", "on_finish", "stream"])
def test_an_interrupt_between_steps_leaves_nothing_behind(
    tiny: str, expected: Outcome, async_scheduling: int, place: str
) -> None:
    armed: list[int] = []

    def interrupt(*_: object) -> None:
        if armed and armed.pop() > 0:
            raise KeyboardInterrupt
        if armed:
            armed.append(0)

    def observe(event: Event) -> None:
        if place == "observer" and isinstance(event, Completed) and event.plan.step >= 3:
            interrupt(event)

    with open_llm(tiny, async_scheduling=async_scheduling, observers=[observe], **CRAMPED) as llm:
        assert outcome(llm.generate(PROMPTS, sampled())) == expected
        armed.append(1)
        with pytest.raises(KeyboardInterrupt):
            if place == "stream":
                for delta in llm.stream(PROMPTS, sampled()):
                    interrupt(delta)
            else:
                wanted = interrupt if place == "on_finish" else None
                llm.generate(PROMPTS, sampled(), on_finish=wanted)
        check_idle(llm)
        assert outcome(llm.generate(PROMPTS, sampled())) == expected


class Lines:
    """Counts the executed lines of the package, and interrupts at the nth."""

    def __init__(self, interrupt_at: int = 0) -> None:
        self.num_seen, self._at = 0, interrupt_at
        self.where = "nowhere"

    def __enter__(self) -> Lines:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, value: object) -> Any:
        return self._line if frame.f_globals.get("__name__", "").startswith("headway.") else None

    def _line(self, frame: FrameType, event: str, value: object) -> Any:
        self.num_seen += event == "line"
        if event == "line" and self.num_seen == self._at:
            self.where = f"{frame.f_globals['__name__']}:{frame.f_lineno}"
            raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("async_scheduling", [0, 1])
def test_an_interrupt_at_any_line_leaves_nothing_behind(tiny: str, async_scheduling: int) -> None:
    """Ctrl-C may come within a step, between two steps, or before the first."""
    rng, asked, wrong = random.Random(async_scheduling), (PROMPTS[:8], sampled(8)), []
    with open_llm(tiny, async_scheduling=async_scheduling, **CRAMPED) as llm:
        before = outcome(llm.generate(*asked))
        with Lines() as lines:
            llm.generate(*asked)
    for _ in range(8):
        llm = open_llm(tiny, async_scheduling=async_scheduling, **CRAMPED)
        at = Lines(rng.randint(1, lines.num_seen))
        llm.generate(*asked)
        try:
            with at, suppress(KeyboardInterrupt):
                llm.generate(*asked)
            check_idle(llm)
            assert outcome(llm.generate(*asked)) == before
            llm.close()
        except Exception as error:
            wrong.append((at.where, repr(error)[:60]))
    assert not wrong


@MODES
def test_a_failed_step_ends_only_requests_in_flight(
    tiny: str, expected: Outcome, mode: dict[str, int]
) -> None:
    with open_llm(tiny, **mode, max_num_seqs=4) as llm:
        fail_once(llm, RuntimeError("the device has failed"), 4)
        results = llm.generate(PROMPTS, sampled())
        failed = [r.outputs[0].finish_reason == "error" for r in results]
        assert 1 <= sum(failed) <= 4
        for has_failed, result, right in zip(failed, results, expected, strict=True):
            sample = result.outputs[0]
            if has_failed:
                assert "the device has failed" in (sample.error or "")
                assert sample.token_ids == right[1][: len(sample.token_ids)]
            else:
                assert outcome([result]) == [right] and sample.error is None
        check_idle(llm)
        assert outcome(llm.generate(PROMPTS, sampled())) == expected


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature must be a number from 0 to 1000, not -0.1"),
    ({"top_p": 0}, "top_p must be a number above 0 and at most 1, not 0"),
    ({"top_k": -2}, "top_k must be a whole number of at least -1, not -2"),
    ({"min_p": 1.5}, "min_p must be a number from 0 to 1, not 1.5"),
    ({"n": 0}, "n must be a whole number from 1 to 1024, not 0"),
    ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1 or None, not 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be at most max_tokens \\(8\\), not 9"),
    ({"stop": ""}, "stop must be .* ''"),
    ({"stop": ["a", 3]}, "stop must be .* 3"),
    ({"repetition_penalty": 0}, "repetition_penalty must be a number from 0.001 to 1000, not 0"),
    ({"logit_bias": {3: 101}}, "logit_bias of token 3 must be a number from -100 to 100, not 101"),
    ({"seed": 2**64}, "seed must be"),
    ({"bad_words": [""]}, "bad_words must be .* ''"),
]
BAD_REQUESTS: list[tuple[Any, dict[str, Any], type[RequestError], str]] = [
    ("", {}, InvalidRequest, "empty prompt; at least one token"),
    ([], {}, InvalidRequest, "empty prompt"),
    ([3] * 512, {}, RequestTooLong, "512 prompt tokens .* is 512;"),
    ([3] * 300, {"max_tokens": 200}, RequestTooLong, "32 KV blocks; num_blocks is 20"),
    ([3, 256], {}, InvalidRequest, "token id 256 .* 25[56]"),
    ([3, -1], {}, InvalidRequest, "token id -1"),
    ([3, 2.5], {}, InvalidRequest, "token id 2.5"),
    ([3, None], {}, InvalidRequest, "token id"),
    (None, {}, InvalidRequest, "prompt"),
    (7.5, {}, InvalidRequest, "prompt"),
    ("a", {"logit_bias": {256: 1}}, InvalidRequest, "logit_bias has token 256; .* 0 to 255"),
    ("a", {"stop_token_ids": [999]}, InvalidRequest, "stop_token_ids has token 999"),
    ("a", {"allowed_token_ids": []}, InvalidRequest, "allowed_token_ids is empty"),
    ("a", {"salt": "\n"}, InvalidRequest, "salt must be printable"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS)
def test_the_error_names_a_field_out_of_range_and_its_limit(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(("prompt", "fields", "kind", "message"), BAD_REQUESTS)
def test_a_refused_prompt_does_not_affect_the_others(
    tiny: str, prompt: Any, fields: dict[str, Any], kind: type[RequestError], message: str
) -> None:
    with open_llm(tiny, num_blocks=20) as llm:
        good, params = ["Marta", "two suitcases"], sampled(2, max_tokens=10)
        before = outcome(llm.generate(good, params))
        asked = [good[0], prompt, good[1]]
        bad = SamplingParams(**{"max_tokens": 10, **fields})
        first, refused, last = llm.try_generate(asked, [params[0], bad, params[1]])
        assert isinstance(first, RequestOutput) and isinstance(last, RequestOutput)
        with pytest.raises(kind, match=message):
            raise refused if isinstance(refused, kind) else AssertionError("it was not refused")
        assert outcome([first, last]) == before
        check_idle(llm)
        with pytest.raises(kind, match=rf"prompts\[1\].*({message})"):
            llm.generate(asked, [params[0], bad, params[1]])
        check_idle(llm)
        with pytest.raises(kind, match=message):
            list(llm.stream(asked, [params[0], bad, params[1]]))
        check_idle(llm)


@pytest.mark.parametrize(("prompt", "fields", "kind", "message"), BAD_REQUESTS)
def test_a_single_refused_prompt_raises(
    tiny: str, prompt: Any, fields: dict[str, Any], kind: type[RequestError], message: str
) -> None:
    with open_llm(tiny, num_blocks=20) as llm:
        bad = SamplingParams(**{"max_tokens": 10, **fields})
        if prompt == []:
            # an empty list of prompts, not a prompt without tokens
            assert llm.generate(prompt, bad) == []
            return
        with pytest.raises(kind, match=f"({message})|prompt"):
            llm.generate(prompt, bad)
        check_idle(llm)


def test_the_number_of_params_must_match_the_prompts(tiny: str) -> None:
    with open_llm(tiny) as llm:
        with pytest.raises(InvalidRequest, match="3 prompts.* 2 .*one for each"):
            llm.generate(PROMPTS[:3], sampled(2))
        assert llm.generate([]) == []
        check_idle(llm)


def streamed(llm: LLM, params: list[SamplingParams]) -> Outcome:
    texts: defaultdict[int, str] = defaultdict(str)
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    ends: dict[int, str] = {}
    for delta in llm.stream(PROMPTS, params):
        key = delta.choice
        assert key not in ends, "a delta after the end of a sample"
        texts[key] += delta.text
        tokens[key] += delta.token_ids
        if delta.finish_reason is not None:
            ends[key] = delta.finish_reason
    return [(texts[key], tokens[key], ends[key], None) for key in sorted(ends)]


@MODES
def test_deltas_add_up_to_the_generated_output(
    tiny: str, stops: list[str], mode: dict[str, int]
) -> None:
    with open_llm(tiny, **mode, **CRAMPED) as llm:
        params = [
            SamplingParams(seed=s, max_tokens=24, n=1 + s % 2, stop=stop if s % 4 else None)
            for s, stop in enumerate(stops)
        ]
        whole = [(*parts[:3], None) for parts in outcome(llm.generate(PROMPTS, params))]
        assert streamed(llm, params) == whole
        assert {parts[2] for parts in whole} == {"stop", "length"}
        check_idle(llm)


@pytest.mark.parametrize("async_scheduling", [0, 1])
@pytest.mark.parametrize("num_taken", [1, 8, 100])
def test_leaving_a_stream_early_frees_everything(
    tiny: str, async_scheduling: int, num_taken: int
) -> None:
    with open_llm(tiny, async_scheduling=async_scheduling, **CRAMPED) as llm:
        stream = llm.stream(PROMPTS, sampled(n=2))
        for _ in range(num_taken):
            next(stream)
        assert llm.engine.scheduler.requests
        stream.close()  # type: ignore[attr-defined]
        check_idle(llm)


@MODES
@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_string_ends_the_text_at_its_position(
    tiny: str, includes: bool, mode: dict[str, int]
) -> None:
    made: list[int] = []  # tokens of each step

    def count(event: Event) -> None:
        if isinstance(event, Completed):
            made.extend(len(tokens) for _, tokens in event.outputs())

    with open_llm(tiny, **mode, observers=[count], **CRAMPED) as llm:
        free = llm.generate(PROMPTS, sampled(ignore_eos=True, max_tokens=40))
        decode, num_split = llm.loaded.tokenizer.decode, 0  # type: ignore[union-attr]
        for first, length in ((0, 1), (7, 2), (11, 9), (30, 4)):
            texts = [result.outputs[0].text for result in free]
            stops = [text[first : first + length] for text in texts]
            params = [
                SamplingParams(
                    seed=s, max_tokens=40, ignore_eos=True, stop=[stop, "never there"],
                    include_stop_str_in_output=includes,
                )
                for s, stop in enumerate(stops)
            ]  # fmt: skip
            made.clear()
            results = llm.generate(PROMPTS, params)
            num_beyond = len(PROMPTS) * (mode["num_scheduler_steps"] - 1)
            most = sum(r.num_generated for r in results) + num_beyond
            assert sum(made) <= most, "a stopped request continues"
            for whole, stop, result in zip(free, stops, results, strict=True):
                sample, text = result.outputs[0], whole.outputs[0].text
                assert sample.text == text[: text.index(stop) + len(stop) * includes]
                assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
                num_kept = len(sample.token_ids)
                assert sample.token_ids == whole.outputs[0].token_ids[:num_kept]
                assert stop in decode(sample.token_ids)
                assert stop not in decode(sample.token_ids[:-1])
                num_split += stop not in decode(sample.token_ids[-1:])
        assert num_split > 10, "no stop string spans two tokens"
        check_idle(llm)


@MODES
@pytest.mark.parametrize("size", [1, 5, 16])
def test_a_conversation_continues_from_the_cache_with_the_same_output(
    tiny: str, size: int, mode: dict[str, int]
) -> None:
    """Each prompt is the previous one and its output, which the cache may hold."""
    settings = {"block_size": size, "num_blocks": 1600 // size}
    with open_llm(tiny, **mode, **settings) as llm, open_llm(tiny, **settings) as fresh:
        turns = [fresh.loaded.tokenizer.encode(p) for p in PROMPTS]  # type: ignore[union-attr]
        for turn, length in enumerate((4, 7, 10)):
            params = [  # different lengths, so that some end within a plan of several steps
                SamplingParams(seed=s, max_tokens=length + s % 5, ignore_eos=True)
                for s in range(len(PROMPTS))
            ]
            assert fresh.reset_cache()
            expected, results = fresh.generate(turns, params), llm.generate(turns, params)
            assert outcome(results) == outcome(expected)
            num_cached = [result.num_cached_tokens for result in results]
            assert turn == 0 or all(
                cached >= (len(tokens) - 1) // size * size
                for cached, tokens in zip(num_cached, turns, strict=True)
            )
            turns = [[*t, *r.outputs[0].token_ids] for t, r in zip(turns, results, strict=True)]


def test_a_seed_gives_the_same_output_under_all_settings(tiny: str) -> None:
    wanted = sampled(max_tokens=24, top_p=0.95, temperature=1.2)
    with open_llm(tiny) as llm:
        alone = outcome([llm.generate([p], w)[0] for p, w in zip(PROMPTS, wanted, strict=True)])
        assert outcome(llm.generate(PROMPTS, wanted)) == alone
        crowd = [*PROMPTS, *PROMPTS[::-1]], [*wanted, *[SamplingParams()] * len(PROMPTS)]
        assert outcome(llm.generate(*crowd)[: len(PROMPTS)]) == alone
        assert len({text for text, *_ in alone}) == len(alone)
    cramped = {"num_blocks": 26, "preset": "vllm_v1"}
    for more in ({}, {"async_scheduling": 1}, {"num_scheduler_steps": 4},
                 {"swap": "swap", "num_host_blocks": 40},
                 {"block_size": 5, "num_blocks": 80, "chunk": "at_most(7)"}):  # fmt: skip
        with open_llm(tiny, **{**cramped, **more}) as llm:
            results = llm.generate(PROMPTS, wanted)
            assert outcome(results) == alone, more
            assert sum(result.num_preemptions for result in results) >= 5, more


def random_settings(rng: random.Random) -> dict[str, Any]:
    """Random settings with few blocks and rows; every prompt still fits."""
    size, num_rows = rng.choice((1, 2, 5, 16, 64)), rng.choice((1, 3, 8, 16))
    length = 220  # the longest prompt and its output
    return {
        "preset": rng.choice(list(PRESETS)), "block_size": size,
        "async_scheduling": rng.choice((0, 1)),
        "num_blocks": -(-length // size) + rng.choice((0, 1, 100 // size)),
        "max_num_seqs": num_rows, "num_scheduler_steps": rng.choice((1, 1, 3, 4)),
        "num_host_blocks": rng.choice((0, 3, 50, 400)),
        "queue": rng.choice(("fcfs", "priority", "shortest_first", "fair")),
        "swap": rng.choice(("recompute", "swap", "swap_if_cheaper(start=0.0)")),
        "victim": rng.choice(("newest", "least_work", "lowest_priority", "fewest_private_blocks")),
        "max_model_len": length,
        **rng.choice((
            {}, {"chunk": "at_most(7)"}, {"chunk": "split_any", "max_num_batched_tokens": 17},
        )),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_random_settings_do_not_change_the_output(tiny: str, seed: int) -> None:
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"n": 2}, {"top_p": 0.9, "repetition_penalty": 1.2},
        {"min_tokens": 9, "max_tokens": 20},
        {"logprobs": 1, "presence_penalty": 0.5}, {"max_tokens": None}, {"prompt_logprobs": 0},
        {"priority": 1, "client": "b", "bad_words": ["ong"]}, {"stop": "e", "min_p": 0.01},
    ]  # fmt: skip
    params = [
        SamplingParams(**{"seed": s, "max_tokens": rng.randint(1, 24), **rng.choice(kinds)})
        for s in range(len(PROMPTS))
    ]
    with open_llm(tiny, max_model_len=220) as llm:
        expected = outcome(llm.generate(PROMPTS, params))
    settings = random_settings(rng)
    with open_llm(tiny, **settings) as llm:
        assert outcome(llm.generate(PROMPTS, params)) == expected, settings
        check_idle(llm)


def test_samples_of_one_prompt_differ_and_are_reproducible(tiny: str) -> None:
    with open_llm(tiny) as llm:
        params = SamplingParams(seed=5, n=4, max_tokens=20)
        samples = llm.generate("Marta", params)[0].outputs
        assert len({sample.text for sample in samples}) == 4
        again = llm.generate("Marta", params)[0].outputs
        assert [s.text for s in again] == [s.text for s in samples]
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        unseeded = [llm.generate("Marta", params)[0] for _ in range(3)]
        assert len({result.outputs[0].text for result in unseeded}) == 3


@pytest.fixture(scope="module")
def reference(tiny: str) -> Any:
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    return auto.from_pretrained(tiny, dtype=torch.float32).eval()


@MODES
def test_log_probabilities_equal_those_of_transformers(
    tiny: str, stops: list[str], reference: Any, mode: dict[str, int]
) -> None:
    """For output and prompt tokens, with bias, top_k, preemption, EOS and stop strings."""
    scored = {"logprobs": 3, "prompt_logprobs": 2, "logit_bias": {7: 4.0}, "top_k": 50}
    with open_llm(tiny, **mode, preset="vllm_v1", num_blocks=26) as llm:
        params = [SamplingParams(seed=s, n=1 + s % 2, max_tokens=30, stop=stop if s % 3 else None,
                                 **scored) for s, stop in enumerate(stops)]  # type: ignore[arg-type] # fmt: skip
        results = llm.generate(PROMPTS, params)
        assert sum(result.num_preemptions for result in results) >= 5
        check_idle(llm)
    for result in results:
        prompt = result.prompt_token_ids
        assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
        expected = real.transformers_logits(reference, prompt[:1], prompt[1:])
        check_scores(result.prompt_logprobs[1:], prompt[1:], expected, 2)
        parts = [(prompt, sample.token_ids) for sample in result.outputs]
        logits = real.batched_logits(reference, parts)
        for sample, expected in zip(result.outputs, logits, strict=True):
            check_scores(sample.logprobs, sample.token_ids, expected, 3)


def check_scores(found: Any, tokens: list[int], logits: Tensor, num_top: int) -> None:
    """Compare the log probabilities and ranks of tokens and alternatives with raw logits."""
    ordered = logits.log_softmax(-1).sort(descending=True).values[:, :num_top].numpy()
    rows = zip(tokens, found, logits.log_softmax(-1).numpy(), ordered, strict=True)
    for token, scores, logprobs, best in rows:
        assert abs(scores[token].rank - 1 - (logprobs > logprobs[token]).sum()) <= 1
        assert num_top <= len(scores) <= num_top + 1
        made = np.array([score.logprob for score in scores.values()])
        assert abs(made[:num_top] - best).max() < 1e-4
        assert abs(made - logprobs[list(scores)]).max() < 1e-4


@MODES
def test_changes_of_the_logits_apply_to_every_token(tiny: str, mode: dict[str, int]) -> None:
    with open_llm(tiny, **mode, **CRAMPED) as llm:
        assert llm.tokenizer is not None
        ends = llm.loaded.eos_ids
        often: dict[str, Any] = {"logit_bias": dict.fromkeys(ends, 6.0)}
        least = llm.generate(PROMPTS, sampled(min_tokens=12, **often))
        assert {s.finish_reason for r in least for s in r.outputs} >= {"stop"}
        for sample in (s for r in least for s in r.outputs):
            assert len(sample.token_ids) > 12 and not ends & set(sample.token_ids[:12])
        soon = llm.generate(PROMPTS, sampled(**often))
        assert min(len(s.token_ids) for r in soon for s in r.outputs) < 12
        few = llm.generate(PROMPTS, sampled(allowed_token_ids=[5, 9, 40]))
        assert {t for r in few for s in r.outputs for t in s.token_ids} == {5, 9, 40}
        forced = llm.generate(PROMPTS, sampled(logit_bias={17: 100.0}, max_tokens=5))
        assert [s.token_ids for r in forced for s in r.outputs] == [[17] * 5] * len(PROMPTS)
        words = ["ong", "suitcase", "Item", " had"]
        free = llm.generate(PROMPTS, sampled(max_tokens=60))
        assert any(word in result.outputs[0].text for word in words for result in free)
        spelled = [tuple(llm.tokenizer.encode(word)) for word in words]
        for result in llm.generate(PROMPTS, sampled(max_tokens=60, bad_words=words)):
            tokens = result.outputs[0].token_ids
            for word in spelled:
                starts = range(len(tokens) - len(word) + 1)
                assert not any(tuple(tokens[at : at + len(word)]) == word for at in starts)
        check_idle(llm)


def alive() -> Counter[type]:
    """The number of objects of each type."""
    gc.collect()
    return Counter(map(type, gc.get_objects()))


def test_finished_requests_leave_no_objects_behind(tiny: str, stops: list[str]) -> None:
    with open_llm(tiny, **CRAMPED) as llm:

        def many(seed: int) -> None:
            for number in range(seed, seed + 5):
                params = [
                    SamplingParams(seed=number, max_tokens=6, stop=stop, logprobs=1, n=1 + s % 2)
                    for s, stop in enumerate(stops[:10])
                ]
                llm.generate(PROMPTS[:10], params)
                next(iter(llm.stream(PROMPTS[:2], SamplingParams(max_tokens=9))))
                with pytest.raises(InvalidRequest):
                    llm.generate("")

        many(0)  # 75 requests
        check_idle(llm)
        counts, growths = alive(), list[int]()
        for seed in (100, 200):
            before = counts
            many(seed)
            check_idle(llm)
            counts = alive()
            assert counts[Request] <= before[Request] + 4
            assert counts[OutputBuilder] <= before[OutputBuilder]
            growths.append(counts.total() - before.total())
        # The process itself may keep more objects once.
        assert min(growths) < 50, "75 requests left objects behind"


SIZES: dict[Any, int] = {
    "512MiB": 2**29, "2GiB": 2**31, "1.5G": 1_500_000_000, "64 kib": 2**16, "7": 7, 12345: 12345,
    "10MB": 10**7, " 3gb ": 3 * 10**9,
}  # fmt: skip


def test_sizes_with_units_are_parsed() -> None:
    assert {text: parse_size(text) for text in SIZES} == SIZES


@pytest.mark.parametrize("text", ["", "much", "-1", "1.2.3MiB", "5TB", "GiB", "1e9", -3, "nan"])
def test_invalid_sizes_are_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="kv_memory is .*GiB"):
        parse_size(text)


def test_the_error_of_a_wrong_cache_size_names_flag_need_and_limit(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 16 * 2 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, head size, bytes
    with LLM(tiny, kv_memory=5 * block + 1, preset="vllm_v1") as llm:
        assert llm.config.num_blocks == 5 and llm.loaded.kv_bytes == 5 * block
    with pytest.raises(ConfigError, match=r"kv_memory.* 0.0 MiB.* 16 tokens.*--kv-memory"):
        LLM(tiny, kv_memory=block - 1)
    monkeypatch.setattr("headway.loading.free_memory", lambda: 8 * 2**30)
    too_much = 12 * 2**30
    too_large: list[dict[str, Any]] = [{"kv_memory": too_much}, {"num_blocks": too_much // block}]
    for settings in too_large:
        with pytest.raises(ConfigError, match=r"needs [0-9.]+ GiB.* [0-9.]+ GiB.*--kv-memory"):
            LLM(tiny, **settings)
    with pytest.raises(ConfigError, match="--num-host-blocks"):
        LLM(tiny, num_blocks=9, num_host_blocks=too_much // block)


def test_the_error_names_a_trace_file_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="missing.*cannot be written"):
        open_llm(tiny, trace_out=tmp_path / "missing" / "run.jsonl")
