"""The tokenizer agrees with the original one, from Hugging Face folders and GGUF files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from headway.errors import InvalidRequest, ModelError
from headway.model.weights.gguf import read_metadata
from headway.text.gguf_vocab import SPLITS, Vocabulary
from headway.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

CORPUS = [
    "",
    " ",
    "Hello world! It's the model's 1st test; they'll, I'D, we've.",
    "def f(x):\n    if x == 10:\n\t\treturn  3.14  # 42\n\n\n    pass\n",
    'int main(void) {\n\tprintf("%d\\n", 0x1F);\r\n\treturn -1;\r\n}',
    '{\n\t"key": [1, 22, 333, 4444],\t\t"nested": {"a": null}\n}',
    "我们今天去北京，明天回来。２０２４年",
    "今日はいい天気ですね。カタカナと漢字、１２３",
    "안녕하세요, 세계! 한국어 문장입니다.",
    "مرحبا بالعالم ١٢٣ — كيف حالك؟",
    "नमस्ते दुनिया १२३, क्या हाल है?",
    "Привет, мир! Ёлка №5.",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪🇯🇵 e\u0301 o\u0302\u0323 Å Å",
    "a" + " " * 37 + "b" + "\n" * 9 + "\t" * 5 + "c  \n \t 7",
    "1234567890 0.5 1,000,000 2024-01-31 x1y22 ½ ²³ ①② Ⅻ",
    "https://example.org/a_b/c-d?e=f&g=%20h#i user@host.net",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><repo_name>x<|im_start|",
    "\x00\x01\x04\x06\x13\x1b[0m\x7f\x85\xa0\u200b\u2028\ufeff\ufffd\uffff",
    "don't DON'T 'tis ''' '\u017f",
]  # fmt: skip
relaxed = settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
texts = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=" \n\t\r019½²٣a'slé中<|>_.", max_size=30),
    st.lists(st.sampled_from([*CORPUS, "<|im_end|>", "  ", "\n\n", "7"]), max_size=4).map("".join),
)


@cache
def bundled(path: Path) -> Tokenizer:
    """The tokenizer of the bundled model, built once."""
    return tokenizer_from_gguf(read_metadata(path), path.name)


@cache
def transformers_bundled(path: Path) -> Any:
    """The same file read by transformers; AutoTokenizer returns this class too, but slower."""
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
    return fast.from_pretrained(str(path.parent), gguf_file=path.name)


@cache
def documented(path: Path) -> Backend:
    """The tokenizer of SmolLM from parts of the package: digits, then the split of GPT-2."""
    metadata = read_metadata(path)
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:17]])
    return backend


def is_numeral(letter: str) -> bool:
    return unicodedata.category(letter).startswith("N")


def cut_at_numerals(text: str) -> list[str]:
    """Each numeral, and the text between numerals."""
    pieces = [""]
    for letter in text:
        if is_numeral(letter):
            pieces += [letter, ""]
        else:
            pieces[-1] += letter
    return pieces


def byte_level_metadata(pre: str | None, **more: Any) -> dict[str, Any]:
    """A small byte-level vocabulary in GGUF form: all bytes, some merges, five more tokens."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    merges = [
        "h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2", "12 3", "3 4", "' s", "' S",
        "Ġ Ġ", "Ċ Ċ", "Ġ 1", "Ã ©", "Ì ģ", "e Ì", "eÌ ģ", "! Ċ", "a b", "b c",
    ]  # fmt: skip
    made = [merge.replace(" ", "") for merge in merges]
    extra = ["<s>", "</s>", "<think>", "abc", "une ide\u0301e"]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*sorted(letters), *made, *extra],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * (256 + len(made)) + [3, 3, 4, 1, 4],
        "tokenizer.ggml.bos_token_id": 256 + len(made),
        "tokenizer.ggml.eos_token_id": 257 + len(made),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }  # fmt: skip


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """A small sentencepiece vocabulary in GGUF form: scores, and byte-fallback tokens."""
    pieces = ["▁t", "he", "▁the", "in", "ing", "▁a", "re", "er", "▁there", "th", "▁th", "ll", "ell"]
    pieces += ["▁h", "▁he", "▁hell", "▁hello", "▁▁", "▁▁▁▁", "or", "▁w", "▁wor", "▁worl", "▁world"]
    letters = ["▁", *"etaoinshrdluwgc", "é", "中", "."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    num_controls = len(tokens)
    tokens += [*pieces, *letters]
    scores = [0.0] * num_controls + [-float(rank) for rank in range(len(pieces) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }  # fmt: skip


@pytest.mark.parametrize("text", CORPUS)
def test_the_bundled_model_encodes_like_its_documented_parts(smollm2: Path, text: str) -> None:
    expected = documented(smollm2).encode(text).ids
    assert bundled(smollm2).encode(text) == expected
    assert bundled(smollm2).encode(text, special=False) == expected


@relaxed
@given(text=texts)
def test_any_text_is_encoded_like_the_documented_parts_do(smollm2: Path, text: str) -> None:
    assert bundled(smollm2).encode(text) == documented(smollm2).encode(text).ids


@relaxed
@given(text=texts)
@example(text="\n".join(CORPUS))
def test_text_between_numerals_is_encoded_as_in_transformers(smollm2: Path, text: str) -> None:
    """transformers omits the split at digits for GGUF; with that split, all ids are equal."""
    reference = transformers_bundled(smollm2)
    pieces = [piece for piece in cut_at_numerals(text) if piece]
    expected = [id for piece in pieces for id in reference.encode(piece)]
    assert bundled(smollm2).encode(text) == expected
    without = "".join(letter for letter in text if not is_numeral(letter))
    assert bundled(smollm2).encode(without) == reference.encode(without)


def test_spaces_before_a_digit_stay_together(smollm2: Path) -> None:
    """Differs from transformers' GGUF reader, where GPT-2's split joins a space and a digit."""
    tokenizer, reference = bundled(smollm2), transformers_bundled(smollm2)
    pieces = [tokenizer.piece(id) for id in tokenizer.encode("x:\n    1")]
    assert pieces == ["x", ":", "\n    ", "1"]
    assert reference.convert_ids_to_tokens(reference.encode("x:\n    1"))[2:] == ["ĊĠĠĠ", "Ġ", "1"]


@relaxed
@given(ids=st.lists(st.integers(0, 49200), max_size=30), skip=st.booleans())
def test_any_ids_are_decoded_as_in_transformers(smollm2: Path, ids: list[int], skip: bool) -> None:
    reference = transformers_bundled(smollm2).decode(
        ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )
    assert bundled(smollm2).decode(ids, skip_special=skip) == reference


def test_the_bundled_model_has_the_eos_tokens_that_transformers_reads(smollm2: Path) -> None:
    tokenizer, reference = bundled(smollm2), transformers_bundled(smollm2)
    assert tokenizer.eos_ids == {reference.eos_token_id} == {2}
    assert (tokenizer.bos_id, tokenizer.bos) == (reference.bos_token_id, reference.bos_token)
    assert tokenizer.vocab_size == len(reference) == 49152
    added = reference.added_tokens_decoder
    assert tokenizer.special_ids == {id for id, token in added.items() if token.special}
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.chat_template == reference.chat_template
    assert tokenizer.id_of("<|im_end|>") == 2
    assert tokenizer.id_of("no such token") is None


@relaxed
@given(text=texts)
def test_encoding_drops_only_bytes_without_a_token(smollm2: Path, text: str) -> None:
    tokenizer = bundled(smollm2)
    lost = {chr(code) for code in (0x04, 0x06, 0x13, 0x14, 0x16, 0x1D)}
    kept = "".join(c for c in text if c not in lost and not 0x40000 <= ord(c) < 0xC0000)
    assert tokenizer.decode(tokenizer.encode(kept), skip_special=False) == kept


def test_half_a_surrogate_pair_is_refused_with_its_position(smollm2: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"the text contains '\\ud83d' at character 3"):
        bundled(smollm2).encode("abc\ud83d")


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def named_reference(pre: str) -> Backend:
    """The split with this name, from parts of the package and the published patterns."""
    metadata = byte_level_metadata(pre)
    ids = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab=ids, merges=merges, ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt_2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    pattern = LLAMA_3 if pre in ("llama-bpe", "smaug-bpe") else LLAMA_3.replace("{1,3}", "")
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    steps = {"gpt-2": [gpt_2], "smollm": [digits, gpt_2]}.get(pre, [split, byte_level])
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.add_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<think>", "une ide\u0301e")]
    )
    return backend


NAMED = ("gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "stablelm2")
REFERENCES = {pre: named_reference(pre) for pre in NAMED}
SMALL = {pre: tokenizer_from_gguf(byte_level_metadata(pre, add_bos_token=False)) for pre in NAMED}
small_texts = st.one_of(
    texts, st.text(alphabet="hello wor123456789's!\n\r\te\u0301é<think>abc½", max_size=30)
)


@pytest.mark.parametrize("pre", NAMED)
@settings(deadline=None, max_examples=100)
@given(text=small_texts)
@example(
    text="abc ab'S 1234 12345  e\u0301 hello\r\n\n! \n x<think>abc</s>une ide\u0301e une id\u00e9e"
)
def test_a_named_split_equals_its_published_parts(pre: str, text: str) -> None:
    assert SMALL[pre].encode(text) == REFERENCES[pre].encode(text).ids


@settings(deadline=None, max_examples=100)
@given(text=small_texts)
@example(text="e\u0301 12 'S hello\n\n  1")
def test_qwen_files_split_as_the_qwen_tokenizer_of_transformers(text: str) -> None:
    assert SMALL["qwen2"].encode(text) == transformers_qwen().encode(text)


@cache
def transformers_qwen() -> Any:
    metadata = byte_level_metadata("qwen2")
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    tokenizer = pytest.importorskip("transformers").Qwen2Tokenizer(
        vocab={token: id for id, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        eos_token="</s>", unk_token="<s>", pad_token="</s>",
    )  # fmt: skip
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<think>", "une ide\u0301e")]
    )
    return tokenizer


def test_the_named_splits_differ_as_documented() -> None:
    def pieces(pre: str, text: str) -> list[str]:
        return [SMALL[pre].piece(id) for id in SMALL[pre].encode(text)]

    assert pieces("gpt-2", "1234 14") == ["123", "4", " 1", "4"]
    assert pieces("smaug-bpe", "12 123") == ["12", " ", "123"]
    assert pieces("smollm", "123") == pieces("qwen2", "123") == ["1", "2", "3"]
    assert pieces("llama-bpe", "1234") == ["123", "4"]
    # a piece that is a token and that no merge produces
    assert pieces("llama-bpe", "abc") == ["abc"]
    assert pieces("smaug-bpe", "abc") == pieces("qwen2", "abc") == ["ab", "c"]
    assert pieces("qwen2", "e\u0301") == ["é"]  # NFC, as in the original tokenizer
    assert pieces("stablelm2", "e\u0301") == ["e", "\u0301"]
    assert pieces("qwen2", "h'Se") == ["h", "'S", "e"]
    assert pieces("gpt-2", "h'Se") == ["h", "'", "S", "e"]


def test_all_names_of_a_group_have_the_same_split() -> None:
    assert SPLITS["starcoder"] == SPLITS["smollm"] != SPLITS["gpt-2"] == SPLITS["default"]
    assert SPLITS["llama3"] == SPLITS["llama-bpe"] != SPLITS["qwen2"]


def test_llama_3_files_add_bos_unless_they_disable_it() -> None:
    assert tokenizer_from_gguf(byte_level_metadata("llama-bpe")).encode("h")[0] == 278
    assert tokenizer_from_gguf(byte_level_metadata("llama-bpe")).encode("h", special=False) == [71]
    assert tokenizer_from_gguf(byte_level_metadata("qwen2")).encode("h") == [71]
    framed = byte_level_metadata("qwen2", add_bos_token=True, add_eos_token=True)
    assert tokenizer_from_gguf(framed).encode("h") == [278, 71, 279]


def test_end_of_turn_is_an_eos_token_and_user_tokens_are_recognized() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata("qwen2", eot_token_id=281))
    assert tokenizer.eos_ids == {279, 281}
    assert tokenizer.special_ids == {278, 279, 281}
    assert tokenizer.encode("<think>") == [280]
    assert tokenizer.decode([280, 279]) == "<think>"
    text = "une ide\u0301e"
    assert tokenizer.piece(282) == tokenizer.decode(tokenizer.encode(text)) == text


def test_an_unknown_split_is_an_error_that_lists_the_supported_ones() -> None:
    with pytest.raises(ModelError, match=r"x\.gguf: tokenizer\.ggml\.pre is 'brandnew'; .*smollm"):
        tokenizer_from_gguf(byte_level_metadata("brandnew"), "x.gguf")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre is missing.*convert"):
        tokenizer_from_gguf(byte_level_metadata(None), "x.gguf")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": "bert"}, "model is 'bert'"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": ["a", "b", "a"]}, "tokens lists 'a' twice"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["h e", "q q"]}, "merges lists 'q q'"),
        ({"merges": ["he"]}, "merges lists 'he'"),
        ({"token_type": [1]}, "token_type has 1 entries for 283 tokens"),
        ({"token_type": None}, "token_type is missing"),
        ({"eos_token_id": 283}, "eos_token_id is 283; there are 283 tokens"),
    ],
)
def test_the_error_names_the_key_of_a_broken_vocabulary(
    change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(f"x.gguf: tokenizer.ggml.{problem}")):
        tokenizer_from_gguf(byte_level_metadata("qwen2", **change), "x.gguf")


SPACED = tokenizer_from_gguf(sentencepiece_metadata())
sentences = st.text(alphabet="thelo wrdingac.é中€▁\n<s>", max_size=25)


@settings(deadline=None, max_examples=200)
@given(text=st.one_of(sentences, texts))
@example(text="hello world  there")
@example(text=" the</s> the<unk>ing")
def test_sentencepiece_encodes_like_the_llama_tokenizer_of_transformers(text: str) -> None:
    reference = transformers_llama()
    assert SPACED.encode(text, special=False) == reference.encode(text, add_special_tokens=False)
    ids = SPACED.encode(text)
    assert ids == [1, *SPACED.encode(text, special=False)]
    assert SPACED.decode(ids) == reference.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@cache
def transformers_llama() -> Any:
    """A Llama tokenizer of transformers with the same vocabulary and its own order of merges."""
    transformers = pytest.importorskip("transformers")
    base = pytest.importorskip("transformers.tokenization_utils_base")
    metadata = sentencepiece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: id for id, token in enumerate(tokens)}
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    merges = base.generate_merges(vocab, scores)
    return transformers.LlamaTokenizer(vocab=vocab, merges=merges)


def test_merges_have_the_order_of_transformers() -> None:
    base = pytest.importorskip("transformers.tokenization_utils_base")
    vocabulary = Vocabulary(sentencepiece_metadata(), "")
    scores = dict(vocabulary._each_with("scores"))
    assert vocabulary._merges_by_score() == base.generate_merges(vocabulary.ids, scores)


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    assert [SPACED.piece(id) for id in SPACED.encode("hello the€")] == [
        "<s>", " hello", " the", "\ufffd", "\ufffd", "\ufffd",
    ]  # fmt: skip
    assert SPACED.decode(SPACED.encode("hello the€")) == "hello the€"
    assert SPACED.eos_ids == {2}
    assert SPACED.special_ids == {0, 1, 2}


def test_sentencepiece_can_omit_the_leading_space() -> None:
    bare = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert [bare.piece(id) for id in bare.encode("the the")] == ["t", "he", " the"]
    assert bare.decode(bare.encode(" the")) == " the"
    assert SPACED.decode(SPACED.encode("the")) == "the"


def test_merges_in_the_file_take_precedence_over_scores() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(merges=["h e"]))
    pieces = [tokenizer.piece(id) for id in tokenizer.encode("the", special=False)]
    assert pieces == [" ", "t", "he"]


def test_sentencepiece_needs_scores_or_merges() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.scores is missing"):
        tokenizer_from_gguf(sentencepiece_metadata(scores=None))


def save(folder: Path, backend: Backend, **files: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def folder_backend() -> Backend:
    """A tokenizer.json with truncation and padding, which must not affect prompts."""
    backend = named_reference("llama-bpe")
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 278)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    return backend


CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False,
    "bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
    "pad_token": "<pad>", "additional_special_tokens": ["<extra>"],
    "added_tokens_decoder": {"280": {
        "content": "<think>", "lstrip": False, "normalized": False, "rstrip": False,
        "single_word": False, "special": True,
    }},
}  # fmt: skip


def test_a_folder_is_read_as_in_transformers(tmp_path: Path) -> None:
    auto = pytest.importorskip("transformers").AutoTokenizer
    folder = save(tmp_path, folder_backend(), tokenizer_config=CONFIG)
    ours, theirs = load_tokenizer(folder), auto.from_pretrained(str(folder))
    for text in [*CORPUS, "<s>hello<extra></s><pad><think>" * 3]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, special=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, {theirs.eos_token_id})
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == {*theirs.all_special_ids} | {280}
    assert ours.id_of("<extra>") == theirs.convert_tokens_to_ids("<extra>")


def test_prompts_are_neither_truncated_nor_padded(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, folder_backend(), tokenizer_config=CONFIG))
    assert len(tokenizer.encode("h" * 50)) == 51
    assert len(tokenizer.encode("h")) == 2


def test_old_folders_have_special_tokens_in_a_separate_file(tmp_path: Path) -> None:
    folder = save(tmp_path, folder_backend(), special_tokens_map={"eos_token": "hello"})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == {tokenizer.id_of("hello")} <= tokenizer.special_ids
    assert tokenizer.bos_id is None


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, {279}),
        ({"generation_config": {"eos_token_id": [7, 9]}}, {7, 9, 279}),
        ({"generation_config": {"eos_token_id": 7}, "config": {"eos_token_id": 8}}, {7, 279}),
        ({"config": {"eos_token_id": 8}}, {8, 279}),
        ({"generation_config": {"eos_token_id": None}}, {279}),
    ],
)
def test_eos_ids_come_from_generation_config_and_the_eos_token(
    tmp_path: Path, files: dict[str, Any], ends: set[int]
) -> None:
    folder = save(tmp_path, folder_backend(), tokenizer_config=CONFIG, **files)
    assert load_tokenizer(folder).eos_ids == ends


def test_the_chat_template_comes_from_a_file_a_field_or_a_list(tmp_path: Path) -> None:
    many = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for written, expected in ((None, None), ("one", "one"), (many, "d")):
        save(tmp_path, folder_backend(), tokenizer_config={**CONFIG, "chat_template": written})
        assert load_tokenizer(tmp_path).chat_template == expected
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_template == "file"


def test_an_error_explains_how_to_convert_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(
        ModelError, match=r"tokenizer\.json is missing.*tokenizer\.model.*converted"
    ):
        load_tokenizer(tmp_path)


def test_the_error_names_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)
    save(tmp_path, folder_backend())
    for content, problem in (("{", "is not JSON"), ("[]", "contains a list")):
        (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
        with pytest.raises(ModelError, match=rf"tokenizer_config\.json {problem}"):
            load_tokenizer(tmp_path)


UNDERSCORED = decoders.Sequence([
    decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
])  # fmt: skip


@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece(), decoders.Metaspace(), UNDERSCORED], ids=repr
)
def test_an_unsupported_decoder_is_an_error(tmp_path: Path, decoder: Any) -> None:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ModelError, match=r"tokenizer\.json has the decoder"):
        load_tokenizer(save(tmp_path, backend))


def test_the_package_can_be_imported_without_tokenizer_packages() -> None:
    code = (
        "import sys, headway, headway.text.detokenizer;"
        "print({'tokenizers', 'jinja2'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
