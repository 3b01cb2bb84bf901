"""A snapshot of a running server as lines for a terminal of any size. Asks no server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.cli.view.live import meter, safe
from headway.cli.view.render import seconds

Snapshot = dict[str, Any]
SPARKS = "▁▂▃▄▅▆▇█"
BAR, MIN_ROWS, OTHER_LINES = 40, 3, 16
ALL_LINES = 24  # of a terminal, below which lines of less interest are left out
LONG_ID = re.compile("(?:(?:chat)?cmpl-)?([0-9a-f]{8})[0-9a-f]{8,}")
STYLES = {
    "waiting": "dim", "waits": "dim", "prefill": "yellow", "seated": "yellow", "decoding": "cyan",
    "swapped": "magenta", "preempted": "magenta", "ended": "green",
}  # fmt: skip


def picture(s: Snapshot, width: int, height: int, problem: str = "") -> RenderableType:
    """A snapshot as lines for a terminal of this size."""
    room = max(MIN_ROWS, (height - OTHER_LINES) // 3)
    lines = [*_head(s, width, height, problem), *_bars(s, width, height)]
    lines += ["", _table(f"{s['num_running']} running", s["running"][:room], RUNNING, width)]
    if s["num_waiting"]:
        lines += ["", _table(f"{s['num_waiting']} waiting", s["waiting"][:room], WAITING, width)]
    lines.append("")
    for said in s["decisions"][::-1][:room]:
        step = f"{said['step']:>7,}  " if said["step"] >= 0 else " " * 9
        line = Text(step, "dim", no_wrap=True, overflow="ellipsis")
        lines.append(line.append(safe(short(said["words"])), STYLES[said["kind"]]))
    return Group(*lines)


def _head(s: Snapshot, width: int, height: int, problem: str) -> Iterator[RenderableType]:
    about = f"   up {seconds(s['uptime'])}   step {max(0, s['step']):,}"
    yield Text(safe(s["model"]), "bold").append(about, "not bold")
    yield _rates(s, width)
    if height >= ALL_LINES:
        yield _ends(s)
    if age := _age(s):
        yield Text(age, "yellow", no_wrap=True, overflow="ellipsis")
    if problem or s["fault"]:
        yield Text(safe(problem or f"The latest step failed: {s['fault']}"), "bold red")


def _bars(s: Snapshot, width: int, height: int) -> Iterator[RenderableType]:
    blocks, seats, history = s["blocks"], s["seats"], s["history"]
    yield _bar("seats", seats["taken"], seats["limit"], width)
    yield _bar("KV blocks", blocks["held"], blocks["total"], width)
    if blocks["host_total"]:
        yield _bar("host", blocks["host_held"], blocks["host_total"], width)
    yield _spark("tokens/s", history["output_tokens"], width, "{:,.0f}".format)
    if height >= ALL_LINES:
        yield _spark("between", [v or 0.0 for v in history["itl"]], width, seconds)


def short(text: str) -> str:
    """With the first letters of long ids, which tell them apart."""
    return LONG_ID.sub(r"\1", text)


def _rates(s: Snapshot, width: int) -> Text:
    """As many as fit in a line, the most telling first."""
    rates, minute = s["rates"], s["minute"]
    line = Text(f"{rates['output_tokens']:,.0f} tokens/s", "bold cyan")
    more = [f"first token {seconds(rates['ttft'])}"] if rates["ttft"] else []
    more += [f"between tokens {seconds(rates['itl'])}"] if rates["itl"] else []
    more += [f"{rates['requests']:,.1f} requests/s"]
    if minute["prefix_cache_hit_rate"] is not None:
        more.append(f"cache hits {minute['prefix_cache_hit_rate']:.0%}")
    more += [f"{rates['preemptions']:,.1f} preemptions/s"]
    for words in [*more, f"{rates['prompt_tokens']:,.0f} prompt tokens/s"]:
        if len(line) + len(words) + 3 <= width:
            line.append(f"   {words}", "not bold default")
    return line


def _ends(s: Snapshot) -> Text:
    """Errors and aborts of the last minute and since the start."""
    minute, totals = s["minute"], s["totals"]
    words = (
        f"last minute {minute['errors']:,} errors, {minute['aborts']:,} aborts;"
        f" since start {totals['errors']:,}, {totals['aborts']:,}"
    )
    return Text(words, "bold red" if minute["errors"] else "dim", no_wrap=True, overflow="ellipsis")


def _age(s: Snapshot) -> str:
    """How old the picture is, once that is worth a word."""
    if s["age"] < 1:
        return ""
    step = s["step_seconds"]
    running = "" if step is None else f", step running for {seconds(step)}"
    received = f"; {s['num_new']:,} requests received since" if s["num_new"] else ""
    return f"as of {seconds(s['age'])} ago{running}{received}"


def _bar(name: str, part: int, whole: int, width: int) -> Text:
    bar = meter(part, whole, max(8, min(BAR, width - 36)), "bold blue")
    return Text(f"{name:<11}", "dim").append(bar).append(f"  {part:,} of {whole:,}")


def _spark(name: str, values: list[float], width: int, show: Callable[[float], str]) -> Text:
    """The last seconds, as many as fit, and the most there was in one of them."""
    most = max([*values, 1e-9])
    peak = f"  at most {show(most)}" if most > 1e-9 else ""
    shown = values[-max(1, width - 11 - len(peak)) :]
    sparks = "".join(SPARKS[round(value / most * (len(SPARKS) - 1))] for value in shown)
    return Text(f"{name:<11}", "dim", no_wrap=True).append(sparks, "not dim cyan").append(peak)


RUNNING = {
    "client": lambda r: r["client"],
    "state": lambda r: r["state"],
    "prompt": lambda r: f"{r['computed']:,}/{r['prompt']:,}",
    "output": lambda r: f"{r['output']:,}/{r['most']:,}",
    "blocks": lambda r: f"{r['blocks']:,}",
    "age": lambda r: seconds(r["age"]),
}
WAITING = {
    "client": lambda r: r["client"],
    "tokens": lambda r: f"{r['prompt'] + r['output']:,}",
    "age": lambda r: seconds(r["age"]),
    "why": lambda r: r["reason"],
}
WORDS = ("client", "state", "why")  # the other columns are numbers
FIRST_TO_GO = ("blocks", "state", "client", "tokens")  # of columns, where there is no room
MIN_WIDTHS = {"client": 12, "why": 24}  # what may be cut, and to how much of it


def _table(
    title: str, rows: list[dict[str, Any]], columns: dict[str, Any], width: int
) -> RenderableType:
    if not rows:
        return Text(title, "dim")
    texts = {title: [safe(short(row["id"])) for row in rows]}
    texts |= {name: [safe(str(show(row))) for row in rows] for name, show in columns.items()}
    wants = {name: max(map(cell_len, (name, *cells))) for name, cells in texts.items()}
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    widths = _widths(wants, width)
    for name, column_width in widths.items():
        side: Any = "left" if name == title or name in WORDS else "right"
        table.add_column(name, no_wrap=True, width=column_width, justify=side)
    for place, row in enumerate(rows):
        cells = [Text(texts[name][place], overflow="ellipsis") for name in widths]
        cells[0].style = STYLES[row["state"]]
        table.add_row(*cells)
    return table


def _widths(wants: dict[str, int], width: int) -> dict[str, int]:
    """The columns that fit side by side, and how wide they may be."""
    least = {name: min(want, MIN_WIDTHS.get(name, want)) for name, want in wants.items()}
    for name in FIRST_TO_GO:
        if sum(least.values()) + 2 * len(least) - 2 > width:
            least.pop(name, None)
    spare = width - sum(least.values()) - 2 * len(least) + 2
    for name in [each for each in MIN_WIDTHS if each in least]:
        more = max(0, min(wants[name] - least[name], spare))
        least[name], spare = least[name] + more, spare - more
    return least
