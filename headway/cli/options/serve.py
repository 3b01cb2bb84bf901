"""The options of `headway serve`, and the server's settings and limits that they describe."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checks import one_of
from headway.cli.options.common import option
from headway.cli.options.model import uses_gpu
from headway.engine.queue_limits import QueueLimits
from headway.errors import ConfigError
from headway.server.toolcalls.formats import PARSERS
from headway.text.split import REASONING_PARSERS

if TYPE_CHECKING:
    from headway.options import EngineOptions
    from headway.server.serving import ServerOptions

_server, _limit, _logs = (partial(option, panel=name) for name in ("Server", "Limits", "Logs"))
NONE = "no limit"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Address, access, limits and logging of the server."""

    host: str = _server(
        "127.0.0.1", "Address to listen on; 0.0.0.0 allows connections from other machines."
    )
    port: int = _server(8000, "Port to listen on; 0 chooses a free one.", min=0, max=65535)
    served_model_name: str | None = _server(None, "Model name in the API.", show_default="as given")
    tool_call_parser: str = _server(
        "auto",
        f"Format of tool calls: {', '.join(PARSERS)}. Unless it is auto, the system message "
        "describes the tools if the chat template does not.",
    )
    reasoning_parser: str | None = _server(
        None,
        f"Parser that separates reasoning from the answer: {', '.join(REASONING_PARSERS)}. "
        "auto detects it by the model's tokens and chat template.",
        show_default="gpt_oss if the model has its tokens, else none",
    )
    api_server_count: int = _server(1, "Number of processes that handle HTTP requests.", min=1)
    engine_process: bool | None = _server(
        None,
        "Run the engine in a separate process.",
        "--engine-process/--no-engine-process",
        show_default="on a GPU or with several API servers",
    )
    api_key: list[str] | None = _server(
        None, "API key that clients must send. Also HEADWAY_API_KEY. May be repeated."
    )
    api_key_file: Path | None = _server(None, "File with API keys, one per line.")
    allowed_origins: list[str] | None = _server(
        None,
        "Origin of web pages that may use the API (CORS). May be repeated.",
        show_default="none",
    )
    allowed_host: list[str] | None = _server(
        None,
        "Accepted Host header; '*' accepts any. May be repeated.",
        show_default="local names on a loopback address without API key, otherwise any",
    )
    grace: float = _server(
        30.0, "Seconds that open requests get to finish after SIGTERM or Ctrl-C.", min=0.0
    )
    watchdog: float = _server(
        30.0,
        "Fail /health if requests are pending and no step ends for this many seconds.",
        min=0.1,
    )
    metrics_prefix: str = _server(
        "headway", "Metric name prefix. Use 'vllm' for existing vLLM dashboards."
    )
    disable_additional_properties: bool = _server(
        False,
        "Treat additionalProperties of JSON schemas as false where a schema does not set it.",
        "--disable-additional-properties",
    )
    spans: bool = _server(
        False, "Export OpenTelemetry spans, configured by OTEL_* variables.", "--spans"
    )
    max_waiting: int = _limit(
        1024, "Maximum number of waiting requests; further requests get a 429.", min=1
    )
    max_waiting_tokens: int = _limit(
        1 << 20, "Maximum number of waiting prompt tokens; further requests get a 429.", min=1
    )
    max_per_client: int | None = _limit(
        None,
        "Maximum number of open requests per `user`. Requests without `user` count as one client.",
        show_default=NONE,
        min=1,
    )
    timeout: float | None = _limit(
        None,
        "Maximum duration of a request after its body has arrived, in seconds.",
        show_default=NONE,
        min=0.001,
    )
    stall_timeout: float = _limit(
        60.0, "Disconnect a client that reads nothing for this many seconds.", min=0.001
    )
    timeout_head: float = _limit(10.0, "Seconds for the headers of a request to arrive.", min=0.001)
    timeout_keep_alive: float = _limit(
        75.0, "Seconds until an idle connection is closed.", min=0.001
    )
    max_connections: int | None = _limit(
        None,
        "Maximum number of connections per API server; more get a 503.",
        show_default="derived from the limit of open files",
        min=1,
    )
    max_connections_per_address: int | None = _limit(
        None, "Maximum number of connections per IP address.", show_default=NONE, min=1
    )
    max_body: int = _limit(16 << 20, "Maximum size of a request body, in bytes.", min=1)
    log_format: str = _logs("human", "Log format: human or json.")
    log_level: str = _logs("info", "Log level: debug, info, warning or error.")

    def __post_init__(self) -> None:
        if self.engine_process is False and self.api_server_count > 1:
            raise ConfigError(
                f"--api-server-count {self.api_server_count} needs the engine in a separate process; "
                "remove --no-engine-process"
            )
        one_of("--log-format", self.log_format, ("human", "json"))
        one_of("--tool-call-parser", self.tool_call_parser, PARSERS)
        if self.reasoning_parser is not None:
            one_of("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS)
        one_of("--log-level", self.log_level, ("debug", "info", "warning", "error"))

    def has_engine_process(self, device: str) -> bool:
        """Whether the engine runs in a separate process.

        By default it does on a GPU, where HTTP handling would delay the short steps.
        """
        if self.engine_process is not None or self.api_server_count > 1:
            return self.engine_process or self.api_server_count > 1
        return uses_gpu(device)

    def options(self, engine: EngineOptions) -> ServerOptions:
        """The options of the server; ConfigError for API keys that cannot be read or sent."""
        from headway.server.http.origins import default_allowed_hosts
        from headway.server.serving import ServerOptions
        from headway.server.settings import Settings, read_api_keys

        keys = (*(self.api_key or ()), *read_api_keys(self.api_key_file))
        hosts = default_allowed_hosts(self.host, has_key=bool(keys))
        settings = Settings(
            request_timeout=self.timeout, stall_timeout=self.stall_timeout,
            head_timeout=self.timeout_head, keep_alive_timeout=self.timeout_keep_alive,
            watchdog=self.watchdog, max_connections=self.max_connections,
            max_connections_per_address=self.max_connections_per_address,
            max_body_bytes=self.max_body, metrics_prefix=self.metrics_prefix,
            tool_call_parser=self.tool_call_parser, reasoning_parser=self.reasoning_parser,
            disable_additional_properties=self.disable_additional_properties,
            allowed_origins=tuple(self.allowed_origins or ()),
            allowed_hosts=tuple(self.allowed_host or hosts), api_keys=keys,
        )  # fmt: skip
        limits = QueueLimits(
            max_waiting=self.max_waiting, max_waiting_tokens=self.max_waiting_tokens,
            max_per_client=self.max_per_client,
        )  # fmt: skip
        return ServerOptions(
            engine=engine, settings=settings, limits=limits, spans=self.spans, grace=self.grace,
            served_model_name=self.served_model_name, log_format=self.log_format,  # type: ignore[arg-type]  # checked
            log_level=self.log_level,
        )  # fmt: skip
