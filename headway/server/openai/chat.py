"""POST /v1/chat/completions: generates the next message of a conversation.

`server/app.py` passes `chat` to `stream.generate`, which sends what `ChatOutput` encodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from json.encoder import encode_basestring_ascii as quoted

from headway.server.context import Context
from headway.server.generation.logprobs import prompt_logprobs_of, token_entries
from headway.server.generation.output_parser import OutputParser
from headway.server.generation.prepared_chat import PreparedChat, prepare_chat
from headway.server.generation.prompt_runs import Delta
from headway.server.generation.stream import ChunkOutput
from headway.server.http.json_output import to_json
from headway.server.http.offload import offload
from headway.server.openai.protocol import ChatRequest
from headway.server.openai.response_models import ChatLogprobs, CompletionDetails
from headway.server.toolcalls.formats import (
    OutputPiece,
    ReasoningDelta,
    merge_pieces,
    merge_reasoning,
)

ROLE = '"delta":{"role":"assistant","content":""}'


async def chat(context: Context, body: ChatRequest, is_live: bool) -> ChatOutput:
    """Validate and tokenize a request; ApiError names the field that is wrong."""
    prepared = await prepare_chat(context, body, id_prefix="chatcmpl", is_live=is_live)
    return ChatOutput(context, body, prepared)


class ChatOutput(ChunkOutput):
    """The output of one request in the format that it asks for."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    text_member = '"delta":{"content":', "}"

    def __init__(self, context: Context, body: ChatRequest, prepared: PreparedChat) -> None:
        run, num_choices = prepared.run, len(prepared.parsers)
        super().__init__(context, prepared.id, [run], num_choices, body.stream_options)
        self._body, self._run, self._parsers = body, run, prepared.parsers
        self._tokenizer = prepared.tokenizer
        self._num_sent = [0] * num_choices  # token ids
        is_text = all(parser.is_plain for parser in prepared.parsers)
        self.is_plain = is_text and not (body.logprobs or body.return_token_ids)

    async def value(self, deltas: list[Delta]) -> object:
        run, num_logprobs, choices = self._run, self._body.prompt_logprobs, list[object]()
        for index, (parser, delta) in enumerate(zip(self._parsers, deltas, strict=True)):
            pieces = await offload(parser.work(delta), partial(parser.push, delta))
            size = len(delta.logprobs) * ((run.sampling_params.logprobs or 0) + 1)
            choices.append({
                "index": index,
                "message": _message(pieces, has_reasoning=parser.has_reasoning),
                "logprobs": await offload(size, partial(self._logprobs, parser)),
                "finish_reason": parser.finish_reason(delta.finish_reason),
                **self._token_ids(index),
            })  # fmt: skip
        response = {**self.response(choices), **self._prompt_ids()}
        if num_logprobs is not None:
            size = (num_logprobs + 1) * len(run.prompt)
            write = partial(prompt_logprobs_of, self._tokenizer, run)
            response["prompt_logprobs"] = await offload(size, write)
        return response

    def first(self) -> bytes:
        """The role of each choice."""
        top: dict[str, object] = {**self._prompt_ids()}
        if self.is_continuous:
            top = {"usage": self.usage, **top}
        elif top and self.has_usage:
            top["usage"] = None
        roles = [self.chunk(index, ROLE, top=top) for index in range(self.num_choices)]
        return "".join(roles).encode("ascii")

    def chunks(self, delta: Delta, top: Mapping[str, object] | None) -> str:
        """The chunks of a delta.

        The finish reason has its own chunk, because clients ignore the content of the last chunk.
        """
        parser, choice = self._parsers[delta.choice], delta.choice
        pieces = parser.push(delta)
        logprobs = self._logprobs(parser)
        if parser.logprobs and all(isinstance(piece, ReasoningDelta) for piece in pieces):
            pieces.append("")
        chunks = ""
        for piece in pieces:
            ids, is_answer = self._token_ids(choice), not isinstance(piece, ReasoningDelta)
            entries = logprobs if is_answer else None
            chunks += self.chunk(choice, _member(piece), entries, choice=ids, top=top)
            logprobs = None if is_answer else logprobs
        if delta.finish_reason is not None:
            reason, ids = parser.finish_reason(delta.finish_reason), self._token_ids(choice)
            chunks += self.chunk(choice, '"delta":{}', None, reason, choice=ids, top=top)
        return chunks

    @property
    def completion_details(self) -> CompletionDetails:
        details = super().completion_details
        if self._parsers[0].has_reasoning:
            num_reasoning = sum(parser.num_reasoning_tokens for parser in self._parsers)
            details["reasoning_tokens"] = num_reasoning
        return details

    def _logprobs(self, parser: OutputParser) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        content = token_entries(self._tokenizer, parser.logprobs, as_ids=as_ids)
        return {"content": content, "refusal": None}

    def _prompt_ids(self) -> Mapping[str, Sequence[int]]:
        """The prompt's token ids, if the request asks for them."""
        return {"prompt_token_ids": self._run.prompt} if self._body.return_token_ids else {}

    def _token_ids(self, choice: int) -> Mapping[str, Sequence[int]]:
        """New token ids of a choice, if the request asks for them."""
        if not self._body.return_token_ids:
            return {}
        tokens, start = self._run.samples[choice].tokens, self._num_sent[choice]
        self._num_sent[choice] = len(tokens)
        return {"token_ids": tokens[start:]}


def _message(pieces: list[OutputPiece], *, has_reasoning: bool) -> object:
    """The message. Clients read the reasoning by vLLM's name or by DeepSeek's."""
    parsed = merge_pieces(pieces)
    calls = [call.as_message() for call in parsed.calls]
    message: dict[str, object] = {"role": "assistant", "content": parsed.content, "refusal": None}
    if has_reasoning:
        text = merge_reasoning(pieces)
        message |= {"reasoning": text, "reasoning_content": text}
        message["content"] = parsed.content or None
    return {**message, "tool_calls": calls} if calls else message


def _member(piece: OutputPiece) -> str:
    """A piece of output as the member `"delta":{...}` of a chunk."""
    if isinstance(piece, str):
        return f'"delta":{{"content":{quoted(piece)}}}'
    if isinstance(piece, ReasoningDelta):
        text = quoted(piece.text)
        return f'"delta":{{"reasoning":{text},"reasoning_content":{text}}}'
    return f'"delta":{{"tool_calls":[{to_json(piece.as_chunk()).decode()}]}}'
