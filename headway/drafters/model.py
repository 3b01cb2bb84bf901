"""A smaller model makes the drafts, in the executor: see executor/draft_model.py.

The drafter only asks for drafts. What reads a plan before it is launched sees UNKNOWN_TOKEN.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.checks import Checked, text
from headway.errors import ConfigError
from headway.plan import UNKNOWN_TOKEN
from headway.request import Request


@dataclass(frozen=True)
class model(Checked):
    """Draft with a smaller model of the same vocabulary: a bundled name, a path or a Hub id."""

    path: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not text("model: path", self.path).strip():
            raise ConfigError('model: path is missing; write model("path"), with a name or a path')

    def __call__(self) -> ModelDrafter:
        return ModelDrafter()


class ModelDrafter:
    """The drafter of the rule `model`. Keeps nothing: the model's KV cache is in the executor."""

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        return (UNKNOWN_TOKEN,) * most

    def forget(self, request: Request) -> None:
        """Nothing is kept."""
