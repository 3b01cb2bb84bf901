"""langchain-openai, instructor, litellm and the `llm` command against a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import NAME

KEY = "unused"
QUESTION = "What is the weather in Rome?"

pydantic = pytest.importorskip("pydantic")


class City(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """The city that a question is about."""

    city: str = pydantic.Field(max_length=12)


def chat_model(url: str, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=NAME, base_url=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=60, timeout=120,
        **more,
    )  # fmt: skip


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain_invokes_and_streams_alike(url: str, use_responses_api: bool) -> None:
    model = chat_model(url, use_responses_api=use_responses_api)
    whole = model.invoke("Name one colour, in one word.")
    assert whole.text and whole.usage_metadata["output_tokens"] > 0
    pieces = [piece.text for piece in model.stream("Name one colour, in one word.")]
    assert "".join(pieces) == whole.text and len(pieces) > 1


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output(url: str, method: str) -> None:
    structured = chat_model(url).with_structured_output(City, method=method)
    assert isinstance(structured.invoke(QUESTION), City)


def test_langchain_gets_structured_output_from_responses(url: str) -> None:
    model = chat_model(url, use_responses_api=True)
    assert isinstance(
        model.with_structured_output(City, method="json_schema").invoke(QUESTION), City
    )


def test_langchain_binds_tools_and_reads_streamed_calls(url: str) -> None:
    model = chat_model(url).bind_tools(
        [City], tool_choice="any", parallel_tool_calls=False, strict=True
    )
    (call,) = model.invoke(QUESTION).tool_calls
    assert call["name"] == "City" and set(call["args"]) == {"city"}
    gathered: Any = None
    for piece in model.stream(QUESTION):
        gathered = piece if gathered is None else gathered + piece
    assert gathered.tool_calls[0]["args"] == call["args"]


@pytest.mark.parametrize("mode", ["JSON", "JSON_SCHEMA", "TOOLS"])
def test_instructor_fills_a_model(url: str, mode: str) -> None:
    import instructor
    from openai import OpenAI

    plain = OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=120)
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    asked: Any = {"model": NAME, "temperature": 0, "max_tokens": 100, "max_retries": 0}
    question = QUESTION
    if mode == "JSON":  # which allows any JSON object, so the model must be led
        question = 'Answer with exactly this JSON: {"city": "Rome"}'
    found = client.chat.completions.create(
        messages=[{"role": "user", "content": question}], response_model=City, **asked
    )
    assert isinstance(found, City) and len(found.city) <= 12


def test_litellm_completes_streams_and_calls_tools(url: str) -> None:
    import litellm

    asked: Any = {
        "model": f"hosted_vllm/{NAME}", "api_base": f"{url}/v1", "api_key": KEY, "temperature": 0,
        "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40, "timeout": 120,
    }  # fmt: skip
    whole = litellm.completion(**asked).choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)
    ]
    assert whole and "".join(pieces) == whole
    function = {"name": "City", "parameters": City.model_json_schema()}
    tools = [{"type": "function", "function": function}]
    answer = litellm.completion(**asked, tools=tools, tool_choice="required")
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "City" and "city" in json.loads(call.function.arguments)


def test_litellm_speaks_anthropics_api(url: str) -> None:
    import litellm

    answer = litellm.completion(
        model=f"anthropic/{NAME}", api_base=url, api_key=KEY, max_tokens=20, timeout=120,
        messages=[{"role": "user", "content": "Name one colour."}],
    )  # fmt: skip
    assert answer.choices[0].message.content


def test_the_llm_command_answers(url: str, tmp_path: Path) -> None:
    models = [{"model_id": NAME, "model_name": NAME, "api_base": f"{url}/v1"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    command = [
        sys.executable,
        "-m",
        "llm",
        "-m",
        NAME,
        "Name one colour.",
        "-o",
        "max_tokens",
        "12",
    ]
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": KEY}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
