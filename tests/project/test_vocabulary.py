"""Names and phrases that the project does not use; a match is reported with its file and line.

Requests, blocks and steps are things, not people, and names are those that users of vLLM and SGLang
know.

    python -m tests.project.test_vocabulary headway/server docs     list all matches in these places
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ("headway", "tests", "bench", "docs", "examples")
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml")
SUFFIXES = {".py", ".md", ".toml", ".js", ".mjs", ".html", ".css", ".c", ".h"}

# Phrases, in any case, as whole words. An underscore separates words too: test names are sentences.
PHRASES = (
    "nobody", "nobody's", "somebody", "somebody's", "everybody", "everyone", "anybody", "anyone",
    "whoever", "whomever", "those who", "he who", "no one", "newcomers?", "so many", "what there is",
    "of one's own", "one's own", "told", "wish", "wishes", "wished", "foretells?", "foretold", "ails?",
    "whence", "thereof", "on fire", "the door", "at the door", "one likes", "for ever", "all there is",
    "who waits?", "who runs?", "who decodes?", "who ends?", "who has waited", "who was preempted",
    "in any company", "company it keeps", "rows? of nobody", "gives? way", "at one's", "begun prompts?",
)  # fmt: skip
# Names in code, as whole words or as parts of a name between underscores.
NAMES = (
    "max_requests", "decode_steps", "max_new_tokens", "Lockstep", "lockstep", "Anteroom", "anteroom",
    "Ledger", "ledger", "Survey", "survey", "Holding", "Verbs", "Handover", "handover", "Gatherer",
    "gatherer", "Gathering", "Wishes", "Asking", "Lives", "Happened", "News", "news", "Gone",
    "uncollected", "twins?", "seats?", "seated", "unseat", "reseated", "bumps?", "bumped", "entitled",
    "ran_short", "strayed", "DeviceSeats", "leader", "leaders", "sharing_of", "find_floors",
)  # fmt: skip
PREFIXES = ("MOST_", "LEAST_")
FLAGS = (
    "--max-requests",
    "--decode-steps",
    "--max-length",
    "--precision",
    "--depth",
    "--max-new-tokens",
)

PATTERN = re.compile(
    r"(?i:(?<![a-z])(?:" + "|".join(p.replace(" ", r"[\s_]+") for p in PHRASES) + r")(?![a-z]))"
    r"|(?<![A-Za-z])(?:" + "|".join(NAMES) + r")(?![A-Za-z])"
    r"|\b(?:" + "|".join(PREFIXES) + r")(?=[A-Z])"
    r"|(?:" + "|".join(FLAGS) + r")\b"
)  # fmt: skip
# Files that are about a retired word, such as a list of replaced flags; names of other libraries;
# texts of prompts.
ALLOWED: dict[str, frozenset[str]] = {
    "tests/end_to_end/test_real_equality.py": frozenset({"max_new_tokens"}),
    "bench/cpu_peers.py": frozenset({"max_new_tokens"}),
    "tests/support/real.py": frozenset({"everybody"}),
    "headway/cli/options/replaced.py": frozenset(FLAGS),
    "tests/cli/test_cli.py": frozenset(FLAGS),
}


def texts(places: Iterable[str]) -> Iterator[Path]:
    for place in places:
        path = ROOT / place
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            is_generated = {"__pycache__", "results", "node_modules"} & set(file.parts)
            is_text = file.suffix in SUFFIXES or file.name in FILES
            if file.is_file() and is_text and not is_generated and file.name != Path(__file__).name:
                yield file


def matches(places: Iterable[str]) -> list[str]:
    """Every match as `file:line: word`."""
    found = []
    for file in texts(places):
        name = str(file.relative_to(ROOT))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            words = [m[0] for m in PATTERN.finditer(line) if m[0] not in ALLOWED.get(name, ())]
            found += [f"{name}:{number}: {word}" for word in words]
    return found


@pytest.mark.parametrize("place", [*PLACES, "."])
def test_no_retired_name_or_phrase_is_left(place: str) -> None:
    found = matches(FILES if place == "." else [place])
    assert not found, f"{len(found)} matches:\n" + "\n".join(found[:40])


@pytest.mark.parametrize(
    "line",
    [
        "Nobody waits.", "def test_whoever_waits_is_seen():", "self.max_requests = 3", "MOST_ROWS = 4",
        "headway run --max-requests 4", "class Lockstep:", "all seats are taken", "the newcomers wait",
        "It is told of the end.", "Those who wait for ever", "requests, and who runs",
    ],
)  # fmt: skip
def test_a_retired_word_is_found(line: str) -> None:
    assert PATTERN.search(line)


@pytest.mark.parametrize(
    "line",
    [
        "a conversation",
        "the newest",
        "almost_all = 3",
        "wishlist",
        "the user who asks",
        "companion",
    ],
)
def test_ordinary_words_are_left_alone(line: str) -> None:
    assert not PATTERN.search(line)


if __name__ == "__main__":
    print("\n".join(matches(sys.argv[1:] or [*PLACES, *FILES])))
