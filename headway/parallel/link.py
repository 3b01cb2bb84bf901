"""The link of a rank to rank 0: a Unix socket on one machine, TLS over TCP between machines.

Between machines there is one connection in each direction, because two threads must not use one
TLS connection. They also carry what the ranks of one machine have in shared memory: heartbeats,
positions and reports, and the addresses with which a rank joins the group.
"""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
from contextlib import suppress
from subprocess import TimeoutExpired
from time import monotonic
from typing import Any, BinaryIO

import msgspec
import torch.distributed as dist

from headway.errors import ExecutorError
from headway.parallel.launch import Invitation, RankLauncher
from headway.parallel.progress import SharedState
from headway.parallel.spec import (
    Beat,
    FromRank,
    GetKey,
    Join,
    Reply,
    Report,
    SetKey,
    decode_from_rank,
    decode_join,
    framed,
    messages,
)
from headway.remote.tls import tls_context

HANDSHAKE_SECONDS = 5.0
JOIN_SECONDS = 120.0  # for the processes of all ranks to start
UNACKNOWLEDGED_MS = 10_000  # after which a rank notices that the machine of rank 0 is gone
INTERVAL = 0.05  # seconds between two looks at a process that starts
encode = msgspec.msgpack.encode
log = logging.getLogger(__name__)


class LocalLink(SharedState):
    """Of a rank to rank 0 on the same machine."""

    host = "127.0.0.1"  # of the rank

    def __init__(self, rank: int, control: int, store: int, memory: int) -> None:
        super().__init__(memory, rank)
        self.rank, self.store = rank, store
        self._control = socket.socket(fileno=control)
        self.messages = messages(self._control.makefile("rb"))

    def send(self, reply: Reply) -> None:
        self._control.sendall(framed(encode(reply)))


class RemoteLink:
    """Of a rank to rank 0 on another machine; it has what LocalLink has."""

    def __init__(self, invitation: Invitation) -> None:
        self.rank, self._position, self._lock = invitation.rank, 0, threading.Lock()
        self._out, control = (_connect(invitation, is_out=is_out) for is_out in (True, False))
        self.host, self.store = control.getsockname()[0], RankStore(self)
        self.messages = messages(control.makefile("rb"))

    def beat(self) -> None:
        self.send(Beat(self._position))

    def publish(self, position: int) -> None:
        self._position = position  # the next heartbeat has it

    def report(self, text: str) -> None:
        with suppress(OSError):
            self.send(Report(text))

    def send(self, message: FromRank) -> None:
        with self._lock:
            self._out.sendall(framed(encode(message)))


class RankStore(dist.Store):  # type: ignore[misc]  # torch has no types for it
    """Rank 0's store for a rank that joins the group; nothing else reads the link meanwhile."""

    def __init__(self, link: RemoteLink) -> None:
        super().__init__()
        self._link = link

    def set(self, key: str, value: str | bytes) -> None:
        self._link.send(SetKey(key, value.encode() if isinstance(value, str) else value))

    def get(self, key: str) -> bytes:
        """The value, once a rank has set it."""
        self._link.send(GetKey(key))
        if (value := next(self._link.messages, None)) is None:
            raise ConnectionError("rank 0 has closed its connection")
        return value

    def wait(self, keys: list[str], *_: object) -> None:
        for key in keys:
            self.get(key)

    def check(self, _: list[str]) -> bool:
        return False  # a thread of NCCL looks for errors of other ranks, which watch.py finds


def _connect(invitation: Invitation, *, is_out: bool) -> ssl.SSLSocket:
    plain = _tuned(socket.create_connection(invitation.address, HANDSHAKE_SECONDS))
    secured = tls_context(invitation.key, ssl.PROTOCOL_TLS_CLIENT).wrap_socket(plain)
    secured.sendall(framed(encode(Join(invitation.rank, is_out))))
    secured.settimeout(None)
    return secured


def _tuned(connection: socket.socket) -> socket.socket:
    connection.settimeout(HANDSHAKE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
    return connection


class RemoteRank:
    """A rank on another machine, for rank 0 in place of a child process."""

    pid = 0

    def __init__(self, rank: int, memory: int, store: dist.Store) -> None:
        """What the rank sends goes into `memory`, the file of SharedState, and into `store`."""
        self.rank = rank
        self.started: Any = None  # by a RankLauncher
        self.links: dict[bool, ssl.SSLSocket] = {}  # by whether the rank sends on it
        self._shared, self._store = SharedState(memory, rank), store
        self._lost, self._lock = threading.Event(), threading.Lock()
        replies, self._replies = socket.socketpair()
        with replies:
            self.replies = replies.makefile("rb")

    def join(self, link: ssl.SSLSocket, stream: BinaryIO, *, is_out: bool) -> None:
        """Use a connection until the rank is lost."""
        with self._lock:
            if is_out in self.links:
                raise ConnectionError(f"rank {self.rank} has joined before")
            link.settimeout(None)
            self.links[is_out] = link
        if not is_out:
            self._lost.wait()
            return
        with self._replies:
            try:
                self._read(stream)
            finally:
                self._lost.set()

    def _read(self, stream: BinaryIO) -> None:
        wanted: str | None = None  # a key that no rank has set yet
        for data in messages(stream):
            match decode_from_rank(data):
                case Beat(position):
                    self._shared.beat()
                    self._shared.publish(position)
                case Report(text):
                    self._shared.report(text)
                case SetKey(key, value):
                    self._store.set(key, value)
                case GetKey(key):
                    wanted = key
                case Reply():
                    self._replies.sendall(framed(data))
            if wanted is not None and self._store.check([wanted]):
                self.links[False].sendall(framed(self._store.get(wanted)))
                wanted = None

    @property
    def host(self) -> str:
        return str(self.links[False].getpeername()[0])

    def poll(self) -> int | None:
        return 1 if self._lost.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._lost.wait(timeout):
            raise TimeoutExpired(f"rank {self.rank}", timeout or 0.0)
        return 1

    def kill(self) -> None:
        self._lost.set()
        self._replies.close()
        for link in self.links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        if self.started is not None:
            self.started.kill()


def launch(
    launcher: RankLauncher, size: int, threads: int, memory: int, store: dist.Store
) -> list[RemoteRank]:
    """Start the ranks from 1 on, and wait until they have joined; ExecutorError if one does not."""
    ranks, key = (
        [RemoteRank(rank, memory, store) for rank in range(1, size)],
        secrets.token_bytes(32),
    )
    try:
        with socket.create_server((launcher.host(), 0)) as server:
            address, ends_at = server.getsockname()[:2], monotonic() + JOIN_SECONDS
            for each in ranks:
                each.started = launcher.start(
                    Invitation(rank=each.rank, address=address, key=key, threads=threads)
                )
            server.settimeout(INTERVAL)
            while missing := [each for each in ranks if len(each.links) < 2]:
                _check_started(missing, ends_at)
                with suppress(TimeoutError):
                    plain, _ = server.accept()
                    threading.Thread(target=_admit, args=(plain, key, ranks), daemon=True).start()
    except BaseException:
        for each in ranks:
            each.kill()
        raise
    return ranks


def _check_started(missing: list[RemoteRank], ends_at: float) -> None:
    for each in missing:
        if (code := each.started.poll()) is not None:
            raise ExecutorError(f"rank {each.rank} ended with exit code {code} before it connected")
    if monotonic() > ends_at:
        raise ExecutorError(
            f"rank {missing[0].rank} did not connect to rank 0 within {JOIN_SECONDS:g} s; its "
            "machine must reach all ports of the one of rank 0"
        )


def _admit(plain: socket.socket, key: bytes, ranks: list[RemoteRank]) -> None:
    """Let a rank in if it has the key."""
    secure = tls_context(key, ssl.PROTOCOL_TLS_SERVER).wrap_socket
    try:
        with secure(_tuned(plain), server_side=True) as link, link.makefile("rb") as stream:
            join = decode_join(next(messages(stream), b""))
            ranks[join.rank - 1].join(link, stream, is_out=join.is_out)
    except (OSError, IndexError, msgspec.DecodeError) as error:
        log.warning("a connection to rank 0 was refused or lost: %s", error)
