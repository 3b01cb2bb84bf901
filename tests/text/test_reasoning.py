"""Reasoning in generated text: nothing is lost, and nothing of it is given out as the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import Grammar
from headway.errors import ConfigError
from headway.grammar.grammar import check_grammar
from headway.text.chat_template import render_chat
from headway.text.harmony import TAGS, HarmonySplitter
from headway.text.reasoning import Reasoning, reasoning_of
from headway.text.split import ANSWER, CALL, REASONING, Part, Splitter
from headway.text.think import ThinkSplitter
from tests.support.served import letters

MARKS = {tag: chr(0xDC00 + place) for place, tag in enumerate(TAGS)}
LITERAL = {tag: tag for tag in TAGS}


def think(is_open: bool | None = None) -> ThinkSplitter:
    return ThinkSplitter(is_open=is_open)


def split(splitter: Splitter, pieces: Sequence[str], *, is_cut: bool = False) -> dict[str, str]:
    """The text of each kind."""
    parts = [part for piece in pieces for part in splitter.push(piece)]
    return joined([*parts, *splitter.finish(is_cut=is_cut)])


def joined(parts: Sequence[Part]) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in parts:
        found[part.kind] = found.get(part.kind, "") + part.name + part.text
    return {kind: text for kind, text in found.items() if text}


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({min(place, len(text)) for place in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


words = st.text('ab<>/\n{}"é', max_size=8) | st.sampled_from(["</th", "<think", "<think>", "ink>"])
messages = st.tuples(
    st.sampled_from(
        ["analysis", "final", "commentary", "commentary to=functions.f <|constrain|>json"]
    ),
    words,
)
cuts = st.lists(st.integers(0, 80), max_size=8)


@settings(max_examples=80, deadline=None)
@given(thought=words, answer=words, cuts=cuts, is_open=st.sampled_from([True, None]))
def test_any_division_of_a_text_gives_the_same_parts(
    thought: str, answer: str, cuts: list[int], is_open: bool | None
) -> None:
    text = f"{'' if is_open else '<think>'}{thought}</think>\n\n{answer}"
    whole = split(think(is_open), [text])
    assert split(think(is_open), cut(text, cuts)) == split(think(is_open), list(text)) == whole
    if not (is_open and thought.lstrip().startswith("<think>")):
        assert whole.get(REASONING, "").strip() == thought.strip()
    assert whole.get(ANSWER, "") == answer.lstrip("\n")


@settings(max_examples=50, deadline=None)
@given(said=st.lists(messages, max_size=4), cuts=cuts, tags=st.sampled_from([MARKS, LITERAL]))
def test_any_division_of_harmony_messages_gives_the_same_parts(
    said: list[tuple[str, str]], cuts: list[int], tags: dict[str, str]
) -> None:
    text = "".join(
        f"<|channel|>{head}<|message|>{body}<|end|><|start|>assistant" for head, body in said
    )
    for tag in TAGS:
        text = text.replace(tag, tags[tag])

    def new() -> HarmonySplitter:
        return HarmonySplitter(tags, ["f"])

    whole = split(new(), [text])
    assert split(new(), cut(text, cuts)) == split(new(), list(text)) == whole
    thoughts = [body for head, body in said if head == "analysis" and body]
    shown = [body for head, body in said if head in ("final", "commentary") and body]
    assert whole.get(REASONING, "") == "\n".join(thoughts)
    assert whole.get(ANSWER, "") == "\n".join(shown)
    called = "".join("f" + body for head, body in said if "to=" in head)
    assert whole.get(CALL, "") == called


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_text_that_ends_anywhere_gives_no_reasoning_as_the_answer(is_cut: bool) -> None:
    thought, answer = "hm, <b", "so: </think> is a tag"
    said = f"<think>\n{thought}\n</think>\n\n{answer}"
    for end in range(len(said) + 1):
        for text, is_open in ((said[:end], None), (said[7:end], True)):
            found = split(think(is_open), list(text), is_cut=is_cut)
            if end >= 7 or is_cut:
                assert answer.startswith(found.get(ANSWER, ""))
    said = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    said += f"<|channel|>final<|message|>{answer}"
    for end in range(len(said) + 1):
        found = split(HarmonySplitter(LITERAL), list(said[:end]), is_cut=is_cut)
        assert answer.startswith(found.get(ANSWER, ""))


@pytest.mark.parametrize(
    ("splitter", "text", "parts"),
    [
        (think, "plain <think> text", {ANSWER: "plain <think> text"}),
        (think, "<think>\n\n</think>\n\nyes", {ANSWER: "yes"}),
        (
            think,
            " \n<think>a</think>b<think>c</think>",
            {REASONING: "a", ANSWER: "b<think>c</think>"},
        ),
        (think, "<", {ANSWER: "<"}),
        (lambda: think(True), "<think>a</think>b", {REASONING: "a", ANSWER: "b"}),
        (lambda: think(True), "a", {REASONING: "a"}),
        (lambda: think(False), "a</think>b", {ANSWER: "a</think>b"}),
    ],
)
def test_where_reasoning_begins(
    splitter: Callable[[], Splitter], text: str, parts: dict[str, str]
) -> None:
    assert split(splitter(), list(text)) == split(splitter(), [text]) == parts


def test_harmony_calls_are_only_those_of_known_functions() -> None:
    for head, kind in (
        ("<|channel|>commentary to=functions.f <|constrain|>json", CALL),
        (" to=functions.f<|channel|>commentary json", CALL),
        ("<|channel|>commentary to=functions.g", REASONING),
        ("<|channel|>analysis to=f", REASONING),
        ("<|channel|>secret", REASONING),
    ):
        found = split(HarmonySplitter(LITERAL, ["f"]), list(f"{head}<|message|>{{}}<|call|>"))
        assert found == {kind: "f{}" if kind == CALL else "{}"}, head
    assert split(HarmonySplitter(LITERAL), ["no messages"]) == {REASONING: "no messages"}


def reasoning(parser: str, template: str = "", specials: Sequence[str] = ()) -> Reasoning:
    found = reasoning_of(letters(template, specials=specials), parser)
    assert found is not None
    return found


@pytest.mark.parametrize("specials", [(), ("<think>", "</think>")])
def test_the_end_of_the_prompt_says_whether_reasoning_has_begun(specials: Sequence[str]) -> None:
    for parser, prompt, said, parts in (
        ("qwen3", "a:", "b", {ANSWER: "b"}),
        ("qwen3", "<think> a:", "b", {ANSWER: "b"}),
        ("qwen3", "a:<think>\n", "b", {REASONING: "b"}),
        ("qwen3", "a:<think>\n\n</think>\n\n", "b", {ANSWER: "b"}),
        ("deepseek_r1", "a:", "b", {REASONING: "b"}),
        ("deepseek_r1", "a:</think>", "b", {ANSWER: "b"}),
    ):
        found = reasoning(parser, specials=specials)
        tokens = found.tokenizer.encode(prompt, special=False)
        assert split(found.splitter(tokens), [said]) == parts, (parser, prompt)
    found = reasoning("deepseek_r1", specials=specials)
    assert split(found.splitter([], continued="x <think> y"), ["b"]) == {REASONING: "b"}
    assert split(found.splitter([], continued="x"), ["b"]) == {ANSWER: "b"}


def test_harmony_reads_the_header_in_the_prompt() -> None:
    found = reasoning("gpt_oss", specials=TAGS)
    encode = found.tokenizer.encode
    for prompt, kind in (
        ("<|start|>user<|message|>q<|end|><|start|>assistant<|channel|>final<|message|>", ANSWER),
        ("<|start|>assistant<|channel|>analysis<|message|>", REASONING),
    ):
        assert split(found.splitter(encode(prompt, special=False)), ["b"]) == {kind: "b"}
    splitter = found.splitter(encode("<|start|>assistant", special=False))
    text = f"{found.tags['<|channel|>']}final{found.tags['<|message|>']}b"
    assert split(splitter, [text]) == {ANSWER: "b"} and splitter.num_read == len(text)
    assert split(found.splitter([], continued="x"), ["b"]) == {ANSWER: "b"}
    other = found.splitter(encode("to=functions.f<|message|>", special=False), ["f"])
    assert split(other, ["b"]) == {REASONING: "b"}, "not the header of an answer"


def test_auto_reads_the_tokens_and_the_template() -> None:
    for template, specials, parser in (
        ("{{ '<think>' }} </think>", (), "qwen3"),
        ("{{ x.split('</think>') }}", (), "deepseek_r1"),
        ("", ("<think>", "</think>"), "qwen3"),
        ("<think>", TAGS, "gpt_oss"),
    ):
        assert reasoning("auto", template, specials).parser == parser
    assert reasoning_of(letters("plain"), "auto") is None and reasoning_of(letters(), None) is None
    with pytest.raises(ConfigError, match=r"gpt_oss.*<\|channel\|>"):
        reasoning_of(letters(), "gpt_oss")
    with pytest.raises(ConfigError, match="qwen3, deepseek_r1, gpt_oss, auto, not 'r1'"):
        reasoning_of(letters(), "r1")


def accepts(grammar: Grammar, tokens: Sequence[int], specials: Sequence[str]) -> bool:
    llguidance = pytest.importorskip("llguidance")
    from headway.grammar.sandbox import make_tokenizer

    vocabulary = [bytes([byte]) for byte in range(256)] + [b"<start>", b"<end>"]
    vocabulary += [tag.encode() for tag in specials]
    tokenizer = make_tokenizer((vocabulary, list(range(256, len(vocabulary))), [257]))
    matcher = llguidance.LLMatcher(tokenizer, grammar.source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting())


ANSWERS = (
    Grammar.choice(["yes", "no"]), Grammar.regex("yes"), Grammar.lark('start: "yes"'),
    Grammar.json_schema({"const": "yes"}),
)  # fmt: skip


@pytest.mark.parametrize("specials", [(), ("<think>", "</think>")])
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda grammar: grammar.kind)
def test_a_grammar_begins_after_the_reasoning(answer: Grammar, specials: Sequence[str]) -> None:
    found, yes = reasoning("qwen3", specials=specials), "yes"
    if answer.kind == "json_schema":
        yes = json.dumps(yes)
    encode = found.tokenizer.encode
    for prompt, said, is_accepted in (
        ("", yes, True),
        ("", f"<think>{yes} no {{</think>\n\n{yes}", True),
        ("", f"<think>hm</think>hm {yes}", False),
        ("", f"<think>{yes}", False),
        ("<think>\n", f"hm\n</think>\n\n{yes}", True),
        ("<think>\n", yes, False),
    ):
        before = found.grammar(found.splitter(encode(prompt)))
        assert before is not None
        grammar = Grammar.after(before, answer)
        check_grammar(grammar)
        assert accepts(grammar, encode(said), specials) == is_accepted, (prompt, said)
    assert found.grammar(found.splitter(encode("<think></think>"))) is None


def test_a_grammar_of_harmony_begins_in_the_final_channel() -> None:
    found = reasoning("gpt_oss", specials=TAGS)
    before = found.grammar(found.splitter(found.tokenizer.encode("<|start|>assistant")))
    assert before is not None
    analysis = "<|channel|>analysis<|message|>yes?<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    for said, is_accepted in (
        (f"{final}yes", True), (f"{analysis}{final}no", True), (f"{final}maybe", False),
        (f"{analysis}yes", False), ("yes", False),
    ):  # fmt: skip
        grammar = Grammar.after(before, ANSWERS[0])
        assert accepts(grammar, found.tokenizer.encode(said), TAGS) == is_accepted, said


def test_earlier_reasoning_reaches_templates_by_any_name() -> None:
    template = "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    for name in ("reasoning_content", "reasoning", "thinking"):
        message = {"role": "assistant", "content": "c", name: "r"}
        assert render_chat(template, [message]) == "rrc"
        call = {**message, "tool_calls": [{"function": {"name": "f"}}]}
        assert render_chat(template, [call]) == "rrc"
    assert render_chat(template, [{"role": "user", "content": "c", "reasoning": "r"}]) == "c"
