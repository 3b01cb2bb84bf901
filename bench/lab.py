"""The lab page with a trace of 100,000 steps, in headless Chromium.

    python bench/lab.py [--trace FILE] [--only page|recording]    prints one JSON object

first_frame_ms   from the navigation to the first picture with a frame; the server still reads then
loaded_ms        from the navigation to the last frame of the run
seek_ms          p50, p95 and max of 200 jumps to random steps: from the input event to the moment
                 after the picture, without waiting for a display; `hz60` waits for one of 60 Hz
memory_mib       JavaScript heap, its array buffers, and the private memory of the page's process
page_bytes       HTML, script and style: as they are, and with gzip
recording_us     CPU time of one step's trace line, by the limit of running requests, and the more
                 that --trace-blocks takes: means over a simulated run
While it loads, 40 jumps are measured too (`seek_while_loading_ms`). Needs Chromium and playwright.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import thread_time
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from playwright.sync_api import Browser, Page, sync_playwright

from headway.events import Completed, Event
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.workload.synthetic import parse_synthetic
from headway.record.writer import JournalWriter, header
from headway.scheduler import preset

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
    with path.open("w") as file:
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
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
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
    """Per step. Both writers get every event of one run; which one is first alternates."""
    config = preset("vllm_v1", num_blocks=20_000, max_num_seqs=max_num_seqs)
    writers = [
        JournalWriter(io.BytesIO(), header(config, False, has_blocks=each))
        for each in (False, True)
    ]
    times, num_steps = [0.0, 0.0], 0

    def observe(event: Event) -> None:
        nonlocal num_steps
        num_steps += isinstance(event, Completed)
        for place in (0, 1) if num_steps % 2 else (1, 0):
            start = thread_time()
            writers[place](event)
            times[place] += (thread_time() - start) * 1e6

    workload = RECORDED.format(requests=5 * max_num_seqs, rate=max_num_seqs / 4)
    requests = parse_synthetic(workload).generate()
    gc.disable()
    simulate(requests, config, load_profile(PROFILE), observers=[observe])
    gc.enable()
    plain, with_blocks = (each / num_steps for each in times)
    return {"trace": round(plain, 1), "more_with_blocks": round(with_blocks - plain, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="use this trace, or write it if it is missing")
    parser.add_argument("--only", choices=["page", "recording"])
    given = parser.parse_args()
    result: dict[str, Any] = {}
    if given.only != "page":
        result["recording_us"] = {str(n): recording_us(n) for n in (8, 64, 256)}
    if given.only != "recording":
        result |= measure_page(given.trace)
    print(json.dumps(result, indent=2))


def measure_page(given: Path | None) -> dict[str, Any]:
    """All figures of the page."""
    with tempfile.TemporaryDirectory() as folder:
        trace = given or Path(folder) / "run.trace.jsonl"
        if not trace.exists():
            write_trace(trace)
        result = measure(trace, UNLIMITED, is_first=True)
        assert result["frames"] >= NUM_STEPS, f"the trace has {result['frames']} steps only"
        slower = measure(trace, [], is_first=False)
    result["seek_ms"]["hz60"] = slower["seek_ms"]
    return {**result, "page_bytes": page_bytes()}


if __name__ == "__main__":
    main()
