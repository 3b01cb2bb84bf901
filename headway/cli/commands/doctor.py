"""`headway doctor`: problems of a running server or a trace, and trials of their remedies."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.commands.top import ApiKey, fetch
from headway.cli.options.common import AllowOwnPolicies, Json, import_from_working_directory
from headway.errors import ConfigError
from headway.lab.cost import known_profiles
from headway.lab.doctor.diagnose import diagnose
from headway.lab.doctor.live import TRIAL_SECONDS
from headway.lab.doctor.text import diagnosis_text, findings_text, trial_text
from headway.lab.doctor.trial import Recording, try_changes
from headway.lab.summary import summarize
from headway.record.lines import HeaderLine, Line
from headway.record.reader import complete, read_journal, split_header
from headway.record.stats import stats_of
from headway.scheduler.policies.presets import own_policies
from headway.scheduler.policies.text import ANY

FILE_SUFFIXES = (".json", ".jsonl", ".gz", ".trace")
Target = Annotated[
    str, typer.Argument(metavar="URL|TRACE", help="URL of a server, or a trace file.")
]
Try = Annotated[
    list[str] | None,
    typer.Option(
        "--try",
        metavar="SLOT=VALUE",
        help="Simulate the recent requests with this change, such as chunk=at_most(512) or "
        "max_num_seqs=64. Nothing is changed. May be repeated.",
    ),
]
TrialProfile = Annotated[
    str | None,
    typer.Option("--profile", help="Model and costs, where the recorded steps do not suffice."),
]


def doctor_command(
    target: Target = "http://127.0.0.1:8000",
    try_: Try = None,
    profile: TrialProfile = None,
    api_key: ApiKey = None,
    allow_own_policies: AllowOwnPolicies = False,
    json_: Json = False,
) -> None:
    """Find problems of a running server or a trace; try a remedy before anything is changed.

    A trial simulates the recorded requests before and after the change. Costs of a step are fitted
    to the recorded steps where these suffice.
    """
    changes = _changes(try_ or [])
    if Path(target).is_file():
        import_from_working_directory()  # the recorded policies may be there
        own = ANY if allow_own_policies else own_policies(changes)
        found = _of_trace(Path(target), changes, profile, own)
    elif _looks_like_a_file(target):
        raise ConfigError(
            f"{target}: no such trace file; check the path, or give a server as http://HOST:PORT"
        )
    elif changes:
        body = {"changes": changes, "profile": profile}
        found = fetch(target, "/doctor/try", api_key, body, TRIAL_SECONDS)
    else:
        found = fetch(target, "/doctor", api_key)
    print(json.dumps(found, indent=2) if json_ else _text(found))


def _looks_like_a_file(target: str) -> bool:
    """Whether a target has no scheme and no port, but a path or the suffix of a trace."""
    has_port = re.match(r"[^/]+:\d+(/|$)", target) is not None
    if "://" in target or has_port:
        return False
    return "/" in target or os.sep in target or Path(target).suffix in FILE_SUFFIXES


def _changes(texts: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for (name, equals, value), text in zip(pairs, texts, strict=True):
        if not (name.strip() and equals and value.strip()):
            raise ConfigError(f"--try must look like slot=value, not {text!r}")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _of_trace(
    path: Path, changes: dict[str, str], profile: str | None, own: Container[str]
) -> dict[str, Any]:
    header, lines = split_header(read_journal(path))
    with complete(path):
        return _diagnosis(header, lines, changes, profile, own)


def _diagnosis(
    header: HeaderLine,
    lines: Iterator[Line],
    changes: dict[str, str],
    profile: str | None,
    own: Container[str],
) -> dict[str, Any]:
    if changes:
        recording = Recording(header=header, lines=list(lines))
        recorded: str | None = header.profile
        if recorded not in known_profiles():  # a trace must not name a file to read
            recorded = None
        return try_changes(recording, changes, profile or recorded, own)
    stats = stats_of(chain([header], lines))
    summary = summarize(stats)
    findings = [finding._asdict() for finding in diagnose(summary, stats.config)]
    return {"findings": findings, "config": stats.config, "summary": summary}


def _text(found: dict[str, Any]) -> str:
    if "before" in found:
        return trial_text(found)
    if "vitals" in found:
        return diagnosis_text(found)
    return findings_text(found["findings"]) or "The doctor found no problems."
