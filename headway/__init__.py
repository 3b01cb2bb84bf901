"""Headway: an LLM inference engine built around its scheduler."""

from headway.config import Config, World
from headway.engine.clock import RealClock, VirtualClock
from headway.engine.engine import Engine
from headway.plan import Plan, StepReport, StepResult
from headway.request import Params, Request, State
from headway.scheduler import PRESETS, Scheduler, preset

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "Config",
    "Engine",
    "Params",
    "Plan",
    "RealClock",
    "Request",
    "Scheduler",
    "State",
    "StepReport",
    "StepResult",
    "VirtualClock",
    "World",
    "preset",
]
