"""`headway models`: the models, presets and profiles to choose from, and what this machine can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from headway.cli.options.common import JSON, argument, option, progress_bar
from headway.cli.options.model import SizeFlags
from headway.cli.options.packages import check_extras, install
from headway.cli.view import render
from headway.cli.view.model import facts_of, print_model
from headway.errors import ConfigError, ModelError
from headway.fleet.routing import ROUTES
from headway.lab.cost import known_profiles, load_profile
from headway.model.registry import HUB_CONFIGS, ModelEntry, list_models, resolve
from headway.scheduler.policies.presets import NUMBERS, PRESETS, SLOTS, describe, preset

if TYPE_CHECKING:
    from headway.model.weights.checkpoint import Checkpoint

framed_table = partial(render.table, box=HEAVY_HEAD, pad_edge=True)


def models_command(
    path: str | None = argument(None, "Say what this model needs instead, before it is loaded."),
    fetch: str | None = option(None, "Download this model into the cache first."),
    verbose: bool = option(
        False,
        "Measure the forms of quantized matrices and the types of the KV cache too.",
        "--verbose",
    ),
    presets: bool = option(
        False, "List the scheduler presets and all policies instead.", "--presets"
    ),
    profiles: bool = option(
        False, "List the bundled profiles for the simulator instead.", "--profiles"
    ),
    memory: str | None = option(
        None, "With a model: memory of the device, e.g. 80GiB.", show_default="what is free here"
    ),
    profile: str | None = option(
        None, "With a model and --device: profile of the machine, by name or a .json file."
    ),
    json_: bool = JSON,
    *,
    chosen: SizeFlags,
) -> None:
    """List bundled and cached models, the GPUs, and which --quantization is fastest on this CPU."""
    if presets and profiles:
        raise ConfigError("--presets and --profiles cannot be combined; give one of them")
    if path is not None:
        facts = facts_of(_open(path), chosen, memory, profile)
        render.print_json(facts) if json_ else print_model(facts)
        return
    if presets or profiles:
        _list_presets(json_) if presets else _list_profiles(json_)
        return
    if fetch is not None:
        with progress_bar(f"fetching {fetch}", 1) as advance:
            resolve(fetch, progress=fractions(advance))
    models, machine = list_models(), _machine(verbose)
    if json_:
        render.print_json({"models": [_row(m) for m in models], "machine": machine})
        return
    console = Console()
    console.print(_table(models))
    console.print(
        "[dim]--model also takes a model folder, a .gguf file or a Hugging Face id (org/name).[/]\n"
    )
    _print_machine(console, machine)


def _open(name: str) -> Checkpoint:
    """The checkpoint of a model; its config is enough, and all that is downloaded from the hub."""
    check_extras("describing a model", "torch")
    from headway.model.loader import open_checkpoint

    path = resolve(name, files=HUB_CONFIGS)
    has_weights = path.is_file() or any([*path.glob("*.safetensors"), *path.glob("*.gguf")])
    return open_checkpoint(path, "auto" if has_weights else "dummy")


def fractions(advance: Callable[[float], None]) -> Callable[[int, int], None]:
    """A callback for bytes done and in total that advances a progress bar from 0 to 1."""
    shown = 0.0

    def update(done: int, total: int) -> None:
        nonlocal shown
        advance(done / total - shown)
        shown = done / total

    return update


def _machine(verbose: bool) -> dict[str, Any]:
    """The GPUs, and how fast the CPU computes one layer of the default model."""
    try:
        from headway.model import devices, loader, precision
    except ModuleNotFoundError as error:
        return {"error": f"{error.name} is not installed: {install('torch')}"}
    default = next((m.path for m in list_models() if m.path is not None), None)
    problem = precision.why_not_native()
    found = {"threads": precision.num_threads(), "native_kernels": problem or "yes"}
    if problem is None:
        found["byte_products"] = precision.byte_products()
    found["cuda"] = devices.why_no_cuda() or "yes"
    found["gpus"] = [asdict(gpu) for gpu in devices.gpus()]
    if default is None:
        return found | {"error": "no model is downloaded yet: try --fetch smollm2-135m"}
    try:
        checkpoint = loader.open_checkpoint(default)
        speeds = precision.probe(checkpoint.config)
    except ModelError as error:
        return found | {"error": str(error)}
    layers = {
        speed.precision: {
            "one_row_ms": speed.one * 1e3,
            "many_rows_ms": None if speed.many is None else speed.many * 1e3,
        }
        for speed in speeds
    }
    found |= {"fastest": precision.fastest(speeds), "layer": layers}
    return found | _kernels(checkpoint) if verbose and problem is None else found


def _kernels(checkpoint: Checkpoint) -> dict[str, object]:
    """The forms of each quantized matrix and why one is chosen, and the KV cache by type."""
    from headway.model.backends.native.kv_probe import probe_kv_cache
    from headway.model.precision import probe_products

    return {
        "products": {each.matrix: each.summary() for each in probe_products(checkpoint)},
        "kv_cache": {
            each.dtype: {"token_bytes": each.token_bytes, "attention_ms": each.seconds * 1e3}
            for each in probe_kv_cache(checkpoint.config)
        },
    }


def _print_kv_cache(console: Console, types: dict[str, dict[str, float]]) -> None:
    columns = ("type", "bytes per token", "attention of a layer: 32 decodes of 256 tokens")
    rows = [
        (name, f"{each['token_bytes']:,}", f"{each['attention_ms']:,.3f} ms")
        for name, each in types.items()
    ]
    title = "KV cache by --kv-cache-dtype (auto is float32)"
    console.print(framed_table(columns, rows, title=title))


def _print_products(console: Console, products: dict[str, Any]) -> None:
    first = next(iter(products.values()))["forms"]
    counts = next(iter(first.values()))["us_by_rows"]
    title = "Products by form (bits/inputs that share a scale), µs"
    columns = ("matrix", "form", *(f"{n} rows" if n != "1" else "1 row" for n in counts))
    rows = []
    for matrix, product in products.items():
        name = f"{matrix} {product['shape'][0]:,} x {product['shape'][1]:,}"
        for form, found in product["forms"].items():
            shown = f"[bold]{form}[/] (chosen)" if form == product["chosen"] else form
            rows.append((name, shown, *(f"{us:,.0f}" for us in found["us_by_rows"].values())))
            name = ""
    console.print(framed_table(columns, rows, ("form",), no_wrap=True, title=title))
    console.print("A matrix has one form, so that a row does not depend on the rows beside it.")
    for matrix, product in products.items():
        console.print(f"{matrix}: {product['why']}", highlight=False)


def _print_machine(console: Console, machine: dict[str, Any]) -> None:
    if "layer" in machine:
        title = f"Time of one layer on this CPU, {machine['threads']} threads"
        rows = []
        for name, times in machine["layer"].items():
            shown = [times["one_row_ms"], times["many_rows_ms"]]
            cells = ["[dim]too slow[/]" if t is None else f"{t:,.3f} ms" for t in shown]
            is_fastest = name == machine["fastest"]
            rows.append((f"[bold]{name}[/] (fastest)" if is_fastest else name, *cells))
        columns = ("dtype", "1 row", "32 rows")
        console.print(framed_table(columns, rows, title=title))
    for gpu in machine.get("gpus", ()):
        memory = f"{gpu['num_bytes'] / 2**30:.1f} GiB"
        console.print(f"GPU {gpu['device']}: {escape(gpu['name'])}, {memory}", highlight=False)
    if machine.get("cuda", "yes") != "yes":
        console.print(f"No GPU is used: {escape(machine['cuda'])}")
    if machine.get("native_kernels", "yes") != "yes":
        reason = f"Native kernels are not used: {escape(machine['native_kernels'])}"
        console.print(f"{reason}. Plain torch is slower; a C compiler (gcc) enables them.")
    if "byte_products" in machine:
        console.print(f"Products with quantized weights: {machine['byte_products']}")
    if machine.get("products"):
        _print_products(console, machine["products"])
    if machine.get("kv_cache"):
        _print_kv_cache(console, machine["kv_cache"])
    if "error" in machine:
        console.print(f"[dim]{escape(machine['error'])}[/]")


def _row(model: ModelEntry) -> dict[str, object]:
    path = None if model.path is None else str(model.path)
    return {
        "name": model.name, "origin": model.origin, "is_fetched": path is not None,
        "num_bytes": model.num_bytes, "licence": model.licence, "path": path,
        "description": model.description,
    }  # fmt: skip


def _table(models: list[ModelEntry]) -> Table:
    table = Table(title="Models", header_style="bold", show_lines=True)
    for column in ("name", "origin", "size", "licence", "path", "description"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for model in models:
        size = f"{model.num_bytes / 1e6:,.0f} MB"
        path = "[dim]downloaded on first use[/]" if model.path is None else escape(str(model.path))
        name, licence, description = map(escape, (model.name, model.licence, model.description))
        table.add_row(name, model.origin, size, licence, path, description)
    return table


def _list_presets(as_json: bool) -> None:
    """The scheduler presets with their policies and numbers, and all policies."""
    described = {name: describe(preset(name)) for name in PRESETS}
    if as_json:
        render.print_json(described)
        return
    console = Console()
    for name, config in described.items():
        shown = {**config, **PRESETS[name]}
        slots = ", ".join(f"{slot} [cyan]{shown[slot]}[/]" for slot in SLOTS)
        numbers = ", ".join(f"{number} {shown[number]}" for number in NUMBERS)
        console.print(f"[bold]{name}[/]")
        console.print(Padding(f"{slots}\n[dim]{numbers}[/]", (0, 0, 0, 2)), highlight=False)
    console.print()
    columns = ("slot", "policy", "description")
    rows = [
        (slot, policy.__name__, (policy.__doc__ or "").strip().split("\n")[0])
        for slot, policies in {**SLOTS, "route": ROUTES}.items() for policy in policies
    ]  # fmt: skip
    console.print(render.table(columns, rows, columns, title="Policies", pad_edge=True))


def _list_profiles(as_json: bool) -> None:
    """The bundled profiles: a model on a machine, for the simulator."""
    profiles = [load_profile(name) for name in known_profiles()]
    columns = ("name", "KV tokens", "description")
    rows = [(each.name, f"{each.kv_tokens:,}", each.description) for each in profiles]
    shown = framed_table(columns, rows, columns, title="Profiles", show_lines=True)
    render.show({p.name: {"kv_tokens": p.kv_tokens} for p in profiles}, shown, as_json=as_json)
