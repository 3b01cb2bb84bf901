"""fp8 weights on a GPU: accuracy, speed of the products, and speed of a 7B shape beside bfloat16.

    python -m bench.gpu.fp8 --out F                  all parts, about four minutes on an H200
    python -m bench.gpu.fp8 --only products          one part
    python -m bench.gpu.fp8 --only quality --model FILE.gguf
    python -m bench.gpu.fp8 --only 7b 7b_bfloat16 --trace azure2023_code.csv
    python -m bench.gpu.fp8 --tiny                   runs in seconds without a GPU, as a test

quality      perplexity of bench/gpu/quality.py's text in bfloat16 and in fp8; the goal is within 1
             percent; also by the number of layers that stay bfloat16
products     us per product of the 7B shape, and its relative error against float32, by rows: cuBLAS
             in bfloat16 (`bfloat16`), torch._scaled_mm (`scaled_mm`), and our kernel (`kernel`)
             with the chosen tile first, then others; `quantize` is the time to quantize the rows,
             which one row does not need for our kernel
7b           one request of 16 tokens in and 256 out (`batch_1`); 128 requests of 256 to 1,024 in
             and 128 to 512 out (`128`); and with --trace the first 120 requests of a trace, all at
             once, prompts of at most 7,000 tokens and outputs of at most 400 (`code`); random
             weights and prompts, median of --repeat runs after a first one; builds after the start
7b_bfloat16  the same in bfloat16
7b_kv        the same in fp8 with an fp8 KV cache
Prints one JSON object, progress to stderr. A part that fails has the reason.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

if "--tiny" in sys.argv:  # must be set before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from bench.gpu import quality, speed
from bench.gpu.fp8_products import measure_products
from bench.harness import Bench, Figures, log
from headway.model.backends.fp8 import Fp8Backend
from headway.model.batch import ForwardBatch
from headway.model.decoder import Decoder
from headway.model.loader import open_checkpoint
from headway.model.registry import resolve

SHAPE = "qwen2.5-7b"


def measure_model(asked: Namespace, quantization: str, kv_cache_dtype: str = "auto") -> Figures:
    begun = time.perf_counter()
    with speed.dummy(
        SHAPE, quantization=quantization, kv_cache_dtype=kv_cache_dtype, max_model_len=8192
    ) as llm:
        found: Figures = {"start_seconds": time.perf_counter() - begun}
        builds: list[int] = []
        speed.count_builds(llm, builds)
        for name, work in works(asked.trace).items():
            found[name] = speed.timed(llm, work, 0.6, asked.repeat)
            log(f"{name}: {found[name]}")
        found["builds_after_start"] = sum(builds)
    gc.collect()
    torch.cuda.empty_cache()
    return found


def works(trace: Path | None) -> dict[str, speed.Work]:
    found = {"batch_1": speed.fixed(1, 16, 256), "128": speed.mixed_lengths(128)}
    if trace:
        found["code"] = speed.code_traffic(trace, speed.NUM_7B_CODE)
    return found


def measure_quality(asked: Namespace) -> Figures:
    model = resolve(asked.model)
    _, text = quality.prompts_and_text(model, quality.NUM_SCORED)
    found: Figures = {}
    for part in ("bfloat16", "fp8_weights", "fp8_both"):
        with quality.load_ours(part, str(model), "cuda") as llm:
            found[part] = quality.read(llm, text)[0]
        log(f"perplexity, {part}: {found[part]:.4f}")
        gc.collect()
    cost = 100 * (found["fp8_weights"] / found["bfloat16"] - 1)
    return {
        "perplexity": found, "cost_percent": cost, "reached": abs(cost) <= 1,
        "by_float_layers": measure_float_layers(model, text),
    }  # fmt: skip


@torch.inference_mode()
def measure_float_layers(model: Path, text: list[int]) -> Figures:
    """What fp8 costs, by the first and last layers that stay bfloat16.

    `cost_percent` is the increase of the perplexity, `divergence` the Kullback-Leibler divergence
    from bfloat16 in nats, which is less noisy.
    """
    checkpoint = open_checkpoint(model)
    batch = prompt_batch(text)
    count = checkpoint.config.num_layers
    found: Figures = {}
    base: tuple[float, torch.Tensor] | None = None  # perplexity and logprobs with no layer in fp8
    for ends in (count, 0, 1, 2, 3, 4, 5, 6, 8, 10):
        kept = frozenset(n for n in range(count) if n < ends or n >= count - ends)
        decoder = Decoder(checkpoint, Fp8Backend(torch.bfloat16, float_layers=kept))
        blocks = decoder.backend.kv_blocks(decoder.config, -(-len(text) // 16), 16)
        logprobs = decoder.logits(decoder.forward(batch, blocks)).float().log_softmax(-1)
        targets = torch.tensor(text[1:], device="cuda")[:, None]
        perplexity = math.exp(-float(logprobs[:-1].gather(1, targets).double().mean()))
        base = base or (perplexity, logprobs)
        far = (base[1].exp() * (base[1] - logprobs)).sum(-1).mean()
        cost = 100 * (perplexity / base[0] - 1)
        found[str(ends)] = {"cost_percent": cost, "divergence": float(far)}
    log(f"by first and last layers in bfloat16: {found}")
    return found


def prompt_batch(text: list[int]) -> ForwardBatch:
    """A prefill of one prompt in blocks of 16 tokens, in order."""
    places, count = torch.arange(len(text), device="cuda"), len(text)
    ends = torch.tensor([0, count], dtype=torch.int32, device="cuda")
    return ForwardBatch(
        tokens_t=torch.tensor(text, device="cuda"), positions_t=places, slots_t=places,
        tables_sw=torch.arange(-(-count // 16), dtype=torch.int32, device="cuda")[None],
        starts_s=ends, ends_s=ends[1:], sampled_n=places, longest=count,
        row_ids_s=torch.zeros(1, dtype=torch.int32, device="cuda"),
    )  # fmt: skip


if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option("--model", default="smollm2-135m", help="name, folder or GGUF file")
    bench.option("--trace", type=Path, help="a .csv of requests, for the part `code`")
    bench.option("--repeat", type=int, default=3)
    bench.option("--tiny", action="store_true", help="tiny products, on the CPU")
    bench.parts = {
        "quality": measure_quality,
        "products": lambda asked: measure_products(log, is_tiny=asked.tiny),
        "7b": partial(measure_model, quantization="fp8"),
        "7b_bfloat16": partial(measure_model, quantization="none"),
        "7b_kv": partial(measure_model, quantization="fp8", kv_cache_dtype="fp8"),
    }
    if "--tiny" in sys.argv:
        bench.on_demand = set(bench.parts) - {"products"}
    bench.main(start=lambda _: {"shape": SHAPE})
