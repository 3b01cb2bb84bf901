"""Ranks on another machine: the same tokens, found as quickly when they fail, and no strangers.

The machine of rank 0 has the address HOST here, the other one has 127.0.0.1.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from headway import LLM, Engine, Scheduler, loading
from headway.engine.loop import EngineLoop
from headway.engine.messages import EngineStopped, FromLoop
from headway.errors import ExecutorError
from headway.model.precision import why_not_native
from headway.parallel import watch
from headway.parallel.launch import Invitation, RankLauncher, start_invited
from headway.parallel.link import RemoteRank, encode, launch
from headway.parallel.progress import anonymous_file
from headway.parallel.spec import Join, RankSpec, framed
from headway.remote.tls import tls_context
from headway.request import RequestParams
from tests.parallel.test_laws import CASES, REFERENCE, SIZES, run, write_model
from tests.parallel.test_processes import ranks_of, wait_until_gone
from tests.support.forked_ranks import ForkedRank, fork_invited
from tests.support.waiting import LIMIT

pytestmark = [
    pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native())),
    pytest.mark.usefixtures("patient_watch"),
]
HOST = "127.0.0.2"
SILENT = {"MAX_SILENT_REMOTE": watch.MAX_SILENT_REMOTE}
STARTED: list[subprocess.Popen[bytes] | ForkedRank] = []
Start = Callable[[Invitation], subprocess.Popen[bytes] | ForkedRank]


def start(folder: Path, start_one: Start = fork_invited) -> LLM:
    """A group of two."""

    def start_kept(invitation: Invitation) -> subprocess.Popen[bytes] | ForkedRank:
        STARTED.append(start_one(invitation))
        return STARTED[-1]

    return LLM(
        str(folder), tensor_parallel_size=2, rank_launcher=RankLauncher(lambda: HOST, start_kept),
        device="cpu", threads=1, dtype="float32", quantization="none", **SIZES,
    )  # fmt: skip


def remote_ranks(llm: LLM) -> list[RemoteRank]:
    found = [each.process for each in ranks_of(llm).watch._ranks]
    assert all(isinstance(each, RemoteRank) for each in found)
    return found  # type: ignore[return-value]


def pids(llm: LLM) -> list[int]:
    return [each.started.pid for each in remote_ranks(llm)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    for each in STARTED:
        each.wait(LIMIT)


@pytest.fixture(scope="module")
def group(folder: Path, patient_watch: None) -> Iterator[LLM]:
    """Its other rank is started with an interpreter of its own."""
    with start(folder, start_invited) as llm:
        yield llm


@pytest.mark.parametrize(
    "name", ["headway", "recompute", "swap", "one step ahead", "four steps a plan, one ahead"]
)
def test_tokens_are_those_of_one_process(name: str, group: LLM) -> None:
    case = CASES[name]
    found, seen = run(group, case.preset, **case.settings)
    assert found == {id: [tokens] * case.num_samples for id, tokens in REFERENCE.items()}
    assert case.happened(seen), seen
    assert [each.host for each in ranks_of(group).watch._ranks] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("sent", "named", "limits"),
    [
        (signal.SIGKILL, "rank 1 at 127.0.0.1 closed its connection", {}),
        (signal.SIGSTOP, "rank 1 did not run for", SILENT),
        (signal.SIGUSR1, "rank 1 made no progress for", {**SILENT, "MAX_LATE": watch.MAX_LATE}),
    ],
)
def test_a_rank_that_ends_stops_or_hangs_ends_the_engine(
    sent: signal.Signals, named: str, limits: dict[str, float], folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with start(folder) as llm:
        engine, delivered = Engine(Scheduler(llm.config), llm.executor), list[FromLoop]()
        engine.add("first", [1, 2, 3], RequestParams(max_tokens=50, ignore_eos=True))
        for _ in range(3):
            engine.step()
        loop, all_pids = EngineLoop(engine, delivered.extend), pids(llm)
        ranks_of(llm).watch.report_to(loop.fail)
        os.kill(all_pids[-1], sent)
        for name, seconds in limits.items():
            monkeypatch.setattr(watch, name, seconds)
        loop.run()
        assert isinstance(delivered[-1], EngineStopped) and named in delivered[-1].reason
        wait_until_gone(all_pids)


def test_an_idle_engine_ends_with_its_rank(folder: Path) -> None:
    with start(folder) as llm:
        delivered = list[FromLoop]()
        loop = EngineLoop(llm.engine, delivered.extend)
        ranks_of(llm).watch.report_to(loop.fail)
        thread = threading.Thread(target=loop.run)
        thread.start()
        os.kill(pids(llm)[0], signal.SIGKILL)
        thread.join(LIMIT)
        (stopped,) = delivered
        assert isinstance(stopped, EngineStopped) and "rank 1 at 127.0.0.1" in stopped.reason


def test_a_rank_exits_when_its_connection_closes(folder: Path) -> None:
    """Also if nothing kills it, and its parent stays."""
    llm = start(folder)
    all_pids, (rank,) = pids(llm), remote_ranks(llm)
    process, rank.started = rank.started, SimpleNamespace(kill=lambda: None)
    rank.kill()
    assert process.wait(LIMIT) in (0, 1)
    llm.close()
    wait_until_gone(all_pids)


def test_a_rank_that_fails_to_load_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "RankSpec", partial(RankSpec, version="0.0"))
    with pytest.raises(ExecutorError, match=r"rank 1 failed: .* rank 0 has 0\.0"):
        start(folder)


def test_a_rank_that_ends_before_it_connects_is_an_error(folder: Path) -> None:
    def fail(_: Invitation) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])

    with pytest.raises(ExecutorError, match="rank 1 ended with exit code 3 before it connected"):
        start(folder, fail)


def stranger(invitation: Invitation, key: bytes | None, sent: bytes) -> bytes:
    """What a process gets that connects to rank 0, with TLS if it has a key."""
    try:
        with socket.create_connection(invitation.address, LIMIT) as plain:
            if key is None:
                plain.sendall(sent)
                return plain.recv(1).replace(b"\x15", b"")  # an alert of TLS
            context = tls_context(key, ssl.PROTOCOL_TLS_CLIENT)
            context.verify_mode = ssl.CERT_NONE
            with context.wrap_socket(plain) as secured:
                secured.sendall(sent)
                return secured.recv(1)
    except OSError:
        return b""


JOIN = framed(encode(Join(1, True)))
STRANGERS: dict[str, Callable[[Invitation], bytes]] = {
    "no TLS": lambda invitation: stranger(invitation, None, JOIN),
    "another key": lambda invitation: stranger(invitation, b"another" * 5, JOIN),
    "another message": lambda invitation: stranger(invitation, invitation.key, framed(b"?")),
    "another rank": lambda invitation: stranger(
        invitation, invitation.key, framed(encode(Join(7, True)))
    ),
}


def test_strangers_are_refused_and_the_port_closes_once_all_ranks_have_joined() -> None:
    """Also one that holds its connection open without a word delays nothing."""
    got, invitations, silent = dict[str, bytes](), list[Invitation](), list[socket.socket]()

    def invite(invitation: Invitation) -> Any:
        def visit() -> None:
            silent.append(socket.create_connection(invitation.address))
            for name, visit in STRANGERS.items():
                got[name] = visit(invitation)
            for is_out in (True, False):
                secured = tls_context(invitation.key, ssl.PROTOCOL_TLS_CLIENT).wrap_socket(
                    socket.create_connection(invitation.address)
                )
                secured.sendall(framed(encode(Join(1, is_out))))
                silent.append(secured)

        invitations.append(invitation)
        threading.Thread(target=visit, daemon=True).start()
        return SimpleNamespace(poll=lambda: None, kill=lambda: None)

    memory = anonymous_file()
    (rank,) = launch(RankLauncher(lambda: HOST, invite), 2, 1, memory, dist.HashStore())
    assert got == dict.fromkeys(STRANGERS, b"")
    assert rank.poll() is None
    with pytest.raises(OSError):
        socket.create_connection(invitations[0].address, LIMIT).close()
    rank.kill()
    for each in silent:
        each.close()
    os.close(memory)
