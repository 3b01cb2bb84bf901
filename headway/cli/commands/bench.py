"""`headway bench`: measure speed, with the options and result keys of `vllm bench`."""

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

from headway.cli.commands import bench_serve
from headway.cli.options import prompts
from headway.cli.options.command import Command
from headway.cli.options.common import Json, progress_bar, spread
from headway.cli.options.model import ModelOptions
from headway.cli.view import live
from headway.engine.gc_freeze import gc_freeze
from headway.errors import ConfigError, ExecutorError, InvalidRequest
from headway.lab.loadgen import report
from headway.lab.loadgen.requests import LengthRange, parse_length_range, random_prompt
from headway.observe.trace import header
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headway.llm import LLM

app = typer.Typer(
    help="Measure throughput, latency or a server. Result keys are those of `vllm bench`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
NumPrompts = Annotated[int, typer.Option(help="Number of requests, all submitted at once.", min=1)]
InputLen = Annotated[str, typer.Option(help="Prompt tokens: 128, or a range such as 100-1024.")]
OutputLen = Annotated[str, typer.Option(help="Output tokens: 64, or a range such as 16-256.")]
Seed = Annotated[int, typer.Option(help="Random seed of the prompts.")]
DatasetPath = Annotated[
    Path | None,
    typer.Option(
        help="File with prompts, in the format of `headway generate --file`, instead of random "
        "prompts. max_tokens of a line overrides --output-len."
    ),
]
BatchSize = Annotated[int, typer.Option(help="Requests per batch.", min=1)]
Iters = Annotated[int, typer.Option(help="Number of measured batches.", min=1)]
Warmup = Annotated[int, typer.Option(help="Number of warm-up batches, not measured.", min=0)]
Work = tuple[list[str | list[int]], list[SamplingParams]]
app.command("serve", cls=Command)(bench_serve.serve_command)


@app.command("throughput", cls=Command)
@spread
def throughput_command(
    num_prompts: NumPrompts = 32,
    input_len: InputLen = "128",
    output_len: OutputLen = "64",
    seed: Seed = 0,
    dataset_path: DatasetPath = None,
    json_: Json = False,
    *,
    model: ModelOptions,
) -> None:
    """Measure tokens and requests per second, and latencies, of many requests at once.

    Prompts are random tokens, so they share no prefix; outputs have their full length.
    """
    inputs = parse_length_range("input-len", input_len)
    outputs = parse_length_range("output-len", output_len)
    source = random.Random(seed)
    with model.load() as llm:
        if dataset_path is None:
            work = _random_work(llm, source, num_prompts, inputs, outputs)
        else:
            work = _read_work(llm, dataset_path, num_prompts, source, outputs)
        warm_up = _random_work(llm, source, 1, LengthRange(8, 8), LengthRange(2, 2))
        _run(llm, warm_up)
        metrics = live.measure(llm)
        with gc_freeze(), live.bar(llm, "throughput", len(work[0])):
            start = time.perf_counter()
            _run(llm, work)
            seconds = time.perf_counter() - start
        result = report.throughput(metrics, seconds)
    if json_:
        print(json.dumps({**_setting(llm, model), **result}, indent=2))
    else:
        _show_throughput(result)


@app.command("latency", cls=Command)
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
    """Measure the latency of batches that run one after the other.

    Every batch has new random prompts, so the prefix cache has no effect.
    """
    source, seconds = random.Random(seed), list[float]()
    lengths = LengthRange(input_len, input_len), LengthRange(output_len, output_len)
    with (
        model.load() as llm,
        progress_bar("latency", num_iters_warmup + num_iters) as advance,
    ):
        for _ in range(num_iters_warmup + num_iters):
            work = _random_work(llm, source, batch_size, *lengths)
            start = time.perf_counter()
            _run(llm, work)
            seconds.append(time.perf_counter() - start)
            advance(1)
    result = report.latency(seconds[num_iters_warmup:])
    if json_:
        print(json.dumps({**_setting(llm, model), **result}, indent=2))
    else:
        _show_latency(result, batch_size * output_len)


def _random_work(
    llm: LLM, source: random.Random, count: int, inputs: LengthRange, outputs: LengthRange
) -> Work:
    limit = min(llm.config.max_model_len, llm.config.num_blocks * llm.config.block_size + 1)
    if inputs.high + outputs.high > limit:
        raise ConfigError(
            f"{inputs.high} input and {outputs.high} output tokens exceed the limit of {limit} "
            "tokens (model length and KV cache); lower --input-len or --output-len"
        )
    vocab_size = llm.loaded.decoder.config.vocab_size
    contents: list[str | list[int]] = [
        random_prompt(source, inputs.draw(source), vocab_size) for _ in range(count)
    ]
    return contents, [_params(source, outputs.draw(source)) for _ in range(count)]


def _params(source: random.Random, num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, ignore_eos=True, seed=source.getrandbits(32))


def _read_work(
    llm: LLM, file: Path, count: int, source: random.Random, outputs: LengthRange
) -> Work:
    """The first prompts of a file; InvalidRequest if one of them is invalid."""
    entries = prompts.read_prompts((), file, SamplingParams(max_tokens=None))[:count]
    prompts.apply_chat_template(llm, entries)
    error = next((entry.error for entry in entries if entry.error), None)
    if error is not None:
        raise InvalidRequest(error)
    params = [
        replace(
            entry.params,
            max_tokens=entry.params.max_tokens or outputs.draw(source),
            ignore_eos=True,
        )
        for entry in entries
    ]
    return [entry.content for entry in entries], params


def _run(llm: LLM, work: Work) -> None:
    """Generate all outputs; the first error ends the benchmark."""
    for result in llm.generate(*work, use_tqdm=False):
        for sample in result.outputs:
            if sample.error is not None:
                raise ExecutorError(sample.error)


def _setting(llm: LLM, model: ModelOptions) -> dict[str, Any]:
    """The model and the configuration that were measured."""
    named = {
        "model": model.model,
        "dtype": llm.loaded.precision,
        "load_format": model.load_format,
    }
    return named | {"config": header(llm.config, llm.engine.async_scheduling)["config"]}


def _show_throughput(result: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"\n[bold]{result['num_requests']:,} requests[/], {result['total_input_tokens']:,} prompt "
        f"and {result['total_output_tokens']:,} output tokens in {result['elapsed_time']:.1f} s\n"
        f"[bold]{result['output_throughput']:,.1f} output tokens/s[/], "
        f"{result['tokens_per_second']:,.1f} tokens/s including prompts, "
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
