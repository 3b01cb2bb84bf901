"""The descriptor of a group's store."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headway.parallel import group
from headway.parallel.channel import anonymous_file

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")


def num_open() -> int:
    return len(os.listdir("/dev/fd"))


def reuse(file: int, path: Path) -> None:
    """Close a descriptor and give its number to another file, which stays open."""
    path.touch()
    os.close(file)
    other = os.open(path, os.O_RDWR)
    if other != file:
        os.dup2(other, file)
        os.close(other)


def test_a_destroyed_group_writes_to_no_other_file(tmp_path: Path) -> None:
    path, before, file = tmp_path / "other", num_open(), anonymous_file()
    made = group.connect(file, 0, 1, torch.device("cpu"))
    reuse(file, path)
    del made
    gc.collect()
    assert path.read_bytes() == b""
    os.close(file)
    assert num_open() == before


def test_a_group_that_fails_writes_to_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(group, "_gloo", fail)
    path, before, file = tmp_path / "other", num_open(), anonymous_file()
    with pytest.raises(RuntimeError, match="no network") as error:
        group.connect(file, 0, 1, torch.device("cpu"))
    reuse(file, path)
    del error
    gc.collect()
    assert path.read_bytes() == b""
    os.close(file)
    assert num_open() == before
