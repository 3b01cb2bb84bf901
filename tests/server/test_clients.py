"""OpenAI's and Anthropic's Python clients against the server, with the bundled model."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from headway import LLM, AsyncEngine, SamplingParams
from headway.cli.options.serve import ServeOptions
from headway.engine.queue_limits import QueueLimits
from headway.lab.loadgen import report as serve_report
from headway.lab.loadgen.http_client import Address
from headway.lab.loadgen.load import find_model, send
from headway.lab.loadgen.requests import RequestFormat
from headway.lab.workload.files import read_workload
from headway.server.app import create_app
from headway.server.context import Context
from headway.server.openai import protocol
from headway.server.openai.embeddings import EmbeddingRequest
from headway.server.settings import Settings
from tests.support import real
from tests.support.served import Server, with_server
from tests.support.waiting import LIMIT, until, wait_until

NAME = "smollm2-135m"
KEY = "unused"
MAX_MODEL_LEN = 1024
PROMPT = "The capital of France is"
TALK: list[Any] = [{"role": "user", "content": "Name one colour, in one word."}]
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0}
THOUGHT = b"<think>\nhm\n</think>\n\nyes"  # a scripted output
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 2, 3]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Serving:
    """The app on a local port, run by uvicorn on a thread."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        assert self._started.wait(LIMIT), "the server has not started"
        return f"http://127.0.0.1:{self._port}"

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), "the server has not stopped"

    async def _serve(self) -> None:
        engine = AsyncEngine(self._llm.engine, QueueLimits(max_waiting=200))
        await engine.start()
        context = Context(
            engine=engine, input_processor=self._llm.input_processor, model_name=NAME,
            max_model_len=self._llm.config.max_model_len,
            settings=Settings(tool_call_parser="hermes"),
        )  # fmt: skip
        config = uvicorn.Config(
            create_app(context), port=0, log_level="error", ws="none", timeout_keep_alive=int(LIMIT)
        )
        self._server = uvicorn.Server(config)
        serving = asyncio.create_task(self._server.serve())
        await until(lambda: self._server.started)
        self._port = self._server.servers[0].sockets[0].getsockname()[1]
        self._started.set()
        await serving
        await engine.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings = {"num_blocks": 512, "max_model_len": MAX_MODEL_LEN}
    with real.open_llm("int8", threads=1, **settings) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> str:
    """The offline output for PROMPT."""
    (result,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8))
    return result.outputs[0].text


@pytest.fixture(scope="module")
def embedded(llm: LLM) -> list[list[float]]:
    """The offline embeddings of two prompts."""
    vectors = [output.outputs.embedding for output in llm.embed([PROMPT, "A cup of tea"])]
    return [vector.tolist() for vector in vectors if vector is not None]


@pytest.fixture(scope="module")
def url(
    llm: LLM, alone: object, embedded: object
) -> Iterator[str]:  # compute offline results first: a served engine runs on its own thread
    with Serving(llm) as url:
        yield url


@pytest.fixture(scope="module")
def openai() -> Any:
    """The module. Imported here, because every process collects the tests and few need it."""
    return import_module("openai")


@pytest.fixture(scope="module")
def anthropic() -> Any:
    return import_module("anthropic")


@pytest.fixture(scope="module")
def client(openai: Any, url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=LIMIT, max_retries=0) as client:
        yield client


def test_the_model_list_names_the_model(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [NAME]


def test_a_completion_equals_the_offline_output(client: Any, alone: str) -> None:
    answer = client.completions.create(prompt=PROMPT, max_tokens=8, **GREEDY)
    assert answer.choices[0].text == alone and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == 8 + answer.usage.prompt_tokens


def test_a_streamed_completion_equals_the_complete_one(client: Any, alone: str) -> None:
    stream = client.completions.create(
        prompt=PROMPT, max_tokens=8, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == alone
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert len({c.id for c in chunks}) == 1


def test_prompts_can_be_token_ids_and_batches(llm: LLM, client: Any, alone: str) -> None:
    ids = llm.input_processor.tokens(PROMPT)
    answer = client.completions.create(prompt=[ids, ids], max_tokens=8, **GREEDY)
    assert [choice.text for choice in answer.choices] == [alone] * 2
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_a_chat_is_the_same_complete_and_streamed(client: Any) -> None:
    whole = client.chat.completions.create(messages=TALK, max_completion_tokens=6, **GREEDY)
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].message.content
    stream = client.chat.completions.create(
        messages=TALK, max_completion_tokens=6, stream=True, **GREEDY
    )
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content


def test_embeddings_equal_the_offline_ones(
    llm: LLM, client: Any, embedded: list[list[float]]
) -> None:
    """Bit for bit, as base64, the client's default, and as numbers."""
    asked = [PROMPT, "A cup of tea"]
    for form in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model=NAME, input=asked, **form)
        assert [item.embedding for item in answer.data] == embedded
        assert [item.index for item in answer.data] == [0, 1] and answer.model == NAME
        num_tokens = sum(len(llm.input_processor.tokens(text)) for text in asked)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens
    last = client.embeddings.create(
        model=NAME, input=llm.input_processor.tokens(PROMPT), extra_body={"pooling": "last"}
    )
    assert len(last.data) == 1 and last.data[0].embedding != embedded[0]
    assert math.isclose(math.hypot(*last.data[0].embedding), 1, abs_tol=1e-6)


def test_the_clients_stream_helper_works(client: Any) -> None:
    with client.chat.completions.stream(
        messages=TALK, max_completion_tokens=60, stop=["."], **GREEDY
    ) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    assert final.choices[0].message.content and final.choices[0].finish_reason == "stop"


def test_logprobs_have_openais_formats(client: Any) -> None:
    plain = client.completions.create(prompt=PROMPT, max_tokens=3, logprobs=2, **GREEDY)
    columns = plain.choices[0].logprobs
    assert len(columns.tokens) == len(columns.token_logprobs) == len(columns.text_offset) == 3
    assert "".join(columns.tokens) == plain.choices[0].text
    assert all(len(top) >= 2 for top in columns.top_logprobs)
    talk = client.chat.completions.create(
        messages=TALK, max_completion_tokens=3, logprobs=True, top_logprobs=2, **GREEDY
    )
    content = talk.choices[0].logprobs.content
    assert len(content) == talk.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 2 and token.logprob <= 0
        assert math.isclose(token.logprob, max(t.logprob for t in token.top_logprobs), abs_tol=1e-6)
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token


def test_n_gives_n_choices_and_a_seed_repeats_them(client: Any) -> None:
    def ask() -> list[str]:
        answer = client.chat.completions.create(
            model=NAME, messages=TALK, n=3, seed=5, temperature=1.5, max_completion_tokens=8
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) > 1 and ask() == first


def test_a_stop_string_ends_the_text_before_it(client: Any, alone: str) -> None:
    word = alone.split()[1]
    answer = client.completions.create(prompt=PROMPT, max_tokens=8, stop=[word], **GREEDY)
    assert answer.choices[0].text == alone.partition(word)[0]
    assert answer.choices[0].finish_reason == "stop"


def test_the_client_raises_its_own_error_classes(openai: Any, client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match=NAME):
        client.completions.create(model="unknown-model", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model=NAME, prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="prompt") as caught:
        client.completions.create(prompt=[1] * (MAX_MODEL_LEN + 1), max_tokens=1, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="input") as caught:
        client.embeddings.create(model=NAME, input=[1] * (MAX_MODEL_LEN + 1))
    assert caught.value.code == "context_length_exceeded"


def test_a_stream_closed_early_ends_its_request(client: Any, llm: LLM) -> None:
    before = llm.engine.scheduler.num_steps
    with client.completions.create(prompt=PROMPT, max_tokens=1000, stream=True,
                                   extra_body={"ignore_eos": True}, **GREEDY) as stream:  # fmt: skip
        next(iter(stream))
    client.completions.create(prompt=PROMPT, max_tokens=2, **GREEDY)
    wait_until(lambda: not llm.engine.has_work)
    assert llm.engine.scheduler.num_steps < before + 1000, "it was cancelled"


def test_the_async_client_runs_many_requests_at_once(openai: Any, url: str, alone: str) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
            asks = (client.completions.create(prompt=PROMPT, max_tokens=8, **GREEDY)
                    for _ in range(4))  # fmt: skip
            return [answer.choices[0].text for answer in await asyncio.gather(*asks)]

    assert asyncio.run(ask_all()) == [alone] * 4


def test_output_satisfies_its_json_schema(client: Any) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        messages=TALK, max_completion_tokens=60, response_format=wanted, **GREEDY
    )
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == {"name", "age"} and value["age"] in (1, 2, 3) and len(value["name"]) <= 8


def test_output_can_be_any_json_object(client: Any) -> None:
    answer = client.chat.completions.create(
        messages=TALK, max_completion_tokens=40, response_format={"type": "json_object"}, **GREEDY
    )
    text = answer.choices[0].message.content
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


ROME: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
CITY: Any = WEATHER["function"]["parameters"]
# More tokens than a busy server sends in one event.
HOURS: Any = {"type": "array", "items": {"type": "boolean"}, "minItems": 6, "maxItems": 6}
FORECAST: Any = {
    **CITY, "properties": {**CITY["properties"], "rain": HOURS}, "required": ["city", "rain"],
}  # fmt: skip


def test_a_model_without_tools_in_its_template_calls_tools(client: Any) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": FORECAST}}
    asked: Any = {
        "messages": ROME, "tools": [tool], "tool_choice": "required", "max_tokens": 90, **GREEDY,
        "parallel_tool_calls": False,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls
    assert call.function.name == "get_weather" and whole.finish_reason == "tool_calls"
    assert set(json.loads(call.function.arguments)) == {"city", "rain"}
    with client.chat.completions.stream(**asked) as stream:
        parts = [event.arguments_delta for event in stream
                 if event.type == "tool_calls.function.arguments.delta"]  # fmt: skip
        final = stream.get_final_completion().choices[0]
    assert "".join(parts) == call.function.arguments and len(parts) > 1
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    talk = [
        *ROME, whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"},
    ]  # fmt: skip
    again = client.chat.completions.create(messages=talk, tools=[tool], max_tokens=8, **GREEDY)
    assert again.choices[0].message.content


def test_responses_complete_streamed_and_structured(openai: Any, client: Any) -> None:
    asked: Any = {"model": NAME, "input": TALK, "temperature": 0, "max_output_tokens": 6}
    whole = client.responses.create(**asked)
    chat = client.chat.completions.create(messages=TALK, max_completion_tokens=6, **GREEDY)
    assert whole.output_text == chat.choices[0].message.content
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    final = events[-1].response
    assert "".join(deltas) == whole.output_text == final.output_text
    assert final.status == whole.status == "incomplete" and events[-1].type.endswith("incomplete")
    assert final.usage.output_tokens == whole.usage.output_tokens
    form: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
    formed = client.responses.create(**{**asked, "max_output_tokens": 60}, text=form)
    assert set(json.loads(formed.output_text)) == {"city"}
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(**asked, previous_response_id=whole.id)


def test_responses_call_functions(client: Any) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": FORECAST, "strict": True}
    asked: Any = {
        "model": NAME, "input": ROME, "tools": [tool], "tool_choice": "required", "temperature": 0,
        "max_output_tokens": 90, "parallel_tool_calls": False,
    }  # fmt: skip
    (call,) = client.responses.create(**asked).output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"city", "rain"}
    with client.responses.stream(**asked) as stream:
        kind = "response.function_call_arguments.delta"
        parts = [event.delta for event in stream if event.type == kind]
        final = stream.get_final_response()
    assert "".join(parts) == call.arguments == final.output[0].arguments and len(parts) > 1
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    talk = [*ROME, call.model_dump(), result]
    again = client.responses.create(model=NAME, input=talk, max_output_tokens=8, temperature=0)
    assert again.output_text


@pytest.fixture(scope="module")
def claude(anthropic: Any, url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, timeout=LIMIT, max_retries=0) as client:
        yield client


def test_anthropics_client_reads_messages_complete_and_streamed(
    anthropic: Any, client: Any, claude: Any
) -> None:
    asked: Any = {"model": NAME, "messages": TALK, "max_tokens": 6, "extra_body": {"top_k": 1}}
    whole = claude.messages.create(**asked)
    chat = client.chat.completions.create(messages=TALK, max_completion_tokens=6, **GREEDY)
    assert whole.content[0].text == chat.choices[0].message.content
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens > 0
    counted = claude.messages.count_tokens(model=NAME, messages=TALK)
    assert counted.input_tokens == chat.usage.prompt_tokens
    with pytest.raises(anthropic.NotFoundError, match=NAME):
        claude.messages.create(**{**asked, "model": "other"})


def test_anthropics_client_gets_tool_calls(claude: Any) -> None:
    asked: Any = {
        "model": NAME, "messages": ROME, "max_tokens": 60, "extra_body": {"top_k": 1},
        "tools": [{"name": "get_weather", "input_schema": CITY}],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }  # fmt: skip
    whole = claude.messages.create(**asked)
    (use,) = whole.content
    assert whole.stop_reason == "tool_use" and set(use.input) == {"city"}
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "12 degrees"}
    talk = [*ROME, {"role": "assistant", "content": [use.model_dump()]},
            {"role": "user", "content": [result]}]  # fmt: skip
    again = claude.messages.create(model=NAME, messages=talk, max_tokens=8)
    assert again.content[0].text


def test_anthropics_client_gets_json_that_satisfies_a_schema(claude: Any) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": CITY}}
    answer = claude.messages.create(model=NAME, messages=ROME, max_tokens=60, output_config=form)
    assert set(json.loads(answer.content[0].text)) == {"city"}


def test_bench_serve_replays_a_mooncake_trace(url: str, tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    lines = [{"timestamp": 50 * i, "input_length": 40, "output_length": 3, "hash_ids": [7 + i // 2]}
             for i in range(3)]  # fmt: skip
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    address = Address.parse(url)
    load = send(
        address, RequestFormat(model=find_model(address)), read_workload(file), timeout=LIMIT
    )
    result = serve_report.report(load.outcomes, load.max_concurrency)
    assert (result.completed, result.errors) == (3, {})
    assert (result.total_input_tokens, result.total_output_tokens) == (3 * 40, 9)


def test_docs_name_every_field_path_and_limit(llm: LLM) -> None:
    document = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    context = Context(
        engine=AsyncEngine(llm.engine),
        input_processor=llm.input_processor,
        model_name=NAME,
        max_model_len=100,
    )
    schema = create_app(context).openapi()
    models = (
        protocol.CompletionRequest, protocol.ChatRequest, protocol.TokenizeRequest,
        protocol.DetokenizeRequest, EmbeddingRequest,
    )  # fmt: skip
    names = {field for model in models for field in model.model_fields}
    assert sorted(name for name in names if f"`{name}`" not in document) == []
    paths = {f"{verb.upper()} {path}" for path, verbs in schema["paths"].items() for verb in verbs}
    assert sorted(path for path in paths if f"`{path}`" not in document) == []
    served = (*ServeOptions.__dataclass_fields__, "chat_template")
    flags = {f"--{name.replace('_', '-')}" for name in served}
    assert sorted(flag for flag in flags if f"`{flag}" not in document) == []


@with_server(reasoning_parser="qwen3")
async def test_openais_client_reads_the_reasoning(here: Server, openai: Any) -> None:
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=here.client)
    here.executor.says = THOUGHT
    done = await client.chat.completions.create(model="letters", messages=TALK)
    assert done.choices[0].message.reasoning_content == done.choices[0].message.reasoning == "hm"
    assert done.usage.completion_tokens_details.reasoning_tokens == len(THOUGHT) - 5
    thought = ""
    async for chunk in await client.chat.completions.create(
        model="letters", messages=TALK, stream=True
    ):
        thought += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert thought == "hm"
    whole = await client.responses.create(model="letters", input="?")
    async with client.responses.stream(model="letters", input="?") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    for response in (whole, final):
        reasoning, message = response.output
        assert (reasoning.type, reasoning.status) == ("reasoning", "completed")
        assert reasoning.content[0].text == "hm" and message.content[0].text == "yes"
        assert response.usage.output_tokens_details.reasoning_tokens == len(THOUGHT) - 5
    deltas = [event for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(event.delta for event in deltas) == "hm"


@with_server(reasoning_parser="qwen3")
async def test_anthropics_client_reads_the_thinking(here: Server, anthropic: Any) -> None:
    asked = {"model": "letters", "max_tokens": 200, "messages": TALK}
    httpx2 = import_module("httpx2")
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=here.app))
    client = anthropic.AsyncAnthropic(base_url="http://test", api_key="x", http_client=http)
    here.executor.says = THOUGHT
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    for message in (whole, final):
        thinking, text = message.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "hm", "yes")
        assert thinking.signature == message.id
        assert message.usage.output_tokens_details.thinking_tokens == len(THOUGHT) - 5
