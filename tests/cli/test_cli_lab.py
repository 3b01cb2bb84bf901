"""`headway lab`: wrong input gives one sentence; what can be shown is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from headway.lab.cost import load_profile
from headway.lab.recording import run
from headway.lab.recording.reader import read_recording
from headway.lab.recording.run import recording_of_file
from headway.lab.simulate import simulate
from headway.lab.workload.synthetic import parse_synthetic
from headway.record.lines import CompletedLine, PlannedLine
from headway.record.reader import parse_journal
from headway.scheduler import preset
from tests.cli.test_cli import Done, headway, refused
from tests.support.journals import Lines, of_kind

WORKLOAD = "requests=12,prompt=uniform(20,60),output=uniform(8,30)"


@pytest.fixture(scope="module")
def lines() -> Lines:
    """A recorded run."""
    file, profile = Lines(), load_profile("llama3.1-8b-a100-80gb")
    config = preset("vllm_v1", num_blocks=24)
    simulate(parse_synthetic(WORKLOAD).generate(), config, profile, trace=file, trace_blocks=True)
    return file


def place(lines: Lines, kind: type[PlannedLine] | type[CompletedLine], step: int) -> int:
    """The place of a plan or of its end among the lines."""
    journal = lines.read()
    found = (line for line in of_kind(kind, journal) if line.step == step)
    return journal.index(next(found))


def trace_with(lines: list[bytes], folder: Path) -> Path:
    path = folder / "run.trace.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def stepped(monkeypatch: pytest.MonkeyPatch, path: Path, commands: str) -> Done:
    monkeypatch.setattr("sys.stdin", io.StringIO(commands))
    return headway("lab", "--terminal", path)


@pytest.mark.parametrize("where", [[], ["--terminal"]])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["requests=1000000"], ["20000", "1000000", "headway simulate"]),
        (["requests=many"], ["many"]),
        ([WORKLOAD, "--victim", "nowhere:rule"], ["victim", "nowhere"]),
        ([WORKLOAD, "--victim", "tests.cli.test_cli_lab:gone"], ["victim", "gone"]),
        (["missing.jsonl"], ["missing.jsonl"]),
    ],
)
def test_a_run_that_does_not_exist_is_refused_at_once(
    where: list[str], options: list[str], parts: list[str]
) -> None:
    error = refused("lab", *where, *options)
    assert all(part in error for part in parts), error


@pytest.mark.parametrize("where", [[], ["--terminal"]])
def test_a_trace_of_another_version_is_refused(
    where: list[str], lines: Lines, tmp_path: Path
) -> None:
    head = json.dumps({**json.loads(lines[0]), "headway_trace": 2})
    error = refused("lab", *where, trace_with([f"{head}\n".encode(), *lines[1:]], tmp_path))
    assert "version 2" in error and "record the run again" in error


def test_a_truncated_trace_is_shown_up_to_its_last_line(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = place(lines, PlannedLine, 19)
    path = trace_with([*lines[:cut], lines[cut][:40]], tmp_path)
    done = stepped(monkeypatch, path, "j 18\nq\n")
    assert done.code == 0 and "step 18 of" in done.out
    assert f":{cut + 1}:" in done.err and "ends within this line" in done.err


def test_a_trace_with_lost_lines_is_shown_up_to_them(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps after them would be wrong."""
    lost, found = (place(lines, PlannedLine, step) for step in (8, 12))
    path = trace_with([*lines[:lost], *lines[found:]], tmp_path)
    done = stepped(monkeypatch, path, "j 7\nq\n")
    assert done.code == 0 and "step 7 of 8" in done.out
    assert f"line {lost + 1} is step 12, not 8" in done.err
    recording = read_recording(recording_of_file(path))
    whole = read_recording(recording_of_file(trace_with(lines, tmp_path)))
    assert all(recording.ops(frame) == whole.ops(frame) for frame in range(8))


@pytest.mark.parametrize("is_short", [True, False])
def test_a_trace_is_decided_again_if_it_has_few_steps(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    """Whatever the number of its lines."""
    num_steps = sum(isinstance(line, CompletedLine) for line in parse_journal("run", lines))
    assert num_steps < len(lines) - 1
    monkeypatch.setattr(run, "MAX_REPLAYED", num_steps if is_short else num_steps - 1)
    recording = read_recording(recording_of_file(trace_with(lines, tmp_path)))
    assert recording.header["source"] == ("replay" if is_short else "trace")


def test_a_complete_trace_with_blocks_has_no_warning(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = stepped(monkeypatch, trace_with(lines, tmp_path), "e\nq\n")
    assert done.code == 0 and not done.err
    assert "24 blocks free" in done.out and "finished: 12" in done.out


def test_an_export_says_what_is_missing(lines: Lines, tmp_path: Path) -> None:
    path = trace_with([*lines[:40], lines[40][:40]], tmp_path)
    done = headway("lab", path, "--export", tmp_path / "run.html")
    assert done.code == 0 and "ends within this line" in done.err
    assert (tmp_path / "run.html").stat().st_size > 100_000


def test_a_trace_without_steps_is_refused(lines: Lines, tmp_path: Path) -> None:
    assert "no steps" in refused("lab", "--terminal", trace_with(lines[:1], tmp_path))


@pytest.mark.parametrize("flag", ["--export", "--attach", "--against"])
def test_options_of_the_page_have_no_meaning_in_the_terminal(flag: str) -> None:
    assert f"{flag} x cannot be used with --terminal" in refused("lab", "--terminal", flag, "x")
