"""Laws of `headway run`: it shows the decisions, does not change them, and prints a summary."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from headway import LLM, SamplingParams
from headway.cli.commands.run import PROMPTS
from headway.cli.view import live
from headway.record.lines import AddedLine, CompletedLine
from headway.record.reader import read_journal
from headway.request import Request, RequestParams
from tests.cli.test_cli import check_summary, headway, sentence
from tests.cli.test_cli_generate import ROW, options_of, save_tiny
from tests.support.journals import of_kind

NAMES = [prompt.name for prompt in PROMPTS]
ROOM = ["--num-blocks", "60", "--block-size", "32"]  # a token of the tiny model is a byte


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="module")
def tiny(folder: Path) -> list[str]:
    return [*options_of(folder), *ROOM, "--max-tokens", "20"]


def test_json_output_has_results_config_and_summary(tiny: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    done = headway("run", *tiny, "--json", "--trace-out", trace, "--preset", "vllm")
    run = json.loads(done.out)
    assert done.code == 0 and set(run) == {"model", "config", "kv_cache", "results", "summary"}
    assert [row["id"] for row in run["results"]] == NAMES
    assert all(set(row) == ROW for row in run["results"])
    check_summary(run["summary"])
    assert run["summary"]["completed"] == len(NAMES) and run["summary"]["cache_hit_ratio"] > 0
    header, *lines = read_journal(trace)
    assert header.config == run["config"] and run["config"]["max_num_seqs"] == 6
    assert len(of_kind(CompletedLine, lines)) == run["summary"]["steps"]
    added = of_kind(AddedLine, lines)
    assert [asked.id for line in added for asked in line.requests] == NAMES
    assert headway("trace", trace, "--replay").code == 0


def test_without_a_terminal_every_finished_request_is_a_line(tiny: list[str]) -> None:
    done = headway("run", *tiny)
    ends = re.findall(
        r"^step \d+: request (\w+) finished with (\d+) tokens .* (\d+) of 10 done", done.err, re.M
    )
    assert done.code == 0 and sorted(name for name, _, _ in ends) == sorted(NAMES)
    assert ends[-1][2] == "10" and len(done.err.splitlines()) == 10
    for text in (*NAMES, "tokens/s", "steps", "preemptions", "Next", "headway chat"):
        assert text in done.out, text


def test_texts_are_reproducible_under_any_preset(tiny: list[str]) -> None:
    def texts(*more: str) -> list[Any]:
        run = json.loads(headway("run", *tiny, "--json", *more).out)
        return [row["samples"] for row in run["results"]]

    assert texts() == texts() == texts("--preset", "static", "--max-num-seqs", "2")


def test_models_without_chat_template_run_and_without_tokenizer_fail(
    tmp_path: Path, folder: Path
) -> None:
    bare = save_tiny(tmp_path, template=None)
    (bare / "config.json").write_text((folder / "config.json").read_text())
    assert headway("run", *options_of(bare), *ROOM, "--max-tokens", "2").code == 0
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in sentence("run", *options_of(bare), *ROOM)


def test_a_prompt_that_does_not_fit_is_reported(folder: Path) -> None:
    done = headway("run", *options_of(folder), "--num-blocks", "3", "--max-tokens", "2")
    assert done.code == 2 and "3" in done.err and "Traceback" not in done.err


def shown(llm: LLM, width: int, num_tokens: int) -> tuple[str, list[list[int]], float]:
    """The screen output, the generated tokens and the seconds of a run with the live view."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, height=40, color_system=None)
    names = ["one", "two", "three"]
    begun = time.perf_counter()
    with live.RunView(llm, console):
        results = llm.generate(
            ["hello " * 9, "x", "[bold]hm[/]"],
            SamplingParams(temperature=0, max_tokens=num_tokens), request_ids=names,
        )  # fmt: skip
    assert [result.request_id for result in results] == names
    seconds = time.perf_counter() - begun
    return screen.getvalue(), [result.outputs[0].token_ids for result in results], seconds


def plain(text: str) -> str:
    """The text without terminal control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_live_view_fits_the_screen_and_does_not_change_tokens(folder: Path, width: int) -> None:
    llm = LLM(str(folder), load_format="dummy", threads=1, num_blocks=20, max_num_seqs=2)
    before = live.SECONDS_BETWEEN
    try:
        live.SECONDS_BETWEEN = 0.0  # draw every step
        screen, tokens, _ = shown(llm, width, 30)
    finally:
        live.SECONDS_BETWEEN = before
    text = plain(screen)
    lines = text.replace("\r", "\n").split("\n")
    assert max(map(cell_len, lines)) <= width
    for pattern in (
        "KV cache", "of 20 blocks", "waiting", "decoding", "done", "three is admitted", "tokens/s",
        r"two finished .*30 tokens \(length\)", "1 queued request was not considered",
    ):  # fmt: skip
        assert re.search(pattern, text), pattern
    alone = LLM(str(folder), load_format="dummy", threads=1)
    plainly = alone.generate(
        ["hello " * 9, "x", "[bold]hm[/]"], SamplingParams(temperature=0, max_tokens=30)
    )
    assert tokens == [result.outputs[0].token_ids for result in plainly], (
        "the view does not change tokens"
    )
    assert not [o for o in llm.engine.observers if isinstance(o, live.RunView)]


def test_the_live_view_shows_the_end_of_a_text(folder: Path) -> None:
    llm = LLM(str(folder), load_format="dummy", threads=1)
    assert llm.tokenizer is not None
    request = Request("0", [1], RequestParams())
    request.flushed_tokens.extend(llm.tokenizer.encode("abc def\nghi  jkl"))
    view = live.RunView(llm, Console())
    assert view._tail(request, 8) == "…ghi jkl" and view._tail(request, 40) == "abc def ghi jkl"


def test_the_end_of_a_request_between_steps_has_no_step(folder: Path) -> None:
    llm = LLM(str(folder), load_format="dummy", threads=1)
    params = SamplingParams(temperature=0, max_tokens=30)
    text = llm.generate(["hello"], params)[0].outputs[0].text
    page = io.StringIO()
    with live.RunView(llm, Console(file=page)):
        llm.generate(["hello"], replace(params, stop=text[3:5]))
    assert "between steps: request" in page.getvalue() and "step -1" not in page.getvalue()


def test_the_live_view_draws_at_most_ten_times_per_second(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert live.SECONDS_BETWEEN == 0.1
    # 200 steps take longer on any machine, and so do eight drawings.
    monkeypatch.setattr(live, "SECONDS_BETWEEN", 0.02)
    llm = LLM(str(folder), load_format="dummy", threads=1)
    screen, _, seconds = shown(llm, 80, 200)
    assert 1 <= plain(screen).count("KV cache") <= seconds / live.SECONDS_BETWEEN + 2


def test_control_characters_in_a_text_are_replaced() -> None:
    assert live.safe("a\x1b[2Jb\n\tc\x07\r") == "a\ufffd[2Jb\n\tc\ufffd\ufffd"
    assert live.safe("Größe, 大きい, ✓") == "Größe, 大きい, ✓"


def test_a_meter_is_filled_by_its_share() -> None:
    for part in range(11):
        bar = live.meter(part, 10, 20, "red").plain
        assert bar.count("━") == 2 * part and len(bar) == 20
    assert live.meter(0, 0, 5, "red").plain == "─" * 5
