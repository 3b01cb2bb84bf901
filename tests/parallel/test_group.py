"""The collectives of a group, in one process."""

import gc
import os
from pathlib import Path

import torch

from headway.parallel.group import connect
from headway.parallel.progress import anonymous_file


def test_a_group_leaves_a_later_file_with_the_same_number_alone(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"")
    file = anonymous_file()
    group = connect(file, 0, 1, torch.device("cpu"))
    later = os.open(path, os.O_RDONLY)
    os.dup2(later, file)  # closes the group's file and takes its number
    num_open = len(os.listdir("/dev/fd"))
    del group
    gc.collect()
    assert len(os.listdir("/dev/fd")) < num_open
    os.close(later)
    os.close(file)
    assert path.read_bytes() == b""
