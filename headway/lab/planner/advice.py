"""Settings as command lines: for `headway serve`, `vllm serve` and the lab."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from headway.lab.planner.evaluate import Settings
from headway.lab.workload.files import is_synthetic

# Flags of `vllm serve` for numbers with the same meaning.
VLLM_NUMBERS = {
    "max_num_seqs": "--max-num-seqs", "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_model_len": "--max-model-len", "block_size": "--block-size",
    "num_blocks": "--num-gpu-blocks-override",
}  # fmt: skip
VLLM_SLOTS = {
    ("queue", "fcfs"): "--scheduling-policy fcfs",
    ("queue", "priority"): "--scheduling-policy priority",
    ("chunk", "split_any"): "--enable-chunked-prefill",
    ("chunk", "whole"): "--no-enable-chunked-prefill",
    # What vLLM always does. Without swapped requests, swapped_first is mixed.
    ("batching", "mixed"): "",
    ("batching", "swapped_first"): "",
    ("victim", "newest"): "",
    ("swap", "recompute"): "",
    ("headroom", "watermark(0.0)"): "",
    ("draft", "none"): "",
    ("drafter", "none"): "",
}


class VllmAdvice(NamedTuple):
    """A `vllm serve` command line, and the settings that have no counterpart there."""

    command: str
    without_counterpart: list[str]


def headway_flags(settings: Settings) -> str:
    """Flags of any command that runs a scheduler."""
    return " ".join(f"--{k.replace('_', '-')} {shlex.quote(str(v))}" for k, v in settings.items())


def wrapped(command: str, width: int = 96) -> str:
    """A command line broken between its flags, ready to paste."""
    lines = [""]
    for part in re.split(r" (?=--)", command):
        if lines[-1] and len(lines[-1]) + len(part) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return "\n".join(lines)


def serve_command(settings: Settings) -> str:
    return f"headway serve MODEL {headway_flags(settings)}".strip()


def vllm_command(settings: Settings, *, async_scheduling: bool = False) -> VllmAdvice:
    """Only flags that `vllm serve` has; the rest is listed. `settings` has all slots and sizes.

    vLLM refuses a token budget below max_num_seqs; more requests could not decode anyway.
    """
    flags, rest = (["--async-scheduling"] if async_scheduling else []), []
    num_seqs, limit = (int(settings[name]) for name in ("max_num_seqs", "max_num_batched_tokens"))
    for name, value in {**settings, "max_num_seqs": min(num_seqs, limit)}.items():
        capped = re.fullmatch(r"at_most\((?:tokens=)?(\d+)\)", str(value))
        if name in VLLM_NUMBERS:
            flags.append(f"{VLLM_NUMBERS[name]} {value}")
        elif name == "chunk" and capped:
            flags.append(f"--enable-chunked-prefill --long-prefill-token-threshold {capped[1]}")
        elif (name, str(value)) in VLLM_SLOTS:
            flags.append(VLLM_SLOTS[name, str(value)])
        else:
            rest.append(f"{name}={value}")
    return VllmAdvice(" ".join(["vllm serve MODEL", *filter(None, flags)]), rest)


def lab_command(base: Settings, settings: Settings, workload: str, profile: str) -> str | None:
    """Opens the settings beside the base in the lab; None for a workload file."""
    if not is_synthetic(workload):
        return None
    changes = (f"{name}={value}" for name, value in base.items() if name != "preset")
    other, flags = "; ".join([str(base["preset"]), *changes]), headway_flags({**base, **settings})
    return (
        f"headway lab {shlex.quote(workload)} --profile {shlex.quote(profile)} {flags} "
        f"--against {shlex.quote(other)}"
    )
