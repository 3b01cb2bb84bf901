"""A package that is older than declared is named in one sentence, with the command that updates it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.cli import main as cli
from headway.cli.options.packages import check_extras, check_versions
from headway.errors import ConfigError
from tests.support.waiting import LIMIT

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretend that a version of a package is installed, here and in other processes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), before))))

    def install(name: str, version: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(metadata)

    return install


def test_the_installed_packages_are_new_enough() -> None:
    check_versions()


@pytest.mark.parametrize(
    ("name", "version", "extras"),
    [("llguidance", "1.7.3", ("server",)), ("prometheus-client", "0.9.9", ("torch", "server")),
     ("torch", "2.7.1+cu121", ("torch",)), ("numpy", "1.9", ("",)), ("jinja2", "3.1", ())],
)  # fmt: skip
def test_an_old_package_is_named(
    install: Install, name: str, version: str, extras: tuple[str, ...]
) -> None:
    install(name, version)
    with pytest.raises(ConfigError) as raised:
        check_versions(*extras)
    assert f"{name} {version}" in str(raised.value)
    assert f"pip install --upgrade '{name}>=" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "version", "extras"),
    [("llguidance", "1.7.3", ("torch",)), ("llguidance", "1.10", ("server",)),
     ("uvicorn", "0.30.0", ("server",)), ("torch", "2.8.0+cpu", ("torch",)), ("mypy", "0.1", ())],
)  # fmt: skip
def test_other_packages_are_not(
    install: Install, name: str, version: str, extras: tuple[str, ...]
) -> None:
    install(name, version)
    check_versions(*extras)


def test_extras_are_checked_with_what_every_command_needs(install: Install) -> None:
    install("gguf", "0.1")
    install("xxhash", "3.0")
    with pytest.raises(ConfigError, match=r"gguf 0\.1.*are too old") as raised:
        check_extras("this", "torch")
    assert "xxhash 3.0" in str(raised.value)


def test_a_server_with_an_old_package_does_not_start(install: Install) -> None:
    install("llguidance", "1.0")
    done = subprocess.run(
        [sys.executable, "-m", "headway", "serve", "smollm2-135m", "--port", "0"],
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 2
    assert "llguidance 1.0 is too old" in done.stderr and "Traceback" not in done.stderr


def test_an_exception_that_an_old_package_raises_is_explained(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise TypeError("make_metavar() missing 1 required positional argument: 'ctx'")

    monkeypatch.setattr(cli, "app", command)
    with pytest.raises(TypeError):
        cli.main()
    install("rich", "14.2.9")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "rich 14.2.9 is too old" in capsys.readouterr().err
