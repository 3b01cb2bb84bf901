"""What a step costs: a roofline model of one language model on one machine.

A forward pass takes its fixed time, then the longer of reading the weights and the matrix
products, then the longer of reading keys and values and the attention products. Where a machine
cannot read and compute at once, a part of the shorter comes on top. Knows lengths and blocks, not
tokens; scheduling itself is `host_seconds`, which async scheduling hides, and is no part of a step's time
here.

A profile is a JSON file, ours in profiles/ or your own, with exactly the fields of `Profile`,
`Model` and `Machine` below: {"name": ..., "description": ..., "kv_tokens": ..., "model": {...},
"machine": {...}}. A field with a default may be left out.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from headway.errors import ConfigError, FormatError
from headway.plan import Plan
from headway.scheduler.policies import cheaper

FOLDER = Path(__file__).parent / "profiles"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the model makes a machine do."""

    weight_bytes: float  # read by every forward pass
    kv_bytes: float  # of one token, all layers
    dense_flops: float  # of one token, without attention and LM head: 2 x parameters
    attention_flops: float  # of one query token and one token it attends to, all layers
    head_flops: float  # of one sampled token
    max_model_len: int  # prompt and output together


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the machine, with the software on it, can do."""

    bandwidth: float  # bytes a second, device memory
    bandwidth_share: float  # of it that kernels reach
    flops: float  # a second, at the model's precision
    flops_share: float
    fixed_seconds: float  # of every forward pass, whatever is in it
    attention_seconds: float  # the least that a pass's attention takes: many small kernels
    host_seconds: float  # of every plan: scheduling and bookkeeping
    copy_bandwidth: float  # bytes a second between device and host, one way
    copy_seconds: float  # of every batch of copies in one direction, whatever its size
    overlap: float = 1.0  # of reading and computing: 1 hides the shorter wholly, 0 not at all


class Rates(NamedTuple):
    """Seconds for one of each; derived from a profile once, because every step asks."""

    weights: float
    token: float
    sample: float
    read: float
    pair: float
    fixed: float
    least: float
    overlap: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on a machine. Times are seconds."""

    name: str
    description: str
    kv_tokens: int  # that fit beside the weights
    model: Model
    machine: Machine

    @cached_property
    def rates(self) -> Rates:
        model, machine = self.model, self.machine
        bandwidth = machine.bandwidth * machine.bandwidth_share
        flops = machine.flops * machine.flops_share
        return Rates(
            weights=model.weight_bytes / bandwidth,
            token=model.dense_flops / flops,
            sample=model.head_flops / flops,
            read=model.kv_bytes / bandwidth,
            pair=model.attention_flops / flops,
            fixed=machine.fixed_seconds,
            least=machine.attention_seconds,
            overlap=machine.overlap,
        )

    def step_seconds(self, plan: Plan, block_size: int = 16) -> float:
        """How long the device is busy with a plan; 0 if it has nothing to do."""
        seconds = 0.0
        for copies in (plan.copies_out, plan.copies_in):
            if copies:
                seconds += self.copy_seconds(len(copies) * block_size)
        num_rows, context = len(plan.decodes), plan.decode_context
        tokens, samples, reads, pairs = num_rows, num_rows, context, float(context)
        for _, start, end, _, is_last in plan.chunks:
            count = end - start
            tokens += count
            samples += is_last
            reads += end  # a later chunk reads again what the earlier ones stored
            pairs += count * (start + (count + 1) / 2)
        if tokens:
            seconds += self.pass_seconds(tokens, samples, reads, pairs)
        for _ in range(1, plan.num_steps if num_rows else 1):
            context += num_rows
            seconds += self.pass_seconds(num_rows, num_rows, context, context)
        return seconds

    def pass_seconds(self, tokens: int, samples: int, reads: int, pairs: float) -> float:
        """One forward pass: tokens computed, sampled, read from the cache; and attended pairs."""
        weights, token, sample, read, pair, fixed, least, overlap = self.rates
        dense, reading, computing = tokens * token + samples * sample, reads * read, pairs * pair
        linear, attention = max(dense, weights), max(reading, computing)
        if overlap < 1:
            linear += (1 - overlap) * min(dense, weights)
            attention += (1 - overlap) * min(reading, computing)
        return fixed + linear + max(attention, least)

    def prefill_seconds(self, num_tokens: int) -> float:
        """A prompt computed whole, alone in its step."""
        return self.pass_seconds(num_tokens, 1, num_tokens, num_tokens * (num_tokens + 1) / 2)

    def copy_seconds(self, num_tokens: int) -> float:
        """The keys and values of so many tokens, one way between device and host."""
        machine = self.machine
        return machine.copy_seconds + num_tokens * self.model.kv_bytes / machine.copy_bandwidth

    def cheaper(self) -> cheaper:
        """The swap rule with this profile's times. Recomputing shares its step with others, so it
        is charged what it adds to one, not the step's fixed time."""
        return cheaper(
            copy=self.model.kv_bytes / self.machine.copy_bandwidth,
            compute=self.rates.token,
            start=self.machine.copy_seconds,
            pair=self.rates.pair,
        )

    def num_blocks(self, block_size: int) -> int:
        """Blocks that fit beside the weights."""
        return self.kv_tokens // block_size


def known_profiles() -> list[str]:
    """The names of the profiles that come with Headway."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_profile(name_or_path: str | Path) -> Profile:
    """A profile by its name, or by the path of a .json file."""
    text = str(name_or_path)
    if text in known_profiles():
        return _read(FOLDER / f"{text}.json")
    if Path(text).suffix == ".json":
        return _read(Path(text))
    known = ", ".join(known_profiles())
    raise ConfigError(f"unknown profile {text!r}; known: {known}, or the path of a .json file")


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile as `load_profile` reads it."""
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
    """A dataclass from a JSON object; ValueError names the field that is missing or wrong."""
    is_object = isinstance(values, dict)
    if not is_object:
        raise ValueError(f"{where.rstrip('.') or 'a profile'} must be a JSON object")
    known = fields(kind)  # type: ignore[arg-type]
    names = [f.name for f in known]
    for field in known:
        if field.name not in values and field.default is MISSING:
            raise ValueError(f"the field {where}{field.name} is missing")
    for name in values:
        if name not in names:
            raise ValueError(f"unknown field {where}{name}; known: {', '.join(names)}")
    return kind(**{name: _value(name, value, where) for name, value in values.items()})


def _value(name: str, value: Any, where: str) -> Any:
    if name in PARTS:
        return _filled(PARTS[name], value, f"{name}.")
    if name in ("name", "description"):
        is_good, wanted = isinstance(value, str), "a text"
    elif name in ("kv_tokens", "max_model_len"):
        is_good, wanted = type(value) is int and value > 0, "a whole number above 0"
    else:
        is_number = type(value) in (int, float) and 0 <= value < math.inf
        may_be_0 = name.endswith("_seconds") or name in ("head_flops", "overlap")
        is_good, wanted = is_number and (value > 0 or may_be_0), "a number above 0"
    if name == "overlap":
        is_good, wanted = is_good and value <= 1, "a number from 0 to 1"
    if name.endswith("_share"):
        is_good, wanted = is_good and value <= 1, "a number above 0 and at most 1"
    if not is_good:
        raise ValueError(f"{where}{name} must be {wanted}, not {value!r}")
    return value


PARTS: dict[str, type[Any]] = {"model": Model, "machine": Machine}
