"""The offline API: a model, a scheduler and an engine in one object, as in vLLM.

    llm = LLM("smollm2-135m")
    outputs = llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, max_tokens=20))
    print(outputs[0].outputs[0].text)

All calls must be on one thread. There they may be interleaved: a `stream` may be left open while
`generate` runs, and `on_finish` may call `generate`. Every scheduler setting can be given, and every
step can be observed and recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from inspect import Parameter, Signature, signature
from itertools import count
from typing import Any, NoReturn, TypeVar

from headway.engine.clock import RealClock
from headway.engine.engine import Observer
from headway.engine.input_processor import (
    InputProcessor,
    Message,
    PromptInput,
    embedding_params,
    is_single,
    seeds,
    template_variables,
)
from headway.engine.offline import OfflineRunner, OnFinish, PromptBatch
from headway.engine.outputs import (
    Delta,
    EmbeddingRequestOutput,
    OutputBuilder,
    RequestOutput,
    embedding_output,
)
from headway.engine_setup import make_engine, open_trace, start_executor
from headway.errors import (
    ConfigError,
    ExecutorError,
    HeadwayError,
    InvalidRequest,
    PolicyError,
    RequestError,
    RequestTooLong,
    shorten,
)
from headway.executor.factory import count_blocks
from headway.loading import Loaded, Progress, load
from headway.options import EngineOptions, unsupported
from headway.parallel.launch import RankLauncher
from headway.request import Pooling, RequestParams
from headway.sampling_params import SamplingParams
from headway.text.tokenizer import Tokenizer

Prompts = PromptInput | Sequence[PromptInput]
AllParams = SamplingParams | Sequence[SamplingParams] | None  # one for all prompts, or one for each
Init = TypeVar("Init", bound=Callable[..., None])


def _with_options(init: Init) -> Init:
    """Show every field of EngineOptions in the signature of LLM."""
    self, model, *own, _ = signature(init).parameters.values()
    shown = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(EngineOptions)
        if each.name != model.name
    ]
    init.__signature__ = Signature([self, model, *shown, *own])  # type: ignore[attr-defined]
    return init


class LLM:
    """A model that completes prompts in batches.

    `model` is a bundled name, a folder, a .gguf file or a Hugging Face Hub id. `device` is auto (a
    GPU if one is usable), cpu, cuda or cuda:1. `dtype` is auto (float32 on a CPU, bfloat16 on a
    GPU), float32, bfloat16 or float16. `quantization` on a CPU is int8, or auto (the fastest by
    measurement; see `headway models`), and on a GPU fp8. `kv_memory` is in bytes, or a text such as
    "2GiB".

    `deterministic` makes tokens and logprobs of a request the same bits in any batch, however it is
    scheduled; it is slower on a GPU, and ConfigError where it is impossible.

    `chat_template` is a file with a Jinja template, in place of the model's own.

    `seed` makes runs reproducible: requests without a seed get one derived from it, in order.
    `enforce_eager` runs a GPU without CUDA graphs. `tensor_parallel_size` divides the model among
    as many GPUs or processes; `tensor_parallel_sums` is exact, fast, or auto: exact on a CPU.
    `rank_launcher` starts these processes on other machines, as in a fleet on Ray.
    `trust_remote_code` has no effect, because no code of a model repository is ever run.
    `async_scheduling` plans the next step while one runs; the default is on for a GPU.

    `speculative_config` is vLLM's dict for speculative decoding, which sets the slots `draft` and
    `drafter`.

    `preset` names the scheduler's settings; `max_model_len`, `max_num_seqs`,
    `max_num_batched_tokens`, `block_size`, `num_blocks`, `queue`, `chunk` and so on change them, as
    in `headway.preset`. `progress` is called with a description, and what is done of a total, while
    the model is loaded. ConfigError names an unknown argument.
    """

    @_with_options
    def __init__(
        self,
        model: str = EngineOptions().model,
        *,
        progress: Progress | None = None,
        observers: Iterable[Observer] = (),
        rank_launcher: RankLauncher | None = None,
        **keywords: Any,
    ) -> None:
        options = _read_options(model, keywords)
        self.loaded: Loaded = load(
            options, progress=progress, measure=count_blocks, launcher=rank_launcher
        )
        self.model_name = model
        self.tokenizer = self.loaded.tokenizer
        self.input_processor = InputProcessor(
            tokenizer=self.tokenizer, vocab_size=self.loaded.decoder.config.vocab_size,
            hidden_size=self.loaded.decoder.config.hidden_size, eos_ids=self.loaded.eos_ids,
            new_seed=seeds(options.seed),
        )  # fmt: skip
        clock = RealClock()
        self.executor = start_executor(self.loaded, clock.now, progress, options.enforce_eager)
        self.engine = make_engine(self.loaded, self.executor, clock, options.async_scheduling)
        self.config = self.engine.scheduler.config
        self._trace = open_trace(self.engine, options)
        self._runner = OfflineRunner(self.engine)
        self._is_closed = False
        self.engine.observers += observers
        self._numbers = count()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: AllParams = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        on_finish: OnFinish | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of prompts; outputs are in the order of the prompts.

        A prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`.
        `sampling_params` is one for all prompts or one for each; the default is
        `SamplingParams()`. `use_tqdm` shows a progress bar if stderr is a terminal. `priority`
        has one for each prompt; lower values run first. `request_ids` are the ids in outputs and
        traces; the default is a number. `on_finish` is called with the position and output of each
        prompt as soon as it has finished.

        If a prompt is refused, its RequestError, or PolicyError if a policy failed, is raised before
        anything runs; it names the position of the prompt. If a step fails while a request runs,
        its outputs have finish_reason "error", and `error` says why.
        """
        _check_lora(lora_request)
        with self._runner.batch() as batch:
            self._submit(batch, prompts, sampling_params, priority=priority, ids=request_ids)
            _raise_refusal(batch, prompts)
            outputs = self._runner.run(batch, use_tqdm, on_finish)
        return [outputs[position] for position in range(len(batch.results))]

    def try_generate(
        self,
        prompts: Prompts,
        sampling_params: AllParams = None,
        *,
        request_ids: Sequence[str] | None = None,
        on_finish: OnFinish | None = None,
    ) -> list[RequestOutput | HeadwayError]:
        """Like `generate`, but a refused prompt has its error in the list and the others run.

        Shows no progress bar. `on_finish` is not called for refused prompts.
        """
        with self._runner.batch() as batch:
            self._submit(batch, prompts, sampling_params, ids=request_ids)
            outputs = self._runner.run(batch, False, on_finish)
        return [
            each if isinstance(each, HeadwayError) else outputs[position]
            for position, each in enumerate(batch.results)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: AllParams = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of conversations; see `generate`.

        The model's chat template renders the messages; `chat_template_kwargs` are further
        variables for it, not `tools` or others that are set here. `add_generation_prompt` is true
        unless `continue_final_message` is.
        """
        _check_lora(lora_request)
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise InvalidRequest(f"messages must be a list, not {shorten(messages)}")
        options = {
            **template_variables(chat_template_kwargs),
            "continue_final_message": continue_final_message, "tools": tools,
        }  # fmt: skip
        if add_generation_prompt is not None:
            options["add_generation_prompt"] = add_generation_prompt
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts = [self.chat_tokens(conversation, **options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def embed(
        self, prompts: Prompts, *, pooling: Pooling = "mean", use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings in the order of the prompts: `output.outputs.embedding`, float32, length 1.

        `pooling` is "mean" (over all prompt tokens) or "last" (the last token). Raises the
        RequestError or PolicyError of a refused prompt, and ExecutorError if a step fails.
        """
        with self._runner.batch() as batch:
            self._submit(batch, prompts, None, fixed=embedding_params(pooling))
            _raise_refusal(batch, prompts)
            outputs = self._runner.run(batch, use_tqdm)
        return [
            embedding_output(outputs[position], builder.embedding)
            for position, builder in enumerate(batch.builders)
        ]

    def beam_search(self, *given: object, **named: object) -> NoReturn:
        """vLLM's beam search is not supported."""
        raise ConfigError("beam_search is not supported: outputs are sampled, or greedy")

    def stream(self, prompts: Prompts, sampling_params: AllParams = None) -> Iterator[Delta]:
        """Yield text as it is generated. Leaving the loop early aborts the requests."""
        with self._runner.batch(is_streamed=True) as batch:
            self._submit(batch, prompts, sampling_params)
            _raise_refusal(batch, prompts)
            while batch.num_open or batch.deltas:
                if not batch.deltas:
                    self._runner.check_work()
                    self.engine.step()
                while batch.deltas:
                    yield batch.deltas.popleft()

    def chat_tokens(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The tokens of a conversation, rendered with the model's chat template."""
        return self.input_processor.chat_tokens(messages, **options)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; InvalidRequest if it has none."""
        return self.input_processor.need_tokenizer()

    def reset_cache(self) -> bool:
        """Drop all cached prefixes; False, without effect, while requests hold blocks."""
        return self.engine.scheduler.reset_cache()

    def close(self) -> None:
        """Abort open requests, end other ranks and close the trace file.

        Later calls raise ExecutorError.
        """
        self._is_closed = True
        self._runner.close_all()
        if self.loaded.ranks is not None:
            self.loaded.ranks.close()
        if self._trace is not None:
            with self._trace:
                self.engine.tell()  # what happened after the last step, such as reset_cache()
            self._trace = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(
        self,
        batch: PromptBatch,
        prompts: Prompts,
        params: AllParams,
        *,
        fixed: RequestParams | None = None,
        priority: Sequence[int] | None = None,
        ids: Sequence[str] | None = None,
    ) -> None:
        """Add every prompt to the engine and to the batch, which gets the error of a refused one.

        `fixed` are the engine's params of every request, in place of `params`.
        """
        if self._is_closed:
            raise ExecutorError("this LLM has been closed; create a new one")
        listed: list[Any] = [prompts] if is_single(prompts) else list(prompts)
        each = _params_of_each(params, priority, len(listed))
        _check_count("request ids", ids, len(listed))
        names = map(str, self._numbers) if ids is None else ids
        for prompt, sampling_params, id in zip(listed, each, names, strict=False):
            try:
                text, tokens = self.input_processor.read_prompt(prompt)
                engine_params = fixed or self.input_processor.params(sampling_params, id)
                added = self.engine.add(id, tokens, engine_params)
            except (RequestError, PolicyError) as error:
                batch.results.append(self._with_advice(error))
                continue
            builder = OutputBuilder(
                id, tokens, sampling_params, self.tokenizer, partial(self.engine.stop_sample, id),
                hidden=engine_params.stops, is_live=batch.is_streamed, prompt_text=text,
                first_choice=batch.num_choices,
            )  # fmt: skip
            self._runner.watch(batch, builder, added)

    def _with_advice(self, error: RequestError | PolicyError) -> RequestError | PolicyError:
        """The error; advises to raise max_model_len if the model allows it."""
        limit = self.loaded.decoder.config.max_model_len
        if isinstance(error, RequestTooLong) and error.limit == self.config.max_model_len < limit:
            error.args = (f"{error}, or raise max_model_len, up to {limit}",)
        return error


def _read_options(model: str, keywords: Mapping[str, Any]) -> EngineOptions:
    """The options of an LLM; ConfigError names unknown keywords and the closest known ones."""
    known = signature(LLM).parameters
    problems = []
    for name in keywords:
        if name not in known:
            if problem := unsupported(name):
                raise ConfigError(problem)
            close = get_close_matches(name, known, 1)
            problems.append(repr(name) + (f" (did you mean {close[0]!r}?)" if close else ""))
    if problems:
        raise ConfigError(f"LLM has no argument {', '.join(problems)}")
    return EngineOptions(model=model, **keywords)


def _params_of_each(
    params: AllParams, priority: Sequence[int] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    default = SamplingParams() if params is None else params
    each = default if isinstance(default, Sequence) else [default] * num_prompts
    if len(each) != num_prompts:
        raise InvalidRequest(
            f"{num_prompts} prompts but {len(each)} sampling parameters; give one SamplingParams "
            "or one for each prompt"
        )
    if priority is None:
        return each
    _check_count("priorities", priority, num_prompts)
    return [replace(own, priority=p) for own, p in zip(each, priority, strict=True)]


def _check_count(what: str, given: Sequence[object] | None, num_prompts: int) -> None:
    if given is not None and len(given) != num_prompts:
        problem = f"{num_prompts} prompts but {len(given)} {what}"
        raise InvalidRequest(f"{problem}; give one for each prompt")


def _raise_refusal(batch: PromptBatch, prompts: Prompts) -> None:
    """Raise the error of the first refused prompt, if there is one."""
    for position, error in enumerate(batch.results):
        if isinstance(error, HeadwayError):
            if not is_single(prompts):
                error.args = (f"prompts[{position}]: {error}",)
            raise error


def _check_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise ConfigError(unsupported("lora_request"))
