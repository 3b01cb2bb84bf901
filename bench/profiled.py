"""Run `headway profile` on a loaded model, and report its error for each kind of step."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins

from headway import LLM
from headway.cli.commands.profile import CALIBRATIONS, Logs, copy_blocks, fit_profile, run
from headway.lab.cost import Profile
from headway.lab.profiling.calibration import make_calibration
from headway.lab.profiling.fit import observations, predict


def profiled(llm: LLM, *, is_quick: bool, log: Path | None) -> dict[str, Any]:
    """Measure, fit and compare; writes all events to the file `log` as JSON lines."""
    kv_tokens = llm.config.num_blocks * llm.config.block_size
    spec = CALIBRATIONS[llm.loaded.is_on_gpu, is_quick]
    logs = run(llm, make_calibration(min(llm.config.max_model_len, kv_tokens), spec))
    copies = copy_blocks(llm)
    if log:
        kinds = {**logs._asdict(), "copies": copies}
        log.write_text("".join(
            json.dumps({"kind": kind, **to_builtins(line)}) + "\n" for kind, lines in kinds.items() for line in lines
        ))  # fmt: skip
    found, error, warnings = fit_profile(llm, "bench", logs, copies)
    return {
        "held_out": error._asdict(), "warnings": warnings, "profile": asdict(found),
        "error_by_kind": error_by_kind(logs, found),
    }  # fmt: skip


def error_by_kind(logs: Logs, found: Profile) -> dict[str, dict[str, Any]]:
    """For each kind of step: number, total seconds, and the median of predicted / measured - 1."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for part in ("fitted", "held_out"):
        seen = observations(getattr(logs, part))
        plain = seen.select(seen.is_plain)
        tokens, samples, *_ = plain.passes.T
        for count, is_decode, seconds, predicted in zip(
            tokens, tokens == samples, plain.seconds, predict(found, plain), strict=True
        ):
            size = 2 ** int(np.ceil(np.log2(count)))
            what = "decodes" if is_decode else "tokens, with prompts"
            kinds.setdefault(f"{part}: up to {size:5} {what}", []).append((seconds, predicted))
    return {
        kind: {
            "steps": len(pairs), "seconds": sum(seconds for seconds, _ in pairs),
            "median_error": float(np.median([predicted / seconds - 1 for seconds, predicted in pairs])),
        }
        for kind, pairs in sorted(kinds.items())
    }  # fmt: skip
