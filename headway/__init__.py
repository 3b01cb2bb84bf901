"""Headway: an LLM inference engine built around its scheduler.

`LLM` and `SamplingParams` are the offline API, `AsyncEngine` the one for asyncio. The other names
serve programs that drive the scheduler themselves; their parameters are `headway.request.RequestParams`.
"""

from typing import TYPE_CHECKING, Any

from headway.config import Config, SchedulerView
from headway.engine.async_engine import AsyncEngine
from headway.engine.clock import RealClock, VirtualClock
from headway.engine.engine import Engine
from headway.engine.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
from headway.events import Completed
from headway.grammar.grammar import Grammar
from headway.plan import Plan, StepResult
from headway.request import Request, RequestState
from headway.sampling_params import SamplingParams, StructuredOutputsParams
from headway.scheduler import PRESETS, Scheduler, preset

if TYPE_CHECKING:
    from headway.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "PRESETS",
    "AsyncEngine",
    "Completed",
    "CompletionOutput",
    "Config",
    "EmbeddingRequestOutput",
    "Engine",
    "Grammar",
    "Plan",
    "RealClock",
    "Request",
    "RequestOutput",
    "RequestState",
    "SamplingParams",
    "Scheduler",
    "SchedulerView",
    "StepResult",
    "StructuredOutputsParams",
    "VirtualClock",
    "preset",
]


def __getattr__(name: str) -> Any:
    """Import `LLM` on first use, because it needs torch."""
    if name == "LLM":
        from headway.llm import LLM

        return LLM
    raise AttributeError(f"module 'headway' has no attribute {name!r}")
