"""POST /tokenize and /detokenize: the model's tokens, without the model."""

from __future__ import annotations

from typing import Any

from headway.server.context import Context
from headway.server.generation.conversation import template_options
from headway.server.generation.limits import max_listed_tokens
from headway.server.generation.request_fields import chat_tokens_of, check_model, naming
from headway.server.http.errors import refused, shown
from headway.server.http.offload import aside, pause
from headway.server.openai.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from headway.server.toolcalls.choice import ToolUse, tool_use
from headway.text.tokenizer import Tokenizer

LETTERS = 4  # of a token, about
PART = 1024  # tokens that are spelled between two pauses


async def tokenize(context: Context, body: TokenizeRequest) -> dict[str, Any]:
    """The tokens of a prompt, or of a conversation as the model's template writes it."""
    check_model(context, body.model)
    tokenizer = context.asking.need_tokenizer()
    if (body.prompt is None) == (body.messages is None):
        raise refused("prompt", "or messages, one of them, must be given")
    most = max_listed_tokens(context)
    if body.messages is not None:
        tokens = await chat_tokens_of(context, body.messages, *_shown(context, body), most)
    else:
        text = body.prompt or ""
        special = body.add_special_tokens is not False
        with naming("prompt"):
            tokens = await aside(
                len(text), lambda: tokenizer.encode(text, special=special, max_tokens=most)
            )
    told = {"count": len(tokens), "max_model_len": context.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        told["token_strs"] = await aside(len(tokens), lambda: _pieces(tokenizer, tokens))
    return told


def _shown(context: Context, body: TokenizeRequest) -> tuple[ToolUse | None, dict[str, Any]]:
    """The tools of a conversation and the template's variables, as a chat would have them."""
    template = context.asking.need_tokenizer().chat_template
    use = tool_use(template, body.tools, parser=context.tool_call_parser)
    chat = ChatRequest.model_construct(
        messages=body.messages, chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )  # fmt: skip
    return use, template_options(chat, use)


def _pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    pieces: list[str] = []
    for start in range(0, len(tokens), PART):
        pieces += [tokenizer.piece(token) for token in tokens[start : start + PART]]
        pause()
    return pieces


async def detokenize(context: Context, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of tokens, special ones included."""
    check_model(context, body.model)
    tokenizer = context.asking.need_tokenizer()
    limit, most = context.asking.vocab_size, max_listed_tokens(context)
    if len(body.tokens) > most:
        raise refused("tokens", f"must have at most {most} items, not {len(body.tokens)}")
    for wrong in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= wrong < limit:
            raise refused("tokens", f"holds {shown(wrong)}; token ids are from 0 to {limit - 1}")
    num_letters = LETTERS * len(body.tokens)
    decode = tokenizer.decode
    text = await aside(num_letters, lambda: decode(body.tokens, skip_special=False))
    return {"prompt": text}
