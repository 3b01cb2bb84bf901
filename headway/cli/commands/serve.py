"""`headway serve`: a model over HTTP, for whatever speaks OpenAI's API."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from headway import __version__
from headway.cli.options.model import ModelOptions, spread
from headway.cli.options.packages import check_extras
from headway.cli.options.serve import ServeOptions
from headway.engine.async_engine import AsyncEngine
from headway.engine.loop import EngineLoop
from headway.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from headway.engine.input_processor import InputProcessor
    from headway.llm import LLM
    from headway.server.process.serve import Recipe, Served
    from headway.server.settings import Settings

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="A bundled name, a model's folder, a .gguf file or a hub id.",
        show_default="smollm2-135m",
    ),
]  # fmt: skip
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What those who answer HTTP must know of the model, and what the console is told."""

    asking: InputProcessor
    model_name: str
    max_model_len: int
    words: str
    tool_call_parser: str = "auto"

    @property
    def fingerprint(self) -> str:
        """Changes with the version, the model and how it is computed."""
        facts = f"{__version__} {self.model_name} {self.words}"
        return f"fp_{sha256(facts.encode()).hexdigest()[:12]}"


@spread
def serve_command(name: Model = None, *, serving: ServeOptions, model: ModelOptions) -> None:
    """Serve a model over HTTP, as OpenAI's API: chat, completions, metrics, a live page at /.

    SIGTERM or Ctrl-C: nothing new is taken, what is open may finish, then it ends; twice: at once.
    """
    check_extras("serving a model", "torch", "server")
    from headway.observe import spans
    from headway.server.process.serve import bind, serve_here
    from headway.server.process.workers import Supervisor

    if serving.spans:
        spans.check_installed()
    settings = serving.settings()
    if serving.chat_template is not None:
        read_template(serving.chat_template)  # a mistake shows before the model is loaded
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
    from headway.server.process.serve import Recipe

    return Recipe(
        make_engine=partial(make_engine, serving, model),
        make_app=partial(make_app, settings, serving.watchdog),
        setup=partial(set_up_logs, serving.log_format, serving.log_level),
        grace=serving.grace,
        connections=serving.connections(),
    )


def set_up_logs(form: Any, level: str) -> Callable[[], None]:
    """In every process; returns what ends it."""
    from headway.server.process.log_setup import setup

    return setup(form, level)


def make_engine(serving: ServeOptions, model: ModelOptions) -> Served:
    """The model, loaded, and what watches it."""
    from headway.server.process.serve import Served

    template = None if serving.chat_template is None else read_template(serving.chat_template)
    llm = model.load()
    if template is not None and llm.tokenizer is not None:
        llm.tokenizer.chat_template = template
    llm.executor.sampler.grammars.matchers.warm_up()  # later it would hold up everybody's streams
    config, loaded = llm.config, llm.loaded
    facts = Facts(
        asking=llm.input_processor, model_name=serving.served_model_name or _short(model.model),
        max_model_len=config.max_model_len, tool_call_parser=serving.tool_call_parser,
        words=f"{loaded.precision} on {loaded.device}, {config.max_num_seqs} seats, "
        f"{config.num_blocks:,} KV blocks of {config.block_size} tokens",
    )  # fmt: skip

    closing = ExitStack()
    closing.callback(_close, llm)

    def prepare(loop: EngineLoop) -> None:
        from headway.observe import server_metrics as metrics
        from headway.observe import spans
        from headway.server import health

        metrics.ServerMetrics(loop, facts.model_name)
        health.Watchdog(loop, serving.watchdog)
        loop.begin = partial(_use_device, llm, model.threads)
        if serving.spans:
            closing.callback(spans.install(loop, facts.model_name))

    return Served(
        engine=llm.engine, facts=facts, limits=serving.limits(), prepare=prepare,
        close=closing.close,
    )  # fmt: skip


def make_app(settings: Settings, patience: float, engine: AsyncEngine, facts: Facts) -> Any:
    """The endpoints over an engine, wherever it runs."""
    from headway.server.app import create_app
    from headway.server.context import Context
    from headway.server.health import watch
    from headway.server.http.trace_context import TraceContext
    from headway.server.live import router
    from headway.server.process.log_setup import AccessLog

    context = Context(
        engine=engine, asking=facts.asking, model_name=facts.model_name,
        max_model_len=facts.max_model_len, settings=settings, health=watch(engine, patience),
        tool_call_parser=facts.tool_call_parser, fingerprint=facts.fingerprint,
    )  # fmt: skip
    return TraceContext(AccessLog(create_app(context, [router(context)])))


def read_template(path: Path) -> str:
    """A chat template from a file; ConfigError if it cannot be read or is no Jinja template."""
    from headway.text.chat_template import check_template

    try:
        template = path.read_text(encoding="utf-8")
        check_template(template)
    except (OSError, UnicodeDecodeError, ModelError) as error:
        raise ConfigError(f"--chat-template {path} cannot be used: {error}") from error
    return template


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
