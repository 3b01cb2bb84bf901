"""The real app over an engine whose output is the prompt in capitals, with slow steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from headway import AsyncEngine, Engine, Plan, Scheduler, preset
from headway.engine.input_processor import InputProcessor
from headway.engine.loop import EngineLoop
from headway.observe.server_metrics import ServerMetrics
from headway.record.writer import JournalWriter, header, open_journal
from headway.server import app, live
from headway.server.app import create_app
from headway.server.context import Context
from headway.server.health import Watchdog, watch
from headway.server.live import router
from headway.server.process.serve import ServedEngine, ServerFactory
from headway.server.settings import Settings
from tests.support import scripted
from tests.support.served import END, HIDDEN_SIZE, MODEL, VOCAB_SIZE, Capitals, letters
from tests.support.waiting import LIMIT

LONGEST = 4096
ENDLESS = 10 * LIMIT  # seconds


class SlowCapitals(Capitals):
    """Sleeps in every step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def launch(self, plan: Plan) -> Capitals:
        time.sleep(self.seconds)
        return super().launch(plan)


def letters_served(seconds: float, trace: str | None = None) -> ServedEngine:
    config = preset(
        "headway", max_model_len=LONGEST, num_blocks=8192, block_size=16, max_num_seqs=64
    )
    engine = Engine(Scheduler(config), SlowCapitals(seconds))
    if trace is not None:
        engine.observers.append(JournalWriter(open_journal(Path(trace)), header(config, False)))
    processor = InputProcessor(
        tokenizer=letters(), vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE,
        eos_ids=frozenset({END}),
    )  # fmt: skip
    return ServedEngine(engine=engine, model_info=processor, prepare=observe)


def observe(loop: EngineLoop) -> None:
    ServerMetrics(loop, MODEL)
    Watchdog(loop, ENDLESS)


def letters_app(engine: AsyncEngine, processor: InputProcessor) -> Any:
    context = Context(
        engine=engine,
        input_processor=processor,
        model_name=MODEL,
        max_model_len=LONGEST,
        health=watch(engine, ENDLESS),
    )
    return create_app(context, [router(context)])


def patient() -> Callable[[], None]:
    """Set up a process of a server whose queries are answered, however late."""
    live.TIMEOUT = app.ENGINE_TIMEOUT = ENDLESS
    return scripted.patient()


def real_factory(options: dict[str, Any]) -> ServerFactory:
    return ServerFactory(
        make_engine=partial(letters_served, options["seconds"], options["trace"]),
        make_app=letters_app,
        grace=options["grace"],
        settings=Settings(**options["connections"]),
        setup=patient,
    )
