"""Victim rules: a key for each running request; the one with the largest is preempted first."""

from __future__ import annotations

from typing import Any

from headway.config import SchedulerView
from headway.request import Request


def newest(request: Request, view: SchedulerView) -> Any:
    """Last in, first out."""
    return request.history.admission


def least_work(request: Request, view: SchedulerView) -> Any:
    """Fewest tokens computed so far."""
    return -request.num_computed, request.history.serial


def fewest_generated(request: Request, view: SchedulerView) -> Any:
    """Fewest output tokens so far; among equals, the latest arrival."""
    return -request.num_generated, request.history.serial


def lowest_priority(request: Request, view: SchedulerView) -> Any:
    """The largest priority number; among equals, the latest arrival."""
    return request.params.priority, request.history.serial


def fewest_private_blocks(request: Request, view: SchedulerView) -> Any:
    """The request whose preemption frees the fewest blocks."""
    return -view.num_private_blocks(request), request.history.serial


def served_last(request: Request, view: SchedulerView) -> Any:
    """The request that the queue would serve last."""
    return view.queue_key(request)
