"""Presets against plain models of the listings they are named after, step by step.

With all its differences from tests/scheduler/reference/ a listing makes the same batches as the
preset, so nothing else differs. Without any single one of them it does not, so each one occurs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headway.errors import RequestTooLong
from headway.request import Request, RequestParams
from headway.scheduler import Scheduler, preset
from headway.scheduler.policies.batching import MAX_PREFILL_STEPS
from headway.scheduler.state import MAX_DISCARDS
from tests.scheduler.reference import differences, differences_mixed
from tests.scheduler.reference.compare import Pair, random_workload
from tests.scheduler.reference.course import Course, CourseText
from tests.scheduler.reference.listing import Listing
from tests.scheduler.reference.minivllm import MiniVLLM
from tests.scheduler.reference.nano_vllm import NanoVLLM
from tests.scheduler.reference.nano_vllm_later import LATER_NANO_VLLM, LaterNanoVLLM
from tests.scheduler.reference.three_queues import ThreeQueues
from tests.support.drive import Driver

NUM_WORKLOADS = 70
DOCUMENT = Path(__file__).parents[2] / "docs" / "policies.md"


class Case(NamedTuple):
    """A listing, the preset with settings, their differences, and how often things happen."""

    listing: type[Listing]
    preset: str
    settings: dict[str, Any]
    differences: dict[str, type]
    min_events: dict[str, int]
    workload: dict[str, bool]  # arguments of random_workload


CASES = {
    "nano_vllm": Case(
        NanoVLLM, "nano_vllm", {}, differences.NANO_VLLM,
        {"preemptions": 150, "hits after preemption": 100, "cut prompts": 1000}, {},
    ),
    "nano_vllm, later": Case(
        LaterNanoVLLM, "nano_vllm", {}, LATER_NANO_VLLM,
        {"preemptions": 150, "hits after preemption": 100, "cut prompts": 1000}, {},
    ),
    "minivllm": Case(
        MiniVLLM, "minivllm", {}, differences.MINIVLLM,
        {"preemptions": 150, "hits after preemption": 80, "deferred decodes": 100},
        {"is_cut": False, "has_totals": True},
    ),
    "deep_dive, listing": Case(
        Course, "deep_dive", {"headroom": "watermark(0.0)", "swap": "discard_output"},
        differences_mixed.DEEP_DIVE_LISTING,
        {"preemptions": 100, "discarded outputs": 50, "cut prompts": 1000}, {},
    ),
    "deep_dive, output kept": Case(
        Course, "deep_dive", {"headroom": "watermark(0.0)"},
        differences_mixed.DEEP_DIVE_LISTING_KEPT, {"preemptions": 80, "cut prompts": 1000}, {},
    ),
    "deep_dive, text": Case(
        CourseText, "deep_dive", {}, differences_mixed.DEEP_DIVE_TEXT, {"cut prompts": 1000}, {},
    ),
    "vllm": Case(
        ThreeQueues, "vllm", {}, differences_mixed.VLLM,
        {"preemptions": 70, "swaps": 40, "cut prompts": 600}, {"has_swaps": True},
    ),
}  # fmt: skip


def pair(case: Case, seed: int, names: Iterable[str]) -> Pair:
    """The preset, and the listing with the named differences, on a random workload."""
    changed = differences.build(case.listing, tuple(case.differences[name] for name in names))
    settings, options, arguments = dict(case.settings), dict[str, Any](), dict(case.workload)
    if case.listing is ThreeQueues:
        share = (0.01, 0.01, 0.05, 0.1)[seed % 4]
        options = {"is_chunked": seed % 3 > 0, "watermark": share}
        arguments["is_cut"] = options["is_chunked"]
        settings["headroom"] = f"back_off(watermark({share}), {share})"
        settings["chunk"] = "split_any" if options["is_chunked"] else "whole"
    workload = random_workload(seed, **arguments)
    limits = workload.limits._asdict()
    del limits["eos"]
    config = preset(case.preset, **limits, **settings)
    return Pair(changed(workload.limits, **options), config, workload)


# Rare differences, each with workloads that show it.
SEEDS: dict[tuple[str, str], tuple[int, ...]] = {
    ("deep_dive, listing", "eight discards"): (175, 226),
    ("minivllm", "budget before blocks"): (80,),
    ("nano_vllm, later", "blank blocks"): (39, 64, 68),
    ("nano_vllm, later", "equal blocks"): (89, 185, 269, 276),
    ("nano_vllm, later", "order of ends"): (222,),
    ("nano_vllm, later", "output blocks"): (114, 207, 266, 267),
    ("deep_dive, output kept", "no admission after preemption"): (89, 266, 269),
    ("vllm", "no admission after preemption"): (89, 269),
    ("vllm", "one watermark"): (31, 123, 143, 175),
    ("vllm", "room for decodes"): (255, 7),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_differs_but_the_listed_differences(name: str) -> None:
    case, seen = CASES[name], Counter[str]()
    rare_seeds = {
        seed for (listing, _), seeds in SEEDS.items() if listing == name for seed in seeds
    }
    for seed in sorted({*range(NUM_WORKLOADS), *rare_seeds}):
        both = pair(case, seed, case.differences)
        problem = both.run()
        assert problem is None, f"workload {seed}, {problem}: {both.workload}"
        seen += both.seen
    rare = {event: seen[event] for event, least in case.min_events.items() if seen[event] < least}
    assert not rare, f"too few of these events: {rare}"


@pytest.mark.parametrize(
    ("name", "difference"),
    [(name, each) for name, case in CASES.items() for each in case.differences],
)
def test_every_listed_difference_occurs(name: str, difference: str) -> None:
    case = CASES[name]
    others = [each for each in case.differences if each != difference]
    seeds = (*SEEDS.get((name, difference), ()), *range(NUM_WORKLOADS))
    assert any(pair(case, seed, others).run() for seed in seeds)


def test_the_document_lists_the_differences() -> None:
    listed = re.findall(
        r"^- \*\*(.+?)\*\* \(([\w, ]+)\):", DOCUMENT.read_text(encoding="utf-8"), re.M
    )
    found = {(name, each) for name, presets in listed for each in presets.split(", ")}
    assert found == {(name, case.preset) for case in CASES.values() for name in case.differences}


def test_the_models_have_the_numbers_of_the_scheduler() -> None:
    assert differences.MAX_PREFILL_STEPS == MAX_PREFILL_STEPS
    assert differences_mixed.MAX_DISCARDS == MAX_DISCARDS


@pytest.mark.parametrize(("num_prompt", "total", "num_output"), [(5, 8, 3), (5, 100, 6), (5, 6, 1)])
def test_max_total_tokens_limits_prompt_and_output_together(
    num_prompt: int, total: int, num_output: int
) -> None:
    driver = Driver("minivllm")
    request = driver.add("a", num_prompt, 6, max_total_tokens=total)
    driver.run()
    assert (request.num_generated, request.finish_reason) == (num_output, "length")


def test_a_prompt_of_max_total_tokens_is_refused() -> None:
    """miniVLLM would generate one token."""
    request = Request("a", range(5), RequestParams(max_total_tokens=5))
    with pytest.raises(RequestTooLong, match="max_total_tokens") as refused:
        Scheduler(preset("minivllm")).add(request)
    assert (refused.value.need, refused.value.limit) == (6, 5)


def test_max_total_tokens_bounds_an_output_without_max_tokens() -> None:
    driver = Driver("headway")
    request = driver.add("a", 5, None, max_total_tokens=9)
    driver.run()
    assert request.num_generated == 4
