"""Ranks that are killed, stopped or hang at random moments: seconds until the engine's error.

    python bench/rank_failures.py --rounds 30 > rank_failures.json

Each round starts a group of two or three ranks with a tiny model, generates, and sends a signal to
one of the others after a random time: SIGKILL, SIGSTOP, or one whose handler never returns, so that
the main thread hangs while other threads run. Prints one JSON object: for each kind the seconds from
the signal to the error, and what was left behind: processes, and files in shared memory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headway import LLM, Engine, Scheduler
from headway.cli.options.common import progress_bar
from headway.request import RequestParams

KINDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "hangs": signal.SIGUSR1}
HANGING = "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: time.sleep(600))\n"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 160, "hidden_size": 96,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 4096, "eos_token_id": 0,
}  # fmt: skip
MAX_SECONDS = 0.5  # until the signal
GONE_SECONDS = 3.0  # for processes to end
SHARED = Path("/dev/shm")


def shared_files() -> set[str]:
    return {file.name for file in SHARED.iterdir()} if SHARED.is_dir() else set()


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def fail(folder: str, size: int, sent: signal.Signals, random: Random) -> tuple[float, int]:
    """Seconds from the signal to the error, and the number of processes that are left."""
    with LLM(folder, tensor_parallel_size=size, device="cpu", load_format="dummy", threads=1,
             num_blocks=200, max_num_seqs=8) as llm:  # fmt: skip
        assert llm.loaded.ranks is not None
        pids = [each.process.pid for each in llm.loaded.ranks.watch._ranks]
        engine, sent_at = Engine(Scheduler(llm.config), llm.executor), list[float]()

        def send() -> None:
            sent_at.append(time.monotonic())
            os.kill(random.choice(pids), sent)

        timer, number = threading.Timer(random.uniform(0, MAX_SECONDS), send), 0
        timer.start()
        while not engine.fault:
            if not engine.has_work:
                params = RequestParams(max_tokens=50, ignore_eos=True)
                prompt = [random.randrange(160) for _ in range(random.randrange(1, 300))]
                engine.add(str(number), prompt, params)
                number += 1
            engine.step()
        seconds = time.monotonic() - sent_at[0]
        limit = time.monotonic() + GONE_SECONDS
        while any(map(is_running, pids)) and time.monotonic() < limit:
            time.sleep(0.02)
        return seconds, sum(map(is_running, pids))


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="failures in all")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    random, before = Random(given.seed), shared_files()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    num_left = 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        Path(folder, "sitecustomize.py").write_text(HANGING)
        sys.path.append(folder)  # of the ranks, too
        with progress_bar("failures", given.rounds) as advance:
            for number in range(given.rounds):
                kind, size = list(KINDS)[number % len(KINDS)], random.choice((2, 3))
                taken, left = fail(folder, size, KINDS[kind], random)
                seconds[kind].append(taken)
                num_left += left
                advance(1)
    result: dict[str, Any] = {
        kind: {"failures": len(each), "median_seconds": round(median(each), 3),
               "max_seconds": round(max(each), 3)}
        for kind, each in seconds.items() if each
    }  # fmt: skip
    files = [name for name in shared_files() - before if not name.startswith("sem.")]
    print(json.dumps({**result, "processes_left": num_left, "files_left": len(files)}, indent=2))


if __name__ == "__main__":
    main()
