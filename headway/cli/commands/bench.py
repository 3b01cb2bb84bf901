"""`headway bench throughput`, `latency` and `profile`: measure a model on this machine.

The first two have the options and result keys of `vllm bench`.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headway.cli.commands.bench_serve import latency_table
from headway.cli.options.common import JSON, argument, check_writable, option, progress_bar, stderr
from headway.cli.options.loadgen import INPUT_LEN, OUTPUT_LEN
from headway.cli.options.model import MODEL_HELP, EngineFlags, ProfileFlags, load_model
from headway.cli.options.packages import check_extras
from headway.cli.view import live, render
from headway.engine.gc_freeze import gc_freeze
from headway.errors import ExecutorError
from headway.lab.cost import as_json, save_profile
from headway.lab.loadgen import report
from headway.lab.loadgen.requests import LengthRange, parse_length_range
from headway.lab.real.dataset import NAMES, Dataset, Work, random_work
from headway.lab.real.profiling import measure
from headway.options import EngineOptions
from headway.record.writer import header

if TYPE_CHECKING:
    from headway.llm import LLM

SEED = "Random seed of the prompts."
CPU_MAX_NUM_SEQS = 32  # of the runs on a CPU
MAX_LEN = "Cut longer ones of a trace or of conversations."


def throughput_command(
    num_prompts: int = option(32, "Number of requests, all submitted at once.", min=1),
    input_len: str = option("128", INPUT_LEN),
    output_len: str = option("64", OUTPUT_LEN),
    seed: int = option(0, SEED),
    dataset_path: Path | None = option(
        None,
        "File with prompts in the format of `headway generate --file` (max_tokens of a line "
        "overrides --output-len), with the lengths of a trace (.csv), or with ShareGPT's "
        "conversations (.json), instead of random prompts.",
    ),
    dataset_name: str | None = option(
        None,
        f"{NAMES[0]} (without --dataset-path), or what --dataset-path contains: "
        f"{', '.join(NAMES[1:])}. Default: by its name.",
        show_default=False,
    ),
    max_input_len: int | None = option(None, MAX_LEN, min=1, show_default=False),
    max_output_len: int | None = option(None, MAX_LEN, min=1, show_default=False),
    json_: bool = JSON,
    *,
    model: EngineFlags,
) -> None:
    """Measure tokens and requests per second, and latencies, of many requests at once.

    Without a file, prompts are random tokens that share no prefix. Outputs have their full length,
    and a trace's arrival times are ignored.
    """
    dataset = Dataset(
        count=num_prompts, inputs=parse_length_range("input-len", input_len),
        outputs=parse_length_range("output-len", output_len), name=dataset_name, path=dataset_path,
        max_input=max_input_len, max_output=max_output_len,
    )  # fmt: skip
    source = random.Random(seed)
    with load_model(model) as llm:
        work, missing = dataset.load(llm, source)
        if missing:
            stderr().print(f"note: {missing}", markup=False)
        warm_up = random_work(llm, source, 1, LengthRange(8, 8), LengthRange(2, 2))
        _run(llm, warm_up)
        metrics = live.measure(llm)
        with gc_freeze(), live.bar(llm, "throughput", len(work[0])):
            start = time.perf_counter()
            _run(llm, work)
            seconds = time.perf_counter() - start
        result = report.throughput(metrics, seconds)
    if json_:
        render.print_json({**_setting(llm, model), **result.as_json()})
    else:
        _show_throughput(result)


def latency_command(
    batch_size: int = option(8, "Requests per batch.", min=1),
    input_len: int = option(32, "Prompt tokens.", min=1),
    output_len: int = option(128, "Output tokens.", min=1),
    num_iters: int = option(5, "Number of measured batches.", min=1),
    num_iters_warmup: int = option(1, "Number of warm-up batches, not measured.", min=0),
    seed: int = option(0, SEED),
    json_: bool = JSON,
    *,
    model: EngineFlags,
) -> None:
    """Measure the latency of batches that run one after the other.

    Every batch has new random prompts, so the prefix cache has no effect.
    """
    source, seconds = random.Random(seed), list[float]()
    lengths = [LengthRange(each, each) for each in (input_len, output_len)]
    total = num_iters_warmup + num_iters
    with load_model(model) as llm, progress_bar("latency", total) as advance:
        for _ in range(total):
            work = random_work(llm, source, batch_size, *lengths)
            start = time.perf_counter()
            _run(llm, work)
            seconds.append(time.perf_counter() - start)
            advance(1)
    result = report.latency(seconds[num_iters_warmup:])
    if json_:
        render.print_json({**_setting(llm, model), **result})
    else:
        mean, iterations = result["avg_latency"], len(result["latencies"])
        marks = ", ".join(f"p{mark} {value:.3f}" for mark, value in result["percentiles"].items())
        Console().print(
            f"\n[bold]{mean:.3f} s per batch[/] (mean of {iterations}), "
            f"{batch_size * output_len / mean:,.1f} output tokens/s\nseconds: {marks}",
            highlight=False,
        )


def profile_command(
    model: str = argument("smollm2-135m", MODEL_HELP),
    out: Path | None = option(None, "File to write.", show_default="the profile's name, .json"),
    name: str | None = option(None, "Name of the profile.", show_default="model and dtype"),
    quick: bool = option(False, "Run fewer and shorter requests; less accurate.", "--quick"),
    json_: bool = JSON,
    *,
    chosen: ProfileFlags,
) -> None:
    """Measure a model on this machine and write a profile for `headway simulate --profile FILE`.

    Runs requests of many lengths in batches of many sizes and fits the cost model to the step
    times. The reported error is that of predicting a held-out run from its requests alone.
    """
    check_extras("running a model", "torch")
    from headway.model import devices, precision

    device = devices.use_device(chosen.device)
    dtype = precision.resolved(chosen.dtype, chosen.quantization, device)
    max_num_seqs = None if device.type == "cuda" else CPU_MAX_NUM_SEQS
    name = name or f"{Path(model).name.lower().removesuffix('.gguf')}-{dtype}"
    out = out or Path(f"{name}.json")
    check_writable(out)
    with load_model(replace(chosen, model=model), max_num_seqs=max_num_seqs) as llm:
        profile, error, warnings = measure(llm, name, is_quick=quick, bar=progress_bar)
    save_profile(profile, out)
    if json_:
        render.print_json({
            "out": str(out), "held_out": error._asdict(), "warnings": warnings,
            "profile": as_json(profile),
        })  # fmt: skip
    else:
        render.print_profile(profile, error, out)
    render.warn_of_profile(error, warnings)


def _run(llm: LLM, work: Work) -> None:
    """Generate all outputs; the first error ends the benchmark."""
    for result in llm.generate(*work, use_tqdm=False):
        for sample in result.outputs:
            if sample.error is not None:
                raise ExecutorError(sample.error)


def _setting(llm: LLM, model: EngineOptions) -> dict[str, object]:
    """The model and the configuration that were measured."""
    return {
        "model": model.model, "dtype": llm.loaded.precision,
        "kv_cache_dtype": llm.loaded.kv_dtype, "load_format": model.load_format,
        "config": header(llm.config, llm.engine.async_scheduling).config,
    }  # fmt: skip


def _show_throughput(result: report.ThroughputReport) -> None:
    console = Console()
    console.print(
        f"\n[bold]{result.num_requests:,} requests[/], {result.total_input_tokens:,} prompt "
        f"and {result.total_output_tokens:,} output tokens in {result.elapsed_time:.1f} s\n"
        f"[bold]{result.output_throughput:,.1f} output tokens/s[/], "
        f"{result.input_throughput:,.1f} prompt tokens/s, "
        f"{result.requests_per_second:,.2f} requests/s\n",
        highlight=False,
    )
    console.print(latency_table(result))
