"""`headway bench throughput` and `latency`, with the options and result keys of `vllm bench`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headway.cli.commands import bench_serve
from headway.cli.options.common import Json, progress_bar, spread
from headway.cli.options.model import EngineFlags, load_model
from headway.cli.view import live, render
from headway.engine.gc_freeze import gc_freeze
from headway.errors import ExecutorError
from headway.lab.loadgen import report
from headway.lab.loadgen.requests import LengthRange, parse_length_range
from headway.lab.real.dataset import NAMES, Dataset, Work, random_work
from headway.options import EngineOptions
from headway.record.writer import header

if TYPE_CHECKING:
    from headway.llm import LLM

NumPrompts = Annotated[int, typer.Option(help="Number of requests, all submitted at once.", min=1)]
InputLen = Annotated[str, typer.Option(help="Prompt tokens: 128, or a range such as 100-1024.")]
OutputLen = Annotated[str, typer.Option(help="Output tokens: 64, or a range such as 16-256.")]
Seed = Annotated[int, typer.Option(help="Random seed of the prompts.")]
DatasetPath = Annotated[
    Path | None,
    typer.Option(
        help="File with prompts in the format of `headway generate --file` (max_tokens of a line "
        "overrides --output-len), with the lengths of a trace (.csv), or with ShareGPT's "
        "conversations (.json), instead of random prompts."
    ),
]
DatasetName = Annotated[
    str | None,
    typer.Option(
        help=f"{NAMES[0]} (without --dataset-path), or what --dataset-path contains: "
        f"{', '.join(NAMES[1:])}. Default: by its name.",
        show_default=False,
    ),
]
MaxLen = Annotated[
    int | None,
    typer.Option(help="Cut longer ones of a trace or of conversations.", min=1, show_default=False),
]
BatchSize = Annotated[int, typer.Option(help="Requests per batch.", min=1)]
Iters = Annotated[int, typer.Option(help="Number of measured batches.", min=1)]
Warmup = Annotated[int, typer.Option(help="Number of warm-up batches, not measured.", min=0)]


@spread
def throughput_command(
    num_prompts: NumPrompts = 32,
    input_len: InputLen = "128",
    output_len: OutputLen = "64",
    seed: Seed = 0,
    dataset_path: DatasetPath = None,
    dataset_name: DatasetName = None,
    max_input_len: MaxLen = None,
    max_output_len: MaxLen = None,
    json_: Json = False,
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
            render.note(f"note: {missing}")
        warm_up = random_work(llm, source, 1, LengthRange(8, 8), LengthRange(2, 2))
        _run(llm, warm_up)
        metrics = live.measure(llm)
        with gc_freeze(), live.bar(llm, "throughput", len(work[0])):
            start = time.perf_counter()
            _run(llm, work)
            seconds = time.perf_counter() - start
        result = report.throughput(metrics, seconds)
    if json_:
        render.print_json({**_setting(llm, model), **result})
    else:
        _show_throughput(result)


@spread
def latency_command(
    batch_size: BatchSize = 8,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.", min=1)] = 32,
    output_len: Annotated[int, typer.Option(help="Output tokens.", min=1)] = 128,
    num_iters: Iters = 5,
    num_iters_warmup: Warmup = 1,
    seed: Seed = 0,
    json_: Json = False,
    *,
    model: EngineFlags,
) -> None:
    """Measure the latency of batches that run one after the other.

    Every batch has new random prompts, so the prefix cache has no effect.
    """
    source, seconds = random.Random(seed), list[float]()
    lengths = LengthRange(input_len, input_len), LengthRange(output_len, output_len)
    with (
        load_model(model) as llm,
        progress_bar("latency", num_iters_warmup + num_iters) as advance,
    ):
        for _ in range(num_iters_warmup + num_iters):
            work = random_work(llm, source, batch_size, *lengths)
            start = time.perf_counter()
            _run(llm, work)
            seconds.append(time.perf_counter() - start)
            advance(1)
    result = report.latency(seconds[num_iters_warmup:])
    if json_:
        render.print_json({**_setting(llm, model), **result})
    else:
        _show_latency(result, batch_size * output_len)


def _run(llm: LLM, work: Work) -> None:
    """Generate all outputs; the first error ends the benchmark."""
    for result in llm.generate(*work, use_tqdm=False):
        for sample in result.outputs:
            if sample.error is not None:
                raise ExecutorError(sample.error)


def _setting(llm: LLM, model: EngineOptions) -> dict[str, Any]:
    """The model and the configuration that were measured."""
    named = {
        "model": model.model,
        "dtype": llm.loaded.precision,
        "kv_cache_dtype": llm.loaded.kv_dtype,
        "load_format": model.load_format,
    }
    return named | {"config": header(llm.config, llm.engine.async_scheduling).config}


def _show_throughput(result: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"\n[bold]{result['num_requests']:,} requests[/], {result['total_input_tokens']:,} prompt "
        f"and {result['total_output_tokens']:,} output tokens in {result['elapsed_time']:.1f} s\n"
        f"[bold]{result['output_throughput']:,.1f} output tokens/s[/], "
        f"{result['input_throughput']:,.1f} prompt tokens/s, "
        f"{result['requests_per_second']:,.2f} requests/s\n",
        highlight=False,
    )
    console.print(bench_serve.latency_table(result, tuple(report.ENGINE_STATISTICS)))


def _show_latency(result: dict[str, Any], num_tokens: int) -> None:
    seconds: Sequence[float] = result["latencies"]
    marks = ", ".join(f"p{mark} {value:.3f}" for mark, value in result["percentiles"].items())
    Console().print(
        f"\n[bold]{result['avg_latency']:.3f} s per batch[/] (mean of {len(seconds)}), "
        f"{num_tokens / result['avg_latency']:,.1f} output tokens/s\nseconds: {marks}",
        highlight=False,
    )
