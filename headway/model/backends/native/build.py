"""Compiles source/kernels.c and the files it includes for this machine, once, and loads the library.

Without a compiler there is no library, and the plain torch backend is used.

The library's file name in the cache is a hash of the source, the compiler and the CPU's features,
so that machines that share a home folder never load each other's code.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from headway.model.registry import cache_root

SOURCE = Path(__file__).parent / "source/kernels.c"
NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
# A product and a sum are fused only where the source says so: compilers fuse an expression in one
# place and not in another, for example to avoid long chains of fused sums on some processors.
# Renaming registers at the end removes copies from the inner loops of products: a tenth of their time.
FLAGS = (
    "-O3", NATIVE, "-std=gnu11", "-fPIC", "-Wno-psabi", "-ffp-contract=off", "-frename-registers",
)  # fmt: skip
OPENMP = "-fopenmp"  # without it, as with Apple's compiler, team.c starts threads itself
POINTER, INTEGER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
SIGNATURES = {
    "layout": [POINTER],
    "forward": [POINTER, POINTER, POINTER, POINTER, POINTER, POINTER],
    "layer": [POINTER, INTEGER, POINTER, POINTER],
    "multiply": [POINTER, POINTER, INTEGER, POINTER, REAL, POINTER, INTEGER, POINTER],
    "weight_rows": [POINTER, POINTER, INTEGER, POINTER],
    "rms_norm": [POINTER, POINTER, INTEGER, INTEGER, REAL, POINTER, INTEGER],
    "gate_rows": [POINTER, INTEGER, INTEGER, INTEGER, POINTER, INTEGER],
    "rotate_and_store": [POINTER, INTEGER, POINTER, POINTER, POINTER, REAL, INTEGER],
    "attention": [POINTER, INTEGER, POINTER, POINTER, POINTER],
    "route": [POINTER, POINTER, INTEGER, POINTER, POINTER],
}


class NativeUnavailable(Exception):
    """The native library cannot be used; the message says why."""


@cache
def load() -> ctypes.CDLL:
    """Load the library, compiling it if needed; NativeUnavailable if that fails."""
    if os.environ.get("HEADWAY_NATIVE") == "0":
        raise NativeUnavailable("disabled by HEADWAY_NATIVE=0")
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "cc"))), None)
    if compiler is None:
        raise NativeUnavailable("no C compiler found (gcc or cc)")
    path = cache_root() / "native" / f"kernels-{_fingerprint(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    try:
        return with_signatures(ctypes.CDLL(str(path)))
    except OSError as error:
        raise NativeUnavailable(f"cannot load {path}: {error}") from None


def with_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def _fingerprint(compiler: str) -> str:
    """A hash of everything that the compiled code depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    features = platform.machine()
    if (cpu := Path("/proc/cpuinfo")).exists():
        lines = cpu.read_text(encoding="utf-8", errors="replace").splitlines()
        kinds = ("flags", "Features", "model name", "CPU part", "CPU implementer")
        features += "".join(sorted({line for line in lines if line.startswith(kinds)}))
    sources = b"".join(path.read_bytes() for path in sorted(SOURCE.parent.glob("*.c")))
    parts = (sources, version, features.encode(), " ".join((*FLAGS, OPENMP)).encode(),
             torch.__version__.encode())  # fmt: skip
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / path.name
        command = [compiler, *FLAGS, "-shared", "-o", str(target), str(SOURCE)]
        for threads in ([OPENMP, "-Wl,--as-needed", *_threads()], ["-pthread"]):
            done = subprocess.run(
                [*command, *threads, "-lm"], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                os.replace(target, path)  # atomic: another process never sees a partial file
                return
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NativeUnavailable(f"{compiler} failed to compile the kernels: {last}")


def _threads() -> list[str]:
    """torch's own OpenMP library, if it has one: two thread pools would compete for the cores."""
    folder = Path(torch.__file__).parent / "lib"
    return [str(path) for path in sorted(folder.glob("libgomp*.so*"))[:1]]
