"""`headway profile`: measure a model on this machine, so that it can be simulated."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from headway.cli.options.common import Json, progress_bar
from headway.cli.options.model import ModelOptions, resolved
from headway.cli.view.profile import show, warn
from headway.engine.gc_freeze import gc_freeze
from headway.errors import ExecutorError, FormatError
from headway.lab.bench import random_prompt
from headway.lab.calibration import (
    ON_CPU,
    ON_GPU,
    QUICK_ON_CPU,
    QUICK_ON_GPU,
    Calibration,
    Errors,
    Wave,
    calibration,
    errors,
)
from headway.lab.cost import Model, Profile, save_profile
from headway.lab.fit import fit, observations
from headway.observe.trace import Line, describe_step
from headway.plan import Copy, Plan, StepReport
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headway.llm import LLM

ModelName = Annotated[
    str, typer.Argument(help="A bundled name, a model's folder, a .gguf file or a hub id.")
]
Out = Annotated[
    Path | None, typer.Option(help="The file to write.", show_default="the profile's name, .json")
]
Name = Annotated[
    str | None, typer.Option(help="The profile's name.", show_default="model and type")
]
Device = Annotated[str, typer.Option(help="As for `headway run`.")]
Dtype = Annotated[str, typer.Option(help="As for `headway run`.")]
Quantization = Annotated[str, typer.Option(help="As for `headway run`.")]
LoadFormat = Annotated[str, typer.Option(help="As for `headway run`.")]
KvMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory for keys and values, e.g. 2GiB.", show_default="a share of what is free"
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="torch's choice")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter requests; less exact.")]
SEATS = 32  # of a CPU
WARM_UP: Wave = [(16, 4)]  # of a CPU
AMOUNTS = {  # by whether it is a GPU, and whether it is to be quick
    (False, False): ON_CPU, (False, True): QUICK_ON_CPU,
    (True, False): ON_GPU, (True, True): QUICK_ON_GPU,
}  # fmt: skip
COPIED = (1, 4, 16, 64)  # blocks
TIMES_COPIED = 5


class Logs(NamedTuple):
    """What was measured: the steps to fit, those to be foretold, and those that hid no planning."""

    fitted: list[Line]
    held_out: list[Line]
    apart: list[Line]


def profile_command(
    model: ModelName = "smollm2-135m",
    out: Out = None,
    name: Name = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantization: Quantization = "none",
    threads: Threads = None,
    load_format: LoadFormat = "auto",
    kv_memory: KvMemory = None,
    quick: Quick = False,
    json_: Json = False,
) -> None:
    """Time a model here, and write what `headway simulate --profile FILE` needs.

    Requests of many lengths are run in batches of many sizes. Then a run that was not used for the
    fit is foretold from its requests alone: the error of that is the error to expect.
    """
    precision = resolved(dtype, quantization, device)
    seats = None if is_gpu(device) else SEATS
    name = name or f"{Path(model).name.lower().removesuffix('.gguf')}-{precision}"
    out = out or Path(f"{name}.json")
    _check_writable(out)
    chosen = ModelOptions(
        model=model, device=device, dtype=dtype, quantization=quantization, threads=threads, load_format=load_format,
        kv_memory=kv_memory,
    )  # fmt: skip
    with chosen.load(max_num_seqs=seats) as llm:
        profile, found = measure(llm, name, is_quick=quick)
    save_profile(profile, out)
    if json_:
        print(json.dumps(
            {"out": str(out), "held_out": found._asdict(), "profile": asdict(profile)}, indent=2
        ))  # fmt: skip
    else:
        show(profile, found, out)
    warn(found)


def is_gpu(device: str) -> bool:
    """Whether this device, given as its text, is one."""
    from headway.model.devices import use_device

    return use_device(device).type == "cuda"


def _check_writable(path: Path) -> None:
    """FormatError now rather than after the run; what is there, or is not, stays so until then."""
    is_new = not path.exists()
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise FormatError(path, None, f"cannot be written: {error.strerror}") from None
    if is_new:
        path.unlink()


def measure(llm: LLM, name: str, *, is_quick: bool) -> tuple[Profile, Errors]:
    """The profile of a loaded model, and how far it is off."""
    kv_tokens = llm.config.num_blocks * llm.config.block_size
    amount = AMOUNTS[llm.loaded.is_on_gpu, is_quick]
    logs = run(llm, calibration(min(llm.config.max_model_len, kv_tokens), amount))
    return learned(llm, name, logs, copy(llm))


def learned(llm: LLM, name: str, logs: Logs, copies: list[Line]) -> tuple[Profile, Errors]:
    """The profile that these steps tell of, and how far it is off."""
    config, facts = llm.config, model_facts(llm)
    kv_tokens = config.num_blocks * config.block_size
    seen = observations([*logs.fitted, *copies])
    if logs.apart:
        seen = replace(seen, gaps=observations(logs.apart).gaps)
    machine = fit(seen, facts, config.block_size)
    profile = Profile(name=name, description="", kv_tokens=kv_tokens, model=facts, machine=machine)
    found = errors(logs.held_out, config, profile, llm.engine.async_scheduling)
    description = (
        f"{llm.model_name}, {llm.loaded.decoder.backend.name}, measured by `headway profile`. Of "
        f"a run that was not fitted, steps are off by {found.median:.1%} (median) and "
        f"{found.p90:.1%} (p90), and the whole of it, simulated, by {found.simulated:+.1%}."
    )
    return replace(profile, description=description), found


def model_facts(llm: LLM) -> Model:
    """What the model makes any machine do, from its shapes."""
    decoder, loaded = llm.loaded.decoder, llm.loaded
    config, num_slots = decoder.config, loaded.config.num_blocks * loaded.config.block_size
    layers = (shape for name, shape in config.shapes().items() if ".layers." in name)
    # A table that is not the head as well is looked up, not read.
    looked_up = 0 if config.tie_embeddings else decoder.embedding.num_bytes
    return Model(
        weight_bytes=decoder.num_bytes - looked_up,
        kv_bytes=loaded.kv_bytes / num_slots,
        dense_flops=2 * sum(math.prod(shape) for shape in layers if len(shape) == 2),
        attention_flops=4 * config.num_layers * config.num_heads * config.head_dim,
        head_flops=2 * config.hidden_size * config.vocab_size,
        max_model_len=config.max_model_len,
    )


def run(llm: LLM, work: Calibration) -> Logs:
    """All waves, one after the other; with overlap, some once more without: what it hides is seen.

    On a GPU all kinds of waves come twice before: it compiles what it meets for the first time, and
    captures what it meets again.
    """
    lines: list[Line] = []
    llm.engine.observers.append(lambda report: lines.append(describe_step(report)))
    source, logs, async_scheduling = random.Random(0), Logs([], [], []), llm.engine.async_scheduling
    everything = [*work.before, work.held_out, *work.after]
    warm_up = 2 * everything if llm.loaded.is_on_gpu else [WARM_UP]
    stages: list[tuple[list[Wave], list[Line], bool]] = [
        (warm_up, [], async_scheduling), (work.before, logs.fitted, async_scheduling),
        ([work.held_out], logs.held_out, async_scheduling), (work.after, logs.fitted, async_scheduling),
        (work.before if async_scheduling else [], logs.apart, False),
    ]  # fmt: skip
    total = sum(len(wave) for waves, *_ in stages for wave in waves)
    with progress_bar("profiling", total) as advance, gc_freeze():
        for waves, log, is_async in stages:
            llm.engine.async_scheduling = is_async
            for wave in waves:
                answer(llm, wave, source, advance)
            log += lines
            lines.clear()
    llm.engine.async_scheduling = async_scheduling
    return logs


def answer(llm: LLM, wave: Wave, source: random.Random, advance: Callable[[int], None]) -> None:
    """Random prompts of these lengths, so that no prefix is cached; outputs of full length."""
    vocab_size = llm.loaded.decoder.config.vocab_size
    prompts = [random_prompt(source, num_prompt, vocab_size) for num_prompt, _ in wave]
    params = [
        SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        for _, num_output in wave
    ]
    for result in llm.generate(prompts, params, use_tqdm=False, on_finish=lambda *_: advance(1)):
        for sample in result.outputs:
            if sample.error is not None:
                raise ExecutorError(sample.error)


def copy(llm: LLM) -> list[Line]:
    """Steps that copy a few blocks to the host and back, which leaves them as they are."""
    from headway.executor.gpu.swap_cost import finish

    lines = []
    most = min(llm.config.num_blocks, llm.config.num_host_blocks)
    for num_blocks in (size for size in COPIED if size <= most):
        copies = [Copy(block, block) for block in range(num_blocks)]
        for time in range(TIMES_COPIED + 1):
            for plan in (Plan(0, copies_out=copies), Plan(0, copies_in=copies)):
                result = llm.executor.launch(plan).wait()
                finish(llm.executor)
                result.ended = llm.executor.now()
                if time:  # the first touches memory that is not there yet
                    lines.append(describe_step(StepReport(plan, result, [])))
    return lines
