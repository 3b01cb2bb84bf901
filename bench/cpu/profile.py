"""Shows where a step on this CPU spends its time, next to what the machine can do.

    python -m bench.cpu.profile                     float32 and quantized; prints one JSON object
    python -m bench.cpu.profile --quantization auto --batches 1 8 32 --out FILE

machine    bandwidth_gb_s (reads) and gemm_gflop_s (a large fp32 product of torch): measured ceilings
prompts    by quantization and matrix: GMAC/s of products of 128 rows, one layer after the other
steps      by quantization and batch size, means over the decoding steps of 128-token prompts:
  step_ms    a whole step of the engine
  parts_ms   where it goes. preparation: embeddings, norms, gates and quantization of inputs;
             rotation: rotary positions and writes to the KV cache; head: the output product;
             choice: the most probable tokens; arguments: those of the one call that runs all these;
             host: everything outside the model (scheduler, batch, sampling)
  products   by matrix: [outputs, inputs], bytes read per step and the rates that were reached
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from time import perf_counter

import torch

from bench.cpu.compare import describe_machine, make_task, run_headway, seconds
from bench.harness import Bench, Figures, log
from headway import LLM
from headway.model.backends.base import PassOutput
from headway.model.backends.native.backend import PARTS, NativeBackend
from headway.model.backends.native.weights import NativeWeight
from headway.model.batch import ForwardBatch
from headway.model.registry import resolve

NUM_STEPS = 32
NUM_ROWS = 128  # of the products of prompts
MATRICES = ("qkv", "output", "gate_up", "down")


class Clocks:
    """Time in the parts of a model's passes since the last reset."""

    def __init__(self, llm: LLM) -> None:
        self.decoder = llm.executor.decoder
        backend = self.decoder.backend
        if not isinstance(backend, NativeBackend):
            raise SystemExit(f"the native kernels are not used, but {backend.name}")
        self.inside = backend.times = torch.zeros(len(PARTS), dtype=torch.int64)
        executor, self.whole = llm.executor, 0.0
        output = executor._output

        def timed(batch: ForwardBatch) -> PassOutput:
            begun = perf_counter()
            result = output(batch)
            self.whole += perf_counter() - begun
            return result

        executor._output = timed

    def read(self) -> Figures:
        """Seconds by part."""
        inside = dict(zip(PARTS, (self.inside / 1e9).tolist(), strict=True))
        return {**inside, "arguments": self.whole - sum(inside.values())}


def profile(llm: LLM, clocks: Clocks, prompts: list[list[int]]) -> Figures:
    """The mean decoding step, as the difference of two runs that differ in their length."""
    batch = len(prompts)
    run_headway(llm, prompts, [2] * batch)  # not timed
    readings = []
    for num_output in (1, NUM_STEPS + 1):
        before = clocks.read()
        took, _, _ = run_headway(llm, prompts, [num_output] * batch)
        spent = {name: value - before[name] for name, value in clocks.read().items()}
        readings.append({"step": took, **spent})
    first, whole = readings
    ms = {name: 1e3 * (whole[name] - first[name]) / NUM_STEPS for name in first}
    step = ms.pop("step")
    parts = {**ms, "host": step - sum(ms.values())}
    return {
        "step_ms": round(step, 3),
        "parts_ms": {name: round(value, 3) for name, value in parts.items()},
        "products": {name: rates(clocks, name, batch, parts[name]) for name in (*MATRICES, "head")},
    }


def rates(clocks: Clocks, name: str, rows: int, ms: float) -> Figures:
    """The matrices of this name in all layers, and the rates of their products."""
    decoder = clocks.decoder
    matrices = [decoder.head] if name == "head" else [getattr(i, name) for i in decoder.layers]
    weight: NativeWeight = matrices[0]
    num_bytes, sizes = sum(each.num_bytes for each in matrices), weight.struct
    macs = rows * len(matrices) * sizes.outputs * sizes.inputs
    return {
        "shape": [sizes.outputs, sizes.inputs],
        "bits": sizes.bits,
        "mb": round(num_bytes / 1e6, 1),
        "gb_s": round(num_bytes / ms / 1e6, 1),
        "gmac_s": round(macs / ms / 1e6, 1),
    }


def prompt_rate(backend: NativeBackend, weights: list[NativeWeight]) -> float:
    """GMAC/s of products of many rows."""
    sizes, x = weights[0].struct, torch.randn(NUM_ROWS, weights[0].num_inputs)
    took = seconds(lambda: [backend.linear(x, each) for each in weights])
    return round(NUM_ROWS * len(weights) * sizes.outputs * sizes.inputs / took / 1e9, 1)


def measure(model: Path, quantization: str, options: Namespace) -> tuple[Figures, Figures]:
    task = make_task(model, options.threads, is_quick=True)
    llm = LLM(
        str(model), device="cpu", quantization=quantization, threads=options.threads,
        max_num_seqs=max(options.batches),
    )  # fmt: skip
    clocks, found = Clocks(llm), {}
    for batch in options.batches:
        log(f"{quantization}, batch {batch}")
        found[str(batch)] = profile(llm, clocks, task["prompts"][:batch])
    layers, backend = clocks.decoder.layers, clocks.decoder.backend
    prompts = {
        name: prompt_rate(backend, [getattr(each, name) for each in layers]) for name in MATRICES
    }
    return prompts, found


def measure_all(options: Namespace) -> Figures:
    model = resolve(options.model)
    machine = describe_machine(model, options.threads)
    found = {name: measure(model, name, options) for name in options.quantization}
    prompts, steps = ({name: each[i] for name, each in found.items()} for i in (0, 1))
    return {"machine": machine, "prompts": prompts, "steps": steps}


if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option("--model", default="smollm2-135m", help="name or path of a model")
    bench.option("--quantization", nargs="+", default=["none", "int8"])
    bench.option("--batches", type=int, nargs="+", default=[1, 8, 32])
    bench.option("--threads", type=int, default=torch.get_num_threads())
    bench.main(measure_all)
