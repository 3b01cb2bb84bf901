"""Terminal output while a model runs: a progress bar, or a view of all requests.

Both are observers of the engine. They draw at most ten times a second.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Table
from rich.text import Text

from headway.cli.options.common import stderr_progress
from headway.cli.view.render import plain_table
from headway.events import Added, Completed, Event, ended_by
from headway.record.sentences import DecisionLog, finished
from headway.record.stats import RunStats
from headway.record.writer import header
from headway.request import Request, RequestState

if TYPE_CHECKING:
    from headway.llm import LLM

SECONDS_BETWEEN = 0.1
NUM_EVENTS = 5
BAR, TAIL_TOKENS, MIN_TAIL = 8, 40, 12
STYLES = {
    RequestState.WAITING: "dim", RequestState.PREFILL: "yellow", RequestState.DECODING: "cyan",
    RequestState.SWAPPED: "magenta", RequestState.FINISHED: "green",
}  # fmt: skip
DECISION_STYLES = {
    "waiting": "dim", "admitted": "yellow", "preempted": "magenta", "deferred": "dim",
    "copied": "magenta", "finished": "green",
}  # fmt: skip


def num_new_tokens(event: Event) -> int:
    """The number of tokens that an event brings."""
    if not isinstance(event, Completed):
        return 0
    return sum(len(tokens) for _, tokens in event.outputs())


def measure(llm: LLM) -> RunStats:
    """Attach run statistics that count from now on."""
    stats = RunStats(header(llm.config, llm.engine.async_scheduling))
    llm.engine.observers.append(stats)
    return stats


@contextmanager
def bar(llm: LLM, title: str, total: int) -> Iterator[None]:
    """Show a progress bar with the token rate on stderr. It disappears at the end."""
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.1f} tokens/s")
    started, num_tokens = time.perf_counter(), 0

    def observe(event: Event) -> None:
        nonlocal num_tokens
        num_tokens += num_new_tokens(event)
        rate = num_tokens / (time.perf_counter() - started)
        progress.update(task, advance=len(ended_by(event)), rate=rate)

    with stderr_progress(*columns) as progress:
        task = progress.add_task(title, total=total, rate=0.0)
        if progress.disable:  # a terminal would show it
            yield
            return
        llm.engine.observers.append(observe)
        try:
            yield
        finally:
            llm.engine.observers.remove(observe)


class RunView:
    """An observer that shows all requests. Without a terminal it prints finished requests."""

    def __init__(self, llm: LLM, console: Console) -> None:
        self._llm = llm
        self._console = console
        self._requests: dict[str, Request] = {}
        self._tally: Counter[str] = Counter()
        self._events: deque[Text] = deque(maxlen=NUM_EVENTS)
        self._log = DecisionLog(llm.config.max_num_seqs)
        self._started_at = self._drawn_at = time.perf_counter()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> RunView:
        self._started_at = time.perf_counter()
        if self._console.is_terminal:
            self._live.start()
        self._llm.engine.observers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.engine.observers.remove(self)
        if self._console.is_terminal:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Count an event, and draw unless the latest drawing is recent."""
        if isinstance(event, Added):
            self._requests.update({request.id: request for request in event.requests})
        self._tally["steps"] += isinstance(event, Completed)
        self._tally["tokens"] += num_new_tokens(event)
        self._tally["done"] += len(ended_by(event))
        decisions = [each for each in self._log.follow(event) if each.kind != "arrived"]
        if not self._console.is_terminal:
            self._print_finished(event)
            return
        for each in decisions:
            place = Text(f"{each.step:>5}  " if each.step >= 0 else " " * 7)
            self._events.append(place.append(each.text, DECISION_STYLES[each.kind]))
        now = time.perf_counter()
        if now - self._drawn_at >= SECONDS_BETWEEN:
            self._drawn_at = now
            self._live.update(self._draw(now - self._started_at), refresh=True)

    def _print_finished(self, event: Event) -> None:
        place = f"step {event.plan.step}" if isinstance(event, Completed) else "between steps"
        for request in ended_by(event):
            self._console.print(
                f"{place}: {finished(request)}; {self._tally['done']} of "
                f"{len(self._requests)} done, {self._rate():.1f} tokens/s",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip

    def _rate(self) -> float:
        return self._tally["tokens"] / max(1e-9, time.perf_counter() - self._started_at)

    def _draw(self, seconds: float) -> RenderableType:
        scheduler, num_seen = self._llm.engine.scheduler, len(self._requests)
        num_blocks = scheduler.config.num_blocks
        num_used = num_blocks - scheduler.num_free
        head = (
            f"step {self._tally['steps']}   {seconds:.1f} s   {self._rate():.1f} tokens/s   "
            f"{len(scheduler.running)} running   {len(scheduler.queue)} waiting   "
            f"{self._tally['done']} of {num_seen} done"
        )
        width = max(BAR, min(40, self._console.width - 36))
        blocks = Text("KV cache  ").append(meter(num_used, num_blocks, width, "bold blue"))
        blocks.append(f"  {num_used} of {num_blocks} blocks in use")
        return Group(Text(head, "bold"), blocks, "", self._table(), "", *self._events)

    def _table(self) -> Table:
        columns = ("request", "state", "prompt", "output", "text")
        table = plain_table(columns, (), columns)
        width = max(map(len, self._requests))
        room = self._console.width - width - 2 * BAR - 25  # other columns and gaps
        for request in self._requests.values():
            style = STYLES[request.state]
            state = "done" if request.is_finished else request.state.value
            num_computed = min(request.num_computed, request.num_prompt)
            if request.is_finished:
                num_computed = request.num_prompt
            max_output = request.limit - request.num_prompt
            prompt = meter(num_computed, request.num_prompt, BAR, "yellow")
            output = meter(request.num_generated, max_output, BAR, style)
            table.add_row(
                Text(request.id, style),
                Text(state, style),
                prompt.append(f" {request.num_prompt:>3}", "dim"),
                output.append(f" {request.num_generated:>3}", "dim"),
                Text(self._tail(request, max(MIN_TAIL, room)), style),
            )
        return table

    def _tail(self, request: Request, width: int) -> str:
        """The end of the generated text, on one line."""
        if self._llm.tokenizer is None:
            return ""
        text = self._llm.tokenizer.decode(list(request.output[-TAIL_TOKENS:]))
        line = " ".join(safe(text).split()).lstrip("\ufffd")  # the cut may split a character
        return line if len(line) <= width else "…" + line[1 - width :]


def safe(text: str) -> str:
    """Replace control characters, so that a text cannot control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def meter(part: int, whole: int, width: int, style: str) -> Text:
    """A bar of `width` characters, filled in proportion."""
    filled = round(width * part / whole) if whole else 0
    return Text("━" * filled, style).append("─" * (width - filled), "bright_black")
