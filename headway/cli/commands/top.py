"""`headway top`: a running server at a glance, in the terminal. Reads GET /live again and again.

How a snapshot is drawn is in top_view.py.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import typer
from rich.console import Console
from rich.live import Live

from headway.cli.view.top import Snapshot, picture
from headway.errors import ConfigError

PATIENCE = 5.0  # seconds for an answer
RETRY = 0.25  # seconds between two attempts

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
    snapshot = first_look(url, api_key)
    if once or not console.is_terminal:
        console.print(picture(snapshot, console.width, console.height))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live, keys() as pressed:

        def show(snapshot: Snapshot, problem: str) -> None:
            live.update(picture(snapshot, console.width, console.height, problem), refresh=True)

        follow(snapshot, lambda: look(url, api_key), show, lambda: pressed(every))


def follow(
    snapshot: Snapshot,
    ask: Callable[[], Snapshot],
    show: Callable[[Snapshot, str], None],
    is_over: Callable[[], bool | None],
) -> None:
    """Show snapshots until the user ends it; without an answer, show the problem and ask again."""
    problem = ""
    while True:
        show(snapshot, problem)
        if is_over():
            return
        try:
            snapshot, problem = ask(), ""
        except ConfigError as error:
            problem = str(error)


def first_look(url: str, api_key: str | None, patience: float = PATIENCE) -> Snapshot:
    """The first snapshot; a server that is busy or not up yet is asked again until patience ends."""
    ends_at = time.monotonic() + patience
    while True:
        try:
            return look(url, api_key)
        except NoAnswer:
            if time.monotonic() >= ends_at:
                raise
        time.sleep(RETRY)


class NoAnswer(ConfigError):
    """The server did not answer, or is busy: asking again may help."""


def look(url: str, api_key: str | None) -> Snapshot:
    """The server's snapshot; ConfigError that says why there is none."""
    base = url if "://" in url else f"http://{url}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(f"{base.rstrip('/')}/live", headers=headers), timeout=PATIENCE) as got:
            snapshot = json.load(got)
    except HTTPError as error:
        kind = NoAnswer if error.code == 503 else ConfigError
        raise kind(_refusal(base, error)) from None
    except ValueError as error:
        raise ConfigError(f"no Headway server answers at {base}: {error}") from None
    except (HTTPException, OSError) as error:  # URLError is an OSError
        reason = getattr(error, "reason", error) or type(error).__name__
        raise NoAnswer(f"no Headway server answers at {base}: {reason}") from None
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
