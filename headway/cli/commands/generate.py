"""`headway generate`: complete prompts in one batch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from headway.cli.options.common import argument, check_writable, option
from headway.cli.options.model import EngineFlags, SamplingOptions, load_model, sampling_option
from headway.cli.view import live
from headway.cli.view.render import counted
from headway.errors import HeadwayError, InvalidRequest
from headway.lab.real import prompts
from headway.lab.real.prompts import PromptEntry
from headway.options import EngineOptions

if TYPE_CHECKING:  # these need optional packages
    from headway.engine.outputs import CompletionOutput, RequestOutput
    from headway.llm import LLM

Emit = Callable[[dict[str, object]], None]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SamplingOptions):
    """Sampling options that `headway chat` does not have."""

    ignore_eos: bool = sampling_option(False, "Continue after the end token.", "--ignore-eos")
    n: int = sampling_option(1, "Outputs per prompt.", "--n", "-n")
    logprobs: int | None = sampling_option(
        None, "Return log probabilities, with N alternatives per token."
    )


def generate_command(
    prompt: list[str] | None = argument(None, "Prompts to complete."),
    file: Path | None = option(
        None,
        "File with prompts. A .jsonl file has an object per line with prompt, prompt_token_ids or "
        "messages, and optionally id and sampling fields (max_tokens, temperature, seed, ...). Any "
        "other file has a prompt per line; empty lines are skipped. '-' is stdin, read as JSON if "
        "its first line begins with '{'.",
    ),
    out: Path | None = option(None, "Write the JSON lines of --json to this file."),
    json_: bool = option(
        False,
        "Print a JSON line for each prompt as soon as it is done. 'index' is the position of the "
        "prompt, 'id' its id in the file.",
        "--json",
    ),
    *,
    model: EngineFlags,
    sampling: GenerateOptions,
) -> None:
    """Complete prompts from the command line, a file or stdin.

    A failed prompt does not stop the others; the exit code is 1 if any prompt failed.
    """
    asks = prompts.read_prompts(prompt or (), file, sampling.params())
    if not asks:
        raise InvalidRequest("no prompts: give a prompt, or a file with --file")
    if out is not None:
        check_writable(out)
    with out.open("w", encoding="utf-8") if out else nullcontext() as output:

        def emit(line: dict[str, object]) -> None:
            print(json.dumps(line, ensure_ascii=False), file=output, flush=True)

        seconds, results = _run(asks, model, emit if out or json_ else None)
    if not (out or json_):
        _show(asks, results)
    if results and not json_:
        _print(Console(stderr=True), Text(_rates(results, seconds), "dim"))
    if any(ask.error for ask in asks):
        raise typer.Exit(1)


def _run(
    asks: list[PromptEntry], model: EngineOptions, emit: Emit | None
) -> tuple[float, dict[int, RequestOutput]]:
    """Run all valid prompts; returns the seconds it took, and the outputs by index."""
    results: dict[int, RequestOutput] = {}
    seconds = 0.0
    if not all(ask.error for ask in asks):
        with load_model(model) as llm:
            ready = prompts.apply_chat_template(llm, asks)
            begun = time.perf_counter()
            results = answer(llm, ready, lambda *both: emit(row(*both)) if emit else None)
            seconds = time.perf_counter() - begun
    console = Console(stderr=True)
    for ask in asks:
        if ask.error:
            _print(console, Text.assemble(("error: ", "bold red"), ask.error))
        if emit and ask.index not in results:
            emit(row(ask))
    return seconds, results


def answer(
    llm: LLM, asks: Sequence[PromptEntry], on_finish: Callable[[PromptEntry, RequestOutput], None]
) -> dict[int, RequestOutput]:
    """The outputs by index; a rejected prompt has its error set instead."""

    def finish(position: int, result: RequestOutput) -> None:
        broken = next((sample.error for sample in result.outputs if sample.error), None)
        if broken is not None:
            asks[position].fail(broken)
        on_finish(asks[position], result)

    given = [ask.params for ask in asks]
    with live.bar(llm, "generating", sum(params.n for params in given)):
        results = llm.try_generate(
            [ask.content for ask in asks], given, on_finish=finish,
            request_ids=[str(ask.index) for ask in asks],
        )  # fmt: skip
    found: dict[int, RequestOutput] = {}
    for ask, result in zip(asks, results, strict=True):
        if isinstance(result, HeadwayError):
            ask.fail(result)
        else:
            found[ask.index] = result
    return found


def row(ask: PromptEntry, result: RequestOutput | None = None) -> dict[str, object]:
    """One line of output. Times are seconds since the prompt was submitted."""
    line: dict[str, object] = {"index": ask.index, "id": ask.id, "error": ask.error}
    if result is None:
        return line
    return line | {
        "prompt": result.prompt,
        "num_prompt_tokens": len(result.prompt_token_ids),
        "samples": [_described(sample, ask.params.logprobs) for sample in result.outputs],
        "timings": asdict(result.metrics),
        "cached_tokens": result.num_cached_tokens,
        "preemptions": result.num_preemptions,
    }


def _described(sample: CompletionOutput, num_top: int | None) -> dict[str, object]:
    """A sample as JSON; `num_top` is the number of alternatives for each token."""
    line = asdict(sample)
    del line["cumulative_logprob"]
    if sample.logprobs is not None:
        line["logprobs"] = [
            {
                "token": token, "logprob": found[token].logprob, "rank": found[token].rank,
                "top": [(other, each.logprob) for other, each in islice(found.items(), num_top)],
            }
            for token, found in zip(sample.token_ids, sample.logprobs, strict=True)
        ]  # fmt: skip
    return line


def _show(asks: Sequence[PromptEntry], results: dict[int, RequestOutput]) -> None:
    """Print prompts dim and completions bold, in the order of the prompts."""
    console = Console()
    for ask in asks:
        for sample in results[ask.index].outputs if ask.index in results else ():
            # Token ids and messages have no text that the completion continues.
            gap = "" if results[ask.index].prompt is not None else "\n"
            text = Text.assemble((ask.shown + gap, "dim"), (live.safe(sample.text), "bold"), "\n")
            _print(console, text)


def _print(console: Console, text: Text) -> None:
    """Wrap lines only on a terminal."""
    console.print(text, soft_wrap=not console.is_terminal)


def _rates(results: dict[int, RequestOutput], seconds: float) -> str:
    num_tokens = sum(result.num_generated for result in results.values())
    num_prompt = sum(len(result.prompt_token_ids) for result in results.values())
    num_cached = sum(result.num_cached_tokens for result in results.values())
    rate = num_tokens / seconds if seconds else 0.0
    return (
        f"{counted(len(results), 'prompt')}, {counted(num_tokens, 'token')} in "
        f"{seconds:.1f} s: {rate:.1f} tokens/s; "
        f"{num_cached:,} of {num_prompt:,} prompt tokens from the cache"
    )
