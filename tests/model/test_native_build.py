"""The native kernels exist wherever they can be built; other tests skip only where they cannot."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from headway.model.backends.native import build
from headway.model.precision import why_not_native

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


@needs_compiler
def test_kernels_are_available_with_a_compiler() -> None:
    assert why_not_native() is None


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 processors")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "icelake-server"])
def test_the_source_compiles_for_older_processors(processor: str) -> None:
    flags = [flag for flag in build.FLAGS if flag not in ("-O3", "-march=native")]
    checks = ["-O1", f"-march={processor}", "-Wall", "-Wextra", "-Werror", "-S", "-o", "/dev/null"]
    command = ["gcc", *flags, *checks, str(build.SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
