"""The preset nano_vllm takes the decisions of a plain model of nano-vLLM, batch for batch."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple
from zlib import crc32

import pytest

from headway.plan import StepResult
from headway.request import Params, Request
from headway.scheduler import Scheduler, preset
from headway.scheduler.policies import MAX_PREFILL_STEPS
from tests.support import plain_nano

NUM_WORKLOADS = 600
NUM_PARTS = 6
EOS = 0
SEEN: Counter[str] = Counter()  # what the workloads made happen, over all parts


class Job(NamedTuple):
    step: int  # of its arrival
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool


class World(NamedTuple):
    jobs: list[Job]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocabulary: int


def make_world(rng: random.Random) -> World:
    """Tiny vocabularies make prefixes equal; a pool little larger than one request is contended."""
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
    return World(jobs, block_size, num_blocks, max_num_seqs, budget, vocabulary)


def make_stream(rng: random.Random) -> World:
    """Prompts keep coming at every step, so that decodes have to be given their turn."""
    jobs = [
        Job(
            step, [rng.randrange(50) for _ in range(rng.randrange(1, 6))], rng.randrange(1, 6), True
        )
        for step in range(60)
    ]
    return World(jobs, rng.choice((1, 2, 4)), rng.choice((40, 400)), 200, 200, 50)


def compare(world: World, seed: int) -> Counter[str]:
    """Run both side by side; every step must agree. Counts what happened."""
    plain = plain_nano.Scheduler(
        world.max_num_seqs, world.max_num_batched_tokens, world.num_blocks, world.block_size, EOS
    )
    ours = Scheduler(
        preset(
            "nano_vllm", max_num_seqs=world.max_num_seqs, max_num_batched_tokens=world.max_num_batched_tokens,
            num_blocks=world.num_blocks, block_size=world.block_size,
        )
    )  # fmt: skip
    seen: Counter[str] = Counter()
    jobs, step = list(enumerate(world.jobs)), 0
    while jobs or ours.requests:
        while jobs and jobs[0][1].step <= step:
            number, job = jobs.pop(0)
            seq = plain_nano.Sequence(str(number), job.prompt, job.max_tokens, job.ignore_eos)
            plain.add(seq)
            params = Params(
                max_tokens=job.max_tokens, eos_ids=frozenset({EOS}), ignore_eos=job.ignore_eos
            )
            ours.add(Request(seq.id, job.prompt, params, arrival=float(step)))
        step += 1
        if ours.requests:
            compare_step(plain, ours, world.vocabulary, seed, seen)
        assert step < 20_000, "no end in sight"
    assert not plain.waiting and not plain.running
    assert not any(ours.kv.pool.refs) and not plain.block_manager.used_block_ids
    return seen


def compare_step(
    plain: plain_nano.Scheduler, ours: Scheduler, vocabulary: int, seed: int, seen: Counter[str]
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
    is_cut = [seq.num_cached_tokens < len(seq) for seq in batch]
    finished = plain.postprocess(tokens)
    sampled = {s.id: t for s, t, cut in zip(batch, tokens, is_cut, strict=True) if not cut}
    result = StepResult(
        columns=[[sampled[r.id] for r in plan.decodes]] if plan.decodes else [],
        firsts=[sampled[c.request.id] for c in plan.chunks if c.is_last],
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
    seen["cut prompts"] += sum(is_cut)
    seen["turns for decodes"] += not is_prefill and streak == MAX_PREFILL_STEPS and num_waiting > 0
    seen["preempted cut prompts"] += sum(
        not is_prefill and seq.num_completion_tokens == 0 for seq in plain.preempted
    )
    twins = [ids for ids in plain.block_manager.hash_to_block_ids.values() if len(ids) > 1]
    seen["equal blocks"] += len(twins)
    seen["ended by EOS"] += sum(seq.token_ids[-1] == EOS and not seq.ignore_eos for seq in finished)
    seen["ended by length"] += sum(seq.num_completion_tokens == seq.max_tokens for seq in finished)


def test_both_give_decodes_a_turn_after_the_same_number_of_prefill_batches() -> None:
    assert plain_nano.MAX_PREFILL_BATCHES == MAX_PREFILL_STEPS


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_workloads_give_the_same_batches_step_by_step(part: int) -> None:
    for seed in range(part, NUM_WORKLOADS, NUM_PARTS):
        rng = random.Random(seed)
        world = make_stream(rng) if seed % 20 == 0 else make_world(rng)
        try:
            SEEN.update(compare(world, seed))
        except AssertionError as error:
            raise AssertionError(f"workload {seed}: {world}") from error


def test_sequences_that_stop_in_one_step_give_their_blocks_up_in_the_order_of_admission() -> None:
    """Otherwise other blocks are least recently used, and a later prompt finds another prefix."""
    seed = 1256
    compare(make_world(random.Random(seed)), seed)


def test_the_workloads_made_every_case_happen() -> None:
    if not SEEN:
        pytest.skip("counts what the comparison above saw")
    rare = (
        "preemptions", "cache hits", "full hits", "hits after preemption", "cut prompts",
        "turns for decodes", "preempted cut prompts", "equal blocks", "ended by EOS",
        "ended by length",
    )  # fmt: skip
    assert all(SEEN[case] >= 5 for case in rare), SEEN
