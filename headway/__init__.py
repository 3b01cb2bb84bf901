"""Headway: an LLM inference engine built around its scheduler."""

from typing import TYPE_CHECKING, Any

from headway.config import Config, SchedulerView
from headway.engine.async_engine import AsyncEngine
from headway.engine.clock import RealClock, VirtualClock
from headway.engine.engine import Engine
from headway.grammar.grammar import Grammar
from headway.plan import Plan, StepReport, StepResult
from headway.request import Params, Request, State
from headway.sampling_params import SamplingParams
from headway.scheduler import PRESETS, Scheduler, preset

if TYPE_CHECKING:
    from headway.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "PRESETS",
    "AsyncEngine",
    "Config",
    "Engine",
    "Grammar",
    "Params",
    "Plan",
    "RealClock",
    "Request",
    "SamplingParams",
    "Scheduler",
    "SchedulerView",
    "State",
    "StepReport",
    "StepResult",
    "VirtualClock",
    "preset",
]


def __getattr__(name: str) -> Any:
    """`LLM` needs torch, so it is imported when it is asked for."""
    if name == "LLM":
        from headway.llm import LLM

        return LLM
    raise AttributeError(f"module 'headway' has no attribute {name!r}")
