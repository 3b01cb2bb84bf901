"""Measures a loaded model in real time and fits a profile, which the simulator uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from headway.engine.gc_freeze import gc_freeze
from headway.events import Completed, Planned
from headway.lab.cost import Model, Profile
from headway.lab.profiling.calibration import (
    CPU_CALIBRATION,
    GPU_CALIBRATION,
    QUICK_CPU_CALIBRATION,
    QUICK_GPU_CALIBRATION,
    Calibration,
    HeldOutError,
    Wave,
    held_out_error,
    make_calibration,
)
from headway.lab.profiling.fit import fit, observations
from headway.lab.real.run import run_workload
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.plan import Copy, Plan
from headway.record.lines import Line
from headway.record.writer import LineMaker

if TYPE_CHECKING:
    from headway.llm import LLM
    from headway.model.config import ModelConfig

Advance = Callable[[int], None]  # counts finished requests
ProgressBar = Callable[[str, int], AbstractContextManager[Advance]]  # from a title and a total
WARM_UP = Wave([(16, 4)], 1)
CALIBRATIONS = {  # by is_on_gpu and is_quick
    (False, False): CPU_CALIBRATION, (False, True): QUICK_CPU_CALIBRATION,
    (True, False): GPU_CALIBRATION, (True, True): QUICK_GPU_CALIBRATION,
}  # fmt: skip
COPIED = (1, 4, 16, 64)  # blocks
TIMES_COPIED = 5


class Logs(NamedTuple):
    """The measured steps: those to fit, the held-out ones, and those without async scheduling."""

    fitted: list[Line]
    held_out: list[Line]
    synchronous: list[Line]


class Measurement(NamedTuple):
    """A fitted profile, its error, and a warning for every rate that is not determined."""

    profile: Profile
    error: HeldOutError
    warnings: list[str]


def no_bar(title: str, total: int) -> AbstractContextManager[Advance]:
    """A progress bar that shows nothing."""
    return nullcontext(lambda count: None)


def measure(llm: LLM, name: str, *, is_quick: bool, bar: ProgressBar = no_bar) -> Measurement:
    """Measure a loaded model."""
    kv_tokens = llm.config.num_blocks * llm.config.block_size
    spec = CALIBRATIONS[llm.loaded.is_on_gpu, is_quick]
    logs = run(llm, make_calibration(min(llm.config.max_model_len, kv_tokens), spec), bar)
    return fit_profile(llm, name, logs, copy_blocks(llm))


def fit_profile(llm: LLM, name: str, logs: Logs, copies: list[Line]) -> Measurement:
    """Fit a profile to the measured steps."""
    config, work = llm.config, model_work(llm)
    kv_tokens = config.num_blocks * config.block_size
    seen = observations([*logs.fitted, *copies])
    if logs.synchronous:
        seen = replace(seen, gaps=observations(logs.synchronous).gaps)
    machine, warnings = fit(seen, work, config.block_size)
    profile = Profile(
        name=name, description="", kv_tokens=kv_tokens, model=work, machine=machine,
        source="measured",
    )  # fmt: skip
    error = held_out_error(logs.held_out, config, profile, llm.engine.async_scheduling)
    sentences = [
        f"{llm.model_name}, {llm.loaded.decoder.backend.name}, measured by `headway bench profile`.",
        f"Error on a held-out run: steps {error.median:.1%} (median) and {error.p90:.1%} (p90), "
        f"simulated duration {error.simulated:+.1%}.",
        *(f"Warning: {warning}." for warning in warnings),
    ]
    profile = replace(profile, description=" ".join(sentences), held_out=error._asdict())
    return Measurement(profile, error, warnings)


def model_work(llm: LLM) -> Model:
    """The work of a loaded model."""
    decoder, loaded = llm.loaded.decoder, llm.loaded
    num_slots = loaded.config.num_blocks * loaded.config.block_size
    experts = sum(layer.experts.expert_bytes for layer in decoder.layers if layer.experts)
    # An embedding table that is not the LM head as well is looked up, not read completely.
    looked_up = 0 if decoder.config.tie_embeddings else decoder.embedding.num_bytes
    read = decoder.num_bytes - looked_up - experts
    return work_of(decoder.config, read=read, experts=experts, kv=loaded.kv_bytes / num_slots)


def work_of(config: ModelConfig, *, read: float, experts: float, kv: float) -> Model:
    """The work of a model, computed from its shapes.

    Bytes of the weights that every pass reads, of all experts, and of the KV cache of a token.
    """
    return Model(
        weight_bytes=read,
        kv_bytes=kv,
        dense_flops=2 * config.num_used(in_layers=True),
        attention_flops=4 * config.num_layers * config.num_heads * config.head_dim,
        head_flops=2 * config.hidden_size * config.vocab_size,
        max_model_len=config.max_model_len,
        expert_bytes=experts,
        chosen_share=config.expert_share,
    )


def run(llm: LLM, calibration: Calibration, bar: ProgressBar = no_bar) -> Logs:
    """Run all waves; with async scheduling, short ones without it, too: they show what it hides."""
    logs, is_async, before = Logs([], [], []), llm.engine.async_scheduling, calibration.before
    stages: list[tuple[list[Wave], list[Line], bool]] = [
        ([WARM_UP], [], is_async), (before, logs.fitted, is_async),
        ([calibration.held_out], logs.held_out, is_async),
        (calibration.after, logs.fitted, is_async),
        ([wave.shortened() for wave in before if is_async], logs.synchronous, False),
    ]  # fmt: skip
    total = sum(len(wave.lengths) for waves, *_ in stages for wave in waves)
    with gc_freeze(), bar("profiling", total) as advance:
        for waves, log, hides_host in stages:
            for wave in waves:
                run_wave(llm, wave, log, hides_host, advance)
    return logs


def run_wave(llm: LLM, wave: Wave, log: list[Line], is_async: bool, advance: Advance) -> None:
    """Run prompts of these lengths, which share no prefix, with outputs of full length."""
    space, maker = TokenSpace(), LineMaker()
    requests = [
        WorkloadRequest(id=str(i), pieces=(space.take(a),), num_output=b, max_tokens=b)
        for i, (a, b) in enumerate(wave.lengths)
    ]
    config = replace(llm.config, max_num_seqs=min(wave.max_num_seqs, llm.config.max_num_seqs))
    run_workload(
        llm, requests, config, async_scheduling=is_async, progress=advance,
        observers=[lambda event: log.append(maker.line(event))],
    )  # fmt: skip


def copy_blocks(llm: LLM) -> list[Line]:
    """Steps that copy some blocks to the host and back, which leaves their content unchanged."""
    from headway.executor.gpu.costs import finish

    lines, maker = list[Line](), LineMaker()
    limit = min(llm.config.num_blocks, llm.config.num_host_blocks)
    for num_blocks in (size for size in COPIED if size <= limit):
        copies = [Copy(block, block) for block in range(num_blocks)]
        for time in range(TIMES_COPIED + 1):
            for plan in (Plan(0, copies_out=copies), Plan(0, copies_in=copies)):
                result = llm.executor.launch(plan).wait()
                finish(llm.executor)
                result.ended = llm.executor.now()
                planned = Planned(plan)
                if time:  # the first copy includes page faults of new memory
                    events = planned, Completed(planned, result, [])
                    lines += [maker.line(event) for event in events]
    return lines
