"""`headway run`: run a few prompts together and show the scheduler's decisions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from headway.cli.commands import generate
from headway.cli.options.common import JSON, check_writable, option
from headway.cli.options.model import EngineFlags, load_model
from headway.cli.view import live
from headway.cli.view.render import counted, print_json, seconds
from headway.errors import FormatError
from headway.lab.real.prompts import PromptEntry
from headway.lab.summary import Summary, summarize
from headway.model.registry import cache_root
from headway.options import EngineOptions
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headway.engine.outputs import RequestOutput
    from headway.llm import LLM

# Small, so that requests wait for other requests and for blocks.
MAX_NUM_SEQS, NUM_BLOCKS = 6, 32
TEMPERATURE, TOP_P, REPETITION_PENALTY = 0.3, 0.95, 1.1
MAX_SHOWN = 700  # characters of one text
DICTIONARY = """A small dictionary for children

Bridge: A bridge is a road that goes over a river, so that people can cross without getting wet.
Candle: A candle is a stick of wax with a string in it. When you light the string, it burns slowly \
and gives a warm light.
Kitchen: The kitchen is the room of a house in which people cook their food and wash the dishes.
Umbrella: An umbrella is a little roof that you carry in your hand, so that you stay dry when it \
rains.
Winter: Winter is the coldest time of the year, when the days are short and snow may fall.
"""
HINTS = (
    "Next  [bold]headway run --preset static[/]                   one batch after another",
    "      [bold]headway run --preset vllm_v1 --num-blocks 20[/]  too few blocks",
    "      [bold]headway run --trace-out run.jsonl[/]             for headway trace",
    "      [bold]headway chat[/], [bold]headway generate --help[/], [bold]headway bench --help[/]",
)


@dataclass(frozen=True, kw_only=True)
class ExamplePrompt:
    """One of the prompts: a text to continue, possibly with a shared prefix, or a chat message."""

    name: str
    text: str
    num_tokens: int
    prefix: str = ""
    is_chat: bool = False
    stop: str | None = None
    seed: int = 0


def _definition(word: str, seed: int) -> ExamplePrompt:
    return ExamplePrompt(
        name=word.lower(), text=f"{word}:", num_tokens=50, prefix=DICTIONARY, stop="\n", seed=seed
    )


PROMPTS = (
    _definition("Lighthouse", 7),
    ExamplePrompt(name="sea", text="The sea was calm that evening, and", num_tokens=120, seed=3),
    _definition("Library", 2),
    ExamplePrompt(
        name="code", text="Write a Python function that adds the squares of a list.",
        num_tokens=80, is_chat=True, stop="\n\n",
    ),
    ExamplePrompt(name="capital", text="The capital of France is", num_tokens=16, stop="\n"),
    _definition("Garden", 4),
    ExamplePrompt(
        name="note", text="Write a note of two sentences to thank Anna for a book.",
        num_tokens=90, is_chat=True,
    ),
    _definition("Baker", 5),
    ExamplePrompt(
        name="walk", text="Three good reasons to go for a walk today:\n\n1.", num_tokens=100,
        stop="\n4.", seed=6,
    ),
    ExamplePrompt(
        name="moon", text="Write three sentences about the moon.", num_tokens=100, is_chat=True,
        seed=8,
    ),
)  # fmt: skip


def run_command(
    max_tokens: int | None = option(
        None,
        "Maximum number of output tokens of a prompt.",
        show_default="each prompt's own",
        min=1,
    ),
    json_: bool = JSON,
    *,
    model: EngineFlags,
) -> None:
    """Run ten prompts together, show the scheduler's decisions, then print the texts.

    max_num_seqs and the KV cache are small by default, so that requests wait and blocks run out.
    """
    limit = min(MAX_NUM_SEQS, model.max_num_batched_tokens or MAX_NUM_SEQS)
    defaults = {"max_num_seqs": limit}
    if model.kv_memory is None:
        defaults["num_blocks"] = NUM_BLOCKS
    model, trace = _with_trace(model)
    with load_model(model, **defaults) as llm:
        entries = [_entry(llm, index, max_tokens) for index in range(len(PROMPTS))]
        metrics = live.measure(llm)
        with live.RunView(llm, Console(stderr=True)):
            results = llm.generate(
                [e.content for e in entries], [e.params for e in entries], use_tqdm=False,
                request_ids=[e.id for e in entries],
            )  # fmt: skip
    summary = summarize(metrics)
    if json_:
        rows = [generate.row(*both) for both in zip(entries, results, strict=True)]
        kv_cache = {"dtype": llm.loaded.kv_dtype, "num_bytes": llm.loaded.kv_bytes}
        print_json({
            "model": llm.model_name, "config": metrics.config, "kv_cache": kv_cache,
            "results": rows, "summary": summary,
        })  # fmt: skip
        return
    _show(llm, results, summary)
    if trace is not None:
        print(f"\nOpen this run in the lab: headway lab {shlex.quote(str(trace))}")


def _with_trace(model: EngineOptions) -> tuple[EngineOptions, Path | None]:
    """The options, and the trace of the run: the one asked for, else one in the cache folder."""
    if model.trace_out is not None:
        return model, Path(model.trace_out)
    path = cache_root() / "last_run.trace.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
    except (OSError, FormatError):  # a run needs no trace
        return model, None
    return replace(model, trace_out=path), path


def _entry(llm: LLM, index: int, limit: int | None) -> PromptEntry:
    sample = PROMPTS[index]
    params = SamplingParams(
        max_tokens=min(sample.num_tokens, limit or sample.num_tokens), temperature=TEMPERATURE,
        top_p=TOP_P, repetition_penalty=REPETITION_PENALTY, stop=sample.stop, seed=sample.seed,
    )  # fmt: skip
    content: str | list[int] = sample.prefix + sample.text
    if sample.is_chat and llm.tokenizer is not None and llm.tokenizer.chat_template:
        content = llm.chat_tokens([{"role": "user", "content": sample.text}])
    elif sample.is_chat:
        content = f"Question: {sample.text}\nAnswer:"
    return PromptEntry(index=index, id=sample.name, content=content, params=params)


def _show(llm: LLM, results: Sequence[RequestOutput], summary: Summary) -> None:
    console = Console(highlight=False)
    for sample, result in zip(PROMPTS, results, strict=True):
        console.print(_panel(sample, result))
    num_cached = sum(result.num_cached_tokens for result in results)
    lines = (
        "",
        f"[bold]{summary['output_tokens']:,} tokens in {summary['seconds']:.1f} s: "
        f"{summary['output_tokens_per_second']:.1f} tokens/s[/] from "
        f"{escape(Path(llm.model_name).name)}; median time to first token "
        f"{seconds(summary['ttft']['p50'])}.",
        f"{counted(summary['steps'], 'step')} with {summary['per_step']['running']:.1f} running "
        f"requests on average; {num_cached:,} of {summary['prompt_tokens']:,} prompt tokens from "
        f"the prefix cache; {counted(summary['preemptions'], 'preemption')}; "
        f"{counted(summary['recomputed_tokens'], 'token')} recomputed.",
        f"{llm.loaded.kv_cache}.",
        "",
        *HINTS,
    )
    console.print(*lines, sep="\n")


def _panel(sample: ExamplePrompt, result: RequestOutput) -> Panel:
    text = _trimmed(result)
    body = Text("… " if sample.prefix else "", "dim").append(sample.text, "dim")
    body.append("\n\n" if sample.is_chat else " ").append(text, "not dim")
    first_token = seconds(result.metrics.first_token)
    facts = f"{counted(result.num_generated, 'token')}, first token after {first_token}"
    if result.num_cached_tokens:
        num_prompt = len(result.prompt_token_ids)
        facts += f", {result.num_cached_tokens} of {num_prompt} prompt tokens cached"
    if result.num_preemptions:
        facts += f", preempted {result.num_preemptions}x"
    return Panel(
        body, title=sample.name, title_align="left", subtitle=facts, subtitle_align="right",
        border_style="cyan", padding=(0, 1),
    )  # fmt: skip


def _trimmed(result: RequestOutput) -> str:
    """The text; cut after its last complete sentence if it is incomplete or too long."""
    text = live.safe(result.outputs[0].text).strip()
    if len(text) <= MAX_SHOWN and result.outputs[0].finish_reason != "length":
        return text
    text = text[:MAX_SHOWN]
    whole = re.match(r".*[.!?][\"”]?(?=\s|$)", text, re.DOTALL)
    return (whole[0] if whole else text) + " …"
