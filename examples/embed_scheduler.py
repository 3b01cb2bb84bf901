"""Use the scheduler with your own executor: a toy model with a paged KV cache.

The "model" computes its next token from all tokens before it, which it reads block by block from its
cache, so a wrong block or slot would change the text. Run it from the root of the repository:
    python examples/embed_scheduler.py
"""

from __future__ import annotations

from headway import Plan, Request, Scheduler, StepResult, preset
from headway.request import RequestParams

BLOCK_SIZE, NUM_BLOCKS = 4, 12
LETTERS = "abcdefghijklmnopqrstuvwxyz "


def continue_text(tokens: list[int]) -> int:
    """The next token, which depends on every token."""
    state = 0
    for token in tokens:
        state = (31 * state + token + 7) % 1009
    return state % len(LETTERS)


class ToyExecutor:
    """Stores and reads tokens by block table. One slot holds one token."""

    def __init__(self) -> None:
        self.cache = [[-1] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]

    def store(self, request: Request, start: int, end: int) -> None:
        tokens, blocks = request.tokens, request.kv.blocks
        for place in range(start, end):
            self.cache[blocks[place // BLOCK_SIZE]][place % BLOCK_SIZE] = tokens[place]

    def next_token(self, request: Request, length: int) -> int:
        slots = [slot for block in request.kv.blocks for slot in self.cache[block]]
        return continue_text(slots[:length])

    def run(self, plan: Plan) -> StepResult:
        for chunk in plan.chunks:  # store all tokens before reading any
            self.store(chunk.request, chunk.store_from, chunk.end)
        for request in plan.decodes:  # a decode computes its last known token
            self.store(request, request.num_computed - 1, request.num_computed)
        column = [self.next_token(r, r.num_computed) for r in plan.decodes]
        first_tokens = [self.next_token(c.request, c.end) for c in plan.chunks if c.is_last]
        return StepResult([column] if plan.decodes else [], first_tokens)


def main() -> None:
    config = preset("vllm_v1", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=4)
    scheduler, executor = Scheduler(config), ToyExecutor()
    for text in ("hello world", "hello there", "hello world", "a", "quick brown fox"):
        prompt = [LETTERS.index(letter) for letter in text]
        id = f"{len(scheduler.requests)} {text!r}"
        scheduler.add(Request(id, prompt, RequestParams(max_tokens=12)))
    while scheduler.requests:
        plan = scheduler.schedule()
        completed = scheduler.complete(plan, executor.run(plan))
        for admission in plan.admitted:
            print(f"step {plan.step:2}  {admission.request.id}: {admission.num_cached} cached")
        for preemption in plan.preempted:
            print(f"step {plan.step:2}  {preemption.request.id}: preempted")
        for request in completed.finished:
            text = "".join(LETTERS[token] for token in request.output)
            print(f"step {plan.step:2}  {request.id}: {text!r}")


if __name__ == "__main__":
    main()
