"""The description of a run that the lab shows: requests, settings, and edits in the middle.

A run is a pure function of its description, so going back, adding a request or changing a policy at
step 17 all mean: run it again, with one more edit.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import MISSING, dataclass, field, fields
from math import inf
from typing import Any

from headway.config import Config
from headway.errors import ConfigError, shorten
from headway.lab.cost import Profile
from headway.lab.simulate import config_for
from headway.lab.workload.request import TokenSpace, WorkloadRequest, join
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler.policies.presets import DEFAULT
from headway.scheduler.policies.text import READY_MADE

MAX_REQUESTS = 20_000
MAX_NUMBER = 1_000_000  # tokens of a prompt or output of one described request
DEFAULT_PROFILE = "llama3.1-8b-a100-80gb"
REQUEST_FIELDS = (
    "id", "arrival", "prompt", "prefix", "output", "max_tokens", "priority", "client", "n",
)  # fmt: skip
CHANGES = {"add": dict, "abort": str, "set": dict}  # of an edit


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A change before the plan of `step` is made; exactly one of the others is given."""

    step: int
    add: dict[str, object] | None = None
    abort: str | None = None
    set: dict[str, object] | None = None


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What to run. `workload` is in the simulator's language; `requests` lists single requests."""

    workload: str = ""
    requests: list[dict[str, object]] = field(default_factory=list)
    trace: str = ""
    preset: str = DEFAULT
    set: dict[str, object] = field(default_factory=dict)
    profile: str = DEFAULT_PROFILE
    async_scheduling: bool = False
    edits: list[Edit] = field(default_factory=list)
    story: str = ""


def read_spec(data: object) -> RunSpec:
    """The description in JSON; ConfigError names the field that is wrong."""
    values = _known("the run", data, [each.name for each in fields(RunSpec)])
    for each in fields(RunSpec):
        kind: Any = type(each.default) if each.default is not MISSING else each.default_factory
        if not isinstance(values.get(each.name, kind()), kind):
            wrong = shorten(values[each.name])
            raise ConfigError(f"{each.name} must be a {kind.__name__}, not {wrong}")
    spec = RunSpec(**{**values, "edits": list(map(_edit, values.get("edits", [])))})
    if sum(map(bool, (spec.workload, spec.requests, spec.trace))) != 1:
        raise ConfigError("give one of workload, requests and trace")
    return spec


def _edit(data: object) -> Edit:
    values = _known("an edit", data, ["step", *CHANGES])
    if "step" not in values:
        raise ConfigError("an edit needs step")
    step = values["step"]
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ConfigError(f"step of an edit must be a whole number, not {shorten(step)}")
    given = [name for name in CHANGES if values.get(name) is not None]
    for name in given:
        if not isinstance(values[name], CHANGES[name]):
            raise ConfigError(f"{name} of an edit must be a {CHANGES[name].__name__}")
    if len(given) != 1:
        raise ConfigError("an edit needs one of add, abort and set")
    return Edit(**values)


def _known(what: str, data: object, names: list[str]) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(f"{what} must be an object, not {shorten(data)}")
    if unknown := [key for key in data if key not in names]:
        raise ConfigError(f"{what}: unknown field {unknown[0]!r}; known: {', '.join(names)}")
    return data


def config_of(
    spec: RunSpec,
    profile: Profile,
    changes: Mapping[str, Any] | None = None,
    own: Container[str] = READY_MADE,
) -> Config:
    """The config of a run; blocks and host blocks as the profile has them, unless they are set.

    `own` has the `module:function` that may be imported.
    """
    return config_for(spec.preset, profile, {**spec.set, **(changes or {})}, own)


def requests_of(spec: RunSpec, space: TokenSpace) -> list[WorkloadRequest]:
    """The requests of a run in order of arrival; ConfigError if there are too many."""
    if spec.workload:
        synthetic = parse_synthetic(spec.workload)
        _check_number(synthetic.requests)
        return synthetic.generate()
    listed: list[object] = []
    for group in spec.requests:
        listed += _copies(group)
        _check_number(len(listed))
    requests = [described(each, space, str(place)) for place, each in enumerate(listed)]
    return sorted(requests, key=lambda request: request.arrival)


def _copies(data: object) -> list[object]:
    """A listed request, or `count` copies of it: ids with numbers, `every` seconds apart."""
    if not isinstance(data, dict) or not {"count", "every"} & data.keys():
        return [data]
    one = {key: value for key, value in data.items() if key not in ("count", "every")}
    id = str(data.get("id", ""))
    count = _number(data, id, "count", 1)
    arrival, every = _seconds(data, id, "arrival"), _seconds(data, id, "every")
    _check_number(count)
    return [
        {**one, "id": f"{id}{place}", "arrival": round(arrival + every * place, 9)}
        for place in range(count)
    ]


def _check_number(number: int) -> None:
    if number > MAX_REQUESTS:
        raise ConfigError(
            f"the lab shows at most {MAX_REQUESTS} requests, not {number}; "
            "use `headway simulate` for larger workloads"
        )


def described(data: object, space: TokenSpace, default_id: str) -> WorkloadRequest:
    """One request: prompt and output in tokens; `prefix` is [name, tokens] of a shared prefix."""
    values = _known("a request", data, list(REQUEST_FIELDS))
    id = str(values.get("id", default_id))
    prompt, output = _number(values, id, "prompt", 16), _number(values, id, "output", 16)
    max_tokens = _number(values, id, "max_tokens", output)
    arrival, shared = _seconds(values, id, "arrival"), _prefix(values.get("prefix"), id, space)
    return WorkloadRequest(
        id=id, arrival=arrival, pieces=join([*shared, space.take(prompt)]),
        num_output=min(output, max_tokens), max_tokens=max_tokens, client=str(values.get("client", "")),
        priority=_number(values, id, "priority", 0, -MAX_NUMBER), n=_number(values, id, "n", 1),
    )  # fmt: skip


def _prefix(prefix: Any, id: str, space: TokenSpace) -> list[Any]:
    if not prefix:
        return []
    if not isinstance(prefix, list) or len(prefix) != 2:
        raise ConfigError(f"request {id}: prefix must be [name, tokens], not {shorten(prefix)}")
    return space.shared(str(prefix[0]), _number({"prefix": prefix[1]}, id, "prefix", 1))


def _seconds(data: Mapping[str, Any], id: str, name: str) -> float:
    value = data.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        raise ConfigError(f"request {id}: {name} must be at least 0 seconds, not {shorten(value)}")
    return float(value)


def _number(data: Mapping[str, Any], id: str, name: str, default: int, low: int = 1) -> int:
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_NUMBER:
        raise ConfigError(
            f"request {id}: {name} must be a whole number from {low} to {MAX_NUMBER}, "
            f"not {shorten(value)}"
        )
    return value
