"""The scheduler, its policies and the presets."""

from headway.scheduler.policies.presets import PRESETS, preset
from headway.scheduler.scheduler import Scheduler

__all__ = ["PRESETS", "Scheduler", "preset"]
