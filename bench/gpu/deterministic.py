"""Deterministic mode on a GPU: the law over random worlds, and its cost.

    python -m bench.gpu.deterministic                 prints one JSON object, progress to stderr
    python -m bench.gpu.deterministic --model FILE.gguf --only tiles worlds
    python -m bench.gpu.deterministic --out bench/results/gpu_deterministic.json

tiles    whether products and attention are the same bits with tiles of other sizes, which the mode
         needs; `other_order` has kernels of the faster mode, for which this is false
worlds   random worlds with the real model: other requests, chunks, preemption, swapping, cache
         hits, one or two plans in flight, with and without graphs. Compares tokens and logprobs
         with those of the request alone, bit by bit
speed    256 requests of 100 to 1,024 tokens in and out, one request, and one prompt, with random
         weights of Qwen3-0.6B's shape in both modes; medians of --repeat runs after one more
Exits with status 1 if any bit differs.
"""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from bench.cpu.compare import licence_tokens
from bench.gpu import roofline
from bench.gpu.speed import dummy, fixed, timed
from bench.harness import Bench, Figures, in_new_process, log
from headway import LLM
from headway.executor.factory import make_executor
from headway.model.kernels.attention import invariant_attention as attention
from headway.model.kernels.products.linear import linear
from headway.model.kernels.products.tiles import Tile, invariant_tile
from headway.model.registry import resolve
from tests.support import schedule_worlds as worlds

GOAL = 25_000  # output tokens per second of the 256 requests
NUM_TARGETS, LONGEST_PROMPT, NUM_OUTPUT = 40, 800, 40
LIMITS: dict[str, Any] = {  # of the executors that run the worlds
    "block_size": 16, "max_num_seqs": 24, "max_model_len": 1024, "max_num_batched_tokens": 1024,
    "num_blocks": 1600, "num_host_blocks": 400,
}  # fmt: skip


def same_bits(one: Tensor, other: Tensor) -> bool:
    return bool(torch.equal(one.view(torch.uint8), other.view(torch.uint8)))  # 0 is not -0


def check_tiles(_: Namespace) -> Figures:
    """Products and attention with several tiles, each compared with the same reference."""
    torch.manual_seed(0)
    x = torch.randn(300, 1024, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(2048, 1024, dtype=torch.bfloat16, device="cuda")
    expected = linear(x, weight, tile=Tile(64, 64, 64, 1, 4, 3))
    rows = (1, 17, 40, 100, 256, 300, 640)
    tiles = {invariant_tile(each, *weight.shape, x.dtype) for each in rows}
    tiles |= {Tile(64, 16, 256, 1, 4, 2), Tile(128, 128, 64, 1, 8, 4), Tile(128, 256, 64, 1, 8, 4)}
    one_order = {
        str(tuple(t)): same_bits(linear(x, weight, tile=t), expected) for t in sorted(tiles)
    }
    others = (Tile(16, 8, 128, 4, 4, 3), Tile(1, 4, 512, 1, 1, 1))  # of the faster mode
    other_order = {str(tuple(t)): same_bits(linear(x, weight, tile=t), expected) for t in others}
    few = all(
        same_bits(
            linear(x[:rows], weight, tile=invariant_tile(rows, *weight.shape, x.dtype)),
            expected[:rows],
        )
        for rows in (1, 2, 17, 64, 65, 200, 299)
    )
    attended = check_attention()
    return {
        "one_order": one_order, "fewer_rows": few, "other_order": other_order, "attention": attended,
        "ok": few and all([*one_order.values(), *attended.values()]),
    }  # fmt: skip


def check_attention() -> Figures:
    """A prompt of 700 tokens: as decodes, and with other tiles of prompts."""
    heads, kv_heads, dim, size, count = 16, 8, 128, 16, 700
    num_blocks = -(-count // size)
    shape = (num_blocks, 1, 2, kv_heads, size, dim)
    blocks = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    q = 2 * torch.randn(count, heads, dim, dtype=torch.bfloat16, device="cuda")
    ints = {"dtype": torch.int32, "device": "cuda"}
    table = torch.randperm(num_blocks, device="cuda").int()[None].repeat(2, 1)
    known: dict[str, Any] = {"blocks": blocks, "layer": 0, "tables": table}

    def prefilled() -> Tensor:
        out = torch.empty_like(q)
        attention.invariant_prefill_attention(
            q, out, **known, row_ids_s=torch.zeros(1, **ints),
            starts_s=torch.tensor([0, count], **ints), ends_s=torch.tensor([count], **ints),
        )  # fmt: skip
        return out

    def decoded(num_programs: int) -> Tensor:
        out = torch.empty_like(q)
        attention.invariant_decode_attention(
            q, out, **known, row_ids_s=torch.zeros(count, **ints),
            positions_s=torch.arange(count, device="cuda"), num_programs=num_programs,
        )  # fmt: skip
        return out

    expected = prefilled()
    found: Figures = {f"decodes_{n}": same_bits(decoded(n), expected) for n in (1, 2, 3)}
    before = attention.PREFILL_ROWS, attention.PREFILL_WARPS
    for rows, warps in ((16, 1), (32, 2), (64, 2), (128, 8)):
        attention.PREFILL_ROWS, attention.PREFILL_WARPS = rows, warps
        found[f"prompt_{rows}_rows_{warps}_warps"] = same_bits(prefilled(), expected)
    attention.PREFILL_ROWS, attention.PREFILL_WARPS = before
    return found


def check_worlds(asked: Namespace) -> Figures:
    path, count = resolve(asked.model), asked.worlds
    text = licence_tokens(path)
    rng, seen, wrong = random.Random(0), Counter[str](), list[str]()
    with LLM(str(path), device="cuda", deterministic=True, **LIMITS) as llm:
        eager = make_executor(llm.loaded.decoder, llm.config, enforce_eager=True)
        targets = worlds.random_requests(rng, text, NUM_TARGETS, LONGEST_PROMPT, NUM_OUTPUT)
        expected = [worlds.alone(eager, each, llm.config) for each in targets]
        log(f"{len(targets)} requests alone")
        num_compared = 0
        for number in range(count):
            world, is_eager = worlds.random_world(rng, targets, llm.config), number % 2 == 1
            seen["worlds_without_graphs"] += is_eager
            seen["worlds_with_async_scheduling"] += world.is_async
            outcomes = worlds.run_world(eager if is_eager else llm.executor, world, seen)
            for asked, found in zip(world.requests, outcomes, strict=True):
                differing = worlds.differences(found, expected[targets.index(asked)])
                wrong += [f"world {number}: {'; '.join(differing)}"] if differing else []
            num_compared += len(outcomes)
            log(f"world {number + 1} of {count}: {len(wrong)} differences")
        graphs = [len(llm.executor.graphs), len(llm.executor.mixed.graphs)]
    return {
        "worlds": count, "compared": num_compared, "differing": len(wrong), "first": wrong[:8],
        "graphs": graphs, **seen, "ok": not wrong,
    }  # fmt: skip


def speed(asked: Namespace) -> Figures:
    """Both modes, each in a process of its own: an engine's memory must be free for the next."""
    modes = {
        name: in_new_process(speed_of, name == "deterministic", asked.repeat)
        for name in ("deterministic", "fast")
    }
    rates = [each["output_tokens_per_second"] for each in modes.values()]
    return {**modes, "ratio": rates[0] / rates[1], "goal": GOAL, "reached": rates[0] >= GOAL}


def speed_of(is_deterministic: bool, repeat: int) -> Figures:
    begun = time.perf_counter()
    with dummy("qwen3-0.6b", max_model_len=4096, deterministic=is_deterministic) as llm:
        start = time.perf_counter() - begun
        found = timed(llm, roofline.field_lengths(256), 0.6, repeat)
        log(f"256 requests: {found['output_tokens_per_second']:.0f} tokens per second")
        one = timed(llm, fixed(1, 16, 256), 0.6, repeat)["seconds"] / 256
        prompt = timed(llm, fixed(1, 4000, 1), 0.6, repeat)["seconds"]
    return {
        "start_seconds": start, "num_blocks": llm.config.num_blocks, **found,
        "one_request_ms_per_token": 1e3 * one, "prompt_of_4000_ms": 1e3 * prompt,
    }  # fmt: skip


if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option("--model", default="smollm2-135m", help="name, folder or GGUF file")
    bench.option("--worlds", type=int, default=60)
    bench.option("--repeat", type=int, default=3)
    # The speed first, while all memory is free.
    bench.parts = {"speed": speed, "tiles": check_tiles, "worlds": check_worlds}
    bench.main()
