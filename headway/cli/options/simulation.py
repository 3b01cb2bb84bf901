"""Options of the commands that simulate: a profile, a scheduler, and which requests of a workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Annotated, Any

from headway.cli.options import common as options
from headway.config import Config
from headway.lab.cost import Profile, load_profile
from headway.lab.planner.evaluate import Settings
from headway.lab.planner.workload import Workload
from headway.lab.recording.spec import DEFAULT_PROFILE
from headway.lab.simulate import config_for
from headway.lab.workload.request import MAX_TOKENS
from headway.scheduler.policies.speculative_config import with_speculative_config
from headway.scheduler.policies.text import ANY

DEFAULT_WORKLOAD = (
    "requests=200,arrivals=poisson(10),prompt=lognormal(300,0.8),output=lognormal(250,0.7)"
)
_workload = partial(options.flag, panel="Workload")
WORKLOAD = (
    "Workload file (Azure .csv, Mooncake or Headway .jsonl, decision trace) or synthetic workload, "
    "e.g. 'arrivals=poisson(5),prompt=uniform(100,1024),output=lognormal(200,0.8)'."
)
PROFILE = "Name of a bundled profile, or a .json file."
FLAGS: options.Flags = {
    "profile": options.flag(PROFILE, "--profile"),
    "limit": _workload("Use only the first N requests."),
    "speed": _workload("Divide arrival times by this factor."),
    "allowed_tokens": _workload(
        "max_tokens of requests whose workload file has none. If it is larger than the "
        "real output, the scheduler does not know when a request ends.",
        show_default="the real output",
        min=1,
        max=MAX_TOKENS,
    ),
    "accept": _workload(
        "How often drafts are right, for a workload file that does not say: a probability, or "
        "'hist(0.3,0.2,0.5)' for 0, 1 and 2 right ones.",
        show_default="never",
    ),
    "preset": options.Preset,
    "async_scheduling": options.scheduler_flag(
        options.ASYNC_SCHEDULING, "--async-scheduling/--no-async-scheduling"
    ),
    **options.SCHEDULER_FLAGS,
}


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """A profile, a preset with changes, and how the requests of a workload are selected."""

    profile: str = DEFAULT_PROFILE
    limit: int | None = None
    speed: float = 1.0
    allowed_tokens: int | None = None
    accept: str | None = None
    preset: str = "headway"
    async_scheduling: bool = False
    changes: dict[str, str | int] = field(default_factory=dict)  # of the preset

    @classmethod
    def from_flags(cls, **given: Any) -> SimulationOptions:
        """The options of some of FLAGS; the scheduler's that are not None are the changes."""
        own = {each.name: given.pop(each.name) for each in fields(cls) if each.name in given}
        config = given.pop("speculative_config", None)
        changes = {name: value for name, value in given.items() if value is not None}
        return cls(**own, changes=with_speculative_config(changes, config))

    @cached_property
    def machine(self) -> Profile:
        """The profile; ConfigError or FormatError if it is unknown or invalid."""
        return load_profile(self.profile)

    @property
    def settings(self) -> Settings:
        """The preset and its changes, as the planner has them."""
        return {"preset": self.preset, **self.changes}

    def config(self, preset: str | None = None, **more: Any) -> Config:
        """This preset, or another one, with the changes and more."""
        return make_config(preset or self.preset, self.machine, {**self.changes, **more})

    def workload(self, text: str) -> Workload:
        """A file or a synthetic workload, and the selected requests of it."""
        return Workload(
            text=text, limit=self.limit, speed=self.speed, allowed_tokens=self.allowed_tokens,
            accept=self.accept,
        )  # fmt: skip


SimulationFlags = Annotated[SimulationOptions, FLAGS]


def without(*names: str) -> options.Flags:
    """The flags without some of them."""
    return {name: flag for name, flag in FLAGS.items() if name not in names}


def make_config(name: str, profile: Profile, changes: Mapping[str, object]) -> Config:
    """A preset with the changes of the command line; policies may be in the working directory."""
    options.import_from_working_directory()
    return config_for(name, profile, changes, ANY)
