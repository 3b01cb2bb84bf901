"""Shared by the tests of real models: prompts, a reference made by transformers, and engines.

The reference is kept in a file, so that tests do not need transformers; a test compares it with
transformers. `python -m tests.support.real` writes it again.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headway import LLM, Engine, Plan, Scheduler, loading
from headway.events import Completed, Event, preempted_by
from headway.executor.cpu import CpuExecutor
from headway.loading import find_tokenizer, fit
from headway.model.backends.base import kv_itemsize
from headway.model.batch import ForwardBatch
from headway.model.config import load_hf
from headway.model.decoder import Decoder
from headway.model.loader import open_checkpoint
from headway.model.precision import choose_backend
from headway.model.registry import resolve
from headway.options import EngineOptions
from headway.request import RequestParams
from headway.text.chat_template import render_chat
from headway.text.tokenizer import Tokenizer

REFERENCE = Path(__file__).with_name("real_reference.json")
NUM_TOKENS = 24  # every output enters a new block of 16
TIE = 1e-4  # logits this close may be in either order
# (prompt, position in the output, the reference's token, the other token) of every such pair.
TIES: list[tuple[str, int, int, int]] = []

STORY = (
    "The lighthouse at the end of the long stone pier had not been lit for eleven years when "
    "Marta came back to the village. She had left it in a borrowed coat, with two suitcases and "
    "a letter from a cousin in the city, and she returned with one suitcase, no coat and no "
    "letter. The harbour master, who remembered everybody, did not remember her. "
)
LIST = "".join(f"{n}. Item number {n} of the list costs {3 * n} euros.\n" for n in range(1, 9))
CODE = '''import heapq


def shortest_paths(graph, source):
    """Lengths of the shortest paths from a source, by Dijkstra's algorithm."""
    distances = {source: 0}
    queue = [(0, source)]
    while queue:
        distance, node = heapq.heappop(queue)
'''
SYSTEM = "You are a careful assistant. You answer in one short paragraph and name your sources."
PROMPTS: dict[str, str | list[dict[str, str]]] = {
    "one token": "The",
    "another token": "\n",
    "capital": "The capital of France is",
    "name": "Hello, my name is",
    "physics": "The theory of relativity says that",
    "recipe": "To bake a loaf of bread you need",
    "dialogue": '"Where are you going?" she asked. "',
    "numbers": "1, 2, 3, 5, 8, 13,",
    "python": "def fibonacci(n):\n    ",
    "dijkstra": CODE,
    "c": "#include <stdio.h>\n\nint main(int argc, char **argv) {\n",
    "sql": "SELECT name, COUNT(*) FROM orders WHERE",
    "json": '{"name": "Ada", "born": 1815, "languages": [',
    "german": "Die Donau ist ein Fluss, der",
    "french": "Il était une fois, dans une forêt profonde,",
    "chinese": "北京是中国的",
    "russian": "Москва — это",
    "emoji": "🎉🎂 Happy birthday 🎈 to you",
    "spaces": "a  b   c    d\t\te\n\n\n",
    "chat": [{"role": "user", "content": "Why is the sky blue?"}],
    "chat with system": [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Name three rivers of Europe."},
    ],
    "long chat": [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What does a scheduler do?"},
        {"role": "assistant", "content": "It decides what runs next, and for how long."},
        {"role": "user", "content": "And why does that matter? 🙂"},
    ],
    "long list": LIST,
    "long story": STORY * 4 + "One evening",
}


@cache
def tokenizer() -> Tokenizer:
    found = find_tokenizer(resolve("smollm2-135m"))
    assert found is not None
    return found


@cache
def prompts() -> dict[str, list[int]]:
    """Every prompt as tokens."""
    own = tokenizer()
    return {
        name: own.encode(prompt)
        if isinstance(prompt, str)
        else own.encode(
            render_chat(own.chat_template, prompt, bos=own.bos, eos=own.eos), special=False
        )
        for name, prompt in PROMPTS.items()
    }


def prompts_of(lengths: range) -> dict[str, list[int]]:
    """The prompts whose number of tokens is in `lengths`."""
    return {name: tokens for name, tokens in prompts().items() if len(tokens) in lengths}


def decoder(precision: str = "float32") -> Decoder:
    """The bundled model, loaded once per process."""
    return _decoder(precision)


@cache
def _decoder(precision: str) -> Decoder:
    checkpoint = open_checkpoint(resolve("smollm2-135m"))
    return Decoder(checkpoint, choose_backend(checkpoint.config, precision))


def open_llm(precision: str = "float32", **settings: Any) -> LLM:
    """The bundled model on the CPU, with the weights of `decoder`."""
    quantization = "int8" if precision == "int8" else "none"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_decoder", lambda *_: decoder(precision))
        llm = LLM("smollm2-135m", device="cpu", quantization=quantization, **settings)
    assert llm.loaded.precision == precision
    return llm


@cache
def reference() -> dict[str, list[int]]:
    """The greedy tokens after each prompt."""
    found: dict[str, list[int]] = json.loads(REFERENCE.read_text(encoding="utf-8"))
    return found


def unlike_reference(found: dict[str, Sequence[int]]) -> list[tuple[str, int, int, int]]:
    """(prompt, position, reference, found) where outputs first differ, except for known ties."""
    differences = []
    for name, tokens in found.items():
        assert len(tokens) <= NUM_TOKENS, "the reference is no longer than this"
        pairs = enumerate(zip(reference()[name], tokens, strict=False))
        first = next(((name, place, *pair) for place, pair in pairs if pair[0] != pair[1]), None)
        if first is not None and first not in TIES:
            differences.append(first)
    return differences


@dataclass
class Seen:
    """An observer that counts what happened in a run."""

    num_recomputed: int = 0  # preemptions
    num_swapped: int = 0
    num_copied: list[int] = field(default_factory=lambda: [0, 0])  # blocks out, blocks in
    num_cached: int = 0  # prompt tokens of new requests that were cached
    num_full_hits: int = 0  # prompts that were fully cached
    most_decodes: int = 0
    longest_chunk: int = 0
    num_steps: int = 0

    def __call__(self, event: Event) -> None:
        self.num_recomputed += sum(not p.is_swap for p in preempted_by(event))
        self.num_swapped += sum(p.is_swap for p in preempted_by(event))
        if isinstance(event, Completed):
            self._count(event.plan)

    def _count(self, plan: Plan) -> None:
        self.num_steps += 1
        self.num_copied[0] += len(plan.copies_out)
        self.num_copied[1] += len(plan.copies_in)
        self.num_cached += sum(a.num_cached for a in plan.admitted if not a.is_resume)
        self.num_full_hits += sum(c.store_from > c.start for c in plan.chunks)
        self.most_decodes = max(self.most_decodes, len(plan.decodes))
        self.longest_chunk = max([self.longest_chunk, *(c.end - c.start for c in plan.chunks)])


class Trial:
    """A decoder with one configuration, which generates greedily any number of times."""

    def __init__(
        self, model: Decoder, preset: str = "headway", *, async_scheduling: int = 0, **settings: Any
    ) -> None:
        itemsize = kv_itemsize(model.backend, model.config)
        self.config = fit(
            model.config, itemsize, EngineOptions(preset=preset, kv_memory="400MiB", **settings)
        )
        executor = CpuExecutor(model, self.config)
        self.seen = Seen()
        self.engine = Engine(
            Scheduler(self.config),
            executor,
            async_scheduling=async_scheduling,
            observers=[self.seen],
        )

    def ask(
        self, prompts: dict[str, list[int]], num_tokens: int = NUM_TOKENS, **params: Any
    ) -> dict[str, list[list[int]]]:
        """The tokens after each prompt: one list per sample."""
        asked = {
            name: self.engine.add(name, tokens, RequestParams(max_tokens=num_tokens, **params))
            for name, tokens in prompts.items()
        }
        self.engine.run()
        assert self.engine.is_healthy, self.engine.fault
        self.check_empty()
        return {name: [list(r.output) for r in samples] for name, samples in asked.items()}

    def ask_one(
        self, prompts: dict[str, list[int]], num_tokens: int = NUM_TOKENS
    ) -> dict[str, Any]:
        """Like `ask`, with one sample each."""
        return {name: outputs[0] for name, outputs in self.ask(prompts, num_tokens).items()}

    def check_empty(self) -> None:
        """All blocks and requests have been released."""
        scheduler = self.engine.scheduler
        assert not scheduler.requests and not self.engine.has_work
        assert scheduler.kv.is_unused


def blocks_for(
    model: Decoder, num_tokens: int, block_size: int = 16, *, windowed: bool = False
) -> Tensor:
    """Blocks for `num_tokens`, of windows or not; NaN shows that one is read by mistake."""
    num_blocks, config = (
        -(-num_tokens // block_size),
        model.config.layers_of_kind(windowed=windowed),
    )
    blocks = model.backend.kv_blocks(config, num_blocks, block_size)
    return blocks.fill_(math.nan if blocks.is_floating_point() else -1)  # -1: scales are NaN


def batch_of(
    parts: Iterable[tuple[Sequence[int], int, Sequence[int]]], block_size: int
) -> ForwardBatch:
    """A pass over parts of sequences: (tokens to compute, their first position, blocks)."""
    parts = list(parts)
    places = [range(first, first + len(tokens)) for tokens, first, _ in parts]
    slots = [
        blocks[place // block_size] * block_size + place % block_size
        for (_, _, blocks), where in zip(parts, places, strict=True)
        for place in where
    ]
    starts = torch.tensor([0, *(len(tokens) for tokens, _, _ in parts)]).cumsum(0)
    width = max(len(blocks) for _, _, blocks in parts)
    tables = [[*blocks, *[0] * (width - len(blocks))] for _, _, blocks in parts]
    return ForwardBatch(
        tokens_t=torch.tensor([t for tokens, _, _ in parts for t in tokens]),
        positions_t=torch.tensor([place for where in places for place in where]),
        slots_t=torch.tensor(slots),
        tables_sw=torch.tensor(tables, dtype=torch.int32),
        starts_s=starts.to(torch.int32),
        ends_s=torch.tensor([where.stop for where in places], dtype=torch.int32),
        sampled_n=starts[1:] - 1,
    )


def whole(tokens: Sequence[int], block_size: int = 16) -> ForwardBatch:
    """A pass over one whole sequence, which has the first blocks."""
    return batch_of([(tokens, 0, range(-(-len(tokens) // block_size)))], block_size)


@torch.inference_mode()
def logits_of(model: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits at every position of one sequence, computed in one pass."""
    batch, window_blocks = whole(tokens), None
    if model.config.windowed_layers:
        batch.windowed = replace(batch, window=model.config.sliding_window)
        window_blocks = blocks_for(model, len(tokens), windowed=True)
    blocks = blocks_for(model, len(tokens))
    return model.logits(model.forward(batch, blocks, window_blocks=window_blocks))


# A tiny model with a tokenizer, for tests in which the model's size does not matter.


def write_tiny(folder: Path, **numbers: Any) -> Path:
    """Write a random model to a folder, as transformers saves one."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256, special_tokens=["<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator([STORY, LIST, CODE, "crème brûlée 北京 🎉 "] * 3, trainer)
    backend.save(str(folder / "tokenizer.json"))
    values = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "vocab_size": backend.get_vocab_size(), "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
        "tie_word_embeddings": False, **numbers,
    }  # fmt: skip
    for name, written in (("config", values), ("tokenizer_config", {"eos_token": "</s>"})):
        (folder / f"{name}.json").write_text(json.dumps(written), encoding="utf-8")
    generator, shapes = torch.Generator().manual_seed(11), load_hf(folder).shapes()
    weights = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) / 5
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@cache
def transformers_model() -> Any:
    """The bundled model as transformers reads the same file, in float32."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model, read = transformers_from_gguf("smollm2-135m", transformers.LlamaForCausalLM, config)
    own = config.to_dict() | {"rope_theta": 100000.0, "_model_name_or_path": ...}
    unlike = {k: v for k, v in read.items() if own.get(k, v) not in (v, ...)}
    assert unlike.keys() <= {"rms_norm_eps", "pad_token_id"}, f"the file has {unlike}"
    return model


def transformers_from_gguf(name: str, kind: Any, config: Any) -> tuple[Any, dict[str, Any]]:
    """A model of transformers with the weights of a file, in float32; and the file's config.

    Like `AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)`, which would read the whole
    file a second time for its config and needs another package.
    """
    loading = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    gguf = pytest.importorskip("gguf")
    with torch.device("meta"):  # the weights are loaded from the file below
        model = kind(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    with pytest.MonkeyPatch.context() as patch:
        # A table of names for every module, a mapping of the file for every tokenizer field, every
        # token of the vocabulary, and 16 rows at a time would take longer than all the rest.
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        patch.setattr(gguf.GGUFReader, "_get_field_parts", without_vocabulary(gguf))
        patch.setattr(gguf.quants, "_apply_over_grouped_rows", over_many_rows)
        patch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, dtype=np.uint8))
        read = loading.load_gguf_checkpoint(
            str(resolve(name)), return_tensors=True, model_to_load=model
        )
    missing, unknown = model.load_state_dict(read["tensors"], strict=False, assign=True)
    assert (missing, unknown) == (["lm_head.weight"], []), "the head is tied to the embedding"
    model.tie_weights()
    return model.float().eval(), read["config"]


def without_vocabulary(gguf: Any) -> Any:
    """GGUFReader's function that reads a field, for which arrays of texts and long arrays are empty."""
    read, kinds = gguf.GGUFReader._get_field_parts, gguf.GGUFValueType

    def parts(self: Any, offset: int, kind: int) -> tuple[int, list[Any], list[int], list[Any]]:
        item, count = struct.unpack("<IQ", self.data[offset : offset + 12].tobytes())
        number = self.gguf_scalar_to_np.get(item)
        if kind != kinds.ARRAY or (item != kinds.STRING and (number is None or count < 1000)):
            found: tuple[int, list[Any], list[int], list[Any]] = read(self, offset, kind)
            return found
        data, end = memoryview(self.data), offset + 12
        if number is not None:
            end += count * np.dtype(number).itemsize
        else:
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", data, end)[0]
        return end - offset, [], [], [kinds.ARRAY, kinds(item)]

    return parts


def over_many_rows(convert: Any, arr: Any, otype: Any, oshape: tuple[int, ...]) -> Any:
    """The function of `gguf.quants` that converts rows, with more of them at a time."""
    rows, found = arr.reshape(-1, arr.shape[-1]), np.empty(oshape, otype)
    every = found.reshape(len(rows), -1)
    for first in range(0, len(rows), 64):
        every[first : first + 64] = convert(rows[first : first + 64])
    return found


@torch.inference_mode()
def transformers_logits(model: Any, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Logits at each position of the output, given all tokens before it."""
    (logits,) = batched_logits(model, [(prompt, output)])
    return logits


@torch.inference_mode()
def batched_logits(
    model: Any, parts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[Tensor]:
    """`transformers_logits` of several prompts and outputs in one pass."""
    return [
        model.lm_head(states[len(prompt) - 1 :])
        for states, (prompt, _) in zip(batched_states(model, parts), parts, strict=True)
    ]


@torch.inference_mode()
def batched_states(
    model: Any, parts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[Tensor]:
    """States at each position of prompts and outputs but the last; padding is at the ends."""
    sequences = [[*prompt, *output][:-1] for prompt, output in parts]
    width = max(map(len, sequences))
    padded = [tokens + [0] * (width - len(tokens)) for tokens in sequences]
    states = model.model(torch.tensor(padded)).last_hidden_state
    return [row[: len(tokens)] for row, tokens in zip(states, sequences, strict=True)]


def write_reference() -> None:
    """Write transformers' greedy tokens: our engine proposes them; differences are corrected."""
    model, trial, found = transformers_model(), Trial(decoder()), dict[str, list[int]]()
    for name, prompt in prompts().items():
        output: list[int] = []
        while len(output) < NUM_TOKENS:
            asked = {name: [*prompt, *output]}
            output = [*output, *trial.ask_one(asked, NUM_TOKENS - len(output))[name]]
            best = transformers_logits(model, prompt, output).argmax(-1).tolist()
            wrong = (place for place in range(len(output)) if output[place] != best[place])
            if (place := next(wrong, None)) is not None:
                output[place:] = [best[place]]
        found[name] = output
    lines = [f"{json.dumps(name)}: {json.dumps(tokens)}" for name, tokens in found.items()]
    REFERENCE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write_reference()
