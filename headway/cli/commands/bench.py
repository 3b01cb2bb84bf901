"""`headway bench`: how fast a model runs here, in the words of `vllm bench`."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headway.cli.commands import bench_serve
from headway.cli.options import prompts
from headway.cli.options.common import Json, progress_bar
from headway.cli.options.model import ModelOptions, spread
from headway.cli.view import live
from headway.engine.gc_freeze import gc_freeze
from headway.errors import ConfigError, ExecutorError, InvalidRequest
from headway.lab import bench
from headway.observe.trace import header
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headway.llm import LLM

app = typer.Typer(
    help="Measure throughput, latency or a server; results are named as `vllm bench` names them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
NumPrompts = Annotated[int, typer.Option(help="Requests, all given at once.", min=1)]
InputLen = Annotated[str, typer.Option(help="Prompt tokens: 128, or a range such as 100-1024.")]
OutputLen = Annotated[str, typer.Option(help="Output tokens: 64, or a range such as 16-256.")]
Seed = Annotated[int, typer.Option(help="For the same prompts again.")]
Dataset = Annotated[
    Path | None,
    typer.Option(
        help="Prompts from a file, as `headway generate --file` reads it, instead of random ones; "
        "a line's max_tokens wins over --output-len."
    ),
]
BatchSize = Annotated[int, typer.Option(help="Requests at once.", min=1)]
Iters = Annotated[int, typer.Option(help="Batches that are measured.", min=1)]
Warmup = Annotated[int, typer.Option(help="Batches before that, which are not.", min=0)]
Work = tuple[list[str | list[int]], list[SamplingParams]]
app.command("serve")(bench_serve.serve_command)


@app.command("throughput")
@spread
def throughput_command(
    num_prompts: NumPrompts = 32,
    input_len: InputLen = "128",
    output_len: OutputLen = "64",
    seed: Seed = 0,
    dataset: Dataset = None,
    json_: Json = False,
    *,
    model: ModelOptions,
) -> None:
    """Many requests at once: tokens and requests a second, and what each request waited.

    Prompts are random tokens, so no prefix is shared; outputs have their full length.
    """
    lengths = bench.parse_span("input-len", input_len), bench.parse_span("output-len", output_len)
    source = random.Random(seed)
    with model.load() as llm:
        if dataset is None:
            work = _random_work(llm, source, num_prompts, *lengths)
        else:
            work = _read_work(llm, dataset, num_prompts, source, lengths[1])
        _answer(llm, _random_work(llm, source, 1, bench.Span(8, 8), bench.Span(2, 2)))  # warm
        metrics = live.measure(llm)
        with gc_freeze(), live.bar(llm, "throughput", len(work[0])):
            begun = time.perf_counter()
            _answer(llm, work)
            seconds = time.perf_counter() - begun
        result = bench.throughput(metrics, seconds)
    if json_:
        print(json.dumps({**_setting(llm, model), **result}, indent=2))
    else:
        _show_throughput(result)


@app.command("latency")
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
    model: ModelOptions,
) -> None:
    """One batch after the other: how long a batch takes.

    Every batch has new random prompts, so the prefix cache does not help.
    """
    source, seconds = random.Random(seed), list[float]()
    spans = bench.Span(input_len, input_len), bench.Span(output_len, output_len)
    with (
        model.load() as llm,
        progress_bar("latency", num_iters_warmup + num_iters) as advance,
    ):
        for _ in range(num_iters_warmup + num_iters):
            work = _random_work(llm, source, batch_size, *spans)
            begun = time.perf_counter()
            _answer(llm, work)
            seconds.append(time.perf_counter() - begun)
            advance(1)
    result = bench.latency(seconds[num_iters_warmup:])
    if json_:
        print(json.dumps({**_setting(llm, model), **result}, indent=2))
    else:
        _show_latency(result, batch_size * output_len)


def _random_work(
    llm: LLM, source: random.Random, count: int, inputs: bench.Span, outputs: bench.Span
) -> Work:
    most = min(llm.config.max_model_len, llm.config.num_blocks * llm.config.block_size + 1)
    if inputs.high + outputs.high > most:
        raise ConfigError(
            f"{inputs.high} input and {outputs.high} output tokens are too long: model and KV "
            f"cache have room for {most}; lower --input-len or --output-len"
        )
    vocab_size = llm.loaded.decoder.config.vocab_size
    asked: list[str | list[int]] = [
        bench.random_prompt(source, inputs.draw(source), vocab_size) for _ in range(count)
    ]
    return asked, [_params(source, outputs.draw(source)) for _ in range(count)]


def _params(source: random.Random, num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, ignore_eos=True, seed=source.getrandbits(32))


def _read_work(
    llm: LLM, file: Path, count: int, source: random.Random, outputs: bench.Span
) -> Work:
    """The first prompts of a file; a benchmark of half of them is none, so any error ends it."""
    unset = SamplingParams(max_tokens=None)
    asks = prompts.gather((), file, unset)[:count]
    prompts.readable(llm, asks)
    broken = next((ask.error for ask in asks if ask.error), None)
    if broken is not None:
        raise InvalidRequest(broken)
    params = [
        replace(
            ask.params, max_tokens=ask.params.max_tokens or outputs.draw(source), ignore_eos=True
        )
        for ask in asks
    ]
    return [ask.content for ask in asks], params


def _answer(llm: LLM, work: Work) -> None:
    """All of it; the first error ends the benchmark."""
    for result in llm.generate(*work, use_tqdm=False):
        for sample in result.outputs:
            if sample.error is not None:
                raise ExecutorError(sample.error)


def _setting(llm: LLM, model: ModelOptions) -> dict[str, Any]:
    """What was measured."""
    named = {
        "model": model.model,
        "precision": llm.loaded.precision,
        "load_format": model.load_format,
    }
    return named | {"config": header(llm.config, llm.engine.async_scheduling)["config"]}


def _show_throughput(result: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"\n[bold]{result['num_requests']:,} requests[/], {result['total_input_tokens']:,} prompt "
        f"and {result['total_output_tokens']:,} output tokens in {result['elapsed_time']:.1f} s\n"
        f"[bold]{result['output_throughput']:,.1f} output tokens/s[/], "
        f"{result['tokens_per_second']:,.1f} tokens/s with the prompts, "
        f"{result['requests_per_second']:,.2f} requests/s\n",
        highlight=False,
    )
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in ("milliseconds", "mean", "median", "p99"):
        table.add_column(column, justify="left" if column == "milliseconds" else "right")
    names = {
        "ttft": "time to first token", "tpot": "time per output token after it",
        "itl": "time between two tokens", "e2el": "end to end",
    }  # fmt: skip
    for key, name in names.items():
        marks = (result[f"{mark}_{key}_ms"] for mark in bench.MARKS)
        table.add_row(name, *(f"{mark:,.1f}" for mark in marks))
    console.print(table)


def _show_latency(result: dict[str, Any], num_tokens: int) -> None:
    seconds: Sequence[float] = result["latencies"]
    marks = ", ".join(f"p{mark} {value:.3f}" for mark, value in result["percentiles"].items())
    Console().print(
        f"\n[bold]{result['avg_latency']:.3f} s a batch[/] on average over {len(seconds)}, "
        f"{num_tokens / result['avg_latency']:,.1f} output tokens/s\nseconds: {marks}",
        highlight=False,
    )
