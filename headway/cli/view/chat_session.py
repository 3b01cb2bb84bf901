"""A conversation with a model: answers, commands and statistics of `headway chat`.

Knows no terminal: the caller passes lines and a function that writes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.cli.view import live
from headway.cli.view.render import counted
from headway.errors import HeadwayError, RequestTooLong
from headway.events import Event
from headway.record.timeline import RequestTimeline
from headway.sampling_params import SamplingParams
from headway.text.reasoning import reasoning_of
from headway.text.split import ANSWER, AUTO, REASONING, Splitter
from headway.text.think import ThinkSplitter

if TYPE_CHECKING:
    from headway.llm import LLM
    from headway.text.chat_template import Message

HELP = """\
/reset        start a new conversation, keep the system message
/system TEXT  set the system message; without TEXT, show it
/stats        show statistics of tokens, speed, cache and scheduler
/help         show this help
/exit         exit, like Ctrl-D; Ctrl-C ends an answer"""
Write = Callable[[str], None]


class ChatSession:
    """A conversation with a model, and its statistics."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str = "", write_dim: Write | None = None
    ) -> None:
        """`write_dim` writes reasoning; the default is to write it like the answer."""
        self.llm = llm
        self.params = params
        self._write_dim = write_dim
        self._reasoning = llm.tokenizer and reasoning_of(llm.tokenizer, AUTO)
        if self._reasoning and self._reasoning.special:
            self.params = replace(params, skip_special_tokens=False)
        self.system = system
        self.messages: list[Message] = []
        self.metrics = live.measure(llm)
        self.num_cached = 0  # tokens of the latest prompt

    def check(self) -> None:
        """Raise an error if the model cannot chat, for example without a chat template."""
        self._prompt([{"role": "user", "content": "?"}])

    def take(self, line: str, write: Write) -> bool:
        """Run a command or answer a message; returns False to exit."""
        if not line.startswith("/"):
            self.answer(line, write)
            return True
        command, _, text = line.partition(" ")
        if command == "/exit":
            return False
        write(self._command(command, text.strip()) + "\n")
        return True

    def _command(self, command: str, text: str) -> str:
        if command == "/reset":
            self.messages.clear()
            return "(new conversation)"
        if command == "/system":
            if text:
                self.system = text
                return "(the system message applies from the next answer on)"
            return self.system or "(no system message except the model's own)"
        if command == "/stats":
            return self.stats()
        return HELP if command == "/help" else f"unknown command {command}:\n{HELP}"

    def answer(self, text: str, write: Write) -> None:
        """Stream an answer. A message that is rejected or gets no answer is not kept."""
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        said = ""
        try:
            prompt, room = self._fit(messages)
            allowed = min(self.params.max_tokens or room, room)
            said, reason = self._stream(prompt, replace(self.params, max_tokens=allowed), write)
        except HeadwayError as error:
            write(f"({error})\n")
            return
        except KeyboardInterrupt:
            write(" (stopped)\n")
            return
        note = {"abort": " (stopped)", "error": " (generation failed)"}.get(reason or "", "")
        if reason == "length":
            is_full = allowed == room
            limit = "model length reached, /reset starts again:" if is_full else "limit reached:"
            note = f" ({limit} {allowed} tokens)"
        write(f"{note}\n")
        if said:
            self.messages = [*messages, {"role": "assistant", "content": said}]

    def _prompt(self, messages: list[Message]) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.llm.chat_tokens([*system, *messages])

    def _fit(self, messages: list[Message]) -> tuple[list[int], int]:
        """The prompt, and the maximum length of the answer; RequestTooLong if there is no room."""
        prompt, config = self._prompt(messages), self.llm.config
        limit = min(config.max_model_len, config.num_blocks * config.block_size + 1)
        if len(prompt) >= limit:
            raise RequestTooLong(
                f"the conversation has {len(prompt):,} tokens (limit {limit:,} including the answer); "
                "/reset starts a new one",
                need=len(prompt) + 1,
                limit=limit,
            )
        return prompt, limit - len(prompt)

    def _stream(
        self, prompt: list[int], params: SamplingParams, write: Write
    ) -> tuple[str, str | None]:
        said, reason, kinds = "", None, set[str]()
        dim, tokenizer = self._write_dim or write, self.llm.get_tokenizer()
        splitter: Splitter = ThinkSplitter(is_open=False)
        if self._reasoning:
            splitter = self._reasoning.literal(tokenizer).splitter(prompt)
        num_cached = self.metrics.totals["cached_tokens"]
        with stopped_by_interrupt(self.llm):
            for delta in self.llm.stream(prompt, params):
                reason = delta.finish_reason
                parts = splitter.push(delta.text)
                if reason is not None:
                    parts += splitter.finish(is_cut=reason != "stop")
                for kind, text, _ in parts:
                    if kind == ANSWER and kinds == {REASONING}:
                        write("\n\n")
                    kinds.add(kind)
                    (write if kind == ANSWER else dim)(text)
                    said += text if kind == ANSWER else ""
        self.num_cached = self.metrics.totals["cached_tokens"] - num_cached
        return said, reason

    def stats(self) -> str:
        """Statistics of the chat, a line each."""
        requests, totals = self.metrics.requests, self.metrics.totals
        if not requests:
            return "(no answers yet)"
        scheduler = self.llm.engine.scheduler
        num_held = scheduler.config.num_blocks - scheduler.num_free
        num_said = len(self._prompt(self.messages)) if self.messages else 0
        lines = {
            "last answer": self._last(requests[-1]),
            "conversation": f"{num_said:,} of {self.llm.config.max_model_len:,} tokens",
            "total": f"{counted(len(requests), 'answer')}, "
            f"{counted(totals['output_tokens'], 'token')}; "
            f"{totals['cached_tokens']:,} of {totals['prompt_tokens']:,} prompt tokens cached",
            "KV cache": f"{num_held} of {scheduler.config.num_blocks:,} blocks used, "
            f"{len(scheduler.kv.pool.index.block_of):,} blocks in the prefix cache",
            "scheduler": f"{counted(len(self.metrics.steps['running']), 'step')}, "
            f"{counted(totals['swaps'] + totals['recomputes'], 'preemption')}, "
            f"{counted(totals['recomputed_tokens'], 'token')} recomputed",
        }
        return "\n".join(f"{name:14}{text}" for name, text in lines.items())

    def _last(self, times: RequestTimeline) -> str:
        if times.first_token < 0:
            return "stopped before the first token"
        rate = (times.num_output - 1) / max(1e-9, times.finished - times.first_token)
        return (
            f"{times.num_output} tokens, first token after {times.first_token - times.arrival:.2f} s, "
            f"then {rate:.1f} tokens/s; {self.num_cached} of {times.num_prompt} prompt tokens cached"
        )


@contextmanager
def stopped_by_interrupt(llm: LLM) -> Iterator[None]:
    """Let Ctrl-C abort the running request at the end of its step, which keeps the cache intact.

    A second Ctrl-C raises KeyboardInterrupt at once.
    """
    num_interrupts = 0

    def interrupt(*_: object) -> None:
        nonlocal num_interrupts
        num_interrupts += 1
        if num_interrupts > 1:
            raise KeyboardInterrupt

    def observe(event: Event) -> None:
        if num_interrupts:
            for id in list(llm.engine.scheduler.requests):
                llm.engine.abort(id)

    before = signal.signal(signal.SIGINT, interrupt)
    llm.engine.observers.append(observe)
    try:
        yield
    finally:
        llm.engine.observers.remove(observe)
        signal.signal(signal.SIGINT, before)
