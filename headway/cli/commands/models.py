"""`headway models`: the models that can be named, where they lie, and how this machine runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.cli.options.common import Json, progress_bar
from headway.errors import ModelError
from headway.model.registry import ModelEntry, list_models, resolve

Fetch = Annotated[str | None, typer.Option(help="Fetch this model into the cache first.")]


def models_command(fetch: Fetch = None, json_: Json = False) -> None:
    """Bundled and cached models, the GPUs here, and what --quantization auto means on this CPU."""
    if fetch is not None:
        with progress_bar(f"fetching {fetch}", 1) as advance:
            resolve(fetch, progress=fractions(advance))
    models, machine = list_models(), _machine()
    if json_:
        print(json.dumps({"models": [_row(m) for m in models], "machine": machine}, indent=2))
        return
    console = Console()
    console.print(_table(models))
    console.print("[dim]Also by name: a model's folder, a .gguf file, or a hub id (org/name).[/]\n")
    _print_machine(console, machine)


def fractions(advance: Callable[[float], None]) -> Callable[[int, int], None]:
    """Bytes done of a total, told to a bar that goes from 0 to 1."""
    told = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal told
        advance(done / total - told)
        told = done / total

    return tell


def _machine() -> dict[str, Any]:
    """The GPUs, and how fast the CPU multiplies by one layer of the default model."""
    try:
        from headway.model.devices import gpus, why_no_cuda
        from headway.model.precision import fastest, num_threads, probe, why_not_native
        from headway.model.weights.checkpoint import open_checkpoint
    except ModuleNotFoundError as error:
        return {"error": f"{error.name} is not installed: pip install 'headway[torch]'"}
    default = next((m.path for m in list_models() if m.path is not None), None)
    found: dict[str, Any] = {"threads": num_threads(), "native_kernels": why_not_native() or "yes"}
    found |= {"cuda": why_no_cuda() or "yes", "gpus": [asdict(gpu) for gpu in gpus()]}
    if default is None:
        return found | {"error": "no model has been fetched yet: try --fetch smollm2-135m"}
    try:
        speeds = probe(open_checkpoint(default).config)
    except ModelError as error:
        return found | {"error": str(error)}
    layers = {
        speed.precision: {
            "one_row_ms": speed.one * 1e3,
            "many_rows_ms": None if speed.many is None else speed.many * 1e3,
        }
        for speed in speeds
    }
    return found | {"fastest": fastest(speeds), "layer": layers}


def _print_machine(console: Console, machine: dict[str, Any]) -> None:
    if "layer" in machine:
        title = f"One layer's products on this machine, {machine['threads']} threads"
        table = Table(title=title, header_style="bold")
        for column in ("precision", "1 row", "32 rows"):
            table.add_column(column, justify="left" if column == "precision" else "right")
        for name, times in machine["layer"].items():
            shown = [times["one_row_ms"], times["many_rows_ms"]]
            cells = ["[dim]too slow[/]" if t is None else f"{t:,.3f} ms" for t in shown]
            table.add_row(
                f"[bold]{name}[/] (fastest)" if name == machine["fastest"] else name, *cells
            )
        console.print(table)
    for gpu in machine.get("gpus", ()):
        memory = f"{gpu['num_bytes'] / 2**30:.1f} GiB"
        console.print(f"GPU {gpu['device']}: {escape(gpu['name'])}, {memory}", highlight=False)
    if machine.get("cuda", "yes") != "yes":
        console.print(f"no GPU is used: {escape(machine['cuda'])}")
    if machine.get("native_kernels", "yes") != "yes":
        console.print(f"native kernels are not used: {escape(machine['native_kernels'])}")
    if "error" in machine:
        console.print(f"[dim]{escape(machine['error'])}[/]")


def _row(model: ModelEntry) -> dict[str, Any]:
    return {
        "name": model.name,
        "origin": model.origin,
        "is_fetched": model.path is not None,
        "num_bytes": model.num_bytes,
        "licence": model.licence,
        "path": None if model.path is None else str(model.path),
        "description": model.description,
    }


def _table(models: list[ModelEntry]) -> Table:
    table = Table(title="Models", header_style="bold", show_lines=True)
    for column in ("name", "origin", "size", "licence", "where", "description"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for model in models:
        size = f"{model.num_bytes / 1e6:,.0f} MB"
        where = "[dim]fetched on first use[/]" if model.path is None else escape(str(model.path))
        licence = escape(model.licence)
        table.add_row(
            escape(model.name), model.origin, size, licence, where, escape(model.description)
        )
    return table
