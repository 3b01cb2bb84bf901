"""Laws of the command line: every command works; every error is one sentence with exit code 2."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from headway import __version__
from headway.cli.commands.compare import parse_variant
from headway.cli.main import COMMANDS, HEADINGS, app, main
from headway.errors import ConfigError
from headway.scheduler.policies.presets import NUMBERS, PRESETS, SLOTS
from headway.version import commit
from tests.support import quantized

WORK = "requests=12,arrivals=poisson(100),prompt=uniform(5,60),output=uniform(2,30),max_tokens=30"
PROFILE = "qwen3-0.6b-h200"
SMALL = ["--num-blocks=40", "--block-size=4", "--max-num-seqs=6", "--max-num-batched-tokens=64"]


class Done(NamedTuple):
    """The exit code and output of a command."""

    code: int
    out: str
    err: str


def headway(*arguments: str | Path) -> Done:
    """Run the command in this process, as its entry point does."""
    out, err, before, code = io.StringIO(), io.StringIO(), list(sys.path), 0
    argv, sys.argv = sys.argv, ["headway", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv, sys.path[:] = argv, before
    return Done(code, out.getvalue(), err.getvalue())


def refused(*arguments: str | Path) -> str:
    """The error message of a command that exits with code 2."""
    done = headway(*arguments)
    assert done.code == 2 and not done.out.strip(), done
    assert "Traceback" not in done.err and done.err.strip()
    return done.err


def sentence(*arguments: str | Path) -> str:
    """As `refused`, for one sentence instead of a usage message."""
    text = refused(*arguments).strip()
    assert text.startswith("error: ") and "\n" not in text, text
    return text


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Traces of the same workload under two presets."""
    folder = tmp_path_factory.mktemp("traces")
    files = {name: folder / f"{name}.jsonl" for name in ("headway", "vllm_v1")}
    for name, file in files.items():
        done = headway(
            "simulate", WORK, "--preset", name, "--profile", PROFILE, "--trace-out", file, *SMALL
        )
        assert done.code == 0, done.err
    return files


def test_the_module_runs_as_a_program() -> None:
    wrong = subprocess.run(
        [sys.executable, "-m", "headway", "simulate", "--preset", "unknown"],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert wrong.returncode == 2 and "'unknown'" in wrong.stderr
    assert "Traceback" not in wrong.stderr and not wrong.stdout


@pytest.mark.parametrize("known", ["abc1234", None])
def test_the_version_names_the_commit(known: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.cli.main.commit", lambda: known)
    shown = headway("--version").out.strip()
    assert shown == f"headway {__version__} (commit {known or 'unknown'})"


# Without the settings of the user, and of a git hook that may run the tests.
OWN_GIT = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
OWN_GIT["GIT_CONFIG_GLOBAL"] = os.devnull


def make_checkout(folder: Path, *lines: str) -> Path:
    """A package in a git checkout of its own; returns the package's folder."""
    package = folder / "project" / "headway"
    package.mkdir(parents=True)
    git = ["git", "-C", str(folder / "project"), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "Start"]):
        subprocess.run([*git, *command], check=True, env=OWN_GIT)
    return package


def test_the_commit_comes_from_the_build_or_from_the_checkout(tmp_path: Path) -> None:
    package = make_checkout(tmp_path)
    head = subprocess.run(
        ["git", "-C", str(package), "rev-parse", "HEAD"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = commit(package)
    assert found and len(found) >= 7 and head.stdout.startswith(found)
    inner = package.parent / ".venv" / "headway"
    inner.mkdir(parents=True)
    assert commit(inner) is None, "the checkout is another project's"
    (inner / "_commit.txt").write_text("abc1234\n")
    assert commit(inner) == "abc1234"
    assert commit(tmp_path / "missing") is None


def test_help_names_every_command() -> None:
    for arguments in ((), ("--help",)):
        done = headway(*arguments)
        text = done.out + done.err
        assert all(f" {name} " in text for name in ("simulate", "compare", "trace", "plan"))
    assert headway("--help").code == 0
    for command in COMMANDS:
        assert headway(*command.split(), "--help").code == 0


def test_the_list_of_commands_is_short_and_has_three_headings() -> None:
    group = typer.main.get_command(app)
    shown = headway("--help").out
    listed = [name for names in HEADINGS.values() for name in names]
    assert sorted(listed) == sorted(group.commands) and len(listed) <= 14  # type: ignore[attr-defined]
    assert [shown.index(f"\n{heading}:\n") for heading in HEADINGS]
    assert list(HEADINGS) == ["Run models", "Study scheduling", "Plan a deployment"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_truncates_nothing_in_a_narrow_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    group = typer.main.get_command(app)
    for name in command.split():
        group = group.commands[name]  # type: ignore[attr-defined]
    text = headway(*command.split(), "--help").out
    assert "…" not in text and all(len(line) <= 80 for line in text.splitlines())
    for parameter in group.params:
        for flag in (*parameter.opts, *parameter.secondary_opts):
            assert flag in text.split() or not flag.startswith("--") or f"{flag}," in text, flag
    if "--headroom" in text:
        policies = [policy.__name__ for each in SLOTS.values() for policy in each]
        assert not [name for name in policies if name not in text and name != "custom"]


def test_the_list_of_commands_has_whole_sentences() -> None:
    for words in (("--help",), ("bench", "--help"), ("plan", "--help")):
        commands = headway(*words).out.partition("  --help")[2]
        assert commands.count(".") >= 3 and "..." not in commands and "…" not in commands


def test_simulate_reports_a_run() -> None:
    done = headway("simulate", WORK, "--profile", PROFILE, *SMALL)
    assert done.code == 0
    assert "12 of 12 completed" in done.out and "time to first token" in done.out
    assert "doctor" in done.out


SUMMARY_KEYS = {
    "requests", "completed", "rejected", "finish_reasons", "seconds", "requests_per_second",
    "output_tokens", "output_tokens_per_second", "prompt_tokens", "ttft", "time_between_tokens",
    "end_to_end", "queue_time", "steps", "per_step", "preemptions", "preemptions_per_second",
    "preemptions_by_swap", "preemptions_for_priority", "recomputed_tokens", "recompute_tax",
    "swapped_blocks", "cache_hit_ratio", "waiting_steps_by_reason", "clients", "fairness",
    "deadlines", "deadline_misses", "longest_stall", "ttft_by_prompt",
    "swap_in", "drafted_tokens", "accepted_share", "tokens_per_verification",
}  # fmt: skip
LATENCY = {"mean", "p50", "p90", "p99", "p99.9", "max"}
TIMES = ("ttft", "time_between_tokens", "longest_stall", "swap_in", "end_to_end", "queue_time")
NESTED_KEYS = {
    **dict.fromkeys(TIMES, LATENCY),
    "swapped_blocks": {"out", "in"},
    "per_step": {
        "running", "running_share", "tokens", "tokens_share", "prefill_share", "waiting",
        "free_blocks", "seconds",
    },
}  # fmt: skip


def check_summary(summary: dict[str, Any]) -> None:
    """The keys that scripts rely on; change them only on purpose."""
    assert set(summary) == SUMMARY_KEYS
    for key, inner in NESTED_KEYS.items():
        assert set(summary[key]) == inner, key
    for each in summary["ttft_by_prompt"]:
        assert set(each) == LATENCY | {"from", "to", "requests"}


def check_report(report: dict[str, Any]) -> None:
    config, doctor = report.pop("config"), report.pop("doctor")
    assert set(config) == {*SLOTS, *NUMBERS}
    assert all(set(finding) == {"symptom", "cause", "remedy", "changes"} for finding in doctor)
    check_summary(report)


def test_simulate_prints_json_with_documented_keys() -> None:
    done = headway("simulate", WORK, "--profile", PROFILE, "--json", *SMALL)
    assert done.code == 0
    report = json.loads(done.out)
    check_report(report)
    assert report["completed"] == 12


def test_every_slot_and_number_can_be_set() -> None:
    done = headway(
        "simulate", WORK, "--profile", PROFILE, "--json", *SMALL, "--preset", "vllm", "--batching",
        "mixed", "--queue", "fair(3)", "--chunk", "at_most(32)", "--headroom", "watermark(0.05)",
        "--victim", "least_work", "--swap", "swap", "--num-scheduler-steps", "2", "--num-host-blocks",
        "9", "--max-model-len", "500", "--async-scheduling", "--limit", "5",
    )  # fmt: skip
    report = json.loads(done.out)
    config = report["config"]
    assert config["batching"] == "mixed" and config["queue"] == "fair(max_overtakes=3)"
    assert config["chunk"] == "at_most(tokens=32)" and config["victim"] == "least_work"
    numbers = {"num_blocks": 40, "max_model_len": 500, "num_scheduler_steps": 2}
    assert numbers.items() <= config.items()
    assert report["requests"] == 5


def test_a_users_policy_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cli_user_policy.py").write_text("def last(request, view):\n    return -1\n")
    monkeypatch.chdir(tmp_path)
    done = headway(
        "simulate", WORK, "--profile", PROFILE, "--json", "--victim", "cli_user_policy:last"
    )
    assert json.loads(done.out)["config"]["victim"] == "cli_user_policy:last"


def test_simulate_reads_workload_files(tmp_path: Path) -> None:
    csv = tmp_path / "a.csv"
    csv.write_text("arrival_s,prompt_tokens,output_tokens\n0,20,5\n0.5,30,6\n")
    done = headway("simulate", csv, "--profile", PROFILE, "--json", "--speed", "2")
    assert json.loads(done.out)["output_tokens"] == 11


def test_rejected_requests_are_shown_with_their_reasons() -> None:
    mixed = "requests=9,prompt=0.5*fixed(1000)+0.5*fixed(9),output=5"
    done = headway("simulate", mixed, "--profile", PROFILE, *SMALL)
    assert done.code == 0 and not done.err
    assert "rejected" in done.out and "40" in done.out
    for more in ((), ("--json",)):
        work = "requests=3,prompt=1000,output=5"
        done = headway("simulate", work, "--profile", PROFILE, *SMALL, *more)
        assert done.code == 1 and "3" in done.out and "rejected" in done.out
        assert done.err.startswith("error: ") and "num_blocks is 40" in done.err


def test_one_is_singular() -> None:
    work = "requests=1,prompt=5,output=1"
    assert "s, 1 step " in headway("simulate", work, "--profile", PROFILE).out
    done = headway("simulate", "requests=1,prompt=999,output=1", "--profile", PROFILE, *SMALL)
    assert "1 request was rejected" in done.out


def test_compare_shows_presets_and_variants_side_by_side() -> None:
    arguments = [
        "compare", WORK, "--profile", PROFILE, *SMALL, "--presets", "vllm_v1, static",
        "--variant", "mine: vllm_v1; headroom=watermark(0.1); max_num_seqs=3",
        "--variant", "other: headway",
    ]  # fmt: skip
    done = headway(*arguments)
    assert done.code == 0
    assert all(name in done.out for name in ("vllm_v1", "static", "mine", "other", "tok/s"))
    summaries = json.loads(headway(*arguments, "--json").out)
    assert list(summaries) == ["vllm_v1", "static", "mine", "other"]
    for summary in summaries.values():
        check_summary(summary)
    assert summaries["mine"]["per_step"]["running"] <= 3


def test_compare_uses_all_presets_by_default() -> None:
    done = headway("compare", WORK, "--profile", PROFILE, "--json", "--limit", "4")
    assert list(json.loads(done.out)) == list(PRESETS)


def test_a_variant_is_parsed() -> None:
    assert parse_variant("a: vllm; queue=fcfs(2) ; max_num_batched_tokens = 99") == (
        "a", "vllm", {"queue": "fcfs(2)", "max_num_batched_tokens": 99},
    )  # fmt: skip
    assert parse_variant("a:vllm") == ("a", "vllm", {})
    assert parse_variant("own: vllm; victim=module:function")[2] == {"victim": "module:function"}
    for text in ("vllm", ": vllm", "a: vllm; queue", "a: vllm; max_num_batched_tokens=many"):
        with pytest.raises(ConfigError):
            parse_variant(text)


def test_trace_summarizes_a_file(traces: dict[str, Path]) -> None:
    done = headway("trace", traces["headway"])
    assert done.code == 0 and "12 of 12 completed" in done.out
    report = json.loads(headway("trace", traces["headway"], "--json").out)
    live = json.loads(headway("simulate", WORK, "--profile", PROFILE, "--json", *SMALL).out)
    assert report == live
    check_report(report)


def test_trace_replays_a_file(traces: dict[str, Path]) -> None:
    done = headway("trace", traces["vllm_v1"], "--replay")
    assert done.code == 0 and "steps replayed" in done.out


def test_the_replay_of_a_redacted_trace_is_refused_with_the_reason(tmp_path: Path) -> None:
    trace = tmp_path / "red.jsonl"
    run = ("--profile", PROFILE, "--trace-out", trace, "--trace-redact", *SMALL)
    assert headway("simulate", WORK, *run).code == 0
    said = sentence("trace", trace, "--replay")
    assert "recorded with --trace-redact" in said and "cannot be replayed" in said


def test_trace_replays_a_users_policy_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_replayed.py").write_text("def one(request, view):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "t.jsonl"
    run = ("--headroom", "my_replayed:one", "--profile", PROFILE, "--trace-out", trace)
    assert headway("simulate", WORK, *run, *SMALL).code == 0
    del sys.modules["my_replayed"]
    done = headway("trace", trace, "--replay", "--allow-own-policies")
    assert done.code == 0 and "all decisions are equal" in done.out, done.err


def test_trace_exports_for_perfetto(traces: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "events.json"
    assert headway("trace", traces["headway"], "--perfetto", out).code == 0
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == set("MiXCbe")


def test_trace_shows_where_two_files_differ(traces: dict[str, Path]) -> None:
    left, right = traces.values()
    same = headway("trace", left, "--diff", left)
    assert same.code == 0 and "equal decisions" in same.out
    assert f"{left} and {left}" in same.out
    assert headway("trace", left, "--diff", left, "--json").code == 0
    done = headway("trace", left, "--diff", right)
    assert done.code == 1 and "differ from step" in done.out and not done.err
    done = headway("trace", left, "--diff", right, "--json")
    found = json.loads(done.out)
    assert set(found) == {"step", "lines"} and isinstance(found["step"], int) and done.code == 1


def test_demo_compares_static_and_continuous_batching() -> None:
    shown = json.loads(headway("compare", "--demo", "--json").out)
    assert set(shown) == {"utilization", "presets"} and set(shown["presets"]) == set(PRESETS)
    shares = shown["utilization"]
    assert set(shares) == {"static", "vllm_v1", "headway"}
    assert shares["static"] < 0.3 and shares["vllm_v1"] > 0.9 and shares["headway"] > 0.9
    for more in ((WORK,), ("--max-num-seqs", "4"), ("--variant", "a: vllm"), ("--replicas", "2")):
        assert "--demo" in sentence("compare", "--demo", *more)


def test_lists_are_complete() -> None:
    described = json.loads(headway("models", "--presets", "--json").out)
    assert set(described) == set(PRESETS)
    assert all(set(config) == {*SLOTS, *NUMBERS} for config in described.values())
    assert headway("models", "--presets").code == 0
    profiles = json.loads(headway("models", "--profiles", "--json").out)
    assert PROFILE in profiles and all(set(p) == {"kv_tokens"} for p in profiles.values())
    assert PROFILE in headway("models", "--profiles").out
    assert "--presets and --profiles" in sentence("models", "--presets", "--profiles")


def test_a_model_is_described_from_its_header(tmp_path: Path) -> None:
    quantized.write(tmp_path, quantized.SCHEMES["awq"])
    shown = json.loads(headway("models", tmp_path, "--json").out)
    assert shown["family"] == "llama" and shown["format"] == "awq, 4 bits, groups of 64"
    assert (shown["CPU"]["runs_as"], shown["GPU"]["runs_as"]) == ("float32", "int4")
    assert shown["CPU"]["weights_bytes"] == 4 * shown["parameters"]
    assert shown["CPU"]["longest_context"] == 128 and shown["CPU"]["requests_of_this_length"] > 1
    assert "groups of 64" in headway("models", tmp_path).out
    assert "no such" in sentence("models", tmp_path / "none")
    assert "int3" in sentence("models", tmp_path, "--memory", "int3")


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 1000, "hidden_size": 512,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 4,
}  # fmt: skip


def test_a_config_says_what_a_model_needs_before_it_is_downloaded(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(EXPERTS))
    given = ("models", tmp_path, "--device", "cpu", "--dtype", "bfloat16")
    shown = json.loads(headway(*given, "--memory", "1GiB", "--json").out)
    facts, expert = shown["CPU"], 3 * 512 * 512
    assert shown["parameters"] - shown["parameters_per_token"] == 2 * (64 - 4) * expert
    assert facts["weights_bytes"] == 2 * shown["parameters"] and "GPU" not in shown
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 64 * 2 and facts["longest_context"] == 4096
    assert facts["requests_of_this_length"] == (2**30 - facts["weights_bytes"]) // (
        4096 * facts["kv_bytes_per_token"]
    )
    rate = facts["tokens_per_second"] / 1e9
    num_read = 2 * (shown["parameters_per_token"] - 1000 * 512) + 1000 * facts["kv_bytes_per_token"]
    assert f"{rate * num_read:,.1f} GB/s" in facts["speed"] and "at most" in facts["speed"]
    small = headway(*given, "--memory", "100MiB")
    assert "too little" in small.out and "per second" not in small.out and small.code == 0
    file.write_text(json.dumps(EXPERTS | {"hidden_act": "relu"}))
    assert "hidden_act 'relu' is not supported" in sentence(*given)
    file.write_text(json.dumps(EXPERTS | {"architectures": ["MambaForCausalLM"]}))
    assert "MambaForCausalLM is not supported" in sentence(*given)


def test_the_demo_names_the_command_that_runs_it() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    target = makefile.partition("\ndemo:")[2].partition("\n\n")[0]
    assert "headway compare --demo" in target


def test_a_missing_file_is_reported_with_its_name() -> None:
    for command in (("simulate", "nowhere.csv"), ("compare", "nowhere.jsonl")):
        assert command[1] in sentence(*command)
    for more in ((), ("--json",), ("--replay",), ("--perfetto", "out.json")):
        assert "nowhere.jsonl: " in sentence("trace", "nowhere.jsonl", *more)
    assert not Path("out.json").exists()


def test_a_workload_file_of_unknown_type_is_reported(tmp_path: Path) -> None:
    (tmp_path / "work.txt").write_text("hello")
    assert "work.txt" in sentence("simulate", tmp_path / "work.txt")
    assert "known" in sentence("simulate", "hello")


def test_an_invalid_line_is_reported_with_its_file_and_number(tmp_path: Path) -> None:
    csv, jsonl = tmp_path / "bad.csv", tmp_path / "bad.jsonl"
    csv.write_text("arrival_s,prompt_tokens,output_tokens\n0,20,5\n0,many,5\n")
    jsonl.write_text('{"arrival":0,"prompt":5,"output":2}\n{"arrival":\n')
    assert f"{csv}:3: prompt_tokens" in sentence("simulate", csv)
    assert f"{jsonl}:2: not JSON" in sentence("simulate", jsonl)


BAD_TRACES = {
    "not json": "hello\n",
    "no header": '{"step":0}\n',
    "old": '{"headway_trace":0}\n',
    "cut off": '{"headway_trace":3,"config":{},"async_scheduling":false}\n{"event":\n',
    "empty": "",
    "no config": '{"headway_trace":3}\n',
    "no numbers": '{"headway_trace":3,"config":{"max_num_seqs":1},"async_scheduling":false}\n',
    "no fields": '{"headway_trace":3,"config":{},"async_scheduling":false}\n{"event":"added"}\n',
}


@pytest.mark.parametrize("kind", BAD_TRACES)
@pytest.mark.parametrize("more", [(), ("--replay",), ("--perfetto", "x.json"), ("--diff", "SAME")])
def test_an_invalid_trace_is_reported(tmp_path: Path, kind: str, more: tuple[str, ...]) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(BAD_TRACES[kind])
    arguments = [str(file) if a == "SAME" else a.replace("x.json", f"{tmp_path}/x") for a in more]
    assert "bad.jsonl" in sentence("trace", file, *arguments)


SIZES = (
    '"max_num_seqs":4,"max_num_batched_tokens":64,"block_size":16,"num_blocks":9,"max_model_len":99'
)
ENDS = '{"event":"completed","step":0,"start":0,"end":0}\n'  # of a step that no line has begun
UNREADABLE = {
    "no plan": f'{{"headway_trace":3,"config":{{{SIZES}}},"async_scheduling":false}}\n{ENDS}',
    "no number": f'{{"headway_trace":3,"config":{{"block_size":16}},"async_scheduling":false}}\n{ENDS}',
    "a text": '{"headway_trace":3,"config":'
    f'{{{SIZES.replace("16", chr(34) + "x" + chr(34))}}},"async_scheduling":false}}\n{ENDS}',
}


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize(
    "command",
    [("trace",), ("trace", "--replay"), ("doctor",), ("simulate",), ("lab", "--terminal")],
)
def test_a_trace_that_does_not_continue_its_run_is_refused_in_a_sentence(
    tmp_path: Path, kind: str, command: tuple[str, ...]
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(UNREADABLE[kind])
    assert sentence(command[0], file, *command[1:])


def test_a_changed_trace_is_reported_with_its_step(traces: dict[str, Path], tmp_path: Path) -> None:
    lines = traces["headway"].read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if '"planned","step":3,' in line)
    lines[place] = lines[place].replace('"free":', '"free":9')
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines) + "\n")
    assert "step 3" in sentence("trace", file, "--replay")


def test_unknown_names_are_reported_with_known_ones() -> None:
    assert "did you mean vllm?" in sentence("simulate", WORK, "--preset", "vlm")
    assert "did you mean static?" in sentence("compare", WORK, "--presets", "vllm,statik")
    for command in ("simulate", "compare"):
        assert PROFILE in sentence(command, WORK, "--profile", "nothing")
    assert "known: " in sentence("simulate", "requests=3,colour=red")
    assert "did you mean fcfs?" in sentence("simulate", WORK, "--queue", "fcsf")
    assert "nothing:at_all" in sentence("simulate", WORK, "--victim", "nothing:at_all")


@pytest.mark.parametrize(
    "variant",
    ["vllm", ": vllm", "a: unknown", "a: vllm; colour=red", "a: vllm; queue", "a: vllm; queue=red",
     "a: vllm; max_num_batched_tokens=many", "a: vllm; max_num_batched_tokens=0", ""],
)  # fmt: skip
def test_an_invalid_variant_is_reported(variant: str) -> None:
    sentence("compare", WORK, "--presets", "static", "--variant", variant)


def test_a_wrong_name_in_a_variant_is_reported_after_the_variants_name() -> None:
    text = sentence("compare", WORK, "--variant", "careful: vllm_v1; headrom=1")
    assert "variant 'careful': unknown slot or number 'headrom'; did you mean headroom?" in text


def test_a_wrong_field_of_a_synthetic_workload_is_reported_with_a_suggestion() -> None:
    text = sentence("simulate", "request=60")
    assert "'request=60'; did you mean requests? Known: requests, " in text
    assert "did you mean" not in sentence("simulate", "requests=")


def test_allowed_tokens_are_refused_for_a_synthetic_workload() -> None:
    text = sentence("simulate", "requests=3", "--allowed-tokens", "99")
    assert "--allowed-tokens" in text and "'requests=3,max_tokens=99'" in text
    text = sentence("simulate", "requests=3", "--accept", "0.5")
    assert "--accept" in text and "'requests=3,accept=0.5'" in text


def test_a_name_that_is_used_twice_is_reported() -> None:
    variant = ("--variant", "static: vllm")
    assert "static" in sentence("compare", WORK, "--presets", "static", *variant)


def test_a_comparison_without_schedulers_is_reported() -> None:
    sentence("compare", WORK, "--presets", "")


@pytest.mark.parametrize(
    "flag",
    ["max-num-batched-tokens=0", "num-blocks=0", "limit=0", "limit=-3", "speed=0", "speed=nan"],
)
def test_invalid_numbers_are_reported(tmp_path: Path, flag: str) -> None:
    csv = tmp_path / "a.csv"
    csv.write_text("arrival_s,prompt_tokens,output_tokens\n0,20,5\n")
    sentence("simulate", csv, "--profile", PROFILE, f"--{flag}")


@pytest.mark.parametrize("flag", ["limit=0", "limit=-3", "speed=0"])
def test_invalid_numbers_are_reported_for_synthetic_workloads(flag: str) -> None:
    sentence("simulate", WORK, "--profile", PROFILE, f"--{flag}")


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_a_length_above_the_profiles_limit_is_reported_with_both_numbers(command: str) -> None:
    text = sentence(command, WORK, "--profile", PROFILE, "--max-model-len", "50000")
    assert all(part in text for part in ("max_model_len", "40960", "50000", PROFILE))


def test_an_unwritable_file_is_reported_with_its_name(
    traces: dict[str, Path], tmp_path: Path
) -> None:
    for bad in (tmp_path / "no" / "folder.jsonl", tmp_path):
        assert str(bad) in sentence("simulate", WORK, "--profile", PROFILE, "--trace-out", bad)
        assert str(bad) in sentence("trace", traces["headway"], "--perfetto", bad)


def test_square_brackets_in_errors_are_printed_unchanged() -> None:
    assert "[bold]x[/bold]" in sentence("simulate", WORK, "--preset", "[bold]x[/bold]")
    assert "[/]" in sentence("simulate", WORK, "--queue", "[/]")


@pytest.mark.parametrize("flag", ["--pipeline-parallel-size", "--enable-lora"])
def test_an_option_of_vllm_that_is_not_supported_is_reported_as_such(flag: str) -> None:
    assert f"{flag} is not supported: " in sentence("serve", flag, "2")


def test_an_unknown_option_is_reported_without_a_traceback() -> None:
    assert "--colour" in sentence("simulate", WORK, "--colour", "red")
    for form in (("--num-blocks", "many"), ("--num-blocks=many",)):
        assert "--num-blocks many: " in sentence("simulate", WORK, *form)
    assert "--port 99999: " in sentence("serve", "--port", "99999")
    assert "file" in sentence("trace").lower()
    refused("nonsense")
