"""The documents are true: commands run, shown output is real, tables equal the code.

A code block marked `console` holds commands, each after "$ ", and may show their output; "..."
stands for any omitted lines. A block marked `python` is run; a `text` block directly after it is its
output. A comment `<!-- runs if: module.Name -->` before a `python` block skips it where that name
does not exist. After an intended change, `python -m tests.project.test_docs` writes the output again;
for blocks with "..." it only reports that they no longer match.
"""

from __future__ import annotations

import contextlib
import io
import os
import pydoc
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import pytest
import typer.main

from headway.cli.main import app
from headway.config import DraftStep, QueueRule, SchedulerView, StepActions
from headway.fleet.client import FleetClient
from headway.fleet.settings import FleetSettings
from headway.lab.cost import Machine, Model, Profile
from headway.lab.planner.executors import InProcess
from headway.lab.stories.measure import report
from headway.lab.summary import summarize
from headway.lab.workload import synthetic
from headway.lab.workload.rows import FIELDS
from headway.observe import vitals
from headway.observe.server_metrics import NEW
from headway.plan import Reason
from headway.record import lines
from headway.record.stats import RunStats
from headway.record.writer import header
from headway.request import RequestState
from headway.scheduler.policies.presets import NUMBERS, PARTS, PRESETS, SLOTS, preset, slot

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda path: path.as_posix()
)
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
WIDTH = 100
PIECE = re.compile(
    r"(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.S | re.M
)


class Shown(NamedTuple):
    """Output shown in a document, and the real output."""

    start: int  # position of the text in the document
    text: str
    real: str


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def is_like(shown: str, real: str) -> bool:
    """Whether both are equal, except for spaces at line ends and lines omitted by "..."."""
    lines = [re.escape(line.rstrip()) for line in shown.strip("\n").split("\n")]
    pattern = "\n".join("(?:.*\n)*?.*" if line == r"\.\.\." else line for line in lines)
    plain = "\n".join(line.rstrip() for line in real.strip("\n").split("\n"))
    return re.fullmatch(pattern, plain) is not None


def commands(body: str) -> Iterator[tuple[str, int, str]]:
    """Every command of a console block, the position of its output, and the output shown."""
    for match in re.finditer(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE):
        yield match[1].replace("\\\n", " "), match.start(2), match[2]


def run_headway(arguments: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        app(arguments, standalone_mode=False)
    return printed.getvalue()


@cache
def story_report(name: str) -> str:
    return "".join(f"{line}\n" for line in report(name))


def run_command(command: str) -> str | None:
    """The output of a command; None for a command that is not run here."""
    program, *arguments = shlex.split(command)
    if program == "headway":
        return run_headway(arguments)
    if command == "make demo":
        return run_headway(["compare", "--demo"])
    if arguments[:2] == ["-m", "headway.lab.stories.measure"]:
        return story_report(*arguments[2:])
    if program == "python" and arguments[0].startswith("examples/"):
        example = [sys.executable, str(ROOT / arguments[0]), *arguments[1:]]
        return subprocess.run(example, check=True, capture_output=True, text=True).stdout
    assert program in ("make", "python", "git", "cd"), f"unknown command: {command}"
    return None


def run_python(source: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "<document>", "exec"), {"__name__": "document"})
    return printed.getvalue()


def noted(note: str) -> str:
    """The content that a comment before a block declares."""
    kind, _, rest = note.partition(": ")
    assert kind == "trace lines", f"unknown note: {note}"
    (file,) = Path().glob("*.trace.jsonl")  # the only one that earlier commands wrote
    lines = file.read_text(encoding="utf-8").splitlines()
    return "\n".join(broken(lines[int(number) - 1]) for number in rest.split()) + "\n"


def broken(line: str) -> str:
    """One line of JSON, broken between fields to fit the width."""
    lines = [""]
    for part in re.split(r"(?<=,)(?=[\"\[{])", line):
        if len(lines[-1]) + len(part) > WIDTH:
            lines.append(" ")
        lines[-1] += part
    return "\n".join(lines)


def shown_in(document: str) -> list[Shown]:
    """All output shown in a document; runs its commands and programs in order."""
    found: list[Shown] = []
    printed: tuple[int, str] | None = None  # end of the latest python block, and its output
    for match in PIECE.finditer(document):
        kind, body, start = match["kind"], match["body"], match.start("body")
        if match["note"] and kind == "json":
            found.append(Shown(start, body, noted(match["note"])))
        elif kind == "console":
            for command, place, text in commands(body):
                real = run_command(command)
                if real is not None and text.strip():
                    found.append(Shown(start + place, text, real))
        elif kind == "python":
            note = (match["note"] or "").removeprefix("runs if: ")
            can_run = not note or pydoc.locate(note) is not None
            printed = (match.end(), run_python(body)) if can_run else None
        elif kind == "text" and printed and not document[printed[0] : match.start()].strip():
            found.append(Shown(start, body, printed[1]))
    return found


@pytest.fixture
def scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current folder, and a terminal of known width."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("headway.cli.options.planner.cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr("headway.cli.options.planner.Processes", lambda count: InProcess())


@pytest.mark.usefixtures("scratch_folder", "shared_weights")
@pytest.mark.parametrize("name", NAMES)
def test_shown_output_is_real(name: str) -> None:
    for shown in shown_in(read(name)):
        assert is_like(shown.text, shown.real), (
            f"{name} shows\n{shown.text}\nbut the output is\n{shown.real}\n"
            "If the change is intended, run: python -m tests.project.test_docs"
        )


@pytest.mark.parametrize("name", NAMES)
def test_commands_in_sentences_are_valid(name: str) -> None:
    group = typer.main.get_command(app)
    for words in re.findall(r"`headway ((?!\.)[a-z][^`]*)`", read(name)):
        context = group.make_context("headway", shlex.split(words), resilient_parsing=False)
        with context:
            command, *rest = ("1" if word == "N" else word for word in shlex.split(words))
            found = group.get_command(context, command)  # type: ignore[attr-defined]
            if hasattr(found, "commands") and rest:  # `headway plan tune`
                command, *rest = rest
                found = found.get_command(context, command)
            assert found is not None, f"{name}: there is no `headway {words}`"
            if command == "trace" and not rest:
                rest = ["FILE"]
            found.make_context(command, rest, parent=context)


@pytest.mark.parametrize("name", NAMES)
def test_links_have_targets(name: str) -> None:
    text = read(name)
    for target in re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text):
        path, _, heading = target.partition("#")
        assert "://" not in target, f"{name}: {target} is outside this repository"
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name}: {target} does not exist"
        if heading:
            assert heading in anchors(file.read_text(encoding="utf-8")), f"{name}: {target}"


def anchors(document: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", document, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", NAMES)
def test_lines_fit_100_columns(name: str) -> None:
    assert [line for line in read(name).splitlines() if len(line) > WIDTH] == []


def test_pictures_are_small_and_shown() -> None:
    shown = "".join(map(read, NAMES))
    for path in (ROOT / "docs/images").glob("*.webp"):
        assert path.stat().st_size <= 150_000, path.name
        assert path.name in shown, f"no document shows {path.name}"


def test_the_index_lists_every_decision() -> None:
    listed = re.findall(r"decisions/([\w-]+\.md)", read("docs/index.md"))
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs/decisions").glob("0*.md"))


def test_files_named_in_documents_exist() -> None:
    pattern = r"`((?:bench|docs|examples|headway|tests)/[\w./\-]+\.\w+)`"
    for name in NAMES:
        for path in re.findall(pattern, read(name)):
            assert (ROOT / path).exists(), f"{name} names {path}"


def rows_after(document: str, mark: str) -> list[list[str]]:
    """The header and the cells of the first table after a mark."""
    table = document[document.index(mark) :].split("\n|", 1)[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")]
    return [cells[0], *cells[2:]]


@pytest.mark.parametrize(
    "kind", ["batching queue chunk victim", "headroom swap max_num_seqs max_num_batched_tokens"]
)
def test_preset_tables_equal_the_presets(kind: str) -> None:
    header, *rows = rows_after(read("docs/policies.md"), f"<!-- presets: {kind} -->")
    assert header == ["preset", *kind.split()]
    assert [row[0] for row in rows] == list(PRESETS)
    for name, *values in rows:
        for field, value in zip(header[1:], values, strict=True):
            wanted = slot(field, value) if field in SLOTS else int(value)
            assert getattr(preset(name), field) == wanted, f"{name}: {field}"


def test_numbers_shared_by_presets_are_documented() -> None:
    documented = dict(re.findall(r"`(\w+)` (\d+)", read("docs/policies.md").replace("\n", " ")))
    for name in set(NUMBERS) - {"max_num_seqs", "max_num_batched_tokens"}:
        assert {getattr(preset(p), name) for p in PRESETS} == {int(documented[name])}, name


def test_every_policy_is_documented_with_its_numbers() -> None:
    document = read("docs/policies.md")
    for policy in (*PARTS, *(p for group in SLOTS.values() for p in group)):
        found = re.search(rf"`{policy.__name__}(\([^`]*\))?`", document)
        assert found, policy.__name__
        numbers = [f.name for f in fields(policy)] if isinstance(policy, type) else []
        documented = re.findall(r"(\w+)=", found[1] or "")
        assert sorted(documented) == sorted(numbers), policy.__name__


@pytest.mark.parametrize("protocol", [SchedulerView, StepActions, QueueRule, DraftStep])
def test_every_member_of_a_policy_interface_is_documented(protocol: Any) -> None:
    members = {name for name in vars(protocol) if not name.startswith("_")}
    rows = rows_after(read("docs/policies.md"), f"`{protocol.__name__}` is")
    assert {n for row in rows[1:] for n in re.findall(r"`(\w+)", row[0])} == members


def test_every_reason_for_waiting_is_documented() -> None:
    rows = rows_after(read("docs/policies.md"), "## Waiting, and why")
    assert {row[0].strip("`") for row in rows[1:]} == set(get_args(Reason))


def test_every_reason_of_the_waiting_metric_is_documented() -> None:
    entry = re.search(r"- `waiting_by_reason\{reason\}`:.*?(?=\n- )", read("docs/metrics.md"), re.S)
    assert entry is not None
    named = re.findall(r"`(\w+)`", entry[0])
    assert set(named) - {"num_requests_waiting"} == {*get_args(Reason), NEW}


def test_every_state_is_documented() -> None:
    for state in RequestState:
        assert state.name in read("docs/architecture.md")


TRACE_PARTS: dict[str, type[Any]] = {  # with a section of their own
    "The header": lines.HeaderLine, "Block numbers": lines.BlocksLine,
    "A request that is added": lines.RequestLine, "A request that ends": lines.EndLine,
}  # fmt: skip


def documented_fields() -> dict[str, dict[str, bool]]:
    """The fields of trace lines by section or event, and whether they are marked with a *."""
    found: dict[str, dict[str, bool]] = defaultdict(dict)
    for section in re.split(r"^##+ ", read("docs/trace.md"), flags=re.MULTILINE):
        name = section.split("\n")[0].strip("`")
        for row in re.findall(r"^\| (?!field|event)(.*) \|$", section, re.MULTILINE):
            event, cell = (
                row.split(" | ")[:2] if row.count(" | ") > 1 else ("", row.split(" | ")[0])
            )
            name = event.strip("`| ") or name
            found[name] |= dict.fromkeys(re.findall(r"`(\w+)`", cell), "*" in cell)
    return found


def test_every_field_of_a_trace_is_documented() -> None:
    kinds = TRACE_PARTS | {str(k.__struct_config__.tag): k for k in get_args(lines.Line)}
    fields = {name: msgspec.structs.fields(kind) for name, kind in kinds.items()}
    common = {"event", "t"}  # in the text
    assert documented_fields() == {
        name: {each.encode_name: each.required for each in found if each.encode_name not in common}
        for name, found in fields.items()
    }


def test_every_key_of_a_synthetic_workload_is_documented() -> None:
    rows = rows_after(read("docs/simulator.md"), "### Synthetic text")
    assert sorted(row[0].strip("`") for row in rows[1:]) == sorted(synthetic.FIELDS)


def test_every_field_of_workloads_and_profiles_is_documented() -> None:
    document = read("docs/simulator.md")
    names = [*FIELDS, *(f.name for f in fields(Profile) if f.name not in ("model", "machine"))]
    names += [f"model.{f.name}" for f in fields(Model)]
    names += [f"machine.{f.name}" for f in fields(Machine)]
    assert [name for name in names if f"`{name}`" not in document] == []


def test_every_key_of_a_summary_is_documented() -> None:
    summary = summarize(RunStats(header(preset(), False)))
    document = read("docs/simulator.md")
    assert [key for key in summary if f"`{key}`" not in document] == []


def test_settings_and_counters_of_a_fleet_are_documented() -> None:
    document = read("docs/fleet_faults.md")
    _, *rows = rows_after(document, "`FleetSettings` has these fields")
    known = {name: default for name, default, _ in rows}
    assert known == {f"`{field.name}`": str(field.default) for field in fields(FleetSettings)}
    _, *rows = rows_after(document, "## Counters")
    counters = {name.strip("`") for name, _ in rows}
    assert counters == set(FleetClient(block_size=16).describe())


def test_healthy_values_of_the_documents_are_the_limits_of_the_code() -> None:
    _, *rows = rows_after(read("docs/metrics.md"), "## Healthy values")
    texts = {row[0].strip("`"): " ".join(row[1:]) for row in rows}
    limits = {
        "num_requests_waiting": f"0-{vitals.MAX_WAITING} ",
        "num_preemptions_total": f"0-{vitals.MAX_PREEMPTIONS} per second",
        "recomputed_tokens_total": f"under {100 * vitals.MAX_RECOMPUTE_TAX:g} %",
        "prefill_tokens_total": f"over {100 * vitals.MAX_PREFILL_SHARE:g} %",
        "swap_in_seconds": f"over {1e3 * vitals.MAX_SWAP_IN:g} ms",
        "request_longest_stall_seconds": f"under {vitals.MAX_P99_STALL:g} s, max under "
        f"{vitals.MAX_STALL:g} s",
    }
    assert {name: limit for name, limit in limits.items() if limit not in texts[name]} == {}


def rewrite(path: Path) -> None:
    """Write the real output into a document."""
    document = path.read_text(encoding="utf-8")
    for shown in reversed(shown_in(document)):
        if is_like(shown.text, shown.real):
            continue
        if "\n...\n" in f"\n{shown.text}":
            print(f"{path.name}: look at\n{shown.text}")
            continue
        real = "\n".join(line.rstrip() for line in shown.real.strip("\n").split("\n")) + "\n"
        document = document[: shown.start] + real + document[shown.start + len(shown.text) :]
    path.write_text(document, encoding="utf-8")


def main() -> None:
    os.environ["COLUMNS"] = str(WIDTH)
    for path in DOCUMENTS:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            rewrite(path)


if __name__ == "__main__":
    main()
