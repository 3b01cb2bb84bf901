"""The state shared by all endpoints: the engine, the model's input processor and the settings."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from headway.engine.async_engine import AsyncEngine
from headway.engine.input_processor import InputProcessor
from headway.server.generation.ignored_fields import IgnoredFields
from headway.server.settings import Settings
from headway.server.toolcalls.formats import HARMONY
from headway.text.reasoning import Reasoning, reasoning_of

HealthCheck = Callable[[AsyncEngine], Awaitable[str | None]]  # a problem; None: healthy


async def check_engine_running(engine: AsyncEngine) -> str | None:
    """Report a problem only if the engine has stopped."""
    return None if engine.stop_reason is None else f"the engine has stopped: {engine.stop_reason}"


def reasoning_parser(processor: InputProcessor, settings: Settings) -> Reasoning | None:
    """How the model writes its reasoning; ConfigError if the parser is not one for the model."""
    tokenizer, parser = processor.tokenizer, settings.reasoning_parser
    if settings.tool_call_parser == HARMONY.name:  # one parser finds both
        parser = HARMONY.name
    return None if tokenizer is None else reasoning_of(tokenizer, parser)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One model behind one server."""

    engine: AsyncEngine
    input_processor: InputProcessor
    model_name: str
    max_model_len: int  # tokens of a prompt and its output together
    settings: Settings = field(default_factory=Settings)
    health: HealthCheck = check_engine_running
    fingerprint: str = ""  # changes with the version, the model and its settings
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds

    @property
    def reasoning(self) -> Reasoning | None:
        """How the model writes its reasoning; None: it is a part of the text."""
        return reasoning_parser(self.input_processor, self.settings)

    @property
    def tool_call_parser(self) -> str:
        """The name of the format of tool calls, or auto."""
        reasoning = self.reasoning
        if reasoning is not None and reasoning.parser == HARMONY.name:
            return HARMONY.name  # its splitter finds the calls, too
        return self.settings.tool_call_parser
