"""A tiny model whose tokens are bytes, as a folder and as options of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_cli_generate import options_of, save_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def tiny(folder: Path) -> list[str]:
    return options_of(folder)
