"""The last token again: drafts for a simulation, whose executor decides how many are right."""

from __future__ import annotations

from headway.request import Request


def repeat_last() -> RepeatDrafter:
    """Draft the last token, as often as asked: what a simulation uses."""
    return RepeatDrafter()


class RepeatDrafter:
    """The drafter of the rule `repeat_last`."""

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        last = (request.output or request.prompt)[-1]
        return (last,) * most

    def forget(self, request: Request) -> None:
        """Nothing is kept."""
