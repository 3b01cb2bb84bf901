"""What the page offers: presets, slots, numbers, profiles, stories and traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from headway import __version__
from headway.config import Config
from headway.lab.cost import known_profiles, load_profile
from headway.lab.recording.spec import DEFAULT_PROFILE
from headway.lab.stories import Story
from headway.record.sentences import BLOCKED, NOT_CONSIDERED
from headway.scheduler.policies.presets import DEFAULT, PRESETS, SLOTS, describe, preset

STATES = {
    "waiting": "In the queue. It holds no KV blocks on the device.",
    "prefill": "Running. Some of its known tokens are not computed yet.",
    "decoding": "Running. Every step computes one token and samples the next.",
    "swapped": "In the queue after a preemption. Its KV blocks were copied to the host.",
    "finished": "It has ended: a stop token, its length limit, an abort or an error.",
}
TEXTS: dict[str, dict[str, str]] = {  # {need}, {have} and {limit} are numbers of the recording
    "states": STATES, "blocked": BLOCKED, "not_considered": NOT_CONSIDERED,
}  # fmt: skip
SLOT_HELP = {
    "batching": "How a step combines prompts and decodes",
    "queue": "Which waiting request is admitted first",
    "chunk": "How many tokens of a prompt one step computes",
    "headroom": "How many blocks an admission must leave free",
    "victim": "Which running request is preempted first",
    "swap": "Whether a preempted request keeps its tokens on the host",
    "draft": "How many tokens are drafted for a decoding request, to be verified in one step",
    "drafter": "What makes drafts",
}
DEFAULT_SPEC = {
    "workload": "requests=24,arrivals=poisson(20),prompt=uniform(16,120),output=uniform(8,60)",
    "preset": DEFAULT, "set": {"num_blocks": 48, "max_num_seqs": 8, "max_num_batched_tokens": 128},
    "profile": DEFAULT_PROFILE,
}  # fmt: skip


def catalog(
    mode: str,
    stories: Iterable[Story],
    traces: list[dict[str, str]],
    default: Mapping[str, object] | None = None,
) -> Any:
    """All that the page needs before it shows a run, as JSON."""
    return {
        "mode": mode,
        "version": __version__,
        "presets": {name: describe(preset(name)) for name in PRESETS},
        "slots": {
            slot: {"help": SLOT_HELP[slot], "values": [_value(each) for each in values]}
            for slot, values in SLOTS.items()
        },
        "numbers": {
            f.name: {"low": f.metadata["low"], "high": f.metadata["high"], "default": f.default}
            for f in fields(Config) if f.default is not MISSING and f.name not in SLOTS
        },
        "profiles": [
            {"name": name, "description": load_profile(name).description}
            for name in known_profiles()
        ],
        "stories": [story.describe() for story in stories],
        "traces": traces,
        "default": default or DEFAULT_SPEC,
        **TEXTS,
    }  # fmt: skip


def _value(policy: Any) -> dict[str, str]:
    return {"value": policy.__name__, "help": (policy.__doc__ or "").strip().split("\n")[0]}
