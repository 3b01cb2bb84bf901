"""Sizes that one request may have, where the work grows with them and the model's length says nothing.

All are far above what requests have in practice. The body's own are in json_size.py.
"""

from __future__ import annotations

from headway.server.context import Context
from headway.server.http.errors import refused
from headway.server.openai.protocol import GenerationFields

MAX_STOP_CHARACTERS = 8192  # of all stop strings together, and of all bad words
MAX_LISTED_TOKENS = 1 << 18  # ids that /tokenize returns and /detokenize takes; or a model's length
MAX_ECHOED_LOGPROBS = 1 << 22  # of a prompt, in all choices of an answer


def check_sizes(context: Context, body: GenerationFields) -> None:
    """Refuse fields whose lists or texts are too long in all."""
    for name in ("stop", "bad_words"):
        value = getattr(body, name)
        if not value:
            continue
        size = len(value) if isinstance(value, str) else sum(map(len, value))
        if size > MAX_STOP_CHARACTERS:
            problem = f"must have at most {MAX_STOP_CHARACTERS} characters in all, not {size}"
            raise refused(name, problem)
    allowed, most = body.allowed_token_ids, context.asking.vocab_size
    if allowed and len(allowed) > most:
        problem = f"must have at most {most} items, the model's tokens, not {len(allowed)}"
        raise refused("allowed_token_ids", problem)


def check_echoed_logprobs(num_tokens: int, logprobs: int | None, field: str = "logprobs") -> None:
    """Refuse a prompt whose log probabilities would fill the memory; tokens in all choices."""
    num_entries = num_tokens * ((logprobs or 0) + 1)
    if logprobs is not None and num_entries > MAX_ECHOED_LOGPROBS:
        problem = f"makes {num_entries} entries for the prompt; at most {MAX_ECHOED_LOGPROBS}"
        raise refused(field, f"{problem}. Ask for fewer, or send fewer prompts at once")


def max_listed_tokens(context: Context) -> int:
    """Ids that /tokenize returns and /detokenize takes at most."""
    return max(context.max_model_len, MAX_LISTED_TOKENS)
