"""Embeddings: pooled hidden states that do not depend on chunks, batches or preemptions."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway import LLM, Config, Engine, Request, SamplingParams, Scheduler, preset
from headway.engine.input_processor import embedding_params
from headway.errors import ExecutorError, InvalidRequest, RequestTooLong
from headway.events import Completed, Event, Planned, preempted_by
from headway.executor.cpu import CpuExecutor
from headway.executor.pooling import SLICE, add_rows
from headway.executor.sampling.logprobs import ExtraOutputs
from headway.model.backends.plain import PlainBackend
from headway.model.decoder import Decoder
from headway.model.precision import why_not_native
from headway.plan import Embedding, Plan
from headway.record.lines import AddedLine, CompletedLine
from headway.record.reader import read_journal
from headway.record.replay import check_replay
from headway.request import Pooling, RequestParams
from headway.sampling_params import Sampling
from tests.model.test_batch_invariance import CONFIGS, ScaledCheckpoint, decoder
from tests.support import real
from tests.support.journals import of_kind

needs_native = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
MODEL = "7 query heads per KV head, with norms"
LENGTHS = (1, 2, 17, 40, 41, 64, SLICE + 44)
POOLINGS: tuple[Pooling, ...] = ("mean", "last")


def some_prompts() -> list[list[int]]:
    """Prompts of several lengths, one longer than SLICE; the last shares a prefix with another."""
    chance = random.Random(1)
    found = [[chance.randrange(131) for _ in range(length)] for length in LENGTHS]
    return [*found, [*found[-1][:60], 7]]


class Run:
    """An engine over a decoder; keeps the embeddings and what happened to them."""

    def __init__(self, model: Decoder, config: Config, async_scheduling: int = 0) -> None:
        self.executor = CpuExecutor(model, config)
        self.engine = Engine(
            Scheduler(config),
            self.executor,
            async_scheduling=async_scheduling,
            observers=[self._observe],
        )
        self.found: dict[str, Embedding] = {}
        self.num_preempted = self.num_swapped = 0

    def _observe(self, event: Event) -> None:
        if isinstance(event, Completed) and isinstance(event.result.extra, ExtraOutputs):
            for request, vector in event.result.extra.embeddings.items():
                assert request.id not in self.found
                self.found[request.id] = vector
        halted = [p for p in preempted_by(event) if p.request.params.pooling and p.num_lost]
        self.num_preempted += sum(not p.is_swap for p in halted)
        self.num_swapped += sum(p.is_swap for p in halted)

    def embed(self, id: str, prompt: list[int], pooling: Pooling) -> Request:
        return self.engine.add(id, prompt, embedding_params(pooling))[0]


def roomy(**more: Any) -> Config:
    numbers = {
        "block_size": 16,
        "num_blocks": 100,
        "max_model_len": 400,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 16,
    }
    return preset("headway", **{**numbers, **more})


def alone(model: Decoder) -> dict[str, Embedding]:
    """The embedding of every prompt, each alone in an engine and in one chunk."""
    found: dict[str, Embedding] = {}
    for number, prompt in enumerate(some_prompts()):
        for pooling in POOLINGS:
            run = Run(model, roomy())
            run.embed(f"{pooling} {number}", prompt, pooling)
            run.engine.run()
            found |= run.found
    return found


def check_equal(found: dict[str, Embedding], expected: dict[str, Embedding]) -> None:
    assert found.keys() == expected.keys()
    for name, vector in expected.items():
        assert vector.dtype == np.float32 and np.array_equal(found[name], vector), name


CRAMPED = {
    "batching": "mixed", "queue": "fcfs", "headroom": "watermark(0)", "victim": "newest",
    "num_blocks": 24, "max_num_batched_tokens": 16,
}  # fmt: skip
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "short chunks": (0, {"chunk": "at_most(7)", "max_num_batched_tokens": 60}),
    "chunks of any size": (1, {"chunk": "split_any", "max_num_batched_tokens": 23, "block_size": 5}),
    "recomputed": (1, CRAMPED),
    "swapped": (1, {**CRAMPED, "num_host_blocks": 60, "swap": "swap"}),
    "several decode steps": (0, {"num_scheduler_steps": 3, "max_num_seqs": 5}),
}  # fmt: skip


def run_in_company(run: Run, chance: random.Random) -> None:
    """Embed all prompts with both poolings, in random order, beside generation from them."""
    prompts = some_prompts()
    for number in range(3):
        run.engine.add(f"long {number}", prompts[2], RequestParams(max_tokens=110))
        run.engine.step()
    run.embed("mean 6", prompts[6], "mean")  # while outputs need more and more blocks
    for _ in range(25):
        run.engine.step()
    asked = [(p, n) for p in POOLINGS for n in range(len(prompts)) if (p, n) != ("mean", 6)]
    chance.shuffle(asked)
    for pooling, number in asked:
        if chance.random() < 0.4:
            scored = Sampling(temperature=0.0, prompt_logprobs=0, logprobs=0)
            more = {"sampling": scored, "reads_cache": False} if chance.random() < 0.5 else {}
            params = RequestParams(max_tokens=20, **more)  # type: ignore[arg-type]
            run.engine.add(f"text {number} {pooling}", prompts[number], params)
        run.embed(f"{pooling} {number}", prompts[number], pooling)
        run.engine.step()
    run.engine.run()
    assert run.engine.fault is None, run.engine.fault


@needs_native
@pytest.mark.parametrize("precision", ["float32", "8 bits", "4 bits"])
def test_an_embedding_is_bitwise_the_same_in_any_batch_and_chunking(precision: str) -> None:
    model, chance = decoder(MODEL, precision), random.Random(precision)
    expected = alone(model)
    for way, (async_scheduling, changes) in WAYS.items():
        run = Run(model, roomy(**changes), async_scheduling)
        run_in_company(run, chance)
        check_equal(run.found, expected)
        assert way != "recomputed" or run.num_preempted
        assert way != "swapped" or run.num_swapped
        assert not len(run.executor.pooler._sums), "a sum outlives its request"


@needs_native
@pytest.mark.parametrize("seed", range(6))
def test_a_position_is_counted_once_however_often_it_is_computed(seed: int) -> None:
    """Preempt at random; resume from its own blocks, those of an equal prompt, or from zero."""
    model, chance = decoder(MODEL, "float32"), random.Random(seed)
    prompt = some_prompts()[-2]
    single = Run(model, roomy())
    single.embed("mean", prompt, "mean")
    single.engine.run()
    run = Run(model, roomy(max_num_batched_tokens=70, chunk="at_most(33)", block_size=4))
    request, spans = run.embed("mean", prompt, "mean"), list[tuple[int, int]]()
    scheduler, texts = run.engine.scheduler, 0
    while not request.is_finished:
        completed = run.engine.step()
        assert completed is not None and run.engine.fault is None, run.engine.fault
        spans += [(c.start, c.end) for c in completed.plan.chunks if c.request is request]
        if texts < 3 and chance.random() < 0.3:
            run.engine.add(f"text {texts}", prompt, RequestParams(max_tokens=2))
            texts += 1
        if request in scheduler.running and chance.random() < 0.6 and len(spans) < 40:
            scheduler.state.preempt(request, may_swap=False)
            if chance.random() < 0.3:
                scheduler.reset_cache(force=True)
    assert sum(end - start for start, end in spans) > len(prompt), "nothing was computed again"
    check_equal(run.found, single.found)


@needs_native
def test_a_sum_keeps_positions_from_before_a_restart_from_zero() -> None:
    """Restart, preempt early, then resume further on, in blocks that an equal prompt filled."""
    model, prompt = decoder(MODEL, "float32"), some_prompts()[-2]
    run = Run(
        model, roomy(max_num_batched_tokens=70, max_num_seqs=1, block_size=4, queue="priority")
    )
    (request,) = run.engine.add("mean 6", prompt, embedding_params("mean", priority=1))
    scheduler, starts = run.engine.scheduler, list[int]()
    for num_steps in (2, 1):
        for _ in range(num_steps):
            run.engine.step()
        starts.append(request.num_computed)
        scheduler.state.preempt(request, may_swap=False)
        scheduler.reset_cache(force=True)
    run.engine.add("text", prompt, RequestParams(max_tokens=2))
    while not request.is_finished:
        completed = run.engine.step()
        assert completed is not None and run.engine.fault is None, run.engine.fault
        starts += [chunk.start for chunk in completed.plan.chunks if chunk.request is request]
    assert starts[:3] == [140, 70, 140]
    single = Run(model, roomy())
    single.embed("mean 6", prompt, "mean")
    single.engine.run()
    check_equal(run.found, single.found)


def test_plain_torch_and_the_native_kernels_agree() -> None:
    prompts, plain = some_prompts(), Decoder(ScaledCheckpoint(CONFIGS[MODEL]), PlainBackend())
    for pooling in POOLINGS:
        runs = [Run(plain, roomy(**changes)) for changes in ({}, {"chunk": "at_most(9)"})]
        if why_not_native() is None:
            runs.append(Run(decoder(MODEL, "float32"), roomy()))
        for run in runs:
            for number, prompt in enumerate(prompts):
                run.embed(str(number), prompt, pooling)
            run.engine.run()
        for number, prompt in enumerate(prompts):
            wanted = by_hand(plain, prompt, pooling)
            for run in runs:
                np.testing.assert_allclose(run.found[str(number)], wanted, atol=1e-5)


@torch.inference_mode()
def by_hand(model: Decoder, prompt: list[int], pooling: Pooling) -> Embedding:
    """The definition: final norm, then the mean or the last row, then length 1."""
    states = model.forward(real.whole(prompt), real.blocks_for(model, len(prompt)))
    states = model.backend.rms_norm(states, model.norm, model.config.norm_eps).double()
    vector = states.mean(0) if pooling == "mean" else states[-1]
    found: Embedding = (vector / vector.norm()).float().numpy()
    return found


def test_the_sum_of_rows_does_not_depend_on_how_they_are_split() -> None:
    chance, generator = random.Random(0), torch.Generator().manual_seed(0)
    sizes = torch.exp(12 * torch.randn(300, 1, generator=generator))
    rows = (torch.randn(300, 33, generator=generator) * sizes).float()
    sums = []
    for _ in range(20):
        total, at = torch.zeros(33, dtype=torch.float64), 0
        while at < len(rows):
            count = chance.randint(1, 90)
            add_rows(total, rows[at : at + count])
            at += count
        sums.append(total)
    assert all(torch.equal(each, sums[0]) for each in sums)
    assert torch.allclose(sums[0], rows.double().sum(0))


def test_an_aborted_embedding_leaves_no_sum() -> None:
    run = Run(Decoder(ScaledCheckpoint(CONFIGS[MODEL]), PlainBackend()), roomy(chunk="at_most(9)"))
    run.embed("a", some_prompts()[-2], "mean")
    run.engine.step()
    assert len(run.executor.pooler._sums) == 1
    run.engine.abort("a")
    run.engine.run()
    run.engine.scheduler.state.planned = Planned(Plan(-1))  # the last plan refers to the request
    gc.collect()
    assert not len(run.executor.pooler._sums) and not run.found


WRONG: dict[str, dict[str, Any]] = {
    "pooling": {"pooling": "max", "max_tokens": 1},
    "max_tokens": {"pooling": "last", "max_tokens": 2},
    "n 1": {"pooling": "last", "max_tokens": 1, "n": 2},
    "reads_cache": {"pooling": "mean", "max_tokens": 1},
}


@pytest.mark.parametrize("word", WRONG)
def test_a_request_that_cannot_be_an_embedding_is_rejected(word: str) -> None:
    scheduler = Scheduler(roomy())
    with pytest.raises(InvalidRequest, match=word):
        scheduler.add(Request("a", [1, 2], RequestParams(**WRONG[word])))


@pytest.fixture
def llm(tiny: str) -> Iterator[LLM]:
    with LLM(tiny, num_blocks=60) as llm:
        yield llm


TEXTS = ["Marta", "The harbour master", real.STORY, "crème brûlée"]


def test_embed_returns_unit_vectors_in_the_order_of_the_prompts(llm: LLM) -> None:
    results = llm.embed(TEXTS)
    vectors = []
    for text, result in zip(TEXTS, results, strict=True):
        assert result.prompt == text and result.prompt_token_ids == llm.input_processor.tokens(text)
        vector = result.outputs.embedding
        assert result.finished and vector.dtype == np.float32 and vector.shape == (64,)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
        vectors.append(vector)
    assert len({vector.tobytes() for vector in vectors}) == len(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        (single,) = llm.embed(text)
        (ids,) = llm.embed(llm.input_processor.tokens(text))
        np.testing.assert_allclose(single.outputs.embedding, vector, atol=1e-6)
        np.testing.assert_allclose(ids.outputs.embedding, vector, atol=1e-6)
    assert llm.generate(TEXTS[0], SamplingParams(temperature=0, max_tokens=3))[0].outputs


def test_the_last_token_reads_the_cache_and_the_mean_does_not(llm: LLM) -> None:
    found = {p: [llm.embed(real.STORY, pooling=p)[0] for _ in range(2)] for p in POOLINGS}
    assert [result.num_cached_tokens for result in found["mean"]] == [0, 0]
    assert all(result.num_cached_tokens > 0 for result in found["last"])
    vectors = {p: [r.outputs.embedding for r in results] for p, results in found.items()}
    for first, second in vectors.values():
        np.testing.assert_allclose(first, second, atol=1e-6)
    assert not np.allclose(vectors["mean"][0], vectors["last"][0], atol=1e-3)


def test_invalid_prompts_and_poolings_are_rejected(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="pooling"):
        llm.embed(TEXTS, pooling="max")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        llm.embed("")
    with pytest.raises(RequestTooLong):
        llm.embed([1] * 600)
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]"):
        llm.embed(["Marta", ""])


def test_a_failed_step_raises(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.executor.pooler, "pool", None)
        with pytest.raises(ExecutorError, match="NoneType"):
            llm.embed("Marta")
    assert len(llm.embed("Marta")[0].outputs.embedding) == 64


def test_recorded_embeddings_replay_and_are_not_learned_as_lengths(
    tiny: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    settings = {"num_blocks": 40, "chunk": "at_most(20)", "headroom": "future_peak(learned)"}
    with LLM(tiny, trace_out=path, **settings) as llm:
        llm.embed(TEXTS)
        llm.embed(TEXTS, pooling="last")
        assert not llm.engine.scheduler.state.outputs.shares
        llm.generate(TEXTS, SamplingParams(seed=1, max_tokens=20))
    journal = list(read_journal(path))
    added = of_kind(AddedLine, journal)
    asked = [each.pooling for line in added for each in line.requests]
    assert asked == ["mean"] * 4 + ["last"] * 4 + [None] * 4
    assert check_replay(journal) == len(of_kind(CompletedLine, journal))
