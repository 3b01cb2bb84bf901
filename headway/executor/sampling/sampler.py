"""Chooses the next token of every running request, and keeps the state that later tokens need.

Most requests are sampled together, by their row in the `settings` array. A request with masks,
biases or penalties also has a `LogitsProcessor`, and one with a grammar has a matcher (grammar.py).
draw.py draws tokens from logits.

Shapes: n rows of a batch, v tokens of the vocabulary.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.executor.sampling.draw import SETTINGS_DTYPE, SamplingSettings, choose, index
from headway.executor.sampling.grammar import Grammars
from headway.executor.sampling.logprobs import compute_logprobs
from headway.plan import Rows
from headway.request import Request
from headway.sampling_params import COLDEST, Sampling, TokenLogprobs, sampling_of


class Sampler:
    """Chooses tokens for the requests that have a row."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: str | torch.device = "cpu",
        choose: Callable[[Tensor, Rows], Tensor] | None = None,
    ) -> None:
        """`choose` draws the tokens of rows from logits [n, v]; None for draw.py."""
        self.vocab_size = vocab_size
        self._choose = choose or self._choose_by_settings
        self.device = torch.device(device)
        self.settings: SamplingSettings = np.zeros(num_rows, dtype=SETTINGS_DTYPE)
        self._others: set[int] = set()  # rows that are not greedy, or have edits or logprobs
        self.processors: dict[int, LogitsProcessor] = {}  # by row, of the requests that need one
        self.grammars = Grammars(vocab_size)
        self.logprobs: dict[int, TokenLogprobs] = {}

    def add_request(self, row: int, request: Request, tokens: Sequence[int]) -> None:
        """Assign a row to a request whose known `tokens` are its prompt and output so far."""
        sampling = sampling_of(request.id, request.params.sampling)
        num_generated = len(tokens) - request.num_prompt
        self.processors.pop(row, None)
        processor = LogitsProcessor(request, sampling, tokens, self.vocab_size, self.device)
        if not processor.is_done(num_generated):
            self.processors[row] = processor
        self.grammars.add_request(row, request, sampling, tokens[request.num_prompt :])
        self.settings[row] = (
            sampling.temperature,
            sampling.top_k if 0 < sampling.top_k < self.vocab_size else 0,
            sampling.top_p,
            sampling.min_p,
            sampling.seed_of(request.sample),
            num_generated,
            -1 if sampling.logprobs is None else sampling.logprobs,
            row in self.processors,
        )
        self._others.discard(row)
        if sampling.temperature >= COLDEST or self.needs_host(row):
            self._others.add(row)

    def takes_best(self, rows: Rows) -> bool:
        """Whether the next token of each row is the first with the highest logit, and only that.

        Then no state changes with the token, and `sample` need not be called.
        """
        return not (self._others and self._others.intersection(rows.tolist()))

    def sample(self, logits_nv: Tensor, rows: Rows) -> Tensor:
        """Choose the next token of each row and record it as generated. [n] int64."""
        settings = self.settings[rows]
        edited = np.flatnonzero(settings["has_processor"])
        choice_nv = logits_nv
        if edited.size:
            choice_nv = logits_nv.to(torch.float32, copy=True)
            for at, row in zip(edited.tolist(), rows[edited].tolist(), strict=True):
                self.processors[row].apply(choice_nv[at], int(settings["num_generated"][at]))
            self.grammars.mask(choice_nv, logits_nv, rows)
        chosen_n = self._choose(choice_nv, rows).long()
        self.settings["num_generated"][rows] += 1
        if edited.size:
            self._remember(rows[edited], chosen_n[index(edited, chosen_n)])
        self.logprobs = {}
        if (settings["num_logprobs"] >= 0).any():
            self._store_logprobs(logits_nv, chosen_n, rows, settings["num_logprobs"])
        return chosen_n

    def _choose_by_settings(self, logits_nv: Tensor, rows: Rows) -> Tensor:
        return choose(logits_nv.float(), self.settings[rows])

    def needs_host(self, row: int) -> bool:
        """Whether the next token needs more than the row's logits and settings."""
        return bool(self.settings["has_processor"][row] or self.settings["num_logprobs"][row] >= 0)

    def take_logprobs(self) -> dict[int, TokenLogprobs]:
        """Return and clear the logprobs of the latest call, by row, of rows that want them."""
        taken, self.logprobs = self.logprobs, {}
        return taken

    def _remember(self, rows: Rows, chosen: Tensor) -> None:
        for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
            self.processors[row].remember(token)
            self.grammars.remember(row, token)
            if self.processors[row].is_done(int(self.settings["num_generated"][row])):
                del self.processors[row]
                self.settings["has_processor"][row] = False

    def _store_logprobs(
        self, logits_nv: Tensor, chosen_n: Tensor, rows: Rows, num_logprobs: npt.NDArray[np.int64]
    ) -> None:
        for num_top in np.unique(num_logprobs[num_logprobs >= 0]).tolist():
            wanting = np.flatnonzero(num_logprobs == num_top)
            at = index(wanting, chosen_n)
            found = compute_logprobs(logits_nv[at], chosen_n[at], num_top)
            self.logprobs.update(zip(rows[wanting].tolist(), found, strict=True))


class LogitsProcessor:
    """Edits the logits of one request, and keeps the parts of its output that this needs."""

    __slots__ = ("allowed", "bad_words", "counts", "min_tokens", "prompt", "sampling", "stops", "tail")  # fmt: skip

    def __init__(
        self,
        request: Request,
        sampling: Sampling,
        tokens: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.sampling = sampling
        self.min_tokens = request.params.min_tokens
        # Tokens outside the vocabulary need no mask and have no logit.
        self.stops = frozenset(token for token in request.stops if 0 <= token < vocab_size)
        self.bad_words = [word for word in sampling.bad_words if max(word) < vocab_size]
        self.allowed = _ids(sampling.allowed_tokens or ()).to(device)
        prompt, output = tokens[: request.num_prompt], tokens[request.num_prompt :]
        self.prompt = _ids(set(prompt) if sampling.has_penalties else ()).to(device)
        self.counts = Counter(output)
        longest = max((len(word) for word in self.bad_words), default=1)
        self.tail = deque(output, maxlen=longest - 1)  # the last tokens of the output

    def remember(self, token: int) -> None:
        self.counts[token] += 1
        self.tail.append(token)

    def is_done(self, num_generated: int) -> bool:
        """Whether no later token needs an edit."""
        return not self.sampling.edits_logits and num_generated >= self.min_tokens

    def apply(self, logits_v: Tensor, num_generated: int) -> None:
        """Edit the logits of the next token in place, in vLLM's order."""
        device = logits_v.device
        if self.sampling.allowed_tokens is not None:
            kept = logits_v[self.allowed]
            logits_v.fill_(-torch.inf)
            logits_v[self.allowed] = kept
        if banned := self._banned(num_generated, len(logits_v)):
            logits_v[_ids(banned).to(device)] = -torch.inf
        if bias := self.sampling.logit_bias:
            logits_v[_ids(bias).to(device)] += _numbers(bias.values()).to(device)
        if self.sampling.has_penalties:
            self._penalise(logits_v)

    def _banned(self, num_generated: int, vocab_size: int) -> set[int]:
        """Tokens that must not come next.

        A request may ban every token that it allows. A ban that would leave no token is dropped
        for this step: bad words first, then stop tokens before min_tokens.
        """
        stops = self.stops if num_generated < self.min_tokens else frozenset()
        banned: set[int] = set()
        for more in (stops, self._word_ends()):
            allowed, union = self.sampling.allowed_tokens, banned | more
            leaves_none = len(union) == vocab_size if allowed is None else allowed <= union
            if not leaves_none:
                banned = union
        return banned

    def _word_ends(self) -> set[int]:
        """Last tokens of the bad words whose other tokens end the output; prompts do not count."""
        tail = list(self.tail)
        return {last for *start, last in self.bad_words if start == tail[len(tail) - len(start) :]}

    def _penalise(self, logits_v: Tensor) -> None:
        sampling, device = self.sampling, logits_v.device
        output, counts = _ids(self.counts).to(device), _numbers(self.counts.values()).to(device)
        if sampling.repetition_penalty != 1.0:
            seen = torch.cat((self.prompt, output))  # a duplicate is written twice, the same value
            values, penalty = logits_v[seen], sampling.repetition_penalty
            logits_v[seen] = torch.where(values > 0, values / penalty, values * penalty)
        logits_v[output] -= sampling.frequency_penalty * counts
        logits_v[output] -= sampling.presence_penalty


def _ids(ids: Collection[int]) -> Tensor:
    return torch.from_numpy(np.fromiter(ids, dtype=np.int64, count=len(ids)))


def _numbers(numbers: Collection[float]) -> Tensor:
    return torch.from_numpy(np.fromiter(numbers, dtype=np.float32, count=len(numbers)))
