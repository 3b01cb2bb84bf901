"""Ranks as processes: they divide the model, and end together however one ends."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway import LLM, Engine, SamplingParams, Scheduler
from headway.engine.loop import EngineLoop
from headway.engine.messages import EngineStopped, FromLoop
from headway.engine.queries import GetProblem
from headway.errors import ConfigError, ExecutorError
from headway.model.precision import why_not_native
from headway.options import EngineOptions
from headway.parallel import watch
from headway.parallel.ranks import Ranks
from headway.request import RequestParams
from headway.server.serving import ServerOptions, make_engine
from tests.parallel.test_equality import VOCABULARY
from tests.support.forked_ranks import run_rank_0
from tests.support.processes import FORKS
from tests.support.waiting import LIMIT, wait_until

pytestmark = [
    pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native())),
    pytest.mark.usefixtures("patient_watch", "forked_ranks"),
]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 4096,
    "tie_word_embeddings": True, "eos_token_id": 0,
}  # fmt: skip
SETTINGS = {
    "device": "cpu", "load_format": "dummy", "threads": 1, "block_size": 4, "num_blocks": 60,
    "num_host_blocks": 60, "max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 120,
}  # fmt: skip
LONG = RequestParams(max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def start(model: Path, size: int) -> LLM:
    return LLM(str(model), tensor_parallel_size=size, **SETTINGS)


@pytest.fixture(scope="module")
def group(model: Path, patient_watch: None, forked_ranks: None) -> Iterator[LLM]:
    with start(model, 2) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(model: Path) -> LLM:
    return LLM(str(model), **SETTINGS)


def ranks_of(llm: LLM) -> Ranks:
    assert llm.loaded.ranks is not None
    return llm.loaded.ranks


def pids(ranks: Ranks) -> list[int]:
    return [each.process.pid for each in ranks.watch._ranks]


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(all_pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, all_pids)))


def test_weights_and_cache_are_divided(group: LLM, alone: LLM) -> None:
    assert group.loaded.decoder.num_bytes < 0.75 * alone.loaded.decoder.num_bytes
    assert group.loaded.kv_bytes == alone.loaded.kv_bytes * 2 // 3  # rank 0 has 2 of 3 heads


def test_two_groups_on_one_host_do_not_collide(group: LLM, alone: LLM, model: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def tokens(llm: LLM) -> list[list[int]]:
        results = llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in results]

    expected = tokens(alone)
    with start(model, 2) as other:
        assert not set(pids(ranks_of(group))) & set(pids(ranks_of(other)))
        assert tokens(other) == tokens(group) == tokens(other) == expected
    assert tokens(group) == expected


def test_an_interrupt_in_a_step_is_delayed_and_ends_no_rank(group: LLM) -> None:
    assert group.reset_cache()  # the engine uses its blocks
    engine = Engine(Scheduler(group.config), group.executor)
    engine.add("r", [1, 2, 3], LONG)
    launch, executor = ranks_of(group).send_plan, ranks_of(group)

    def interrupting(message: bytes) -> None:
        launch(message)
        signal.raise_signal(signal.SIGINT)

    executor.send_plan = interrupting  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    del executor.send_plan  # type: ignore[method-assign]
    (request,) = engine.add("next", [1, 2, 3], RequestParams(max_tokens=4, ignore_eos=True))
    engine.run()
    assert engine.fault is None and len(request.output) == 4


def test_a_size_that_the_heads_do_not_allow_is_refused_before_processes_start(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 5, .* 3 query heads"):
        start(model, 5)


@pytest.mark.parametrize(
    ("sent", "size", "named", "limits"),
    [
        (signal.SIGKILL, 3, "rank 2 was killed by SIGKILL", {}),
        (signal.SIGSTOP, 2, "rank 1 did not run for", {"MAX_STOPPED": watch.MAX_STOPPED}),
        (signal.SIGUSR1, 2, "rank 1 made no progress for", {"MAX_LATE": watch.MAX_LATE}),
    ],
)
def test_a_rank_that_ends_stops_or_hangs_is_an_error(
    sent: signal.Signals, size: int, named: str, limits: dict[str, float], model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with start(model, size) as llm:
        engine, ranks = Engine(Scheduler(llm.config), llm.executor), ranks_of(llm)
        all_pids = pids(ranks)
        (request,) = engine.add("first", [1, 2, 3], LONG)
        for _ in range(5):
            engine.step()
        os.kill(all_pids[-1], sent)
        for name, seconds in limits.items():
            monkeypatch.setattr(watch, name, seconds)
        while not engine.fault:
            engine.step()
        assert named in str(engine.fault) and "restart the process" in str(engine.fault)
        assert request.finish_reason == "error"
        wait_until_gone(all_pids)
        with pytest.raises(ExecutorError, match="restart"):  # at once, from now on
            llm.executor.launch(llm.engine.scheduler.schedule())


def test_a_rank_that_is_killed_ends_an_idle_engine(model: Path) -> None:
    """No request has to fail first: a fleet must not give it any."""
    with start(model, 2) as llm:
        served = make_engine(ServerOptions(engine=EngineOptions()), lambda _: llm)
        delivered: list[FromLoop] = []
        loop = EngineLoop(served.engine, delivered.extend)
        served.prepare(loop)
        thread = threading.Thread(target=loop.run)
        thread.start()
        os.kill(pids(ranks_of(llm))[0], signal.SIGKILL)
        thread.join(LIMIT)
        (stopped,) = delivered
        assert (
            isinstance(stopped, EngineStopped) and "rank 1 was killed by SIGKILL" in stopped.reason
        )
        problem = loop.reply(GetProblem()).value
        assert problem is not None and "rank 1 was killed by SIGKILL" in problem
        late = list[str]()
        ranks_of(llm).watch.report_to(late.append)
        assert late == [stopped.reason]


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def files_of(pid: int) -> set[str]:
    """The files that a process has mapped into its memory."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended
        return set()
    return {found[1] for line in lines if (found := re.search(r" (/.*)$", line))}


def loading_children_of(pid: int) -> list[int]:
    """Those that load torch. Others may live for a moment only: libraries ask programs at import."""
    children = children_of(pid)
    return [child for child in children if any("torch" in file for file in files_of(child))]


@pytest.mark.parametrize("moment", ["loading", "running"])
def test_ranks_exit_when_rank_0_is_killed(moment: str, model: Path) -> None:
    """Its child is started with an interpreter of its own."""
    reader, writer = FORKS.Pipe(duplex=False)
    rank_0 = FORKS.Process(target=run_rank_0, args=(str(model), SETTINGS, writer))
    rank_0.start()
    writer.close()
    assert rank_0.pid is not None
    with reader:
        if moment == "loading":
            children = wait_until(lambda: loading_children_of(rank_0.pid))
        else:
            children = reader.recv()
        mapped = {Path(file) for pid in (rank_0.pid, *children) for file in files_of(pid)}
        assert children and rank_0.is_alive()
        rank_0.kill()
        rank_0.join()
    wait_until_gone(children)
    assert not [file for file in mapped if file.is_relative_to("/dev/shm") and file.exists()]
