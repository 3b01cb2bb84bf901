"""The stories of the lab: runs that show one thing each, with a question and the numbers that result.

A story is a TOML file in this folder; docs/course/write-a-story.md lists its keys.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from headway.checks import one_of, real_number, text, whole_number
from headway.errors import ConfigError, FormatError, shorten
from headway.lab.recording.metrics import parse_metric
from headway.lab.recording.spec import read_spec

FOLDER = Path(__file__).parent
UNITS = {"": 1, "s": 1, "ms": 1000, "%": 100, "x": 1, "tokens": 1, "blocks": 1, "steps": 1}
SOURCES = ("workload", "requests", "trace")  # a run has one of these

Spec = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Look:
    """A step to look at."""

    step: int
    text: str
    run: str = "spec"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to answer before the run is shown."""

    text: str
    choices: list[str]
    answer: int
    why: list[str]
    number: str = ""


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number that the story's runs must give, to as many digits as `value` has."""

    label: str
    metric: str
    value: float
    unit: str = ""
    run: str = "spec"
    per: str = ""

    @property
    def digits(self) -> int:
        """Digits after the decimal point."""
        return len(str(self.value).partition(".")[2]) if isinstance(self.value, float) else 0

    @property
    def shown(self) -> str:
        return f"{self.value:,.{self.digits}f}"

    def is_like(self, measured: float | None) -> bool:
        return measured is not None and round(measured, self.digits) == self.value


@dataclass(frozen=True, kw_only=True)
class Story:
    """One story; `runs` has spec, other and more as complete runs, each with its name in `story`."""

    name: str
    order: int
    title: str
    lesson: str
    text: list[str]
    runs: dict[str, Spec]
    looks: list[Look]
    question: Question
    sync: str = "step"
    numbers: list[Number] = field(default_factory=list)

    def describe(self) -> Spec:
        """The story as JSON."""
        numbers = [{**asdict(n), "digits": n.digits, "scale": UNITS[n.unit]} for n in self.numbers]
        more = {name: run for name, run in self.runs.items() if name not in ("spec", "other")}
        return {
            "name": self.name, "order": self.order, "title": self.title, "lesson": self.lesson,
            "text": self.text, "spec": self.runs["spec"], "other": self.runs.get("other"),
            "more": more, "sync": self.sync, "looks": [asdict(look) for look in self.looks],
            "question": asdict(self.question), "numbers": numbers,
        }  # fmt: skip


@cache
def load_stories() -> list[Story]:
    """All stories in their order; FormatError names the file and the field that is wrong."""
    return [read_story(path) for path in sorted(FOLDER.glob("*.toml"))]


def find_story(name: str) -> Story:
    """The story of this name; ConfigError lists the names."""
    stories = {story.name: story for story in load_stories()}
    return stories[one_of("story", name, list(stories))]


def numbers_of(reference: str) -> dict[str, str]:
    """Labels and metrics of the numbers to which one run of a story contributes.

    A reference is "NAME" for the story's spec and "NAME/RUN" for another run; "" has no numbers.
    """
    if not reference:
        return {}
    name, _, run = reference.partition("/")
    story = find_story(name)
    run = one_of(f"run of story {name!r}", run or "spec", list(story.runs))
    return {n.label: n.metric for n in story.numbers if run in (n.run, n.per)}


def read_story(path: Path) -> Story:
    """One story; FormatError names the file and the field that is wrong."""
    order, _, name = path.stem.partition("-")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        if not order.isdigit() or not name:
            raise ConfigError("the file must be named NUMBER-NAME.toml")
        return _story(name, int(order), data)
    except (ConfigError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FormatError(path, None, str(error)) from None


def _story(name: str, order: int, data: Mapping[str, Any]) -> Story:
    needed = ("title", "lesson", "text", "spec", "looks", "question")
    _check_keys("", data, (*needed, "other", "more", "sync", "numbers"), needed)
    runs = _runs(name, data)
    numbers = [_number(where, each, runs) for where, each in _tables("numbers", data)]
    return Story(
        name=name, order=order, title=text("title", data["title"]),
        lesson=text("lesson", data["lesson"]), text=_list("text", data["text"], str), runs=runs,
        looks=[_look(where, each, runs) for where, each in _tables("looks", data)],
        question=_question(data["question"], [each.label for each in numbers]),
        sync=one_of("sync", data.get("sync", "step"), ["step", "time"]), numbers=numbers,
    )  # fmt: skip


def _runs(story: str, data: Mapping[str, Any]) -> dict[str, Spec]:
    """All runs by name, complete; ConfigError if one cannot be read."""
    more = _dict("more", data.get("more", {}))
    changes = {"other": data["other"], **more} if "other" in data else more
    spec = _dict("spec", data["spec"])
    runs = {"spec": {**spec, "story": story}}
    for name, change in changes.items():
        own = _dict(name, change)
        kept = {key: value for key, value in spec.items() if key not in SOURCES}
        base = kept if any(source in own for source in SOURCES) else spec
        merged = {**_dict("set", spec.get("set", {})), **_dict("set", own.get("set", {}))}
        runs[name] = {**base, **own, "set": merged, "story": f"{story}/{name}"}
    for name, run in runs.items():
        try:
            read_spec(run)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    return runs


def _look(where: str, data: Mapping[str, Any], runs: Iterable[str]) -> Look:
    _check_keys(where, data, ("step", "text", "run"), ("step", "text"))
    return Look(
        step=whole_number(f"{where}.step", data["step"], 0), text=text(f"{where}.text", data["text"]),
        run=one_of(f"{where}.run", data.get("run", "spec"), list(runs)),
    )  # fmt: skip


def _number(where: str, data: Mapping[str, Any], runs: Iterable[str]) -> Number:
    known = ("label", "metric", "value", "unit", "run", "per")
    _check_keys(where, data, known, known[:3])
    try:
        parse_metric(text("metric", data["metric"]))
    except ConfigError as error:
        raise ConfigError(f"{where}.metric: {error}") from None
    real_number(f"{where}.value", data["value"])
    one_of(f"{where}.unit", data.get("unit", ""), list(UNITS))
    one_of(f"{where}.run", data.get("run", "spec"), list(runs))
    one_of(f"{where}.per", data.get("per", ""), ["", *runs])
    text(f"{where}.label", data["label"])
    return Number(**data)


def _question(data: object, labels: list[str]) -> Question:
    values, known = _dict("question", data), ("text", "choices", "answer", "why", "number")
    _check_keys("question", values, known, known[:4])
    choices, why = (_list(f"question.{name}", values[name], str) for name in ("choices", "why"))
    if len(why) != len(choices):
        raise ConfigError(f"question.why has {len(why)} texts for {len(choices)} choices")
    return Question(
        answer=whole_number("question.answer", values["answer"], 0, len(choices) - 1),
        number=one_of("question.number", values.get("number", ""), ["", *labels]),
        text=text("question.text", values["text"]), choices=choices, why=why,
    )  # fmt: skip


def _check_keys(
    where: str, data: Mapping[str, Any], known: Sequence[str], needed: Sequence[str]
) -> None:
    prefix = f"{where}." if where else ""
    for key in data:
        one_of(f"{prefix}key", key, known)
    if missing := [key for key in needed if key not in data]:
        raise ConfigError(f"{prefix}{missing[0]} is missing")


def _tables(name: str, data: Mapping[str, Any]) -> list[tuple[str, Spec]]:
    """The tables of a list, each with its place."""
    found = _list(name, data.get(name, []), dict)
    return [(f"{name}[{place}]", each) for place, each in enumerate(found)]


def _dict(name: str, value: Any) -> Spec:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a table, not {shorten(value)}")
    return value


def _list(name: str, value: Any, kind: type) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise ConfigError(f"{name} must be a list of {kind.__name__}, not {shorten(value)}")
    return value
