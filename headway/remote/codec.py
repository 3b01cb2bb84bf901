"""Messages as frames of bytes: a length, then a list of messages in MessagePack.

The types of the messages say what is valid, so nothing is pickled. Token ids of a prompt and
embeddings are arrays of 32-bit numbers.
"""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import fields
from functools import cache, reduce
from operator import or_
from typing import Any, Generic, TypeVar, get_args

import msgspec
import numpy as np

from headway import __version__
from headway.engine.messages import (
    Cancel,
    FromLoop,
    Goodbye,
    Query,
    QueryResult,
    Refusal,
    Resume,
    Submit,
    ToLoop,
    refusal_of,
)
from headway.errors import ExecutorError, InvalidRequest, shorten
from headway.executor.simulated import Script
from headway.request import SamplingOptions
from headway.sampling_params import Sampling

PROTOCOL = 5  # change it when the encoding or a message changes
MAGIC = b"HEADWAY\0"
GREETING = struct.Struct("<8sI")  # from an engine, before any frame: MAGIC, PROTOCOL
MAX_FRAME = 1 << 28  # bytes
MAX_READ = 1 << 20  # bytes
LENGTH = struct.Struct("<I")
NOT_SENDABLE = (TypeError, ValueError, OverflowError)
SAMPLING = {frozenset(f.name for f in fields(kind)): kind for kind in (Sampling, Script)}
Item = TypeVar("Item")


def frame(value: Any) -> bytes:
    """An encoded value, preceded by its length; one of NOT_SENDABLE if it cannot be encoded."""
    data = encode(value)
    return LENGTH.pack(len(data)) + data


def frame_results(messages: list[FromLoop]) -> bytes:
    """A frame of messages from an engine; answers that cannot be sent become errors."""
    try:
        return frame(messages)
    except NOT_SENDABLE:
        return frame([_sendable(message) for message in messages])


def _sendable(message: FromLoop) -> FromLoop:
    try:
        encode(message)
    except NOT_SENDABLE as error:
        if not isinstance(message, QueryResult):
            raise
        return QueryResult(message.number, None, f"the answer cannot be sent: {error}")
    return message


class Decoder(Generic[Item]):
    """Decodes values of one type; ExecutorError for bytes that are not such a value."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kind, dec_hook=_made).decode

    def decode(self, data: bytes | bytearray | memoryview) -> Item:
        try:
            value: Item = self._decode(data)
        except Exception as error:  # whatever the bytes of another process cause
            raise ExecutorError(
                f"a frame of {len(data)} bytes cannot be decoded: {shorten(str(error))}"
            ) from error
        return value


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The first frame of both sides: an engine, or the expected one, and the sender's software."""

    name: str
    model: str
    block_size: int
    protocol: int = PROTOCOL
    version: str = __version__  # of Headway


class RequestDecoder(Decoder[list[ToLoop | Refusal]]):
    """Decodes messages to an engine; a Submit with values of wrong types becomes its refusal."""

    def __init__(self, kind: Any) -> None:
        super().__init__(list[kind])
        self._one, self._plain = Decoder[ToLoop](kind), Decoder[Any](Any)
        self._parts = Decoder[list[msgspec.Raw]](list[msgspec.Raw])

    def decode(self, data: bytes | bytearray | memoryview) -> list[ToLoop | Refusal]:
        try:
            return super().decode(data)
        except ExecutorError:
            with suppress(ExecutorError):  # raised for the whole frame
                return [self._message(bytes(part)) for part in self._parts.decode(bytes(data))]
            raise

    def _message(self, part: bytes) -> ToLoop | Refusal:
        try:
            return self._one.decode(part)
        except ExecutorError as error:
            match self._plain.decode(part):
                case ["Submit", str(id), *_]:
                    problem = f"request {id!r} has a value of a wrong type: {error.__cause__}"
                    return refusal_of(id, InvalidRequest(problem))
            raise


def take_items(received: bytearray, decoder: Decoder[list[Item]]) -> list[Item]:
    """Remove the complete frames from the received bytes and return their items.

    ExecutorError if a frame is too long or invalid.
    """
    start, items = 0, list[Item]()
    while len(received) - start >= LENGTH.size:
        begin = start + LENGTH.size
        end = begin + checked_length(LENGTH.unpack_from(received, start)[0])
        if end > len(received):
            break
        with memoryview(received) as whole:
            items += decoder.decode(whole[begin:end])
        start = end
    del received[:start]
    return items


async def read_items(
    reader: asyncio.StreamReader, decoder: Decoder[list[Item]]
) -> AsyncIterator[list[Item]]:
    """The items of frames as they arrive, until the peer closes the connection.

    Raises ConnectionError if the connection is lost, ExecutorError for an invalid frame.
    """
    received = bytearray()
    while data := await reader.read(MAX_READ):
        received += data
        if items := take_items(received, decoder):
            yield items
    if received:
        raise ConnectionError("it ended within a frame; the other process has probably ended")


async def read_frame(reader: asyncio.StreamReader, decoder: Decoder[Item], limit: int) -> Item:
    """The next value; ExecutorError if it is longer than `limit` bytes or invalid."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return decoder.decode(await reader.readexactly(checked_length(length, limit)))


def checked_length(length: int, limit: int = MAX_FRAME) -> int:
    """The announced length of a frame; ExecutorError if it is above the limit."""
    if length > limit:
        raise ExecutorError(f"a frame has {length} bytes (limit {limit})")
    return length


@cache
def to_engine() -> RequestDecoder:
    """Decodes messages to an engine, with all types of queries that this process has imported."""
    return RequestDecoder(reduce(or_, [Submit, Cancel, Resume, Goodbye, *Query.__subclasses__()]))


@cache
def from_engine() -> Decoder[list[FromLoop]]:
    """Decodes messages from an engine; the value of a QueryResult is not checked."""
    return Decoder(list[FromLoop])


def typed_answer(query: type[Query[Any]], result: QueryResult) -> QueryResult:
    """The result with a value of the type that the query's class names."""
    if result.error is not None:
        return result
    (kind,) = get_args(query.__orig_bases__[0])  # type: ignore[attr-defined]
    try:
        return QueryResult(result.number, msgspec.convert(result.value, kind))
    except msgspec.ValidationError as error:
        return QueryResult(result.number, None, f"the answer has the wrong type: {error}")


def _plain(value: Any) -> memoryview | bytes:
    """Types that MessagePack has not, as bytes."""
    if isinstance(value, array) and value.typecode == "i":
        return memoryview(value).cast("B")
    if isinstance(value, np.ndarray):
        return value.astype(np.float32).tobytes()
    raise TypeError(f"a frame cannot contain a value of type {type(value).__qualname__}")


def _made(kind: Any, value: Any) -> Any:
    """A value of a type that MessagePack has not."""
    if kind is array:
        if isinstance(value, bytes):
            ids = array("i")
            ids.frombytes(value)
            return ids
        return array("i", value)
    if kind is SamplingOptions:
        return msgspec.convert(value, SAMPLING[frozenset(value)])
    return np.frombuffer(value, np.float32)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
HELLO = Decoder[Hello](Hello)
