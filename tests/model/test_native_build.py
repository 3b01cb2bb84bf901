"""The native kernels exist wherever they can be built; other tests skip only where they cannot."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from headway.model.backends.native import build
from headway.model.backends.native.backend import NativeBackend
from headway.model.backends.native.weights import layout, pack_wide
from headway.model.precision import why_not_native

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
# Code that is easy to debug gives the same results in a fraction of the time. Warnings that follow
# the flow of values need it, too: they are checked for this processor only.
QUICK = ["-Og", "-fno-tree-loop-optimize"]
CHECKS = ["-Wall", "-Wextra", "-Werror"]


@needs_compiler
def test_kernels_are_available_with_a_compiler() -> None:
    assert why_not_native() is None


@needs_compiler
@pytest.mark.skipif(platform.machine() != "aarch64", reason="64-bit Arm processors")
def test_the_layout_names_the_byte_products_of_this_cpu() -> None:
    """The compiler's idea of this CPU is the kernel's idea of it."""
    has_dots = "asimddp" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    assert layout().byte_products.startswith("Arm dot products" if has_dots else "portable C")
    assert (layout().wide_group > 0) == has_dots


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 processors")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "icelake-server"])
def test_the_source_compiles_for_older_processors(processor: str) -> None:
    check_source([f"-march={processor}", build.OPENMP])


@needs_compiler
@pytest.mark.skipif(platform.machine() != "aarch64", reason="64-bit Arm processors")
@pytest.mark.parametrize("processor", ["armv8-a", "armv8.2-a+dotprod", "armv8.6-a"])
def test_the_source_compiles_for_other_arm_processors(processor: str) -> None:
    check_source([f"-march={processor}", build.OPENMP])


def check_source(options: list[str]) -> None:
    """The source compiles without a warning."""
    flags = [flag for flag in build.FLAGS if flag not in ("-O3", build.NATIVE)]
    command = ["gcc", *flags, *options, "-O0", *CHECKS, "-S", "-o", "/dev/null", str(build.SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# The 8-bit matrix instruction of newer Arm CPUs, as C.
MATRIX_PRODUCT = """
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
#include <arm_neon.h>
#define __ARM_FEATURE_MATMUL_INT8 1
static inline int32x4_t vmmlaq_s32(int32x4_t sums, int8x16_t a, int8x16_t b) {
    for (int i = 0; i < 32; i++) sums[i / 8] += a[i / 16 * 8 + i % 8] * b[i / 8 % 2 * 8 + i % 8];
    return sums;
}
#endif
"""


@needs_compiler
def test_the_library_runs_without_openmp_and_with_matrix_instructions(tmp_path: Path) -> None:
    """Apple's compiler has no OpenMP, and its CPUs have these instructions: equal bits there."""
    target, emulation = tmp_path / "kernels.so", tmp_path / "emulation.h"
    emulation.write_text(MATRIX_PRODUCT, encoding="utf-8")
    flags = [flag for flag in build.FLAGS if flag != "-O3"]
    flags += [*QUICK, *CHECKS, "-include", str(emulation)]
    command = ["gcc", *flags, "-shared", "-o", str(target), str(build.SOURCE), "-pthread", "-lm"]
    subprocess.run(command, check=True)
    other = build.with_signatures(ctypes.CDLL(str(target)))
    x, norm = torch.randn(64, 96), torch.rand(96)
    ours, theirs = torch.empty(64, 96), torch.empty(64, 96)
    for library, y in ((build.load(), ours), (other, theirs)):
        library.rms_norm(x.data_ptr(), norm.data_ptr(), 64, 96, 1e-5, y.data_ptr(), 3)
    torch.testing.assert_close(ours, theirs)
    if layout().wide_group:
        backend, reference = NativeBackend(), NativeBackend()
        backend.library = other
        weight, rows = pack_wide(torch.randn(33, 128), None), torch.randn(13, 128)
        for count in (1, 3, 4, 8, 13):
            found = backend.linear(rows[:count], weight)
            assert torch.equal(found, reference.linear(rows[:count], weight)), count


@needs_compiler
def test_a_change_in_any_source_file_changes_the_library_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(build.SOURCE.parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(build, "SOURCE", tmp_path / build.SOURCE.name)
    names = {build._fingerprint("gcc")}
    parts = sorted(tmp_path.glob("*.c"))
    for part in parts:
        part.write_text(part.read_text(encoding="utf-8") + "/* changed */\n", encoding="utf-8")
        names.add(build._fingerprint("gcc"))
    assert len(names) == len(parts) + 1


@needs_compiler
def test_the_compiler_fuses_no_product_and_sum_by_itself(tmp_path: Path) -> None:
    """Where it fuses them depends on the code around: rows would get other bits in other batches."""
    source, library = tmp_path / "sum.c", tmp_path / "sum.so"
    source.write_text("float f(float a, float b, float c) { return a * b + c; }\n")
    subprocess.run(["gcc", *build.FLAGS, "-shared", "-o", library, source], check=True)
    f = ctypes.CDLL(str(library)).f
    f.argtypes, f.restype = [ctypes.c_float] * 3, ctypes.c_float
    assert f(1 + 2**-12, 1 + 2**-12, -1 - 2**-11) == 0  # fused: 2**-24
