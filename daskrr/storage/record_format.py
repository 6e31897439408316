"""The bytes of a record: nested plain values and NumPy arrays in one checksummed frame, and back without a change.

A frame is a fixed header (magic, format, a number of its own, lengths), JSON text, the bytes of every array, each from
a multiple of 64 on, and the CRC-32C of all that. The text has the name of the record, so that a whole one in the place
of another is found out. Nothing is ever unpickled; what the JSON says of an array is checked
before it is believed.
"""

import json
import math
import re
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData, InvalidParameter
from daskrr.numerics.checksum import crc32c

MAGIC = b"\x93daskrr\n"
FORMAT = 2
HEADER = struct.Struct("<8sI4x16sQQ")  # magic, format, identity, bytes of the text, bytes in all
CHECKSUM = struct.Struct("<I")
IDENTITY = slice(16, 32)
ALIGNMENT = 64
DTYPE = re.compile(r"\|b1|[<>|][iu][1248]|[<>]f[248]")
# JSON would join the two halves that Python keeps apart.
SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Frame:
    """A record ready to be written: buffers in order, and the number that tells this writing from any other."""

    parts: list[Bytes]
    identity: str

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(part.nbytes for part in self.parts)


def encode(name: str, content: Mapping[str, Any]) -> Frame:
    """Frame the content of the record ``name``; contiguous arrays are not copied.

    Raises
    ------
    InvalidParameter
        Something other than dicts with str keys, lists, tuples, str, int, float, bool, None and real arrays.
    """
    if not isinstance(content, Mapping):
        raise InvalidParameter(f"the content of a record must be a dict, got a {type(content).__name__}")
    body: list[Bytes] = []
    try:
        text = json.dumps({"name": name, "content": _flatten(content, body)}, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"the content cannot be recorded: {error}") from None
    text += b" " * (-(HEADER.size + len(text)) % ALIGNMENT)
    total = HEADER.size + len(text) + sum(part.nbytes for part in body) + CHECKSUM.size
    identity = secrets.token_bytes(16)
    parts = [_bytes(HEADER.pack(MAGIC, FORMAT, identity, len(text), total) + text), *body]
    return Frame([*parts, _bytes(CHECKSUM.pack(_checksum(parts)))], identity.hex())


def identity_of(stored: Bytes) -> str:
    """The number of a stored frame, or of its beginning; empty if even that is not there."""
    return stored[IDENTITY].tobytes().hex() if stored.nbytes >= IDENTITY.stop else ""


def decode(name: str, stored: Bytes) -> dict[str, Any]:
    """The content of a frame of the record ``name``; its arrays are views of ``stored``.

    Raises
    ------
    ValueError
        The frame is truncated, changed, of another record or none at all; the message says what was found.
    InvalidData
        It is whole, but of a format that this version does not know.
    """
    if stored.nbytes < HEADER.size + CHECKSUM.size:
        raise ValueError(f"it has {stored.nbytes} bytes, fewer than any record")
    magic, version, _, text_bytes, total = HEADER.unpack(stored[: HEADER.size].tobytes())
    if magic == MAGIC and stored.nbytes < total:
        raise ValueError(f"{stored.nbytes} of its {total} bytes are there")
    if CHECKSUM.unpack(stored[-CHECKSUM.size :].tobytes())[0] != _checksum([stored[: -CHECKSUM.size]]):
        raise ValueError("its checksum does not match")
    if magic != MAGIC:
        raise ValueError("it does not begin like a record")
    if version != FORMAT:
        raise InvalidData(f"it has format {version}; this version reads format {FORMAT}. Upgrade daskrr.")
    return _unframe(name, stored, HEADER.size + text_bytes)


def _unframe(name: str, stored: Bytes, text_end: int) -> dict[str, Any]:
    payload = stored[text_end : -CHECKSUM.size]
    try:
        found = json.loads(stored[HEADER.size : text_end].tobytes(), object_hook=lambda found: _revive(found, payload))
        told, content = found["name"], found["content"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"it cannot be decoded: {type(error).__name__}") from None
    if told != name:
        raise ValueError(f"it is the record {told!r}")
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}")
    return content


def _checksum(parts: list[Bytes]) -> int:
    found = 0
    for part in parts:
        found = crc32c(part, found)
    return found


def _bytes(raw: bytes) -> Bytes:
    return np.frombuffer(raw, np.uint8)


def _flatten(value: Any, body: list[Bytes]) -> Any:
    """``value`` as JSON knows it; arrays go to ``body`` and leave a note of where they are."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str) and not SURROGATES.search(value):
        return value
    if isinstance(value, (list, tuple)):
        return [_flatten(one, body) for one in value]
    if isinstance(value, Mapping):
        return {_escape(key): _flatten(one, body) for key, one in value.items()}
    if isinstance(value, np.ndarray) and DTYPE.fullmatch(value.dtype.str) and not np.ma.isMaskedArray(value):
        return {"$array": _append(np.asarray(value), body)}
    kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise ValueError(f"it holds a value of type {kind}, which is not plain")


def _escape(key: Any) -> str:
    """Keys that begin with a dollar sign get another one, so that none is mistaken for a note of an array."""
    if not isinstance(key, str) or SURROGATES.search(key):
        raise ValueError(f"the key {key!r} is not a plain str")
    return f"${key}" if key.startswith("$") else key


def _append(array: NDArray, body: list[Bytes]) -> list[Any]:
    """Put the bytes of an array at the end of ``body``; tell its dtype, shape, order and where it begins."""
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = (array.T if order == "F" else np.asarray(array, order="C")).reshape(-1).view(np.uint8)
    start = sum(part.nbytes for part in body)
    body += [flat, np.zeros(-flat.nbytes % ALIGNMENT, np.uint8)]
    return [array.dtype.str, list(array.shape), order, start]


def _revive(found: dict[str, Any], payload: Bytes) -> Any:
    if "$array" not in found:
        return {key.removeprefix("$"): value for key, value in found.items()}
    name, shape, order, start = found["$array"]
    if not DTYPE.fullmatch(name) or order not in ("C", "F") or min(start, *shape, 0) < 0:
        raise ValueError("not an array")
    dtype = np.dtype(name)
    return payload[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape, order=order)
