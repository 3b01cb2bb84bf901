"""Composes a server: the model, metrics, spans, doctor, lab and health around an engine, and the app.

`headway serve` and the replicas of a fleet use it. The engine and the app may be in different
processes, so `ServerOptions` and `ModelInfo` can be pickled, and each function imports what it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway import __version__
from headway.engine.async_engine import AsyncEngine
from headway.engine.loop import EngineLoop
from headway.engine.queue_limits import QueueLimits
from headway.observe import spans
from headway.options import EngineOptions
from headway.server.context import reasoning_parser
from headway.server.process.log_setup import LogFormat, setup
from headway.server.process.serve import ServedEngine, ServerFactory
from headway.server.settings import Settings

if TYPE_CHECKING:  # an API worker needs no torch
    from headway.engine.input_processor import InputProcessor
    from headway.llm import LLM

Load = Callable[[EngineOptions], "LLM"]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a server consists of."""

    engine: EngineOptions
    settings: Settings = field(default_factory=Settings)
    limits: QueueLimits = field(default_factory=QueueLimits)
    served_model_name: str | None = None  # None: the model's name without its path
    spans: bool = False
    grace: float = 30.0  # seconds for open requests to finish after a stop signal
    log_format: LogFormat = "human"
    log_level: str = "info"


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What the API servers need to know about the model, and its description for the console."""

    input_processor: InputProcessor
    model_name: str
    max_model_len: int
    preset: str
    execution: str  # precision, device and type of the KV cache
    description: str  # of the model and its execution

    @property
    def identity(self) -> str:
        """What the tokens of a request depend on; equal for all replicas of a fleet."""
        return f"{self.model_name} ({self.execution}, max_model_len {self.max_model_len})"

    @property
    def fingerprint(self) -> str:
        """The system_fingerprint: depends on version, model and execution."""
        text = f"{__version__} {self.model_name} {self.description}"
        return f"fp_{sha256(text.encode()).hexdigest()[:12]}"


def server_factory(options: ServerOptions, load: Load) -> ServerFactory:
    """What makes the engine, by loading a model, and the app, in this process or in others.

    ConfigError if spans are to be exported and OpenTelemetry is not installed.
    """
    if options.spans:
        spans.check_installed()
    return ServerFactory(
        make_engine=partial(make_engine, options, load), make_app=partial(make_app, options.settings),
        setup=partial(setup, options.log_format, options.log_level), grace=options.grace,
        settings=options.settings,
    )  # fmt: skip


def make_engine(options: ServerOptions, load: Load) -> ServedEngine:
    """Load the model, with its metrics and watchdog."""
    llm = load(options.engine)
    reasoning_parser(llm.input_processor, options.settings)  # a wrong one fails before serving
    llm.executor.sampler.grammars.matchers.warm_up()  # the first use would delay all streams
    config, loaded = llm.config, llm.loaded
    info = ModelInfo(
        input_processor=llm.input_processor,
        model_name=options.served_model_name or _short(options.engine.model),
        max_model_len=config.max_model_len, preset=options.engine.preset,
        execution=loaded.execution,
        description=f"{loaded.precision} on {loaded.device}, max_num_seqs {config.max_num_seqs}, "
        f"{loaded.kv_cache}",
    )  # fmt: skip
    closing = ExitStack()
    closing.callback(_close, llm)

    def prepare(loop: EngineLoop) -> None:
        from headway.lab.doctor import live as live_doctor
        from headway.lab.real.profiling import model_work
        from headway.lab.recording import live
        from headway.observe.server_metrics import ServerMetrics
        from headway.server.health import Watchdog

        metrics = ServerMetrics(loop, info.model_name)
        live_doctor.install(loop, metrics, model_work(llm))
        Watchdog(loop, options.settings.watchdog)
        live.install(loop)
        loop.on_begin.append(partial(_use_device, llm, options.engine.threads))
        if loaded.ranks is not None:
            loaded.ranks.watch.report_to(loop.fail)
        if options.spans:
            closing.callback(spans.install(loop, info.model_name))

    return ServedEngine(
        engine=llm.engine, model_info=info, limits=options.limits, prepare=prepare,
        close=closing.close,
    )  # fmt: skip


def make_app(settings: Settings, engine: AsyncEngine, info: ModelInfo) -> Any:
    """The ASGI application over an engine in this or another process."""
    from headway.server import doctor, lab, live
    from headway.server.app import create_app
    from headway.server.context import Context
    from headway.server.health import watch
    from headway.server.http.middleware import RequestContextMiddleware

    context = Context(
        engine=engine, input_processor=info.input_processor, model_name=info.model_name,
        max_model_len=info.max_model_len, settings=settings,
        health=watch(engine, settings.watchdog), fingerprint=info.fingerprint,
    )  # fmt: skip
    routers = [live.router(context), lab.router(context), doctor.router(context)]
    return RequestContextMiddleware(create_app(context, routers))


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
