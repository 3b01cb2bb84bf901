"""Draws a snapshot of a running server for a terminal of any size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.cli.view.live import DECISION_STYLES, meter, safe
from headway.cli.view.render import plain_table, seconds
from headway.lab.doctor.text import show

if TYPE_CHECKING:
    from headway.observe.snapshot import Snapshot

SPARKS = "▁▂▃▄▅▆▇█"
BAR, MIN_ROWS, OTHER_LINES = 40, 3, 17
ALL_LINES = 24  # a terminal with fewer lines shows only the main ones
TALL = 40  # lines; a terminal with fewer shows the vitals in one line
LONG_ID = re.compile("(?:(?:chat)?cmpl-)?([0-9a-f]{8})[0-9a-f]{8,}")
STATE_STYLES = {"waiting": "dim", "prefill": "yellow", "decoding": "cyan", "swapped": "magenta"}


def picture(s: Snapshot, width: int, height: int, problem: str = "") -> RenderableType:
    """A snapshot as lines for a terminal of this size."""
    num_vitals = len(s["vitals"]) if height >= TALL else 0
    room = max(MIN_ROWS, (height - OTHER_LINES - num_vitals) // 3)
    lines = [*_head(s, width, height, problem), *_bars(s, width, height)]
    running, waiting = s["running"], s["waiting"]
    if replicas := s.get("replicas"):
        lines += ["", _replicas(replicas[:room])]
    title = f"{running['count']} running"
    lines += ["", _table(title, running["requests"][:room], RUNNING, width)]
    if waiting["count"]:
        title = f"{waiting['count']} waiting"
        lines += ["", _table(title, waiting["requests"][:room], WAITING, width)]
    lines.append("")
    for decision in s["decisions"][::-1][:room]:
        step = f"{decision['step']:>7,}  " if decision["step"] >= 0 else " " * 9
        line = Text(step, "dim", no_wrap=True, overflow="ellipsis")
        lines.append(line.append(safe(short(decision["text"])), DECISION_STYLES[decision["kind"]]))
    return Group(*lines)


def _replicas(rows: list[dict[str, Any]]) -> Table:
    """One line for each engine behind the server."""
    columns = (f"{len(rows)} replicas", "tokens/s", "running", "waiting", "KV blocks")
    cells = (
        (
            Text(safe(row["name"]), "bold red" if row["fault"] else "default"),
            f"{row['output_tokens']:,.0f}", f"{row['running']:,}/{row['limit']:,}",
            f"{row['waiting']:,}", f"{row['blocks_used']:,}/{row['blocks_total']:,}",
        )
        for row in rows
    )  # fmt: skip
    return plain_table(columns, cells)


def _head(s: Snapshot, width: int, height: int, problem: str) -> Iterator[RenderableType]:
    about = f"   up {seconds(s['uptime'])}   step {max(0, s['step']):,}"
    yield Text(safe(s["model"]), "bold").append(about, "not bold")
    yield _rates(s, width)
    if height >= ALL_LINES:
        yield _failures(s)
        yield _all_vitals(s) if height >= TALL else _vitals(s, width)
    if age := _age(s):
        yield Text(age, "yellow", no_wrap=True, overflow="ellipsis")
    if problem or s["fault"]:
        yield Text(safe(problem or f"The latest step failed: {s['fault']}"), "bold red")


def _bars(s: Snapshot, width: int, height: int) -> Iterator[RenderableType]:
    blocks, running, history = s["kv_blocks"], s["running"], s["history"]
    yield _bar("running", running["count"], running["limit"], width)
    yield _bar("KV blocks", blocks["used"], blocks["total"], width)
    if blocks["host_total"]:
        yield _bar("host", blocks["host_used"], blocks["host_total"], width)
    yield _spark("tokens/s", history["output_tokens"], width, "{:,.0f}".format)
    if height >= ALL_LINES:
        yield _spark("ITL", [v or 0.0 for v in history["itl"]], width, seconds)


def short(text: str) -> str:
    """Shorten long ids to their first characters."""
    return LONG_ID.sub(r"\1", text)


def _rates(s: Snapshot, width: int) -> Text:
    """As many rates as fit in a line, the most important first."""
    rates, minute = s["rates"], s["last_minute"]
    line = Text(f"{rates['output_tokens']:,.0f} tokens/s", "bold cyan")
    more = [f"first token {seconds(rates['ttft'])}"] if rates["ttft"] else []
    more += [f"inter-token latency {seconds(rates['itl'])}"] if rates["itl"] else []
    more += [f"{rates['requests']:,.1f} requests/s"]
    if minute["prefix_cache_hit_rate"] is not None:
        more.append(f"cache hits {minute['prefix_cache_hit_rate']:.0%}")
    more += [f"{rates['preemptions']:,.1f} preemptions/s"]
    for part in [*more, f"{rates['prompt_tokens']:,.0f} prompt tokens/s"]:
        if len(line) + len(part) + 3 <= width:
            line.append(f"   {part}", "not bold default")
    return line


def _failures(s: Snapshot) -> Text:
    """Errors and aborts of the last minute and since the start."""
    minute, totals = s["last_minute"], s["totals"]
    text = (
        f"last minute {minute['errors']:,} errors, {minute['aborts']:,} aborts;"
        f" since start {totals['errors']:,}, {totals['aborts']:,}"
    )
    return Text(text, "bold red" if minute["errors"] else "dim", no_wrap=True, overflow="ellipsis")


def _vitals(s: Snapshot, width: int) -> Text:
    """As many vitals as fit in a line, unhealthy ones first and with their healthy range."""
    line = Text("healthy" if all(v["is_healthy"] for v in s["vitals"]) else "check", "dim")
    for vital in sorted(s["vitals"], key=lambda v: bool(v["is_healthy"])):
        part = f"   {vital['name']} {show(vital['value'], vital['unit'])}"
        if not vital["is_healthy"]:
            part += f" (healthy: {vital['healthy']})"
        if vital["value"] is not None and len(line) + len(part) <= width:
            line.append(part, "default" if vital["is_healthy"] else "yellow")
    return line


def _all_vitals(s: Snapshot) -> Table:
    """All vitals with their healthy ranges, one in a line."""
    made = plain_table(("last minute", "now", "healthy"), (), ("healthy",))
    for vital in s["vitals"]:
        style = "default" if vital["is_healthy"] else "yellow"
        value = show(vital["value"], vital["unit"])
        made.add_row(vital["name"], value, Text(vital["healthy"], "dim"), style=style)
    return made


def _age(s: Snapshot) -> str:
    """The age of the snapshot, if it is at least one second."""
    if s["age"] < 1:
        return ""
    step = s["step_seconds"]
    running = "" if step is None else f", step running for {seconds(step)}"
    num_new = s["waiting"]["new"]
    received = f"; {num_new:,} requests received since" if num_new else ""
    return f"as of {seconds(s['age'])} ago{running}{received}"


def _bar(name: str, part: int, whole: int, width: int) -> Text:
    bar = meter(part, whole, max(8, min(BAR, width - 36)), "bold blue")
    return Text(f"{name:<11}", "dim").append(bar).append(f"  {part:,} of {whole:,}")


def _spark(name: str, values: list[float], width: int, show: Callable[[float], str]) -> Text:
    """The last seconds, as many as fit, and the maximum."""
    peak = max([*values, 1e-9])
    label = f"  max {show(peak)}" if peak > 1e-9 else ""
    shown = values[-max(1, width - 11 - len(label)) :]
    sparks = "".join(SPARKS[round(value / peak * (len(SPARKS) - 1))] for value in shown)
    return Text(f"{name:<11}", "dim", no_wrap=True).append(sparks, "not dim cyan").append(label)


RUNNING = {
    "client": lambda r: r["client"],
    "state": lambda r: r["state"],
    "prompt": lambda r: f"{r['computed_prompt_tokens']:,}/{r['prompt_tokens']:,}",
    "output": lambda r: f"{r['output_tokens']:,}/{r['max_output_tokens']:,}",
    "blocks": lambda r: f"{r['blocks']:,}",
    "age": lambda r: seconds(r["age"]),
}
WAITING = {
    "client": lambda r: r["client"],
    "tokens": lambda r: f"{r['prompt_tokens'] + r['output_tokens']:,}",
    "age": lambda r: seconds(r["age"]),
    "why": lambda r: r["why"],
}
TEXT_COLUMNS = ("client", "state", "why")  # the others are numbers, aligned right
OPTIONAL_COLUMNS = ("blocks", "state", "client", "tokens")  # left out first on a narrow terminal
MIN_WIDTHS = {"client": 12, "why": 24}  # columns that may be cut, and their minimum widths


def _table(
    title: str, rows: list[dict[str, Any]], columns: Mapping[str, Callable[..., str]], width: int
) -> RenderableType:
    if not rows:
        return Text(title, "dim")
    texts = {title: [safe(short(row["id"])) for row in rows]}
    texts |= {name: [safe(str(show(row))) for row in rows] for name, show in columns.items()}
    wants = {name: max(map(cell_len, (name, *cells))) for name, cells in texts.items()}
    widths = _widths(wants, width)
    made = plain_table(widths, (), TEXT_COLUMNS)
    for column, column_width in zip(made.columns, widths.values(), strict=True):
        column.width = column_width
    for row, *cells in zip(rows, *(texts[name] for name in widths), strict=True):
        first, *others = (Text(cell, overflow="ellipsis") for cell in cells)
        first.style = STATE_STYLES[row["state"]]
        made.add_row(first, *others)
    return made


def _widths(wants: dict[str, int], width: int) -> dict[str, int]:
    """The columns that fit next to each other, and their widths."""
    least = {name: min(want, MIN_WIDTHS.get(name, want)) for name, want in wants.items()}
    for name in OPTIONAL_COLUMNS:
        if sum(least.values()) + 2 * len(least) - 2 > width:
            least.pop(name, None)
    spare = width - sum(least.values()) - 2 * len(least) + 2
    for name in [each for each in MIN_WIDTHS if each in least]:
        more = max(0, min(wants[name] - least[name], spare))
        least[name], spare = least[name] + more, spare - more
    return least
