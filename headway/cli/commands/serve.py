"""`headway serve`: serve a model over HTTP with the APIs of OpenAI and Anthropic."""

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
from headway.cli.options.common import spread
from headway.cli.options.fleet import FleetFlags, anywhere, run_fleet
from headway.cli.options.model import MODEL_HELP, ModelOptions
from headway.cli.options.packages import check_extras
from headway.cli.options.serve import ServeOptions
from headway.engine.async_engine import AsyncEngine
from headway.engine.loop import EngineLoop
from headway.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from headway.engine.input_processor import InputProcessor
    from headway.llm import LLM
    from headway.server.process.serve import ServedEngine, ServerFactory
    from headway.server.settings import Settings

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help=MODEL_HELP,
        show_default="smollm2-135m",
    ),
]  # fmt: skip
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What the API servers need to know about the model, and its description for the console."""

    input_processor: InputProcessor
    model_name: str
    max_model_len: int
    preset: str
    execution: str  # precision, device and type of the KV cache
    description: str  # of the model and its execution
    tool_call_parser: str = "auto"

    @property
    def identity(self) -> str:
        """What the tokens of a request depend on; equal for all replicas of a fleet."""
        return f"{self.model_name} ({self.execution}, max_model_len {self.max_model_len})"

    @property
    def fingerprint(self) -> str:
        """The system_fingerprint: depends on version, model and execution."""
        text = f"{__version__} {self.model_name} {self.description}"
        return f"fp_{sha256(text.encode()).hexdigest()[:12]}"


@spread
def serve_command(
    name: Model = None, *, serving: ServeOptions, fleet: FleetFlags, model: ModelOptions
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's APIs, metrics, and a live page at /.

    After SIGTERM or Ctrl-C the server rejects new requests, finishes open ones and exits; after a
    second signal it exits at once.
    """
    check_extras("serving a model", "torch", "server")
    from headway.observe import spans
    from headway.server.process.serve import bind, serve_single_process
    from headway.server.process.workers import Supervisor

    if serving.spans:
        spans.check_installed()
    settings = serving.settings()
    if serving.chat_template is not None:
        read_template(serving.chat_template)  # report an error before loading the model
    model = replace(model, model=name or model.model)
    options = fleet.options(model)
    if options is not None:
        fleet.check(serving)
        serving, model = anywhere(serving, replace(model, threads=fleet.threads(model)))
    bound = bind(serving.host, serving.port)
    host, port = bound.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    factory = make_factory(serving, model, settings)
    stop_logs = factory.setup()
    ready = partial(announce, url)
    try:
        with bound:
            if options is not None:
                status = run_fleet(factory, bound, ready, options)
            elif serving.has_engine_process(model.device):
                status = Supervisor(factory, bound, serving.api_server_count).run(ready)
            else:
                status = serve_single_process(factory, bound, ready)
    finally:
        stop_logs()
    raise typer.Exit(status)


def announce(url: str, info: ModelInfo) -> None:
    """Print the address of a server that is ready."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    name = escape(info.model_name)
    scheduling = f"preset {info.preset}, max_model_len {info.max_model_len}"
    with suppress(OSError):  # stderr may be a file on a full disk
        console.print(f"[bold]{name}[/] at [bold]{url}[/]; {info.description}; {scheduling}")
        console.print(f"Live view: {url}/ or `headway top {url}`. Press Ctrl-C to stop.")


def make_factory(serving: ServeOptions, model: ModelOptions, settings: Settings) -> ServerFactory:
    """What makes the engine and the app, in this process or in others."""
    from headway.server.process.serve import ServerFactory

    return ServerFactory(
        make_engine=partial(make_engine, serving, model),
        make_app=partial(make_app, settings, serving.watchdog),
        setup=partial(set_up_logs, serving.log_format, serving.log_level),
        grace=serving.grace,
        connections=serving.connections(),
    )


def set_up_logs(form: Any, level: str) -> Callable[[], None]:
    """Set up logging in this process; returns a function that ends it."""
    from headway.server.process.log_setup import setup

    return setup(form, level)


def make_engine(serving: ServeOptions, model: ModelOptions) -> ServedEngine:
    """Load the model, with its metrics and watchdog."""
    from headway.server.process.serve import ServedEngine

    template = None if serving.chat_template is None else read_template(serving.chat_template)
    llm = model.load()
    if template is not None and llm.tokenizer is not None:
        llm.tokenizer.chat_template = template
    llm.executor.sampler.grammars.matchers.warm_up()  # the first use would delay all streams
    config, loaded = llm.config, llm.loaded
    info = ModelInfo(
        input_processor=llm.input_processor, model_name=serving.served_model_name or _short(model.model),
        max_model_len=config.max_model_len, preset=model.preset,
        tool_call_parser=serving.tool_call_parser, execution=loaded.execution,
        description=f"{loaded.precision} on {loaded.device}, max_num_seqs {config.max_num_seqs}, "
        f"{loaded.kv_cache}",
    )  # fmt: skip

    closing = ExitStack()
    closing.callback(_close, llm)

    def prepare(loop: EngineLoop) -> None:
        from headway.cli.commands.profile import model_work
        from headway.lab.doctor import live as live_doctor
        from headway.lab.film import live
        from headway.observe import server_metrics as metrics
        from headway.observe import spans
        from headway.server import health

        live_doctor.install(loop, metrics.ServerMetrics(loop, info.model_name), model_work(llm))
        health.Watchdog(loop, serving.watchdog)
        live.install(loop)
        loop.begin = partial(_use_device, llm, model.threads)
        if serving.spans:
            closing.callback(spans.install(loop, info.model_name))

    return ServedEngine(
        engine=llm.engine, model_info=info, limits=serving.limits(), prepare=prepare,
        close=closing.close,
    )  # fmt: skip


def make_app(settings: Settings, patience: float, engine: AsyncEngine, info: ModelInfo) -> Any:
    """The ASGI application over an engine in this or another process."""
    from headway.server import doctor, lab, live
    from headway.server.app import create_app
    from headway.server.context import Context
    from headway.server.health import watch
    from headway.server.http.middleware import AccessLogMiddleware, TraceContextMiddleware

    context = Context(
        engine=engine, input_processor=info.input_processor, model_name=info.model_name,
        max_model_len=info.max_model_len, settings=settings, health=watch(engine, patience),
        tool_call_parser=info.tool_call_parser, fingerprint=info.fingerprint,
    )  # fmt: skip
    routers = [live.router(context), lab.router(context), doctor.router(context)]
    return TraceContextMiddleware(AccessLogMiddleware(create_app(context, routers)))


def read_template(path: Path) -> str:
    """The chat template in a file; ConfigError if it cannot be read or is not a Jinja template."""
    from headway.text.chat_template import check_template

    try:
        template = path.read_text(encoding="utf-8")
        check_template(template)
    except (OSError, UnicodeDecodeError, ModelError) as error:
        raise ConfigError(f"--chat-template {path} cannot be used: {error}") from error
    return template


def _use_device(llm: LLM, threads: int | None) -> None:
    """Set device and threads of the engine's thread, which is not the one that loaded the model."""
    from headway.model.devices import use_device
    from headway.model.precision import use_threads

    use_device(llm.loaded.device)
    if llm.loaded.ranks is not None:
        threads = llm.loaded.ranks.spec.threads
    if threads is not None:
        use_threads(threads)


def _close(llm: LLM) -> None:
    try:
        llm.close()
    except OSError as error:  # for example a full disk
        log.warning("the trace file is incomplete: %s", error)


def _short(model: str) -> str:
    """The name of a file or folder without its path; any other name unchanged."""
    with suppress(OSError):
        if Path(model).exists():
            return Path(model).resolve().name
    return model
