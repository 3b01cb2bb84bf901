"""Reads a GGUF file: its metadata, the location of each tensor, and quantized tensors.

Bounds are checked before anything is read, so that a truncated or foreign file is detected in
milliseconds. Knows the format, not the model.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import ModelError

MAGIC, VERSIONS, ALIGNMENT, MAX_DIMENSIONS = b"GGUF", (2, 3), 32, 4
STRING, ARRAY = 8, 9
CHUNK = 1 << 20  # numbers dequantized at once
GROUP, ALL_ROWS = 32, slice(None)
GROUP_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}  # per 32 numbers
NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<b1", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """The location of a tensor; shape is rows first, offset is from the start of the file."""

    kind: int  # ggml's type number
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Everything in a GGUF file before the tensors' data."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata as plain Python values; ModelError if the file is truncated or not GGUF."""
    return read_header(path).metadata


def read_header(path: Path) -> Header:
    """Metadata and tensor locations, all checked to be inside the file; ModelError otherwise."""
    try:
        return _parse(_Cursor(np.memmap(path, dtype=np.uint8, mode="r").data))
    except OSError as error:
        raise ModelError(f"{path}: cannot read this file: {error}") from error
    except ImportError as error:
        raise ModelError(f"{path}: GGUF files need the gguf package: {error}") from error
    except ValueError as error:  # numpy also raises it for an empty file, Python for bad UTF-8
        raise ModelError(f"{path}: not a valid GGUF file: {error}") from error


class _Cursor:
    """Reads forwards through the file's bytes, never beyond their end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self.data) - self.at:
            raise ValueError(f"truncated: the file ends at byte {len(self.data)}, in its header")
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def string(self) -> str:
        return str(self.take(self.u64()), "utf-8")

    def strings(self, count: int) -> list[str]:
        """Like `count` calls of `string`, for the hundred thousand tokens of a vocabulary."""
        data, at, size, length = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            start = at + 8
            if start > size or (end := start + length(data, at)[0]) > size:
                break
            found.append(str(data[start:end], "utf-8"))
            at = end
        self.at = at
        if len(found) < count:
            self.string()  # ValueError, because the file ends in it
        return found

    def numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in NUMBERS:
            raise ValueError(f"the value at byte {self.at} has the unknown type {kind}")
        dtype = np.dtype(NUMBERS[kind])
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return values

    def value(self) -> Any:
        if (kind := self.u32()) == ARRAY:
            kind, count = self.u32(), self.u64()
            return self.strings(count) if kind == STRING else self.numbers(kind, count)
        return self.string() if kind == STRING else self.numbers(kind, 1)[0]


def _parse(cursor: _Cursor) -> Header:
    if bytes(cursor.take(4)) != MAGIC:
        raise ValueError(f"it does not start with {MAGIC.decode()}")
    version = cursor.u32()
    if version not in VERSIONS:
        raise ValueError(f"version {version} is not supported; supported: {VERSIONS}")
    num_tensors, num_keys = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"the key {key} occurs twice")
        metadata[key] = cursor.value()
    relative = dict(_tensor_infos(cursor, num_tensors))
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}; it must be a positive integer")
    start = -(-cursor.at // alignment) * alignment
    tensors, size = dict[str, TensorInfo](), len(cursor.data)
    for name, info in relative.items():
        tensors[name] = replace(info, offset=start + info.offset)
        if (end := tensors[name].offset + info.num_bytes) > size:
            raise ValueError(
                f"truncated: tensor {name} ends at byte {end}, the file at byte {size}"
            )
    if len(tensors) != num_tensors:
        raise ValueError("two tensors have the same name")
    return Header(metadata=metadata, tensors=tensors)


def _tensor_infos(cursor: _Cursor, count: int) -> Iterator[tuple[str, TensorInfo]]:
    """Read each tensor's location; offsets are still relative to the first tensor."""
    from gguf.constants import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    for _ in range(count):
        name, num_dimensions = cursor.string(), cursor.u32()
        if not 0 < num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(
                f"tensor {name} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are supported"
            )
        shape = tuple(cursor.u64() for _ in range(num_dimensions))[::-1]
        if 0 in shape:
            raise ValueError(f"tensor {name} of shape {list(shape)} is empty")
        kind, offset = cursor.u32(), cursor.u64()
        if kind not in sizes:
            raise ValueError(f"tensor {name} has the unknown type {kind}")
        group, group_bytes = sizes[kind]
        if shape[-1] % group:
            raise ValueError(f"tensor {name}: a row of {shape[-1]} is not a multiple of {group}")
        num_bytes = math.prod(shape) // group * group_bytes
        yield name, TensorInfo(kind=kind, shape=shape, offset=offset, num_bytes=num_bytes)


def read_bytes(path: Path, info: TensorInfo) -> NDArray[np.uint8]:
    """A tensor's stored bytes, one row per row; memory-mapped, not read yet."""
    rows = math.prod(info.shape[:-1])
    shape = (rows, info.num_bytes // rows)
    return np.memmap(path, dtype=np.uint8, mode="r", offset=info.offset, shape=shape)


@np.errstate(all="ignore")  # a damaged file may have NaN scales; the caller checks the result
def dequantize(path: Path, info: TensorInfo, wanted: slice = ALL_ROWS) -> NDArray[np.float32]:
    """A tensor's numbers, all or some rows of a matrix; other rows are not read.

    NotImplementedError for a type that the gguf package does not support.
    """
    from gguf import GGMLQuantizationType, quants

    stored, kind = read_bytes(path, info)[wanted], GGMLQuantizationType(info.kind)
    values = np.empty((len(stored), info.shape[-1]), dtype=np.float32)
    step = max(1, CHUNK // info.shape[-1])  # rows at a time, to avoid a second full copy
    for start in range(0, len(stored), step):
        rows, found = stored[start : start + step], values[start : start + step]
        if kind.name in GROUP_BYTES:
            _dequantize_groups(rows, kind.name, found)
        else:
            found[:] = quants.dequantize(np.array(rows), kind)
    return values[0] if len(info.shape) == 1 else values


def _dequantize_groups(stored: NDArray[np.uint8], kind: str, values: NDArray[np.float32]) -> None:
    """Write the numbers q * scale + minimum. The gguf package is slower: it takes few rows at a time.

    Its numbers are equal: q * scale is exact, and so is the sum for kinds without a minimum.
    """
    q, scale, minimum = unpack_groups(stored, kind)
    grouped = values.reshape(len(values), -1, GROUP)
    np.multiply(q.reshape(grouped.shape), scale[..., None], out=grouped)
    grouped += minimum[..., None]


def byte_columns(info: TensorInfo, kind: str, columns: slice) -> slice | None:
    """The stored bytes of a row that hold these columns; None unless they are whole groups."""
    start, stop, _ = columns.indices(info.shape[-1])
    if start % GROUP or stop % GROUP:
        return None
    return slice(start // GROUP * GROUP_BYTES[kind], stop // GROUP * GROUP_BYTES[kind])


@np.errstate(all="ignore")
def unpack_groups(
    stored: NDArray[np.uint8], kind: str
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """Integers q [rows, columns], and the scale and minimum of each group of 32 in a row.

    Layout of a group: float16 scale; float16 minimum (kinds _1); four bytes of fifth bits (kinds
    5_); then the low four bits, the first half of the group in the low nibbles, or 32 bytes (Q8_0).
    """
    rows = len(stored)
    groups = np.array(stored).reshape(rows, -1, GROUP_BYTES[kind])
    scale = groups[..., 0:2].copy().view(np.float16)[..., 0].astype(np.float32)
    if kind == "Q8_0":
        q = groups[..., 2:] ^ np.uint8(128)  # signed byte plus 128
        return q.reshape(rows, -1), scale, scale * np.float32(-128)
    low = groups[..., -16:]
    q = np.concatenate((low & np.uint8(15), low >> np.uint8(4)), axis=-1)
    if kind.startswith("Q5"):
        fifth = np.unpackbits(groups[..., -20:-16], axis=-1, bitorder="little")
        q |= fifth << np.uint8(4)
    if kind.endswith("_1"):
        minimum = groups[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float32)
    else:
        minimum = scale * np.float32(-8 if kind == "Q4_0" else -16)
    return q.reshape(rows, -1), scale, minimum
