"""A full disk: the trace keeps whole lines, the log says what is missing, and the server runs."""

from __future__ import annotations

import io
import logging
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.cli.commands.serve import announce
from headway.engine.input_processor import InputProcessor
from headway.errors import FormatError
from headway.events import Reset
from headway.record.lines import ResetLine
from headway.record.reader import read_journal
from headway.record.writer import JournalWriter, header, open_journal
from headway.scheduler import preset
from headway.server.process.log_setup import LossyStreamHandler
from headway.server.serving import ModelInfo

FULL = Path("/dev/full")
CONFIG = preset("headway", max_model_len=64, num_blocks=16, block_size=16)
HEADER = header(CONFIG, False)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writes beyond this size fail; Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_trace_on_a_full_disk_consists_of_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    file = open_journal(path)
    write, num_lines = JournalWriter(file, HEADER, name=path.name), 0
    with largest_file(path.stat().st_size + 1000), pytest.raises(FormatError, match=path.name):
        while num_lines < 1000:
            write(Reset(False, [], 0.5))
            num_lines += 1
    write(Reset(False, [], 0.5))  # there is space again
    file.close()
    _, *lines = read_journal(path)
    assert num_lines > 0 and lines == [ResetLine(0.5)] * (num_lines + 1)


def test_a_trace_that_cannot_be_started_is_an_error_that_names_the_file() -> None:
    with open_journal(FULL) as file, pytest.raises(FormatError, match=str(FULL)):
        JournalWriter(file, HEADER, name=str(FULL))


def test_a_server_whose_output_is_on_a_full_disk_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = InputProcessor(tokenizer=None, vocab_size=1, hidden_size=1, eos_ids=frozenset())
    texts = {"model_name": "a", "preset": "headway", "execution": "", "description": ""}
    info = ModelInfo(input_processor=processor, max_model_len=64, **texts)
    with io.TextIOWrapper(open_journal(FULL), write_through=True) as full:
        with pytest.raises(OSError):
            full.write("a")
        monkeypatch.setattr(sys, "stderr", full)
        announce("http://127.0.0.1:1", info)
        monkeypatch.undo()


class Disk(io.StringIO):
    """A file on a disk that can be full."""

    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_lines_lost_on_a_full_disk_are_reported_once_when_there_is_space() -> None:
    disk = Disk()
    handler = LossyStreamHandler(disk)
    for number in range(12):
        disk.is_full = 1 <= number < 10
        handler.handle(logging.makeLogRecord({"msg": f"line {number}"}))
    lines = disk.getvalue().splitlines()
    assert [line for line in lines if "missing" not in line] == ["line 0", "line 10", "line 11"]
    (report,) = (line for line in lines if "missing" in line)
    assert "9 lines" in report and "No space left" in report
