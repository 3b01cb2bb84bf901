"""Compares our engine with transformers and llama.cpp on this CPU, with the same model and prompts.

    python -m bench.cpu.compare                       prints one JSON object, progress to stderr
    python -m bench.cpu.compare --quick --out FILE    fewer tokens, one round; also writes a file
    python -m bench.cpu.compare --model gemma3-270m --batches 1 8 --skip-peers    only our engine

task       tokens of prompts and outputs, 128 and 128 (32 with --quick), and the number of rounds
headway ... llama_cpp_q4_1   output tok/s while decoding, by batch
prefill    prompt tok/s by engine and batch
total      output tok/s by engine and batch, prefill included
mixed      output tok/s of 64 requests (8 with --quick) of 16-256 prompt and 16-256 output tokens,
           32 at a time
host_share percent of decoding that our engine spends outside the model, by batch
machine    bandwidth_gb_s (reads) and gemm_gflop_s (fp32) are measured ceilings;
           floor_ms_per_token is the time to read fp32 weights once; load is that of other processes
agreement  leading greedy tokens of the first prompt that equal those of transformers
ratios     the goals: median over rounds of ours / theirs, and whether it is reached
Every engine runs in its own process, one after the other, in rounds of alternating order, so that a
slow moment of the machine does not always affect the same engine. The peers get a virtual
environment in the cache folder ($HEADWAY_CACHE); one that cannot run is skipped with the reason.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.cpu.peers import Rates, gather, rates
from bench.harness import ROOT, Bench, attempt, cpu, in_new_process, log
from headway import LLM, SamplingParams
from headway.loading import find_tokenizer
from headway.model.loader import open_checkpoint
from headway.model.registry import cache_root, resolve

PEERS = ROOT / "bench" / "cpu" / "peers.py"
NUM_PROMPT, MAX_BATCH = 128, 32
QUANTIZATIONS = {"headway": "none", "headway_fast": "auto"}
WEIGHTS = {"llama_cpp": "f32", "llama_cpp_q4_0": "q4_0", "llama_cpp_q4_1": None}  # None: as shipped
PACKAGES = {
    "transformers": ["torch==2.13.0", "transformers==5.22.0", "accelerate==1.15.0", "gguf==0.19.0"],
    "llama_cpp": ["--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36", "numpy"],
}
NEEDED = {
    "transformers": "import torch, transformers, accelerate, gguf",
    "llama_cpp": "import llama_cpp",
}
BUILD = {
    "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF",
    "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()),
    # GCC 12 removes the stores of llama.cpp's AMX tile config, and a tile load then crashes.
    "CXXFLAGS": "-fno-tree-dse -fno-dse",
}
GOALS = [  # ours, theirs, figure, minimum ratio by batch size ("" for all others)
    ("headway", "transformers", "decode", {"": 3.0, "1": 2.0}),
    ("headway", "llama_cpp", "decode", {"1": 1.1, "": 1.5, "32": 2.0}),
    ("headway", "transformers", "mixed", {"": 3.0}),
    ("headway_fast", "llama_cpp_q4_0", "decode", {"": 1.3}),
    ("headway_fast", "llama_cpp_q4_0", "prefill", {"": 1.3}),
]
MAX_HOST_SHARE = 3.0  # percent of decoding at the largest batch
MAX_PERPLEXITY_COST = 1.0  # percent that quantization may add
NUM_SCORED = 1500  # tokens of the licence's text for perplexity


# The task: the same token ids for all engines.


def licence_tokens(model: Path) -> list[int]:
    tokenizer = find_tokenizer(model)
    assert tokenizer is not None, "a model for text prompts has a tokenizer"
    return tokenizer.encode((ROOT / "LICENSE").read_text())


def make_task(model: Path, threads: int, *, is_quick: bool) -> Rates:
    """Prompts are slices of the licence's text from different positions."""
    text = licence_tokens(model)
    dice = random.Random(0)
    lengths = [(dice.randint(16, 256), dice.randint(16, 256)) for _ in range(8 if is_quick else 64)]
    return {
        "model": str(model),
        "threads": threads,
        "num_output": 32 if is_quick else 128,
        "scored": text[:NUM_SCORED],
        "prompts": [text[start : start + NUM_PROMPT] for start in range(0, 61 * MAX_BATCH, 61)],
        "mixed": [
            (text[29 * i : 29 * i + num_prompt], n) for i, (num_prompt, n) in enumerate(lengths)
        ],
    }


def run_headway(
    llm: Any, prompts: list[list[int]], nums_output: list[int]
) -> tuple[float, float, list[list[int]]]:
    """Total seconds from an empty prefix cache, seconds in the model, and the outputs."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in nums_output]
    llm.reset_cache()
    start, in_model = perf_counter(), llm.executor.model_seconds
    results = llm.generate(prompts, params, use_tqdm=False)
    took = perf_counter() - start
    outputs = [result.outputs[0].token_ids for result in results]
    assert list(map(len, outputs)) == nums_output, "an output ended early"
    return took, llm.executor.model_seconds - in_model, outputs


def headway_rates(task: Rates, quantization: str) -> Rates:
    """The figures of bench/cpu/peers.py for our engine."""
    llm = LLM(
        task["model"], device="cpu", quantization=quantization, threads=task["threads"],
        max_num_seqs=MAX_BATCH,
    )  # fmt: skip
    by_batch: dict[str, Rates] = {}
    tokens: list[int] = []
    for batch in task["batches"]:
        prompts, num_output = task["prompts"][:batch], task["num_output"]
        run_headway(llm, prompts, [2] * batch)  # not timed
        first, first_in_model, _ = run_headway(llm, prompts, [1] * batch)
        whole, in_model, outputs = run_headway(llm, prompts, [num_output] * batch)
        tokens = tokens or outputs[0]
        share = 100 * (1 - (in_model - first_in_model) / (whole - first))
        figures = rates(batch, NUM_PROMPT, num_output, first, whole)
        by_batch[str(batch)] = figures | {"host_share": share}
    prompts, nums_output = ([each[i] for each in task["mixed"]] for i in (0, 1))
    mixed = sum(nums_output) / run_headway(llm, prompts, nums_output)[0]
    return {**gather(by_batch), "mixed": mixed, "tokens": tokens, "nll": nll(llm, task["scored"])}


def nll(llm: Any, tokens: list[int]) -> float:
    """Mean negative log likelihood of a text."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scores = llm.generate(tokens, params)[0].prompt_logprobs[1:]
    pairs = zip(tokens[1:], scores, strict=True)
    return -statistics.fmean(score[token].logprob for token, score in pairs)


def machine_ceilings(threads: int) -> Rates:
    """Read bandwidth of a buffer larger than any cache, and the speed of a large fp32 product."""
    import torch

    torch.set_num_threads(threads)
    rows = torch.ones(1 << 15, 1 << 14)  # 2 GiB
    vector, square = torch.ones(1 << 14), torch.ones(3072, 3072)
    read = min(seconds(lambda: rows.sum()), seconds(lambda: rows @ vector))
    multiply = seconds(lambda: square @ square)
    return {
        "bandwidth_gb_s": round(rows.numel() * 4 / read / 1e9, 2),
        "gemm_gflop_s": round(2 * len(square) ** 3 / multiply / 1e9, 1),
    }


def seconds(work: Callable[[], Any]) -> float:
    """The best of several measurements, because other load only adds time."""
    times = []
    for _ in range(6):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return min(times)


def describe_machine(model: Path, threads: int) -> Rates:
    load = os.getloadavg()[0]
    ceilings = run_apart(machine_ceilings, threads, threads=threads)
    if "skipped" not in ceilings:
        num_bytes = open_checkpoint(model).config.num_params * 4
        ceilings["floor_ms_per_token"] = round(num_bytes / ceilings["bandwidth_gb_s"] / 1e6, 2)
    return {"cpu": cpu(), "cores": os.cpu_count(), "threads": threads, "load": load, **ceilings}


def variables(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def run_apart(work: Callable[..., Rates], *arguments: Any, threads: int) -> Rates:
    """Call a function in a process of its own; {"skipped": reason} if it fails."""
    return attempt(partial(in_new_process, work, *arguments, **variables(threads)))


def run_json(command: list[str], threads: int) -> Rates:
    """The JSON in the last line of a process's output; {"skipped": reason} if it fails."""
    environment = os.environ | variables(threads)
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ended.returncode:
        return {"skipped": last_line(ended.stderr) or f"exited with status {ended.returncode}"}
    result: Rates = json.loads(last_line(ended.stdout))
    return result


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def peers_python() -> str:
    return str(cache_root() / "peers" / "bin" / "python")


def install_peer(name: str) -> str | None:
    """Install a peer in the peers' environment; return the reason if that fails."""
    if not Path(peers_python()).exists():
        folder = str(cache_root() / "peers")
        made = subprocess.run(
            [sys.executable, "-m", "venv", folder], capture_output=True, text=True
        )
        if made.returncode:
            return last_line(made.stderr or made.stdout)
    if not subprocess.run([peers_python(), "-c", NEEDED[name]], capture_output=True).returncode:
        return None
    log(f"installing {name}; compiling llama.cpp takes minutes")
    quietly = ["nice", "-n", "19"] if shutil.which("nice") else []
    command = [*quietly, peers_python(), "-m", "pip", "install", *PACKAGES[name]]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | BUILD)
    return last_line(ended.stderr) or "pip failed" if ended.returncode else None


def weights_file(model: Path, kind: str | None) -> Rates:
    """The model with other weights, converted once by llama.cpp's quantizer."""
    if kind is None:
        return {"path": str(model)}
    target = cache_root() / "peers" / f"{model.stem}-{model.stat().st_size}.{kind}.gguf"
    if not target.exists():
        part = target.with_suffix(".part")
        command = [peers_python(), str(PEERS), "quantize", str(model), str(part), kind]
        made = run_json(command, 1)
        if "skipped" in made:
            return made
        part.rename(target)
    return {"path": str(target)}


def engines_to_run(*, skip_peers: bool) -> tuple[list[str], Rates]:
    """The engines that can run, and the reasons for those that cannot."""
    engines = list(QUANTIZATIONS)
    reasons: Rates = {}
    for peer, names in {"transformers": ["transformers"], "llama_cpp": list(WEIGHTS)}.items():
        reason = "--skip-peers" if skip_peers else install_peer(peer)
        if reason:
            reasons |= {name: {"skipped": reason} for name in names}
        else:
            engines += names
    return engines, reasons


def run_engine(name: str, task: Rates, earlier: list[Rates]) -> Rates:
    """Run one round of one engine in its own process."""
    if name in WEIGHTS:
        weights = weights_file(Path(task["model"]), WEIGHTS[name])
        if "skipped" in weights:
            return weights
        # Keep the fastest settings of the first round.
        task = task | {"settings": earlier[0]["settings"] if earlier else {}}
        task["batches"] = task["batches"] if WEIGHTS[name] else [1]
    if name in QUANTIZATIONS:
        return run_apart(headway_rates, task, QUANTIZATIONS[name], threads=task["threads"])
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(task, file)
        file.flush()
        if name in WEIGHTS:
            arguments = ["llama_cpp", file.name, weights["path"]]
        else:
            arguments = [name, file.name]
        return run_json([peers_python(), str(PEERS), *arguments], task["threads"])


def run_rounds(engines: list[str], task: Rates, num_rounds: int) -> dict[str, list[Rates]]:
    """{engine: one result per round}; an engine that fails is not run again."""
    found: dict[str, list[Rates]] = {name: [] for name in engines}
    for i in range(num_rounds):
        for name in engines if i % 2 == 0 else engines[::-1]:
            if found[name] and "skipped" in found[name][-1]:
                continue
            result = run_engine(name, task, found[name])
            found[name].append(result)
            figures = result.get("skipped") or round_all(result["decode"])
            log(f"round {i + 1} of {num_rounds}: {name}: {figures}")
    return found


def round_all(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 2) for key, value in values.items()}


def medians(results: list[Rates], figure: str) -> Any:
    """Medians over the rounds, one or one per batch; the reason if a round failed."""
    if "skipped" in results[-1]:
        return results[-1]
    values = [result[figure] for result in results]
    if not isinstance(values[0], dict):
        return round(statistics.median(values), 2)
    return round_all({key: statistics.median(each[key] for each in values) for key in values[0]})


def goals(found: dict[str, list[Rates]]) -> Rates:
    """Every goal for which both engines have figures: the median of the rounds' ratios."""
    reached: Rates = {}
    for ours, theirs, figure, wanted in GOALS:
        pairs = list(zip(found.get(ours, []), found.get(theirs, []), strict=False))
        if not pairs or any("skipped" in each for pair in pairs for each in pair):
            continue
        figures = [[by_key(result[figure]) for result in pair] for pair in pairs]
        for key in figures[0][0]:
            ratio = round(statistics.median(a[key] / b[key] for a, b in figures), 3)
            name, goal = f"{ours} / {theirs}: {figure} {key}".rstrip(), wanted.get(key, wanted[""])
            reached[name] = {"ratio": ratio, "goal": goal, "reached": ratio >= goal}
    return reached


def by_key(figure: Any) -> dict[str, float]:
    return figure if isinstance(figure, dict) else {"": figure}


def agreement(found: dict[str, list[Rates]]) -> Rates:
    outputs = {name: results[0].get("tokens", []) for name, results in found.items()}
    reference = outputs.pop("transformers", [])
    same = {
        name: [a == b for a, b in zip(tokens, reference, strict=False)] + [False]
        for name, tokens in outputs.items()
    }
    return {name: each.index(False) for name, each in same.items()} if reference else {}


def perplexity(found: dict[str, list[Rates]]) -> Rates:
    """Perplexity of a fixed text, and the cost of quantization in percent."""
    exact, fast = (math.exp(found[name][0]["nll"]) for name in QUANTIZATIONS)
    cost = 100 * (fast / exact - 1)
    return {
        "headway": round(exact, 4), "headway_fast": round(fast, 4), "cost_percent": round(cost, 3),
        "goal": MAX_PERPLEXITY_COST, "reached": cost <= MAX_PERPLEXITY_COST,
    }  # fmt: skip


def report(machine: Rates, found: dict[str, list[Rates]], reasons: Rates) -> Rates:
    details = ("version", "settings", "weights", "cpu")

    def table(figure: str, *names: str) -> Rates:
        return {name: medians(found[name], figure) for name in names if name in found}

    return {
        "machine": machine, **table("decode", *found), **reasons,
        "prefill": table("prefill", *found), "total": table("total", *found),
        "mixed": table("mixed", *QUANTIZATIONS, "transformers"),
        "host_share": table("host_share", *QUANTIZATIONS) | {"goal at 32": MAX_HOST_SHARE},
        "perplexity": perplexity(found),
        "agreement": agreement(found),
        "peers": {
            name: {key: results[0][key] for key in details if key in results[0]}
            for name, results in found.items() if name not in QUANTIZATIONS
        },
        "ratios": goals(found),
    }  # fmt: skip


def measure(options: Namespace) -> Rates:
    model = resolve(options.model)
    if model.suffix != ".gguf":
        raise SystemExit(
            f"{model} is not a GGUF file, which llama.cpp needs; use --model FILE.gguf"
        )
    engines, reasons = engines_to_run(skip_peers=options.skip_peers)
    task = make_task(model, options.threads, is_quick=options.quick)
    task["batches"] = options.batches
    machine = describe_machine(model, options.threads)
    num_rounds = options.repeat or (1 if options.quick else 3)
    size = {"prompt": NUM_PROMPT, "output": task["num_output"], "rounds": num_rounds}
    return {"task": size, **report(machine, run_rounds(engines, task, num_rounds), reasons)}


if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option("--model", default="smollm2-135m", help="name or path of a GGUF file")
    bench.option("--threads", type=int, default=os.cpu_count())
    bench.option(
        "--batches", type=int, nargs="+", default=[1, 8, MAX_BATCH], metavar="N",
        choices=range(1, MAX_BATCH + 1), help=f"batch sizes, each from 1 to {MAX_BATCH}",
    )  # fmt: skip
    bench.option("--repeat", type=int, help="rounds, 3 or 1; figures are medians")
    bench.option("--quick", action="store_true", help="32 output tokens, by default one round")
    bench.option("--skip-peers", action="store_true", help="run only our engine")
    bench.main(measure)
