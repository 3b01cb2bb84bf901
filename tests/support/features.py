"""Every sampling feature: fields of SamplingParams with which a request must continue elsewhere."""

from __future__ import annotations

from typing import Any

from tests.support import real

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
          "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
SEEDED: dict[str, Any] = {"seed": 7, "max_tokens": 12}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 12},
    "seed": SEEDED,
    "top-k, top-p, min-p": {**SEEDED, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        **SEEDED, "repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": 0.6,
    },
    "bad words": {**SEEDED, "bad_words": ["the", "a"], "logit_bias": {5: 4.0, 9: -50.0}},
    "allowed tokens": {**SEEDED, "allowed_token_ids": [5, 6, 7, 8, 200]},
    "min_tokens": {**SEEDED, "min_tokens": 8, "stop_token_ids": list(range(2, 200))},
    "stop tokens": {**SEEDED, "max_tokens": 40, "stop_token_ids": [20, 21, 22, 23, 24, 25]},
    "logprobs": {**SEEDED, "logprobs": 3},
    "prompt logprobs": {**SEEDED, "logprobs": 0, "prompt_logprobs": 1},
    "n": {**SEEDED, "n": 3, "logprobs": 0, "stop_token_ids": list(range(30, 60))},
    "schema": {**SEEDED, "max_tokens": 40, "structured_outputs": {"json": SCHEMA}},
    "schema with n": {
        **SEEDED, "n": 2, "max_tokens": 40, "structured_outputs": {"json": SCHEMA}, "logprobs": 1,
    },
    "choice": {**SEEDED, "structured_outputs": {"choice": ["harbour master", "harbour"]}},
    "salt and deadline": {**SEEDED, "salt": "s", "deadline": 5.0, "priority": 2, "client": "c"},
}  # fmt: skip
PROMPT = real.STORY[:60]
