"""`headway top`: a running server at a glance, in the terminal. Reads GET /live, draws, nothing else."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import typer
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
BAR, LEAST_ROWS, OTHER_LINES = 40, 3, 12
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
    rates, blocks, seats = s["rates"], s["blocks"], s["seats"]
    room = max(LEAST_ROWS, (height - OTHER_LINES) // 3)
    head = Text.assemble(
        (f"{safe(s['model'])}", "bold"), f"   up {seconds(s['uptime'])}   step {max(0, s['step']):,}   ",
        (f"{rates['output_tokens']:,.0f} tokens/s", "bold cyan"),
        f"   {rates['requests']:,.1f} requests/s   first token {seconds(rates['ttft'])}   "
        f"{rates['preemptions']:,.1f} preemptions/s",
    )  # fmt: skip
    lines: list[RenderableType] = [head]
    if problem or s["fault"]:
        lines.append(Text(safe(problem or f"The latest step failed: {s['fault']}"), "bold red"))
    lines.append(_bar("seats", seats["taken"], seats["limit"], width))
    lines.append(_bar("KV blocks", blocks["held"], blocks["total"], width))
    if blocks["host_total"]:
        lines.append(_bar("host", blocks["host_held"], blocks["host_total"], width))
    lines.append(Text("tokens/s   ", "dim").append(_spark(s["history"]["output_tokens"]), "cyan"))
    lines += ["", _table(f"{s['num_running']} running", s["running"][:room], RUNNING)]
    if s["waiting"]:
        lines += ["", _table(f"{s['num_waiting']} waiting", s["waiting"][:room], WAITING)]
    lines.append("")
    for said in s["decisions"][::-1][:room]:
        step = f"{said['step']:>7}  " if said["step"] >= 0 else " " * 9
        lines.append(
            Text(step, "dim", no_wrap=True).append(safe(said["words"]), STYLES[said["kind"]])
        )
    return Group(*lines)


def _bar(name: str, part: int, whole: int, width: int) -> Text:
    bar = meter(part, whole, max(8, min(BAR, width - 36)), "bold blue")
    return Text(f"{name:<11}", "dim").append(bar).append(f"  {part:,} of {whole:,}")


def _spark(values: list[float]) -> str:
    most = max([*values, 1e-9])
    return "".join(SPARKS[round(value / most * (len(SPARKS) - 1))] for value in values)


RUNNING = {
    "state": lambda r: r["state"],
    "prompt": lambda r: f"{r['computed']:,}/{r['prompt']:,}",
    "output": lambda r: f"{r['output']:,}/{r['most']:,}",
    "blocks": lambda r: f"{r['blocks']:,}",
    "age": lambda r: seconds(r["age"]),
}
WAITING = {
    "state": lambda r: r["state"],
    "tokens": lambda r: f"{r['prompt'] + r['output']:,}",
    "age": lambda r: seconds(r["age"]),
    "because": lambda r: r["reason"],
}


def _table(title: str, rows: list[dict[str, Any]], columns: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in (title, *columns):
        table.add_column(column, no_wrap=True)
    for row in rows:
        name = f"{row['id']} ({row['client']})" if row["client"] else row["id"]
        cells = [Text(safe(str(show(row)))) for show in columns.values()]
        table.add_row(Text(safe(name), STYLES[row["state"]]), *cells)
    return table
