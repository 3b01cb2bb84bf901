"""A module of policies in the working directory that notes when it is imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler import preset
from tests.support.journals import Lines

WORKLOAD = "requests=12,prompt=uniform(20,60),output=uniform(8,30)"
NAME = "evil"
TEXT = """
from pathlib import Path
Path(__file__).with_name("imported").touch()

def q(request, view):
    return request.arrival

def other(request, view):
    return -request.num_prompt
"""


class OwnModule:
    """The module `evil` with the queue rules `evil:q`, which is like fcfs, and `evil:other`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / f"{NAME}.py").write_text(TEXT)

    @property
    def is_imported(self) -> bool:
        return (self.folder / "imported").exists()

    def trace(self, queue: str = "evil:q") -> Path:
        """A run of the queue `fcfs`, whose header names another queue."""
        lines, config = Lines(), preset("vllm_v1", num_blocks=24)
        profile = load_profile("llama3.1-8b-a100-80gb")
        simulate(parse_synthetic(WORKLOAD).generate(), config, profile, trace=lines)
        head, *events = lines
        header = json.loads(head)
        header["config"]["queue"] = queue
        path = self.folder / "run.trace.jsonl"
        path.write_bytes(b"".join([json.dumps(header).encode() + b"\n", *events]))
        return path


@contextmanager
def own_module(folder: Path) -> Iterator[OwnModule]:
    """The module in the working directory and on the path, as in a lab that was started there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, NAME, raising=False)
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield OwnModule(folder)
        sys.modules.pop(NAME, None)
