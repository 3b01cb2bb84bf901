"""`headway serve`: a model over HTTP, for whatever speaks OpenAI's API."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from headway.cli.model_options import ModelOptions, spread
from headway.cli.serve_options import ServeOptions
from headway.engine.async_engine import AsyncEngine
from headway.engine.loop import EngineLoop
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.engine.asking import Asking
    from headway.llm import LLM
    from headway.server.serving import Recipe, Served
    from headway.server.settings import Settings

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="A bundled name, a model's folder, a .gguf file or a hub id.",
        show_default="smollm2-135m",
    ),
]  # fmt: skip
NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What those who answer HTTP must know of the model, and what the console is told."""

    asking: Asking
    model_name: str
    max_length: int
    words: str


@spread
def serve_command(name: Model = None, *, serving: ServeOptions, model: ModelOptions) -> None:
    """Serve a model over HTTP, as OpenAI's API: chat, completions, metrics, a live page at /.

    SIGTERM or Ctrl-C: nothing new is taken, what is open may finish, then it ends; twice: at once.
    """
    _check_installed()
    from headway.server.serving import bind, serve_here
    from headway.server.workers import Supervisor

    settings = serving.settings()
    model = replace(model, model=name or model.model)
    bound = bind(serving.host, serving.port)
    host, port = bound.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    recipe = _recipe(serving, model, settings)
    stop_logs = recipe.setup()

    def ready(facts: Facts) -> None:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[bold]{escape(facts.model_name)}[/] at [bold]{url}[/]; {facts.words}")
        console.print(f"Live view: {url}/ or `headway top {url}`. Ctrl-C ends it.")

    try:
        with bound:
            if serving.has_engine_process(model.device):
                status = Supervisor(recipe, bound, serving.api_workers).run(ready)
            else:
                status = serve_here(recipe, bound, ready)
    finally:
        stop_logs()
    raise typer.Exit(status)


def _recipe(serving: ServeOptions, model: ModelOptions, settings: Settings) -> Recipe:
    from headway.server.serving import Recipe

    return Recipe(
        make_engine=partial(make_engine, serving, model),
        make_app=partial(make_app, settings, serving.watchdog),
        setup=partial(set_up_logs, serving.log_format, serving.log_level),
        grace=serving.grace,
        connections=serving.connections(),
    )


def set_up_logs(form: Any, level: str) -> Callable[[], None]:
    """In every process; returns what ends it."""
    from headway.server.logs import setup

    return setup(form, level)


def make_engine(serving: ServeOptions, model: ModelOptions) -> Served:
    """The model, loaded, and what watches it."""
    from headway.server.serving import Served

    llm = model.load()
    llm.executor.sampler.grammars.matchers.warm_up()  # later it would hold up everybody's streams
    config, loaded = llm.config, llm.loaded
    facts = Facts(
        asking=llm.asking, model_name=serving.served_model_name or _short(model.model),
        max_length=config.max_length,
        words=f"{loaded.precision} on {loaded.device}, {config.max_requests} seats, "
        f"{config.num_blocks:,} KV blocks of {config.block_size} tokens",
    )  # fmt: skip

    def prepare(loop: EngineLoop) -> None:
        from headway.server import health, metrics, spans

        metrics.ServerMetrics(loop, facts.model_name)
        health.Watchdog(loop, serving.watchdog)
        loop.begin = partial(_use_device, llm, model.threads)
        if serving.spans:
            spans.install(loop.engine)

    return Served(
        engine=llm.engine, facts=facts, limits=serving.limits(), prepare=prepare,
        close=partial(_close, llm),
    )  # fmt: skip


def make_app(settings: Settings, patience: float, engine: AsyncEngine, facts: Facts) -> Any:
    """The endpoints over an engine, wherever it runs."""
    from headway.server.app import create_app
    from headway.server.context import Context
    from headway.server.health import watch
    from headway.server.live import router
    from headway.server.logs import AccessLog

    context = Context(
        engine=engine, asking=facts.asking, model_name=facts.model_name,
        max_length=facts.max_length, settings=settings, health=watch(engine, patience),
    )  # fmt: skip
    return AccessLog(create_app(context, [router(context)]))


def _use_device(llm: LLM, threads: int | None) -> None:
    """GPU and threads are chosen for each thread anew, and the engine's is not the one that loaded."""
    from headway.model.devices import use_device
    from headway.model.precision import use_threads

    use_device(llm.loaded.device)
    if threads is not None:
        use_threads(threads)


def _close(llm: LLM) -> None:
    try:
        llm.close()
    except OSError as error:  # the disk is full: the trace has ended before, and said so
        log.warning("the trace file is not complete: %s", error)


def _short(model: str) -> str:
    """A file or folder by its name; anything else as it was given."""
    with suppress(OSError):
        if Path(model).exists():
            return Path(model).resolve().name
    return model


def _check_installed() -> None:
    """ConfigError that says which extra is missing, if one is."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serving needs {missing[0]}, which is not installed: pip install 'headway[server]'"
        )
