"""What `headway profile` tells a person: the machine's numbers, and how far they are off."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.lab.calibration import Errors
from headway.lab.cost import Machine, Profile

MAX_SURE = 0.2  # an error above this is warned of


def show(profile: Profile, found: Errors, out: Path) -> None:
    """The numbers, how far they are off, and what comes next."""
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
    if worst > MAX_SURE:
        Console(stderr=True).print(
            f"[yellow]warning:[/] the profile is off by {worst:.0%} on a run that was not fitted; "
            "profile again while nothing else runs on this machine",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
