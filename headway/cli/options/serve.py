"""The options of `headway serve`, and how they become the server's settings and limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.engine.loop import Limits
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.server.settings import ConnectionSettings, Settings

SERVER, LIMITS, LOGS = "Server", "Limits", "Logs"
NONE = "no limit"
PARSERS = ("auto", "hermes", "qwen", "llama3", "mistral")


def _server(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=SERVER, **more)


def _limit(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=LIMITS, **more)


def _logs(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=LOGS, **more)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where it listens, who may ask, how much may wait, what is logged."""

    host: Annotated[str, _server("Address; 0.0.0.0 lets other machines in.")] = "127.0.0.1"
    port: Annotated[int, _server("0 takes any that is free.", min=0, max=65535)] = 8000
    served_model_name: Annotated[
        str | None, _server("What clients call the model.", show_default="as it was given")
    ] = None
    chat_template: Annotated[
        Path | None,
        _server("File with a Jinja chat template to use.", show_default="the model's own"),
    ] = None
    tool_call_parser: Annotated[
        str,
        _server(
            f"Format of tool calls: {', '.join(PARSERS)}. Any but auto also describes tools in the "
            "system message if the chat template has no place for them."
        ),
    ] = "auto"
    api_workers: Annotated[int, _server("Processes that answer HTTP.", min=1)] = 1
    engine_process: Annotated[
        bool | None,
        _server(
            "The engine in a process of its own.", "--engine-process/--no-engine-process",
            show_default="on a GPU, or with several workers",
        ),
    ] = None  # fmt: skip
    api_key: Annotated[
        list[str] | None,
        _server("A key that clients must send. Also HEADWAY_API_KEY. May be repeated."),
    ] = None
    api_key_file: Annotated[Path | None, _server("Keys, one in each line.")] = None
    cors_origin: Annotated[
        list[str] | None,
        _server("A web page's origin that may call it. May be repeated.", show_default="none"),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        _server(
            "Accepted in the Host header; '*' accepts any. May be repeated.",
            show_default="names of this machine on a loopback address without a key, else any",
        ),
    ] = None
    grace: Annotated[
        float, _server("Seconds for open requests after a signal to stop.", min=0.0)
    ] = 30.0
    watchdog: Annotated[
        float, _server("Seconds without progress, while work waits, until /health fails.", min=0.1)
    ] = 30.0
    metrics_prefix: Annotated[
        str, _server("Of the metrics' names; vllm makes its dashboards work.")
    ] = "headway"
    disable_additional_properties: Annotated[
        bool,
        _server(
            "Allow objects of a JSON schema only the properties that it names, unless it says "
            "otherwise.",
            "--disable-additional-properties",
        ),
    ] = False
    spans: Annotated[
        bool, _server("Export OpenTelemetry spans of every request, as OTEL_* say.", "--spans")
    ] = False
    max_waiting: Annotated[int, _limit("Requests that may wait; more get a 429.", min=1)] = 1024
    max_waiting_tokens: Annotated[int, _limit("Tokens that may wait.", min=1)] = 1 << 20
    max_per_client: Annotated[
        int | None, _limit("Open requests of one `user`.", show_default=NONE, min=1)
    ] = None
    timeout: Annotated[
        float | None, _limit("Seconds for a whole request.", show_default=NONE, min=0.001)
    ] = None
    stall_timeout: Annotated[
        float, _limit("Seconds for a client to take what it is sent.", min=0.001)
    ] = 60.0
    timeout_head: Annotated[
        float, _limit("Seconds for the head of a request to arrive.", min=0.001)
    ] = 10.0
    timeout_keep_alive: Annotated[
        float, _limit("Seconds for which an idle connection is kept.", min=0.001)
    ] = 75.0
    max_connections: Annotated[
        int | None,
        _limit(
            "Connections of one API process; more get a 503.",
            show_default="from the limit of open files", min=1,
        ),
    ] = None  # fmt: skip
    max_connections_per_address: Annotated[
        int | None, _limit("Connections from one IP address.", show_default=NONE, min=1)
    ] = None
    max_body: Annotated[int, _limit("Bytes of a request's body.", min=1)] = 16 << 20
    log_format: Annotated[str, _logs("human or json.")] = "human"
    log_level: Annotated[str, _logs("debug, info, warning or error.")] = "info"

    def __post_init__(self) -> None:
        if self.engine_process is False and self.api_workers > 1:
            raise ConfigError(
                f"--api-workers {self.api_workers} needs the engine in a process of its own; leave "
                "out --no-engine-process"
            )
        for name, known in (
            ("log_format", ("human", "json")),
            ("log_level", ("debug", "info", "warning", "error")),
            ("tool_call_parser", PARSERS),
        ):
            if getattr(self, name) not in known:
                wanted = f"{', '.join(known)}, not {getattr(self, name)!r}"
                raise ConfigError(f"--{name.replace('_', '-')} must be one of {wanted}")

    def has_engine_process(self, device: str) -> bool:
        """Unless told otherwise: on a GPU, whose short steps would wait for whoever answers HTTP."""
        if self.engine_process is not None or self.api_workers > 1:
            return self.engine_process or self.api_workers > 1
        if device != "auto":
            return device != "cpu"
        from headway.model.devices import why_no_cuda

        return why_no_cuda() is None

    def limits(self) -> Limits:
        return Limits(
            max_waiting=self.max_waiting, max_waiting_tokens=self.max_waiting_tokens,
            max_per_client=self.max_per_client,
        )  # fmt: skip

    def settings(self) -> Settings:
        """What the endpoints go by; ConfigError for keys that cannot be read or sent."""
        from headway.server.http.origins import default_allowed_hosts
        from headway.server.settings import Settings, read_api_keys

        keys = (*(self.api_key or ()), *read_api_keys(self.api_key_file))
        hosts = default_allowed_hosts(self.host, has_key=bool(keys))
        return Settings(
            request_timeout=self.timeout, stall_timeout=self.stall_timeout,
            max_body_bytes=self.max_body, metrics_prefix=self.metrics_prefix,
            allowed_origins=tuple(self.cors_origin or ()), api_keys=keys,
            allowed_hosts=tuple(self.allowed_host or hosts),
            disable_additional_properties=self.disable_additional_properties,
        )  # fmt: skip

    def connections(self) -> ConnectionSettings:
        """Limits and timeouts of connections."""
        from headway.server.settings import ConnectionSettings

        return ConnectionSettings(
            head_timeout=self.timeout_head, keep_alive_timeout=self.timeout_keep_alive,
            stall_timeout=self.stall_timeout, max_connections=self.max_connections,
            max_connections_per_address=self.max_connections_per_address,
        )  # fmt: skip
