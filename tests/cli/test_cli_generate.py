"""Laws of `headway generate`: every prompt has its output line; a failed one does not stop others."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headway import LLM, SamplingParams
from headway.errors import FormatError
from headway.lab.real import prompts
from tests.cli.test_cli import headway, sentence

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SHAPE = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "eos_token_id": 256,
}  # fmt: skip
ROW = {
    "index", "id", "error", "prompt", "num_prompt_tokens", "samples", "timings", "cached_tokens",
    "preemptions",
}  # fmt: skip
SAMPLE = {"index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs", "error"}


def save_tiny(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A tiny model with random weights whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = {letter: number for number, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=spelled, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


def options_of(folder: Path) -> list[str]:
    """Options that make a command use the tiny model."""
    return ["--model", str(folder), "--load-format", "dummy", "--threads", "1"]


@contextmanager
def typed(text: str) -> Iterator[None]:
    """Replace stdin by this text."""
    before, sys.stdin = sys.stdin, io.StringIO(text)
    try:
        yield
    finally:
        sys.stdin = before


def rows_of(text: str) -> list[dict[str, Any]]:
    """Output lines in the order of the prompts."""
    return sorted(map(json.loads, text.splitlines()), key=lambda row: int(row["index"]))


@pytest.mark.usefixtures("shared_weights")
def test_the_bundled_model_knows_the_capital_of_france(smollm2: Path) -> None:
    done = headway(
        "generate", "The capital of France is", "2 + 2 =", "--model", smollm2, "--threads", "1",
        "--max-tokens", "3",
    )  # fmt: skip
    assert done.code == 0 and "The capital of France is Paris" in done.out
    assert done.out.index("France") < done.out.index("2 + 2 =")
    assert "2 prompts, 6 tokens" in done.err and "tokens/s" in done.err


def test_output_lines_equal_the_results_of_the_python_api(tiny: list[str]) -> None:
    asked = ["hello", "how are you", "x"]
    done = headway("generate", *asked, *tiny, "--json", "--max-tokens", "5", "--logprobs", "1")
    rows = rows_of(done.out)
    assert done.code == 0 and not done.err and len(rows) == 3
    with LLM(tiny[1], load_format="dummy", threads=1) as llm:
        results = llm.generate(asked, SamplingParams(temperature=0, max_tokens=5))
    for index, (row, result) in enumerate(zip(rows, results, strict=True)):
        [sample] = row["samples"]
        assert set(row) == ROW and set(sample) == SAMPLE
        assert (row["index"], row["id"], row["prompt"]) == (index, str(index), asked[index])
        assert sample["token_ids"] == result.outputs[0].token_ids
        assert sample["text"] == result.outputs[0].text
        assert row["num_prompt_tokens"] == len(result.prompt_token_ids)
        assert sample["finish_reason"] == "length" and row["error"] is None
        assert [entry["token"] for entry in sample["logprobs"]] == sample["token_ids"]
        assert 0 < row["timings"]["first_token"] <= row["timings"]["total"]


def test_n_stop_and_seed_are_used(tiny: list[str]) -> None:
    more = ["--temperature", "1", "--seed", "7", "-n", "3", "--max-tokens", "6", "--json"]
    first, again = (rows_of(headway("generate", "a", *tiny, *more).out)[0] for _ in range(2))
    assert first["samples"] == again["samples"] and len(first["samples"]) == 3
    assert len({tuple(sample["token_ids"]) for sample in first["samples"]}) == 3
    letter = next(c for sample in first["samples"] for c in sample["text"] if c.isascii())
    stopped = rows_of(headway("generate", "a", *tiny, *more, "--stop", letter).out)[0]
    for before, sample in zip(first["samples"], stopped["samples"], strict=True):
        assert sample["text"] == before["text"].split(letter)[0]
        assert sample["stop_reason"] == (letter if letter in before["text"] else None)


def test_scheduler_settings_are_used(tiny: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    done = headway(
        "generate", "abc", *tiny, "--max-tokens", "2", "--trace-out", trace, "--preset", "vllm",
        "--queue", "fcfs", "--max-num-seqs", "3", "--num-blocks", "50", "--async-scheduling",
    )  # fmt: skip
    header = json.loads(trace.read_text().splitlines()[0])
    config = header["config"]
    assert done.code == 0 and header["async_scheduling"] == 1
    assert (config["max_num_seqs"], config["num_blocks"]) == (3, 50)
    assert config["queue"].startswith("fcfs")
    assert headway("trace", trace).code == 0


def test_lines_have_their_own_parameters(tiny: list[str], tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": "long", "max_tokens": 9, "id": "a"},
        {"prompt_token_ids": [1, 2, 3], "max_tokens": 2, "id": 17},
        {"messages": [{"role": "user", "content": "hi"}], "temperature": 1.0, "seed": 3},
        {"prompt": "biased", "logit_bias": {"65": 100}, "max_tokens": 3},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    done = headway("generate", "first", "--file", file, "--out", out, *tiny, "--max-tokens", "4")
    assert done.code == 0 and not done.out
    order = [json.loads(line)["index"] for line in out.read_text().splitlines()]
    rows = rows_of(out.read_text())
    assert [row["id"] for row in rows] == ["0", "a", "17", "3", "4"]
    assert [len(row["samples"][0]["token_ids"]) for row in rows] == [4, 9, 2, 4, 3]
    assert order[0] == 2 and order[-1] == 1, "lines are written as they finish"
    assert rows[3]["num_prompt_tokens"] == len("user: hi\nassistant: ")
    assert rows[4]["samples"][0]["token_ids"] == [65, 65, 65]


@pytest.mark.parametrize(
    "text", ["one\ntwo\n\n", '{"prompt": "one"}\n{"prompt": "two"}', "one\r\ntwo"]
)
def test_prompts_come_from_stdin_as_text_or_json(tiny: list[str], text: str) -> None:
    with typed(text):
        done = headway("generate", "--file", "-", *tiny, "--json", "--max-tokens", "1")
    assert [row["prompt"] for row in rows_of(done.out)] == ["one", "two"]


def test_commands_import_the_model_code_only_when_needed() -> None:
    code = (
        "import sys; from headway.cli.main import main\n"
        "for command in ('simulate', 'generate', 'bench latency'):\n"
        "    sys.argv = ['headway', *command.split(), '--help']\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "    found = {'torch', 'tokenizers', 'gguf', 'jinja2'} & sys.modules.keys()\n"
        "    assert not found, f'{command} imports {found}'\n"
        "print('done')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout.endswith("done\n"), done.stderr


def test_without_torch_the_error_names_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['headway', 'generate', 'hello']\n"
        "from headway.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: ") and "torch" in done.stderr
    assert "pip install '.[torch]'" in done.stderr and done.stderr.count("\n") == 1


def test_an_invalid_line_is_reported_and_the_others_run(tiny: list[str], tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    lines = [
        '{"prompt": "fine"}', '{"prompt":', '["prompt"]', '{"prompt": 7}', '{"max_tokens": 3}',
        '{"prompt": "a", "messages": []}', '{"prompt": "a", "colour": "red"}',
        '{"prompt": "a", "temperature": -1}', '{"prompt": "a", "logit_bias": {"x": 1}}',
        '{"messages": [{"role": "user"}]}', '{"prompt_token_ids": [1, 999]}', '{"prompt": ""}',
        '{"prompt": "fine too", "id": "last"}',
    ]  # fmt: skip
    file.write_text("\n".join(lines))
    done = headway("generate", "--file", file, *tiny, "--json", "--max-tokens", "2")
    rows = rows_of(done.out)
    assert done.code == 1 and len(rows) == len(lines)
    assert [row["index"] for row in rows if row["error"] is None] == [0, 12]
    for number, row in list(enumerate(rows, start=1))[1:-1]:
        assert row["error"].startswith(f"{file}:{number}: "), row
        assert row["error"] in done.err and "samples" not in row
        assert re.findall(r"request '(\d+)'", row["error"]) in ([], [str(row["index"])]), row
    assert any("request '" in row["error"] for row in rows if row["error"])
    found = "\n".join(row["error"] for row in rows if row["error"])
    for problem in (
        "not JSON", "not a JSON object", "prompt must be a string", "found none",
        "prompt and messages", "unknown field 'colour'", "temperature must be", "'x' is not a token",
        "content", "999", "empty prompt",
    ):  # fmt: skip
        assert problem in found, problem
    assert "Traceback" not in done.err


def test_errors_are_printed_without_json_as_well(tiny: list[str], tmp_path: Path) -> None:
    file = tmp_path / "in.txt"
    file.write_text("a\n" + "b" * 600 + "\nc\n")
    done = headway("generate", "--file", file, *tiny, "--max-tokens", "1")
    assert done.code == 1 and f"error: {file}:2: " in done.err and "512" in done.err
    assert "2 prompts, 2 tokens" in done.err and "bbb" not in done.out


def test_the_error_of_one_of_several_prompts_names_the_prompt(tiny: list[str]) -> None:
    done = headway("generate", "a", "b" * 600, *tiny, "--max-tokens", "1")
    assert done.code == 1 and "error: prompt 2: " in done.err and "1 prompt, 1 token in" in done.err
    done = headway("generate", "b" * 600, *tiny, "--max-tokens", "1")
    assert done.code == 1 and "512" in done.err and "prompt 1" not in done.err
    assert len(done.err.splitlines()) == 1, "no statistics of nothing"


def test_without_a_valid_line_no_model_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("{\n")
    done = headway("generate", "--file", file, "--model", tmp_path / "nowhere", "--json")
    assert done.code == 1 and f"{file}:1: not JSON" in done.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "no prompts"),
        (("--file", "nowhere.txt"), "nowhere.txt: No such file"),
        (("a", "--temperature", "-1"), "temperature must be"),
        (("a", "--max-tokens", "0"), "max_tokens must be"),
        (("a", "-n", "0"), "n must be"),
        (("a", "--out", "no/such/folder.jsonl"), "no/such/folder.jsonl: "),
        (("a", "--trace-out", "no/such/folder.jsonl"), "no/such/folder.jsonl: "),
        (("a", "--model", "smollm3"), "smollm3"),
    ],
)
def test_an_error_is_reported_before_the_model_is_loaded(
    arguments: tuple[str, ...], problem: str
) -> None:
    assert problem in sentence("generate", *arguments)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--preset", "vlm"), "did you mean vllm?"), (("--queue", "fcsf"), "did you mean fcfs?"),
        (("--dtype", "int3"), "int3"), (("--quantization", "int3"), "int3"), (("--load-format", "zip"), "zip"),
        (("--kv-memory", "lots"), "lots"), (("--threads", "0"), "threads"),
        (("--threads", "1025"), "threads must be a whole number of at most 1024, not 1025"),
        (("--num-blocks", "0"), "num_blocks"),
    ],
)  # fmt: skip
def test_invalid_settings_are_reported(
    tiny: list[str], arguments: tuple[str, ...], problem: str
) -> None:
    assert problem in sentence("generate", "a", *tiny, *arguments)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
FIELDS = st.sampled_from([*prompts.CONTENTS, *prompts.PARAMS, "id", "other"])
LINE = st.one_of(st.text(), st.dictionaries(FIELDS, JSON, max_size=4).map(json.dumps))


@settings(max_examples=150, deadline=None)
@given(st.lists(LINE, min_size=1, max_size=4))
def test_any_file_is_read_or_rejected_line_by_line(lines: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "in.jsonl"
        file.write_text("\n".join(lines), encoding="utf-8", errors="replace", newline="")
        try:
            entries = prompts.read_prompts((), file, SamplingParams())
        except FormatError as error:
            assert "no prompts" in str(error)
            return
        for entry in entries:
            assert entry.error is None or entry.error.startswith(f"{file}:")
            assert isinstance(entry.content, str | list)
