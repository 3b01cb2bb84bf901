"""What a model needs before it is loaded: memory, the context that fits, and speed on each device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from headway.cli.view import render
from headway.errors import ConfigError
from headway.lab.cost import load_profile
from headway.lab.real.profiling import work_of
from headway.options import EngineOptions

if TYPE_CHECKING:
    from headway.model.devices import Device
    from headway.model.footprint import Footprint
    from headway.model.weights.checkpoint import Checkpoint

CONTEXT, BATCH = 1000, 32  # tokens of each request, and requests, whose speed is shown
SAME = 0.02  # relative difference of the weights of one model
OTHER = "It was fitted to another model: expect larger errors than for that one."


def facts_of(
    checkpoint: Checkpoint, options: EngineOptions, memory: str | None, profile: str | None
) -> dict[str, Any]:
    """The facts of a model by name; ConfigError if no device can run it with these options."""
    config, file, facts = checkpoint.config, checkpoint.path, dict[str, Any]()
    if profile is not None and options.device == "auto":
        raise ConfigError("--profile is of one device: give --device cpu or --device cuda too")
    for name in {"cpu": ["CPU"], "auto": ["CPU", "GPU"]}.get(options.device, ["GPU"]):
        try:
            facts[name] = _on_device(checkpoint, options, name, memory, profile)
        except ConfigError as found:
            facts[name] = {"problem": str(found)}
    if not any("runs_as" in each for each in facts.values()):
        raise ConfigError(facts[name]["problem"])
    is_gguf = file is not None and file.suffix == ".gguf"
    return {
        "family": config.architecture,
        "format": str(config.quantization or ("GGUF" if is_gguf else "floats")),
        "parameters": config.num_params, "parameters_per_token": config.num_used(),
        "max_model_len": config.max_model_len, **facts,
    }  # fmt: skip


def _on_device(
    checkpoint: Checkpoint,
    options: EngineOptions,
    name: str,
    given: str | None,
    profile: str | None,
) -> dict[str, Any]:
    """The facts of a device by the labels of their rows; sizes end in _bytes."""
    from headway.model.devices import Device, parse_size, usable_memory, use_device, why_no_cuda
    from headway.model.footprint import footprint

    kind = "cpu" if name == "CPU" else options.device.replace("auto", "cuda")
    is_here = name == "CPU" or why_no_cuda() is None
    device = use_device(kind) if is_here else Device("cuda")
    types = options.dtype, options.quantization, options.kv_cache_dtype
    found = footprint(checkpoint, device, *types)
    facts: dict[str, Any] = {
        "runs_as": found.precision, "weights_bytes": found.weights,
        "kv_cache": found.kv_dtype, "kv_bytes_per_token": found.kv,
    }  # fmt: skip
    if found.window:
        facts["kv_bytes_per_token_in_windows"] = found.window_kv
    if given is None and not is_here:
        return facts
    share = options.gpu_memory_utilization
    memory = parse_size(given, "memory") if given else usable_memory(device, share)
    limit, room = checkpoint.config.max_model_len, memory - found.weights
    longest = found.longest(room, min(limit, options.max_model_len or limit))
    facts |= {"memory_bytes": memory, "left_for_kv_cache_bytes": room, "longest_context": longest}
    if longest:
        facts["requests_of_this_length"] = room // found.request(longest)
        facts |= _speed(found, profile, min(CONTEXT, longest), device if is_here else None)
    return facts


def _speed(
    found: Footprint, name: str | None, context: int, device: Device | None
) -> dict[str, Any]:
    """Tokens per second by a profile, or else at most, by the device's memory bandwidth alone.

    Each request has `context` tokens; None: the device is in another machine.
    """
    from headway.model.devices import bandwidth

    kv = found.request(context)
    if name is None:
        if device is None:
            return {}
        measured = bandwidth(device)
        source = f"at most, by memory bandwidth alone ({measured / 1e9:,.1f} GB/s, measured now)."
        num_read = found.read + found.experts * found.config.expert_share + kv
        return {"tokens_per_second": measured / num_read, "speed": source}
    profile = load_profile(name)
    work = work_of(found.config, read=found.read, experts=found.experts, kv=kv / context)
    own = replace(profile, model=work)
    is_same = abs(profile.model.weight_bytes / found.read - 1) < SAME
    one, many = (n / own.pass_seconds(n, n, n * context, n * context) for n in (1, BATCH))
    return {
        "tokens_per_second": one, f"tokens_per_second_of_{BATCH}": many,
        "prompt_tokens_per_second": context / own.prefill_seconds(context),
        "speed": f"by the profile {profile.name}. {profile.accuracy() if is_same else OTHER}",
    }  # fmt: skip


def _shown(name: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return value or "-"
    if name.endswith("_bytes"):
        return f"{abs(value) / 2**30:,.2f} GiB{' too little' if value < 0 else ''}"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ").replace("kv", "KV")


def print_model(facts: dict[str, Any]) -> None:
    """The facts of `facts_of` as tables, then problems and where the speeds come from."""
    console, used = Console(highlight=False), facts["parameters_per_token"]
    some = f"; a token uses {used:,}" if used < facts["parameters"] else ""
    console.print(
        f"[bold]{facts['family']}[/], {escape(facts['format'])}, {facts['parameters']:,} parameters"
        f"{some}, at most {facts['max_model_len']:,} tokens\n"
    )
    devices = {name: facts[name] for name in ("CPU", "GPU") if name in facts}
    columns = {name: each for name, each in devices.items() if "runs_as" in each}
    names = dict.fromkeys(name for each in columns.values() for name in each if name != "speed")
    rows = [
        (_label(name), *(_shown(name, each.get(name)) for each in columns.values()))
        for name in names
    ]
    console.print(render.table(("", *columns), rows))
    for name, each in devices.items():
        note = each.get("problem") or ("speed" in each and f"tokens/s {each['speed']}")
        if note:
            console.print(f"\n{name}: {escape(note)}", soft_wrap=True)
