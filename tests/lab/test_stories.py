"""Stories: every number comes out, every step exists, every answer is right, errors name the field."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headway.errors import ConfigError, FormatError
from headway.lab.recording.reader import RunRecording
from headway.lab.recording.run import SimulatedRun
from headway.lab.recording.spec import read_spec
from headway.lab.stories import (
    FOLDER,
    Number,
    Story,
    find_story,
    load_stories,
    numbers_of,
    read_story,
)
from headway.lab.stories.measure import measure, recordings_of, report
from headway.lab.web.app import LabApp

STORIES = load_stories()
NAMES = [story.name for story in STORIES]
EXAMPLE = FOLDER / "05-free-first.toml"


@pytest.mark.usefixtures("shared_recordings")
@pytest.mark.parametrize("story", STORIES, ids=NAMES)
def test_the_runs_of_a_story_give_what_it_says(story: Story) -> None:
    """One test for numbers and steps: the runs are made once."""
    recordings = recordings_of(story)
    measured = measure(story, recordings)
    wrong = [(n, measured[n.label]) for n in story.numbers if not n.is_like(measured[n.label])]
    assert not wrong
    assert len(measured) == len(story.numbers), "two numbers have the same label"
    assert story.numbers or story.name == "your-own-run"
    for look in story.looks:
        recording = recordings[look.run]
        steps = {recording.column("step", frame) for frame in range(recording.num_frames)}
        assert look.step in steps, look
    for recording in recordings.values():
        assert recording.end is not None
        assert recording.end["error"] == "" and recording.end["rejected"] == []


@pytest.mark.parametrize("story", STORIES, ids=NAMES)
def test_only_the_right_choice_states_the_number(story: Story) -> None:
    question = story.question
    if question.number:
        (number,) = (n for n in story.numbers if n.label == question.number)
        pattern = rf"(?<![\d.,]){re.escape(number.shown)}(?![\d,]|\.\d)"
        found = [
            place for place, choice in enumerate(question.choices) if re.search(pattern, choice)
        ]
        assert found == [question.answer]
    assert len(set(question.choices)) == len(question.choices) >= 3
    assert all(question.why) and story.text and story.looks


def test_the_number_of_a_question_covers_most_stories() -> None:
    assert sum(bool(story.question.number) for story in STORIES) >= 10


def test_stories_are_numbered_in_order() -> None:
    assert [story.order for story in STORIES] == list(range(1, 18))
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("story", STORIES, ids=NAMES)
def test_the_json_of_a_story_can_be_run(story: Story) -> None:
    described = json.loads(json.dumps(story.describe()))
    runs = [described["spec"], described["other"], *described["more"].values()]
    for run in filter(None, runs):
        assert read_spec(run).story.split("/")[0] == story.name
    assert set(described) >= {"name", "title", "text", "looks", "question", "numbers", "lesson"}
    assert all(set(n) >= {"label", "metric", "value", "unit"} for n in described["numbers"])


def recorded(**spec: object) -> dict[str, object]:
    recording = RunRecording()
    recording.read(b"".join(SimulatedRun(read_spec(spec)).record()))
    assert recording.end is not None
    return recording.end


def test_a_recording_has_the_numbers_to_which_its_run_contributes() -> None:
    story = find_story("free-first")
    assert numbers_of("free-first/other") == {"vllm_v1: steps": "steps"}
    assert recorded(**story.runs["other"])["numbers"] == {"vllm_v1: steps": 30.0}
    ratio = "continuous / static, 8 rows"
    assert ratio in numbers_of("worth") and ratio in numbers_of("worth/other")
    assert ratio not in numbers_of("worth/static_32")


def test_the_page_gets_all_stories_and_can_run_one() -> None:
    app = LabApp()
    (body,) = app.handle("GET", "api/catalog", {}, b"").body
    stories = {story["name"]: story for story in json.loads(body)["stories"]}
    assert list(stories) == NAMES
    spec = json.dumps(stories["free-first"]["spec"]).encode()
    recording = RunRecording()
    recording.read(b"".join(app.handle("POST", "api/recording", {}, spec).body))
    assert recording.end is not None and recording.end["numbers"]["2 is admitted in step"] == 10
    (body,) = LabApp("serve").handle("GET", "api/catalog", {}, b"").body
    assert json.loads(body)["stories"] == []


def test_a_changed_story_gives_other_numbers_and_none_for_what_is_gone() -> None:
    story = find_story("free-first")
    changed = {**story.runs["spec"], "requests": [{"id": "0", "prompt": 60, "output": 30}]}
    assert recorded(**changed)["numbers"] == {
        "1 ends in step": None, "2 is admitted in step": None, "nano_vllm: steps": 30.0,
    }  # fmt: skip


def test_a_run_without_a_story_has_no_numbers() -> None:
    assert recorded(requests=[{"prompt": 4, "output": 2}])["numbers"] == {}


@pytest.mark.parametrize("reference", ["no-such-story", "worth/no-such-run"])
def test_an_unknown_story_or_run_is_refused(reference: str) -> None:
    with pytest.raises(ConfigError, match="no-such"):
        SimulatedRun(read_spec({"requests": [{"prompt": 4}], "story": reference}))


def test_a_number_is_compared_to_the_digits_it_shows() -> None:
    number = Number(label="n", metric="steps", value=14.25)
    assert number.is_like(14.2461) and not number.is_like(14.26) and not number.is_like(None)
    assert Number(label="n", metric="steps", value=8192).shown == "8,192"


def test_the_report_has_every_number() -> None:
    assert [line.split()[-1] for line in report("free-first")] == ["9", "10", "31", "30"]


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('title = "', 'titel = "', "titel"),
        ('lesson = "', 'title2 = "', "title2"),
        ("answer = 0", "answer = 3", "question.answer"),
        ("answer = 0", "answer = true", "question.answer"),
        ('"in step 16", ', "", "question.why"),
        ("step = 9", "step = -1", r"looks\[1\].step"),
        ('run = "other"', 'run = "another"', r"looks\[3\].run"),
        ('metric = "finished(1)"', 'metric = "ends(1)"', r"numbers\[0\].metric"),
        ('metric = "finished(1)"', 'metric = "finished(1, x)"', r"numbers\[0\].metric"),
        ('metric = "admitted(2)"', "metric = 2", r"numbers\[1\].metric"),
        ("value = 31", 'value = "31"', r"numbers\[2\].value"),
        ("value = 31", 'value = 31\nunit = "hours"', r"numbers\[2\].unit"),
        ('number = "2 is admitted in step"', 'number = "no label"', "question.number"),
        ('preset = "vllm_v1"', "preset = 1", "other: preset"),
        ("num_blocks = 11", "num_blocks = ", "line 15"),
        ("[other]", "[more]", "preset must be a table"),
        ("text = [", "text = 3\nx = [", "key must be"),
        ("text = [", 'sync = "both"\ntext = [', "sync"),
    ],
)  # fmt: skip
def test_an_error_names_file_and_field(tmp_path: Path, old: str, new: str, field: str) -> None:
    path = tmp_path / "05-broken.toml"
    source = EXAMPLE.read_text(encoding="utf-8")
    assert old in source
    path.write_text(source.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(FormatError, match=field) as error:
        read_story(path)
    assert "05-broken.toml" in str(error.value)


def test_a_file_without_a_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "story.toml"
    path.write_bytes(EXAMPLE.read_bytes())
    with pytest.raises(FormatError, match="NUMBER-NAME"):
        read_story(path)
