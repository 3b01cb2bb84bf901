"""The cost of a step: a roofline model of one language model on one machine.

A forward pass takes a fixed time, plus the longer of reading the weights and the matrix products,
plus the longer of reading keys and values and the attention products. If a machine does not overlap
reading and computing completely, a part of the shorter time is added. Knows lengths and blocks, not
tokens. Scheduling is `host_seconds`, which async scheduling hides; it is not part of a step's time.

A profile is a JSON file in profiles/ or anywhere else, with exactly the fields of `Profile`, `Model`
and `Machine` below: {"name": ..., "description": ..., "kv_tokens": ..., "model": {...},
"machine": {...}}. A field with a default is optional.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from headway.checks import number, text, whole_number
from headway.errors import ConfigError, FormatError
from headway.plan import Plan
from headway.scheduler.policies import swap_if_cheaper

FOLDER = Path(__file__).parent / "profiles"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The work of a model: bytes to read and operations to compute."""

    weight_bytes: float  # read by every forward pass
    kv_bytes: float  # keys and values of one token, all layers
    dense_flops: float  # per token, without attention and LM head: 2 x parameters
    attention_flops: float  # per query token and token that it attends to, all layers
    head_flops: float  # per sampled token
    max_model_len: int  # prompt and output together


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


class UnitCosts(NamedTuple):
    """Seconds per unit of work, derived from a profile once because every step needs them."""

    weights: float  # reading all weights
    token: float
    sample: float
    read: float  # keys and values of one token
    pair: float  # one query token and one token that it attends to
    fixed: float
    min_attention: float
    overlap: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on a machine. Times are seconds."""

    name: str
    description: str
    kv_tokens: int  # capacity of the KV cache next to the weights
    model: Model
    machine: Machine

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
            fixed=machine.fixed_seconds,
            min_attention=machine.attention_seconds,
            overlap=machine.overlap,
        )

    def step_seconds(self, plan: Plan, block_size: int = 16) -> float:
        """Device time of a plan; 0 for a plan without work."""
        seconds = 0.0
        if plan.copies_out or plan.copies_in:
            for copies in filter(None, (plan.copies_out, plan.copies_in)):
                seconds += self.copy_seconds(len(copies) * block_size)
        num_rows, context = len(plan.decodes), plan.decode_context
        tokens, samples, reads, pairs = num_rows, num_rows, context, float(context)
        for _, start, end, _, is_last in plan.chunks:
            count = end - start
            tokens += count
            samples += is_last
            reads += end  # a later chunk reads the tokens of the earlier ones again
            pairs += count * (start + (count + 1) / 2)
        if tokens:
            seconds += self.pass_seconds(tokens, samples, reads, pairs)
        if plan.num_steps > 1 and num_rows:
            for _ in range(1, plan.num_steps):
                context += num_rows
                seconds += self.pass_seconds(num_rows, num_rows, context, context)
        return seconds

    def pass_seconds(self, tokens: int, samples: int, reads: int, pairs: float) -> float:
        """Time of a forward pass: tokens computed, sampled and read, and attended pairs."""
        weights, token, sample, read, pair, fixed, min_attention, overlap = self.unit_costs
        dense, reading, computing = tokens * token + samples * sample, reads * read, pairs * pair
        linear, attention = max(dense, weights), max(reading, computing)
        if overlap < 1:
            linear += (1 - overlap) * min(dense, weights)
            attention += (1 - overlap) * min(reading, computing)
        return fixed + linear + max(attention, min_attention)

    def prefill_seconds(self, num_tokens: int) -> float:
        """Time to compute a whole prompt in a step of its own."""
        return self.pass_seconds(num_tokens, 1, num_tokens, num_tokens * (num_tokens + 1) / 2)

    def copy_seconds(self, num_tokens: int) -> float:
        """Time to copy the keys and values of `num_tokens` tokens between device and host, one way."""
        machine = self.machine
        return machine.copy_seconds + num_tokens * self.model.kv_bytes / machine.copy_bandwidth

    def swap_if_cheaper(self) -> swap_if_cheaper:
        """The swap rule with this profile's times.

        A recomputed prompt shares its step with other requests, so the rule counts the time that it
        adds to a step, without the step's fixed time.
        """
        return swap_if_cheaper(
            copy=self.model.kv_bytes / self.machine.copy_bandwidth,
            compute=self.unit_costs.token,
            start=self.machine.copy_seconds,
            pair=self.unit_costs.pair,
        )

    def num_blocks(self, block_size: int) -> int:
        """Blocks that fit next to the weights."""
        return self.kv_tokens // block_size


def known_profiles() -> list[str]:
    """Names of the bundled profiles."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_profile(name_or_path: str | Path) -> Profile:
    """A bundled profile by name, or the profile in a .json file."""
    name = str(name_or_path)
    if name in known_profiles():
        return _read(FOLDER / f"{name}.json")
    if Path(name).suffix == ".json":
        return _read(Path(name))
    known = ", ".join(known_profiles())
    raise ConfigError(f"unknown profile {name!r}; known: {known}, or the path of a .json file")


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile in the format of `load_profile`."""
    Path(path).write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> Profile:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(path, None, f"cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise FormatError(path, error.lineno, f"not JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise FormatError(path, None, "not UTF-8 text") from None
    try:
        return _filled(Profile, values, "")
    except ValueError as error:
        raise FormatError(path, None, str(error)) from None


def _filled(kind: type[T], values: Any, where: str) -> T:
    """A dataclass from a JSON object; ValueError names the field that is missing or invalid."""
    is_object = isinstance(values, dict)
    if not is_object:
        raise ValueError(f"{where.rstrip('.') or 'a profile'} must be a JSON object")
    known = fields(kind)  # type: ignore[arg-type]
    names = [f.name for f in known]
    for field in known:
        if field.name not in values and field.default is MISSING:
            raise ValueError(f"missing field {where}{field.name}")
    for name in values:
        if name not in names:
            raise ValueError(f"unknown field {where}{name}; known: {', '.join(names)}")
    return kind(**{name: _value(name, value, where) for name, value in values.items()})


def _value(name: str, value: Any, where: str) -> Any:
    """A field's value as it is in the file, checked."""
    if name in PARTS:
        return _filled(PARTS[name], value, f"{name}.")
    shown = where + name
    if name in ("name", "description"):
        return text(shown, value)
    if name in ("kv_tokens", "max_model_len"):
        return whole_number(shown, value, 1)
    if name.endswith("_seconds") or name in ("head_flops", "overlap"):
        number(shown, value, low=0, high=1 if name == "overlap" else None)
    else:
        number(shown, value, above=0, high=1 if name.endswith("_share") else None)
    return value


PARTS: dict[str, type[Any]] = {"model": Model, "machine": Machine}
