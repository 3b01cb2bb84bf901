"""Laws of the ready-made policies: each one by itself, against its definition in plain numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway import Scheduler, checks
from headway.errors import PolicyError
from headway.request import Request, RequestParams
from headway.scheduler.policies import batching, headroom, victim
from headway.scheduler.policies.batching import MAX_PREFILL_STEPS
from headway.scheduler.policies.chunk import at_most, split_any, split_first, whole
from headway.scheduler.policies.presets import SLOTS
from headway.scheduler.policies.swap import recompute, swap, swap_if_cheaper
from tests.support.drive import Driver


def test_chunk_rules_grant_what_they_say() -> None:
    for want in range(1, 12):
        for left in range(1, 12):
            for is_first in (True, False):
                fits = want <= left
                assert whole(want, left, is_first) == (want if fits else 0)
                assert split_any(want, left, is_first) == min(want, left)
                expected = min(want, left) if fits or is_first else 0
                assert split_first(want, left, is_first) == expected
                assert at_most(5)(want, left, is_first) == min(want, left, 5)


class Recorder:
    """A step that records the actions of a batching rule; `works` names those that find work."""

    def __init__(self, num_decoding: int, prefill_streak: int, works: str) -> None:
        self.num_decoding, self.prefill_streak, self._works = num_decoding, prefill_streak, works
        self.tokens_left, self.is_idle, self.calls = 7, True, list[str]()

    def _call(self, name: str, text: str) -> None:
        self.calls.append(text)
        if name in self._works.split():
            self.is_idle = False

    def decode(self, at_most: int | None = None) -> None:
        self._call("decode", "decode" if at_most is None else f"decode {at_most}")

    def prefill(self) -> None:
        self._call("prefill", "prefill")

    def admit(self, *, charge_cached: bool = False) -> None:
        self._call("admit", "admit charged" if charge_cached else "admit")

    def admit_swapped(self) -> None:
        self._call("swapped", "swapped")


LAST = MAX_PREFILL_STEPS
CALLS = [
    ("mixed", 3, 0, "decode", "decode, prefill, admit"),
    ("swapped_first", 3, 0, "decode", "swapped, decode, prefill, admit"),
    ("prefill_first", 3, 0, "", "prefill, admit, decode"),
    ("prefill_first", 3, 0, "prefill", "prefill, admit"),
    ("prefill_first", 3, LAST - 1, "admit", "prefill, admit"),
    ("prefill_first", 3, LAST, "prefill", "decode"),
    ("prefill_first", 0, LAST, "prefill", "prefill, admit"),
    ("prefill_first_charge_cached", 3, 0, "", "prefill, admit charged, decode"),
    ("prefill_first_charge_cached", 3, LAST - 1, "admit", "prefill, admit charged"),
    ("prefill_first_charge_cached", 3, LAST, "prefill", "decode"),
    ("prefill_first_charge_cached", 0, LAST, "prefill", "prefill, admit charged"),
    ("static", 3, 0, "", "prefill, decode"),
    ("static", 0, 0, "admit", "prefill, admit"),
    ("static", 3, 1, "admit", "prefill, admit"),
    ("static", 3, 1, "", "prefill, admit, decode"),
]


@pytest.mark.parametrize("name, num_decoding, streak, works, calls", CALLS)
def test_batching_rules_act_in_their_order(
    name: str, num_decoding: int, streak: int, works: str, calls: str
) -> None:
    step = Recorder(num_decoding, streak, works)
    getattr(batching, name)(step)
    assert ", ".join(step.calls) == calls


def test_every_batching_rule_is_covered_and_decodes_wait_for_16_steps() -> None:
    assert {batching.__name__ for batching in SLOTS["batching"]} == {call[0] for call in CALLS}
    assert LAST == 16


def a_request(
    num_prompt: int, max_tokens: int, num_computed: int, row: int, **more: Any
) -> Request:
    request = Request("a", range(num_prompt), RequestParams(max_tokens=max_tokens, **more))
    request.limit, request.row = num_prompt + max_tokens, row
    request.computed_base, request.prefill_end = num_computed, num_prompt if row >= 0 else 0
    return request


def a_view(**values: Any) -> Any:
    defaults = {"num_blocks": 250, "block_size": 4, "running": (), "pressure": 0.0}
    return SimpleNamespace(**{**defaults, **values})


def test_a_watermark_is_its_share_of_all_blocks_rounded_down() -> None:
    for share in (0.0, 0.01, 0.5, 1.0):
        assert headroom.watermark(share)(a_request(1, 1, 0, -1), a_view()) == int(share * 250)


def test_reserved_outputs_are_the_blocks_that_all_may_still_fill() -> None:
    """A request stores all but its last token; a partial prompt will be stored as a whole."""
    for num_computed in (10, 13, 18):
        for max_tokens in (9, 10):
            running = [a_request(10, max_tokens, num_computed, 0), a_request(20, 5, 3, 1)]
            new = a_request(6, 7, 0, -1)
            lefts = [10 + max_tokens - 1 - num_computed, 4, 6]
            wanted = sum(math.ceil(left / 4) for left in lefts)
            view = a_view(running=running)
            assert headroom.reserve_outputs(1.0)(new, view) == wanted
            assert headroom.reserve_outputs(0.3)(new, view) == math.ceil(0.3 * wanted)


def test_back_off_adds_a_share_for_every_recent_preemption() -> None:
    rule = headroom.back_off(headroom.watermark(0.1), 0.02)
    for pressure, wanted in ((0.0, 25), (1.0, 30), (2.5, 37)):
        assert rule(a_request(1, 1, 0, -1), a_view(pressure=pressure)) == wanted


def test_victim_rules_choose_by_what_their_names_say() -> None:
    """The largest key is preempted; equal requests are preempted latest arrival first."""
    requests = []
    for number, (admission, computed, priority) in enumerate(((5, 9, 1), (3, 4, 7), (4, 12, 7))):
        request = a_request(4, 20, computed, number, priority=priority)
        request.history.admission, request.history.serial = admission, number
        requests.append(request)
    private = {requests[0]: 4, requests[1]: 2, requests[2]: 3}
    view = a_view(num_private_blocks=private.__getitem__, queue_key=lambda r: -r.history.serial)
    chosen = {
        rule.__name__: requests.index(max(requests, key=lambda r, rule=rule: rule(r, view)))
        for rule in SLOTS["victim"]
    }
    assert chosen == {
        "newest": 0, "least_work": 1, "lowest_priority": 2, "fewest_private_blocks": 1, "served_last": 0,
        "fewest_generated": 2,
    }  # fmt: skip
    requests[1].computed_base = requests[2].computed_base = private[requests[2]] = 2
    for name in ("least_work", "lowest_priority", "fewest_private_blocks"):
        rule = getattr(victim, name)
        assert max(requests[1:], key=lambda r: rule(r, view)) is requests[2], name


def test_swap_and_recompute_are_constant() -> None:
    request = a_request(4, 4, 4, 0)
    assert swap(request, a_view()) is True
    assert recompute(request, a_view()) is False


@pytest.mark.parametrize("num_private", (0, 2, 5, 10))
@pytest.mark.parametrize("pair", (0.0, 0.01))
def test_cheaper_swaps_if_two_copies_take_less_time_than_computing(
    num_private: int, pair: float
) -> None:
    for num_computed in (9, 20, 37):
        for compute in (0.5, 1.0, 2.0, 2.5, 3.0, 5.0):
            rule = swap_if_cheaper(copy=1.0, compute=compute, start=3.0, pair=pair)
            request = a_request(40, 9, num_computed, 0)
            view = a_view(num_private_blocks=lambda request: num_private)
            tokens = min(4 * num_private, num_computed)
            first = num_computed - tokens  # the shared tokens before them stay
            seconds = sum(compute + pair * (first + place + 0.5) for place in range(tokens))
            assert rule(request, view) == (2 * 3.0 + 2 * tokens < seconds - 1e-9)


def call_other_file(request: Request, view: object) -> Any:
    """A victim rule whose error is raised in a file of the standard library."""
    return json.loads("{")


def call_headway(request: Request, view: object) -> Any:
    """A victim rule whose error is raised in a file of the package."""
    return checks.number("the key", -1, low=0)


@pytest.mark.parametrize("rule", (call_other_file, call_headway))
@pytest.mark.parametrize("is_recorded", (False, True))
def test_an_error_of_a_policy_names_the_line_in_the_policys_own_file(
    rule: Any, is_recorded: bool
) -> None:
    world = Driver("vllm_v1", block_size=4, num_blocks=3, max_num_seqs=4, victim=rule)
    world.scheduler = Scheduler(world.scheduler.config, records_answers=is_recorded)
    for id in "ab":
        world.add(id, 4, 9)
    line = rule.__code__.co_firstlineno + 2
    with pytest.raises(PolicyError, match=rf"{Path(__file__).name}:{line}\b"):
        world.run()
