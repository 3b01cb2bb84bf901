"""`headway serve`: serve a model over HTTP with the APIs of OpenAI and Anthropic."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from headway.cli.options.common import argument, stderr
from headway.cli.options.fleet import FleetFlags, anywhere, run_fleet
from headway.cli.options.model import MODEL_HELP, ServedFlags
from headway.cli.options.packages import check_extras
from headway.cli.options.serve import ServeOptions

if TYPE_CHECKING:
    from headway.server.serving import ModelInfo

MODEL = argument(None, MODEL_HELP, metavar="MODEL", show_default="smollm2-135m")


def serve_command(
    name: str | None = MODEL, *, serving: ServeOptions, fleet: FleetFlags, model: ServedFlags
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's APIs, metrics, and a live page at /.

    After SIGTERM or Ctrl-C the server rejects new requests, finishes open ones and exits; after a
    second signal it exits at once.
    """
    check_extras("serving a model", "torch", "server")
    from headway.server.process.serve import bind, serve_single_process
    from headway.server.process.workers import Supervisor
    from headway.server.serving import server_factory
    from headway.text.chat_template import read_template

    model = replace(model, model=name or model.model)
    if model.chat_template is not None:
        read_template(model.chat_template)  # report an error before anything starts
    options = fleet.options(model)
    if options is not None:
        fleet.check(serving)
        model = anywhere(replace(model, threads=fleet.threads(model)))
    factory = server_factory(serving.options(model), fleet.loader(model))
    bound = bind(serving.host, serving.port)
    host, port = bound.getsockname()[:2]
    ready = partial(announce, f"http://{f'[{host}]' if ':' in host else host}:{port}")
    stop_logs = factory.setup()
    try:
        with bound:
            if options is not None:
                status = run_fleet(factory, bound, ready, options, serving.api_server_count)
            elif serving.has_engine_process(model.device):
                status = Supervisor(factory, bound, serving.api_server_count).run(ready)
            else:
                status = serve_single_process(factory, bound, ready)
    finally:
        stop_logs()
    raise typer.Exit(status)


def announce(url: str, info: ModelInfo) -> None:
    """Print the address of a server that is ready."""
    console = stderr()
    name = escape(info.model_name)
    scheduling = f"preset {info.preset}, max_model_len {info.max_model_len}"
    with suppress(OSError):  # stderr may be a file on a full disk
        console.print(f"[bold]{name}[/] at [bold]{url}[/]; {info.description}; {scheduling}")
        console.print(f"Live view: {url}/ or `headway top {url}`. Press Ctrl-C to stop.")
