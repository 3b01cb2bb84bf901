"""Rotary position embeddings (RoPE), with the rounding of transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.model.families.config_keys import refuse_unread
from headway.model.families.fields import Fields

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
# Keys of a config.json's rope parameters; each kind uses some of them.
ROPE_KEYS = frozenset({
    "attention_factor", "beta_fast", "beta_slow", "factor", "finetuned", "high_freq_factor",
    "low_freq_factor", "mscale", "mscale_all_dim", "long_factor", "short_factor", "original_max_position_embeddings",
    "partial_rotary_factor", "rope_theta", "rope_type", "truncate", "type",
})  # fmt: skip
# Keys that a GGUF file may have for scaling; any other key is refused, as it changes the model.
GGUF_SCALING = (
    "type", "factor", "original_context_length", "attn_factor", "finetuned", "yarn_beta_fast",
    "yarn_beta_slow",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rope:
    """RoPE parameters; they give a frequency for each pair of a head's dimensions."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] | None = None  # of frequencies: longrope, GGUF's form of llama3
    long_divisors: tuple[float, ...] | None = None  # of longrope, in contexts above the original
    is_long: bool = False  # whether contexts are
    rotated: float = 1.0  # the part of a head's dimensions that rotates

    @property
    def scale(self) -> float:
        """The factor of cosine and sine; 1 except for yarn and longrope."""
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_scale(self.factor) if self.kind == "yarn" else 1.0

    def num_rotated(self, head_dim: int) -> int:
        """Dimensions of a head that rotate, in pairs; the others do not depend on positions."""
        return int(head_dim * self.rotated)

    def for_length(self, length: int) -> Rope:
        """The rope for contexts of at most `length` tokens: longrope has one for long contexts."""
        is_long = self.long_divisors is not None and length > self.original_max_length
        return self if is_long == self.is_long else replace(self, is_long=is_long)

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """Radians per position for each pair that rotates, rounded as in transformers."""
        head_dim = self.num_rotated(head_dim)
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        # Computed in float64 and rounded once, since float32 pow differs between libraries.
        theta = np.float64(np.float32(self.theta))
        powers = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
        plain: NDArray[np.float32] = np.float32(1.0) / powers
        if self.kind == "longrope":
            divisors = self.long_divisors if self.is_long else self.divisors
            powers *= np.asarray(divisors, dtype=np.float32)
            stretched: NDArray[np.float32] = np.float32(1.0) / powers
            return stretched
        if self.divisors is not None:
            return np.divide(plain, self.divisors, dtype=np.float32)
        if self.kind == "linear":
            return np.divide(plain, self.factor, dtype=np.float32)
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(powers, head_dim)
        return plain

    def _llama3(self, plain: NDArray[np.float32]) -> NDArray[np.float32]:
        """Divide low frequencies by the factor, keep high ones, and blend those between."""
        low, high = np.float32(self.low_freq_factor), np.float32(self.high_freq_factor)
        length, factor = np.float32(self.original_max_length), np.float32(self.factor)
        one = np.float32(1.0)  # torch computes a number over a tensor as number * reciprocal
        wavelengths = np.float32(2 * math.pi) * (one / plain)
        blend = (length * (one / wavelengths) - low) / (high - low)
        blended = (1 - blend) * plain / factor + blend * plain
        is_slow = wavelengths > np.float32(self.original_max_length / self.low_freq_factor)
        is_fast = wavelengths < np.float32(self.original_max_length / self.high_freq_factor)
        between = np.where(is_fast, plain, blended)
        return np.where(is_slow, plain / factor, between).astype(np.float32)

    def _yarn(self, powers: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
        """Keep pairs that rotate more than beta_fast times within the original length."""

        def pair_turning(times: float) -> float:
            turns = math.log(self.original_max_length / (times * 2 * math.pi))
            return head_dim * turns / (2 * math.log(self.theta))

        low, high = pair_turning(self.beta_fast), pair_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        span = high - low or 0.001
        pairs = np.arange(head_dim // 2, dtype=np.float32)
        kept = 1 - np.clip((pairs - np.float32(low)) / np.float32(span), 0, 1)
        slowed = np.float32(1.0) / (np.float32(self.factor) * powers)
        scaled: NDArray[np.float32] = slowed * (1 - kept) + (np.float32(1.0) / powers) * kept
        return scaled


def yarn_scale(factor: float, multiplier: float = 1.0) -> float:
    """Yarn's factor of cosine and sine for a length that is `factor` times the original."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def pair_order(num_rotated: int, head_dim: int) -> list[int]:
    """A head's dimensions so that i and i + head_dim / 2 are a pair; pairs that rotate come first."""
    half, middle = num_rotated // 2, (num_rotated + head_dim) // 2
    parts = (0, half), (num_rotated, middle), (half, num_rotated), (middle, head_dim)
    return [place for part in parts for place in range(*part)]


def rope_from_hf(
    fields: Fields, *, allows_partial: bool = False, more_keys: tuple[str, ...] = ()
) -> Rope:
    """Read the RoPE of a config.json: one object (transformers 5), or rope_scaling and rope_theta.

    The family may have `more_keys` among the parameters.
    """
    found = fields.get("rope_parameters") or {}
    found = fields.get("rope_scaling") or found
    if not isinstance(found, dict):
        raise fields.error(f"the rope parameters are {found!r}; they must be an object")
    stated = dict(found)
    if any(isinstance(value, dict) for value in stated.values()):
        raise fields.error("different rope parameters for each type of layer are not supported")
    rope = Fields(stated, f"{fields.where}: rope parameters")
    refuse_unread(rope, ROPE_KEYS.union(more_keys), {})
    for key in ("rope_theta", "partial_rotary_factor"):
        stated.setdefault(key, fields.get(key))
    rotated = rope.number("partial_rotary_factor", 1.0)
    if rotated > 1 or (rotated < 1 and not allows_partial):
        raise fields.error(
            f"partial_rotary_factor is {rotated:g}; for this architecture it must be 1"
        )
    theta = rope.number("rope_theta", 10000.0, minimum=1.0)
    kind = stated.get("rope_type") or stated.get("type")
    if kind == "su" or (kind == "yarn" and "short_factor" in stated):
        kind = "longrope"  # its names in older files
    fields.read.add("original_max_position_embeddings")  # of scaled kinds only
    if kind in (None, "default"):
        return Rope(theta=theta, rotated=rotated)
    if rotated != 1.0 and kind != "longrope":
        raise fields.error(f"rope type {kind!r} with partial_rotary_factor is not supported")
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=rope.number("factor"))
    return _scaled_from_hf(fields, rope, Rope(theta=theta, kind=str(kind), rotated=rotated))


def _scaled_from_hf(fields: Fields, rope: Fields, plain: Rope) -> Rope:
    """A kind of rope that depends on the length that the model was first trained with."""
    max_length = fields.count("max_position_embeddings")
    # A length beside the parameters overrides the one among them, as in transformers.
    if (beside := fields.get("original_max_position_embeddings")) is not None:
        rope = Fields({**rope.values, "original_max_position_embeddings": beside}, rope.where)
    length = rope.count("original_max_position_embeddings", max_length)
    if plain.kind == "llama3":
        return _llama3_from_hf(rope, plain.theta, length)
    if plain.kind == "yarn":
        return _yarn_from_hf(rope, plain.theta, length, max_length)
    if plain.kind == "longrope":
        return _longrope_from_hf(rope, plain, length, max_length)
    supported = ", ".join(ROPE_KINDS)
    raise fields.error(f"rope type {plain.kind!r} is not supported; supported: {supported}")


def _llama3_from_hf(rope: Fields, theta: float, length: int) -> Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error(f"high_freq_factor {high} must be above low_freq_factor {low}")
    return Rope(
        theta=theta,
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_length=length,
    )


def _yarn_from_hf(rope: Fields, theta: float, length: int, max_length: int) -> Rope:
    factor, attention = rope.number("factor", max_length / length), None
    if rope.values.get("attention_factor") is not None:
        attention = rope.number("attention_factor")
    elif rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        over, under = rope.number("mscale"), rope.number("mscale_all_dim")
        attention = yarn_scale(factor, over) / yarn_scale(factor, under)
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_length=length,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=attention,
        truncate=rope.flag("truncate", True),
    )


def _longrope_from_hf(rope: Fields, plain: Rope, length: int, max_length: int) -> Rope:
    factor, scale = rope.number("factor", max_length / length), 1.0
    if factor > 1:
        scale = math.sqrt(1 + math.log(factor) / math.log(max(length, 2)))
    short, long = (rope.numbers(f"{kind}_factor") for kind in ("short", "long"))
    return replace(
        plain,
        factor=factor,
        original_max_length=length,
        attention_factor=rope.number("attention_factor", scale),
        divisors=short,
        long_divisors=long,
    )


def rope_from_gguf(fields: Fields, head_dim: int, divisors: tuple[float, ...] | None) -> Rope:
    """Read the RoPE of a GGUF file; `divisors` is its rope_freqs tensor, if it has one."""
    theta = fields.number("rope.freq_base", 10000.0, minimum=1.0)
    num_rotated = fields.count("rope.dimension_count", head_dim)
    if num_rotated != head_dim:
        raise fields.error(
            f"rope.dimension_count is {num_rotated}; it must be the head size, {head_dim}"
        )
    prefix = "rope.scaling."
    scaling = {k[len(prefix) :]: v for k, v in fields.values.items() if k.startswith(prefix)}
    for key in scaling:
        if key not in GGUF_SCALING:
            raise fields.error(f"{prefix}{key} is not supported")
    rope = Fields(scaling, f"{fields.where}: rope.scaling")
    legacy = fields.number("rope.scale_linear", 1.0)
    factor, kind = rope.number("factor", legacy), scaling.get("type", "linear")
    if divisors is not None:
        if len(divisors) != head_dim // 2:
            raise fields.error(f"rope_freqs has {len(divisors)} values; expected {head_dim // 2}")
        if kind == "yarn" or factor != 1.0:
            raise fields.error("rope_freqs together with rope.scaling is not supported")
        return Rope(theta=theta, divisors=divisors)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=factor)
    if kind != "yarn":
        raise fields.error(f"rope scaling {kind!r} is not supported; supported: none, linear, yarn")
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_length=rope.count("original_context_length", fields.count("context_length")),
        beta_fast=rope.number("yarn_beta_fast", 32.0),
        beta_slow=rope.number("yarn_beta_slow", 1.0),
        attention_factor=rope.number("attn_factor", 1.0) * yarn_scale(factor),
    )
