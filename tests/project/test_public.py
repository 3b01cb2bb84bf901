"""The public surface, frozen: names that users, scripts and files rely on.

A failing test here means that a user's code, script or file breaks. Change it on purpose, in the same
commit as the CHANGELOG line.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import msgspec
import typer.main
from msgspec import UNSET

import headway
from headway import PRESETS, SamplingParams, errors, preset
from headway.cli.main import app
from headway.lab.cost import known_profiles, load_profile
from headway.lab.simulate import simulate
from headway.lab.workload.synthetic import FIELDS, parse_synthetic
from headway.record import lines as record_lines
from headway.record.lines import VERSION
from headway.request import RequestParams, RequestState
from headway.scheduler.policies.presets import NUMBERS, PARTS, SLOTS
from tests.support.journals import Lines
from tests.support.served import server

EXPORTS = {
    "LLM", "PRESETS", "AsyncEngine", "CompletionOutput", "Config", "EmbeddingRequestOutput", "Engine",
    "Grammar", "Plan", "RealClock", "Request", "RequestOutput", "SamplingParams", "Scheduler", "RequestState",
    "Completed", "StepResult", "StructuredOutputsParams", "VirtualClock", "SchedulerView", "preset",
}  # fmt: skip
PRESET_NAMES = ["headway", "nano_vllm", "deep_dive", "vllm", "vllm_v1", "minivllm", "static"]
POLICIES = {
    "batching": [
        "mixed",
        "swapped_first",
        "prefill_first",
        "prefill_first_charge_cached",
        "static",
    ],
    "queue": ["fcfs", "priority", "shortest_first", "fair", "earliest_deadline", "custom"],
    "chunk": ["whole", "split_first", "split_any", "at_most", "hold_tbt"],
    "headroom": ["watermark", "reserve_outputs", "future_peak", "back_off"],
    "victim": [
        "served_last",
        "newest",
        "least_work",
        "fewest_generated",
        "lowest_priority",
        "fewest_private_blocks",
    ],
    "swap": ["recompute", "swap", "swap_if_cheaper", "discard_output"],
    "draft": ["fixed", "by_cost"],
    "drafter": ["ngram", "suffix", "model", "repeat_last"],
}
NUMBER_NAMES = [
    "max_num_seqs", "max_num_batched_tokens", "num_scheduler_steps", "block_size", "num_blocks", "num_host_blocks",
    "max_model_len",
]  # fmt: skip
PARAM_NAMES = [
    "max_tokens", "max_total_tokens", "min_tokens", "eos_ids", "stop_ids", "ignore_eos", "priority", "client",
    "deadline", "salt", "reads_cache", "n", "pooling", "prediction", "sampling",
]  # fmt: skip
LLM_NAMES = [
    "model", "device", "dtype", "quantization", "load_format", "chat_template", "kv_cache_dtype",
    "attention", "deterministic", "kv_memory", "gpu_memory_utilization", "enforce_eager", "seed",
    "tensor_parallel_size", "tensor_parallel_sums", "trust_remote_code", "threads", "trace_out",
    "trace_blocks", "trace_redact", "async_scheduling", "speculative_config", "preset", *POLICIES,
    *NUMBER_NAMES, "progress", "observers", "rank_launcher",
]  # fmt: skip
ERRORS = {
    "HeadwayError": ["Exception"],
    "ConfigError": ["HeadwayError", "ValueError"],
    "OwnPolicyError": ["ConfigError"],
    "RequestError": ["HeadwayError", "ValueError"],
    "InvalidRequest": ["RequestError"],
    "InvalidGrammar": ["InvalidRequest"],
    "RequestTooLong": ["RequestError"],
    "NotResumable": ["RequestError"],
    "Overloaded": ["RequestError"],
    "ModelError": ["HeadwayError"],
    "FormatError": ["HeadwayError", "ValueError"],
    "ReplayMismatch": ["HeadwayError"],
    "PolicyError": ["HeadwayError"],
    "ExecutorError": ["HeadwayError"],
    "NoReplica": ["ExecutorError"],
}
SCHEDULER_FLAGS = {
    "--batching", "--queue", "--chunk", "--headroom", "--victim", "--swap", "--draft", "--drafter",
    "--speculative-config", "--max-num-seqs",
    "--max-num-batched-tokens", "--num-scheduler-steps", "--block-size", "--num-blocks", "--num-host-blocks",
    "--max-model-len", "--async-scheduling", "--no-async-scheduling",
}  # fmt: skip
RUN_FLAGS = {
    *SCHEDULER_FLAGS, "--profile", "--json", "--limit", "--speed", "--allowed-tokens", "--accept",
}  # fmt: skip
PLANNER_FLAGS = {
    *RUN_FLAGS, "--preset", "--jobs", "--history", "--no-history", "--ray",
}  # fmt: skip
TARGET_FLAGS = {
    f"--{latency}-{statistic}"
    for latency in ("ttft", "tbt", "stall", "e2e")
    for statistic in ("p50", "p90", "p99", "p99.9", "max")
}
MODEL_FLAGS = {
    *SCHEDULER_FLAGS, "--preset", "--model", "-m", "--device", "--dtype", "--quantization", "--load-format",
    "--kv-cache-dtype", "--attention", "--deterministic", "--kv-memory", "--gpu-memory-utilization", "--threads",
    "--tensor-parallel-size", "--tensor-parallel-sums",
    "--trace-out", "--trace-blocks", "--trace-redact",
}  # fmt: skip
SAMPLING_FLAGS = {
    "--max-tokens", "--temperature", "--top-p", "--top-k", "--min-p", "--repetition-penalty",
    "--seed", "--stop",
}  # fmt: skip
FLEET_FLAGS = {
    "--fleet-hang-seconds", "--fleet-stall-seconds", "--fleet-no-replica-seconds",
    "--fleet-max-waiting", "--fleet-verdict-seconds", "--fleet-drain-seconds",
    "--fleet-max-replica-losses", "--fleet-max-total-losses", "--fleet-orphan-seconds",
}  # fmt: skip
SERVE_FLAGS = {
    "name", "--host", "--port", "--served-model-name", "--chat-template", "--tool-call-parser",
    "--reasoning-parser",
    "--api-server-count", "--engine-process", "--no-engine-process",
    "--api-key", "--api-key-file", "--allowed-origins", "--allowed-host", "--grace", "--watchdog",
    "--metrics-prefix", "--disable-additional-properties", "--spans", "--max-waiting", "--max-waiting-tokens",
    "--max-per-client", "--timeout", "--stall-timeout", "--timeout-head", "--timeout-keep-alive",
    "--max-connections", "--max-connections-per-address", "--max-body", "--log-format", "--log-level",
    "--replicas", "--max-replicas", "--ray-address", "--route", *FLEET_FLAGS,
}  # fmt: skip
COMMANDS = {
    "run": {"--max-tokens", "--json", *MODEL_FLAGS},
    "generate": {
        "prompt", "--file", "--out", "--json", "--ignore-eos", "--n", "-n", "--logprobs",
        *MODEL_FLAGS, *SAMPLING_FLAGS,
    },
    "chat": {"--system", *MODEL_FLAGS, *SAMPLING_FLAGS},
    "serve": {*SERVE_FLAGS, *MODEL_FLAGS},
    "deploy": {"--name", "--delete", "--print-config", "--json", *SERVE_FLAGS, *MODEL_FLAGS},
    "top": {"url", "--api-key", "--every", "--once"},
    "doctor": {"target", "--try", "--profile", "--api-key", "--allow-own-policies", "--json"},
    "bench throughput": {
        "--num-prompts", "--input-len", "--output-len", "--seed", "--dataset-path",
        "--dataset-name", "--max-input-len", "--max-output-len", "--json",
        *MODEL_FLAGS,
    },
    "bench latency": {
        "--batch-size", "--input-len", "--output-len", "--num-iters", "--num-iters-warmup",
        "--seed", "--json", *MODEL_FLAGS,
    },
    "bench serve": {
        "--base-url", "--model", "--api-key", "--timeout", "--prompts", "--vocab-size", "--temperature",
        "--seed", "--num-prompts", "--input-len", "--output-len", "--request-rate", "--max-concurrency",
        "--trace", "--speed", "--max-input-len", "--max-output-len", "--goodput", "--plot",
        "--json",
    },
    "models": {
        "--fetch", "--json", "--verbose", "--presets", "--profiles", "path", "--memory",
        "--profile", "--device", "--dtype", "--quantization", "--kv-cache-dtype",
        "--max-model-len", "--gpu-memory-utilization",
    },
    "bench profile": {
        "model", "--device", "--json", "--kv-memory", "--load-format", "--name", "--out",
        "--dtype", "--quantization", "--quick", "--threads",
    },
    "simulate": {
        "workload", "--preset", "--trace-out", "--trace-blocks", "--trace-redact", "--disaggregate",
        "--replicas", "--route", *RUN_FLAGS,
    },
    "compare": {
        "workload", "--presets", "--variant", "--replicas", "--routes", "--plot", "--demo", *RUN_FLAGS,
    },
    "plan sweep": {"knobs", "--workload", "-w", "--metric", "--plot", *PLANNER_FLAGS},
    "plan breakeven": {"--profile", "--plot", "--json"},
    "plan tune": {
        "workload", "--knob", "--budget", "--seed", "--verify", "--plot", *PLANNER_FLAGS,
        *TARGET_FLAGS,
    },
    "plan capacity": {"workload", "--rate", "--seeds", "--seed", *PLANNER_FLAGS, *TARGET_FLAGS},
    "trace": {"file", "--perfetto", "--diff", "--replay", "--allow-own-policies", "--json"},
    "lab": {
        "source", "--preset", "--profile", "--port", "--export", "--open", "--no-open", "--attach",
        "--api-key", "--against", "--terminal", "--allow-own-policies", *SCHEDULER_FLAGS,
    },
}  # fmt: skip
ENDPOINTS = {
    "POST /v1/completions", "POST /v1/chat/completions", "POST /v1/embeddings", "POST /v1/responses", "POST /v1/messages",
    "POST /v1/messages/count_tokens", "GET /ping", "POST /tokenize",
    "POST /detokenize", "GET /v1/models", "GET /v1/models/{model}", "GET /version", "GET /health",
    "GET /load", "POST /reset_prefix_cache", "GET /metrics",
}  # fmt: skip
TRACE_FIELDS = {  # of a header, of each event, and of the parts of events; the required ones first
    "HeaderLine": "headway_trace config async_scheduling | has_blocks is_redacted profile replica",
    "AddedLine": "event t requests |",
    "AbortedLine": "event t end |",
    "ResetLine": "event t | is_forced preempted",
    "ReconfiguredLine": "event t config |",
    "PlannedLine": "event step t running waiting free | preempted admitted chunks drafts decodes "
    "num_steps decode_context deferred copied_out copied_in blocked not_considered has_failed blocks",
    "CompletedLine": "event step start end | swap_in builds gained failed finished",
    "FailedLine": "event t reason | ended preempted",
    "RequestLine": "id arrival prompt max_tokens limit | max_total_tokens min_tokens priority client "
    "deadline salt stop_ids parent sample reads_cache pooling output prediction",
    "EndLine": "id finish_reason output | kept cached recomputed preemptions stop_token error "
    "error_code",
    "BlocksLine": "| hits admitted new out in",
    "PreemptionLine": "id kind num_lost is_priority num_due num_free |",
}


def test_the_exports_of_the_package() -> None:
    assert set(headway.__all__) == EXPORTS
    assert all(hasattr(headway, name) for name in EXPORTS)


def test_the_names_of_presets_slots_policies_and_numbers() -> None:
    assert list(PRESETS) == PRESET_NAMES
    assert {name: [p.__name__ for p in group] for name, group in SLOTS.items()} == POLICIES
    assert [part.__name__ for part in PARTS] == ["limit", "learned"]
    assert list(NUMBERS) == NUMBER_NAMES


def test_every_policy_has_a_one_line_description() -> None:
    for group in (*SLOTS.values(), PARTS):
        for policy in group:
            first = (policy.__doc__ or "").strip().split("\n")[0]
            assert first.endswith((".", ":")) or first, policy
            assert not first.startswith(policy.__name__ + "("), f"{policy} has no docstring"


def test_the_parameters_of_a_request() -> None:
    assert [field.name for field in fields(RequestParams)] == PARAM_NAMES
    states = {"waiting", "prefill", "decoding", "swapped", "finished"}
    assert {s.value for s in RequestState} == states


def test_the_arguments_of_llm() -> None:
    assert list(inspect.signature(headway.LLM).parameters) == LLM_NAMES


def test_the_methods_of_llm() -> None:
    methods = {name for name in vars(headway.LLM) if not name.startswith("_")}
    assert methods == {
        "generate", "try_generate", "chat", "embed", "stream", "chat_tokens", "get_tokenizer",
        "reset_cache", "close", "beam_search",
    }  # fmt: skip
    arguments = {name: list(inspect.signature(getattr(headway.LLM, name)).parameters)[1:]
                 for name in ("generate", "chat", "embed", "stream")}  # fmt: skip
    assert arguments == {
        "generate": [
            "prompts", "sampling_params", "use_tqdm", "lora_request", "priority",
            "request_ids", "on_finish",
        ],
        "chat": [
            "messages", "sampling_params", "use_tqdm", "lora_request", "add_generation_prompt",
            "continue_final_message", "tools", "chat_template_kwargs",
        ],
        "embed": ["prompts", "pooling", "use_tqdm"],
        "stream": ["prompts", "sampling_params"],
    }  # fmt: skip


def test_sampling_params_have_the_names_and_defaults_of_vllm() -> None:
    found = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}
    assert found == {
        "n": 1, "max_tokens": 16, "min_tokens": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
        "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "logit_bias": None, "seed": None, "logprobs": None, "prompt_logprobs": None, "stop": None,
        "include_stop_str_in_output": False, "stop_token_ids": (), "ignore_eos": False,
        "bad_words": (), "allowed_token_ids": None, "skip_special_tokens": True,
        "structured_outputs": None, "grammar": None, "priority": 0, "client": "", "deadline": None,
        "salt": "",
    }  # fmt: skip


def test_outputs_have_the_fields_of_vllm() -> None:
    assert [f.name for f in fields(headway.RequestOutput)] == [
        "request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished",
        "metrics", "num_cached_tokens", "num_preemptions", "num_drafted", "num_accepted",
    ]  # fmt: skip
    assert [f.name for f in fields(headway.CompletionOutput)] == [
        "index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason",
        "stop_reason", "error",
    ]  # fmt: skip


def test_the_endpoints_of_the_server() -> None:
    async def paths() -> set[str]:
        async with server() as here:
            methods = here.app.openapi()["paths"].items()
            return {f"{verb.upper()} {path}" for path, verbs in methods for verb in verbs}

    assert asyncio.run(paths()) == ENDPOINTS


def test_the_tree_of_errors() -> None:
    found = {
        name: [base.__name__ for base in kind.__bases__]
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception)
    }
    assert found == ERRORS
    assert all(name in (errors.__doc__ or "") for name in ERRORS)


def test_the_flags_of_every_command() -> None:
    assert flags_of("", typer.main.get_command(app)) == COMMANDS


def flags_of(name: str, command: Any) -> dict[str, set[str]]:
    """The flags of a command, or of all commands of a group."""
    if not hasattr(command, "commands"):
        return {
            name.strip(): {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
            - {"--help"}
        }
    inner = (flags_of(f"{name} {each}", sub) for each, sub in command.commands.items())
    return {key: flags for found in inner for key, flags in found.items()}


def test_a_synthetic_workload_is_written_with_the_same_words() -> None:
    assert list(FIELDS) == [
        "requests", "arrivals", "prompt", "output", "max_tokens", "prefix", "clients", "skew",
        "priorities", "slack", "n", "accept", "seed",
    ]  # fmt: skip


def test_the_names_of_profiles() -> None:
    assert known_profiles() == [
        "llama3-70b-4xa100", "llama3.1-8b-a100-80gb", "qwen3-0.6b-h200", "qwen3-0.6b-h200-headway",
    ]  # fmt: skip


def strained() -> Iterator[dict[str, Any]]:
    """Lines of traces in which every kind of decision happens."""
    text = (
        "requests=24,arrivals=poisson(400),prompt=uniform(5,60),output=uniform(2,30),"
        "max_tokens=30,prefix=2x16@0.5,clients=2,priorities=2,slack=uniform(0.1,1),n=2"
    )
    small = {"block_size": 4, "num_blocks": 36, "max_num_seqs": 6, "max_num_batched_tokens": 64}
    runs = [
        preset("vllm_v1", **small),
        preset("vllm_v1", **{**small, "num_blocks": 200}, num_scheduler_steps=3),
        preset("vllm_v1", **small, swap="swap", num_host_blocks=36),
        preset(
            "minivllm",
            **{**small, "max_num_batched_tokens": 5, "num_blocks": 200},
            chunk="split_any",
        ),
    ]
    for config in runs:
        file = Lines()
        profile = load_profile("qwen3-0.6b-h200")
        simulate(parse_synthetic(text).generate(), config, profile, async_scheduling=1, trace=file)
        yield from map(json.loads, file)


def fields_of(name: str) -> tuple[set[str], set[str]]:
    """The required and the optional fields of a line."""
    required, optional = TRACE_FIELDS[name].split("|")
    return set(required.split()), set(optional.split())


def test_the_fields_of_trace_lines() -> None:
    for name in TRACE_FIELDS:
        kind = getattr(record_lines, name)
        tag = {kind.__struct_config__.tag_field} - {None}
        found = [(field.encode_name, field.required) for field in msgspec.structs.fields(kind)]
        required = tag | {field for field, is_required in found if is_required}
        optional = {field for field, is_required in found if not is_required}
        assert (required, optional) == fields_of(name), name
    assert VERSION == 3


def test_the_keys_of_a_trace() -> None:
    seen: dict[str, set[str]] = defaultdict(set)

    def check(name: str, line: dict[str, Any]) -> None:
        required, optional = fields_of(name)
        assert required <= set(line) <= required | optional, (name, line)
        for field in msgspec.structs.fields(getattr(record_lines, name)):
            assert line.get(field.encode_name, UNSET) != field.default, (name, line)
        seen[name] |= set(line)

    kinds = set[str]()
    for line in strained():
        check(f"{line['event'].capitalize()}Line" if "event" in line else "HeaderLine", line)
        for part in line.get("requests", ()):
            check("RequestLine", part)
        for part in line.get("finished", ()):
            check("EndLine", part)
        kinds |= {reason for _, reason, *_ in line.get("blocked", ())}
    assert set(seen) == {
        "HeaderLine", "AddedLine", "PlannedLine", "CompletedLine", "RequestLine", "EndLine",
    }  # fmt: skip
    required, optional = fields_of("PlannedLine")
    assert seen["PlannedLine"] == (required | optional) - {"blocks", "has_failed", "drafts"}
    assert {"swap_in", "finished"} <= seen["CompletedLine"]
    assert {"recomputed", "preemptions", "stop_token", "cached", "kept"} <= seen["EndLine"]
    assert kinds <= {"token_budget", "blocks", "headroom", "parent", "back_off", "just_preempted"}
