"""Laws of values: the bounds of every number, the presets, and what a request needs at the least."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from headway.checks import MAX_PROMPT, MAX_STOPS, MAX_TOKEN_ID, number_problem
from headway.errors import ConfigError, InvalidRequest, RequestTooLong
from headway.request import Request, RequestParams, RequestState
from headway.scheduler import preset
from headway.scheduler.policies import queue as queues
from headway.scheduler.policies.presets import PRESETS, describe, read_changes
from headway.scheduler.validate import validate_request
from headway.step_cost import UnitCosts

# Number of Config: smallest, largest, default.
BOUNDS = {
    "max_num_seqs": (1, 2**20, 256),
    "max_num_batched_tokens": (1, 2**31 - 1, 8192),
    "num_scheduler_steps": (1, 2**16, 1),
    "block_size": (1, 2**16, 16),
    "num_blocks": (1, 2**26, 4096),
    "num_host_blocks": (0, 2**26, 0),
    "max_model_len": (2, 2**31 - 1, 2**20),
}
# Rule with one number: slot, smallest, largest, default.
RULES = [
    ("chunk", "at_most({})", 1, None, "at_most(tokens=512)"),
    ("headroom", "watermark({})", 0, 1, "watermark(share=0.01)"),
    ("headroom", "reserve_outputs({})", 0, None, "reserve_outputs(ratio=1.0)"),
    ("headroom", "future_peak(margin={})", 0, 1, "future_peak(estimate=None, margin=0.0)"),
    ("headroom", "back_off(share={})", 0, 1, "back_off(base=watermark(share=0.01), share=0.01)"),
    ("headroom", "future_peak(learned({}))", 0, None, None),
    ("headroom", "future_peak(learned(open_deviations={}))", 0, None, None),
    ("swap", "swap_if_cheaper({})", 0, None, None),
    ("swap", "swap_if_cheaper(compute={})", 0, None, None),
    ("swap", "swap_if_cheaper(start={})", 0, None, None),
    ("swap", "swap_if_cheaper(pair={})", 0, None, None),
    ("queue", "fcfs({})", 0, None, "fcfs(max_overtakes=0)"),
    ("queue", "priority(aging={})", 0, None, None),
    ("queue", "priority(max_preemptions={})", 0, None, None),
    ("queue", "shortest_first(aging={})", 0, None, None),
    ("queue", "earliest_deadline(slack={})", 0, None, None),
    (
        "chunk", "hold_tbt({})", 0, None,
        "hold_tbt(weights=0.0092, token=7.5e-05, sample=5.6e-06, read=8e-08, pair=2.8e-09, "
        "fixed=0.0015, min_attention=0.0003, overlap=1.0, exchange=0.0, prompt=0.0, experts=0.0, "
        "unchosen=1.0, seconds=0.1)",
    ),
    *(
        ("chunk", f"hold_tbt({name}={{}})", 0, 1 if name in ("overlap", "unchosen") else None, None)
        for name in UnitCosts._fields
    ),
]  # fmt: skip
DEFAULTS = {
    "priority": "priority(max_overtakes=0, aging=60.0, preempts=False, max_preemptions=2)",
    "shortest_first": "shortest_first(max_overtakes=0, aging=0.001)",
    "earliest_deadline": "earliest_deadline(max_overtakes=0, slack=60.0)",
    "fair": "fair(max_overtakes=0)",
}


@pytest.mark.parametrize("field", BOUNDS)
def test_every_number_of_a_config_has_its_bounds_and_its_default(field: str) -> None:
    low, high, default = BOUNDS[field]
    assert getattr(preset(), field) == default
    for value in (low, high):
        assert getattr(replace(preset(), **{field: value}), field) == value
    for value in (low - 1, high + 1, float(low), True, None, "1"):
        with pytest.raises(ConfigError, match=f"^{field} "):
            replace(preset(), **{field: value})


@pytest.mark.parametrize(
    "field, high", [("sliding_window", 2**31 - 1), ("num_window_blocks", 2**26)]
)
def test_the_numbers_of_sliding_windows_have_their_bounds(field: str, high: int) -> None:
    config = preset(sliding_window=1, num_window_blocks=1)
    assert (
        getattr(preset(), field) == 0 and getattr(replace(config, **{field: high}), field) == high
    )
    for wrong in (-1, high + 1):
        with pytest.raises(ConfigError, match=field):
            replace(config, **{field: wrong})


@pytest.mark.parametrize("slot, text, low, high, default", RULES, ids=[rule[1] for rule in RULES])
def test_every_number_of_a_rule_has_its_bounds(
    slot: str, text: str, low: int, high: int | None, default: str | None
) -> None:
    preset(**{slot: text.format(low)})
    with pytest.raises(ConfigError, match=str(low)):
        preset(**{slot: text.format(low - 1)})
    if high is None:
        preset(**{slot: text.format(10**6)})
    else:
        preset(**{slot: text.format(high)})
        with pytest.raises(ConfigError, match=str(high)):
            preset(**{slot: text.format(high + 1)})
    if default is not None:
        assert describe(preset(**{slot: text.partition("(")[0]}))[slot] == default


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_queue_rule_has_its_defaults(name: str) -> None:
    assert describe(preset(queue=name))["queue"] == DEFAULTS[name]


def test_learned_and_cheaper_have_their_defaults() -> None:
    values = describe(preset("headway"))
    assert values["headroom"] == (
        "future_peak(estimate=learned(deviations=2.5, open_deviations=1.0), margin=0.0)"
    )
    assert values["swap"] == "swap_if_cheaper(copy=1e-06, compute=2.4e-05, start=0.0001, pair=0.0)"


def test_presets_have_the_limits_of_their_systems() -> None:
    limits = {
        name: (preset(name).max_num_seqs, preset(name).max_num_batched_tokens) for name in PRESETS
    }
    assert limits == {
        "headway": (256, 8192), "nano_vllm": (512, 16384), "deep_dive": (256, 8192),
        "vllm": (256, 8192), "vllm_v1": (256, 8192), "minivllm": (512, 16384),
        "static": (256, 8192),
    }  # fmt: skip
    assert all(preset(**describe(preset(name))) == preset(name) for name in PRESETS)


def test_a_text_that_cannot_be_read_is_shown_up_to_60_characters() -> None:
    with pytest.raises(ConfigError) as caught:
        preset(queue="(" + "x" * 100)
    assert "(" + "x" * 59 in str(caught.value) and "x" * 60 not in str(caught.value)


def test_changes_that_are_read_from_text_are_numbers_or_policies() -> None:
    texts = {"max_num_seqs": "64", "queue": "priority", "num_blocks": "9"}
    assert read_changes(texts) == {"max_num_seqs": 64, "queue": "priority", "num_blocks": 9}
    for wrong in ({"num_blocks": "priority"}, {"no_such_slot": "5"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            read_changes(wrong)


def test_a_queue_rule_is_taken_for_the_queue_alone() -> None:
    rule = queues.fcfs()
    assert preset(queue=rule).queue is rule
    for name in ("victim", "swap", "headroom", "chunk", "batching"):
        with pytest.raises(ConfigError, match=name):
            preset(**{name: rule})


@pytest.mark.parametrize(
    "value, low, high, whole, limits",
    (
        (5, 5, 7, True, None), (7, 5, 7, True, None), (5.5, 5, 7, False, None),
        (4, 5, 7, True, "of at least 5"), (8, 5, 7, True, "of at most 7"),
        (5.5, 5, 7, True, "from 5 to 7"), (True, 0, 7, True, "from 0 to 7"),
        (False, 0, 7, False, "from 0 to 7"), ("6", 5, 7, False, "from 5 to 7"),
        (None, 5, inf, True, "of at least 5"), (nan, 0, 1, False, "from 0 to 1"),
        (inf, 0, inf, False, "of at least 0"), (10**400, 0, inf, False, "of at least 0"),
        (1.5, 0, 1.25, False, "of at most 1.25"), (2.0, 0, 1.0, False, "of at most 1,"),
    ),
)  # fmt: skip
def test_a_number_outside_its_range_is_described_with_the_bound_it_breaks(
    value: Any, low: float, high: float, whole: bool, limits: str | None
) -> None:
    problem = number_problem(value, low, high, whole=whole)
    if limits is None:
        assert problem is None
    else:
        assert problem is not None and limits in problem
        assert problem.startswith("must be a whole number") is whole


def limit_of(num_prompt: int, max_tokens: int | None = None, **changes: Any) -> int:
    values = {"num_blocks": 10, "block_size": 4, "max_model_len": 100, "max_num_batched_tokens": 64}
    config = preset("vllm_v1", **{**values, **changes})
    return validate_request(
        Request("a", [1] * num_prompt, RequestParams(max_tokens=max_tokens)), config, ()
    )


def test_a_request_ends_at_its_limit_that_of_the_model_or_that_of_the_cache() -> None:
    assert limit_of(5, 7) == 12
    assert limit_of(5, 36) == 41  # the last token is never stored: 40 tokens in 10 blocks
    assert limit_of(5) == 41
    assert limit_of(5, num_blocks=1000) == 100
    assert limit_of(5, 500, num_blocks=1000) == 100
    assert limit_of(40) == 41 and limit_of(40, 1) == 41
    assert limit_of(99, num_blocks=1000) == limit_of(99, 1, num_blocks=1000) == 100
    assert limit_of(5, chunk="at_most(1)", max_num_batched_tokens=8) == 41  # split: any budget does
    assert limit_of(5, 36, chunk="at_most(1)", max_num_batched_tokens=8) == 41


@pytest.mark.parametrize("max_tokens", [1, 4])
@pytest.mark.parametrize("num_prompt", [1, 7])
def test_an_output_that_is_continued_must_have_a_token_left(
    num_prompt: int, max_tokens: int
) -> None:
    for num_known in range(max_tokens + 2):
        request = Request("a", [1] * num_prompt, RequestParams(max_tokens=max_tokens))
        request.continue_from([1] * num_known)
        if num_known < max_tokens:
            assert validate_request(request, preset(), ()) == num_prompt + max_tokens
        else:
            with pytest.raises(InvalidRequest, match=f"output has {num_known} tokens"):
                validate_request(request, preset(), ())


def test_a_prompt_that_is_never_split_bounds_the_length_by_the_budget() -> None:
    """A preempted request is computed again in one piece, whatever its length."""
    changes = {"chunk": "whole", "max_num_batched_tokens": 20}
    assert limit_of(5, **changes) == 21 and limit_of(5, 16, **changes) == 21
    assert limit_of(20, **changes) == limit_of(20, 1, **changes) == 21
    for num_prompt, max_tokens in ((5, 17), (21, 1)):
        with pytest.raises(RequestTooLong) as caught:
            limit_of(num_prompt, max_tokens, **changes)
        assert (caught.value.need, caught.value.limit) == (num_prompt + max_tokens - 1, 20)
    with pytest.raises(RequestTooLong) as caught:
        limit_of(21, **changes)
    assert (caught.value.need, caught.value.limit) == (21, 20)


def test_what_is_too_long_says_what_it_needs_and_what_the_limit_is() -> None:
    for arguments, need, limit in (((5, 37), 11, 10), ((41,), 11, 10), ((44, 1), 11, 10)):
        with pytest.raises(RequestTooLong) as caught:
            limit_of(*arguments)
        assert (caught.value.need, caught.value.limit) == (need, limit)
    with pytest.raises(RequestTooLong) as caught:
        limit_of(100, 1, num_blocks=1000)
    assert (caught.value.need, caught.value.limit) == (101, 100)


WHOLE = 2**63 - 1
PARAM_BOUNDS: dict[str, tuple[Any, Any]] = {
    "max_tokens": (1, None), "max_total_tokens": (2, None), "min_tokens": (0, WHOLE), "n": (1, WHOLE),
    "priority": (-WHOLE, WHOLE), "deadline": (-1e15, 1e15),
}  # fmt: skip


@pytest.mark.parametrize("field", PARAM_BOUNDS)
def test_every_number_of_a_request_has_its_bounds(field: str) -> None:
    def check(value: Any) -> int:
        request = Request("a", [1], replace(RequestParams(max_tokens=3), **{field: value}))
        return validate_request(request, preset("vllm_v1"), ())

    low, high = PARAM_BOUNDS[field]
    step = 1e9 if field == "deadline" else 1
    assert check(low) and (high is None or check(high))
    wrong = [low - step, nan, True, "1"] + ([] if high is None else [high + step])
    wrong += [] if field == "deadline" else [max(low, 1) + 0.5]
    optional = ("max_tokens", "max_total_tokens", "deadline")
    for value in wrong + ([] if field in optional else [None]):
        with pytest.raises(InvalidRequest, match=field):
            check(value)
    if field in optional:
        assert check(None)


def test_the_arrival_of_a_request_has_the_bounds_of_a_deadline() -> None:
    for arrival, is_right in ((1e15, True), (-1e15, True), (1.1e15, False), (-1.1e15, False)):
        request = Request("a", [1], RequestParams(max_tokens=3), arrival=arrival)
        if is_right:
            assert validate_request(request, preset("vllm_v1"), ()) == 4
        else:
            with pytest.raises(InvalidRequest, match="arrival"):
                validate_request(request, preset("vllm_v1"), ())


def test_token_ids_are_32_bit_numbers_that_are_not_negative() -> None:
    for prompt, is_right in (([0], True), ([MAX_TOKEN_ID], True), ([3, -1], False)):
        request = Request("a", prompt, RequestParams(max_tokens=3))
        if is_right:
            validate_request(request, preset("vllm_v1"), ())
        else:
            with pytest.raises(InvalidRequest, match="-1"):
                validate_request(request, preset("vllm_v1"), ())
    assert MAX_TOKEN_ID == 2**31 - 1
    for wrong in ([MAX_TOKEN_ID + 1], [1, 2.5], "text", {1: 2}, None, 7, [[1]], ["1"]):
        with pytest.raises(InvalidRequest, match="prompt"):
            Request("a", wrong, RequestParams())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=str(MAX_PROMPT)):
        Request("a", range(MAX_PROMPT + 1), RequestParams())
    with pytest.raises(InvalidRequest, match=str(MAX_PROMPT)):
        Request("a", range(10**30), RequestParams())


def test_stop_ids_are_a_bounded_set_of_token_ids() -> None:
    right: tuple[Any, ...] = ({MAX_TOKEN_ID}, [-MAX_TOKEN_ID], (), range(MAX_STOPS), {5: 0}.keys())
    for ids in right:
        assert Request("a", [1], RequestParams(stop_ids=ids)).stops == frozenset(ids)
    wrong: tuple[Any, ...] = (
        {MAX_TOKEN_ID + 1}, [-MAX_TOKEN_ID - 1], range(MAX_STOPS + 1), "12", {5: 0}, {1.5}, 7, None,
    )  # fmt: skip
    for ids in wrong:
        for field in ("stop_ids", "eos_ids"):
            with pytest.raises(InvalidRequest, match=field):
                Request("a", [1], replace(RequestParams(), **{field: ids}))
    params = RequestParams(stop_ids=frozenset({1}), eos_ids=frozenset({2}))
    assert Request("a", [1], params).stops == {1, 2}
    assert Request("a", [1], replace(params, ignore_eos=True)).stops == {1}
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        Request("a", [1], replace(params, ignore_eos=1))  # type: ignore[arg-type]


def test_an_embedding_samples_one_token_and_a_mean_reads_no_cache() -> None:
    def check(pooling: Any, **more: Any) -> int:
        params = replace(RequestParams(max_tokens=1, pooling=pooling), **more)
        return validate_request(Request("a", [1, 2], params), preset("vllm_v1"), ())

    assert (
        check("last") == check("last", reads_cache=False) == check("mean", reads_cache=False) == 3
    )
    for pooling, more, field in (
        ("mean", {}, "reads_cache"), ("last", {"max_tokens": 2}, "max_tokens"),
        ("last", {"max_tokens": None}, "max_tokens"), ("last", {"n": 2}, "max_tokens 1 and n 1"),
        ("first", {}, "pooling"), (1, {}, "pooling"), ("", {}, "pooling"), (["last"], {}, "pooling"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=field):
            check(pooling, **more)


@pytest.mark.parametrize(
    "field, wrong",
    (("reads_cache", 1), ("client", None), ("client", 5), ("salt", b"x"), ("salt", "a\nb")),
)
def test_fields_that_are_no_numbers_have_their_types(field: str, wrong: Any) -> None:
    params = replace(RequestParams(max_tokens=1), **{field: wrong})
    with pytest.raises(InvalidRequest, match=field):
        validate_request(Request("a", [1, 2], params), preset("vllm_v1"), ())


def test_an_id_in_use_and_a_request_that_has_run_are_refused() -> None:
    request, config = Request("a", [1, 2], RequestParams(max_tokens=1)), preset("vllm_v1")
    assert validate_request(request, config, {"b"}) == 3
    with pytest.raises(InvalidRequest, match="'a'"):
        validate_request(request, config, {"a"})
    with pytest.raises(InvalidRequest, match="empty"):
        validate_request(Request("a", [], RequestParams()), config, ())
    request.flushed_tokens.append(1)
    with pytest.raises(InvalidRequest, match="'a'"):
        validate_request(request, config, ())
    request = Request("a", [1, 2], RequestParams(max_tokens=1))
    request.move(RequestState.FINISHED)
    with pytest.raises(InvalidRequest, match="'a'"):
        validate_request(request, config, ())
