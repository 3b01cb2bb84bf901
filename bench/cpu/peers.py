"""Runs another engine on one task, in its own process and in the peers' virtual environment.

    python bench/cpu/peers.py transformers TASK.json
    python bench/cpu/peers.py llama_cpp TASK.json MODEL.gguf
    python bench/cpu/peers.py quantize SOURCE.gguf TARGET.gguf f32|q4_0

Prints one JSON object as its last line. bench/cpu/compare.py starts it, writes the task (token ids,
so that every engine gets the same prompts) and creates the environment.
decode   output tok/s after the first token: batch * (num_output - 1) / time
prefill  prompt tok/s up to the first token
total    output tok/s of both together
mixed    output tok/s of requests of many lengths; padding and surplus tokens cost time only
tokens   the first prompt's greedy output, to check that the engines agree
"""

from __future__ import annotations

import ctypes
import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

Rates = dict[str, Any]
SETTINGS = [  # llama.cpp has no best default; which is faster depends on machine and batch
    {"flash_attention": flash, "unified_cache": unified}
    for flash in (False, True)
    for unified in (False, True)
]
MIXED_BATCH = 32
CELLS = 256  # llama.cpp rounds a sequence's cache up to a multiple of this
UBATCH = 512


def rates(batch: int, num_prompt: int, num_output: int, first: float, whole: float) -> Rates:
    """Tok/s from the seconds to the first and to the last token."""
    return {
        "decode": batch * (num_output - 1) / (whole - first),
        "prefill": batch * num_prompt / first,
        "total": batch * num_output / whole,
    }


def gather(by_batch: dict[str, Rates]) -> Rates:
    """Turn {"8": {"decode": x}} into {"decode": {"8": x}}."""
    names = next(iter(by_batch.values()))
    return {name: {batch: each[name] for batch, each in by_batch.items()} for name in names}


def transformers_rates(task: Rates) -> Rates:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(task["threads"])
    path = Path(task["model"])
    load = AutoModelForCausalLM.from_pretrained
    model: Any = load(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval()
    model.generation_config.eos_token_id = None  # every request generates all its tokens
    by_batch: dict[str, Rates] = {}
    tokens: list[int] = []
    for batch in task["batches"]:
        prompts = task["prompts"][:batch]
        timed_generate(model, prompts, 2)  # not timed: the first call of a shape is slower
        first, _ = timed_generate(model, prompts, 1)
        whole, output = timed_generate(model, prompts, task["num_output"])
        tokens = tokens or output
        by_batch[str(batch)] = rates(batch, len(prompts[0]), task["num_output"], first, whole)
    mixed = mixed_rate(model, task["mixed"])
    return gather(by_batch) | {"mixed": mixed, "tokens": tokens, "version": version("transformers")}


def timed_generate(
    model: Any, prompts: list[list[int]], num_output: int
) -> tuple[float, list[int]]:
    """Seconds for the whole batch, padded on the left, and the first prompt's output."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
    start = perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=num_output,
            pad_token_id=0,
        )  # fmt: skip
    took = perf_counter() - start
    assert output.shape[1] == width + num_output, "an output ended early"
    return took, output[0, width:].tolist()


def mixed_rate(model: Any, requests: list[Any]) -> float | None:
    """Output tok/s in padded batches, each as long as its longest request."""
    seconds = 0.0
    for start in range(0, len(requests), MIXED_BATCH):
        prompts, nums_output = zip(*requests[start : start + MIXED_BATCH], strict=True)
        seconds += timed_generate(model, list(prompts), max(nums_output))[0]
    return sum(num_output for _, num_output in requests) / seconds if requests else None


class Llama:
    """A model and a context of llama.cpp for `batch` sequences."""

    def __init__(self, model: Any, task: Rates, batch: int, settings: Rates) -> None:
        import llama_cpp

        self.api, self.prompts = llama_cpp, task["prompts"][:batch]
        num_cells = -(-(len(self.prompts[0]) + task["num_output"]) // CELLS) * CELLS * batch
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_cells, batch
        params.n_batch = params.n_ubatch = max(UBATCH, len(self.prompts[0]))
        params.n_threads = params.n_threads_batch = task["threads"]
        params.flash_attn_type = int(settings["flash_attention"])
        params.kv_unified = settings["unified_cache"]
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(
                f"llama.cpp cannot create a context for {batch} sequences: {settings}"
            )
        self.num_vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        per_step = params.n_batch // len(self.prompts[0])
        self.prefills = [
            self.feed(range(start, min(start + per_step, batch)), len(self.prompts[0]))
            for start in range(0, batch, per_step)
        ]
        self.decode = self.feed(range(batch), 1)

    def feed(self, sequences: range, num_tokens: int) -> Any:
        """A batch of `num_tokens` tokens per sequence that computes the last token's logits."""
        batch = self.api.llama_batch_init(len(sequences) * num_tokens, 0, 1)
        batch.n_tokens = len(sequences) * num_tokens
        for i in range(batch.n_tokens):
            sequence, position = sequences[i // num_tokens], i % num_tokens
            batch.token[i], batch.pos[i] = self.prompts[sequence][position], position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = position == num_tokens - 1
        return batch

    def run(self, batch: Any, num_sequences: int) -> np.ndarray:
        """The greedy next token of each sequence."""
        status = self.api.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = self.api.llama_get_logits(self.context)
        shape = (num_sequences, self.num_vocabulary)
        return np.asarray(np.ctypeslib.as_array(logits, shape).argmax(axis=1))

    def rates(self, num_output: int) -> tuple[Rates, list[int]]:
        """Prefill and decode greedily from an empty cache."""
        batch, num_prompt, decode = len(self.prompts), len(self.prompts[0]), self.decode
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        tokens = np.ctypeslib.as_array(decode.token, (batch,))
        positions = np.ctypeslib.as_array(decode.pos, (batch,))
        start = perf_counter()
        first_tokens = [self.run(each, each.n_tokens // num_prompt) for each in self.prefills]
        tokens[:] = np.concatenate(first_tokens)
        first, output = perf_counter() - start, [int(tokens[0])]
        for i in range(num_output - 1):
            positions[:] = num_prompt + i
            tokens[:] = self.run(decode, batch)
            output.append(int(tokens[0]))
        whole = perf_counter() - start
        return rates(batch, num_prompt, num_output, first, whole), output

    def close(self) -> None:
        for batch in (*self.prefills, self.decode):
            self.api.llama_batch_free(batch)
        self.api.llama_free(self.context)


def llama_rates(task: Rates, path: str) -> Rates:
    """Decode at every batch size; the task may have the fastest settings of an earlier run."""
    import llama_cpp

    lines, _callback = capture_log(llama_cpp)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        path.encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}: {''.join(lines[-3:])}")
    by_batch: dict[str, Rates] = {}
    tokens: list[int] = []
    settings = dict(task.get("settings") or {})
    for batch in task["batches"]:
        if str(batch) not in settings:
            settings[str(batch)] = fastest_settings(model, task, batch)
        best = settings[str(batch)]
        figures, output = measure(model, task, batch, best["decode"], task["num_output"])
        if best["prefill"] != best["decode"]:
            figures["prefill"] = measure(model, task, batch, best["prefill"], 2)[0]["prefill"]
        by_batch[str(batch)], tokens = figures, tokens or output
    return gather(by_batch) | {
        "tokens": tokens, "settings": settings,
        "weights": sorted({line.strip() for line in lines if "model buffer size" in line}),
        "cpu": llama_cpp.llama_print_system_info().decode().strip(),
        "version": version("llama-cpp-python"),
    }  # fmt: skip


def measure(
    model: Any, task: Rates, batch: int, settings: Rates, num_output: int
) -> tuple[Rates, list[int]]:
    llama = Llama(model, task, batch, settings)
    llama.run(llama.prefills[0], 1)  # not timed
    found = llama.rates(num_output)
    llama.close()
    return found


def fastest_settings(model: Any, task: Rates, batch: int) -> Rates:
    """The settings that decode a few tokens fastest, and those that prefill fastest."""
    tried = [each for each in SETTINGS if batch > 1 or each["unified_cache"]]
    found = [measure(model, task, batch, each, min(24, task["num_output"]))[0] for each in tried]
    return {
        figure: tried[max(range(len(tried)), key=lambda i: found[i][figure])]
        for figure in ("decode", "prefill")
    }


def capture_log(api: Any) -> tuple[list[str], Callable[..., None]]:
    """The library's log as lines, and its callback, which must stay alive."""
    lines: list[str] = []

    @api.llama_log_callback
    def keep(_level: int, text: bytes, _user_data: Any) -> None:
        lines.append(text.decode(errors="replace"))

    api.llama_log_set(keep, ctypes.c_void_p(0))
    return lines, keep


def quantize(source: str, target: str, kind: str) -> Rates:
    """Write the model with other weights, as llama.cpp's quantize tool does."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"f32": 0, "q4_0": 2}[kind]
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    if status:
        raise RuntimeError(f"llama.cpp cannot write {source} as {kind}: status {status}")
    return {"path": target, "bytes": Path(target).stat().st_size}


COMMANDS: dict[str, tuple[Callable[..., Rates], tuple[str, ...]]] = {  # with their arguments
    "transformers": (transformers_rates, ("task",)),
    "llama_cpp": (llama_rates, ("task", "model")),
    "quantize": (quantize, ("source", "target", "kind")),
}


def main(given: list[str] | None = None) -> None:
    """Run one command; exit with the usage if the arguments are wrong."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, arguments) in COMMANDS.items():
        command = commands.add_parser(name)
        for argument in arguments:
            command.add_argument(argument)
    options = vars(parser.parse_args(given))
    run, arguments = COMMANDS[options.pop("command")]
    if "task" in options:
        options["task"] = json.loads(Path(options["task"]).read_text())
    print(json.dumps(run(*(options[argument] for argument in arguments))))


if __name__ == "__main__":
    main()
