"""Films and a catalog for work on the lab page: a small server without the lab's own handlers.

    python -m tests.support.lab_page --port 8100          serve the built page
    python -m tests.support.lab_page --write DIRECTORY    write the films of the page's unit tests
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError
from headway.lab.cost import known_profiles, load_profile
from headway.lab.film.format import FilmWriter, header_record
from headway.lab.simulate import simulate, with_profile
from headway.lab.summary import summarize
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.observe import explain
from headway.observe.trace import Line, describe_step, header
from headway.plan import StepReport
from headway.scheduler.presets import NUMBERS, PRESETS, SLOTS, preset

STATIC = Path(__file__).parents[2] / "headway/lab/web/static"
PROFILE = "llama3.1-8b-a100-80gb"
TWENTY = list(zip((40, 64, 30, 80, 50, 20), (60, 40, 50, 30, 40, 60), strict=True))
SPECS: dict[str, dict[str, Any]] = {
    "blocks": {
        "preset": "nano_vllm", "set": {"num_blocks": 20},
        "requests": [{"id": "ABCDEF"[i], "prompt": p, "output": o} for i, (p, o) in enumerate(TWENTY)],
    },
    "swap": {
        "preset": "vllm", "set": {"num_blocks": 90, "swap": "swap", "num_host_blocks": 60},
        "workload": "requests=60,prompt=uniform(20,200),output=uniform(20,120),arrivals=poisson(40)",
    },
    "prefix": {
        "preset": "vllm_v1", "set": {"num_blocks": 200, "max_num_batched_tokens": 128},
        "workload": "requests=120,prompt=uniform(20,60),output=uniform(10,60),prefix=2x96,"
        "arrivals=poisson(60)",
        "async_scheduling": True,
    },
}  # fmt: skip
KINDS = (
    ("preempted", "is preempted"), ("admitted", "is admitted"), ("waiting", "waits:"),
    ("finished", "finished with"), ("deferred", "deferred"), ("copied", "copied"),
)  # fmt: skip


def requests_of(spec: dict[str, Any]) -> list[WorkloadRequest]:
    if "workload" in spec:
        return parse_synthetic(f"{spec['workload']},seed={spec.get('seed', 0)}").generate()
    space, made = TokenSpace(), []
    for row in spec["requests"]:
        pieces = (space.take(row["prompt"]),)
        made.append(
            WorkloadRequest(
                id=row["id"], arrival=row.get("arrival", 0.0), pieces=pieces,
                num_output=row["output"], max_tokens=row["output"],
            )
        )
    return made


def sentences(line: Line, max_num_seqs: int) -> Iterator[tuple[str, str, str]]:
    for text in explain.sentences_of(line, max_num_seqs):
        kind = next((kind for kind, words in KINDS if words in text), None)
        id = text.split()[1] if text.startswith("request ") else ""
        if kind:
            yield kind, id, text


def film(spec: dict[str, Any]) -> list[bytes]:
    """The records of a run."""
    profile = load_profile(spec.get("profile", PROFILE))
    config = with_profile(preset(spec.get("preset", "headway"), **spec.get("set", {})), profile)
    is_async = bool(spec.get("async_scheduling"))
    more = {"profile": profile.name, "has_blocks": True}
    parts, writer = [header_record(header(config, is_async, **more))], FilmWriter(config.block_size)
    waits: dict[str, str] = {}

    def observe(report: StepReport) -> None:
        line = describe_step(report, has_blocks=True)
        texts = []
        for kind, id, text in sentences(line, config.max_num_seqs):
            is_known = kind == "waiting" and waits.get(id) == text
            waits[id] = text
            if not is_known:
                texts.append((kind, id, text))
        parts.append(writer.add(line, texts))

    result = simulate(
        requests_of(spec), config, profile, async_scheduling=is_async, observers=[observe]
    )
    summary = summarize(result.metrics, len(result.rejected))
    parts.append(writer.finish(summary=summary, rejected=result.rejected))
    return parts


def catalog() -> dict[str, Any]:
    bounds = {"max_num_seqs": (1, 4096), "max_num_batched_tokens": (1, 65536), "num_blocks": (1, 65536)}
    numbers = {
        name: {"low": bounds.get(name, (0, 65536))[0], "high": bounds.get(name, (0, 65536))[1],
               "default": getattr(preset(), name), "help": ""}
        for name in NUMBERS
    }  # fmt: skip
    slots = {
        slot: [{"value": f.__name__, "help": (f.__doc__ or "").split("\n")[0]} for f in values]
        for slot, values in SLOTS.items()
    }
    return {
        "mode": "lab", "presets": PRESETS, "slots": slots, "numbers": numbers,
        "profiles": [{"name": name, "description": ""} for name in known_profiles()],
        "stories": [STORY], "traces": [], "default": SPECS["swap"], "version": "dev",
        "states": {
            "waiting": "Holds nothing on the device.",
            "prefill": "Running; some known tokens are not computed yet.",
            "decoding": "Running; one token per step.",
            "swapped": "Waiting; its computed tokens are kept on the host.",
            "finished": "Has all its tokens, or was aborted.",
        },
    }  # fmt: skip


STORY = {
    "name": "twenty_blocks", "title": "Twenty blocks and six requests",
    "text": [
        "Six requests arrive at once, and the cache has twenty blocks of 16 tokens. Their prompts fit, "
        "but prompts and outputs together do not.",
        "nano-vLLM admits whatever fits now. It has to send requests back later.",
    ],
    "spec": {**SPECS["blocks"], "story": "twenty_blocks"},
    "other": {**SPECS["blocks"], "preset": "headway", "story": "twenty_blocks"},
    "looks": [
        {"step": 0, "text": "All six prompts are admitted: 18 of 20 blocks are held."},
        {"step": 1, "text": "F is sent back: a decode needs a block."},
        {"step": 19, "text": "D is sent back."},
    ],
    "question": {
        "text": "How many preemptions does headway need on the same workload?",
        "choices": ["None", "One", "Three, as nano-vLLM"], "answer": 0,
        "why": [
            "It waits with admission until the outputs fit too.",
            "It leaves room for the outputs, so it needs none.",
            "It leaves room for the outputs, so it needs none.",
        ],
    },
    "numbers": [
        {"label": "steps, nano_vllm", "metric": "steps", "value": 110, "unit": "steps"},
        {"label": "steps, headway", "metric": "other.steps", "value": 90, "unit": "steps"},
    ],
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        path = self.path.split("?")[0].lstrip("/") or "index.html"
        if path == "api/catalog":
            return self._send(json.dumps(catalog()).encode(), "application/json")
        types = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
        file = STATIC / path
        if file.suffix in types and file.is_file():
            return self._send(file.read_bytes(), types[file.suffix])
        return self.send_error(404)

    def do_POST(self) -> None:
        spec = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            parts = film(spec)
        except HeadwayError as error:
            body = json.dumps({"error": str(error)}).encode()
            return self._send(body, "application/json", 400)
        return self._send(b"".join(parts), "application/octet-stream")

    def _send(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", "default-src 'self'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def write_films(folder: Path) -> None:
    """Films for the page's unit tests, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, spec in SPECS.items():
        (folder / f"{name}.film").write_bytes(b"".join(film(spec)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.write:
        write_films(options.write)
    else:
        ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
