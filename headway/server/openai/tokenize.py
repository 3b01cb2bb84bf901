"""POST /tokenize and /detokenize."""

from __future__ import annotations

from headway.server.context import Context
from headway.server.generation.prompts import chat_tokens_of
from headway.server.generation.request_fields import check_model, max_listed_tokens
from headway.server.http.errors import attribute_errors_to, field_error, format_value
from headway.server.http.offload import offload, yield_gil
from headway.server.openai.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from headway.server.openai.response_models import DetokenizeResponse, TokenizeResponse
from headway.server.toolcalls.choice import tool_use
from headway.text.tokenizer import Tokenizer

CHARACTERS_PER_TOKEN = 4  # approximately
TEMPLATE_FIELDS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
PART = 1024  # tokens converted between two pauses


async def tokenize(context: Context, body: TokenizeRequest) -> TokenizeResponse:
    """The tokens of a prompt, or of a conversation as rendered by the chat template."""
    check_model(context, body.model)
    tokenizer = context.input_processor.need_tokenizer()
    if body.prompt is None and body.messages is None:
        raise field_error("prompt", "is missing; send prompt or messages")
    if body.prompt is not None and body.messages is not None:
        raise field_error("prompt", "and messages exclude each other; send only one")
    limit = max_listed_tokens(context)
    if body.messages is not None:
        parser = context.tool_call_parser
        use = tool_use(tokenizer.chat_template, body.tools, parser=parser)
        given = {name: getattr(body, name) for name in TEMPLATE_FIELDS}
        chat = ChatRequest.model_construct(messages=body.messages, **given)
        tokens = await chat_tokens_of(context, chat, use, limit)
    else:
        text = body.prompt or ""
        special = body.add_special_tokens is not False
        with attribute_errors_to("prompt"):
            tokens = await offload(
                len(text), lambda: tokenizer.encode(text, special=special, max_tokens=limit)
            )
    value: TokenizeResponse = {
        "count": len(tokens),
        "max_model_len": context.max_model_len,
        "tokens": tokens,
    }
    if body.return_token_strs:
        value["token_strs"] = await offload(len(tokens), lambda: _pieces(tokenizer, tokens))
    return value


def _pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    pieces: list[str] = []
    for start in range(0, len(tokens), PART):
        pieces += [tokenizer.piece(token) for token in tokens[start : start + PART]]
        yield_gil()
    return pieces


async def detokenize(context: Context, body: DetokenizeRequest) -> DetokenizeResponse:
    """The text of tokens, including special tokens."""
    check_model(context, body.model)
    tokenizer = context.input_processor.need_tokenizer()
    vocab_size, limit = context.input_processor.vocab_size, max_listed_tokens(context)
    if len(body.tokens) > limit:
        raise field_error("tokens", f"must have at most {limit} items, not {len(body.tokens)}")
    for token in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= token < vocab_size:
            problem = f"must be from 0 to {vocab_size - 1}, not {format_value(token)}"
            raise field_error("tokens", problem)
    size = CHARACTERS_PER_TOKEN * len(body.tokens)
    text = await offload(size, lambda: tokenizer.decode(body.tokens, skip_special=False))
    return {"prompt": text}
