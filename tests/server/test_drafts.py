"""Drafts change no response: not its text, log probabilities, tool calls or token counts."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from headway.events import Completed, Event
from tests.server.test_http import CHAT, COMPLETIONS, TOOL, events
from tests.support.served import TEMPLATE, TOOL_TEMPLATE, Server, server
from tests.support.waiting import on_loop

DRAFTS = {"draft": "fixed(4)", "drafter": "ngram"}
LINES = "".join(f"row {number}: one, two, three, four.\n" for number in range(4))
CALL = b'<tool_call>\n{"name": "f", "arguments": {"a": [1, 2, 1, 2, 1, 2]}}\n</tool_call>'
LONGEST = 300  # tokens
TALK = [{"role": "user", "content": LINES}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": LINES, "max_tokens": 200}),
    (COMPLETIONS, {"prompt": LINES, "max_tokens": 77, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": LINES, "stop": ["FOUR.\nROW 2", "X"], "max_tokens": 200}),
    (COMPLETIONS, {"prompt": LINES, "stop": "2: ONE", "include_stop_str_in_output": True,
                   "logprobs": 2, "max_tokens": 200}),
    (COMPLETIONS, {"prompt": LINES, "stop_token_ids": [ord("2")], "max_tokens": 200}),
    (COMPLETIONS, {"prompt": LINES, "stop_token_ids": [ord("W")], "min_tokens": 50,
                   "max_tokens": 200, "logprobs": 0}),
    (COMPLETIONS, {"prompt": [LINES, "héé€" * 9], "n": 3, "logprobs": 1, "max_tokens": 90}),
    (COMPLETIONS, {"prompt": "ab" * 20, "n": 2, "echo": True, "logprobs": 1, "max_tokens": 30}),
    (CHAT, {"messages": TALK, "logprobs": True, "top_logprobs": 2, "n": 3}),
    (CHAT, {"messages": TALK, "stop": "ROW 2", "n": 2, "return_token_ids": True}),
    (CHAT, {"messages": TALK, "prediction": {"type": "content", "content": LINES.upper()}}),
    (CHAT, {"messages": TALK, "tools": [TOOL]}),
    (CHAT, {"messages": TALK, "tools": [TOOL], "parallel_tool_calls": False, "logprobs": True}),
]  # fmt: skip


def said(body: dict[str, Any]) -> dict[str, Any]:
    """What a response says, without what is not the same in two runs."""
    usage = body["usage"]
    return {
        "choices": [_numbered(choice) for choice in body["choices"]],
        "usage": {name: usage[name] for name in ("prompt_tokens", "completion_tokens")},
    }


def _numbered(value: Any) -> Any:
    """The value with the ids of calls removed."""
    if isinstance(value, dict):
        return {name: _numbered(each) for name, each in value.items() if name != "id"}
    return [_numbered(each) for each in value] if isinstance(value, list) else value


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The chunks of each choice as one: texts and lists one after the other."""
    choices: dict[int, dict[str, Any]] = defaultdict(dict)
    for chunk in chunks:
        for choice in chunk["choices"]:
            _add(choices[choice["index"]], choice)
    found = [choices[index] for index in sorted(choices)]
    return said({"choices": found, "usage": chunks[-1]["usage"]})


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if name == "tool_calls":
            calls = whole.setdefault(name, {})
            for call in value:
                _add(calls.setdefault(call["index"], {}), call)
        elif isinstance(value, dict):
            whole[name] = whole.get(name) or {}
            _add(whole[name], value)
        elif value is None or name in ("index", "role", "finish_reason", "type"):
            whole[name] = whole.get(name) if value is None else value
        else:
            whole[name] = (whole.get(name) or type(value)()) + value


async def answers(here: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """The response, complete and streamed, also with the usage in all chunks."""
    here.executor.says = CALL * 3 if "tools" in body else None
    whole = (await here.post(path, **body)).json()
    found = [said(whole)]
    for is_continuous in (False, True):
        options = {"include_usage": True, "continuous_usage_stats": is_continuous}
        response = await here.post(path, **body, stream=True, stream_options=options)
        assert response.status_code == 200, response.text
        found.append(joined(events(response)))
    return found


@pytest.mark.parametrize("number", range(len(REQUESTS)))
@on_loop
async def test_responses_are_the_same_with_and_without_drafts(number: int) -> None:
    path, body = REQUESTS[number]
    found, num_accepted = [], [0]

    def count(event: Event) -> None:
        if isinstance(event, Completed):
            num_accepted[-1] += sum(number for _, number in event.verified())

    for policies in ({}, DRAFTS, {"draft": "fixed(128)", "drafter": "suffix"}):
        template = TOOL_TEMPLATE if "tools" in body else TEMPLATE
        async with server(policies=policies, template=template) as here:
            here.engine_client.loop.engine.observers.append(count)
            found.append(await answers(here, path, body))
            num_accepted.append(0)
    assert num_accepted[0] == 0 and min(num_accepted[1:3]) > 10
    assert found[0] == found[1] == found[2]
    assert json.dumps(found[0]).count("finish_reason") >= 3
    assert all(f'"{reason}"' not in json.dumps(found) for reason in ("error", "abort"))


async def details(here: Server, **body: Any) -> list[dict[str, int] | None]:
    """`completion_tokens_details` of a chat, and of the same as a stream."""
    whole = (await here.post(CHAT, messages=TALK, **body)).json()
    options = {"include_usage": True}
    streamed = await here.post(CHAT, messages=TALK, **body, stream=True, stream_options=options)
    last = events(streamed)[-1]["usage"]
    return [usage.get("completion_tokens_details") for usage in (whole["usage"], last)]


ANSWER = f"U:{LINES.upper()};A:"  # what the executor generates for TALK


def predicted(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


@on_loop
async def test_the_usage_counts_accepted_and_rejected_drafts() -> None:
    async with server(policies=DRAFTS) as here:
        right, streamed = await details(here, **predicted(ANSWER))
        assert right == streamed and right is not None
        num_accepted = right["accepted_prediction_tokens"]
        assert len(ANSWER) * 3 / 4 < num_accepted <= len(ANSWER)
        assert right["rejected_prediction_tokens"] == 0
        parts = [{"type": "text", "text": text} for text in (ANSWER[:9], ANSWER[9:])]
        assert await details(here, **predicted(parts)) == [right, streamed]
        both, _ = await details(here, **predicted(ANSWER), n=2)
        assert both is not None and both["accepted_prediction_tokens"] > num_accepted
        edited = ANSWER[:20] + "something else" + ANSWER[40:]
        found, streamed = await details(here, **predicted(edited))
        assert found == streamed and found is not None
        assert 0 < found["accepted_prediction_tokens"] < num_accepted
        assert found["rejected_prediction_tokens"] > 0
        found, _ = await details(here)  # drafts from the text alone
        assert found is not None and found["accepted_prediction_tokens"] > 0


@on_loop
async def test_without_a_draft_rule_a_prediction_has_no_effect() -> None:
    async with server() as here:
        zeros = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        assert await details(here, **predicted(ANSWER)) == [zeros, zeros]
        assert await details(here, **predicted("")) == [zeros, zeros]
        assert await details(here) == [None, None]


@on_loop
async def test_a_prediction_is_as_long_as_a_prompt_may_be() -> None:
    async with server(policies=DRAFTS, max_model_len=LONGEST) as here:
        assert (await here.post(CHAT, messages=TALK, **predicted("x" * LONGEST))).status_code == 200
        refused = await here.post(CHAT, messages=TALK, **predicted("x" * (LONGEST + 1)))
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "prediction"
        assert error["code"] == "context_length_exceeded"
