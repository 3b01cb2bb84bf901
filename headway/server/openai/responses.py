"""POST /v1/responses: OpenAI's Responses API, without stored responses.

The output is a sequence of items: reasoning, text messages and function calls. One item is open at a time.
"""

from __future__ import annotations

from random import Random
from typing import Any

from headway.server.context import Context
from headway.server.generation.logprobs import token_entries
from headway.server.generation.prepared_chat import PreparedChat, prepare_chat
from headway.server.generation.prompt_runs import Delta
from headway.server.generation.stream import Output, named_event
from headway.server.http.errors import ApiError, rename_params
from headway.server.http.offload import offload
from headway.server.openai.response_models import TokenLogprob
from headway.server.openai.responses_input import FIELD_NAMES, ResponsesRequest, chat_request
from headway.server.toolcalls.formats import CallDelta, ReasoningDelta

INCOMPLETE = {"length": "max_output_tokens"}


async def responses(context: Context, body: ResponsesRequest, is_live: bool) -> ResponseOutput:
    """Validate and tokenize a request; ApiError names the field that is wrong."""
    with rename_params(FIELD_NAMES):
        chat = await prepare_chat(
            context, chat_request(body), id_prefix="resp", field="input", is_live=is_live
        )
    return ResponseOutput(context, body, chat, is_live=is_live)


class ResponseOutput(Output):
    """One response object, or named and numbered events; the last has the final status."""

    def __init__(
        self, context: Context, body: ResponsesRequest, chat: PreparedChat, *, is_live: bool
    ) -> None:
        super().__init__(context, chat.id, [chat.run], 1)
        self._body, self._chat = body, chat
        self._items: list[dict[str, Any]] = []
        self._is_live, self._chance = is_live, Random(self.id)
        self._early_logprobs: list[TokenLogprob] = []  # until a message begins
        self._events: list[bytes] = []  # encoded, because the items in them change

    async def value(self, deltas: list[Delta]) -> object:
        (delta,) = deltas
        await offload(self._chat.parsers[0].work(delta), lambda: self._push(delta))
        return self._response(delta.finish_reason)

    def first(self) -> bytes:
        for status in ("created", "in_progress"):
            self._emit(f"response.{status}", response=self._response(None))
        return self.encode([])

    def encode(self, deltas: list[Delta]) -> bytes:
        for delta in deltas:
            self._push(delta)
        encoded = b"".join(self._events)
        self._events.clear()
        return encoded

    def error(self, failure: ApiError) -> bytes:
        self._events.clear()
        error = failure.body["error"]
        self._emit("error", code=error["code"], message=error["message"], param=error["param"])
        return self.encode([])

    @property
    def _is_open(self) -> bool:
        """Whether the last item is open."""
        return bool(self._items) and self._items[-1]["status"] == "in_progress"

    def _has_open(self, type: str) -> bool:
        return self._is_open and self._items[-1]["type"] == type

    def _emit(self, type: str, **members: object) -> None:
        if self._is_live:
            event = {"type": type, **members, "sequence_number": self.num_events}
            self.num_events += 1
            self._events.append(named_event(event))

    def _push(self, delta: Delta) -> None:
        """Emit the events of a delta; the last delta closes the open item."""
        parser = self._chat.parsers[0]
        pieces, logprobs = parser.push(delta), self._early_logprobs
        if self._body.wants_logprobs:
            logprobs = logprobs + token_entries(self._chat.tokenizer, parser.logprobs)
        self._early_logprobs = []
        for piece in pieces:
            if isinstance(piece, CallDelta):
                self._call(piece)
            elif isinstance(piece, ReasoningDelta):
                self._reason(piece.text)
            else:
                self._text(piece, logprobs)
                logprobs = []
        if logprobs and self._has_open("message"):  # of text that is held back
            self._text("", logprobs)
        elif all(item["type"] == "reasoning" for item in self._items):
            self._early_logprobs = logprobs
        if delta.finish_reason is not None:
            self._close("incomplete" if delta.finish_reason in INCOMPLETE else "completed")
            response = self._response(delta.finish_reason)
            self._emit(f"response.{response['status']}", response=response)

    def _text(self, text: str, logprobs: list[TokenLogprob]) -> None:
        if not self._has_open("message"):
            self._begin({
                "id": self._new_id("msg"), "type": "message", "role": "assistant",
                "status": "in_progress", "content": [],
            })  # fmt: skip
            self._begin_part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        (part,) = self._items[-1]["content"]
        part["text"] += text
        part["logprobs"] += logprobs
        more = {"content_index": 0, "delta": text, "logprobs": logprobs}
        self._emit("response.output_text.delta", **self._place(), **more)

    def _reason(self, text: str) -> None:
        if not self._has_open("reasoning"):
            self._begin({
                "id": self._new_id("rs"), "type": "reasoning", "status": "in_progress",
                "summary": [], "content": [],
            })  # fmt: skip
            self._begin_part({"type": "reasoning_text", "text": ""})
        self._items[-1]["content"][0]["text"] += text
        self._emit("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)

    def _begin_part(self, part: dict[str, Any]) -> None:
        self._items[-1]["content"].append(part)
        self._emit("response.content_part.added", **self._place(), content_index=0, part=part)

    def _call(self, piece: CallDelta) -> None:
        if piece.id is not None:
            self._begin({
                "id": self._new_id("fc"), "type": "function_call", "status": "in_progress",
                "call_id": piece.id, "name": piece.name, "arguments": "",
            })  # fmt: skip
        if piece.arguments:
            self._items[-1]["arguments"] += piece.arguments
            kind = "response.function_call_arguments.delta"
            self._emit(kind, **self._place(), delta=piece.arguments)

    def _begin(self, item: dict[str, Any]) -> None:
        self._close("completed")
        self._items.append(item)
        place = len(self._items) - 1
        self._emit("response.output_item.added", output_index=place, item=item)

    def _close(self, status: str) -> None:
        """Close the open item, if there is one."""
        if not self._is_open:
            return
        item, place = self._items[-1], self._place()
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            self._emit("response.function_call_arguments.done", **place, **done)
        else:
            (part,) = item["content"]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            self._emit(f"response.{part['type']}.done", **place, content_index=0, **done)
            self._emit("response.content_part.done", **place, content_index=0, part=part)
        self._emit("response.output_item.done", output_index=place["output_index"], item=item)

    def _new_id(self, kind: str) -> str:
        return f"{kind}_{self._chance.getrandbits(96):024x}"

    def _place(self) -> dict[str, object]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _response(self, reason: str | None) -> dict[str, Any]:
        """The response object; `reason` is the finish reason, None while generation continues."""
        body, limit = self._body, INCOMPLETE.get(reason or "")
        status = "in_progress" if reason is None else "incomplete" if limit else "completed"
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        return {
            "id": self.id, "object": "response", "created_at": self.created,
            "status": status, "background": False, "error": None,
            "incomplete_details": {"reason": limit} if limit else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "model": self.context.model_name, "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "reasoning": {"effort": body.effort, "summary": None},
            "store": False, "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": body.tool_choice or "auto", "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p, "truncation": "disabled",
            "usage": None if reason is None else self._usage(), "user": body.user,
            "metadata": body.metadata or {},
        }  # fmt: skip

    def _usage(self) -> dict[str, object]:
        run = self._chat.run
        num_prompt, num_generated = len(run.prompt), run.num_generated
        num_reasoning = self._chat.parsers[0].num_reasoning_tokens
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": run.num_cached},
            "output_tokens": num_generated,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_prompt + num_generated,
        }
