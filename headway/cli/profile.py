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
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.cli.model_options import ModelOptions, resolved
from headway.cli.options import Json, progress_bar
from headway.engine.trace import Line, describe_step
from headway.errors import ExecutorError, FormatError
from headway.lab.bench import random_prompt
from headway.lab.calibration import Calibration, Errors, Wave, calibration, errors
from headway.lab.cost import Machine, Model, Profile, save_profile
from headway.lab.fit import fit, observations
from headway.plan import Copy, Plan, StepReport
from headway.sampling import SamplingParams

if TYPE_CHECKING:
    from headway.llm import LLM

ModelName = Annotated[
    str, typer.Argument(help="A bundled name, a model's folder, a .gguf file or a hub id.")
]
Out = Annotated[
    Path | None, typer.Option(help="The file to write.", show_default="the profile's name, .json")
]
Name = Annotated[
    str | None, typer.Option(help="The profile's name.", show_default="model and precision")
]
Device = Annotated[str, typer.Option(help="As for `headway run`.")]
Precision = Annotated[str, typer.Option(help="As for `headway run`.")]
LoadFormat = Annotated[str, typer.Option(help="As for `headway run`.")]
KvMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory for keys and values, e.g. 2GiB.", show_default="a share of what is free"
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="torch's choice")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter requests; less exact.")]
SEATS = 32
WARM_UP: Wave = [(16, 4)]
COPIED = (1, 4, 16, 64)  # blocks
TIMES_COPIED = 5
MOST_SURE = 0.2  # an error above this is warned of


class Logs(NamedTuple):
    """What was measured: the steps to fit, and those to be foretold."""

    fitted: list[Line]
    held_out: list[Line]


def profile_command(
    model: ModelName = "smollm2-135m",
    out: Out = None,
    name: Name = None,
    device: Device = "auto",
    precision: Precision = "auto",
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
    precision = resolved(precision, device)
    name = name or f"{Path(model).name.lower().removesuffix('.gguf')}-{precision}"
    out = out or Path(f"{name}.json")
    _check_writable(out)
    chosen = ModelOptions(
        model=model, device=device, precision=precision, threads=threads, load_format=load_format,
        kv_memory=kv_memory, depth=0,  # so that what lies between steps can be seen
    )  # fmt: skip
    with chosen.load(max_requests=SEATS) as llm:
        profile, found = measure(llm, name, is_quick=quick)
    save_profile(profile, out)
    if json_:
        print(json.dumps(
            {"out": str(out), "held_out": found._asdict(), "profile": asdict(profile)}, indent=2
        ))  # fmt: skip
    else:
        _show(profile, found, out)
    warn(found)


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
    config, facts = llm.config, model_facts(llm)
    kv_tokens = config.num_blocks * config.block_size
    work = calibration(min(config.max_length, kv_tokens), is_quick=is_quick)
    logs = run(llm, work)
    machine = fit(observations([*logs.fitted, *copy(llm)]), facts, config.block_size)
    profile = Profile(name=name, description="", kv_tokens=kv_tokens, model=facts, machine=machine)
    found = errors(logs.held_out, config, profile)
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
        max_length=config.max_length,
    )


def run(llm: LLM, work: Calibration) -> Logs:
    """All waves, one after the other."""
    lines: list[Line] = []
    llm.engine.observers.append(lambda report: lines.append(describe_step(report)))
    source, logs = random.Random(0), Logs([], [])
    with progress_bar("profiling", work.num_requests) as advance:
        answer(llm, WARM_UP, source, lambda count: None)
        lines.clear()
        for waves, log in (
            (work.before, logs.fitted), ([work.held_out], logs.held_out), (work.after, logs.fitted),
        ):  # fmt: skip
            for wave in waves:
                answer(llm, wave, source, advance)
            log += lines
            lines.clear()
    return logs


def answer(llm: LLM, wave: Wave, source: random.Random, advance: Callable[[int], None]) -> None:
    """Random prompts of these lengths, so that no prefix is cached; outputs of full length."""
    vocab_size = llm.loaded.decoder.config.vocab_size
    prompts = [random_prompt(source, num_prompt, vocab_size) for num_prompt, _ in wave]
    params = [
        SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        for _, num_output in wave
    ]
    for result in llm.generate(prompts, params, on_finish=lambda _: advance(1)):
        if result.error is not None:
            raise result.error
        for sample in result.samples:
            if sample.error is not None:
                raise ExecutorError(sample.error)


def copy(llm: LLM) -> list[Line]:
    """Steps that copy a few blocks to the host and back, which leaves them as they are."""
    lines = []
    most = min(llm.config.num_blocks, llm.config.num_host_blocks)
    for num_blocks in (size for size in COPIED if size <= most):
        copies = [Copy(block, block) for block in range(num_blocks)]
        for time in range(TIMES_COPIED + 1):
            for plan in (Plan(0, copies_out=copies), Plan(0, copies_in=copies)):
                result = llm.executor.launch(plan).wait()
                if time:  # the first touches memory that is not there yet
                    lines.append(describe_step(StepReport(plan, result, [])))
    return lines


def _show(profile: Profile, found: Errors, out: Path) -> None:
    console, machine = Console(), profile.machine
    console.print(f"\n[bold]{escape(profile.name)}[/]", highlight=False)
    console.print(_table(_numbers(machine)))
    console.print("\n[bold]Foretelling a run that was not fitted[/]")
    console.print(_table([
        ("a step", f"off by {found.median:.1%} (median), {found.p90:.1%} (p90)"),
        ("all steps together", f"{found.total:+.1%}"),
        ("the run, simulated", f"{found.simulated:+.1%}"),
        ("its time to first token, p50", f"{found.ttft:+.1%}"),
    ]))  # fmt: skip
    console.print(
        f"\nWritten to {escape(str(out))}. Next: "
        f"[bold]headway simulate --profile {escape(str(out))}[/]",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _numbers(machine: Machine) -> list[tuple[str, str]]:
    copies = f"{machine.copy_bandwidth / 1e9:,.2f} GB/s, and {_short(machine.copy_seconds)} each"
    return [
        ("reads memory", f"{machine.bandwidth / 1e9:,.2f} GB/s"),
        ("computes", f"{machine.flops / 1e9:,.1f} GFLOP/s"),
        ("both at once", f"{machine.overlap:.0%} of the shorter"),
        ("a pass, whatever is in it", _short(machine.fixed_seconds)),
        ("its attention, at least", _short(machine.attention_seconds)),
        ("between steps", _short(machine.host_seconds)),
        ("copies to the host and back", copies),
    ]


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} µs"


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(name, value)
    return table


def warn(found: Errors) -> None:
    """On stderr, if the profile foretells badly."""
    worst = max(found.median, abs(found.total), abs(found.simulated))
    if worst > MOST_SURE:
        Console(stderr=True).print(
            f"[yellow]warning:[/] the profile is off by {worst:.0%} on a run that was not fitted; "
            "profile again while nothing else runs on this machine",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
