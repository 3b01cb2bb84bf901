"""What groups that are served in turn owe each other: way for the one that has had less, and seats.

A rule of one group, as most are, never comes here. Where there are more, order alone would not do:
a newcomer, however little its group was served, finds the step's budget taken by prompts that
others have begun, and the seats by outputs that take long. Reads the scheduler, changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.plan import Blocked
from headway.request import Request

if TYPE_CHECKING:
    from headway.scheduler.scheduler import Scheduler

KEPT_SHARE = 8  # one seat in so many is kept for groups that have fewer than those


def had_by(begun: Request, scheduler: Scheduler) -> float:
    """What the group of a begun prompt has been served, without what is left of the prompt.

    Whoever would, with all of a request, have had no more than that may pass the prompt. So one
    that has had nothing waits for no more of it than its own request is long, and of those that
    have had the same none passes another.
    """
    group = scheduler.queue.group_of(begun)
    return scheduler.service()[group] - scheduler.num_uncached(begun)


def leaves_seats(request: Request, scheduler: Scheduler) -> Blocked | None:
    """Why it must wait although there are seats: they are kept for groups that have few."""
    free = scheduler.config.max_num_seqs - len(scheduler.running)
    kept = scheduler.config.max_num_seqs // KEPT_SHARE
    if free > kept or len(scheduler.ledger.served) < 2:  # nobody else is known
        return None
    group = scheduler.queue.group_of
    num_seats = sum(group(other) == group(request) for other in scheduler.running)
    return Blocked(request, "reserved_rows", kept + 1, free) if num_seats >= kept else None
