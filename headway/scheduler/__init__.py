"""What runs next: one scheduler, three verbs, six slots."""

from headway.scheduler.presets import PRESETS, preset
from headway.scheduler.scheduler import Scheduler

__all__ = ["PRESETS", "Scheduler", "preset"]
