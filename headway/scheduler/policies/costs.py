"""The numbers of policies that estimate the time of a step."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

from headway.checks import Checked, number
from headway.step_cost import UnitCosts

T = TypeVar("T", bound="StepCosts")


@dataclass(frozen=True, kw_only=True)
class StepCosts(Checked):
    """The cost of a step, in seconds, as in step_cost.UnitCosts.

    A simulation takes these numbers from its profile, a model that is loaded from a measurement. The
    defaults are for an 8B model on an A100.
    """

    weights: float = number(9.2e-3, 0)
    token: float = number(7.5e-5, 0)
    sample: float = number(5.6e-6, 0)
    read: float = number(8e-8, 0)
    pair: float = number(2.8e-9, 0)
    fixed: float = number(1.5e-3, 0)
    min_attention: float = number(3e-4, 0)
    overlap: float = number(1.0, 0, 1)
    exchange: float = number(0.0, 0)
    prompt: float = number(0.0, 0)
    experts: float = number(0.0, 0)
    unchosen: float = number(1.0, 0, 1)

    @cached_property
    def costs(self) -> UnitCosts:
        return UnitCosts(*(getattr(self, name) for name in UnitCosts._fields))

    @property
    def has_default_costs(self) -> bool:
        return all(getattr(self, f.name) == f.default for f in fields(StepCosts))

    def with_costs(self: T, costs: UnitCosts) -> T:
        return replace(self, **costs._asdict())
