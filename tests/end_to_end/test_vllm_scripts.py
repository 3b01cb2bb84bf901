"""Scripts with the calls of vLLM's offline documentation run with only the import changed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import randint, seed
from typing import Any

import pytest

from headway import LLM, AsyncEngine, SamplingParams, StructuredOutputsParams
from headway.engine.input_processor import RESERVED_VARIABLES
from headway.errors import ConfigError, ExecutorError, InvalidRequest, RequestTooLong
from headway.events import Event, ended_by
from headway.scheduler.policies.draft import by_cost, fixed
from tests.support import real
from tests.support.events import Events
from tests.support.held import Held, Hold
from tests.support.waiting import LIMIT

TEMPLATE = (
    "{{ tone }}{% for tool in tools or [] %}{{ tool.function.name }}, {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = real.write_tiny(tmp_path_factory.mktemp("tiny"))
    settings = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(
        model=model, dtype="float32", max_model_len=256, max_num_seqs=16,
        max_num_batched_tokens=256, gpu_memory_utilization=0.8, enforce_eager=True, seed=0,
        tensor_parallel_size=1, trust_remote_code=True, num_blocks=100,
    )  # fmt: skip


def test_quickstart_generate(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [
        "Hello, my name is",
        "The president of the United States is",
        "The capital of France is",
        "The future of AI is",
    ]
    # Without a seed the texts differ in every run, and one may end with its first token.
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
    shown = capsys.readouterr()
    assert all(repr(prompt) in shown.out for prompt in prompts) and not shown.err
    assert len({output.request_id for output in outputs}) == len(prompts)
    assert all(output.finished and output.outputs[0].text for output in outputs)


def test_quickstart_chat(llm: LLM) -> None:
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay about the importance of higher education."},
    ]
    sampling_params = SamplingParams(temperature=0.5)
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    rendered = llm.get_tokenizer().decode(outputs[0].prompt_token_ids)
    assert len(outputs) == 1 and rendered.endswith("higher education.\nassistant: ")
    outputs = llm.chat([conversation for _ in range(3)], sampling_params, use_tqdm=True)
    for output in outputs:  # a random seed may draw the end of the text
        assert output.outputs[0].finish_reason == "stop" or len(output.outputs[0].token_ids) == 16


def test_logprobs_and_structured_outputs(llm: LLM) -> None:
    sampling_params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1, temperature=0)
    output = llm.generate("Marta had two suitcases", sampling_params)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    total = 0.0
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert position[token_id].rank == 1 and len(position) == 2
        assert position[token_id].decoded_token == llm.get_tokenizer().piece(token_id)
        total += position[token_id].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None
    for token_id, prompt_position in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        assert prompt_position is not None and prompt_position[token_id].logprob <= 0

    choice = StructuredOutputsParams(choice=["good", "bad"])
    outputs = llm.generate(
        prompts="Classify this sentiment: great!",
        sampling_params=SamplingParams(structured_outputs=choice, max_tokens=30),
    )
    assert outputs[0].outputs[0].text in ("good", "bad")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    as_json = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), max_tokens=60)
    text = llm.generate("JSON: ", as_json)[0].outputs[0].text
    assert json.loads(text)["a"] in (1, 2)


def test_benchmark_loop_of_nano_vllm(model: str) -> None:
    seed(0)
    num_seqs, max_input_len, max_ouput_len = 12, 60, 20
    llm = LLM(model, enforce_eager=False, max_model_len=128)
    prompt_token_ids = [
        [randint(0, 200) for _ in range(randint(10, max_input_len))] for _ in range(num_seqs)
    ]
    sampling_params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=randint(10, max_ouput_len))
        for _ in range(num_seqs)
    ]
    llm.generate(["Benchmark: "], SamplingParams())
    outputs = llm.generate(prompt_token_ids, sampling_params, use_tqdm=False)
    total_tokens = sum(sp.max_tokens or 0 for sp in sampling_params)
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == total_tokens
    assert [output.prompt_token_ids for output in outputs] == prompt_token_ids


def test_prompts_may_be_texts_token_ids_or_dicts(llm: LLM) -> None:
    ids, text = llm.get_tokenizer().encode("Marta"), "Marta"
    mixed: list[Any] = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = llm.generate(mixed, SamplingParams(temperature=0, max_tokens=4))
    assert [output.prompt for output in outputs] == [text, None, text, None]
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert llm.generate({"prompt": text}, SamplingParams(max_tokens=1))[0].prompt == text
    for wrong in ({}, {"prompt": [1]}, {"prompt": "a", "prompt_token_ids": [1]}, {"text": "a"}):
        with pytest.raises(InvalidRequest, match="prompt"):
            llm.generate([wrong])


def test_omitted_sampling_params_are_the_default_ones(model: str) -> None:
    """The seed of the LLM makes a whole run reproducible, with another seed for each prompt."""
    found = []
    for given in ([], [SamplingParams()], [None]):
        with LLM(model, seed=3, num_blocks=60) as llm:
            outputs = llm.generate(["Marta", "Marta"], *given)
        found.append([output.outputs[0].text for output in outputs])
        assert [len(output.outputs[0].token_ids) for output in outputs] == [16, 16]
    assert found[0] == found[1] == found[2] and found[0][0] != found[0][1]


def test_a_refused_prompt_raises_before_anything_runs(llm: LLM) -> None:
    llm.engine.observers.append(events := Events())
    with pytest.raises(RequestTooLong, match=r"prompts\[1\]") as caught:
        llm.generate(["Marta", [3] * 300])
    assert caught.value.need > caught.value.limit and not events.plans
    with pytest.raises(InvalidRequest, match=r"prompts\[2\]"):
        llm.generate(["Marta", "Marta", ""])
    llm.engine.observers.pop()
    assert llm.engine.scheduler.is_idle


def test_raising_max_model_len_is_advised_only_if_the_model_allows_it(llm: LLM, model: str) -> None:
    with pytest.raises(RequestTooLong, match="raise max_model_len, up to 512"):
        llm.generate([3] * 300)
    with LLM(model, num_blocks=60) as full, pytest.raises(RequestTooLong, match="512") as caught:
        full.generate([3] * 600)
    assert "raise" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_model_length": 9}, "max_model_len"),
        ({"max_num_seq": 9}, "max_num_seqs"),
        ({"enforce_egar": True}, "enforce_eager"),
        ({"zzz": 1}, "zzz"),
        ({"max_model_len": 513}, "512.*513"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be .* at least 1, not 0"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be a number .*not '0.9'"),
        ({"threads": "4"}, "threads must be a whole number from 1 to 1024, not '4'"),
        ({"max_num_seqs": "8"}, "max_num_seqs must be a whole number of at least 1, not '8'"),
        ({"max_num_batched_tokens": "512"}, "max_num_batched_tokens must .*not '512'"),
        ({"tensor_parallel_sums": "quick"}, "tensor_parallel_sums .*exact, fast, not 'quick'"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size.*only tensor_parallel_size"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching is not supported: .*always on"),
        ({"enable_lora": True}, "enable_lora is not supported"),
        (
            {"speculative_config": {"method": "eagle"}},
            "method must be ngram or suffix, not 'eagle'",
        ),
    ],
)
def test_an_unknown_or_unsupported_argument_is_named(
    model: str, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(model, **settings)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
        {"method": "suffix", "num_speculative_tokens": 6},
    ],
)
def test_speculative_decoding_changes_no_tokens_and_is_counted(
    llm: LLM, model: str, config: dict[str, Any]
) -> None:
    prompts = ["one two one two one two one", "Marta came back to the village"]
    params = SamplingParams(
        temperature=0.7, seed=3, max_tokens=60, n=2, logprobs=2, ignore_eos=True,
        allowed_token_ids=[5, 6],  # so that a text repeats itself
    )  # fmt: skip
    plain = llm.generate(prompts, params)
    with LLM(model, num_blocks=100, max_model_len=256, speculative_config=config) as drafting:
        rule = drafting.config.draft
        assert isinstance(rule, by_cost) and rule.most == config["num_speculative_tokens"]
        always = replace(drafting.config, draft=fixed(4))  # whatever it costs
        drafting.engine.scheduler.reconfigure(always)
        drafted = drafting.generate(prompts, params)
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs == other.outputs  # tokens, texts and logprobs
        assert one.num_drafted == one.num_accepted == 0
        assert 0 < other.num_accepted < other.num_drafted
        assert other.num_accepted < sum(len(sample.token_ids) for sample in other.outputs)


def test_priorities_are_one_for_each_prompt(llm: LLM) -> None:
    llm.engine.observers.append(events := Events())
    greedy = SamplingParams(temperature=0, max_tokens=2)
    assert len(llm.generate(["Marta", "Marta"], greedy, lora_request=None, priority=[3, 1])) == 2
    llm.engine.observers.pop()
    assert [request.params.priority for request in events.added] == [3, 1]
    with pytest.raises(InvalidRequest, match="2 prompts but 1 priorities"):
        llm.generate(["Marta", "Marta"], greedy, priority=[3])
    with pytest.raises(InvalidRequest, match="2 prompts but 3 request ids"):
        llm.generate(["Marta", "Marta"], greedy, request_ids=["a", "b", "c"])


def test_calls_that_are_not_supported_say_so(llm: LLM) -> None:
    given: Any = object()
    with pytest.raises(ConfigError, match="lora_request is not supported"):
        llm.generate("Marta", lora_request=given)
    with pytest.raises(ConfigError, match="lora_request is not supported"):
        llm.chat([{"role": "user", "content": "Hello"}], lora_request=given)
    with pytest.raises(ConfigError, match="beam_search is not supported"):
        llm.beam_search(["Marta"], given)
    for wrong in ("hello", {"role": "user", "content": "Hello"}, 7):
        with pytest.raises(InvalidRequest, match="messages must be a list"):
            llm.chat(wrong)  # type: ignore[arg-type]


def test_every_option_of_chat_reaches_the_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good d"}]
    tool = {"type": "function", "function": {"name": "search"}}

    def rendered(**options: Any) -> str:
        [output] = llm.chat(talk, SamplingParams(max_tokens=1), **options)
        return llm.get_tokenizer().decode(output.prompt_token_ids)

    shown = "user: hello\nassistant: good d\n"
    assert rendered() == shown + "assistant: "
    assert rendered(add_generation_prompt=False) == shown
    assert rendered(chat_template_kwargs={"add_generation_prompt": False}) == shown
    assert rendered(continue_final_message=True) == shown.removesuffix("\n")
    assert rendered(tools=[tool]) == f"search, {shown}assistant: "
    assert rendered(chat_template_kwargs={"tone": "kindly "}) == f"kindly {shown}assistant: "


@pytest.mark.parametrize(
    ("given", "named"),
    [({name: "x"}, f"must not contain {name}") for name in RESERVED_VARIABLES]
    + [(["tools"], "must be a dict"), ({1: "x"}, "must be a dict")],
)
def test_a_reserved_variable_of_the_chat_template_is_named(
    llm: LLM, given: Any, named: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs {named}"):
        llm.chat([{"role": "user", "content": "Hello"}], chat_template_kwargs=given)


def test_calls_may_be_interleaved_on_one_thread(llm: LLM) -> None:
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [expected] = llm.generate("Marta", params)
    stream = llm.stream("Marta", params)
    text = next(stream).text
    llm.generate("The capital", SamplingParams(max_tokens=20, ignore_eos=True))
    last = list(stream)
    assert text + "".join(delta.text for delta in last) == expected.outputs[0].text
    assert last[-1].finish_reason == "length"

    inner: list[str] = []
    outputs = llm.generate(
        ["Hello", "Marta"], [short, params],
        on_finish=lambda i, _: inner.append(llm.generate("Marta", params)[0].outputs[0].text),
    )  # fmt: skip
    assert outputs[1].outputs == expected.outputs
    assert inner == [expected.outputs[0].text] * 2 and not llm.engine.has_work


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_no_prompt_stays_open_after_the_error_of_an_observer(
    model: str, async_scheduling: bool
) -> None:
    def full_disk(event: Event) -> None:
        if ended_by(event):
            raise OSError(28, "No space left on device")

    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 6)]
    with LLM(model, num_blocks=60, async_scheduling=async_scheduling) as llm:
        llm.engine.observers.insert(0, full_disk)  # before the runner's, as a trace is
        with pytest.raises(OSError, match="No space left"):
            llm.generate(["Marta", "Marta"], params)
        llm.engine.observers.remove(full_disk)
        assert [len(o.outputs[0].token_ids) for o in llm.generate(["a", "b"], params)] == [2, 6]
        assert llm._runner.is_idle and not llm.engine.has_work


def test_a_stream_that_an_interrupt_of_another_call_ended_says_so(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    stream = llm.stream("Marta", params)
    next(stream)
    with pytest.raises(KeyboardInterrupt), llm._runner.interruptible():
        llm.engine.restart()  # as after an interrupt in the middle of a step
        raise KeyboardInterrupt
    with pytest.raises(ExecutorError, match="KeyboardInterrupt during another call"):
        list(stream)
    assert len(llm.generate("Marta", params)[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_closed_llm_says_so(model: str, is_traced: bool, tmp_path: Path) -> None:
    llm = LLM(model, num_blocks=60, trace_out=tmp_path / "t.jsonl" if is_traced else None)
    llm.generate("Marta", SamplingParams(max_tokens=2))
    llm.close()
    llm.close()
    for call in (llm.generate, llm.try_generate, llm.embed, lambda p: list(llm.stream(p))):
        with pytest.raises(ExecutorError, match="closed"):
            call("Marta")  # type: ignore[operator]


def test_the_async_engine_takes_text_and_sampling_params(model: str, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, n=2)
    with LLM(model, num_blocks=100) as llm:
        [expected] = llm.generate("Marta", params)
        hold = Hold(str(tmp_path / "hold"))
        llm.engine.executor = Held(llm.engine.executor, hold)

        async def ask() -> None:
            engine = AsyncEngine(llm.engine, input_processor=llm.input_processor)
            await engine.start()
            try:
                hold.set(2)
                outputs = []
                async for output in engine.generate("Marta", params, "a"):
                    outputs.append(output)
                    hold.release()
                texts = [output.outputs[0].text for output in outputs]
                assert all(b.startswith(a) for a, b in pairwise(texts))
                assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
                assert outputs[-1].request_id == "a" and len(outputs) > 1
                assert outputs[-1].outputs == expected.outputs
                long = SamplingParams(max_tokens=200, ignore_eos=True)
                aborted = []
                hold.set(2)
                async for output in engine.generate({"prompt_token_ids": [3, 4]}, long, "b"):
                    aborted.append(output.outputs[0])
                    await engine.abort("b")
                    hold.release()
                assert aborted[-1].finish_reason == "abort"
                assert len(aborted[-1].token_ids) < 200
                with pytest.raises(InvalidRequest):
                    await anext(aiter(engine.generate("")))
            finally:
                await engine.close()

        asyncio.run(asyncio.wait_for(ask(), LIMIT))
