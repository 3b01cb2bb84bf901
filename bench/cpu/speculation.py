"""Speculative decoding on this CPU with the bundled model: output tokens/s with and without drafts.

    python -m bench.cpu.speculation                          prints one JSON object; takes 15 minutes
    python -m bench.cpu.speculation --batch 1 --sets edit --drafter suffix

The module makes three sets of prompts: `edit` repeats a code file with one name changed, `quotes`
summarizes a text with quotes from it, `table` answers questions over a long table. Prompts are in the
prefix cache before a run, so that a run is nearly all decoding. Texts end by themselves or after
--output-len tokens; a report whose texts differ with drafts is not ok.

tokens_per_second   without drafts, and with each --draft: medians of --repeat runs in turns
ratio               the median of the ratios of each turn
accepted            share of the drafts that were right, and tokens of a verification
"""

from __future__ import annotations

import random
import statistics
import string
from argparse import Namespace
from time import perf_counter
from typing import Any

from bench.harness import Bench, Figures, log
from headway import LLM, RequestOutput, SamplingParams
from headway.events import Completed, Event

bench = Bench(__doc__)
bench.option("--model", default="smollm2-135m")
bench.option("--quantization", default="none")
bench.option("--threads", type=int, default=None)
bench.option("--batch", nargs="+", type=int, default=[1, 8, 32])
bench.option("--sets", nargs="+", default=["edit", "quotes", "table"])
bench.option("--draft", nargs="+", default=["by_cost"])
bench.option("--drafter", default="ngram")
bench.option("--output-len", type=int, default=128)
bench.option("--repeat", type=int, default=3)

WORDS = [
    "total",
    "count",
    "price",
    "item",
    "order",
    "name",
    "value",
    "list",
    "user",
    "file",
    "line",
    "page",
    "score",
    "level",
    "date",
    "size",
]
VERBS = [
    "add",
    "remove",
    "find",
    "check",
    "print",
    "load",
    "save",
    "merge",
    "split",
    "sort",
    "update",
    "build",
    "parse",
    "send",
    "read",
]
ANIMALS = ["fox", "bear", "heron", "otter", "lynx", "crane", "badger", "falcon", "marten", "stork"]


def function(rng: random.Random) -> str:
    verb, noun, other = rng.choice(VERBS), rng.choice(WORDS), rng.choice(WORDS)
    return (
        f"def {verb}_{noun}({noun}, {other}):\n"
        f"    result = []\n    for each in {noun}:\n        if each > {other}:\n"
        f"            result.append(each)\n    return result\n"
    )


def edit(rng: random.Random) -> str:
    file = "\n\n".join(function(rng) for _ in range(4))
    new = rng.choice(("values", "found", "kept"))
    return (
        f"The file before the change:\n```python\n{file}```\n\nThe same file with the variable "
        f"`result` renamed to `{new}`:\n```python\n"
    )


def quotes(rng: random.Random) -> str:
    facts = [
        f"The {rng.choice(ANIMALS)} of {rng.choice(string.ascii_uppercase)}{rng.choice(WORDS)} valley "
        f"sleeps {rng.randrange(2, 20)} hours and walks {rng.randrange(3, 90)} miles to the river."
        for _ in range(8)
    ]
    return (
        "Text:\n"
        + "\n".join(facts)
        + "\n\nSummary, in which each sentence of the text is quoted:\n"
        f'1. The text says: "{facts[0]}"\n2. The text says: "'
    )


def table(rng: random.Random) -> str:
    rows = [
        f"| {number} | {rng.choice(ANIMALS)} | {rng.choice(WORDS)} | {rng.randrange(1000)} |"
        for number in range(24)
    ]
    asked = rng.sample(range(24), 3)
    return (
        "| id | animal | kind | weight |\n|---|---|---|---|\n" + "\n".join(rows)
        + f"\n\nThe rows {asked[0]}, {asked[1]} and {asked[2]} of the table:\n"
        + "| id | animal | kind | weight |\n|---|---|---|---|\n"
    )  # fmt: skip


SETS = {"edit": edit, "quotes": quotes, "table": table}


class Subject:
    """An engine with a draft rule, and counts of its drafts."""

    def __init__(self, draft: str, asked: Namespace) -> None:
        self.llm = LLM(
            asked.model, device="cpu", quantization=asked.quantization, threads=asked.threads,
            draft=draft, drafter=asked.drafter, max_num_seqs=max(asked.batch), max_model_len=1024,
            num_blocks=64 * max(asked.batch) + 64, observers=[self._observe],
        )  # fmt: skip
        self.num_drafts = self.num_right = self.num_verified = 0

    def _observe(self, event: Event) -> None:
        if isinstance(event, Completed):
            for draft, gained in zip(event.plan.drafts, event.result.draft_tokens, strict=True):
                self.num_drafts += draft.count
                self.num_right += max(0, len(gained) - 1)
                self.num_verified += 1

    def run(self, prompts: list[str], num_output: int) -> tuple[list[str], float]:
        """The texts, and output tokens per second."""
        self.num_drafts = self.num_right = self.num_verified = 0
        params = SamplingParams(temperature=0, max_tokens=num_output)
        begun = perf_counter()
        outputs: list[RequestOutput] = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - begun
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        return [output.outputs[0].text for output in outputs], count / seconds

    def accepted(self) -> Figures:
        share = self.num_right / max(1, self.num_drafts)
        tokens = 1 + self.num_right / max(1, self.num_verified)
        return {"share": round(share, 3), "tokens_per_verification": round(tokens, 2)}


def measure(asked: Namespace) -> Figures:
    subjects = {draft: Subject(draft, asked) for draft in ("none", *asked.draft)}
    report: dict[str, Any] = {"ok": True}
    for name in asked.sets:
        rng = random.Random(name)
        prompts = [SETS[name](rng) for _ in range(max(asked.batch))]
        for batch in asked.batch:
            speeds: dict[str, list[float]] = {draft: [] for draft in subjects}
            texts: dict[str, list[str]] = {}
            for turn in range(asked.repeat + 1):  # the first fills the prefix cache
                for draft, subject in subjects.items():
                    texts[draft], speed = subject.run(prompts[:batch], asked.output_len)
                    if turn:
                        speeds[draft].append(speed)
            plain = speeds["none"]
            figures: Figures = {"none": round(statistics.median(plain), 1)}
            for draft in asked.draft:
                ratios = [on / off for on, off in zip(speeds[draft], plain, strict=True)]
                figures[draft] = {
                    "tokens_per_second": round(statistics.median(speeds[draft]), 1),
                    "ratio": round(statistics.median(ratios), 3),
                    **subjects[draft].accepted(), "is_same": texts[draft] == texts["none"],
                }  # fmt: skip
                report["ok"] = report["ok"] and texts[draft] == texts["none"]
            report[f"{name}, batch {batch}"] = figures
            log(f"{name}, batch {batch}: {figures}")
    return report


if __name__ == "__main__":
    bench.main(measure)
