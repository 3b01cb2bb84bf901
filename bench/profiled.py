"""What `headway profile` finds of a loaded model, and for which kind of step it is off how far."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from headway import LLM
from headway.cli.commands.profile import AMOUNTS, Logs, copy, learned, run
from headway.lab.calibration import calibration
from headway.lab.cost import Profile
from headway.lab.fit import observations, predict


def profiled(llm: LLM, *, is_quick: bool, log: Path | None) -> dict[str, Any]:
    """Run, fitted and compared; all steps go to the file `log`, a JSON each."""
    kv_tokens = llm.config.num_blocks * llm.config.block_size
    amount = AMOUNTS[llm.loaded.is_on_gpu, is_quick]
    logs = run(llm, calibration(min(llm.config.max_model_len, kv_tokens), amount))
    copies = copy(llm)
    if log:
        kinds = {**logs._asdict(), "copies": copies}
        log.write_text("".join(
            json.dumps({"kind": kind, **line}) + "\n" for kind, lines in kinds.items() for line in lines
        ))  # fmt: skip
    found, errors = learned(llm, "bench", logs, copies)
    return {"held_out": errors._asdict(), "profile": asdict(found), "off_by": off_by(logs, found)}


def off_by(logs: Logs, found: Profile) -> dict[str, dict[str, Any]]:
    """How many steps of each kind took how long, and the median of foretold / measured - 1."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for part in ("fitted", "held_out"):
        seen = observations(getattr(logs, part))
        plain = seen.chosen(seen.is_plain)
        tokens, samples, *_ = plain.passes.T
        for count, is_decode, seconds, foretold in zip(
            tokens, tokens == samples, plain.seconds, predict(found.rates, plain), strict=True
        ):
            size = 2 ** int(np.ceil(np.log2(count)))
            what = "decodes" if is_decode else "tokens, with prompts"
            kinds.setdefault(f"{part}: up to {size:5} {what}", []).append((seconds, foretold))
    return {
        kind: {
            "steps": len(pairs), "seconds": sum(seconds for seconds, _ in pairs),
            "off_by": float(np.median([foretold / seconds - 1 for seconds, foretold in pairs])),
        }
        for kind, pairs in sorted(kinds.items())
    }  # fmt: skip
