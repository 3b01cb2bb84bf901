"""`headway top`: a running server at a glance, in the terminal. Reads GET /live, draws, nothing else."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import typer
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headway.cli.live import meter, safe
from headway.cli.render import seconds
from headway.errors import ConfigError

Snapshot = dict[str, Any]
PATIENCE = 5.0  # seconds for an answer
SPARKS = "▁▂▃▄▅▆▇█"
BAR, LEAST_ROWS, OTHER_LINES = 40, 3, 13
LONG_ID = re.compile("(?:(?:chat)?cmpl-)?([0-9a-f]{8})[0-9a-f]{8,}")
STYLES = {
    "waiting": "dim", "waits": "dim", "prefill": "yellow", "seated": "yellow", "decoding": "cyan",
    "swapped": "magenta", "preempted": "magenta", "ended": "green",
}  # fmt: skip

Url = Annotated[str, typer.Argument(help="Where the server is.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="HEADWAY_API_KEY", help="If the server wants one.")
]
Every = Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")]
Once = Annotated[bool, typer.Option("--once", help="Look once, print, end.")]


def top_command(
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    every: Every = 0.5,
    once: Once = False,
) -> None:
    """Watch a running server: queues, blocks, rates, latest decisions. q ends it."""
    console = Console()
    snapshot = look(url, api_key)
    if once or not console.is_terminal:
        console.print(picture(snapshot, console.width, console.height))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live, keys() as pressed:
        problem = ""
        while True:
            live.update(picture(snapshot, console.width, console.height, problem), refresh=True)
            if pressed(every):
                return
            try:
                snapshot, problem = look(url, api_key), ""
            except ConfigError as error:
                problem = str(error)


def look(url: str, api_key: str | None) -> Snapshot:
    """The server's snapshot; ConfigError that says why there is none."""
    base = url if "://" in url else f"http://{url}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(f"{base.rstrip('/')}/live", headers=headers), timeout=PATIENCE) as got:
            snapshot = json.load(got)
    except HTTPError as error:
        raise ConfigError(_refusal(base, error)) from None
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"no Headway server answers at {base}: {reason}") from None
    if not isinstance(snapshot, dict) or "decisions" not in snapshot:
        raise ConfigError(f"what answers at {base} is no Headway server")
    return snapshot


def _refusal(base: str, error: HTTPError) -> str:
    if error.code == 401:
        return f"{base} wants an API key: give --api-key or set HEADWAY_API_KEY"
    try:
        return f"{base} answers: {json.load(error)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{base} answers {error.code} to GET /live: is it a Headway server?"


@contextmanager
def keys() -> Iterator[Any]:
    """A function that waits so many seconds and says whether q (or Ctrl-C) was pressed."""
    try:
        import select
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin)
    except (ImportError, OSError, ValueError):  # no terminal to read from, or no such thing here
        yield lambda wait: time.sleep(wait)
        return

    def pressed(wait: float) -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], wait)
        return bool(ready) and sys.stdin.read(1) in ("q", "Q", "\x03", "")

    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    except KeyboardInterrupt:
        return
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


# The picture.


def picture(s: Snapshot, width: int, height: int, problem: str = "") -> RenderableType:
    """All of a snapshot in so many lines."""
    blocks, seats = s["blocks"], s["seats"]
    room = max(LEAST_ROWS, (height - OTHER_LINES) // 3)
    about = f"   up {seconds(s['uptime'])}   step {max(0, s['step']):,}"
    lines: list[RenderableType] = [Text(safe(s["model"]), "bold").append(about, "not bold")]
    lines.append(_rates(s["rates"], width))
    if problem or s["fault"]:
        lines.append(Text(safe(problem or f"The latest step failed: {s['fault']}"), "bold red"))
    lines.append(_bar("seats", seats["taken"], seats["limit"], width))
    lines.append(_bar("KV blocks", blocks["held"], blocks["total"], width))
    if blocks["host_total"]:
        lines.append(_bar("host", blocks["host_held"], blocks["host_total"], width))
    lines.append(_spark(s["history"]["output_tokens"], width))
    lines += ["", _table(f"{s['num_running']} running", s["running"][:room], RUNNING, width)]
    if s["waiting"]:
        lines += ["", _table(f"{s['num_waiting']} waiting", s["waiting"][:room], WAITING, width)]
    lines.append("")
    for said in s["decisions"][::-1][:room]:
        step = f"{said['step']:>7,}  " if said["step"] >= 0 else " " * 9
        line = Text(step, "dim", no_wrap=True, overflow="ellipsis")
        lines.append(line.append(safe(short(said["words"])), STYLES[said["kind"]]))
    return Group(*lines)


def short(text: str) -> str:
    """With the first letters of long ids, which tell them apart."""
    return LONG_ID.sub(r"\1", text)


def _rates(rates: dict[str, float], width: int) -> Text:
    """As many as fit in a line, the most telling first."""
    line = Text(f"{rates['output_tokens']:,.0f} tokens/s", "bold cyan")
    more = [f"first token {seconds(rates['ttft'])}"] if rates["ttft"] else []
    more += [f"{rates['requests']:,.1f} requests/s", f"{rates['preemptions']:,.1f} preemptions/s"]
    for words in [*more, f"{rates['prompt_tokens']:,.0f} prompt tokens/s"]:
        if len(line) + len(words) + 3 <= width:
            line.append(f"   {words}", "not bold default")
    return line


def _bar(name: str, part: int, whole: int, width: int) -> Text:
    bar = meter(part, whole, max(8, min(BAR, width - 36)), "bold blue")
    return Text(f"{name:<11}", "dim").append(bar).append(f"  {part:,} of {whole:,}")


def _spark(values: list[float], width: int) -> Text:
    """The last seconds, as many as fit, and the most there was in one of them."""
    most = max([*values, 1e-9])
    peak = f"  at most {most:,.0f}" if most >= 1 else ""
    shown = values[-max(1, width - 11 - len(peak)) :]
    sparks = "".join(SPARKS[round(value / most * (len(SPARKS) - 1))] for value in shown)
    return Text("tokens/s   ", "dim", no_wrap=True).append(sparks, "not dim cyan").append(peak)


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
LEAST_WIDTHS = {"client": 12, "why": 24}  # what may be cut, and to how much of it


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
    least = {name: min(want, LEAST_WIDTHS.get(name, want)) for name, want in wants.items()}
    for name in FIRST_TO_GO:
        if sum(least.values()) + 2 * len(least) - 2 > width:
            least.pop(name, None)
    spare = width - sum(least.values()) - 2 * len(least) + 2
    for name in [each for each in LEAST_WIDTHS if each in least]:
        more = max(0, min(wants[name] - least[name], spare))
        least[name], spare = least[name] + more, spare - more
    return least
