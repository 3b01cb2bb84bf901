"""Long texts: a lower bound on the number of tokens, and positions where a text can be split.

Both are exact guarantees. `TokenBound.of` and `Cutter.of` return None for a tokenizer for which
they cannot give one. Knows the `tokenizers` package and no requests.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

from tokenizers import Tokenizer as Backend

from headway.errors import InvalidRequest, RequestTooLong
from headway.text.gguf_vocab import LLAMA_3, QWEN_2, SPACE

PIECE = 1 << 14  # minimum characters of a piece
MAX_RUN = 1 << 17  # maximum characters of a piece; encoding takes 100 times its memory
WINDOW = 1 << 14  # characters searched for a cut in one call, which holds the GIL
NFC_SHRINKS = 6  # NFC turns at most 3 characters of at most 4 bytes into one of at least 2 bytes
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
ASCII_CLASSES = tuple(
    letters.encode() for letters in (string.ascii_letters, string.digits, string.punctuation)
)
PUNCTUATION = r"\t\n\r -/:-@\[-`{-~、-。！，：；？"  # includes white space; for a character class
PROBE = "a"  # a text without special tokens
NON_ASCII = bytes(range(128, 256))


def state_of(part: Any) -> dict[str, Any]:
    """The settings of a normalizer, pre-tokenizer or decoder; empty if there is none."""
    state: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return state


def _steps(backend: Backend) -> list[dict[str, Any]]:
    state = state_of(backend.pre_tokenizer)
    steps: list[dict[str, Any]] = state.get("pretokenizers", [state] if state else [])
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBound:
    """For each class of bytes, the largest number of them in one token."""

    most: tuple[tuple[bytes | None, int], ...]  # (class, count); None: all bytes
    lacking: bytes  # bytes without a token in the vocabulary: encoding drops them
    composes: bool  # the text is normalized to NFC first

    @classmethod
    def of(cls, backend: Backend, spelled: list[bytes], is_byte_level: bool) -> Self | None:
        """For a BPE tokenizer that drops no text, else None; `spelled`: the bytes of its tokens."""
        normalizer = state_of(backend.normalizer)
        if type(backend.model).__name__ != "BPE" or not _keeps_text(backend, normalizer):
            return None
        added = backend.get_added_tokens_decoder().values()
        tokens = [*spelled, *(each.content.encode() for each in added)]
        kinds = (None, *ASCII_CLASSES, NON_ASCII)
        lengths = {kind: max(1, *(_count(token, kind) for token in tokens)) for kind in kinds}
        if any(each.lstrip or each.rstrip for each in added):  # they absorb white space
            del lengths[None], lengths[NON_ASCII]
        single = {token for token in spelled if len(token) == 1}
        lacking = bytes(b for b in range(256) if is_byte_level and bytes([b]) not in single)
        if not is_byte_level and any(backend.token_to_id(each) is None for each in BYTE_TOKENS):
            return None  # any number of unknown characters may form one token
        composes = normalizer.get("type") == "NFC"
        return cls(most=tuple(lengths.items()), lacking=lacking, composes=composes)

    def least(self, data: bytes) -> int:
        """A lower bound on the number of tokens of this text."""
        kept = data.translate(None, self.lacking) if self.lacking else data
        if self.composes and not data.isascii():
            whole = dict(self.most).get(None)
            return 0 if whole is None else -(-len(kept) // (whole * NFC_SHRINKS))
        return max(-(-_count(kept, kind) // most) for kind, most in self.most)


def _count(data: bytes, kind: bytes | None) -> int:
    return len(data) if kind is None else len(data) - len(data.translate(None, kind))


def _keeps_text(backend: Backend, normalizer: dict[str, Any]) -> bool:
    """True if no normalizer except NFC, and no pre-tokenizer, can shorten a text."""
    marks_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    for step in normalizer.get("normalizers", [normalizer] if normalizer else []):
        is_alone = step is normalizer and step["type"] == "NFC"
        if not is_alone and step["type"] != "Prepend" and step != marks_spaces:
            return False
    kinds = ("ByteLevel", "Digits", "Metaspace", "Split")
    return all(
        step["type"] in kinds and step.get("behavior") != "Removed" for step in _steps(backend)
    )


@cache
def cut_pattern() -> re.Pattern[str]:
    """Matches a letter or numeral after which every supported split pattern cuts.

    In these patterns, a piece that contains a letter or numeral ends with one, and only white space
    is followed by a lookahead. So a piece ends where punctuation or white space follows a letter or
    numeral, and both sides are split independently of each other. NFC changes neither side.
    """
    old = unicodedata.ucd_3_2_0  # a letter in both versions is one in every version between them
    letters = [
        letter
        for letter in map(chr, range(0x10000))
        if unicodedata.category(letter)[0] in "LN" and old.category(letter)[0] in "LN"
        and unicodedata.is_normalized("NFC", letter)
    ]  # fmt: skip
    return re.compile(f"[{''.join(letters)}](?=[{PUNCTUATION}])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutter:
    """Splits texts so that the tokens of the pieces are the tokens of the whole text."""

    added: tuple[str, ...]  # tokens that the tokenizer finds before it splits the text
    reach: int  # characters of the longest of them
    composes: bool

    @classmethod
    def of(cls, backend: Backend) -> Self | None:
        """For byte-level BPE with a split pattern that `cut_pattern` is valid for; else None."""
        normalizer = state_of(backend.normalizer)
        added = list(backend.get_added_tokens_decoder().values())
        composes = normalizer == {"type": "NFC"}
        if type(backend.model).__name__ != "BPE" or not _is_known_split(_steps(backend)):
            return None
        if normalizer and not composes:
            return None
        if composes and any(each.normalized and not each.content.isascii() for each in added):
            return None
        texts = tuple(each.content for each in added)
        return cls(added=texts, reach=max(map(len, texts), default=0), composes=composes)

    def pieces(self, text: str) -> Iterator[str]:
        """The pieces in order; a piece is longer than `PIECE` only if no safe cut was found."""
        start = 0
        while len(text) - start > PIECE:
            end = self._next_cut(text, start + PIECE)
            yield text[start:end]
            start = end
        yield text[start:]

    def _next_cut(self, text: str, start: int) -> int:
        while start < len(text):
            found = cut_pattern().search(text, start, start + WINDOW)
            if found is None:
                start += WINDOW - 1  # a cut needs two characters
            elif self._is_free(text, found.end()):
                return found.end()
            else:
                start = found.end()
        return len(text)

    def _is_free(self, text: str, cut: int) -> bool:
        """True if no added token spans or touches this position."""
        around = text[max(0, cut - self.reach) : cut + self.reach]
        forms = [around, unicodedata.normalize("NFC", around)] if self.composes else [around]
        return not any(token in form for form in forms for token in self.added)


def _is_known_split(steps: list[dict[str, Any]]) -> bool:
    """True for the splits of GPT-2, Llama 3 and Qwen, also with digits split off first."""
    match steps:
        case [{"type": "Digits", "individual_digits": True}, *rest]:
            return _is_known_split(rest)
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return True
        case [
            {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": regex}},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return regex in (LLAMA_3, QWEN_2)
    return False


def check_run(piece: str) -> None:
    """InvalidRequest for a piece that is too long to encode."""
    if len(piece) > MAX_RUN:
        raise InvalidRequest(
            f"the text has {len(piece)} characters without the end of a word or number; the limit "
            f"is {MAX_RUN}"
        )


def frame_of(backend: Backend) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer adds before and after a text."""
    plain = backend.encode(PROBE, add_special_tokens=False).ids
    framed = backend.encode(PROBE, add_special_tokens=True).ids
    num_added = len(framed) - len(plain)
    start = next(at for at in range(num_added + 1) if framed[at : at + len(plain)] == plain)
    return framed[:start], framed[start + len(plain) :]


def check_num_tokens(count: int, max_tokens: int | None, *, is_exact: bool = False) -> None:
    """RequestTooLong if `count` exceeds the limit. Unless `is_exact`, it is a lower bound."""
    if max_tokens is not None and count > max_tokens:
        found = f"{count}" if is_exact else f"at least {count}"
        problem = f"the text has {found} tokens; the limit is {max_tokens}"
        raise RequestTooLong(f"{problem}; send a shorter text", need=count, limit=max_tokens)
