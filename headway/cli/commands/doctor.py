"""`headway doctor`: problems of a running server or a trace, and trials of their remedies."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container
from itertools import chain
from pathlib import Path
from typing import Any

from headway.cli.commands.top import API_KEY, fetch
from headway.cli.options import common as options
from headway.cli.options.common import JSON, argument, option
from headway.errors import ConfigError
from headway.lab.cost import known_profiles
from headway.lab.doctor.diagnose import diagnose
from headway.lab.doctor.live import TRIAL_SECONDS
from headway.lab.doctor.text import diagnosis_text, findings_text, trial_text
from headway.lab.doctor.trial import Recording, try_changes
from headway.lab.summary import summarize
from headway.record.reader import complete, read_journal, split_header
from headway.record.stats import stats_of
from headway.scheduler.policies.presets import own_policies
from headway.scheduler.policies.text import ANY

FILE_SUFFIXES = (".json", ".jsonl", ".gz", ".trace")


def doctor_command(
    target: str = argument(
        "http://127.0.0.1:8000", "URL of a server, or a trace file.", metavar="URL|TRACE"
    ),
    try_: list[str] | None = option(
        None,
        "Simulate the recent requests with this change, such as chunk=at_most(512) or "
        "max_num_seqs=64. Nothing is changed. May be repeated.",
        "--try",
        metavar="SLOT=VALUE",
    ),
    profile: str | None = option(None, "Model and costs, where the recorded steps do not suffice."),
    api_key: str | None = API_KEY,
    allow_own_policies: bool = options.ALLOW_OWN_POLICIES,
    json_: bool = JSON,
) -> None:
    """Find problems of a running server or a trace; try a remedy before anything is changed.

    A trial simulates the recorded requests before and after the change. Costs of a step are fitted
    to the recorded steps where these suffice.
    """
    changes = _changes(try_ or [])
    if Path(target).is_file():
        options.import_from_working_directory()  # the recorded policies may be there
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
    if "://" in target or re.match(r"[^/]+:\d+(/|$)", target):
        return False
    return "/" in target or os.sep in target or Path(target).suffix in FILE_SUFFIXES


def _changes(texts: list[str]) -> dict[str, str]:
    changes = {}
    for text in texts:
        name, _, value = map(str.strip, text.partition("="))
        if not name or not value:
            raise ConfigError(f"--try must look like slot=value, not {text!r}")
        changes[name] = value
    return changes


def _of_trace(
    path: Path, changes: dict[str, str], profile: str | None, own: Container[str]
) -> dict[str, Any]:
    header, lines = split_header(read_journal(path))
    with complete(path):
        if changes:
            recording = Recording(header=header, lines=list(lines))
            # A trace must not name a file to read.
            recorded = header.profile if header.profile in known_profiles() else None
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
