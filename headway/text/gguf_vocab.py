"""A tokenizer backend from the vocabulary in the metadata of a GGUF file.

GGUF has no tokenizer.json. It lists tokens and merges, and names how text is split before merging
(`pre`). Supports the two kinds that Llama and Qwen models have: byte-level BPE ("gpt2") and
sentencepiece BPE with byte fallback ("llama").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as before_merging

from headway.errors import ModelError

SPACE = "▁"  # stands for a space in sentencepiece tokens
UNKNOWN, CONTROL, USER_DEFINED = ADDED = 2, 3, 4  # token types; 1 is normal, 6 a single byte


class Split(NamedTuple):
    """How a text is split before merging; merges never cross a split."""

    pattern: str = ""  # empty: that of GPT-2, which is built into the byte-level step
    cuts_digits: bool = False  # each digit is split off before the pattern
    composes: bool = False  # Unicode NFC first
    takes_whole: bool = False  # a piece that is a token becomes that token, regardless of merges
    adds_bos: bool = False  # default for files that do not say


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
LLAMA_3 = _WORDS + r"\p{N}{1,3}|" + _PUNCTUATION_AND_SPACE
QWEN_2 = _WORDS + r"\p{N}|" + _PUNCTUATION_AND_SPACE
# llama.cpp splits all names of a line in the same way. It omits NFC, which the original tokenizers
# apply. "default" means that the file does not know: transformers uses the split of GPT-2 then.
_GROUPS = (
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", Split(cuts_digits=True)),
    ("gpt-2 gpt2 default phi-2 jais trillion granite-docling gigachat mellum exaone4", Split()),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
     Split(LLAMA_3, takes_whole=True, adds_bos=True)),
    ("dbrx smaug-bpe", Split(LLAMA_3)),
    ("qwen2", Split(QWEN_2, composes=True)),
    ("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", Split(QWEN_2)),
)  # fmt: skip
SPLITS = {name: split for names, split in _GROUPS for name in names.split()}


class Vocabulary:
    """The tokenizer part of GGUF metadata; ModelError names a key that is wrong."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata, self._where = metadata, where
        self.kind = self._get("model")
        if self.kind not in ("gpt2", "llama"):
            raise self._error("model", f"is {self.kind!r}; supported are 'gpt2' and 'llama'")
        self.tokens: list[str] = list(self._need("tokens"))
        self.ids = {token: id for id, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(t for id, t in enumerate(self.tokens) if self.ids[t] != id)
            raise self._error("tokens", f"lists {twice!r} twice")

    def id(self, name: str) -> int | None:
        """The id of the bos, eos, eot or unknown token; sentencepiece files may omit it."""
        defaults = {"unknown": 0, "bos": 1, "eos": 2} if self.kind == "llama" else {}
        found = self._get(f"{name}_token_id", defaults.get(name))
        if found is None or 0 <= found < len(self.tokens):
            return None if found is None else int(found)
        raise self._error(f"{name}_token_id", f"is {found}; there are {len(self.tokens)} tokens")

    def named(self, name: str) -> str:
        """The bos, eos, eot or unknown token as text; empty if there is none."""
        id = self.id(name)
        return "" if id is None else self.tokens[id]

    def backend(self) -> Tokenizer:
        """The backend: encoder, decoder, special tokens, and tokens added around a text."""
        split = self._split() if self.kind == "gpt2" else Split(adds_bos=True)
        backend = self._byte_level(split) if self.kind == "gpt2" else self._sentencepiece()
        backend.add_tokens(self._added_tokens())
        before = self.named("bos") if self._get("add_bos_token", split.adds_bos) else ""
        after = self.named("eos") if self._get("add_eos_token", False) else ""
        backend.post_processor = processors.TemplateProcessing(
            single=[*filter(None, [before, "$A", after])],
            special_tokens=[(token, self.ids[token]) for token in {before, after} if token],
        )
        return backend

    def _split(self) -> Split:
        name = self._get("pre")
        if name is None:
            raise self._error(
                "pre", "is missing: the file predates this key and does not say how text is split;"
                " convert the model again",
            )  # fmt: skip
        if name not in SPLITS:
            raise self._error("pre", f"is {name!r}; supported are {', '.join(sorted(SPLITS))}")
        return SPLITS[name]

    def _byte_level(self, split: Split) -> Tokenizer:
        merges = self._checked_merges()
        model = models.BPE(vocab=self.ids, merges=merges, ignore_merges=split.takes_whole)
        backend = Tokenizer(model)
        if split.composes:
            backend.normalizer = normalizers.NFC()
        steps: list[before_merging.PreTokenizer] = []
        if split.cuts_digits:
            steps.append(before_merging.Digits(individual_digits=True))
        if split.pattern:
            steps.append(before_merging.Split(Regex(split.pattern), behavior="isolated"))
        last = before_merging.ByteLevel(add_prefix_space=False, use_regex=not split.pattern)
        backend.pre_tokenizer = before_merging.Sequence([*steps, last])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self) -> Tokenizer:
        """As in transformers for Llama: encoding puts a space before a text, decoding strips it."""
        merges = self._checked_merges() if self._get("merges") else self._merges_by_score()
        model = models.BPE(
            vocab=self.ids, merges=merges, unk_token=self.named("unknown") or None,
            fuse_unk=True, byte_fallback=True,
        )  # fmt: skip
        backend = Tokenizer(model)
        has_prefix = self._get("add_space_prefix", True)
        backend.pre_tokenizer = before_merging.Metaspace(
            replacement=SPACE, prepend_scheme="first" if has_prefix else "never", split=False
        )
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if has_prefix:
            steps.append(decoders.Strip(content=" ", left=1))
        backend.decoder = decoders.Sequence(steps)
        return backend

    def _checked_merges(self) -> list[tuple[str, str]]:
        """The merges of the file, checked because the package panics on unknown tokens."""
        merges: list[tuple[str, str]] = []
        for merge in self._need("merges"):
            left, _, right = merge.partition(" ")
            if left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise self._error(
                    "merges", f"lists {merge!r}, which does not join two tokens into a third"
                )
            merges.append((left, right))
        return merges

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """All pairs that form a token, best score first, as sentencepiece merges them."""
        found: list[tuple[float, int, int, int, str, str]] = []
        for token, score in self._each_with("scores"):
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in self.ids and right in self.ids:
                    order = (-float(score), -len(left), -len(right), self.ids[token])
                    found.append((*order, left, right))
        return [(left, right) for *_, left, right in sorted(found)]

    def _added_tokens(self) -> list[AddedToken]:
        """Tokens that are recognized before a text is split; control tokens are special."""
        kinds = {token: CONTROL for token in map(self.named, ("bos", "eos", "eot")) if token}
        kinds = dict(self._each_with("token_type")) | kinds
        marked = {token: kind for token, kind in kinds.items() if kind in ADDED}
        return [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in marked.items()
        ]

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _need(self, key: str) -> Any:
        found = self._get(key)
        if found is None:
            raise self._error(key, "is missing")
        return found

    def _each_with(self, key: str) -> Iterator[tuple[str, Any]]:
        """Each token with its entry in a list that must be as long as the vocabulary."""
        entries = self._need(key)
        if len(entries) != len(self.tokens):
            raise self._error(key, f"has {len(entries)} entries for {len(self.tokens)} tokens")
        return zip(self.tokens, entries, strict=True)

    def _error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self._where}: tokenizer.ggml.{key} {problem}")
