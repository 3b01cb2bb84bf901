"""Make the plots of planner.md and fleet_routing.md.

    make picture

Those of planner.md are made by its commands that have --plot, and written beside this file under
the names that the document gives. routing-rules.svg shows bench/results/routing.json.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

from headway.cli.main import app

FOLDER = Path(__file__).parent
WORKLOADS = {
    "mooncake_conversation_first4000": "conversation", "hot": "hot prefixes", "unshared": "nothing shared",
}  # fmt: skip
PANEL, ROW, LABEL, WIDTH = 44, 22, 200, 860  # pixels


def rule_bars(workload: str, rules: dict[str, Any], top: int) -> list[str]:
    """Bars of the 90th percentile of the time to first token, with the share of hits."""
    lines = [f'<text x="8" y="{top + 20}" font-size="15" font-weight="bold">{workload}</text>']
    longest = max(each["ttft"]["p90"] for each in rules.values())
    for number, (rule, found) in enumerate(rules.items()):
        y, seconds = top + 32 + number * ROW, found["ttft"]["p90"]
        length = max(1.0, (WIDTH - LABEL - 190) * seconds / longest)
        color = "#2f6f9f" if rule == "prefix_load" else "#b8c4cc"
        text = f"{seconds:.2f} s, hits {100 * found['hits']:.0f} %"
        lines += [
            f'<text x="{LABEL - 8}" y="{y + 14}" text-anchor="end">{rule}</text>',
            f'<rect x="{LABEL}" y="{y + 2}" width="{length:.1f}" height="{ROW - 6}" fill="{color}"/>',
            f'<text x="{LABEL + length + 8:.1f}" y="{y + 14}">{text}</text>',
        ]
    return lines


def routing_rules() -> str:
    """An image of how long the first token takes under each rule, for each workload."""
    path = FOLDER.parent.parent / "bench" / "results" / "routing.json"
    result, lines, top = json.loads(path.read_text(encoding="utf-8"))["result"], list[str](), 0
    for name, workload in WORKLOADS.items():
        rules = result[name]["rules"]
        lines += rule_bars(f"{workload}: time to first token, 90th percentile", rules, top)
        top += PANEL + len(rules) * ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" '
        'font-family="sans-serif" font-size="13" fill="#222">'
    )
    return "\n".join(
        [head, f'<rect width="{WIDTH}" height="{top}" fill="white"/>', *lines, "</svg>\n"]
    )


def main() -> None:
    (FOLDER / "routing-rules.svg").write_text(routing_rules(), encoding="utf-8")
    text = (FOLDER.parent / "planner.md").read_text(encoding="utf-8").replace("\\\n", " ")
    os.chdir(FOLDER)
    for command in re.findall(r"^(?:\$ )?headway (sweep .*--plot \S+)$", text, re.MULTILINE):
        app(shlex.split(command), standalone_mode=False)


if __name__ == "__main__":
    main()
