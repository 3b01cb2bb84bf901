"""Runs stories and measures their numbers.

python -m headway.lab.stories.measure [NAME...]     print the numbers of these stories, or of all
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from headway.lab.recording.reader import RunRecording, read_recording
from headway.lab.recording.run import SimulatedRun
from headway.lab.recording.spec import read_spec
from headway.lab.stories import UNITS, Story, find_story, load_stories


def recordings_of(story: Story) -> dict[str, RunRecording]:
    """A recording of every run of a story."""
    return {
        name: read_recording(SimulatedRun(read_spec(spec)).record())
        for name, spec in story.runs.items()
    }


def measure(
    story: Story, recordings: dict[str, RunRecording] | None = None
) -> dict[str, float | None]:
    """The numbers of a story by label, in their units; None for a number without a value."""
    recordings = recordings or recordings_of(story)
    values = {name: (each.end or {}).get("numbers", {}) for name, each in recordings.items()}
    found: dict[str, float | None] = {}
    for number in story.numbers:
        value = values[number.run].get(number.label)
        if value is not None and number.per:
            divisor = values[number.per].get(number.label)
            value = value / divisor if divisor else None
        found[number.label] = None if value is None else value * UNITS[number.unit]
    return found


def report(name: str) -> Iterator[str]:
    """The numbers of a story as its runs give them, one line each; ConfigError if unknown."""
    story = find_story(name)
    measured = measure(story)
    width = max(map(len, measured), default=0)
    for number in story.numbers:
        value = measured[number.label]
        shown = "none" if value is None else f"{value:,.{number.digits}f}"
        yield f"{number.label:{width}}  {shown} {number.unit}".rstrip()


def main(names: list[str]) -> None:
    """Print the numbers of these stories, or of all."""
    for name in names or [story.name for story in load_stories()]:
        if len(names) != 1:
            print(f"{name}:")
        print(*report(name), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
