"""`headway top`: shows a running server in the terminal. It polls GET /live."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.live import Live

from headway.cli.options.common import argument, option
from headway.cli.view.top import picture
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.observe.snapshot import Snapshot

TIMEOUT = 5.0  # seconds
RETRY_SECONDS = 0.25
API_KEY = option(None, "API key, if the server requires one.", envvar="HEADWAY_API_KEY")


def top_command(
    url: str = argument("http://127.0.0.1:8000", "URL of the server."),
    api_key: str | None = API_KEY,
    every: float = option(0.5, "Seconds between two updates.", min=0.1),
    once: bool = option(False, "Print one snapshot and exit.", "--once"),
) -> None:
    """Watch a running server: requests, KV blocks, rates, latest decisions. Press q to quit."""
    console = Console()
    snapshot = first_snapshot(url, api_key)
    if once or not console.is_terminal:
        console.print(picture(snapshot, console.width, console.height))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live, keys() as pressed:

        def show(snapshot: Snapshot, problem: str) -> None:
            live.update(picture(snapshot, console.width, console.height, problem), refresh=True)

        follow(snapshot, lambda: get_snapshot(url, api_key), show, lambda: pressed(every))


def follow(
    snapshot: Snapshot,
    get: Callable[[], Snapshot],
    show: Callable[[Snapshot, str], None],
    is_done: Callable[[], bool | None],
) -> None:
    """Show snapshots until the user quits. If the server does not respond, show the problem."""
    problem = ""
    while True:
        show(snapshot, problem)
        if is_done():
            return
        try:
            snapshot, problem = get(), ""
        except ConfigError as error:
            problem = str(error)


def first_snapshot(url: str, api_key: str | None, timeout: float = TIMEOUT) -> Snapshot:
    """The first snapshot. Retry until the timeout while the server is busy or not yet started."""
    ends_at = time.monotonic() + timeout
    while True:
        try:
            return get_snapshot(url, api_key)
        except NoResponse:
            if time.monotonic() >= ends_at:
                raise
        time.sleep(RETRY_SECONDS)


class NoResponse(ConfigError):
    """The server did not respond, or is busy. A retry may help."""


def get_snapshot(url: str, api_key: str | None) -> Snapshot:
    """The server's snapshot. ConfigError gives the reason if the server sends none."""
    snapshot = fetch(url, "/live", api_key, timeout=TIMEOUT)
    if "decisions" not in snapshot:
        raise ConfigError(f"{url} is not a Headway server: GET /live returned no snapshot")
    return snapshot


def fetch(
    url: str, path: str, api_key: str | None, body: Any = None, timeout: float = TIMEOUT
) -> dict[str, Any]:
    """The JSON object at a path of a server: GET, or POST with a body; ConfigError if it fails."""
    base = url if "://" in url else f"http://{url}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    data = None if body is None else json.dumps(body).encode()
    headers |= {"Content-Type": "application/json"} if data else {}
    try:
        request = Request(f"{base.rstrip('/')}{path}", data, headers)
        with urlopen(request, timeout=timeout) as got:
            answer = json.load(got)
    except HTTPError as error:
        kind = NoResponse if error.code == 503 else ConfigError
        raise kind(_problem(base, path, error)) from None
    except ValueError as error:
        raise ConfigError(f"{base} is not a Headway server: {error}") from None
    except (HTTPException, OSError) as error:  # URLError is an OSError
        reason = getattr(error, "reason", error) or type(error).__name__
        raise NoResponse(f"cannot reach a Headway server at {base}: {reason}") from None
    if not isinstance(answer, dict):
        raise ConfigError(f"{base} is not a Headway server: {path} returned no object")
    return answer


def _problem(base: str, path: str, error: HTTPError) -> str:
    if error.code == 401:
        return f"{base} requires an API key; use --api-key or set HEADWAY_API_KEY"
    try:
        return f"{base}: {json.load(error)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{base}{path} returned status {error.code}; check that it is a Headway server"


@contextmanager
def keys() -> Iterator[Any]:
    """A function that waits for the given seconds and returns whether q or Ctrl-C was pressed."""
    try:
        import select
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin)
    except (ImportError, OSError, ValueError):  # stdin is no terminal, or there is no termios
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
