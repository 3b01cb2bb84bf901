"""`headway models`, `headway presets` and `headway profiles`: lists of names to choose from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from headway.cli.options.common import Json, progress_bar
from headway.cli.options.packages import install
from headway.errors import ModelError
from headway.fleet.routing import ROUTES
from headway.lab.cost import known_profiles, load_profile
from headway.model.registry import ModelEntry, list_models, resolve
from headway.scheduler.policies.presets import NUMBERS, PRESETS, SLOTS, describe, preset

Fetch = Annotated[str | None, typer.Option(help="Download this model into the cache first.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        help="Measure the forms of quantized matrices and the types of the KV cache too.",
    ),
]


def models_command(fetch: Fetch = None, verbose: Verbose = False, json_: Json = False) -> None:
    """List bundled and cached models, the GPUs, and which --quantization is fastest on this CPU."""
    if fetch is not None:
        with progress_bar(f"fetching {fetch}", 1) as advance:
            resolve(fetch, progress=fractions(advance))
    models, machine = list_models(), _machine()
    if verbose and "layer" in machine and machine["native_kernels"] == "yes":
        machine |= {"products": _products(), "kv_cache": _kv_cache()}
    if json_:
        print(json.dumps({"models": [_row(m) for m in models], "machine": machine}, indent=2))
        return
    console = Console()
    console.print(_table(models))
    console.print(
        "[dim]--model also takes a model folder, a .gguf file or a Hugging Face id (org/name).[/]\n"
    )
    _print_machine(console, machine)


def fractions(advance: Callable[[float], None]) -> Callable[[int, int], None]:
    """A callback for bytes done and in total that advances a progress bar from 0 to 1."""
    shown = 0.0

    def update(done: int, total: int) -> None:
        nonlocal shown
        advance(done / total - shown)
        shown = done / total

    return update


def _machine() -> dict[str, Any]:
    """The GPUs, and how fast the CPU computes one layer of the default model."""
    try:
        from headway.model.devices import gpus, why_no_cuda
        from headway.model.loader import open_checkpoint
        from headway.model.precision import (
            byte_products,
            fastest,
            num_threads,
            probe,
            why_not_native,
        )
    except ModuleNotFoundError as error:
        return {"error": f"{error.name} is not installed: {install('torch')}"}
    default = next((m.path for m in list_models() if m.path is not None), None)
    found: dict[str, Any] = {"threads": num_threads(), "native_kernels": why_not_native() or "yes"}
    if found["native_kernels"] == "yes":
        found["byte_products"] = byte_products()
    found |= {"cuda": why_no_cuda() or "yes", "gpus": [asdict(gpu) for gpu in gpus()]}
    if default is None:
        return found | {"error": "no model is downloaded yet: try --fetch smollm2-135m"}
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


def _products() -> dict[str, Any]:
    """The forms of each quantized matrix of the default model, and why one is chosen."""
    from headway.model.loader import open_checkpoint
    from headway.model.precision import probe_products

    path = next(m.path for m in list_models() if m.path is not None)
    return {each.matrix: each.summary() for each in probe_products(open_checkpoint(path))}


def _kv_cache() -> dict[str, Any]:
    """The KV cache of the default model by type: its size, and the time of a decode's attention."""
    from headway.model.backends.native.kv_probe import probe_kv_cache
    from headway.model.loader import open_checkpoint

    path = next(m.path for m in list_models() if m.path is not None)
    return {
        each.dtype: {"token_bytes": each.token_bytes, "attention_ms": each.seconds * 1e3}
        for each in probe_kv_cache(open_checkpoint(path).config)
    }


def _print_kv_cache(console: Console, types: dict[str, Any]) -> None:
    table = Table(title="KV cache by --kv-cache-dtype (auto is float32)", header_style="bold")
    for column in ("type", "bytes per token", "attention of a layer: 32 decodes of 256 tokens"):
        table.add_column(column, justify="left" if column == "type" else "right")
    for name, each in types.items():
        table.add_row(name, f"{each['token_bytes']:,}", f"{each['attention_ms']:,.3f} ms")
    console.print(table)


def _print_products(console: Console, products: dict[str, Any]) -> None:
    first = next(iter(products.values()))["forms"]
    rows = list(next(iter(first.values()))["us_by_rows"])
    title = "Products by form (bits/inputs that share a scale), µs"
    table = Table(title=title, header_style="bold")
    for column in ("matrix", "form", *(f"{n} rows" if n != "1" else "1 row" for n in rows)):
        table.add_column(column, justify="right" if "row" in column else "left", no_wrap=True)
    for matrix, product in products.items():
        name = f"{matrix} {product['shape'][0]:,} x {product['shape'][1]:,}"
        for form, found in product["forms"].items():
            shown = f"[bold]{form}[/] (chosen)" if form == product["chosen"] else form
            table.add_row(name, shown, *(f"{us:,.0f}" for us in found["us_by_rows"].values()))
            name = ""
    console.print(table)
    console.print("A matrix has one form, so that a row does not depend on the rows beside it.")
    for matrix, product in products.items():
        console.print(f"{matrix}: {product['why']}", highlight=False)


def _print_machine(console: Console, machine: dict[str, Any]) -> None:
    if "layer" in machine:
        title = f"Time of one layer on this CPU, {machine['threads']} threads"
        table = Table(title=title, header_style="bold")
        for column in ("dtype", "1 row", "32 rows"):
            table.add_column(column, justify="left" if column == "dtype" else "right")
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
        console.print(f"No GPU is used: {escape(machine['cuda'])}")
    if machine.get("native_kernels", "yes") != "yes":
        reason = f"Native kernels are not used: {escape(machine['native_kernels'])}"
        console.print(f"{reason}. Plain torch is slower; a C compiler (gcc) enables them.")
    _print_kernels(console, machine)
    if "error" in machine:
        console.print(f"[dim]{escape(machine['error'])}[/]")


def _print_kernels(console: Console, machine: dict[str, Any]) -> None:
    if "byte_products" in machine:
        console.print(f"Products with quantized weights: {machine['byte_products']}")
    for name, show in (("products", _print_products), ("kv_cache", _print_kv_cache)):
        if machine.get(name):
            show(console, machine[name])


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
    for column in ("name", "origin", "size", "licence", "path", "description"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for model in models:
        size = f"{model.num_bytes / 1e6:,.0f} MB"
        path = "[dim]downloaded on first use[/]" if model.path is None else escape(str(model.path))
        licence = escape(model.licence)
        table.add_row(
            escape(model.name), model.origin, size, licence, path, escape(model.description)
        )
    return table


def presets_command(json_: Json = False) -> None:
    """List the scheduler presets with their policies and numbers, and all policies."""
    described = {name: describe(preset(name)) for name in PRESETS}
    if json_:
        print(json.dumps(described, indent=2))
        return
    console = Console()
    for name, config in described.items():
        shown = {**config, **PRESETS[name]}
        slots = ", ".join(f"{slot} [cyan]{shown[slot]}[/]" for slot in SLOTS)
        numbers = ", ".join(f"{number} {shown[number]}" for number in NUMBERS)
        console.print(f"[bold]{name}[/]")
        console.print(Padding(f"{slots}\n[dim]{numbers}[/]", (0, 0, 0, 2)), highlight=False)
    console.print()
    table = Table(title="Policies", header_style="bold", box=None)
    for column in ("slot", "policy", "description"):
        table.add_column(column)
    for slot, policies in {**SLOTS, "route": ROUTES}.items():
        for policy in policies:
            table.add_row(slot, policy.__name__, (policy.__doc__ or "").strip().split("\n")[0])
    console.print(table)


def profiles_command(json_: Json = False) -> None:
    """List the bundled profiles: a model on a machine, for the simulator."""
    profiles = [load_profile(name) for name in known_profiles()]
    if json_:
        print(json.dumps({p.name: {"kv_tokens": p.kv_tokens} for p in profiles}, indent=2))
        return
    table = Table(title="Profiles", header_style="bold", show_lines=True)
    for column in ("name", "KV tokens", "description"):
        table.add_column(column)
    for profile in profiles:
        table.add_row(profile.name, f"{profile.kv_tokens:,}", profile.description)
    Console().print(table)
