"""What a terminal shows while a model runs: a bar, or all requests on their way.

Both only watch: they read the engine's reports and draw at most ten times a second.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from headway.observe.explain import why_blocked, why_not_considered
from headway.observe.timeline import Metrics
from headway.observe.trace import describe_step, header
from headway.plan import Admission, Plan, StepReport
from headway.request import Request, State

if TYPE_CHECKING:
    from headway.llm import LLM

SECONDS_BETWEEN = 0.1
NUM_EVENTS = 5
BAR, TAIL_TOKENS, MIN_TAIL = 8, 40, 12
STYLES = {
    State.WAITING: "dim", State.PREFILL: "yellow", State.DECODING: "cyan",
    State.SWAPPED: "magenta", State.FINISHED: "green",
}  # fmt: skip


def num_new_tokens(report: StepReport) -> int:
    """Tokens that a step gave to its requests."""
    return sum(len(tokens) for _, tokens in report.outputs())


def measure(llm: LLM) -> Metrics:
    """Metrics of what the engine does from now on."""
    metrics = Metrics(header(llm.config, llm.engine.async_scheduling))
    llm.engine.observers.append(lambda report: metrics.add(describe_step(report)))
    return metrics


@contextmanager
def bar(llm: LLM, title: str, total: int) -> Iterator[None]:
    """Requests done and tokens a second, on stderr while the engine runs; gone when it is done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f} tokens/s"),
    )  # fmt: skip
    begun, num_tokens = time.perf_counter(), 0

    def observe(report: StepReport) -> None:
        nonlocal num_tokens
        num_tokens += num_new_tokens(report)
        rate = num_tokens / (time.perf_counter() - begun)
        progress.update(task, advance=len(report.finished), rate=rate)

    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=total, rate=0.0)
        llm.engine.observers.append(observe)
        try:
            yield
        finally:
            llm.engine.observers.remove(observe)


class View:
    """An observer that shows every request on its way; on no terminal, a line when one ends."""

    def __init__(self, llm: LLM, names: Sequence[str], console: Console) -> None:
        self._llm = llm
        self._names = names  # of the requests, by their number
        self._console = console
        self._requests: dict[str, Request] = {}
        self._tally: Counter[str] = Counter()
        self._events: deque[Text] = deque(maxlen=NUM_EVENTS)
        self._waits: dict[Request | None, str] = {}  # what was last said of who waits
        self._begun = self._drawn_at = time.perf_counter()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> View:
        self._begun = time.perf_counter()
        if self._console.is_terminal:
            self._live.start()
        self._llm.engine.observers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.engine.observers.remove(self)
        if self._console.is_terminal:
            self._live.stop()

    def __call__(self, report: StepReport) -> None:
        """Take note of a step; draw, if the latest drawing is old enough."""
        self._requests.update({request.id: request for request in report.plan.events.added})
        self._tally["steps"] += report.plan.step >= 0
        self._tally["tokens"] += num_new_tokens(report)
        self._tally["done"] += len(report.finished)
        events = list(self._decisions(report))
        if not self._console.is_terminal:
            self._tell(report)
            return
        self._events.extend(Text(f"{report.plan.step:>5}  ").append(e) for e in events)
        now = time.perf_counter()
        if now - self._drawn_at >= SECONDS_BETWEEN:
            self._drawn_at = now
            self._live.update(self._draw(now - self._begun), refresh=True)

    def _tell(self, report: StepReport) -> None:
        """A plain line for everyone who ended."""
        for request in report.finished:
            self._console.print(
                f"step {report.plan.step}: {self._ended(request)}; {self._tally['done']} of "
                f"{len(self._requests)} done, {self._rate():.1f} tokens/s",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip

    def _rate(self) -> float:
        return self._tally["tokens"] / max(1e-9, time.perf_counter() - self._begun)

    def _name(self, request: Request) -> str:
        return self._names[int(request.id)]

    # The latest decisions, in words.

    def _decisions(self, report: StepReport) -> Iterator[Text]:
        plan = report.plan
        for request, is_swap, num_lost, _ in plan.events.preempted:
            fate = "copied to the host" if is_swap else "to be computed again"
            text = f"{self._name(request)} gives up its blocks, {num_lost} tokens {fate}"
            yield Text(text, STYLES[State.SWAPPED])
        for admission in plan.admitted:
            yield Text(self._seated(admission), STYLES[State.PREFILL])
        yield from self._blocked(plan)
        for request in report.finished:
            yield Text(self._ended(request), STYLES[State.FINISHED])

    def _seated(self, admission: Admission) -> str:
        request, num_cached, num_swapped, is_resume = admission
        again = " again" if is_resume else ""
        found = (
            f", {num_cached} of {request.prefill_end} tokens from the cache" if num_cached else ""
        )
        back = f", {num_swapped} tokens back from the host" if num_swapped else ""
        return f"{self._name(request)} is seated{again}{found}{back}"

    def _blocked(self, plan: Plan) -> Iterator[Text]:
        """Who waits for something else than before."""
        config = self._llm.config
        for blocked in plan.blocked:
            request, reason = blocked.request, blocked.reason
            if self._waits.get(request) != reason:
                self._waits[request] = reason
                why = why_blocked(blocked, plan.events.num_running, config)
                yield Text(f"{self._name(request)} waits: {why}", STYLES[State.WAITING])
        behind = plan.not_considered
        if behind and self._waits.get(None) != behind.reason:
            self._waits[None] = behind.reason
            why = why_not_considered(behind, plan.events.num_running, config)
            yield Text(f"{behind.num_requests} in the queue wait {why}", STYLES[State.WAITING])

    def _ended(self, request: Request) -> str:
        return f"{self._name(request)} ends after {request.num_generated} tokens ({request.finish_reason})"

    # The picture.

    def _draw(self, seconds: float) -> RenderableType:
        scheduler, num_seen = self._llm.engine.scheduler, len(self._requests)
        num_blocks = scheduler.config.num_blocks
        num_held = num_blocks - scheduler.num_free
        head = (
            f"step {self._tally['steps']}   {seconds:.1f} s   {self._rate():.1f} tokens/s   "
            f"{len(scheduler.running)} running   {len(scheduler.queue)} waiting   "
            f"{self._tally['done']} of {num_seen} done"
        )
        width = max(BAR, min(40, self._console.width - 36))
        blocks = Text("KV cache  ").append(meter(num_held, num_blocks, width, "bold blue"))
        blocks.append(f"  {num_held} of {num_blocks} blocks held")
        return Group(Text(head, "bold"), blocks, "", self._table(), "", *self._events)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        width = max(map(len, self._names))
        room = self._console.width - width - 2 * BAR - 25  # the other columns and gaps
        for column in ("request", "state", "prompt", "output", "text"):
            table.add_column(column, no_wrap=True)
        for request in self._requests.values():
            style = STYLES[request.state]
            state = "done" if request.is_finished else request.state.value
            num_computed = min(request.num_computed, request.num_prompt)
            if request.is_finished:
                num_computed = request.num_prompt
            num_most = request.limit - request.num_prompt
            prompt = meter(num_computed, request.num_prompt, BAR, "yellow")
            output = meter(request.num_generated, num_most, BAR, style)
            table.add_row(
                Text(self._name(request), style),
                Text(state, style),
                prompt.append(f" {request.num_prompt:>3}", "dim"),
                output.append(f" {request.num_generated:>3}", "dim"),
                Text(self._tail(request, max(MIN_TAIL, room)), style),
            )
        return table

    def _tail(self, request: Request, width: int) -> str:
        """The end of its text, on one line."""
        if self._llm.tokenizer is None:
            return ""
        text = self._llm.tokenizer.decode(list(request.output[-TAIL_TOKENS:]))
        line = " ".join(safe(text).split()).lstrip("\ufffd")  # the cut may go through a character
        return line if len(line) <= width else "…" + line[1 - width :]


def safe(text: str) -> str:
    """A model's text without the characters that would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def meter(part: int, whole: int, width: int, style: str) -> Text:
    """A bar of `width` characters, filled to a share."""
    filled = round(width * part / whole) if whole else 0
    return Text("━" * filled, style).append("─" * (width - filled), "bright_black")
