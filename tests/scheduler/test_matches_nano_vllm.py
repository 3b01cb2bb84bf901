"""The preset nano_vllm makes the same batches as a simple model of nano-vLLM, step by step."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple
from zlib import crc32

import pytest

from headway.plan import StepResult
from headway.request import Request, RequestParams
from headway.scheduler import Scheduler, preset
from headway.scheduler.policies import MAX_PREFILL_STEPS
from tests.support import nano_vllm

NUM_WORKLOADS = 400
NUM_PARTS = 2
STREAM_EVERY = 20
EOS = 0


class Job(NamedTuple):
    step: int  # of its arrival
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool


class Workload(NamedTuple):
    jobs: list[Job]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocabulary: int


def random_workload(rng: random.Random) -> Workload:
    """Tiny vocabularies make equal prefixes; a small pool causes preemptions."""
    block_size = rng.choice((1, 2, 4, 16))
    vocabulary = rng.choice((2, 2, 3, 50))
    longest = rng.choice((4, 12, 40, 90)) if block_size < 16 else rng.choice((40, 120))
    max_num_seqs = rng.choice((1, 2, 3, 5, 12))
    stems = [[rng.randrange(vocabulary) for _ in range(longest)] for _ in range(2)]
    jobs, step = [], 0
    for _ in range(rng.randrange(2, 24)):
        step += rng.choice((0, 0, 0, 1, 2, 9))
        stem = rng.choice(stems)[: rng.randrange(longest)]
        tail = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, longest))]
        prompt = (stem + tail)[:longest]
        jobs.append(Job(step, prompt, rng.randrange(1, longest + 2), rng.random() < 0.5))
    most = max(-(-(len(j.prompt) + j.max_tokens - 1) // block_size) for j in jobs)
    num_blocks = most + rng.choice((0, 0, 1, 2, most // 2, most, 3 * most))
    budget = max_num_seqs + rng.choice((0, 1, 3, longest, 4 * longest))
    return Workload(jobs, block_size, num_blocks, max_num_seqs, budget, vocabulary)


def steady_stream(rng: random.Random) -> Workload:
    """A prompt arrives at every step, so that decodes run only after a streak of prefills."""
    jobs = [
        Job(
            step, [rng.randrange(50) for _ in range(rng.randrange(1, 6))], rng.randrange(1, 6), True
        )
        for step in range(60)
    ]
    return Workload(jobs, rng.choice((1, 2, 4)), rng.choice((40, 400)), 200, 200, 50)


def compare(workload: Workload, seed: int) -> Counter[str]:
    """Run both schedulers and compare every step; returns how often each event occurred."""
    plain = nano_vllm.Scheduler(
        workload.max_num_seqs,
        workload.max_num_batched_tokens,
        workload.num_blocks,
        workload.block_size,
        EOS,
    )
    ours = Scheduler(
        preset(
            "nano_vllm", max_num_seqs=workload.max_num_seqs, max_num_batched_tokens=workload.max_num_batched_tokens,
            num_blocks=workload.num_blocks, block_size=workload.block_size,
        )
    )  # fmt: skip
    seen: Counter[str] = Counter()
    jobs, step = list(enumerate(workload.jobs)), 0
    while jobs or ours.requests:
        while jobs and jobs[0][1].step <= step:
            number, job = jobs.pop(0)
            seq = nano_vllm.Sequence(str(number), job.prompt, job.max_tokens, job.ignore_eos)
            plain.add(seq)
            params = RequestParams(
                max_tokens=job.max_tokens, eos_ids=frozenset({EOS}), ignore_eos=job.ignore_eos
            )
            ours.add(Request(seq.id, job.prompt, params, arrival=float(step)))
        step += 1
        if ours.requests:
            compare_step(plain, ours, workload.vocabulary, seed, seen)
        assert step < 20_000, "too many steps"
    assert not plain.waiting and not plain.running
    assert not any(ours.kv.pool.refs) and not plain.block_manager.used_block_ids
    return seen


def compare_step(
    plain: nano_vllm.Scheduler, ours: Scheduler, vocabulary: int, seed: int, seen: Counter[str]
) -> None:
    num_waiting = len(plain.waiting)
    streak = plain.prefill_streak
    batch, is_prefill = plain.schedule()
    plan = ours.schedule()
    if is_prefill:
        assert not plan.decodes
        assert [(c.request.id, c.end - c.start) for c in plan.chunks] == [
            (seq.id, seq.num_scheduled_tokens) for seq in batch
        ]
    else:
        assert not plan.chunks
        assert {r.id for r in plan.decodes} == {seq.id for seq in batch}
        assert len(plan.decodes) == len(batch)
    assert [p.request.id for p in plan.events.preempted] == [seq.id for seq in plain.preempted]
    assert plan.events.num_free == len(plain.block_manager.free_block_ids)

    tokens = [crc32(f"{seed} {s.id} {len(s)}".encode()) % vocabulary for s in batch]
    is_split = [seq.num_cached_tokens < len(seq) for seq in batch]
    finished = plain.postprocess(tokens)
    sampled = {s.id: t for s, t, split in zip(batch, tokens, is_split, strict=True) if not split}
    result = StepResult(
        decode_tokens=[[sampled[r.id] for r in plan.decodes]] if plan.decodes else [],
        first_tokens=[sampled[c.request.id] for c in plan.chunks if c.is_last],
    )
    report = ours.complete(plan, result)
    assert sorted(r.id for r in report.finished) == sorted(seq.id for seq in finished)
    for seq in batch:
        request = next((r for r in report.finished if r.id == seq.id), ours.requests.get(seq.id))
        assert request is not None and request.tokens.tolist() == seq.token_ids

    seen["preemptions"] += len(plain.preempted)
    seen["cache hits"] += sum(a.num_cached > 0 for a in plan.admitted)
    seen["full hits"] += sum(c.store_from > c.start for c in plan.chunks)
    seen["hits after preemption"] += sum(a.num_cached > 0 and a.is_resume for a in plan.admitted)
    seen["split prompts"] += sum(is_split)
    seen["decodes after a streak"] += (
        not is_prefill and streak == MAX_PREFILL_STEPS and num_waiting > 0
    )
    seen["preempted split prompts"] += sum(
        not is_prefill and seq.num_completion_tokens == 0 for seq in plain.preempted
    )
    equal = [ids for ids in plain.block_manager.hash_to_block_ids.values() if len(ids) > 1]
    seen["equal blocks"] += len(equal)
    seen["ended by EOS"] += sum(seq.token_ids[-1] == EOS and not seq.ignore_eos for seq in finished)
    seen["ended by length"] += sum(seq.num_completion_tokens == seq.max_tokens for seq in finished)


def test_both_decode_after_the_same_number_of_prefill_batches() -> None:
    assert nano_vllm.MAX_PREFILL_BATCHES == MAX_PREFILL_STEPS


# How often each kind of event occurs at least in a part.
MIN_EVENTS = {
    "preemptions": 200, "cache hits": 900, "full hits": 50, "hits after preemption": 150,
    "split prompts": 5000, "decodes after a streak": 50, "preempted split prompts": 1,
    "equal blocks": 40, "ended by EOS": 400, "ended by length": 1000,
}  # fmt: skip


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_workloads_give_the_same_batches_step_by_step(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, NUM_WORKLOADS, NUM_PARTS):
        rng = random.Random(seed)
        workload = steady_stream(rng) if seed % STREAM_EVERY == 0 else random_workload(rng)
        try:
            seen += compare(workload, seed)
        except AssertionError as error:
            raise AssertionError(f"workload {seed}: {workload}") from error
    rare = {event: seen[event] for event, least in MIN_EVENTS.items() if seen[event] < least}
    assert not rare, f"part {part} has too few of these events: {rare}"


def test_sequences_that_stop_in_one_step_free_their_blocks_in_the_order_of_admission() -> None:
    """Otherwise the least recently used blocks differ, and later prompts find other prefixes."""
    seed = 1256
    compare(random_workload(random.Random(seed)), seed)
