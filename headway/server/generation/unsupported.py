"""Fields of other servers that would change an answer here, if they were not ignored.

A field of this list is refused unless its value asks for what the server does anyway. Fields that
change nothing about the answer, such as `store`, are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from headway.server.http.errors import refused, shown


class Unsupported(NamedTuple):
    """A field that is refused, the values that are accepted, and what to use instead."""

    harmless: tuple[Any, ...] = ()
    advice: str = "leave it out"


USE_TOOLS = "use tools and tool_choice"
OWN_TEMPLATE = "start the server with --chat-template"
TEXT_ONLY = "the model reads and writes text only"
GUIDED = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar",
}  # fmt: skip  # vLLM's older names of what structured_outputs has

FIELDS: dict[str, Unsupported] = {
    "audio": Unsupported(advice=TEXT_ONLY),
    "chat_template": Unsupported(advice=OWN_TEMPLATE),
    "echo": Unsupported((False,), "send the prompt to /v1/completions"),
    "function_call": Unsupported(("none",), USE_TOOLS),
    "functions": Unsupported(([],), USE_TOOLS),
    "guided_whitespace_pattern": Unsupported(advice="use x-guidance in the schema"),
    "kv_transfer_params": Unsupported(),
    "length_penalty": Unsupported((1, 1.0)),
    "logits_processors": Unsupported(([],), "use logit_bias, bad_words or structured_outputs"),
    "mm_processor_kwargs": Unsupported(advice=TEXT_ONLY),
    "modalities": Unsupported((["text"],), TEXT_ONLY),
    "spaces_between_special_tokens": Unsupported((True,)),
    "structural_tag": Unsupported(advice="use structured_outputs"),
    "use_beam_search": Unsupported((False,), "use n and temperature"),
    "web_search_options": Unsupported(),
}


def check_supported(more: Mapping[str, Any] | None) -> None:
    """ApiError for the first field that would be silently ignored."""
    for name, value in (more or {}).items():
        known = FIELDS.get(name)
        if known is not None and value is not None and value not in known.harmless:
            raise refused(name, f"is not supported, here it is {shown(value)}; {known.advice}")


def guided(more: Mapping[str, Any] | None) -> dict[str, Any]:
    """The members of `structured_outputs` that vLLM's older fields stand for."""
    given = more or {}
    return {new: given[old] for old, new in GUIDED.items() if given.get(old) is not None}
