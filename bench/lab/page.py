"""The lab page with a trace of 100,000 steps in headless Chromium, and what lab features cost.

    python -m bench.lab.page [--trace FILE] [--only page|recording]    prints one JSON object
    python -m bench.lab.page --only live [--rounds N]

page, with Chromium and playwright:
  first_frame_ms   from the navigation to the first picture with a frame; the server still reads then
  loaded_ms        from the navigation to the last frame of the run
  seek_ms          p50, p95 and max of 200 jumps to random steps: from the input event to the moment
                   after the picture, without waiting for a display; `hz60` waits for one of 60 Hz
  seek_while_loading_ms   the same for 40 jumps while it loads
  memory_mib       JavaScript heap, its array buffers, and the private memory of the page's process
  page_bytes       HTML, script and style: as they are, and with gzip
recording   CPU time in us of one step's trace line, by the limit of running requests, and the more
            that --trace-blocks takes: means over a simulated run
live, the bundled model on the CPU with 8 concurrent requests, without and with a reader of its steps:
  tokens_per_second   of the server
  cost                median over the rounds of 1 - with / without; a round is without, with, with,
                      without, so that a change of the machine's speed affects both alike
  cpu_us_per_token    CPU time of the server's process, in the same windows
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import io
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

from playwright.sync_api import Browser, Page, sync_playwright

from bench.harness import ROOT, Bench, Figures
from bench.server.process import ServerProcess, cpu_seconds
from headway.events import Completed, Event
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.workload.synthetic import parse_synthetic
from headway.record.writer import JournalWriter, header
from headway.scheduler import preset

bench = Bench(__doc__)
bench.option("--trace", type=Path, help="use this trace, or write it if it is missing")
bench.option("--rounds", type=int, default=9, help="of live")
NUM_CLIENTS, MAX_TOKENS, SECONDS, SETTLE = 8, 256, 4.0, 0.5
WORKLOAD = (
    "requests=14500,arrivals=poisson(10),prompt=lognormal(300,0.8),output=lognormal(200,0.7),"
    "prefix=4x128@0.3"
)
PROFILE, NUM_BLOCKS, NUM_STEPS, NUM_SEEKS = "llama3.1-8b-a100-80gb", 1200, 100_000, 200
RECORDED = "requests={requests},arrivals=poisson({rate}),prompt=300,output=lognormal(200,0.7)"
STATIC = ROOT / "headway/lab/web/static"
UNLIMITED = ["--disable-frame-rate-limit", "--disable-gpu-vsync"]
# Jumps to a step as a user does, and resolves after the picture that shows it.
SEEK = """
step => new Promise(done => {
  const input = document.querySelector('#jump'), channel = new MessageChannel();
  const set = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set;
  requestAnimationFrame(() => setTimeout(() => {
    const start = performance.now();
    channel.port1.onmessage = () => {
      const shown = document.querySelector('.where').dataset.step;
      done([performance.now() - start, Number(shown)]);
    };
    set.call(input, String(step));
    input.dispatchEvent(new Event('change', {bubbles: true}));
    requestAnimationFrame(() => channel.port2.postMessage(0));
  }, Math.random() * 20));
})
"""
# Notes when the first frame has been painted; runs before any script of the page.
FIRST_FRAME = """
const watch = () => {
  const place = document.querySelector('.where');
  if (place && place.dataset.frame === '0' && document.querySelector('.row')) {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => (window.firstFrame = performance.now());
    requestAnimationFrame(() => channel.port2.postMessage(0));
  } else requestAnimationFrame(watch);
};
requestAnimationFrame(watch);
"""
LAST_STEP = "() => Number(document.querySelector('.scrub input').max)"
IS_LOADED = "() => document.querySelector('td[data-summary=steps]') !== null"


def write_trace(path: Path) -> None:
    """Simulate a server near its limit for at least 100,000 steps."""
    with path.open("wb") as file:
        simulate(
            parse_synthetic(WORKLOAD).generate(), preset("vllm_v1", num_blocks=NUM_BLOCKS),
            load_profile(PROFILE), trace=file, trace_blocks=True,
        )  # fmt: skip


@contextmanager
def lab(trace: Path) -> Iterator[str]:
    """`headway lab FILE` in a process of its own; its address."""
    command = [sys.executable, "-m", "headway", "lab", str(trace), "--no-open", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found, "the lab did not start"
        yield found[0]
    finally:
        server.terminate()
        server.wait()


def seeks(page: Page, num_seeks: int) -> list[float]:
    """Milliseconds of jumps to random steps."""
    rng, times = random.Random(7), []
    last = page.evaluate(LAST_STEP)
    for _ in range(num_seeks):
        step = rng.randrange(last)
        took, shown = page.evaluate(SEEK, step)
        assert shown == step, f"step {shown} is shown, not {step}"
        times.append(took)
    return times


def distribution(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=20, method="inclusive")
    return {
        "p50": round(statistics.median(times), 1), "p95": round(cuts[-1], 1),
        "max": round(max(times), 1),
    }  # fmt: skip


def memory(page: Page, browser: Browser) -> dict[str, float]:
    """Memory of the page after a garbage collection, in MiB."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    heap = session.send("Runtime.getHeapUsage")
    processes = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    private = [_private(each["id"]) for each in processes if each["type"] == "renderer"]
    return {
        "heap": round(heap["usedSize"] / 2**20, 1),
        "buffers": round(heap.get("backingStorageSize", 0) / 2**20, 1),
        "process": round(max(private) / 2**20, 1),
    }


def _private(pid: int) -> int:
    """Bytes that belong to one process alone."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kib) * 1024 for kib in re.findall(r"Private_\w+:\s+(\d+) kB", text))


def measure(trace: Path, more_arguments: list[str], *, is_first: bool) -> dict[str, Any]:
    """One visit of the page: first frame, load, jumps, memory."""
    with sync_playwright() as running, lab(trace) as url:
        chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        browser = running.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", *more_arguments]
        )
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.add_init_script(FIRST_FRAME)
        page.goto(url)
        page.wait_for_function("() => window.firstFrame")
        found: dict[str, Any] = {"first_frame_ms": round(page.evaluate("window.firstFrame"))}
        if is_first:
            found["seek_while_loading_ms"] = distribution(seeks(page, 40))
        page.wait_for_function(IS_LOADED, timeout=300_000)
        found["loaded_ms"] = round(page.evaluate("performance.now()"))
        found["frames"] = page.evaluate(LAST_STEP) + 1
        found["seek_ms"] = distribution(seeks(page, NUM_SEEKS))
        found["memory_mib"] = memory(page, browser)
        browser.close()
    return found


def page_bytes() -> dict[str, int]:
    parts = [(STATIC / name).read_bytes() for name in ("index.html", "app.js", "app.css")]
    return {"raw": sum(map(len, parts)), "gzip": sum(len(gzip.compress(part)) for part in parts)}


def recording_us(max_num_seqs: int) -> dict[str, float]:
    """Both writers get every step of one run; which one is first alternates."""
    config = preset("vllm_v1", num_blocks=20_000, max_num_seqs=max_num_seqs)
    writers = [
        JournalWriter(io.BytesIO(), header(config, False, has_blocks=each))
        for each in (False, True)
    ]
    times: list[list[float]] = [[], []]
    spent = [0.0, 0.0]  # in the present step, which has several events

    def observe(event: Event) -> None:
        for place in (0, 1) if len(times[0]) % 2 else (1, 0):
            start = thread_time()
            writers[place](event)
            spent[place] += (thread_time() - start) * 1e6
            if isinstance(event, Completed):
                times[place].append(spent[place])
                spent[place] = 0.0

    workload = RECORDED.format(requests=5 * max_num_seqs, rate=max_num_seqs / 4)
    requests = parse_synthetic(workload).generate()
    gc.disable()
    simulate(requests, config, load_profile(PROFILE), observers=[observe])
    gc.enable()
    plain, with_blocks = (statistics.mean(each) for each in times)
    return {"trace": round(plain, 1), "more_with_blocks": round(with_blocks - plain, 1)}


@bench.part
def recording(_: Namespace) -> Figures:
    return {"recording_us": {str(n): recording_us(n) for n in (8, 64, 256)}}


@bench.part
def page(asked: Namespace) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        trace = asked.trace or Path(folder) / "run.trace.jsonl"
        if not trace.exists():
            write_trace(trace)
        result = measure(trace, UNLIMITED, is_first=True)
        assert result["frames"] >= NUM_STEPS, f"the trace has {result['frames']} steps only"
        slower = measure(trace, [], is_first=False)
    result["seek_ms"]["hz60"] = slower["seek_ms"]
    return {**result, "page_bytes": page_bytes()}


class Window(NamedTuple):
    tokens_per_second: float
    cpu_us_per_token: float


def now(server: ServerProcess) -> tuple[float, float, float]:
    """The time, generated tokens, and CPU seconds of the process."""
    num_tokens = asyncio.run(server.metric("generation_tokens_total"))
    return time.perf_counter(), num_tokens, cpu_seconds(server.pid)


def window(server: ServerProcess) -> Window:
    """The speed of the server over a few seconds."""
    time.sleep(SETTLE)
    start, tokens, cpu = now(server)
    time.sleep(SECONDS)
    end, more_tokens, more_cpu = now(server)
    num_tokens = more_tokens - tokens
    return Window(num_tokens / (end - start), (more_cpu - cpu) / num_tokens * 1e6)


@contextmanager
def repeating(*works: Callable[[], object]) -> Iterator[None]:
    """Threads that call each function again and again until it is false or the block ends."""
    is_done = threading.Event()

    def repeat(work: Callable[[], object]) -> None:
        while not is_done.is_set() and work():
            pass

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    yield
    is_done.set()
    for thread in threads:
        thread.join()


def ask(server: ServerProcess, number: int) -> bytes:
    body = {
        "model": "smollm2-135m", "prompt": f"Client {number} counts: one, two,",
        "max_tokens": MAX_TOKENS, "ignore_eos": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    asked = Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    with urlopen(asked, timeout=120) as response:
        found: bytes = response.read()
    return found


@bench.part
def live(asked: Namespace) -> Figures:
    without, following, costs = list[Window](), list[Window](), list[float]()
    with (
        ServerProcess(["--no-engine-process"]) as server,
        repeating(*(partial(ask, server, number) for number in range(NUM_CLIENTS))),
    ):
        window(server)  # warm up
        for _ in range(asked.rounds):
            first = window(server)
            with (  # as `headway lab --attach` follows
                urlopen(f"{server.url}/lab/api/live", timeout=30) as recording,
                repeating(partial(recording.read1, 1 << 16)),
            ):
                both = [window(server), window(server)]
            last = window(server)
            without += [first, last]
            following += both
            speeds = [sum(w.tokens_per_second for w in pair) for pair in (both, [first, last])]
            costs.append(1 - speeds[0] / speeds[1])
    figures = {
        name: {
            key: round(statistics.median(getattr(each, name) for each in windows), 1)
            for key, windows in (("without", without), ("following", following))
        }
        for name in Window._fields
    }
    costs = [round(each, 4) for each in costs]
    return {**figures, "cost": round(statistics.median(costs), 4), "costs": costs}


if __name__ == "__main__":
    bench.on_demand = {"live"}
    bench.main()
