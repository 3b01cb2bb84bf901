"""Messages between a gateway and a replica as bytes.

The two may run on different machines, so nothing is pickled: a frame can only contain plain values
and the message types listed here. Every value has a one-byte tag. Lists of token ids are arrays.
A connection starts with a `Hello` from each side.
"""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np

from headway.engine import messages
from headway.errors import ExecutorError
from headway.grammar.grammar import Grammar
from headway.request import RequestParams
from headway.sampling_params import Sampling, TokenLogprobs

PROTOCOL = 1  # change it when the encoding or a listed type changes
MAGIC = b"HEADWAY\0"
MAX_FRAME = 1 << 28  # bytes
START = struct.Struct("<8sI")
Reader = Callable[[memoryview, int], tuple[Any, int]]
LENGTH, INT, FLOAT = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")


class Hello(NamedTuple):
    """Who speaks. Replicas of one fleet must have equal `model` texts."""

    name: str
    version: str  # of Headway
    model: str  # everything that the results of a request depend on, in words
    block_size: int
    nonce: bytes


class Proof(NamedTuple):
    """The digest that proves knowledge of the fleet's key."""

    digest: bytes


class Drain(NamedTuple):
    """The replica is about to stop: move its requests."""

    reason: str


# The position of a type is its number on the wire.
TYPES: tuple[type[Any], ...] = (
    Hello, Proof, Drain, messages.Submit, messages.Cancel, messages.Query, messages.FinishInfo, messages.SampleUpdate,
    messages.TokenBatch, messages.Refusal, messages.QueryResult, messages.EngineStopped,
    messages.LoadReport, messages.CacheDelta, RequestParams, Sampling, Grammar, TokenLogprobs,
)  # fmt: skip
NUMBERS = {kind: number for number, kind in enumerate(TYPES)}


def field_names(kind: type[Any]) -> tuple[str, ...]:
    """Names of the fields of a NamedTuple or a dataclass, in order."""
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else kind._fields


FIELDS = [field_names(kind) for kind in TYPES]


def encode(value: Any) -> bytes:
    """The bytes of a value; TypeError for a type that a frame cannot contain."""
    out = bytearray()
    _write(out, value)
    return bytes(out)


def frame(value: Any) -> bytes:
    """An encoded value, preceded by its length."""
    out = bytearray(LENGTH.size)
    _write(out, value)
    LENGTH.pack_into(out, 0, len(out) - LENGTH.size)
    return bytes(out)


def decode(data: bytes | memoryview) -> Any:
    """The value of encoded bytes; ExecutorError if they are not one complete value."""
    try:
        value, end = _read(memoryview(data), 0)
    except (IndexError, KeyError, TypeError, ValueError, struct.error, RecursionError) as error:
        raise ExecutorError(f"a frame of {len(data)} bytes cannot be decoded: {error}") from error
    if end != len(data):
        raise ExecutorError(f"a frame of {len(data)} bytes has a value of only {end} bytes")
    return value


async def read_frame(reader: asyncio.StreamReader, limit: int = MAX_FRAME) -> Any:
    """The next value; IncompleteReadError at the end, ExecutorError if it is too long or invalid."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > limit:
        raise ExecutorError(f"a frame has {length} bytes (limit {limit})")
    return decode(await reader.readexactly(length))


def _write(out: bytearray, value: Any) -> None:
    writer = WRITERS.get(type(value))
    if writer is None:
        raise TypeError(f"a frame cannot contain a value of type {type(value).__qualname__}")
    writer(out, value)


def _write_int(out: bytearray, value: int) -> None:
    if -(1 << 63) <= value < 1 << 63:
        out += b"i" + INT.pack(value)
    else:
        _write_bytes(out, str(value).encode(), b"I")


def _write_bytes(out: bytearray, value: bytes, tag: bytes = b"b") -> None:
    out += tag + LENGTH.pack(len(value)) + value


def _write_text(out: bytearray, value: str) -> None:
    _write_bytes(out, value.encode("utf-8", "surrogatepass"), b"s")


def _write_items(out: bytearray, values: Any, tag: bytes) -> None:
    """A list, tuple or set; whole numbers of 32 bits become an array."""
    if values and set(map(type, values)) == {int}:
        try:
            numbers = array("i", values)
        except OverflowError:
            pass
        else:
            _write_bytes(out, numbers.tobytes(), b"a" + tag)
            return
    out += tag + LENGTH.pack(len(values))
    for value in values:
        _write(out, value)


def _write_dict(out: bytearray, value: dict[Any, Any]) -> None:
    out += b"D" + LENGTH.pack(len(value))
    for key, item in value.items():
        _write(out, key)
        _write(out, item)


def _write_object(out: bytearray, value: Any) -> None:
    number = NUMBERS[type(value)]
    out += b"o" + bytes([number])
    for name in FIELDS[number]:
        _write(out, getattr(value, name))


def _write_tokens(out: bytearray, value: messages.TokenBatch) -> None:
    """The commonest message: ids as one text, numbers and values of the tokens as arrays."""
    counts = array("i", map(len, value.tokens))
    tokens = array("i", [token for each in value.tokens for token in each])
    out += b"B"
    _write_text(out, "\0".join(value.ids))
    _write_bytes(out, counts.tobytes())
    _write_bytes(out, tokens.tobytes())


def _write_embedding(out: bytearray, value: Any) -> None:
    _write_bytes(out, value.astype(np.float32).tobytes(), b"e")


WRITERS: dict[type[Any], Callable[[bytearray, Any], None]] = {
    type(None): lambda out, _: out.extend(b"N"),
    bool: lambda out, value: out.extend(b"T" if value else b"F"),
    int: _write_int,
    float: lambda out, value: out.extend(b"d" + FLOAT.pack(value)),
    str: _write_text,
    bytes: _write_bytes,
    array: lambda out, value: _write_bytes(out, value.tobytes(), b"al"),  # of type i
    list: lambda out, value: _write_items(out, value, b"l"),
    tuple: lambda out, value: _write_items(out, value, b"t"),
    frozenset: lambda out, value: _write_items(out, value, b"S"),
    dict: _write_dict,
    np.ndarray: _write_embedding,
    **dict.fromkeys(TYPES, _write_object),
    messages.TokenBatch: _write_tokens,
}
CONTAINERS: dict[int, Callable[[list[Any]], Any]] = {
    ord("l"): list,
    ord("t"): tuple,
    ord("S"): frozenset,
}


def _read(data: memoryview, at: int) -> tuple[Any, int]:
    """The value that begins at a position, and the position after it."""
    tag = data[at]
    reader = READERS.get(tag)
    if reader is None:
        raise ValueError(f"unknown tag {tag} at byte {at}")
    return reader(data, at + 1)


def _read_array(data: memoryview, at: int) -> tuple[Any, int]:
    content, end = _read_bytes(data, at + 1)
    return CONTAINERS[data[at]](_ints(content)), end


def _read_object(data: memoryview, at: int) -> tuple[Any, int]:
    number, values = data[at], []
    at += 1
    for _ in FIELDS[number]:
        value, at = _read(data, at)
        values.append(value)
    return _made(number, values), at


def _converted(convert: Callable[[memoryview], Any]) -> Reader:
    def read(data: memoryview, at: int) -> tuple[Any, int]:
        content, end = _read_bytes(data, at)
        return convert(content), end

    return read


def _constant(value: Any) -> Reader:
    return lambda _, at: (value, at)


def _items(make: Callable[[list[Any]], Any]) -> Reader:
    def read(data: memoryview, at: int) -> tuple[Any, int]:
        items, at = _read_items(data, at)
        return make(items), at

    return read


def _read_bytes(data: memoryview, at: int) -> tuple[memoryview, int]:
    (length,) = LENGTH.unpack_from(data, at)
    begin = at + LENGTH.size
    if begin + length > len(data):
        raise ValueError(f"{length} bytes are announced and {len(data) - begin} are left")
    return data[begin : begin + length], begin + length


def _read_items(data: memoryview, at: int, per_item: int = 1) -> tuple[list[Any], int]:
    (length,) = LENGTH.unpack_from(data, at)
    at += LENGTH.size
    items = []
    for _ in range(per_item * length):
        item, at = _read(data, at)
        items.append(item)
    return items, at


def _read_dict(data: memoryview, at: int) -> tuple[dict[Any, Any], int]:
    items, at = _read_items(data, at, per_item=2)
    return dict(zip(items[::2], items[1::2], strict=True)), at


def _read_tokens(data: memoryview, at: int) -> tuple[messages.TokenBatch, int]:
    ids, at = _read(data, at)
    counts, at = _read(data, at)
    flat, at = _read(data, at)
    tokens, parts, start = _ints(flat), [], 0
    for count in _ints(counts):
        parts.append(tokens[start : start + count])
        start += count
    return messages.TokenBatch(ids.split("\0") if parts else [], parts), at


def _ints(content: bytes | memoryview) -> list[int]:
    numbers = array("i")
    numbers.frombytes(content)
    return numbers.tolist()


def _made(number: int, values: list[Any]) -> Any:
    kind = TYPES[number]
    if is_dataclass(kind):
        return kind(**dict(zip(FIELDS[number], values, strict=True)))
    return kind(*values)


READERS: dict[int, Reader] = {
    ord("N"): _constant(None), ord("T"): _constant(True), ord("F"): _constant(False),
    ord("i"): lambda data, at: (INT.unpack_from(data, at)[0], at + INT.size),
    ord("d"): lambda data, at: (FLOAT.unpack_from(data, at)[0], at + FLOAT.size),
    ord("I"): _converted(lambda content: int(bytes(content))),
    ord("s"): _converted(lambda content: str(content, "utf-8", "surrogatepass")),
    ord("b"): _converted(bytes),
    ord("e"): _converted(lambda content: np.frombuffer(bytes(content), np.float32)),
    **{tag: _items(make) for tag, make in CONTAINERS.items()},
    ord("a"): _read_array, ord("D"): _read_dict, ord("o"): _read_object, ord("B"): _read_tokens,
}  # fmt: skip
