"""Laws of `headway run`: it shows what happens, changes nothing, and says how it went."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from headway.cli.commands.run import SAMPLES
from headway.cli.view import live
from headway.llm import LLM
from headway.observe.trace import read_trace
from headway.request import Params, Request
from headway.sampling_params import SamplingParams
from tests.cli.test_cli import check_summary, headway, sentence
from tests.cli.test_cli_generate import ROW, options_of, save_tiny

NAMES = [sample.name for sample in SAMPLES]
ROOM = ["--num-blocks", "60", "--block-size", "32"]  # a token of this model is a byte


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="module")
def tiny(folder: Path) -> list[str]:
    return [*options_of(folder), *ROOM, "--max-tokens", "20"]


def test_a_run_tells_everything_in_one_object(tiny: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    done = headway("run", *tiny, "--json", "--trace-out", trace, "--preset", "vllm")
    run = json.loads(done.out)
    assert done.code == 0 and set(run) == {"model", "config", "results", "summary"}
    assert [row["id"] for row in run["results"]] == NAMES
    assert all(set(row) == ROW for row in run["results"])
    check_summary(run["summary"])
    assert run["summary"]["completed"] == len(NAMES) and run["summary"]["cache_hit_ratio"] > 0
    header, *steps = read_trace(trace)
    assert header["config"] == run["config"] and run["config"]["max_num_seqs"] == 6
    assert len([step for step in steps if step["step"] >= 0]) == run["summary"]["steps"]
    assert headway("trace", trace, "--replay").code == 0


def test_without_a_terminal_every_end_is_a_line(tiny: list[str]) -> None:
    done = headway("run", *tiny)
    ends = re.findall(
        r"^step \d+: (\w+) ends after (\d+) tokens .* (\d+) of 10 done", done.err, re.M
    )
    assert done.code == 0 and sorted(name for name, _, _ in ends) == sorted(NAMES)
    assert ends[-1][2] == "10" and len(done.err.splitlines()) == 10
    for text in (*NAMES, "tokens/s", "The scheduler took", "preempted", "Next", "headway chat"):
        assert text in done.out, text


def test_the_same_texts_come_again(tiny: list[str]) -> None:
    def texts(*more: str) -> list[Any]:
        run = json.loads(headway("run", *tiny, "--json", *more).out)
        return [row["samples"] for row in run["results"]]

    assert texts() == texts() == texts("--preset", "static", "--max-num-seqs", "2")


def test_a_model_without_a_template_or_without_words(tmp_path: Path, folder: Path) -> None:
    bare = save_tiny(tmp_path, template=None)
    (bare / "config.json").write_text((folder / "config.json").read_text())
    assert headway("run", *options_of(bare), *ROOM, "--max-tokens", "2").code == 0
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in sentence("run", *options_of(bare), *ROOM)


def test_what_does_not_fit_is_told(folder: Path) -> None:
    done = headway("run", *options_of(folder), "--num-blocks", "3", "--max-tokens", "2")
    assert done.code == 2 and "the cache has 3" in done.err and "Traceback" not in done.err


def shown(llm: LLM, width: int, num_tokens: int) -> tuple[str, list[list[int]], float]:
    """What a terminal gets to see, the tokens, and the seconds it took."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, height=40, color_system=None)
    names = ["one", "two", "three"]
    begun = time.perf_counter()
    first = int(next(llm._numbers)) + 1
    view = live.View(llm, ["?"] * first + names, console)
    with view:
        results = llm.generate(
            ["hello " * 9, "x", "[bold]hm[/]"], SamplingParams(temperature=0, max_tokens=num_tokens)
        )
    seconds = time.perf_counter() - begun
    return screen.getvalue(), [result.outputs[0].token_ids for result in results], seconds


def plain(text: str) -> str:
    """Without a terminal's control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_view_shows_the_run_within_the_screen(folder: Path, width: int) -> None:
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
    for word in (
        "KV cache", "of 20 blocks held", "waiting", "decoding", "done", "three is seated",
        "two ends after 30 tokens (length)", "1 in the queue wait because all 2 seats are taken", "tokens/s",
    ):  # fmt: skip
        assert word in text, word
    alone = LLM(str(folder), load_format="dummy", threads=1)
    plainly = alone.generate(
        ["hello " * 9, "x", "[bold]hm[/]"], SamplingParams(temperature=0, max_tokens=30)
    )
    assert tokens == [result.outputs[0].token_ids for result in plainly], "watching changes nothing"
    assert not [o for o in llm.engine.observers if isinstance(o, live.View)]


def test_the_view_shows_the_end_of_a_text(folder: Path) -> None:
    llm = LLM(str(folder), load_format="dummy", threads=1)
    assert llm.tokenizer is not None
    request = Request("0", [1], Params())
    request.written.extend(llm.tokenizer.encode("abc def\nghi  jkl"))
    view = live.View(llm, ["one"], Console())
    assert view._tail(request, 8) == "…ghi jkl" and view._tail(request, 40) == "abc def ghi jkl"


def test_the_view_draws_ten_times_a_second_at_most(folder: Path) -> None:
    llm = LLM(str(folder), load_format="dummy", threads=1)
    screen, _, seconds = shown(llm, 80, 400)
    num_frames = plain(screen).count("KV cache")
    assert 1 <= num_frames <= seconds * 10 + 2


def test_a_models_text_does_not_steer_the_terminal() -> None:
    assert live.safe("a\x1b[2Jb\n\tc\x07\r") == "a\ufffd[2Jb\n\tc\ufffd\ufffd"
    assert live.safe("Größe, 大きい, ✓") == "Größe, 大きい, ✓"


def test_a_meter_is_as_full_as_its_share() -> None:
    for part in range(11):
        bar = live.meter(part, 10, 20, "red").plain
        assert bar.count("━") == 2 * part and len(bar) == 20
    assert live.meter(0, 0, 5, "red").plain == "─" * 5
