"""What every endpoint is given: the way to the engine, the model's tokenizer, the settings."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from headway.engine.async_engine import AsyncEngine
from headway.engine.input_processor import InputProcessor
from headway.server.settings import Settings

Health = Callable[[AsyncEngine], Awaitable[str | None]]  # what is wrong; None: nothing


async def is_there(engine: AsyncEngine) -> str | None:
    """The least one can ask of an engine: that it has not ended."""
    return None if engine.gone is None else f"the engine has ended: {engine.gone}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One model behind one server."""

    engine: AsyncEngine
    asking: InputProcessor
    model_name: str
    max_model_len: int  # tokens of a prompt and its answer together
    settings: Settings = field(default_factory=Settings)
    health: Health = is_there
    tool_call_parser: str = "auto"
    fingerprint: str = ""  # of version, model and settings; clients see it change with them
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds
