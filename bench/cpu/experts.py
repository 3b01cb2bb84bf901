"""A mixture of experts on this CPU: its decode rate, and the rate that the bytes it reads allow.

    python -m bench.cpu.experts                         float32 and int8, prints one JSON object
    python -m bench.cpu.experts --batches 1 8 --out FILE

The model has random weights, and experts that are small against the model (--help: the sizes).
machine    bandwidth_gb_s (reads) is a measured ceiling; load is that of other processes
decode     by quantization and batch: step_ms of decoding, mb that a step reads (the weights that
           all tokens use, the expected share of the experts, and the KV cache), gb_s reached, and
           share of the rate that the bandwidth allows; the goal is 0.8 with one request
parts_ms   where a step goes, as in bench.cpu.profile
"""

from __future__ import annotations

import json
import os
import tempfile
from argparse import Namespace
from pathlib import Path

import torch

from bench.cpu.compare import machine_ceilings, run_apart, run_headway
from bench.cpu.profile import Clocks
from bench.harness import Bench, Figures, cpu, log
from headway import LLM
from headway.model.decoder import Decoder

PROMPT, NUM_STEPS, TRIES = 32, 48, 3
VALUES = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 8192, "hidden_size": 1024,
    "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 4096, "norm_topk_prob": True, "tie_word_embeddings": True,
}  # fmt: skip
GOAL = 0.8


def bytes_read(decoder: Decoder, batch: int) -> float:
    """Bytes of the weights that a step of `batch` tokens reads, if experts are chosen evenly."""
    about = decoder.config.experts
    assert about is not None, "the model has experts"
    of_experts = sum(layer.experts.expert_bytes for layer in decoder.layers if layer.experts)
    unused = (1 - about.num_chosen / about.num_experts) ** batch
    return decoder.num_bytes - of_experts * unused


def measure(folder: Path, quantization: str, options: Namespace, bandwidth: float) -> Figures:
    longest = PROMPT + NUM_STEPS + 1
    llm = LLM(
        str(folder), device="cpu", load_format="dummy", quantization=quantization,
        threads=options.threads, max_num_seqs=max(options.batches), block_size=16,
        num_blocks=(longest // 16 + 2) * max(options.batches),
    )  # fmt: skip
    clocks, found = Clocks(llm), {}
    generator = torch.Generator().manual_seed(1)
    for batch in options.batches:
        log(f"{quantization}, batch {batch}")
        prompts = torch.randint(3, 8000, (batch, PROMPT), generator=generator).tolist()
        step, parts = decoding(llm, clocks, prompts)
        context = PROMPT + NUM_STEPS / 2
        item = clocks.decoder.backend.kv_blocks(clocks.decoder.config, 1, 16).nbytes / 16
        num_bytes = bytes_read(clocks.decoder, batch) + batch * context * item
        found[str(batch)] = {
            "step_ms": round(1e3 * step, 3), "tok_s": round(batch / step, 1),
            "mb": round(num_bytes / 1e6, 1), "gb_s": round(num_bytes / step / 1e9, 2),
            "share": round(num_bytes / step / 1e9 / bandwidth, 3),
            "parts_ms": {name: round(1e3 * value, 3) for name, value in parts.items()},
        }  # fmt: skip
    return found


def decoding(llm: LLM, clocks: Clocks, prompts: list[list[int]]) -> tuple[float, Figures]:
    """Seconds of the mean decoding step and of its parts: the best of several measurements."""
    run_headway(llm, prompts, [2] * len(prompts))  # not timed
    best = (float("inf"), Figures())
    for _ in range(TRIES):
        took = []
        for num_output in (1, NUM_STEPS + 1):
            before = clocks.read()
            seconds, _, _ = run_headway(llm, prompts, [num_output] * len(prompts))
            took.append((seconds, {n: v - before[n] for n, v in clocks.read().items()}))
        (first, inside), (whole, all_inside) = took
        parts = {name: (all_inside[name] - inside[name]) / NUM_STEPS for name in inside}
        best = min(best, ((whole - first) / NUM_STEPS, parts), key=lambda each: each[0])
    return best


def decode(options: Namespace) -> Figures:
    ceilings = run_apart(machine_ceilings, options.threads, threads=options.threads)
    own = {
        "num_hidden_layers": options.layers, "num_experts": options.experts,
        "num_experts_per_tok": options.chosen, "moe_intermediate_size": options.width,
    }  # fmt: skip
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(VALUES | own), encoding="utf-8")
        found = {
            name: measure(Path(folder), name, options, ceilings["bandwidth_gb_s"])
            for name in options.quantization
        }
    machine = {"cpu": cpu(), "threads": options.threads, "load": load, **ceilings}
    shares = [each["1"]["share"] for each in found.values() if "1" in each]
    return {"machine": machine, "sizes": own, "decode": found, "ok": min(shares, default=1) >= GOAL}


if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option("--quantization", nargs="+", default=["none", "int8"])
    bench.option("--batches", type=int, nargs="+", default=[1, 8])
    bench.option("--layers", type=int, default=8)
    bench.option("--experts", type=int, default=32)
    bench.option("--chosen", type=int, default=4)
    bench.option("--width", type=int, default=512)
    bench.option("--threads", type=int, default=torch.get_num_threads())
    bench.main(decode)
