"""A server whose model repeats parts of its prompt, for tests that read raw bytes.

A prompt contains the outputs between two marks; sample k generates output k. Every byte is a token,
so characters, tags and stop strings are split at all positions. Some steps are slow, so that updates
arrive alone and in groups; a prompt with SLOWLY makes all steps slow, with several slower.
"""

from __future__ import annotations

import random
import time
from typing import Any

from headway import Engine, Plan, Request, Scheduler, preset
from headway.engine.input_processor import InputProcessor
from headway.server.process.serve import ServedEngine, ServerFactory
from headway.server.settings import Settings
from tests.support.lettered import LONGEST, letters_app, patient
from tests.support.served import END, HIDDEN_SIZE, VOCAB_SIZE, Capitals, letters

BEGIN, BETWEEN, FINISH = b"\x02", b"\x1e", b"\x03"
SLOWLY, SLOW = "\x05", 0.01  # seconds that each adds to a step
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% if tools %}"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    "{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
)


def saying(*outputs: str) -> str:
    """A prompt that makes the model generate these outputs, one per sample."""
    marks = [mark.decode() for mark in (BEGIN, BETWEEN, FINISH)]
    return f"{marks[0]}{marks[1].join(outputs)}{marks[2]}"


class Parrot(Capitals):
    """Generates the text between the marks of its prompt, then ends."""

    def __init__(self) -> None:
        super().__init__()
        self._chance = random.Random(0)

    def launch(self, plan: Plan) -> Capitals:
        counts = [list(request.prompt).count(ord(SLOWLY)) for request in plan.decodes]
        if any(counts):
            time.sleep(SLOW * max(counts))
        elif self._chance.random() < 0.02:
            time.sleep(0.001)
        return super().launch(plan)

    def _sample(self, request: Request, place: int) -> int:
        prompt = bytes(token for token in request.prompt if token < 256)
        outputs = prompt.partition(BEGIN)[2].partition(FINISH)[0].split(BETWEEN)
        output = outputs[request.sample % len(outputs)]
        number = place - request.num_prompt
        return output[number] if number < len(output) else END


def parrot_served() -> ServedEngine:
    config = preset(
        "headway", max_model_len=LONGEST, num_blocks=8192, block_size=16, max_num_seqs=64
    )
    tokenizer = letters(TEMPLATE)
    processor = InputProcessor(
        tokenizer=tokenizer, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE,
        eos_ids=frozenset({END}),
    )  # fmt: skip
    return ServedEngine(engine=Engine(Scheduler(config), Parrot()), model_info=processor)


def wire_factory(options: dict[str, Any]) -> ServerFactory:
    return ServerFactory(
        make_engine=parrot_served, make_app=letters_app,
        grace=options["grace"], settings=Settings(**options["connections"]),
        setup=patient,
    )  # fmt: skip
