"""A limit on the tokens of requests, also in other processes: they run while a test acts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.plan import Plan
from tests.support.waiting import POLL


@dataclass(frozen=True)
class Hold:
    """The limit, in a file that the processes share; without the file there is none."""

    path: str

    def set(self, num_tokens: int) -> None:
        """No request that has this many tokens gets another one. Those of its engine wait, too."""
        new = Path(f"{self.path}.new")
        new.write_text(str(num_tokens))
        new.replace(self.path)

    def release(self) -> None:
        Path(self.path).unlink(missing_ok=True)

    def wait(self, plan: Plan) -> None:
        """Executors call it before a step."""
        most = max((request.num_generated for request in plan.decodes), default=-1)
        while most >= self._limit():
            time.sleep(POLL)

    def _limit(self) -> float:
        try:
            return int(Path(self.path).read_text())
        except FileNotFoundError:
            return float("inf")


@dataclass(frozen=True)
class Held:
    """An executor whose steps a test can hold."""

    own: Any
    hold: Hold

    def launch(self, plan: Plan) -> Any:
        self.hold.wait(plan)
        return self.own.launch(plan)
