"""`headway presets` and `headway profiles`: what there is to choose from."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from headway.cli.options.common import Json
from headway.lab.cost import known_profiles, load_profile
from headway.scheduler.presets import NUMBERS, PRESETS, SLOTS, describe, preset


def presets_command(json_: Json = False) -> None:
    """Every preset as its six slots and its numbers."""
    described = {name: describe(preset(name)) for name in PRESETS}
    if json_:
        print(json.dumps(described, indent=2))
        return
    console = Console()
    for name, config in described.items():
        shown = {**config, **PRESETS[name]}
        slots = ", ".join(f"{slot} [cyan]{shown[slot]}[/]" for slot in SLOTS)
        numbers = ", ".join(f"{number} {shown[number]}" for number in NUMBERS)
        console.print(f"[bold]{name}[/]\n  {slots}\n  [dim]{numbers}[/]", highlight=False)
    console.print()
    ready = Table(title="Ready-made policies", header_style="bold", box=None)
    for column in ("slot", "policy", "what it does"):
        ready.add_column(column)
    for slot, policies in SLOTS.items():
        for policy in policies:
            ready.add_row(slot, policy.__name__, (policy.__doc__ or "").strip().split("\n")[0])
    console.print(ready)


def profiles_command(json_: Json = False) -> None:
    """Every ready-made profile: a model on a machine."""
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
