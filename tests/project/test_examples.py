"""The examples run as a reader would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.cpu import peers
from examples.embed_scheduler import LETTERS, continue_text
from headway.cli.main import app
from tests.support.waiting import LIMIT

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(path: Path) -> str:
    command = [sys.executable, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_runs(path: Path) -> None:
    assert run(path).strip()


def test_each_example_policy_changes_the_schedule() -> None:
    lines = run(ROOT / "examples" / "own_policy.py").splitlines()
    assert len({line.split(maxsplit=1)[1] for line in lines}) == len(lines) == 5


@pytest.mark.parametrize(
    ("slot", "name"),
    [("--victim", "longest_to_go"), ("--headroom", "a_block_each"), ("--queue", "small_first")],
)
def test_user_policies_can_be_named_on_the_command_line(
    slot: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = "requests=10,prompt=uniform(100,600),output=uniform(50,400)"
    policy = [slot, f"examples.own_policy:{name}"]
    arguments = ["simulate", workload, "--preset", "vllm_v1", "--num-blocks", "100", *policy]
    app(arguments, standalone_mode=False)
    assert "10 of 10 completed" in capsys.readouterr().out


def test_the_benchmark_of_other_engines_explains_its_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has packages of its own, so no other test runs it."""
    for arguments, status in ((["--help"], 0), ([], 2), (["llama_cpp", "task.json"], 2)):
        with pytest.raises(SystemExit) as ended:
            peers.main(arguments)
        assert ended.value.code == status
    shown = capsys.readouterr()
    assert "llama_cpp TASK.json MODEL.gguf" in shown.out and "required: model" in shown.err


def test_the_embedded_scheduler_gives_the_same_text_as_without_a_cache() -> None:
    lines = run(ROOT / "examples" / "embed_scheduler.py").splitlines()
    assert any(line.endswith("preempted") for line in lines)
    assert any(line.endswith("8 cached") for line in lines)
    ended = [line.split("'") for line in lines if line.endswith("'")]
    assert len(ended) == 5
    for _, prompt, _, text, _ in ended:
        tokens = [LETTERS.index(letter) for letter in prompt]
        while len(tokens) < len(prompt) + 12:
            tokens.append(continue_text(tokens))
        assert "".join(LETTERS[token] for token in tokens[len(prompt) :]) == text
