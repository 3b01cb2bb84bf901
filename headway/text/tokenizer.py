"""Text to token ids and back, from the tokenizer files of a Hugging Face folder or a GGUF file.

The `tokenizers` package (the backend) does the encoding. Knows nothing of requests, of streamed
text (detokenizer.py) or of conversations (chat_template.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headway.errors import InvalidRequest, ModelError, find_lone_surrogate
from headway.text import harmony
from headway.text.gguf_vocab import SPACE, Vocabulary
from headway.text.long_text import (
    Cutter,
    TokenBound,
    check_num_tokens,
    check_run,
    cut_pattern,
    frame_of,
    state_of,
)

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
SHORT = 1000  # characters; more are encoded by a call that releases the GIL
SENTENCEPIECE = [  # the decoder of Llama 2 and similar models, without its Strip step
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]


class Piece(NamedTuple):
    spelled: bytes
    is_fallback: bool  # a byte-fallback token: a run of them is decoded as a whole, or not at all
    text: str | None = None  # unless it is a byte-fallback token or has partial characters


NOTHING = Piece(b"", True)  # an id outside the vocabulary; it does not end a run of bytes


class Tokenizer:
    """The tokenizer of one model. `bos` and `eos` are tokens as text; empty if there is none."""

    def __init__(
        self, backend: Backend, *, bos: str = "", eos: str = "", more_eos_ids: Iterable[int] = (),
        chat_template: str | None = None, where: str = "",
    ) -> None:  # fmt: skip
        backend.no_truncation()  # a prompt that is too long is refused, never truncated
        backend.no_padding()
        self._backend, self._pieces = backend, dict[int, Piece]()
        self.bos, self.eos, self.chat_template = bos, eos, chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        eos_id = self.id_of(eos) if eos else None
        self.eos_ids = frozenset([*more_eos_ids, *([] if eos_id is None else [eos_id])])
        # Whether messages are in the harmony format, which has several ends.
        self.is_harmony = all(self.id_of(tag) in self.special_ids for tag in harmony.TAGS)
        if self.is_harmony:
            ends = map(self.id_of, harmony.OUTPUT_ENDS)
            self.eos_ids |= frozenset(end for end in ends if end is not None)
        # How many leading spaces decode() strips; None: a byte-level tokenizer, like GPT-2's.
        self.num_stripped = _num_stripped(backend, where)
        self._cutter = Cutter.of(backend)

    @property
    def bos_id(self) -> int | None:
        return self.id_of(self.bos) if self.bos else None

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(
        self, text: str, *, special: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """The ids of a text. Special tokens that occur in the text are always recognized.

        `special` adds the tokens that the tokenizer puts around a text (usually BOS, or nothing).
        RequestTooLong if there are more than `max_tokens`; a very long text is then not encoded.
        """
        _check_text(text)
        if len(text) <= SHORT:
            ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        else:
            if max_tokens is not None and self._bound is not None:
                check_num_tokens(self._bound.least(text.encode()), max_tokens)
            ids = self._encode_long(text, special, max_tokens)
        check_num_tokens(len(ids), max_tokens, is_exact=True)
        return ids

    def _encode_long(self, text: str, special: bool, max_tokens: int | None) -> list[int]:
        """Encode in pieces if that gives the same ids; releases the GIL."""
        if self._cutter is None:
            return self._encode_piece(text, special)
        before, after = frame_of(self._backend) if special else ([], [])
        ids = [*before]
        for piece in self._cutter.pieces(text):
            if max_tokens is not None:
                check_run(piece)
            ids += self._encode_piece(piece, special=False)
            check_num_tokens(len(ids), max_tokens)
        return ids + after

    def _encode_piece(self, text: str, special: bool) -> list[int]:
        """Encode with a call that releases the GIL, unlike the backend's `encode`."""
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = found.ids
        return ids

    def prepare(self) -> None:
        """Compute ahead what the first long text needs."""
        _ = self._bound, cut_pattern()

    @cached_property
    def _bound(self) -> TokenBound | None:
        is_byte_level = self.num_stripped is None
        if is_byte_level:
            spelled = [_spell_bytes(token).spelled for token in self._backend.get_vocab()]
        else:  # a space is one byte in a text and three in a token; three keeps the bound safe
            spelled = [token.encode() for token in self._backend.get_vocab()]
        return TokenBound.of(self._backend, spelled, is_byte_level)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of all ids together; ids outside the vocabulary are skipped."""
        if len(ids) <= SHORT:
            return self._backend.decode(ids, skip_special_tokens=skip_special)
        # Releases the GIL, unlike the backend's `decode`.
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special)
        return text

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it."""
        return self._backend.token_to_id(token)

    def piece(self, id: int) -> str:
        """The text of a single token with its leading space; U+FFFD for partial characters."""
        return self.spell(id).spelled.decode("utf-8", "replace")

    def spell(self, id: int) -> Piece:
        """The bytes of one token; a sequence of them is decoded as UTF-8."""
        piece = self._pieces.get(id)
        if piece is None:
            spell = _spell_bytes if self.num_stripped is None else _spell_text
            token = self._backend.id_to_token(id)
            piece = self._pieces[id] = NOTHING if token is None else spell(token)
        return piece

    def with_chat_template(self, template: str) -> Tokenizer:
        """This tokenizer with another chat template."""
        other = copy(self)
        other.chat_template = template
        return other

    def with_marks(self, marks: Mapping[int, str]) -> Tokenizer:
        """This tokenizer for a Detokenizer that writes special tokens as these texts."""
        other = copy(self)
        other.special_ids = self.special_ids - marks.keys()
        other._pieces = {id: Piece(b"", False, text) for id, text in marks.items()}
        return other


def _check_text(text: str) -> None:
    """InvalidRequest if a text contains half of a surrogate pair."""
    place = find_lone_surrogate(text)
    if place is not None:
        raise InvalidRequest(
            f"the text contains {text[place]!r} at character {place}, half of a surrogate pair; "
            "decode the text as UTF-8 or UTF-16 before sending it"
        )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, others count from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


ALPHABET = _byte_alphabet()


def _spell_bytes(token: str) -> Piece:
    try:
        return _piece(bytes(ALPHABET[letter] for letter in token))
    except KeyError:  # an added token, stored as plain text
        return _piece(token.encode())


def _spell_text(token: str) -> Piece:
    if found := BYTE_TOKEN.fullmatch(token):
        return Piece(bytes.fromhex(found[1]), True)
    return _piece(token.replace(SPACE, " ").encode())


def _piece(spelled: bytes) -> Piece:
    try:
        return Piece(spelled, False, spelled.decode())
    except UnicodeDecodeError:
        return Piece(spelled, False)


def _num_stripped(backend: Backend, where: str) -> int | None:
    """The leading spaces that the backend's decoder strips: see Tokenizer.num_stripped."""
    decoder = state_of(backend.decoder)
    match steps := decoder.get("decoders", [decoder]):
        case [{"type": "ByteLevel"}]:
            return None
        case [*first, {"type": "Strip", "content": " ", "start": start, "stop": 0}]:
            if first == SENTENCEPIECE:
                return int(start)
        case _ if steps == SENTENCEPIECE:
            return 0
    raise ModelError(
        f"{where or 'this tokenizer'} has the decoder {json.dumps(steps)}; supported are"
        " byte-level (GPT-2, Llama 3, Qwen) and sentencepiece with byte fallback (Llama 2, Mistral)"
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, from its tokenizer.json and the files beside it."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path} is missing; a folder with only a sentencepiece tokenizer.model must be"
            " converted first: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises no narrower class
        raise ModelError(f"{path} is not a tokenizer: {error}") from error
    config = _read(folder, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older folders have a separate file
        config |= _read(folder, "special_tokens_map.json")
    _add_tokens(backend, config)
    generation = _read(folder, "generation_config.json") or _read(folder, "config.json")
    ends = generation.get("eos_token_id")
    return Tokenizer(
        backend, bos=_content(config.get("bos_token")), eos=_content(config.get("eos_token")),
        more_eos_ids=ends if isinstance(ends, list) else [] if ends is None else [ends],
        chat_template=_template(folder, config), where=str(path),
    )  # fmt: skip


def _read(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object in a file of the folder; empty if there is no such file."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} contains a {type(found).__name__}, not an object")
    return found


def _content(token: Any) -> str:
    """The text of a token that is given as a string, as an object with options, or as null."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _add_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Add tokens that the config names and tokenizer.json does not, as transformers does."""
    listed = config.get("added_tokens_decoder") or {}
    backend.add_tokens([AddedToken(**listed[id]) for id in sorted(listed, key=int)])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = [value for key, value in config.items() if key.endswith("_token")]
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named += more.values() if isinstance(more, dict) else more
    texts = [text for text in map(_content, named) if text and text not in known]
    backend.add_tokens([AddedToken(text, special=True) for text in texts])


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: from its own file, or from the config, as one of several or alone."""
    path, written = folder / "chat_template.jinja", config.get("chat_template")
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if isinstance(written, list):
        written = {entry["name"]: entry["template"] for entry in written}.get("default")
    return written if isinstance(written, str) else None


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str = "") -> Tokenizer:
    """The tokenizer in the metadata of a GGUF file; `where` names the file in errors."""
    vocabulary = Vocabulary(metadata, where or "the GGUF metadata")
    end_of_turn = vocabulary.id("eot")
    return Tokenizer(
        vocabulary.backend(), bos=vocabulary.named("bos"), eos=vocabulary.named("eos"),
        more_eos_ids=[] if end_of_turn is None else [end_of_turn],
        chat_template=metadata.get("tokenizer.chat_template"), where=where,
    )  # fmt: skip
