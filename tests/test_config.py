"""Laws of the configuration: invalid settings are refused with a one-line ConfigError."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headway.config import Config, SchedulerView, StepActions
from headway.errors import ConfigError
from headway.request import Request, RequestParams
from headway.scheduler import PRESETS, Scheduler, preset
from headway.scheduler.policies import headroom
from headway.scheduler.policies import queue as queues
from headway.scheduler.policies.chunk import at_most, whole
from headway.scheduler.policies.presets import NONE, NUMBERS, OPTIONAL, SLOTS, describe, slot
from headway.scheduler.policies.swap import swap_if_cheaper
from tests.support.drive import Driver


def error_of(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        preset(**changes)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("value", [-1, 1.5, "7", None, "many"])
def test_a_value_that_is_not_a_whole_number_is_refused_with_field_and_value(
    number: str, value: Any
) -> None:
    text = error_of(**{number: value})
    assert number in text and str(value) in text and "whole number" in text


@pytest.mark.parametrize("number", [n for n in NUMBERS if n != "num_host_blocks"])
def test_zero_is_refused_except_for_num_host_blocks(number: str) -> None:
    assert number in error_of(**{number: 0})
    assert preset(num_host_blocks=0).num_host_blocks == 0


def test_a_number_above_its_limit_is_refused_with_value_and_limit() -> None:
    error = error_of(num_blocks=2**26 + 1)
    assert all(part in error for part in ("num_blocks", "67108864", "67108865"))
    assert preset(num_blocks=2**26).num_blocks == 2**26


@pytest.mark.parametrize("name", PRESETS)
def test_a_token_budget_below_max_num_seqs_defers_the_newest_decodes(name: str) -> None:
    driver = Driver(name, max_num_batched_tokens=12, max_num_seqs=40, num_blocks=400)
    for number in range(30):
        driver.add(str(number), 5, 6)
    driver.run()
    assert all(r.num_generated == 6 for r in driver.requests.values())
    assert all(
        len(row.decodes.split()) + sum(c[2] - c[1] for c in row.chunks) <= 12
        for row in driver.table
    )
    is_full = any(len(row.decodes.split()) == 12 for row in driver.table)
    # they admit prompts in steps without decodes
    assert is_full == (name in ("nano_vllm", "minivllm", "static"))
    driver.check_empty()


WRONG_POLICIES = {
    "headroom": [
        "watermark(1.5)", "watermark(-0.1)", "reserve_outputs(-1.0)", "back_off(watermark(2.0))",
        "back_off(watermark, -0.1)", "future_peak(learned(-0.5))",
        "watermark('much')",
    ],
    "chunk": ["at_most(0)", "at_most(-5)", "at_most(1.5)"],
    "queue": ["fcfs(-1)", "priority(aging=-1.0)", "fcfs('x')"],
    "swap": ["swap_if_cheaper(copy=-1.0)"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in WRONG_POLICIES.items() for text in texts]
)
def test_a_policy_argument_out_of_range_is_refused(name: str, text: str) -> None:
    assert name in error_of(**{name: text})


def test_the_error_for_an_unknown_preset_lists_and_suggests_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        preset("vlm")
    text = str(caught.value)
    assert "unknown preset 'vlm'" in text and "did you mean vllm?" in text
    assert all(name in text for name in PRESETS)


def test_the_error_for_an_unknown_setting_lists_and_suggests_known_ones() -> None:
    text = error_of(num_block=7)
    assert "'num_block'" in text and "did you mean num_blocks?" in text
    assert all(name in text for name in (*SLOTS, *NUMBERS))
    with pytest.raises(ConfigError, match=r"did you mean victim\?"):
        slot("victims", "newest")


@pytest.mark.parametrize("name", SLOTS)
def test_the_error_for_an_unknown_policy_lists_and_suggests_known_ones(name: str) -> None:
    known = [policy.__name__ for policy in SLOTS[name]]
    text = error_of(**{name: known[0] + "x"})
    assert f"did you mean {known[0]}?" in text and all(k in text for k in known)
    assert known[0] in error_of(**{name: "zzzzzz"})


@pytest.mark.parametrize("text", ["limit", "learned", "learned(2.0)", "back_off(limit)"])
def test_an_estimate_is_no_headroom_rule(text: str) -> None:
    assert "write future_peak(l" in error_of(headroom=text)
    for value in (headroom.limit, headroom.learned, headroom.learned(2.0)):
        assert "future_peak" in error_of(headroom=value)
    known = error_of(headroom="zzzzzz").partition("Known: ")[2].split(", ")
    assert known == [policy.__name__ for policy in SLOTS["headroom"]]


@pytest.mark.parametrize("text", ["zzzzzz", "watermark", "learner(1.0)"])
def test_an_unknown_estimate_lists_the_estimates(text: str) -> None:
    error = error_of(headroom=f"future_peak({text})")
    assert "future_peak" in error and error.endswith("Known: limit, learned")


def test_errors_with_and_without_a_suggestion_are_punctuated() -> None:
    assert "'zzzzzz'. Known: " in error_of(queue="zzzzzz")
    assert "'fcfsx'; did you mean fcfs? Known: " in error_of(queue="fcfsx")


def test_a_text_is_parsed_as_a_policy() -> None:
    assert slot("queue", "fcfs") == queues.fcfs()
    assert slot("queue", "fcfs(8)") == queues.fcfs(max_overtakes=8)
    assert slot("queue", "priority(aging=2.5, preempts=True)") == queues.priority(2.5, True)
    assert slot("chunk", "whole") is whole
    assert slot("chunk", "at_most") == at_most()
    assert slot("chunk", "at_most(64)") == at_most(64)
    assert slot("headroom", "watermark(0.05)") == headroom.watermark(0.05)
    nested = headroom.back_off(headroom.watermark(0.02))
    assert slot("headroom", "back_off(watermark(0.02))") == nested
    assert slot("headroom", "back_off(base=watermark(share=0.02))") == nested
    assert slot("headroom", " back_off( watermark(0.02) ) ") == nested
    assert slot("headroom", "back_off(future_peak)") == headroom.back_off(headroom.future_peak())
    assert slot("headroom", "back_off(base=watermark)") == headroom.back_off(headroom.watermark())
    learned = headroom.future_peak(headroom.learned(0.7))
    assert slot("headroom", "future_peak(learned(0.7))") == learned
    assert slot("headroom", "future_peak(limit)") == headroom.future_peak(headroom.limit)
    assert slot("headroom", "future_peak(learned)") == headroom.future_peak(headroom.learned())
    assert slot("headroom", "future_peak(margin=0.01)") == headroom.future_peak(margin=0.01)
    assert slot("swap", "swap_if_cheaper") == swap_if_cheaper()


def test_the_first_number_of_a_queue_rule_is_its_own() -> None:
    """`max_overtakes` of all rules has a name, but for those that have no other number."""

    @dataclass(frozen=True)
    class half_open(queues.Rule):
        seconds: float = 1.0

    assert half_open(5.0) == half_open(seconds=5.0, max_overtakes=0)
    assert slot("queue", "priority(5.0)") == queues.priority(aging=5.0)
    assert slot("queue", "fair(3)") == queues.fair(max_overtakes=3)
    assert queues.custom(max).function is max


def run_requests(config: Config) -> None:
    """Run a few requests to their end with any policies."""
    driver = Driver()
    driver.scheduler = Scheduler(config)
    for i in range(4):
        driver.add(f"r{i}", 9, 3)
    driver.run()
    driver.check_empty()


USER_MODULE = """
def by_length(request, view):
    return request.num_prompt

class Policies:
    @staticmethod
    def small(want, left, is_first):
        return min(want, left, 2)

half = lambda request, view: view.num_blocks // 2
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable module with a user's policies."""
    (tmp_path / "my_own_policies.py").write_text(USER_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_own_policies"


def test_a_users_function_is_loaded_by_module_and_name(user_module: str) -> None:
    config = preset(queue=f"{user_module}:by_length", headroom=f"{user_module}:half")
    assert isinstance(config.queue, queues.custom) and config.queue.keys_change
    assert describe(config)["queue"] == f"{user_module}:by_length"
    again = preset(**describe(preset(queue=f"{user_module}:by_length")))
    assert again.queue == config.queue
    run_requests(config)


def test_a_users_function_may_be_in_a_class(user_module: str) -> None:
    config = preset(chunk=f"{user_module}:Policies.small")
    assert config.chunk(9, 9, True) == 2
    assert preset(**describe(config)).chunk is config.chunk


@pytest.mark.parametrize("text", ["{}:missing", "no_such_module_here:f", ":f", "{}:", "a b:c", ":"])
def test_a_users_function_that_cannot_be_loaded_is_named_in_the_error(
    user_module: str, text: str
) -> None:
    text = text.format(user_module)
    assert text in error_of(victim=text)


def test_functions_and_lambdas_are_policies() -> None:
    def victim(request: Request, view: SchedulerView) -> Any:
        return request.num_prompt

    def batching(step: StepActions) -> None:
        step.admit()
        step.decode()

    config = preset(
        queue=lambda request, view: -request.num_prompt, victim=victim, batching=batching,
        headroom=lambda request, view: 0, chunk=lambda want, left, is_first: min(want, left),
        swap=lambda request, view: False,
    )  # fmt: skip
    run_requests(config)
    long, short = (Request(str(n), range(n), RequestParams()) for n in (9, 3))
    view = Scheduler(config).state.view
    assert config.queue.key(long, view) < config.queue.key(short, view)


@pytest.mark.parametrize("value", [7, None, 0.5, [], {}])
@pytest.mark.parametrize("name", SLOTS)
def test_a_value_that_is_not_callable_is_refused(name: str, value: Any) -> None:
    if value is None and name in OPTIONAL:  # as "none"
        assert preset(**{name: None}) == preset(**{name: NONE})
    else:
        assert name in error_of(**{name: value})


NOT_POLICIES = [
    "__import__('os').system('true')", "__import__('os')", "().__class__", "fcfs.__class__",
    "[x for x in (1,)]", "lambda r, w: 0", "open('/etc/passwd')", "eval('1')", "fcfs(print)",
    "fcfs(*[1])", "fcfs(**{'max_overtakes': 1})", "fcfs()()", "watermark(1)(2, 3)", "fcfs if 1 else 0",
    "f'{1}'", "fcfs; fcfs", "fcfs\nfcfs", "(fcfs", "", " ", "7", "'fcfs'", "None", "fcfs(1, 2, 3)",
    "fcfs(nothing=1)", "(" * 300, "fcfs(" * 120 + ")" * 120, "whole(5, 5, True)",
    "-" * 5000 + "1",
]  # fmt: skip


@pytest.mark.parametrize("text", NOT_POLICIES, ids=lambda text: repr(text[:24]))
@pytest.mark.parametrize("name", SLOTS)
def test_a_text_that_is_not_a_policy_is_refused_and_never_evaluated(name: str, text: str) -> None:
    with pytest.raises(ConfigError):
        slot(name, text)


def test_errors_for_wrong_slot_values_show_the_value_and_what_is_accepted() -> None:
    with pytest.raises(ConfigError, match="chunk.*module:function.*not 5"):
        slot("chunk", 5)
    with pytest.raises(ConfigError, match="chunk: split_any takes no arguments"):
        slot("chunk", "split_any(5)")
    with pytest.raises(ConfigError, match=r"chunk: .*'\(whole'.*module:function"):
        slot("chunk", "(whole")
    for name, text in (
        ("queue", "custom(function=5)"), ("headroom", "back_off(5)"), ("headroom", "future_peak(5)"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{name}.*must be a function, not 5"):
            slot(name, text)


@pytest.mark.parametrize("name", PRESETS)
def test_the_description_of_a_preset_gives_the_same_preset(name: str) -> None:
    config = preset(name)
    described = describe(config)
    assert preset(**described) == config and describe(preset(**described)) == described
    assert set(described) == {*SLOTS, *NUMBERS}
    assert all(isinstance(described[number], int) for number in NUMBERS)


VARIATIONS: list[dict[str, Any]] = [
    {"queue": "priority(0.5, True, 7, max_overtakes=3)"},
    {"queue": "shortest_first(aging=0.25)"},
    {"queue": "fair(2)", "chunk": "at_most(64)", "victim": "fewest_private_blocks"},
    {"queue": "earliest_deadline(slack=5.0)", "swap": "swap_if_cheaper(1e-07, 2e-06)"},
    {"headroom": "back_off(future_peak(learned(0.7), 0.03), 0.5)"},
    {"headroom": "back_off(back_off(watermark(0.02)))"},
    {
        "batching": "prefill_first_charge_cached",
        "max_num_batched_tokens": 3,
        "max_num_seqs": 9,
        "num_scheduler_steps": 4,
    },
    {"num_blocks": 7, "block_size": 1, "num_host_blocks": 3, "max_model_len": 99},
]


@pytest.mark.parametrize("changes", VARIATIONS, ids=lambda changes: "-".join(changes))
@pytest.mark.parametrize("name", ["headway", "static"])
def test_the_description_of_a_changed_preset_gives_the_same_config(
    name: str, changes: dict[str, Any]
) -> None:
    config = preset(name, **changes)
    assert preset(**describe(config)) == config
    assert preset("minivllm", **describe(config)) == config  # the description is complete


@pytest.mark.parametrize(
    ("slot", "function", "wanted"),
    [
        ("victim", lambda request: 0, "(request, view)"),
        ("chunk", lambda want, left: 0, "(want, left, is_first)"),
        ("batching", lambda: None, "(step)"),
        ("queue", lambda request: 0, "(request, view)"),
    ],
)
def test_a_function_that_a_slot_cannot_call_is_refused(
    slot: str, function: Any, wanted: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        preset("vllm_v1", **{slot: function})
