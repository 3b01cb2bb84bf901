"""What a drafter does. It sees known tokens only, and knows nothing of plans, rows or models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headway.request import Request


class Drafter(Protocol):
    """Proposes tokens that may follow the known tokens of a request; the model verifies them.

    The same calls in the same order propose the same tokens.
    """

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """At most `most` tokens that may follow the known tokens; none if nothing is likely."""
        ...

    def forget(self, request: Request) -> None:
        """Free what is kept for a request, and learn from its output if the drafter does so.

        Called once, when the request has ended or was aborted.
        """
        ...
