"""Properties of compiled kernels that the interpreter cannot show: compiled for a GPU, not run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.waiting import LIMIT

pytest.importorskip("triton")
from headway.model.kernels.attention.prefill import prefill_tile
from headway.model.kernels.launch import NO_FP_FUSION
from headway.model.kernels.products.gated import TILES

# All in one process, which takes longer to start than to compile; kernels are interpreted in this one.
COMPILE = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from importlib import import_module
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

asked_for, folder = json.load(sys.stdin)
results = []
for asked in asked_for:
    module = import_module("headway.model.kernels." + asked["module"])
    kernel = getattr(module, asked["name"]).kernel
    names = kernel.arg_names
    types = {name: asked["types"].get(name, "constexpr") for name in names}
    fixed = {(names.index(n),): asked["fixed"].get(n) for n, t in types.items() if t == "constexpr"}
    even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n][0] in "*i"}
    source = ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=even)
    target = GPUTarget("cuda", asked["capability"], 32)
    made = compile(source, target=target, options=asked["options"])
    results.append({"ptx": made.asm["ptx"], "shared": made.metadata.shared})
"""

HOPPER = """
import subprocess
import triton
from tempfile import NamedTemporaryFile
from triton.experimental.gluon._runtime import GluonASTSource

from headway.model.kernels.hopper_ring import COLUMNS, SHARED
from headway.model.kernels.attention.prefill_hopper import KEYS, ROWS, STAGES, _prefill_hopper

kernel, strides = _prefill_hopper.kernel, ("q_token", "q_head", "out_token", "out_head", "table")
types = dict.fromkeys(("tables", "row_ids_s", "starts_s", "ends_s"), "*i32")
types |= dict.fromkeys(("layer", "num_sequences", "most", "num_slots", "num_first", "num_splits"), "i32")
types |= {"sums": "*fp32", "counters": "*i32"}
types |= {f"{name}_stride": "i32" for name in strides} | {"q": "*bf16", "out": "*bf16", "scale": "fp32"}
types["cache_rows"] = f"tensordesc<bf16[16, {COLUMNS}],{SHARED.value!r}>"
fixed = {"BLOCK_ROWS": 7168, "BLOCK_SIZE": 16, "G": 8, "GROUP": 2, "D": 128, "ROWS": ROWS,
         "KEYS": KEYS, "STAGES": STAGES, "CHAINED": True}
names = kernel.arg_names
signature = {name: types.get(name, "constexpr") for name in names}
constants = {(names.index(name),): value for name, value in fixed.items()}
even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
        if signature[name][0] == "*" or name.endswith("_stride")}
source = GluonASTSource(kernel, signature, constants, even)
made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
hopper, between, exponentials = made.asm["ptx"], False, []
with NamedTemporaryFile(suffix=".cubin") as file:
    file.write(made.asm["cubin"])
    file.flush()
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
    sass = subprocess.run(command, capture_output=True, text=True).stdout
for line in sass.splitlines():  # exponentials between the waits for scores and values
    if "WARPGROUP.DEPBAR" in line:
        between = "gsb0, 0x1" in line
        exponentials += [0] if between else []
    if between and "MUFU.EX2" in line:
        exponentials[-1] += 1
"""

AHEAD = """
import torch
from triton.runtime.driver import driver

class Utils:
    num_threads = 1024
    def get_device_properties(self, device): return {"max_shared_mem": 232448}
    def load_binary(self, *given): return 1, 1, 0, 0, self.num_threads
    def unload_module(self, module): pass
class Pretended:
    utils = Utils()
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def launcher_cls(self, source, metadata): return lambda *given: sys.exit("a kernel ran")
    def __getattr__(self, name): raise SystemExit(f"the driver was called: {name}")

driver.set_active(Pretended())
os.environ["TRITON_CACHE_DIR"] = folder
from triton.runtime import _async_compile
from headway.model.kernels.activation import _silu_multiply, silu_multiply
from headway.model.kernels.launch import compile_all
from headway.model.kernels.norm import _rms_norm, rms_norm

counts, kept = [], []
def builds():
    # The number of builds that other threads see; None if one is not compiled or not loaded.
    kernels = (_silu_multiply.kernel, _rms_norm.kernel)
    found = [b for k in kernels for cache, *_ in k.device_caches.values() for b in cache.values()]
    done = all(isinstance(b, triton.compiler.CompiledKernel) and b.module for b in found)
    return len(found) if done else None
def launches(width):
    wide = torch.ones((3, width))
    rms_norm(wide, wide[0], 1e-5)
    rms_norm(wide[1:], wide[0], 1e-5)
    silu_multiply(wide)
def fail():
    launches(32)
    raise ValueError("while compiling")
compile_all(lambda: launches(64), lambda *done: counts.append(done))
for _ in range(2):
    try: compile_all(fail)
    except ValueError: pass
compile_all(lambda: launches(128), lambda *done: counts.append(done))
def interrupt(_futures):
    raise KeyboardInterrupt
def watched():
    launches(256)
    kept.append(builds())
wait, _async_compile.as_completed = _async_compile.as_completed, interrupt
try: compile_all(watched)
except KeyboardInterrupt: pass
_async_compile.as_completed = wait
kept.append(builds())
compile_all(watched)
kept.append(builds())
Utils.num_threads = 32  # too few for any kernel
compile_all(lambda: launches(512))
try: launches(512)
except triton.runtime.errors.OutOfResources: kept.append("too large")
Utils.num_threads = 1024
"""

GATED = """
from triton.backends.nvidia.compiler import get_ptxas
from headway.model.kernels.products.gated import TILES
from headway.model.kernels.products.gated_hopper import _gated_product, gated_product_hopper

wide, several = torch.zeros((5000, 128), dtype=torch.bfloat16), []
def products():
    for given in (wide[:1], wide[:16], wide[:300], wide, wide.view(-1, 64)):
        for tile in TILES:
            gated_product_hopper(given, given[:48].repeat(48, 1)[:48], tile)
def gated(made):
    # The PTX, and what the assembler says about it.
    with NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True).stderr
    return {"ptx": made.asm["ptx"], "said": said, "shared": made.metadata.shared}
del os.environ["TRITON_CACHE_DIR"]  # its builds take longest: kept for the next run
compile_all(products, lambda *done: several.append(done))
builds = [each for cache, *_ in _gated_product.kernel.device_caches.values() for each in cache.values()]
gated_tiles = [gated(made) for made in builds]
print(json.dumps({"kernels": results, "hopper": hopper, "exponentials": exponentials, "ahead": [counts, kept],
                  "gated": gated_tiles, "num_gated": len(several)}))
"""


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
        "module": "attention.decode", "name": "_join",
        "types": {"out": "*bf16", "sums": "*fp32", "tops": "*fp32", "weights": "*fp32",
                  "positions_s": "*i64", "out_stride": "i32"},
        "fixed": {"D": head_dim, "D_ROOM": head_dim, "SPLITS": num_splits, "MIN_POSITIONS": 128, "TILE": 16,
                  "IS_NEW": True, "CHAINED": True},
        "options": {"num_warps": 2, "num_stages": 1},
    }  # fmt: skip


def attend(warps: int, head_dim: int, cache_type: str = "bf16") -> dict[str, Any]:
    pointers = dict.fromkeys(("qkv", "q_norm", "k_norm", "out"), "*bf16")
    pointers["blocks"] = f"*{cache_type}"
    pointers |= dict.fromkeys(("cosine_pd", "sine_pd", "sums", "tops", "weights"), "*fp32")
    pointers |= {"positions_s": "*i64", "slots_s": "*i64", "tables": "*i32", "row_ids_s": "*i32"}
    numbers = ("layer", "qkv_stride", "out_stride", "block_stride", "layer_stride", "table_width")
    return {
        "module": "attention.decode", "name": "_attend",
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
        "module": "products.linear", "name": "_linear",
        "types": pointers | dict.fromkeys(numbers, "i32") | {"epsilon": "fp32"},
        "fixed": {"K": 2048, "NUM_SQUARES": 1, "SQUARES_ROOM": 1, "HAS_NORM": False,
                  "HAS_BIAS": False, "HAS_RESIDUAL": True, "IS_GATED": False,
                  "LEAVES_SQUARES": True, "ROWS": rows, "OUTPUTS": outputs, "INPUTS": 128,
                  "SLICES": slices, "CHAINED": True},
        "options": {"num_warps": 4, "num_stages": 3},
    }  # fmt: skip


def wide(slices: int) -> dict[str, Any]:
    """More warps than a piece of 8 outputs needs without slices."""
    pointers = dict.fromkeys(("x_mk", "weight_nk", "residual_mn", "out_mn"), "*bf16")
    numbers = dict.fromkeys(("num_rows", "num_outputs", "x_stride", "out_stride"), "i32")
    return {
        "module": "products.wide_linear", "name": "_wide",
        "types": pointers | numbers | {"squares_out_mj": "*fp32", "epsilon": "fp32"},
        "fixed": {"K": 2048, "NUM_SQUARES": 1, "SQUARES_ROOM": 1, "IS_GATED": False, "ROWS": 16,
                  "OUTPUTS": 32, "EXTRA": 8, "INPUTS": 128, "SLICES": slices, "AHEAD": 4,
                  "CHAINED": True},
        "options": {"num_warps": 4, "num_stages": 3},
    }  # fmt: skip


def added() -> dict[str, Any]:
    pointers = dict.fromkeys(("parts_pmn", "squares_mj", "squares_out_mj"), "*fp32")
    pointers |= dict.fromkeys(("residual_mn", "out_mn"), "*bf16")
    numbers = dict.fromkeys(("num_rows", "num_outputs", "out_stride"), "i32")
    return {
        "module": "products.wide_linear", "name": "_add", "types": pointers | numbers | {"epsilon": "fp32"},
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
        "module": "attention.prefill", "name": "_prefill", "capability": 89,
        "types": dict.fromkeys(("q", "out", "blocks"), f"*{kind}") | places | numbers
        | {"scale": "fp32"},
        "fixed": {"BLOCK_STRIDE": 2**20, "BLOCK_SIZE": 16, "G": 8, "GROUP": 4, "D": head_dim,
                  "D_ROOM": head_dim, "ROWS": tile.tile_rows, "KEYS": tile.tile_keys,
                  "CHAINED": False},
        "options": {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    }  # fmt: skip


SUMS = [
    join(4, 64), join(32, 64), join(64, 128), attend(4, 128), attend(1, 128, "fp8e4nv"),
    product(16, 8, 4), added(), wide(1), wide(4),
]  # fmt: skip
PROMPTS = [prefill(256, torch.float32), prefill(128, torch.bfloat16), prefill(256, torch.bfloat16)]


UNFUSED = [{**each, "options": each["options"] | NO_FP_FUSION} for each in SUMS]


@dataclass
class Compiled:
    """The kernels above, the kernel for Hopper GPUs, and what compiling ahead left in a folder."""

    kernels: list[dict[str, Any]]
    hopper: str
    ahead: list[Any]
    gated: list[dict[str, Any]]
    exponentials: list[int]  # of each step of the kernel for Hopper GPUs
    num_gated: int  # kernels that the gated product compiles for several sizes
    folder: Path


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("ahead")
    asked = [join(4, 64), attend(4, 128), *UNFUSED, *PROMPTS]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE + HOPPER + AHEAD + GATED], capture_output=True, text=True,
        env=environment, timeout=3 * LIMIT,
        input=json.dumps([[{"capability": 90, **each} for each in asked], str(folder)]),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Compiled(**json.loads(done.stdout), folder=folder)


def test_equal_sums_are_bitwise_equal_and_tiles_fit_on_smaller_gpus(compiled: Compiled) -> None:
    """All threads that hold the same sum have the same bits."""
    joined, attended, *made = compiled.kernels
    assert len(made) == len(SUMS) + len(PROMPTS)
    assert all(unlike_sums(fused["ptx"]) for fused in (joined, attended)), "the check sees nothing"
    assert not [place for each in made[: len(SUMS)] for place in unlike_sums(each["ptx"])]
    assert max(each["shared"] for each in made[len(SUMS) :]) <= 99 * 1024


def test_prefill_compiles_to_the_instructions_of_a_hopper_gpu(compiled: Compiled) -> None:
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"):
        assert instruction in compiled.hopper


def test_exponentials_of_prefill_run_while_values_are_multiplied(compiled: Compiled) -> None:
    """64 weights of each thread, in the loops with and without a mask, of both groups of warps."""
    assert len(compiled.exponentials) == 4 and min(compiled.exponentials) >= 64


def test_the_gated_product_keeps_its_sums_in_the_registers_of_a_hopper_gpu(
    compiled: Compiled,
) -> None:
    for made in compiled.gated:
        for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"):
            assert instruction in made["ptx"]
        assert " 0 bytes spill stores, 0 bytes spill loads" in made["said"]
        assert made["shared"] <= 227 * 1024
    assert compiled.num_gated == len(compiled.gated) == len(TILES), "one build for all sizes"


def test_kernels_are_compiled_for_a_device_that_does_not_exist(compiled: Compiled) -> None:
    counts, (meanwhile, interrupted, again, after, *failed) = compiled.ahead
    assert counts == 2 * [[1, 2], [2, 2]], "each kernel once, also after a failure"
    assert meanwhile == interrupted == again == 6, "only finished builds are visible to others"
    num_kernels = after + 2  # two are too large
    assert failed == ["too large"], "a kernel that does not fit fails when it is launched"
    assert after == 8 and len(list(compiled.folder.rglob("*.cubin"))) == num_kernels
