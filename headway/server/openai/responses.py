"""POST /v1/responses: OpenAI's newer API, without stored responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from itertools import count
from typing import Any

from headway.errors import InvalidRequest
from headway.server.context import Context
from headway.server.generation.conversation import Conversation, open_conversation
from headway.server.generation.logprobs import token_entries
from headway.server.generation.runs import Delta, Outlet, Straight
from headway.server.generation.stream import Events, Watched, Whole, named_event
from headway.server.http.errors import ApiError, api_error, renamed
from headway.server.openai.responses_input import RENAMED, ResponsesRequest, chat_request
from headway.server.openai.responses_items import OutputItems

INCOMPLETE = {"length": "max_output_tokens"}


def responses(context: Context, body: ResponsesRequest) -> Watched:
    """The answer to one request, streamed or whole."""
    if body.stream:
        return ResponseEvents(context, body)
    return Whole(context, lambda: _answer(context, body))


class ResponseEvents(Events):
    """Events that are named; the last one tells how the response ended."""

    last = b""

    def __init__(self, context: Context, body: ResponsesRequest) -> None:
        self._numbers = count()
        super().__init__(context, lambda outlet: _events(context, body, outlet, self._numbers))

    def failed(self, failure: ApiError) -> bytes:
        error = failure.body["error"]
        told = {name: error[name] for name in ("code", "message", "param")}
        return named_event({"type": "error", **told, "sequence_number": next(self._numbers)})


class Response:
    """One response in the making."""

    def __init__(self, context: Context, body: ResponsesRequest, opened: Conversation) -> None:
        self.items = OutputItems(opened.answers[0])
        self._context, self._body, self._opened = context, body, opened

    def push(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of what the answer gained; its items are closed with its end."""
        scores = None
        if self._body.wants_logprobs:
            scores = token_entries(self._opened.tokenizer, delta.scores)
        events = self.items.push(delta, scores)
        if delta.finish_reason is not None:
            status = "incomplete" if delta.finish_reason in INCOMPLETE else "completed"
            events += self.items.close(status)
            response = self.value(delta.finish_reason)
            events.append({"type": f"response.{response['status']}", "response": response})
        return events

    def value(self, reason: str | None) -> dict[str, Any]:
        """The response object; `reason` is why the answer ended, None while it goes on."""
        body, cut = self._body, INCOMPLETE.get(reason or "")
        status = "in_progress" if reason is None else "incomplete" if cut else "completed"
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        return {
            "id": self._opened.id, "object": "response", "created_at": self._opened.created,
            "status": status, "background": False, "error": None,
            "incomplete_details": {"reason": cut} if cut else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "model": self._context.model_name, "output": self.items.output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "reasoning": {"effort": None, "summary": None},
            "store": False, "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": body.tool_choice or "auto", "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p, "truncation": "disabled",
            "usage": None if reason is None else self._usage(), "user": body.user,
            "metadata": body.metadata or {},
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        run = self._opened.run
        num_prompt, num_generated = len(run.prompt), run.num_generated
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": run.num_cached},
            "output_tokens": num_generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_generated,
        }


async def _open(context: Context, body: ResponsesRequest, *, is_live: bool) -> Conversation:
    try:
        chat = chat_request(body)
        return await open_conversation(
            context, chat, id_prefix="resp", field="input", is_live=is_live
        )
    except (ApiError, InvalidRequest) as error:
        raise renamed(api_error(error), RENAMED) from error


async def _answer(context: Context, body: ResponsesRequest) -> dict[str, Any]:
    opened = await _open(context, body, is_live=False)
    response = Response(context, body, opened)
    (delta,) = await opened.all_deltas()
    response.push(delta)
    return response.value(delta.finish_reason)


async def _events(
    context: Context, body: ResponsesRequest, outlet: Outlet | None, numbers: Iterator[int]
) -> AsyncGenerator[bytes, None]:
    opened = await _open(context, body, is_live=True)
    response = Response(context, body, opened)
    before = [
        {"type": f"response.{status}", "response": response.value(None)}
        for status in ("created", "in_progress")
    ]

    def numbered(events: list[dict[str, Any]]) -> bytes:
        return b"".join(
            named_event({**event, "sequence_number": next(numbers)}) for event in events
        )

    def form(deltas: list[Delta]) -> bytes:
        return numbered([event for delta in deltas for event in response.push(delta)])

    straight = Straight(outlet, form) if outlet else None
    async with aclosing(opened.run.deltas(straight)) as news:
        async for deltas in news:
            yield numbered(before) + form(deltas)
            before = []
