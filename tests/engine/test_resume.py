"""A request that another engine has begun continues bit for bit as if it had never moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from headway import LLM, Engine, VirtualClock
from headway.engine import loop as engine_loop
from headway.engine import messages
from headway.engine.loop import EngineLoop
from headway.engine.queue_limits import QueueLimits
from headway.errors import InvalidRequest
from headway.events import Added, Event
from headway.lab.recording.builder import RecordingBuilder
from headway.observe.server_metrics import ServerMetrics
from headway.record.lines import AddedLine, CompletedLine
from headway.record.reader import events_of
from headway.record.replay import check_replay
from headway.record.stats import stats_of
from headway.request import Request, RequestParams
from headway.sampling_params import SamplingParams, TokenLogprobs
from tests.support.events import Events
from tests.support.features import FEATURES, PROMPT
from tests.support.journals import Journal, Recorder, of_kind
from tests.support.scripted import make_engine, script
from tests.support.waiting import LIMIT

CUTS = (1, 6, 11)  # every place with the first preset


class Sample(NamedTuple):
    """All that one sample gained, and how it ended."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    reason: str
    stop_token: int | None


@pytest.fixture(scope="module")
def baseline(tiny: str) -> Iterator[dict[str, list[Sample]]]:
    """Every feature, uninterrupted, each request alone."""
    with LLM(tiny, num_blocks=200) as llm:
        yield {
            name: run(llm.engine, [messages.Submit(name, *asked(llm, name))])[name]
            for name in FEATURES
        }


def asked(llm: LLM, feature: str) -> tuple[list[int], RequestParams]:
    params = SamplingParams(**FEATURES[feature])
    return llm.input_processor.tokens(PROMPT), llm.input_processor.params(params, feature)


def run(engine: Engine, submits: list[messages.Submit]) -> dict[str, list[Sample]]:
    """What each request gains, from the messages that a caller would get."""
    updates, found = messages.StepUpdates(engine.clock), dict[str, dict[int, Sample]]()
    for each in submits:
        updates.add(engine.add(each.id, each.prompt, each.params, outputs=each.outputs))
        found[each.id] = {}

    def observe(event: Event) -> None:
        for message in updates.of(event):
            for id, number, tokens, logprobs, end in each_update(message):
                sample = found[id].setdefault(number, Sample([], [], "", None))
                sample.tokens.extend(tokens)
                sample.logprobs.extend(logprobs or ())
                if end is not None:
                    found[id][number] = sample._replace(
                        reason=end.reason, stop_token=end.stop_token
                    )

    engine.observers.append(observe)
    engine.run()
    engine.observers.remove(observe)
    assert engine.is_healthy and engine.scheduler.is_idle, engine.fault
    return {id: [samples[k] for k in sorted(samples)] for id, samples in found.items()}


def each_update(message: messages.TokenBatch | messages.SampleUpdate) -> Iterator[Any]:
    if isinstance(message, messages.TokenBatch):
        for id, tokens in zip(message.ids, message.tokens, strict=True):
            yield id, 0, tokens, None, None
    else:
        yield message.id, message.sample, message.tokens, message.logprobs, message.end


def cut(samples: list[Sample], place: int) -> tuple[tuple[int, ...] | None, ...] | None:
    """The outputs after `place` steps: a sample that is shorter has ended. None: all have."""
    outputs = tuple(
        None if place + i >= len(s.tokens) else tuple(s.tokens[: place + i])
        for i, s in enumerate(samples)
    )
    return None if not any(each is not None for each in outputs) else outputs


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("headway", {"num_blocks": 200}),
        ("vllm_v1", {"num_blocks": 24, "block_size": 4}),  # with preemptions
        ("nano_vllm", {"num_blocks": 60, "block_size": 8, "max_num_batched_tokens": 16}),
        ("minivllm", {"num_blocks": 60, "block_size": 8}),
        ("vllm_v1", {"num_blocks": 24, "block_size": 4, "swap": "discard_output"}),
    ],
)
def test_every_feature_continues_bit_equally_from_every_cut(
    tiny: str, baseline: dict[str, list[Sample]], name: str, settings: dict[str, Any]
) -> None:
    submits, wanted = list[messages.Submit](), dict[str, list[Sample]]()
    with LLM(tiny, preset=name, max_num_seqs=6, max_model_len=90, **settings) as llm:
        for feature, samples in baseline.items():
            for place in range(max(len(s.tokens) for s in samples)) if name == "headway" else CUTS:
                if (outputs := cut(samples, place)) is None:
                    continue
                id = f"{feature} from {place}"
                submits.append(messages.Submit(id, *asked(llm, feature), outputs=outputs))
                wanted[id] = [
                    s._replace(tokens=s.tokens[len(o) :], logprobs=s.logprobs[len(o) :])
                    for s, o in zip(samples, outputs, strict=True) if o is not None
                ]  # fmt: skip
        found = run(llm.engine, submits)
    assert len(submits) > 30 and found == wanted


# Without a model: the tokens of a request follow its script.


def test_a_shared_prompt_is_computed_once_again() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    params = script(20, n=3)
    parent, other = engine.add("a", [5] * 61, params, outputs=[None, (1, 1), (1,)])
    assert (parent.id, parent.sample, other.id, other.sample) == ("a", 1, "a/2", 2)
    engine.observers.append(events := Events())
    engine.run()
    num_computed = sum(plan.num_prefill for plan in events.plans)
    assert num_computed == 61 + 2 + 2  # the second sample computes its part of a shared block
    assert list(parent.output) == list(other.output) == [1] * 19 + [9]


def test_a_sample_is_found_by_its_number_when_earlier_ones_had_ended() -> None:
    engine = make_engine()
    second, third = engine.add("a", [5], script(20, n=3), outputs=[None, (1,), (1,)])
    assert not engine.stop_sample("a", 0)
    assert engine.stop_sample("a", 1) and second.finish_reason == "stop" and not third.is_finished
    assert engine.stop_sample("a", 2) and third.is_finished
    first, other = engine.add("b", [5], script(20, n=2), outputs=[(), (1,)])
    assert engine.stop_sample("b", 1) and other.is_finished and not first.is_finished
    assert engine.abort("b") and first.finish_reason == "abort"


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([(1,)], ["outputs", "2", "1"]),
        ([None, None], ["2 samples", "ended"]),
        ([(1,), (1, -4)], ["negative", "-4"]),
        ([(1,) * 21, ()], ["output", "21", "25"]),
    ],
)
def test_a_wrong_continuation_is_refused(outputs: Any, words: list[str]) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest) as caught:
        engine.add("a", [5] * 4, script(20, n=2), outputs=outputs)
    assert all(word in str(caught.value) for word in words) and not engine.has_work


def test_a_continued_request_is_accepted_by_a_full_queue_and_keeps_its_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_loop, "READ_SECONDS", LIMIT)
    engine, seen = make_engine(), list[messages.FromLoop]()
    engine.clock = clock = VirtualClock()
    clock.advance_to(7.0)
    loop = EngineLoop(engine, seen.extend, QueueLimits(max_waiting=1))
    params = script(20, deadline=1e9)
    loop.post(
        messages.Submit(id, [5], params, outputs=outputs, age=100.0, deadline_in=50.0)
        for id, outputs in (("a", ()), ("b", ()), ("c", ((),)), ("d", ((1, 1),)))
    )
    loop._read()
    loop._flush()
    assert [each.id for each in seen if isinstance(each, messages.Refusal)] == ["b"]
    for request in engine.scheduler.requests.values():
        assert request.arrival == 7.0 - 100 and request.params.deadline == 7.0 + 50
    loop.post([messages.Cancel("d", 0)])
    loop._read()
    assert sorted(engine.scheduler.requests) == ["a", "c"]


def recorded(swap: str) -> tuple[Journal, list[Request]]:
    """A trace with continued requests under block pressure, and the requests."""
    engine = make_engine(num_blocks=16, swap=swap, headroom="watermark(0.0)")
    recorder = Recorder(engine.scheduler.config, False, has_blocks=True)
    engine.observers.append(recorder)
    requests = [
        *engine.add("a", [5] * 9, script(20), outputs=[(1, 1, 1, 1)]),
        *engine.add("b", [6] * 9, script(20, n=3), outputs=[None, (), (1, 1)]),
        *engine.add("c", [7] * 9, script(20)),
    ]
    engine.run()
    return recorder.lines.read(), requests


@pytest.mark.parametrize("swap", ["recompute", "discard_output"])
def test_a_continued_request_is_traced_and_replayed(swap: str) -> None:
    journal, requests = recorded(swap)
    assert sum(r.history.num_preemptions for r in requests)
    assert check_replay(journal) == len(of_kind(CompletedLine, journal))
    added = {each.id: each for line in of_kind(AddedLine, journal) for each in line.requests}
    assert added["a"].output == [(1, 4, 0)] and added["c"].output == 0
    stats = stats_of(journal)
    assert len(stats.requests) == 4 and sum(r.is_resumed for r in stats.requests) == 2
    builder = RecordingBuilder(4)
    arrival = next(events_of(journal))
    builder.follow(arrival)
    assert isinstance(arrival, Added) and arrival.requests[0].id == "a"
    assert builder.state.generated(builder.numbers[arrival.requests[0]]) == 4


def test_times_of_a_continued_request_are_not_counted_as_those_of_a_new_one() -> None:
    engine = make_engine()
    metrics = ServerMetrics(EngineLoop(engine, lambda _: None), "model")
    engine.add("a", [5] * 8, script(3), arrival=-100.0, outputs=[(1,)])
    engine.add("b", [5] * 8, script(3))
    engine.run()
    histograms = metrics.values.histograms
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time"):
        histogram = histograms[f"{name}_seconds"]
        assert sum(histogram.counts) == 1 and histogram.total < 50
    assert sum(histograms["e2e_request_latency_seconds"].counts) == 2
    counters = metrics.values.counters
    assert counters["generation_tokens", ""] == 2 + 3
    assert counters["prefix_cache_hits", ""] <= counters["prefix_cache_queries", ""] == 16
