"""Streamed text equals the decoded whole, is never revised, and ends at every stop string."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headway.errors import InvalidRequest
from headway.text.detokenizer import Detokenizer, StopScanner, TextStream
from headway.text.tokenizer import Piece, Tokenizer, tokenizer_from_gguf
from tests.text.test_tokenizer import CORPUS, SMALL, SPACED, bundled, sentencepiece_metadata, texts

BYTES = SMALL["gpt-2"]  # all 256 bytes, some merges, special tokens
UNSPACED = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False))
KINDS = {"bytes": BYTES, "sentencepiece": SPACED, "sentencepiece, no prefix": UNSPACED}
FFFD = "\N{REPLACEMENT CHARACTER}"
SMILE = [SPACED.id_of(f"<0x{byte:02X}>") or 0 for byte in "😀".encode()]
each_kind = pytest.mark.parametrize("kind", KINDS)
relaxed = settings(
    deadline=None,
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
Item = TypeVar("Item", bound=Sequence[Any])


def cut(whole: Item, places: list[int]) -> list[Item]:
    """A sequence divided at these positions; some parts may be empty."""
    bounds = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[a:b] for a, b in pairwise(bounds)]  # type: ignore[misc]


def streams(size: int) -> st.SearchStrategy[list[int]]:
    """Token ids: many single bytes (low ids), and a few outside every vocabulary."""
    usual = st.integers(0, min(size - 1, 400))
    return st.lists(st.one_of(usual, usual, usual, st.integers(0, size + 20)), max_size=40)


places = st.lists(st.integers(0, 50), max_size=8)


@each_kind
@relaxed
@given(ids=streams(300), places=places, skip=st.booleans())
@example(ids=[*SMILE, 3, *SMILE], places=[1, 2, 3, 4], skip=True)
@example(ids=[*SMILE, SMILE[0], 270], places=[4], skip=True)
@example(ids=[300, 2, 261, 261], places=[1, 2], skip=True)
def test_push_and_finish_together_equal_decode(
    kind: str, ids: list[int], places: list[int], skip: bool
) -> None:
    check_law(KINDS[kind], ids, places, skip)


@relaxed
@given(ids=streams(49152), places=places, skip=st.booleans())
def test_push_and_finish_equal_decode_for_the_bundled_model(
    smollm2: Path, ids: list[int], places: list[int], skip: bool
) -> None:
    check_law(bundled(smollm2), ids, places, skip)


def check_law(tokenizer: Tokenizer, ids: list[int], places: list[int], skip: bool) -> None:
    stream = Detokenizer(tokenizer, skip_special=skip)
    parts = [*(stream.push(piece) for piece in cut(ids, places)), stream.finish()]
    assert "".join(parts) == tokenizer.decode(ids, skip_special=skip)


@each_kind
@relaxed
@given(ids=streams(300))
def test_the_text_does_not_depend_on_how_tokens_are_divided(kind: str, ids: list[int]) -> None:
    one, many = Detokenizer(KINDS[kind]), Detokenizer(KINDS[kind])
    assert one.push(ids) == "".join(many.push([id]) for id in ids)


@relaxed
@given(text=texts)
@example(text="👩‍👩‍👧‍👦👍🏽 中文 é")
def test_a_partial_character_is_never_returned(smollm2: Path, text: str) -> None:
    text = text.replace(FFFD, "")
    for tokenizer in (bundled(smollm2), *KINDS.values()):
        ids = tokenizer.encode(text, special=False)
        if FFFD in tokenizer.decode(ids):
            continue  # the bundled vocabulary has no token for one of its bytes
        stream = Detokenizer(tokenizer)
        assert all(FFFD not in stream.push([id]) for id in ids)
        assert FFFD not in stream.finish()


@relaxed
@given(ids=streams(300))
def test_byte_level_text_holds_back_at_most_one_character(ids: list[int]) -> None:
    check_lag(ids)


def test_any_three_bytes_hold_back_at_most_one_character() -> None:
    """Covers the first, continuation and last bytes of every UTF-8 range, and surrogates."""
    ids = {BYTES.spell(id)[0]: id for id in range(256)}
    edges = bytes.fromhex("41 80 8f 90 9f a0 bf c0 c2 df e0 e1 ed ef f0 f1 f4 f5 ff")
    for three in product(edges, repeat=3):
        check_lag([ids[bytes([byte])] for byte in three])


def check_lag(ids: list[int]) -> None:
    """An invalid byte is returned as U+FFFD as soon as no later byte can complete it."""
    stream, text = Detokenizer(BYTES), ""
    for index, id in enumerate(ids):
        text += stream.push([id])
        whole = BYTES.decode(ids[: index + 1])
        assert whole.startswith(text)
        assert len(whole) - len(text) <= (whole[-1:] == FFFD)


@relaxed
@given(ids=streams(300))
def test_sentencepiece_text_holds_back_at_most_one_run_of_bytes(ids: list[int]) -> None:
    stream, text = Detokenizer(SPACED), ""
    length = 0  # of the current run of byte tokens
    for index, id in enumerate(ids):
        text += stream.push([id])
        if id in SPACED.special_ids or id >= SPACED.vocab_size:
            continue
        length = length + 1 if SPACED.spell(id).is_fallback else 0
        assert len(SPACED.decode(ids[: index + 1])) - len(text) <= length


def test_a_run_of_bytes_is_held_back_because_one_invalid_byte_changes_all_of_it() -> None:
    """Byte fallback decodes a run as a whole: five bytes of invalid UTF-8 become five U+FFFD."""
    stream = Detokenizer(SPACED)
    assert stream.push(SMILE) == ""
    assert stream.push([SMILE[0]]) == ""
    assert stream.push([SPACED.id_of("he") or 0]) == FFFD * 5 + "he"


def test_the_first_space_is_stripped_from_whichever_token_has_it() -> None:
    hello = SPACED.id_of("▁hello") or 0
    stream = Detokenizer(SPACED)
    assert [stream.push(ids) for ids in ([], [1], [hello], [hello])] == ["", "", "hello", " hello"]


def test_every_token_is_decoded_once() -> None:
    class Counting:
        special_ids: frozenset[int] = frozenset()
        num_stripped = None
        num_spelled = 0

        def spell(self, id: int) -> Piece:
            self.num_spelled += 1
            return Piece(b"\xf0", False)  # never completes a character

    counting: Any = Counting()
    stream = Detokenizer(counting)
    shown = "".join(stream.push([0]) for _ in range(1000))
    assert (counting.num_spelled, len(shown)) == (1000, 999)


def stopped(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Reference: the visible text and the stop string that ends first, then begins first."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            hit = max(done, key=len)
            return text[: end if include else end - len(hit)], hit
    return text, None


def possible_beginning(text: str, stops: list[str]) -> int:
    """The length of the longest suffix of a text that is a prefix of a stop string."""
    lengths = range(len(text) + 1)
    return max(n for n in lengths if n == 0 or any(s.startswith(text[-n:]) for s in stops))


few = st.text(alphabet="ab\n", max_size=30)
any_stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


@relaxed
@given(text=few, stops=any_stops, include=st.booleans(), places=places)
@example(text="aabaab\n", stops=["abaab\n", "baab"], include=False, places=[3])
@example(text="xabc", stops=["c", "abc", "bc"], include=True, places=[2])
def test_the_first_stop_ends_the_text_however_the_text_is_divided(
    text: str, stops: list[str], include: bool, places: list[int]
) -> None:
    scanner = StopScanner(stops, include)
    shown = "".join(scanner.push(piece) for piece in cut(text, places))
    shown += scanner.finish()
    assert (shown, scanner.hit) == stopped(text, stops, include)
    if scanner.hit is not None:
        assert scanner.push("ab\n") + scanner.finish() == ""


@relaxed
@given(text=few, stops=any_stops)
def test_only_a_possible_start_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    scanner, shown = StopScanner(stops), ""
    for index, letter in enumerate(text):
        shown += scanner.push(letter)
        if scanner.hit:
            break
        sofar = text[: index + 1]
        assert shown == sofar[: len(sofar) - possible_beginning(sofar, stops)]


@pytest.mark.parametrize("stop", ["", 7, None])
def test_a_stop_must_be_a_non_empty_text(stop: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"stop\[1\] is {stop!r}"):
        StopScanner(["fine", stop])


def test_a_very_long_stop_is_matched_character_by_character() -> None:
    scanner = StopScanner(["a" * 20_000 + "b"])
    shown = "".join(scanner.push("a") for _ in range(60_000))
    assert len(shown) == 40_000
    assert scanner.hit is None


@relaxed
@given(
    ids=streams(49152), stops=st.lists(st.text(min_size=1, max_size=3), max_size=3),
    include=st.booleans(), places=places, hidden=st.frozensets(st.integers(0, 400), max_size=3),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_a_stream_equals_decode_up_to_its_stop(
    smollm2: Path, ids: list[int], stops: list[str], include: bool, places: list[int],
    hidden: frozenset[int], seed: int,
) -> None:  # fmt: skip
    tokenizer = bundled(smollm2)
    whole = tokenizer.decode([id for id in ids if id not in hidden])
    if whole:  # a stop that occurs in the text and may span tokens
        start = seed % len(whole)
        stops = [*stops, whole[start : start + 3]]
    stream = TextStream(tokenizer, stops, include, hidden_ids=hidden)
    shown = "".join(stream.push(piece) for piece in cut(ids, places)) + stream.finish()
    assert (shown, stream.hit) == stopped(whole, stops, include)
    assert stream.text == shown


@relaxed
@given(ids=streams(49152), count=st.integers(0, 12), include=st.booleans(), places=places,
       seed=st.integers(0, 100))  # fmt: skip
def test_stops_are_ignored_within_min_tokens(
    smollm2: Path, ids: list[int], count: int, include: bool, places: list[int], seed: int
) -> None:
    tokenizer = bundled(smollm2)
    whole = Detokenizer(tokenizer)
    first, rest = whole.push(ids[:count]), whole.push(ids[count:]) + whole.finish()
    start = seed % max(1, len(first + rest))
    stops = [(first + rest)[start : start + 2] or "no such text"]
    stream = TextStream(tokenizer, stops, include, min_tokens=count)
    shown = "".join(stream.push(piece) for piece in cut(ids, places)) + stream.finish()
    text, hit = stopped(rest, stops, include)
    assert (shown, stream.hit) == (first + text, hit)


def test_a_hidden_end_token_is_not_shown_even_with_special_tokens(smollm2: Path) -> None:
    tokenizer = bundled(smollm2)
    ids = tokenizer.encode("<|im_start|>Hi<|im_end|>")
    stream = TextStream(tokenizer, skip_special=False, hidden_ids=tokenizer.eos_ids)
    assert stream.push(ids) + stream.finish() == "<|im_start|>Hi"


def test_text_released_by_finish_can_complete_a_stop() -> None:
    stream = TextStream(BYTES, stops=[FFFD])
    assert stream.push([BYTES.id_of("h") or 0, BYTES.id_of("Ã") or 0]) == "h"
    assert (stream.finish(), stream.hit) == ("", FFFD)


@pytest.mark.parametrize("text", CORPUS)
def test_the_corpus_is_restored_token_by_token(smollm2: Path, text: str) -> None:
    tokenizer = bundled(smollm2)
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, stops=["no such text"], skip_special=False)
    shown = "".join(stream.push([id]) for id in ids) + stream.finish()
    assert shown == tokenizer.decode(ids, skip_special=False)
