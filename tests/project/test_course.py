"""The course agrees with the code: stories, presets, states and metrics."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from headway.lab.recording.metrics import METRICS
from headway.lab.stories import Look, Number, Question, Story, load_stories
from headway.request import TRANSITIONS, RequestState
from headway.scheduler.policies.presets import PRESETS

COURSE = Path(__file__).parents[2] / "docs" / "course"
LESSONS = {
    path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "): path
    for path in sorted(COURSE.glob("*.md"))
}
NODE = r"(\w+)(?:(?:\(\[|\[|\{)\"[^\"]+\"(?:\]\)|\]|\}))?"
EDGE = re.compile(rf"    {NODE} (?:-- (yes|no) )?--> {NODE}")


def read(name: str) -> str:
    return (COURSE / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("story", load_stories(), ids=lambda story: story.name)
def test_every_story_is_named_in_its_lesson(story: Story) -> None:
    assert f"`{story.name}`" in LESSONS[story.lesson].read_text(encoding="utf-8")


def test_stories_named_in_the_course_exist() -> None:
    names = {story.name for story in load_stories()}
    for path in COURSE.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"[Ss]tory\s+`([a-z-]+)`", text)) <= names, path.name


def test_the_table_of_lessons_lists_their_stories() -> None:
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\) \| ([\d, ]+) \|$", read("index.md"), re.MULTILINE)
    listed = {title: [int(each) for each in orders.split(",")] for title, _, orders in rows}
    for lesson in {story.lesson for story in load_stories()}:
        assert listed[lesson] == [s.order for s in load_stories() if s.lesson == lesson]
    assert [LESSONS[title].name for title, _, _ in rows] == [name for _, name, _ in rows]
    names = {story.order: story.name for story in load_stories()}
    for title in ("Three misconceptions", "Quiz"):
        text = LESSONS[title].read_text(encoding="utf-8")
        assert all(
            f"`{names[order]}`" in text or f" {names[order]}\n" in text for order in listed[title]
        )


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_sound_flow_chart(name: str) -> None:
    section = read("presets.md").split(f"\n## {name}\n")[1].split("\n## ")[0]
    (chart,) = re.findall(r"```mermaid\nflowchart TD\n(.*?)```", section, re.DOTALL)
    check_chart(chart)


def check_chart(chart: str) -> None:
    """Each node has one label, decisions have two answers, and all paths lead to a plan."""
    labels = Counter(re.findall(r"(\w+)(?:\(\[|\[|\{)\"", chart))
    edges = [match.groups() for line in chart.splitlines() if (match := EDGE.fullmatch(line))]
    alone = [line for line in chart.splitlines() if not EDGE.fullmatch(line)]
    assert all(re.fullmatch(rf"    {NODE}", line) for line in alone), alone
    nodes = {node for start, _, end in edges for node in (start, end)}
    assert set(labels) == nodes and set(labels.values()) == {1}
    decisions = set(re.findall(r"(\w+)\{\"", chart))
    ends = set(re.findall(r"(\w+)\(\[\"plan", chart))
    for node in nodes:
        answers = sorted(answer or "" for start, answer, _ in edges if start == node)
        wanted = ["no", "yes"] if node in decisions else [] if node in ends else [""]
        assert answers == wanted, node
    assert {end for _, _, end in edges} == nodes - {"start"} and ends


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("due -- yes --> decode", "due --> decode"),
        ('plan(["plan: prompts and decodes"])', "plan"),
        ("admit --> next", "admit --> nxt"),
        ("victim --> due", ""),
    ],
)
def test_a_broken_chart_is_found(old: str, new: str) -> None:
    section = read("presets.md").split("\n## vllm_v1\n")[1]
    chart = section.split("flowchart TD\n")[1].split("```")[0]
    assert old in chart
    with pytest.raises(AssertionError):
        check_chart(chart.replace(old, new))


def test_the_state_diagram_has_all_moves() -> None:
    (diagram,) = re.findall(r"stateDiagram-v2\n(.*?)```", read("prefill-and-decode.md"), re.DOTALL)
    drawn = set(re.findall(r"^    ([A-Z]+) --> ([A-Z]+)", diagram, re.MULTILINE))
    moves = {(a.name, b.name) for a, others in TRANSITIONS.items() for b in others}
    aborts = {(state.name, "FINISHED") for state in RequestState} - {("DECODING", "FINISHED")}
    assert drawn == moves - aborts


def test_every_metric_and_key_is_documented() -> None:
    text = read("write-a-story.md")
    assert [name for name in METRICS if f"`{name}(" not in text and f"`{name}`" not in text] == []
    keys = [f.name for kind in (Look, Number, Question) for f in fields(kind)]
    keys += ["title", "lesson", "text", "spec", "other", "more", "looks", "question", "numbers"]
    assert [key for key in keys if f"`{key}`" not in text] == []
