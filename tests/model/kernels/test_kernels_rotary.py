"""Rotation and storing: the kernel, its reference and the plain backend agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headway.model.backends.base import PassArguments
from headway.model.backends.plain import PlainBackend
from headway.model.batch import ForwardBatch
from headway.model.config import ModelConfig, from_hf
from headway.model.kernels.attention.rotary import rotate_and_store
from tests.model.kernels.reference import rotary as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float8_e4m3fn: 5e-2}
LAYER, NUM_LAYERS, NUM_POSITIONS, EPSILON = 1, 3, 300, 1e-5
EMPTY = 96.0  # value of untouched slots; exact in every type


@dataclass(frozen=True, kw_only=True)
class Case:
    """The shape of the model, and the number of tokens."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: the model's type
    normed: str = ""
    tokens: int = 6
    position_dtype: torch.dtype = torch.int64

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


CASES = {
    "the bundled model": Case(heads=9, kv_heads=3, head_dim=64, block_size=16),
    "queries and keys normed": Case(
        heads=16, kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16, normed="qk",
        position_dtype=torch.int32,
    ),
    "a slot for each block": Case(
        heads=7, kv_heads=1, head_dim=80, block_size=1, dtype=torch.float16, normed="qk"
    ),
    "only queries normed": Case(heads=4, kv_heads=4, head_dim=96, block_size=5, normed="q"),
    "only keys normed": Case(
        heads=8, kv_heads=2, head_dim=96, block_size=100, dtype=torch.float16, normed="k"
    ),
    "wide heads": Case(
        heads=8, kv_heads=1, head_dim=256, block_size=256, dtype=torch.bfloat16, tokens=1
    ),
    "tiny heads": Case(heads=4, kv_heads=2, head_dim=16, block_size=4, normed="qk"),
    "more heads than a program": Case(heads=20, kv_heads=10, head_dim=64, block_size=16, normed="qk"),
    "an eight-bit cache": Case(
        heads=4, kv_heads=2, head_dim=80, block_size=16, dtype=torch.bfloat16,
        cache_dtype=torch.float8_e4m3fn, normed="qk",
    ),
}  # fmt: skip


def skip_without_eight_bits() -> None:
    if DEVICE == "cpu":
        pytest.skip("the interpreter loses the carry when it rounds to eight bits")


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    if request.param.cache_dtype:
        skip_without_eight_bits()
    return cast(Case, request.param)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arguments(case: Case, dtype: torch.dtype, cache_dtype: torch.dtype) -> dict[str, Any]:
    """A batch in a float type, with the values of the case's type. Rows have a stride."""
    rounded = [
        part.to(DEVICE, case.dtype).to(dtype)
        for part in (
            draw(1, case.tokens, case.width + 48),
            draw(2, case.head_dim) + 2,
            draw(3, case.head_dim) - 2,
        )
    ]
    angles = torch.outer(torch.arange(NUM_POSITIONS), draw(4, case.head_dim // 2).exp())
    num_blocks = case.tokens // case.block_size + 3
    chance = torch.Generator().manual_seed(5)
    slots = torch.randperm(num_blocks * case.block_size, generator=chance)[: case.tokens]
    slots[1::3] = -1 - slots[1::3]
    positions = torch.randint(NUM_POSITIONS, (case.tokens,), generator=chance)
    shape = (num_blocks, NUM_LAYERS, 2, case.kv_heads, case.block_size, case.head_dim)
    return {
        "qkv": rounded[0][:, : case.width],
        "num_heads": case.heads,
        "num_kv_heads": case.kv_heads,
        "q_norm": rounded[1] if "q" in case.normed else None,
        "k_norm": rounded[2] if "k" in case.normed else None,
        "epsilon": EPSILON,
        "cosine_pd": angles.cos().to(DEVICE),
        "sine_pd": angles.sin().to(DEVICE),
        "positions_t": positions.to(DEVICE, case.position_dtype),
        "slots_t": slots.to(DEVICE),
        "blocks": torch.full(shape, EMPTY).to(DEVICE, cache_dtype),
        "layer": LAYER,
    }


def own(case: Case) -> dict[str, Any]:
    return arguments(case, case.dtype, case.cache_dtype or case.dtype)


def exact(case: Case) -> dict[str, Any]:
    """The reference's result in float32."""
    given = arguments(case, torch.float32, torch.float32)
    reference.rotate_and_store(**given)
    return given


def distance(found: Tensor, right: Tensor) -> float:
    """The relative error; NaN if any number is NaN."""
    return float((found.float() - right.float()).norm() / right.float().norm())


def share_unlike(found: Tensor, expected: Tensor) -> float:
    return float((found.float() != expected.float()).float().mean())


def test_queries_are_rotated_and_the_rest_of_a_row_is_unchanged(case: Case) -> None:
    given = own(case)
    row = given["qkv"]._base
    before, turned = row.clone(), case.heads * case.head_dim
    rotate_and_store(**given)
    assert distance(row[:, :turned], exact(case)["qkv"][:, :turned]) < LIMITS[case.dtype]
    assert torch.equal(row[:, turned:], before[:, turned:])


def test_keys_and_values_are_stored_in_their_slots_only(case: Case) -> None:
    given = own(case)
    rotate_and_store(**given)
    found, right = given["blocks"].float(), exact(case)["blocks"]
    is_written = right != EMPTY
    assert is_written.any() and (found[~is_written] == EMPTY).all()
    assert distance(found[is_written], right[is_written]) < LIMITS[given["blocks"].dtype]


def test_the_stored_values_are_those_of_the_row(case: Case) -> None:
    given = own(case)
    rotate_and_store(**given)
    block, offset = given["slots_t"] // case.block_size, given["slots_t"] % case.block_size
    is_kept = given["slots_t"] >= 0
    rows = given["qkv"].unflatten(1, (-1, case.head_dim))[is_kept, -case.kv_heads :]
    kept = given["blocks"].float()[block[is_kept], LAYER, 1, :, offset[is_kept]]
    assert torch.equal(kept, rows.to(given["blocks"].dtype).float())


def test_numbers_are_rounded_as_in_the_reference(case: Case) -> None:
    # The interpreter truncates bfloat16 where a GPU rounds; it does round half precision.
    case = replace(case, dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float16)
    found, expected = own(case), own(case)
    rotate_and_store(**found)
    reference.rotate_and_store(**expected)
    turned = case.heads * case.head_dim  # the reference also writes keys back
    assert share_unlike(found["qkv"][:, :turned], expected["qkv"][:, :turned]) < 0.005
    assert share_unlike(found["blocks"], expected["blocks"]) < 0.005


def test_position_0_is_not_rotated_and_rotation_keeps_lengths() -> None:
    given = own(CASES["the bundled model"])
    given["positions_t"][0] = 0
    before = given["qkv"].clone()
    rotate_and_store(**given)
    assert torch.equal(given["qkv"][0], before[0])
    assert not torch.equal(given["qkv"][1:], before[1:])
    torch.testing.assert_close(given["qkv"].norm(dim=1), before.norm(dim=1))


@pytest.mark.filterwarnings("ignore:invalid value")  # of rotated values, which are not used
def test_infinite_values_are_stored_unchanged() -> None:
    given = own(CASES["the bundled model"])
    given["qkv"][:, -64:] = torch.inf
    rotate_and_store(**given)
    slot = int(given["slots_t"][0])
    assert (given["blocks"][slot // 16, LAYER, 1, 2, slot % 16] == torch.inf).all()


@pytest.mark.parametrize("function", [reference.rotate_and_store, rotate_and_store])
def test_values_too_large_for_8_bits_saturate(function: Any) -> None:
    if function is rotate_and_store:
        skip_without_eight_bits()
    given = own(CASES["an eight-bit cache"])
    given["qkv"][:, -80:] = torch.tensor([1e30, -1e30], device=DEVICE).repeat(40)
    function(**given)
    slot = int(given["slots_t"][0])
    kept = given["blocks"][slot // 16, LAYER, 1, 1, slot % 16].float()
    assert torch.equal(kept, torch.tensor([448.0, -448.0], device=DEVICE).repeat(40))


def test_no_tokens_and_no_slots_store_nothing() -> None:
    case = CASES["the bundled model"]
    for given in (own(replace(case, tokens=0)), own(case)):
        given["slots_t"].fill_(-1)
        rotate_and_store(**given)
        assert (given["blocks"] == EMPTY).all()


def test_slots_beyond_2_to_the_31_numbers_are_found() -> None:
    case = Case(heads=1, kv_heads=1, head_dim=64, block_size=256, dtype=torch.float16, tokens=2)
    given, num_blocks = own(case), 2**31 // (2 * 256 * 64) + 2
    shape = (num_blocks, 1, 2, 1, 256, 64)
    blocks = torch.empty(shape, dtype=torch.float16, device=DEVICE)  # not touched: costs nothing
    last = num_blocks * 256 - 1
    given |= {"blocks": blocks, "layer": 0}
    given["slots_t"] = torch.tensor([last, 3], device=DEVICE)
    rotate_and_store(**given)
    for token, slot in enumerate((last, 3)):
        assert torch.equal(blocks[slot // 256, 0, 1, 0, slot % 256], given["qkv"][token, 128:])


def like(case: Case) -> ModelConfig:
    return from_hf(
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": 11, "hidden_size": 96,
            "intermediate_size": 16, "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": case.heads, "num_key_value_heads": case.kv_heads,
            "head_dim": case.head_dim, "max_position_embeddings": 512, "rms_norm_eps": EPSILON,
        },
        "test",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["the bundled model", "only queries normed"])
def test_the_reference_equals_the_plain_backend(name: str) -> None:
    case = CASES[name]
    given, none = own(case), torch.zeros(1, dtype=torch.int64)
    positions, slots, blocks = (given[key] for key in ("positions_t", "slots_t", "blocks"))
    batch = ForwardBatch(
        tokens_t=none, positions_t=positions, slots_t=slots, tables_sw=none, starts_s=none,
        ends_s=none, sampled_n=none,
    )  # fmt: skip
    taken: Any = PlainBackend(torch.float32, DEVICE).begin(
        PassArguments(
            like(case), batch, blocks, given["cosine_pd"][positions], given["sine_pd"][positions]
        )
    )
    qkv = given["qkv"].contiguous()
    taken.rotate_and_store(LAYER, qkv, given["q_norm"], given["k_norm"])
    right = exact(case)
    torch.testing.assert_close(right["qkv"], qkv)
    torch.testing.assert_close(right["blocks"], blocks)
