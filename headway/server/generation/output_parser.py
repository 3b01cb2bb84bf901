"""Parses the output of one sample: its reasoning, text and tool calls, and the kinds of its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set

from headway.sampling_params import TokenLogprobs
from headway.server.generation.prompt_runs import Delta
from headway.server.http.offload import yield_gil
from headway.server.toolcalls.formats import CallDelta, OutputPiece, ReasoningDelta
from headway.server.toolcalls.parser import JsonScanner, ToolCallParser
from headway.text.detokenizer import Detokenizer
from headway.text.split import ANSWER, CALL, REASONING, Splitter


class OutputParser:
    """All of the output is text, unless there is a parser of tool calls."""

    has_reasoning = False
    num_reasoning_tokens = 0

    def __init__(self, tools: ToolCallParser | None) -> None:
        self._tools = tools
        self.logprobs: list[TokenLogprobs] = []  # of the answer, as far as the last push decided it

    def work(self, delta: Delta) -> int:
        """The size of the work of `push`, for `offload`: reasoning is read token by token."""
        return len(delta.text) if self.has_reasoning else 0

    @property
    def is_plain(self) -> bool:
        """Whether the output is shown as it is."""
        return self._tools is None and not self.has_reasoning

    def push(self, delta: Delta) -> list[OutputPiece]:
        """The reasoning, the text and the parts of tool calls that a delta adds."""
        self.logprobs = delta.logprobs
        return self._push(delta.text, delta.finish_reason)

    def _push(self, text: str, finish_reason: str | None) -> list[OutputPiece]:
        if self._tools is None:
            return [text] if text else []
        pieces = self._tools.push(text)
        if finish_reason == "length":
            pieces += self._tools.cut_off()
        elif finish_reason is not None:
            pieces += self._tools.finish()
        return pieces

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish reason, or "tool_calls" if the output ended after a call."""
        return "tool_calls" if self._num_calls and reason == "stop" else reason

    @property
    def _num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls


class ReasoningOutputParser(OutputParser):
    """Parses tool calls in the answer only, or takes those that the splitter finds.

    `new_id` makes the ids of the latter.
    """

    has_reasoning = True

    def __init__(
        self,
        tools: ToolCallParser | None,
        splitter: Splitter,
        tokens: TokenKinds,
        new_id: Callable[[], str],
    ) -> None:
        super().__init__(tools)
        self._splitter, self._tokens, self._new_id = splitter, tokens, new_id
        self._num_split = 0  # calls
        self._scanner = JsonScanner()  # of the arguments of the last one

    @property
    def num_reasoning_tokens(self) -> int:  # type: ignore[override]
        return self._tokens.num_reasoning

    @property
    def _num_calls(self) -> int:
        return super()._num_calls + self._num_split

    def push(self, delta: Delta) -> list[OutputPiece]:
        reason, pieces = delta.finish_reason, list[OutputPiece]()
        parts = self._splitter.push(delta.text)
        if reason is not None:
            parts += self._splitter.finish(is_cut=reason == "length")
        for part in parts:
            if part.kind == REASONING:
                pieces.append(ReasoningDelta(part.text))
            elif part.kind == ANSWER:
                pieces += self._push(part.text, None)
            else:
                pieces += self._call(part.name, part.text)
        if reason is not None:
            pieces += self._push("", reason)
        self._tokens.add(delta.num_tokens, delta.logprobs)
        self.logprobs = self._tokens.take(self._splitter, is_end=reason is not None)
        return pieces

    def _call(self, name: str, arguments: str) -> list[OutputPiece]:
        if name:
            self._num_split += 1
            self._scanner = JsonScanner()
            return [CallDelta(self._num_split - 1, "", self._new_id(), name)]
        if self._scanner.is_over:
            return []
        return [CallDelta(self._num_split - 1, self._scanner.feed(arguments)[0])]


class TokenKinds:
    """Counts the tokens of the reasoning, and finds the log probabilities of the answer's.

    A token is of the kind of its last character. `tokens` are those of a sample, and grow.
    """

    def __init__(self, tokens: Sequence[int], detokenizer: Detokenizer, hidden: Set[int]) -> None:
        self.num_reasoning = 0
        self._tokens, self._detokenizer, self._hidden = tokens, detokenizer, hidden
        self._num_added, self._length = 0, 0  # tokens, and the characters that they spell
        self._unspelled: list[TokenLogprobs | None] = []  # tokens of an incomplete character
        self._pending: deque[tuple[int, TokenLogprobs | None]] = deque()  # by the end in the text
        self._place = 0  # in the splitter's kinds

    def add(self, num_tokens: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the tokens up to this number; `logprobs` are those of the ones that are shown."""
        entries = iter(logprobs)
        for token in self._tokens[self._num_added : num_tokens]:
            is_hidden = token in self._hidden
            text = "" if is_hidden else self._detokenizer.push([token])
            self._unspelled.append(None if is_hidden else next(entries, None))
            if text:
                self._length += len(text)
                self._pending.extend((self._length, entry) for entry in self._unspelled)
                self._unspelled.clear()
            yield_gil()
        self._num_added = num_tokens

    def take(self, splitter: Splitter, *, is_end: bool) -> list[TokenLogprobs]:
        """Decide the kinds of tokens; returns the log probabilities of the answer."""
        if is_end:
            self._pending.extend((self._length + 1, entry) for entry in self._unspelled)
            self._unspelled.clear()
        found, kinds = list[TokenLogprobs](), splitter.kinds
        while self._pending and (is_end or self._pending[0][0] <= splitter.num_read):
            end, entry = self._pending.popleft()
            while self._place + 1 < len(kinds) and kinds[self._place + 1][0] < end:
                self._place += 1
            kind = kinds[self._place][1]
            self.num_reasoning += kind == REASONING
            if kind in (ANSWER, CALL) and entry is not None:
                found.append(entry)
        return found
