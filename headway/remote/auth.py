"""The handshake between an engine and a client: one key, equal versions, the expected engine.

The engine greets with its protocol. Over TCP both then change to TLS. Then each says which engine
it is, or expects: a connection that leads to another one is closed before a request is sent. A Unix
socket needs no key: only its user can open it.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path

from msgspec import structs

from headway.errors import ExecutorError
from headway.remote import tls
from headway.remote.codec import GREETING, HELLO, MAGIC, PROTOCOL, Hello, frame, read_frame

HANDSHAKE_SECONDS = 2.0
MAX_HANDSHAKE = 1 << 16  # bytes of a frame in the handshake
LOST = (asyncio.IncompleteReadError, OSError)  # of a connection; OSError includes TimeoutError
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Address = Path | tuple[str, int]  # of a Unix socket, or host and port


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What an engine says of itself; the replicas of a fleet differ only in `name`."""

    name: str = "engine"
    model: str = ""  # everything that results depend on, in words
    block_size: int = 0


LOCAL = Identity()  # of an engine behind a Unix socket


async def admit_client(reader: Reader, writer: Writer, identity: Identity, key: bytes) -> None:
    """The engine's side of a handshake; ExecutorError unless the client expects this engine."""
    writer.write(GREETING.pack(MAGIC, PROTOCOL))
    if key:
        await tls.secure(writer, key, ssl.PROTOCOL_TLS_SERVER)
    await _exchange(reader, writer, identity)


async def join_engine(reader: Reader, writer: Writer, expected: Identity, key: bytes) -> None:
    """The client's side of a handshake; ExecutorError unless this is the expected engine."""
    magic, protocol = GREETING.unpack(await reader.readexactly(GREETING.size))
    if magic != MAGIC:
        raise ExecutorError("it is not a Headway process")
    if protocol != PROTOCOL:
        raise ExecutorError(
            f"it has wire protocol {protocol} and this process has {PROTOCOL}; install the same "
            "version of Headway on all machines"
        )
    if key:
        await tls.secure(writer, key, ssl.PROTOCOL_TLS_CLIENT)
    await _exchange(reader, writer, expected)


async def _exchange(reader: Reader, writer: Writer, identity: Identity) -> None:
    """Send a Hello; ExecutorError unless the peer sends the same one."""
    ours = Hello(**asdict(identity))
    writer.write(frame(ours))
    theirs = await read_frame(reader, HELLO, MAX_HANDSHAKE)
    for name, wanted in structs.asdict(ours).items():
        if (found := getattr(theirs, name)) != wanted:
            raise ExecutorError(
                f"it has {name} {found!r}, but {wanted!r} is expected; start all replicas with the "
                "same version, model and flags, and let no other process take their ports"
            )


def describe(error: Exception) -> str:
    """Why a handshake failed."""
    if isinstance(error, TimeoutError):
        return f"it did not answer within {HANDSHAKE_SECONDS:g} s"
    is_end = isinstance(error, asyncio.IncompleteReadError) or not str(error)
    return "it closed the connection" if is_end else str(error)
