"""Reasoning models: how each kind writes its reasoning, and which kind a tokenizer belongs to.

Special tokens are not part of a text by default, so tags that are special tokens are replaced by
marks: characters that no other token can produce.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from headway.checks import one_of
from headway.errors import ConfigError
from headway.text import harmony, think
from headway.text.detokenizer import Detokenizer
from headway.text.harmony import HarmonySplitter
from headway.text.split import AUTO, DEEPSEEK_R1, GPT_OSS, QWEN3, REASONING_PARSERS, Splitter
from headway.text.think import ThinkSplitter
from headway.text.tokenizer import Tokenizer

FIRST_MARK = 0xDC00  # half of a surrogate pair, which no bytes decode to
TAIL = 32  # tokens at the end of a prompt, enough for a tag and line breaks
TEXT = "/(?s:.*)/"  # in llguidance's Lark syntax, as the grammars below


class Reasoning(NamedTuple):
    """How one model writes its reasoning."""

    parser: str  # one of REASONING_PARSERS, not AUTO
    tokenizer: Tokenizer  # its Detokenizers write marks
    tags: Mapping[str, str]  # what stands for each tag in a text
    special: Mapping[str, int]  # the ids of the tags that are special tokens

    def literal(self, tokenizer: Tokenizer) -> Reasoning:
        """The same for texts of the model's own tokenizer that include special tokens."""
        return self._replace(tokenizer=tokenizer, tags={tag: tag for tag in self.tags})

    def splitter(
        self, prompt: Sequence[int], names: Collection[str] = (), continued: str | None = None
    ) -> Splitter:
        """A new splitter for an output of this prompt.

        `names` are the functions that may be called. `continued` is the content of the last
        message, if the output continues it.
        """
        end = Detokenizer(self.tokenizer, skip_special=False).push(prompt[-TAIL:]).rstrip()
        if self.parser == GPT_OSS:
            splitter = HarmonySplitter(self.tags, names)
            _, start, header = end.rpartition(self.tags[harmony.START])
            if continued is not None:
                header = f"{self.tags[harmony.CHANNEL]}final{self.tags[harmony.MESSAGE]}"
            splitter.push(header if start or continued is not None else "")
            splitter.skip()
            return splitter
        if continued is not None:
            is_open: bool | None = think.START in continued.rpartition(think.END)[2]
        elif end.endswith(self.tags[think.END]):
            is_open = False
        else:
            is_open = self.parser == DEEPSEEK_R1 or end.endswith(self.tags[think.START]) or None
        return ThinkSplitter(self.tags, is_open)

    def grammar(self, splitter: Splitter) -> str | None:
        """A grammar of the text before the answer, which begins at @answer; None if it has begun."""
        if splitter.is_answering:
            return None
        tag = {tag: f"<[{self.special[tag]}]>" for tag in self.special}
        if self.parser == GPT_OSS:
            channel, message = tag[harmony.CHANNEL], tag[harmony.MESSAGE]
            reasoning = f'{channel} "analysis" {message} TEXT {tag[harmony.END]}'
            reasoning += f' {tag[harmony.START]} "assistant"'
            return f'start: ({reasoning})* {channel} "final" {message} @answer\nTEXT: {TEXT}'
        assert isinstance(splitter, ThinkSplitter), "of a model that is not gpt-oss"
        start, end = (tag.get(each, json.dumps(each)) for each in (think.START, think.END))
        text = f"text: {TEXT} {end}" if think.END in tag else f"text[suffix={end}]: {TEXT}"
        begin = f"{start}? text gap" if splitter.is_open else f"({start} text gap)?"
        return f"start: {begin} @answer\n{text}\ngap: /\\n{{0,2}}/"


@lru_cache(maxsize=8)
def reasoning_of(tokenizer: Tokenizer, parser: str | None) -> Reasoning | None:
    """How a model writes its reasoning; None without a parser, or if `auto` finds no reasoning.

    The harmony format is always parsed: without its tags, a text does not show its messages.
    ConfigError if the vocabulary does not have the tokens that the parser needs.
    """
    if parser is not None:
        one_of("--reasoning-parser", parser, REASONING_PARSERS)
    if parser is None and tokenizer.is_harmony:
        parser = GPT_OSS
    if parser == AUTO:
        parser = _detect(tokenizer)
    if parser is None:
        return None
    names = harmony.TAGS if parser == GPT_OSS else (think.START, think.END)
    ids = {name: tokenizer.id_of(name) for name in names}
    special = {name: id for name, id in ids.items() if id in tokenizer.special_ids}
    if parser == GPT_OSS and (missing := [name for name in names if name not in special]):
        raise ConfigError(
            f"--reasoning-parser {GPT_OSS} needs the special tokens {', '.join(missing)}, which "
            "the model does not have; use another parser, or auto"
        )
    marks = {id: chr(FIRST_MARK + place) for place, id in enumerate(special.values())}
    tags = {name: marks[special[name]] if name in special else name for name in names}
    return Reasoning(parser, tokenizer.with_marks(marks), tags, special)


def _detect(tokenizer: Tokenizer) -> str | None:
    """The parser for a model, by its special tokens and its chat template."""
    if tokenizer.is_harmony:
        return GPT_OSS
    template = tokenizer.chat_template or ""
    if think.START in template:
        return QWEN3
    if think.END in template:  # it removes earlier reasoning, and the model writes no start tag
        return DEEPSEEK_R1
    has_tags = tokenizer.id_of(think.START) is not None and tokenizer.id_of(think.END) is not None
    return QWEN3 if has_tags else None
