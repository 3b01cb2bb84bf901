"""`headway bench profile`: measure a model on this machine for the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options.common import Json, check_writable, progress_bar, spread
from headway.cli.options.model import MODEL_HELP, ProfileFlags, load_model, resolved
from headway.cli.view import render
from headway.lab.cost import as_json, save_profile
from headway.lab.real.profiling import measure

ModelName = Annotated[str, typer.Argument(help=MODEL_HELP)]
Out = Annotated[
    Path | None, typer.Option(help="File to write.", show_default="the profile's name, .json")
]
Name = Annotated[
    str | None, typer.Option(help="Name of the profile.", show_default="model and dtype")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Run fewer and shorter requests; less accurate.")
]
CPU_MAX_NUM_SEQS = 32


@spread
def profile_command(
    model: ModelName = "smollm2-135m",
    out: Out = None,
    name: Name = None,
    quick: Quick = False,
    json_: Json = False,
    *,
    chosen: ProfileFlags,
) -> None:
    """Measure a model on this machine and write a profile for `headway simulate --profile FILE`.

    Runs requests of many lengths in batches of many sizes and fits the cost model to the step
    times. The reported error is that of predicting a held-out run from its requests alone.
    """
    precision, is_gpu = resolved(chosen.dtype, chosen.quantization, chosen.device)
    max_num_seqs = None if is_gpu else CPU_MAX_NUM_SEQS
    name = name or f"{Path(model).name.lower().removesuffix('.gguf')}-{precision}"
    out = out or Path(f"{name}.json")
    check_writable(out)
    with load_model(replace(chosen, model=model), max_num_seqs=max_num_seqs) as llm:
        profile, error, warnings = measure(llm, name, is_quick=quick, bar=progress_bar)
    save_profile(profile, out)
    if json_:
        held_out = error._asdict()
        found = {"held_out": held_out, "warnings": warnings, "profile": as_json(profile)}
        render.print_json({"out": str(out), **found})
    else:
        render.print_profile(profile, error, out)
    render.warn_of_profile(error, warnings)
