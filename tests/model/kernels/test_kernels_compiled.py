"""Properties of compiled kernels that the interpreter cannot show: compiled for a GPU, not run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from headway.model.kernels.launch import NO_FP_FUSION
from headway.model.kernels.prefill import prefill_tile

# In a process of its own, because kernels are interpreted in this one.
COMPILE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from importlib import import_module
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for line in sys.stdin:
    asked = json.loads(line)
    module = import_module("headway.model.kernels." + asked["module"])
    kernel = getattr(module, asked["name"]).kernel
    names = kernel.arg_names
    types = {name: asked["types"].get(name, "constexpr") for name in names}
    fixed = {(names.index(n),): asked["fixed"].get(n) for n, t in types.items() if t == "constexpr"}
    even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n][0] in "*i"}
    source = ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=even)
    target = GPUTarget("cuda", asked["capability"], 32)
    made = compile(source, target=target, options=asked["options"])
    print(json.dumps({"ptx": made.asm["ptx"], "shared": made.metadata.shared}))
"""


def compiled(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    lines = "".join(json.dumps({"capability": 90, **each}) + "\n" for each in asked)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], input=lines, capture_output=True, text=True,
        env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def unlike_sums(ptx: str) -> list[str]:
    """Places where a thread adds its own unrounded product to a neighbour's rounded one. The
    neighbour does the opposite, so their sums may differ in the last bit."""
    products: dict[str, set[str]] = {}
    passed: dict[str, str] = {}
    found = []
    for line in ptx.splitlines():
        words = re.findall(r"[\w.%]+", line)
        if not words:
            continue
        if words[0] in ("mul.f32", "mul.rn.f32"):
            products[words[1]] = {words[2], words[3]}
        elif words[0] == "shfl.sync.bfly.b32":
            passed[words[1]] = words[2]
        elif words[0] == "fma.rn.f32":
            product = products.get(passed.get(words[4], ""))
            found += [line.strip()] if product == {words[2], words[3]} else []
    return found


def join(num_splits: int, head_dim: int) -> dict[str, Any]:
    return {
        "module": "decode", "name": "_join",
        "types": {"out": "*bf16", "sums": "*fp32", "tops": "*fp32", "weights": "*fp32",
                  "positions_s": "*i64", "out_stride": "i32"},
        "fixed": {"D": head_dim, "D_ROOM": head_dim, "SPLITS": num_splits, "MIN_POSITIONS": 128, "TILE": 16,
                  "IS_NEW": True, "CHAINED": True},
        "options": {"num_warps": 2, "num_stages": 1},
    }  # fmt: skip


def attend(warps: int, head_dim: int) -> dict[str, Any]:
    pointers = dict.fromkeys(("qkv", "q_norm", "k_norm", "blocks", "out"), "*bf16")
    pointers |= dict.fromkeys(("cosine_pd", "sine_pd", "sums", "tops", "weights"), "*fp32")
    pointers |= {"positions_s": "*i64", "slots_s": "*i64", "tables": "*i32", "row_ids_s": "*i32"}
    numbers = ("layer", "qkv_stride", "out_stride", "block_stride", "layer_stride", "table_width")
    return {
        "module": "decode", "name": "_attend",
        "types": pointers | dict.fromkeys(numbers, "i32") | {"epsilon": "fp32", "scale": "fp32"},
        "fixed": {"H": 16, "G": 8, "D": head_dim, "D_ROOM": head_dim, "HEADS": 16, "BLOCK_SIZE": 16,
                  "TILE": 64 if warps > 1 else 16, "SPLITS": 4, "MIN_POSITIONS": 128, "IS_NEW": True,
                  "HAS_NORM": True, "CHAINED": True},
        "options": {"num_warps": warps, "num_stages": 2},
    }  # fmt: skip


def product(rows: int, outputs: int, slices: int) -> dict[str, Any]:
    pointers = dict.fromkeys(("x_mk", "weight_nk", "residual_mn", "out_mn"), "*bf16")
    pointers |= {"squares_mj": "*fp32", "squares_out_mj": "*fp32"}
    numbers = ("num_rows", "num_outputs", "x_stride", "out_stride")
    return {
        "module": "linear", "name": "_linear",
        "types": pointers | dict.fromkeys(numbers, "i32") | {"epsilon": "fp32"},
        "fixed": {"K": 2048, "NUM_SQUARES": 1, "SQUARES_ROOM": 1, "HAS_NORM": False,
                  "HAS_BIAS": False, "HAS_RESIDUAL": True, "IS_GATED": False,
                  "LEAVES_SQUARES": True, "ROWS": rows, "OUTPUTS": outputs, "INPUTS": 128,
                  "SLICES": slices, "CHAINED": True},
        "options": {"num_warps": 4, "num_stages": 3},
    }  # fmt: skip


def wide() -> dict[str, Any]:
    """More warps than a piece of 8 outputs needs."""
    pointers = dict.fromkeys(("x_mk", "weight_nk", "residual_mn", "out_mn"), "*bf16")
    numbers = dict.fromkeys(("num_rows", "num_outputs", "x_stride", "out_stride"), "i32")
    return {
        "module": "wide_linear", "name": "_wide",
        "types": pointers | numbers | {"squares_out_mj": "*fp32", "epsilon": "fp32"},
        "fixed": {"K": 2048, "NUM_SQUARES": 1, "SQUARES_ROOM": 1, "IS_GATED": False, "ROWS": 16,
                  "OUTPUTS": 32, "EXTRA": 8, "INPUTS": 128, "AHEAD": 4, "CHAINED": True},
        "options": {"num_warps": 4, "num_stages": 3},
    }  # fmt: skip


def added() -> dict[str, Any]:
    pointers = dict.fromkeys(("parts_pmn", "squares_mj", "squares_out_mj"), "*fp32")
    pointers |= dict.fromkeys(("residual_mn", "out_mn"), "*bf16")
    numbers = dict.fromkeys(("num_rows", "num_outputs", "out_stride"), "i32")
    return {
        "module": "wide_linear", "name": "_add", "types": pointers | numbers | {"epsilon": "fp32"},
        "fixed": {"K": 2048, "NUM_SQUARES": 16, "SQUARES_ROOM": 16, "IS_GATED": False, "PARTS": 4,
                  "ROWS": 8, "OUTPUTS": 128, "CHAINED": True},
        "options": {"num_warps": 4, "num_stages": 1},
    }  # fmt: skip


def prefill(head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """For a GPU of the RTX 40 series, with the largest tile."""
    tile, kind = prefill_tile(head_dim, dtype, 10**6), "fp32" if dtype == torch.float32 else "bf16"
    strides = ("q_token_stride", "q_head_stride", "out_token_stride", "out_head_stride")
    numbers = dict.fromkeys(("layer", "num_sequences", "table_stride", *strides), "i32")
    places = dict.fromkeys(("tables", "row_ids_s", "starts_s", "ends_s"), "*i32")
    return {
        "module": "prefill", "name": "_prefill", "capability": 89,
        "types": dict.fromkeys(("q", "out", "blocks"), f"*{kind}") | places | numbers
        | {"scale": "fp32"},
        "fixed": {"BLOCK_STRIDE": 2**20, "BLOCK_SIZE": 16, "G": 8, "GROUP": 4, "D": head_dim,
                  "D_ROOM": head_dim, "ROWS": tile.tile_rows, "KEYS": tile.tile_keys,
                  "CHAINED": False},
        "options": {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    }  # fmt: skip


SUMS = [
    join(4, 64), join(32, 64), join(64, 128), attend(4, 128), product(16, 8, 4), added(), wide(),
]  # fmt: skip
PROMPTS = [prefill(256, torch.float32), prefill(128, torch.bfloat16), prefill(256, torch.bfloat16)]


def test_equal_sums_are_bitwise_equal_and_tiles_fit_on_smaller_gpus() -> None:
    """All threads that hold the same sum have the same bits."""
    unfused = [{**each, "options": each["options"] | NO_FP_FUSION} for each in SUMS]
    joined, attended, *made = compiled([join(4, 64), attend(4, 128), *unfused, *PROMPTS])
    assert all(unlike_sums(fused["ptx"]) for fused in (joined, attended)), "the check sees nothing"
    assert not [place for each in made[: len(SUMS)] for place in unlike_sums(each["ptx"])]
    assert max(each["shared"] for each in made[len(SUMS) :]) <= 99 * 1024
