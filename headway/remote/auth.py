"""Authentication: an engine and a client prove to each other that they know a key.

Each side sends a random number and gets a digest of it, so the key itself is never sent. Nothing
else is read before. A Unix socket needs no key: only its user can open it.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from headway import __version__
from headway.errors import ExecutorError
from headway.remote.codec import Decoder, frame, read_frame

PROTOCOL = 2  # change it when the encoding or a message changes
MAGIC = b"HEADWAY\0"
START = struct.Struct("<8sI")
HANDSHAKE_SECONDS = 2.0
MAX_HANDSHAKE = 1 << 16  # bytes of a frame before the key is proved
NONCE_BYTES = 16
LOST = (asyncio.IncompleteReadError, ConnectionError)
Address = Path | tuple[str, int]  # of a Unix socket, or host and port


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What an engine says of itself; the replicas of a fleet differ only in `name`."""

    name: str = "engine"
    model: str = ""  # everything that results depend on, in words
    block_size: int = 0


LOCAL = Identity()  # of an engine behind a Unix socket


class Hello(Struct, frozen=True, tag=True, array_like=True):
    """Handshake: sender, version and model."""

    name: str
    version: str  # of Headway
    model: str
    block_size: int
    nonce: bytes


class Proof(Struct, frozen=True, tag=True, array_like=True):
    """The digest that proves knowledge of the key."""

    digest: bytes


HELLO, PROOF = Decoder[Hello](Hello), Decoder[Proof](Proof)


async def admit_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: Identity, key: bytes
) -> None:
    """The engine's side of a handshake; ExecutorError unless the client knows the key."""
    peer = f"the client at {writer.get_extra_info('peername')}"
    nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(_hello(identity, nonce))
    hello = await _read_hello(reader, peer)
    await _check_proof(reader, key, b"client", nonce, peer)
    writer.write(frame(Proof(_digest(key, b"engine", hello.nonce))))


async def join_engine(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    expected: Identity,
    key: bytes,
    peer: str,
) -> None:
    """The client's side of a handshake.

    ExecutorError unless the engine knows the key and has this version and the expected model.
    """
    hello, nonce = await _read_hello(reader, peer), secrets.token_bytes(NONCE_BYTES)
    _check_same(hello, expected, peer)
    proof = Proof(_digest(key, b"client", hello.nonce))
    writer.write(_hello(Identity(name="client"), nonce) + frame(proof))
    await _check_proof(reader, key, b"engine", nonce, peer)


def _hello(identity: Identity, nonce: bytes) -> bytes:
    hello = Hello(identity.name, __version__, identity.model, identity.block_size, nonce)
    return START.pack(MAGIC, PROTOCOL) + frame(hello)


async def _read_hello(reader: asyncio.StreamReader, peer: str) -> Hello:
    magic, protocol = START.unpack(await reader.readexactly(START.size))
    if magic != MAGIC:
        raise ExecutorError(f"{peer} is not a Headway process")
    if protocol != PROTOCOL:
        raise ExecutorError(
            f"{peer} has wire protocol {protocol} and this process has {PROTOCOL}; install the same "
            "version of Headway on all machines"
        )
    return await read_frame(reader, HELLO, MAX_HANDSHAKE)


def _digest(key: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, role + nonce, "sha256")


async def _check_proof(
    reader: asyncio.StreamReader, key: bytes, role: bytes, nonce: bytes, peer: str
) -> None:
    proof = await read_frame(reader, PROOF, MAX_HANDSHAKE)
    if not hmac.compare_digest(proof.digest, _digest(key, role, nonce)):
        raise ExecutorError(f"{peer} does not have the key of this fleet")


def _check_same(hello: Hello, expected: Identity, peer: str) -> None:
    pairs = {
        "version": (hello.version, __version__),
        "model": (hello.model, expected.model),
        "block_size": (hello.block_size, expected.block_size),
    }
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            raise ExecutorError(
                f"{peer} has {name} {found!r}, but this fleet has {wanted!r}; start all replicas "
                "with the same version, model and flags"
            )
