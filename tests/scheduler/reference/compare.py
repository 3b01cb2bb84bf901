"""Random workloads, and a preset and a reference model run side by side on them."""

from __future__ import annotations

import random
from collections import Counter
from math import inf
from typing import NamedTuple
from zlib import crc32

from headway import Completed, Config, Plan, Scheduler, StepResult
from headway.request import Request, RequestParams
from tests.scheduler.reference.blocks import Sequence
from tests.scheduler.reference.listing import Batch, Limits, Listing

MAX_STEPS = 20_000
STREAM_EVERY = 10


class Job(NamedTuple):
    step: int  # of its arrival
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    max_total_tokens: int | None


class Workload(NamedTuple):
    jobs: list[Job]
    limits: Limits
    vocabulary: int
    seed: int


def random_workload(
    seed: int, *, is_cut: bool = True, has_totals: bool = False, has_swaps: bool = False
) -> Workload:
    """Tiny vocabularies make equal prefixes; a small pool causes preemptions.

    Without `is_cut`, the token budget holds any request at its full length. With `has_totals`,
    half of the requests have a limit of prompt and output together. With `has_swaps`, half of the
    workloads have outputs that are long enough to swap, and room for them on the host.
    """
    rng = random.Random(seed)
    block_size, vocabulary = rng.choice((1, 2, 4, 16)), rng.choice((2, 2, 3, 50))
    longest = rng.choice((4, 12, 30)) if block_size < 16 else rng.choice((40, 70))
    has_swaps = has_swaps and seed % 4 >= 2
    if has_swaps:
        block_size, vocabulary, longest = rng.choice((1, 2, 4)), 50, 24
    jobs = _random_jobs(rng, vocabulary, longest, has_totals)
    max_num_seqs, is_stream = rng.choice((1, 2, 3, 5, 12)), seed % STREAM_EVERY == 0
    if is_stream:
        jobs, max_num_seqs, longest = steady_stream(rng), 200, 12
    lengths = [len(job.prompt) + job.max_tokens - 1 for job in jobs]
    most = -(-max(lengths) // block_size)
    num_blocks = most + rng.choice((0, 0, 1, 2, most // 2, most, 3 * most))
    if is_stream:
        num_blocks = rng.choice((15, 20, 30, 400))
    budget = max_num_seqs + rng.choice((0, 1, 3, longest, 4 * longest))
    if not is_cut:
        budget = max(max(lengths), rng.choice((1, budget, 4 * longest)))
    num_host_blocks = 20 * most if has_swaps else rng.choice((0, most, 9 * most))
    limits = Limits(max_num_seqs, budget, num_blocks, block_size, num_host_blocks)
    return Workload(jobs, limits, vocabulary, seed)


def _random_jobs(rng: random.Random, vocabulary: int, longest: int, has_totals: bool) -> list[Job]:
    stems = [[rng.randrange(vocabulary) for _ in range(longest)] for _ in range(2)]
    jobs, step = [], 0
    for _ in range(rng.randrange(2, 18)):
        step += rng.choice((0, 0, 0, 1, 2, 9))
        stem = rng.choice(stems)[: rng.randrange(longest)]
        tail = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, longest))]
        prompt = (stem + tail)[:longest]
        total = len(prompt) + rng.randrange(1, longest)
        jobs.append(
            Job(
                step, prompt, rng.randrange(1, longest + 2), rng.random() < 0.5,
                total if has_totals and rng.random() < 0.5 else None,
            )
        )  # fmt: skip
    return jobs


def steady_stream(rng: random.Random) -> list[Job]:
    """A prompt arrives at every step, so that decodes run only after a streak of prefills."""
    return [
        Job(
            step,
            [rng.randrange(50) for _ in range(rng.randrange(1, 6))],
            rng.randrange(1, 6),
            True,
            None,
        )
        for step in range(60)
    ]


def crowded_workload(seed: int) -> Workload:
    """Up to ten requests of two prefixes in 3 to 20 blocks; each of them fits alone."""
    rng = random.Random(seed)
    block_size, num_blocks = rng.choice((1, 2, 2, 3, 4)), rng.randrange(3, 21)
    vocabulary, longest = rng.choice((2, 3, 50)), num_blocks * block_size
    stems = [[rng.randrange(vocabulary) for _ in range(longest)] for _ in range(2)]
    jobs, step = [], 0
    for _ in range(rng.randrange(2, 11)):
        step += rng.choice((0, 0, 1, 4))
        num_prompt = rng.randrange(1, longest)
        num_shared = rng.choice((num_prompt, rng.randrange(num_prompt + 1)))
        tail = [rng.randrange(vocabulary) for _ in range(num_prompt - num_shared)]
        max_tokens = rng.randrange(1, min(longest - num_prompt + 1, 4 * block_size) + 1)
        prompt = rng.choice(stems)[:num_shared] + tail
        jobs.append(Job(step, prompt, max_tokens, rng.random() < 0.5, None))
    max_num_seqs = rng.choice((2, 3, 10, 10))
    budget = max_num_seqs + rng.choice((0, 2, longest, 2 * longest))
    return Workload(jobs, Limits(max_num_seqs, budget, num_blocks, block_size), vocabulary, seed)


class Pair:
    """A reference and a preset on the same workload."""

    def __init__(self, reference: Listing, config: Config, workload: Workload) -> None:
        self.reference, self.ours, self.workload = reference, Scheduler(config), workload
        self.seen: Counter[str] = Counter()
        self.step = 0
        self._tokens: dict[tuple[str, int], int] = {}

    def run(self, until: float = inf) -> str | None:
        """The first difference between the two up to this step, or None."""
        jobs = list(enumerate(self.workload.jobs))
        while (jobs or self.ours.requests) and self.step < until:
            while jobs and jobs[0][1].step <= self.step:
                self.add(*jobs.pop(0))
            self.step += 1
            if self.ours.requests:
                problem = self.compare_step()
                if problem:
                    return f"step {self.step}: {problem}"
            assert self.step < MAX_STEPS, "too many steps"
        return None

    def add(self, number: int, job: Job) -> None:
        id = str(number)
        self.reference.add(
            Sequence(id, job.prompt, job.max_tokens, job.ignore_eos, job.max_total_tokens)
        )
        params = RequestParams(
            max_tokens=job.max_tokens, eos_ids=frozenset({self.workload.limits.eos}),
            ignore_eos=job.ignore_eos, max_total_tokens=job.max_total_tokens,
        )  # fmt: skip
        self.ours.add(Request(id, job.prompt, params, arrival=float(self.step)))

    def compare_step(self) -> str | None:
        batch, plan = self.reference.step(), self.ours.schedule()
        self.count(batch, plan)
        for name, theirs, ours in (
            ("preempted", [(s.id, how) for s, how in self.reference.preempted], preempted(plan)),
            ("prompts", tokens_of(batch), planned_tokens(plan)),
            ("decodes", sorted(s.id for s in batch.decode), sorted(r.id for r in plan.decodes)),
            ("free blocks", self.reference.blocks.num_free, self.ours.num_free),
        ):
            if theirs != ours:
                return f"{name}: {theirs} in the listing, {ours} here"
        completed = self.ours.complete(plan, self.result(plan))
        finished = self.reference.postprocess(batch, self.sampled(batch))
        ends = sorted(seq.id for seq in finished), sorted(r.id for r in completed.finished)
        if ends[0] != ends[1]:
            return f"finished: {ends[0]} in the listing, {ends[1]} here"
        self.seen["finished"] += len(finished)
        return self.compare_outputs(batch, completed)

    def compare_outputs(self, batch: Batch, completed: Completed) -> str | None:
        """All tokens of what has ended, and the lengths of what goes on."""
        ended = {request.id: request for request in completed.finished}
        for seq in [seq for seq, _ in batch.prefill] + batch.decode:
            request = ended.get(seq.id) or self.ours.requests[seq.id]
            if len(seq) != request.num_known or (
                request.is_finished and request.tokens.tolist() != seq.token_ids
            ):
                return f"output of {seq.id}: {seq.token_ids} in the listing, {request.tokens} here"
        return None

    def token(self, id: str, length: int) -> int:
        """The token after these many; listing and preset ask for the same ones."""
        token = self._tokens.get((id, length))
        if token is None:
            text = f"{self.workload.seed} {id} {length}"
            token = self._tokens[id, length] = crc32(text.encode()) % self.workload.vocabulary
        return token

    def sampled(self, batch: Batch) -> dict[str, int]:
        scheduled = [seq for seq, _ in batch.prefill] + batch.decode
        return {seq.id: self.token(seq.id, len(seq)) for seq in scheduled}

    def result(self, plan: Plan) -> StepResult:
        decodes = [self.token(r.id, r.num_known) for r in plan.decodes]
        firsts = [self.token(c.request.id, c.end) for c in plan.chunks if c.is_last]
        return StepResult(decode_tokens=[decodes] if decodes else [], first_tokens=firsts)

    def count(self, batch: Batch, plan: Plan) -> None:
        seen = self.seen
        for preemption in plan.preempted:
            seen["preemptions"] += 1
            seen["discarded outputs"] += preemption.is_discard
            seen["swaps"] += preemption.is_swap
        for admission in plan.admitted:
            seen["cache hits"] += admission.num_cached > 0
            seen["hits after preemption"] += admission.num_cached > 0 and admission.is_resume
        for chunk in plan.chunks:
            seen["cut prompts"] += not chunk.is_last
        seen["deferred decodes"] += len(plan.deferred)


def preempted(plan: Plan) -> list[tuple[str, str]]:
    return [(p.request.id, "swap" if p.is_swap else "recompute") for p in plan.preempted]


def tokens_of(batch: Batch) -> dict[str, int]:
    """Tokens computed of each prompt."""
    return {seq.id: num for seq, num in batch.prefill}


def planned_tokens(plan: Plan) -> dict[str, int]:
    return {c.request.id: c.end - c.start for c in plan.chunks}
