"""The bundled model on a GPU, in float32, generates transformers' greedy tokens.

The reference is that of the CPU tests. Every run is also replayed: the trace of a GPU run contains
everything its decisions depended on. HEADWAY_TEST_MODEL sets the path of the model's GGUF file on a
machine that cannot download it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, PRESETS, Engine, SamplingParams, Scheduler
from headway.loading import fit
from headway.model.decoder import Decoder
from headway.model.loader import open_checkpoint
from headway.model.precision import ATTENTIONS, choose_backend
from headway.model.registry import BUNDLED, resolve
from headway.options import EngineOptions
from headway.record.lines import CompletedLine, PlannedLine
from headway.record.reader import read_journal, split_header
from headway.record.replay import check_replay
from tests.support import real
from tests.support.journals import Recorder, of_kind
from tests.support.real import NUM_TOKENS, Seen, Trial, unlike_reference

MODEL = "smollm2-135m"
FEW = ("one token", "capital", "python", "json", "emoji", "chat", "dijkstra", "long list")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module", autouse=True)
def given_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use the file of HEADWAY_TEST_MODEL as the bundled model."""
    with pytest.MonkeyPatch.context() as patch:
        if given := os.environ.get("HEADWAY_TEST_MODEL"):
            cache = tmp_path_factory.mktemp("cache")
            place = cache / "models" / MODEL / BUNDLED[MODEL].file_name
            place.parent.mkdir(parents=True)
            place.symlink_to(Path(given).resolve())
            patch.setenv("HEADWAY_CACHE", str(cache))
        yield


@pytest.fixture(scope="module")
def decoder(given_model: None) -> Decoder:
    """Loaded once; every trial has its own executor."""
    checkpoint = open_checkpoint(resolve(MODEL))
    return Decoder(checkpoint, choose_backend(checkpoint.config, "float32", "cuda"))


class GpuTrial(Trial):
    """A decoder on a GPU with one configuration, and a trace of its run."""

    def __init__(
        self, model: Decoder, preset: str = "headway", *, async_scheduling: int = 1, **settings: Any
    ) -> None:
        from headway.executor.gpu.executor import GpuExecutor  # needs triton

        itemsize = model.backend.kv_blocks(model.config, 0, 1).element_size()
        self.config = fit(
            model.config, itemsize, EngineOptions(preset=preset, kv_memory="400MiB", **settings)
        )
        executor = GpuExecutor(model, self.config)
        self.seen, self._recorder = Seen(), Recorder(self.config, bool(async_scheduling))
        observers = [self.seen, self._recorder]
        self.engine = Engine(
            Scheduler(self.config), executor, async_scheduling=async_scheduling, observers=observers
        )
        executor.now = self.engine.clock.now

    def check_empty(self) -> None:
        """Also check that the trace replays."""
        super().check_empty()
        journal = self._recorder.lines.read()
        assert check_replay(journal) == len(of_kind(CompletedLine, journal)) > 0


def how_far(prompt: str, place: int, right: int, wrong: int) -> float:
    """The distance of two tokens' logits after the reference up to a position."""
    before = [*real.prompts()[prompt], *real.reference()[prompt][:place]]
    logits = real.logits_of(real.decoder(), before)[-1]
    return float(logits[right] - logits[wrong])


def check(found: dict[str, list[int]]) -> None:
    """Compare with the reference; report where outputs differ and how close the two tokens are."""
    differences = []
    for name, place, right, wrong in unlike_reference(dict(found)):
        gap = how_far(name, place, right, wrong)
        differences.append(
            f"{name!r} at {place}: {right} became {wrong}; logits differ by {gap:.2e}"
        )
    assert not differences, f"below {real.TIE}: add a tie to real.TIES; above: a bug: {differences}"


def few() -> dict[str, list[int]]:
    return {name: real.prompts()[name] for name in FEW}


def test_each_prompt_alone_generates_the_reference(decoder: Decoder) -> None:
    trial = GpuTrial(decoder, max_num_seqs=1)
    check(trial.ask_one(real.prompts()))
    assert trial.seen.most_decodes == 1


@pytest.mark.parametrize("async_scheduling", [0, 1])
def test_all_prompts_together_generate_the_reference(
    decoder: Decoder, async_scheduling: int
) -> None:
    trial = GpuTrial(decoder, async_scheduling=async_scheduling)
    check(trial.ask_one(real.prompts()))
    assert trial.seen.most_decodes > 12


# A few prompts under all presets and settings.


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_generates_the_reference(decoder: Decoder, preset: str) -> None:
    trial = GpuTrial(decoder, preset)
    check(trial.ask_one(few()))
    assert trial.seen.most_decodes > 4


@dataclass(frozen=True)
class Case:
    """Settings to try, and what must have happened for the test to be meaningful."""

    settings: dict[str, Any]
    happened: Callable[[Seen], bool]
    num_times: int = 1
    params: dict[str, Any] = field(default_factory=dict)


CRAMPED = {"preset": "vllm_v1", "block_size": 1, "num_blocks": 200, "victim": "least_work"}
CASES = {
    "chunks of 7": Case({"chunk": "at_most(7)"}, lambda seen: seen.longest_chunk == 7),
    "blocks of 1, asked twice": Case(
        {"block_size": 1}, lambda seen: seen.num_full_hits >= len(FEW), 2
    ),
    "blocks of 16, asked twice": Case(
        {"block_size": 16, "preset": "vllm_v1"}, lambda seen: seen.num_cached > 200, 2
    ),
    "blocks of 64": Case({"block_size": 64}, lambda seen: seen.longest_chunk > 64),
    "recompute": Case({**CRAMPED, "swap": "recompute"}, lambda seen: seen.num_recomputed >= 8),
    "swap": Case(
        {**CRAMPED, "swap": "swap", "num_host_blocks": 400},
        lambda seen: seen.num_swapped >= 8 and min(seen.num_copied) >= 100,
    ),
    "four steps a plan": Case({"num_scheduler_steps": 4}, lambda seen: seen.num_steps < 12),
    "three samples": Case({}, lambda seen: seen.most_decodes > 16, params={"n": 3}),
}  # fmt: skip


@pytest.mark.parametrize("async_scheduling", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_no_setting_changes_a_token(decoder: Decoder, name: str, async_scheduling: int) -> None:
    case = CASES[name]
    trial = GpuTrial(decoder, async_scheduling=async_scheduling, **case.settings)
    for _ in range(case.num_times):
        outputs = trial.ask(few(), **case.params)
        for number in range(case.params.get("n", 1)):
            check({key: found[number] for key, found in outputs.items()})
    assert case.happened(trial.seen), trial.seen


def test_a_shared_prefix_is_found_and_changes_no_token(decoder: Decoder) -> None:
    """Prompts with a common prefix, one a prefix of another, one after the other."""
    start, right = len(real.prompts()["long list"]), real.reference()["long list"]
    tokens = real.prompts()["long list"] + right
    trial = GpuTrial(decoder)
    for length in (128, 144, 144, 147):  # whole blocks, so that the third is fully cached
        (output,) = trial.ask_one({str(length): tokens[:length]}, 2).values()
        assert output == right[length - start :][:2]
    assert trial.seen.num_cached == 128 + 143 + 144 and trial.seen.num_full_hits == 1


LIBRARIES = {"flashinfer": 16, "flash-attn": 256}  # with their block sizes
NEAR = 0.5  # difference of logits: in bfloat16 our kernels chose tokens up to 0.23 below the best


@pytest.mark.parametrize("name", LIBRARIES)
def test_an_installed_library_chooses_equally_good_tokens(name: str) -> None:
    pytest.importorskip(ATTENTIONS[name][0])
    checkpoint = open_checkpoint(resolve(MODEL))
    backend = choose_backend(checkpoint.config, "bfloat16", "cuda", attention=name)
    settings = {"block_size": LIBRARIES[name], "chunk": "at_most(300)"}
    trial = GpuTrial(Decoder(checkpoint, backend), **settings)
    for _ in range(2):  # the second time with cached prefixes
        found = trial.ask_one(real.prompts())
        worse = [
            (prompt, place, gap)
            for prompt, place, right, wrong in unlike_reference(dict(found))
            if (gap := how_far(prompt, place, right, wrong)) > NEAR
        ]
        assert not worse
    assert trial.seen.most_decodes > 12 and trial.seen.longest_chunk > 256


def test_the_offline_api_generates_the_reference_and_its_trace_replays(tmp_path: Path) -> None:
    path = tmp_path / "run.trace.jsonl"
    cramped = {**CRAMPED, "swap": "swap", "num_host_blocks": 400, "max_num_seqs": len(FEW)}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(MODEL, device="cuda", dtype="float32", trace_out=path, **cramped) as llm:
        given = [real.PROMPTS[name] for name in FEW]
        asked = [each if isinstance(each, str) else llm.chat_tokens(each) for each in given]
        results = llm.generate(asked, params)
        assert llm.engine.is_healthy, llm.engine.fault
    check({n: r.outputs[0].token_ids for n, r in zip(FEW, results, strict=True)})
    for name, result in zip(FEW, results, strict=True):
        assert result.outputs[0].text == real.tokenizer().decode(real.reference()[name])
    journal = list(read_journal(path))
    assert split_header(journal)[0].async_scheduling
    assert check_replay(journal) == len(of_kind(CompletedLine, journal)) > NUM_TOKENS
    plans = of_kind(PlannedLine, journal)
    assert any(each.kind == "swap" for plan in plans for each in plan.preempted)
