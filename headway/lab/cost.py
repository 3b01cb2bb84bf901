"""The cost of a step: a roofline model of one language model on one machine.

The formula is in headway/step_cost.py; a profile gives it the work of a model and the speed of a
machine. Knows lengths and blocks, not tokens. Scheduling is `host_seconds`, which async scheduling
hides; it is not part of a step's time.

A profile is a JSON file in profiles/ or anywhere else, with exactly the fields of `Profile`, `Model`
and `Machine` below. A field with a default is optional.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from headway.checks import one_of, real_number, text, whole_number
from headway.errors import ConfigError, FormatError
from headway.lab.corrections import Corrections, factors
from headway.plan import Plan
from headway.scheduler.policies.costs import StepCosts
from headway.scheduler.policies.swap import swap_if_cheaper
from headway.step_cost import UnitCosts, work_of

FOLDER = Path(__file__).parent / "profiles"
T = TypeVar("T")
# Where the numbers of a profile come from, and the error to expect without a held-out run.
SOURCES = {
    "measured": "Calibrated on measurements of this machine, without a held-out run.",
    "data_sheet": "From data sheets, never measured on this machine: expect errors of 3 to 17%, as "
    "where such profiles were checked.",
    "carried": "Carried over from another card, never measured on this one: expect errors of up to "
    "40%.",
    "": "Of unknown origin: expect errors of up to 40%, or measure with `headway bench profile`.",
}
# Relative errors on a run that the profile was not fitted to.
HELD_OUT = {
    "median": "steps {:.1%} (median)",
    "p90": "steps {:.1%} (p90)",
    "total": "sum of all steps {:+.1%}",
    "simulated": "simulated duration {:+.1%}",
    "ttft": "simulated time to first token (p50) {:+.1%}",
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """The work of a model: bytes to read and operations to compute."""

    weight_bytes: float  # read by every forward pass; without experts
    kv_bytes: float  # keys and values of one token, all layers
    dense_flops: float  # per token, without attention and LM head: 2 x parameters that it uses
    attention_flops: float  # per query token and token that it attends to, all layers
    head_flops: float  # per sampled token
    max_model_len: int  # prompt and output together
    all_reduces: int = 0  # per forward pass of a tensor-parallel group: two for each layer
    all_reduce_bytes: float = 0.0  # per token and all-reduce: one hidden state
    expert_bytes: float = 0.0  # all experts; a pass reads those that its tokens use
    chosen_share: float = 0.0  # of the experts, for one token


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The speed of a machine with its software."""

    bandwidth: float  # device memory, bytes per second
    bandwidth_share: float  # fraction of it that kernels reach
    flops: float  # operations per second in the model's dtype
    flops_share: float  # fraction of it that kernels reach
    fixed_seconds: float  # per forward pass
    attention_seconds: float  # lower limit of a pass's attention, which is many small kernels
    host_seconds: float  # per plan: scheduling and bookkeeping
    copy_bandwidth: float  # between device and host, one way, bytes per second
    copy_seconds: float  # per batch of copies in one direction
    overlap: float = 1.0  # of reading and computing: 1 hides the shorter completely, 0 adds it
    num_devices: int = 1  # of a tensor-parallel group; the rates above are those of the group
    link_bandwidth: float = 0.0  # to other devices, per device and direction; 0: no link
    link_seconds: float = 0.0  # per all-reduce or transfer over the link
    prompt_seconds: float = 0.0  # per forward pass that computes prompts, besides fixed_seconds
    corrections: Corrections = ()  # measured time over that of the formula, by rows of a decode pass


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on a machine. Times are seconds."""

    name: str
    description: str
    kv_tokens: int  # capacity of the KV cache next to the weights
    model: Model
    machine: Machine
    source: str = ""  # one of SOURCES; "": not recorded
    held_out: dict[str, float] = field(default_factory=dict, hash=False)  # see HELD_OUT

    def accuracy(self) -> str:
        """One sentence: how far from the machine the times of this profile may be."""
        error = self.held_out
        if not error:
            return SOURCES[self.source]
        listed = ", ".join(text.format(error[k]) for k, text in HELD_OUT.items() if k in error)
        return f"Measured on this machine; error on a held-out run: {listed}."

    @cached_property
    def unit_costs(self) -> UnitCosts:
        model, machine = self.model, self.machine
        bandwidth = machine.bandwidth * machine.bandwidth_share
        flops = machine.flops * machine.flops_share
        return UnitCosts(
            weights=model.weight_bytes / bandwidth,
            token=model.dense_flops / flops,
            sample=model.head_flops / flops,
            read=model.kv_bytes / bandwidth,
            pair=model.attention_flops / flops,
            fixed=machine.fixed_seconds + model.all_reduces * machine.link_seconds,
            min_attention=machine.attention_seconds,
            overlap=machine.overlap,
            exchange=self._exchange_seconds(),
            prompt=machine.prompt_seconds,
            experts=model.expert_bytes / bandwidth,
            unchosen=1 - model.chosen_share,
        )

    def _exchange_seconds(self) -> float:
        """Time of one token in all all-reduces: each device sends 2 (n - 1) / n of the data."""
        model, machine = self.model, self.machine
        if not machine.link_bandwidth:
            return 0.0
        share = 2 * (machine.num_devices - 1) / machine.num_devices
        return model.all_reduces * model.all_reduce_bytes * share / machine.link_bandwidth

    def step_seconds(self, plan: Plan, block_size: int = 16) -> float:
        """Device time of a plan; 0 for a plan without work."""
        seconds = 0.0
        for copies in (plan.copies_out, plan.copies_in):
            if copies:
                seconds += self.copy_seconds(len(copies) * block_size)
        num_rows, context = len(plan.decodes), plan.decode_context
        if num_rows or plan.drafts or plan.chunks:
            seconds += self.pass_seconds(*work_of(plan))
        for _ in range(1, plan.num_steps if num_rows else 1):
            context += num_rows
            seconds += self.pass_seconds(num_rows, num_rows, context, context)
        return seconds

    def pass_seconds(self, tokens: int, samples: int, reads: int, pairs: float) -> float:
        """Time of a forward pass: tokens computed, sampled and read, and attended pairs."""
        seconds = self.unit_costs.seconds(tokens, samples, reads, pairs)
        if tokens > samples or not self.machine.corrections:
            return seconds
        if tokens not in self._factors:
            self._factors[tokens] = float(factors(self.machine.corrections, tokens))
        return seconds * self._factors[tokens]

    @cached_property
    def _factors(self) -> dict[int, float]:
        """The corrections so far, by rows."""
        return {}

    def prefill_seconds(self, num_tokens: int) -> float:
        """Time to compute a whole prompt in a step of its own."""
        return self.pass_seconds(num_tokens, 1, num_tokens, num_tokens * (num_tokens + 1) / 2)

    def copy_seconds(self, num_tokens: int) -> float:
        """Time to copy the keys and values of `num_tokens` tokens between device and host, one way."""
        machine = self.machine
        return machine.copy_seconds + num_tokens * self.model.kv_bytes / machine.copy_bandwidth

    def transfer_seconds(self, num_tokens: int) -> float:
        """Time to send keys and values to another replica: over the link, or else through hosts."""
        machine, num_bytes = self.machine, num_tokens * self.model.kv_bytes
        if not machine.link_bandwidth:
            return 2 * self.copy_seconds(num_tokens)
        return machine.link_seconds + num_bytes / (machine.link_bandwidth * machine.num_devices)

    def swap_if_cheaper(self) -> swap_if_cheaper:
        """The swap rule with this profile's times.

        A recomputed prompt shares its step with other requests, so the rule counts the time that it
        adds to a step, without the step's fixed time.
        """
        return swap_if_cheaper(
            copy=self.model.kv_bytes / self.machine.copy_bandwidth,
            compute=self.unit_costs.token + self.unit_costs.exchange,
            start=self.machine.copy_seconds,
            pair=self.unit_costs.pair,
        )

    def with_costs(self, rule: T) -> T:
        """The rule, with this profile's times if it needs times and has its default ones.

        Scheduling between steps counts as fixed time.
        """
        if not isinstance(rule, StepCosts) or not rule.has_default_costs:
            return rule
        fixed = self.unit_costs.fixed + self.machine.host_seconds
        return rule.with_costs(self.unit_costs._replace(fixed=fixed))

    def num_blocks(self, block_size: int) -> int:
        """Blocks that fit next to the weights."""
        return self.kv_tokens // block_size


def known_profiles() -> list[str]:
    """Names of the bundled profiles."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_profile(name_or_path: str | Path) -> Profile:
    """A bundled profile by name, or the profile in a .json file."""
    name = str(name_or_path)
    known = known_profiles()
    if name in known or Path(name).suffix == ".json":
        return _read(FOLDER / f"{name}.json" if name in known else Path(name))
    raise ConfigError(
        f"unknown profile {name!r}; known: {', '.join(known)}, or the path of a .json file"
    )


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile in the format of `load_profile`."""
    Path(path).write_text(json.dumps(as_json(profile), indent=2) + "\n", encoding="utf-8")


def as_json(part: Profile | Model | Machine) -> dict[str, Any]:
    """The fields of a profile file; optional fields that keep their default are left out."""
    values = {}
    for each in fields(part):
        value = getattr(part, each.name)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if default is MISSING or value != default:
            values[each.name] = as_json(value) if isinstance(value, Model | Machine) else value
    return values


def _read(path: Path) -> Profile:
    try:
        return _filled(Profile, json.loads(path.read_text(encoding="utf-8")), "")
    except OSError as error:
        raise FormatError(path, None, f"cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise FormatError(path, error.lineno, f"not JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise FormatError(path, None, "not UTF-8 text") from None
    except ValueError as error:
        raise FormatError(path, None, str(error)) from None


def _filled(kind: type[T], values: Any, where: str) -> T:
    """A dataclass from a JSON object; ValueError names the field that is missing or invalid."""
    if not isinstance(values, dict):
        raise ValueError(f"{where.rstrip('.') or 'a profile'} must be a JSON object")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for name, each in known.items():
        if name not in values and each.default is each.default_factory is MISSING:
            raise ValueError(f"missing field {where}{name}")
    for name in values:
        if name not in known:
            raise ValueError(f"unknown field {where}{name}; known: {', '.join(known)}")
    return kind(**{name: _value(name, value, where) for name, value in values.items()})


def _value(name: str, value: Any, where: str) -> Any:
    """A field's value as it is in the file, checked."""
    if name in PARTS:
        return _filled(PARTS[name], value, f"{name}.")
    shown = where + name
    if name in CHECKS:
        return CHECKS[name](shown, value)
    if name.endswith("_seconds") or name in OPTIONAL_RATES:
        real_number(shown, value, low=0, high=1 if name in SHARES else None)
    else:
        real_number(shown, value, above=0, high=1 if name.endswith("_share") else None)
    return value


def _held_out(_: str, values: Any) -> dict[str, float]:
    """The errors of a held-out run, each a number by its name."""
    if not isinstance(values, dict):
        raise ValueError("held_out must be a JSON object")
    for name, value in values.items():
        real_number(f"held_out.{one_of('an error of held_out', name, HELD_OUT)}", value, low=-1)
    return dict(values)


def _corrections(shown: str, values: Any) -> Corrections:
    """Pairs of rows and factor, ascending."""
    if not isinstance(values, list) or not all(
        isinstance(each, list) and len(each) == 2 for each in values
    ):
        raise ValueError(f"{shown} must be a list of pairs: a number of rows and a factor")
    for rows, factor in values:
        real_number(f"rows of {shown}", rows, low=1)
        real_number(f"a factor of {shown}", factor, above=0)
    if values != sorted(values):
        raise ValueError(f"{shown} must be in the order of rows")
    return tuple((rows, factor) for rows, factor in values)


# Fields that may be 0 although they do not end in _seconds.
SHARES = ("overlap", "chosen_share")
OPTIONAL_RATES = ("head_flops", "link_bandwidth", "all_reduce_bytes", "expert_bytes", *SHARES)
PARTS: dict[str, type[Any]] = {"model": Model, "machine": Machine}
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "name": text, "description": text, "held_out": _held_out, "corrections": _corrections,
    "source": lambda shown, value: value and one_of(shown, value, [x for x in SOURCES if x]),
    **dict.fromkeys(("kv_tokens", "max_model_len", "num_devices"), partial(whole_number, low=1)),
    "all_reduces": partial(whole_number, low=0),
}  # fmt: skip
