"""Which stored metadata is believed: plain numbers behind codecs that cannot run code, told before any is made.

A store is whatever somebody else wrote. Its JSON may be huge or endlessly nested, its arrays may hold pickles, its
shape may be negative. Everything here works on text and dictionaries alone: no codec is looked up and no chunk is read.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daskrr.errors import MOST_LEVELS, InvalidData, is_too_deep
from daskrr.storage.urls import excerpt

MOST_BYTES = 8 * 2**20
MOST_DIMENSIONS = 64  # as of NumPy
# Eight bytes each are as many as an index of 64 bits reaches.
MOST_VALUES = 2**60

NUMBERS = {
    "bool": "b1", "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8", "uint8": "u1", "uint16": "u2",
    "uint32": "u4", "uint64": "u8", "float16": "f2", "float32": "f4", "float64": "f8",
}  # fmt: skip
# Both spellings of a dtype: that of Zarr 3 and that of Zarr 2, without its order of bytes.
NAMES = {name: name for name in NUMBERS} | {short: name for name, short in NUMBERS.items()}
# Compressors, checksums and filters of numbers. Pickle, JSON, MsgPack, text and categories are none of them.
NUMCODECS = (
    "zlib", "gzip", "bz2", "lz4", "zstd", "blosc", "lzma", "crc32", "crc32c", "adler32", "fletcher32", "shuffle",
    "delta", "fixedscaleoffset", "quantize", "bitround",
)  # fmt: skip


@dataclass(frozen=True)
class Policy:
    """What an array may be made of; codecs of Zarr 2 are called as Zarr 3 does, ``numcodecs.zlib``."""

    formats: frozenset[int]
    dtypes: frozenset[str]
    codecs: frozenset[str]


INPUTS = Policy(
    formats=frozenset({2, 3}),
    dtypes=frozenset(NUMBERS),
    codecs=frozenset({"bytes", "transpose", "sharding_indexed", "blosc", "gzip", "zstd", "crc32c"})
    | {f"numcodecs.{name}" for name in NUMCODECS},
)
"""Arrays of users."""

OUTPUTS = Policy(
    formats=frozenset({3}),
    dtypes=frozenset(NUMBERS),
    codecs=frozenset({"bytes", "zstd", "crc32c"}),
)
"""Arrays that daskrr wrote."""


def parse_json(text: bytes | str, what: str) -> Any:
    """The content of some JSON, unless there is too much of it or it is nested too deep.

    Raises
    ------
    InvalidData
        It is, or it is no JSON; the message begins with ``what``.
    """
    if len(text) > MOST_BYTES:
        raise InvalidData(f"{what} is larger than {MOST_BYTES // 2**20} MiB, more than is read of JSON.")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InvalidData(f"{what} is not JSON: {excerpt(error)}.") from None
    except RecursionError:
        raise _too_deep(what) from None
    check_depth(content, what)
    return content


def check_depth(value: Any, what: str) -> None:
    """Refuse lists and tables that are nested deeper than 64 levels, however deep they are."""
    if is_too_deep(value):
        raise _too_deep(what)


def _too_deep(what: str) -> InvalidData:
    return InvalidData(f"{what} is nested deeper than {MOST_LEVELS} levels. Nothing of it is used.")


def check_metadata(stored: bytes | str | Mapping[str, Any], policy: Policy, what: str) -> dict[str, Any]:
    """The metadata of an array, from its JSON or parsed, once all that it is made of is in the policy.

    Make the array from what is returned: a store may say something else when it is asked again.

    Parameters
    ----------
    stored
        What ``zarr.json`` or ``.zarray`` holds, or an entry of consolidated metadata.
    policy
        :data:`INPUTS` or :data:`OUTPUTS`.
    what
        Beginning of the message, such as "the metadata of X.zarr".

    Raises
    ------
    InvalidData
        Another format, dtype or codec than those of the policy, a shape that cannot be, or no metadata of an array.

    Examples
    --------
    >>> check_metadata('{"zarr_format": 2, "dtype": "|O"}', INPUTS, "the metadata of X")
    Traceback (most recent call last):
    daskrr.errors.InvalidData: the metadata of X has the dtype '|O', which is not read: ...
    """
    metadata = parse_json(stored, what) if isinstance(stored, (bytes, str)) else stored
    check_depth(metadata, what)
    if not isinstance(metadata, Mapping):
        raise InvalidData(f"{what} is {excerpt(metadata)}, not a table with the format, shape and dtype of an array.")
    version = metadata.get("zarr_format")
    if type(version) is not int or version not in policy.formats:
        raise _refusal(what, "zarr_format", version, map(str, policy.formats))
    kind = metadata.get("data_type" if version == 3 else "dtype")
    _check_dtype(kind, policy, what)
    codecs = _codecs_3(metadata.get("codecs"), what) if version == 3 else _codecs_2(metadata, what)
    for name, settings in codecs:
        if not isinstance(name, str) or name not in policy.codecs:
            raise _refusal(what, "codec", name, policy.codecs)
        for key in ("dtype", "astype"):
            if settings.get(key) is not None:
                _check_dtype(settings[key], policy, what)
    _check_shape(metadata, what)
    return dict(metadata)


def _refusal(what: str, part: str, value: Any, known: Any) -> InvalidData:
    return InvalidData(
        f"{what} has the {part} {excerpt(value)}, which is not read: it must be one of {', '.join(sorted(known))}. "
        "Convert the array."
    )


def _check_dtype(value: Any, policy: Policy, what: str) -> None:
    name = NAMES.get(value.lstrip("<>|=")) if isinstance(value, str) else None
    if name not in policy.dtypes:
        raise _refusal(what, "dtype", value, policy.dtypes)


def _codecs_3(listed: Any, what: str) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Names and settings of all codecs, also of those inside shards."""
    for codec in _listed(listed, "codecs", what):
        name, settings = _name(codec, "name"), _table(_table(codec).get("configuration"))
        yield name, settings
        if name == "sharding_indexed":
            for inner in ("codecs", "index_codecs"):
                yield from _codecs_3(settings.get(inner), what)


def _codecs_2(metadata: Mapping[str, Any], what: str) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    filters, compressor = metadata.get("filters"), metadata.get("compressor")
    used = [*_listed(filters or [], "filters", what), *([] if compressor is None else [compressor])]
    for codec in used:
        name = _name(codec, "id")
        yield f"numcodecs.{name}" if isinstance(name, str) else name, _table(codec)


def _listed(value: Any, key: str, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidData(f"{what} has no list of {key}, but {excerpt(value)}.")
    return value


def _name(codec: Any, key: str) -> Any:
    """What a codec is called; the name may be all there is of it."""
    return codec.get(key) if isinstance(codec, Mapping) else codec


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _check_shape(metadata: Mapping[str, Any], what: str) -> None:
    """Sizes from 0 on, chunks from 1 on, as many of them, and not more values than can be counted."""
    shape: Any = metadata.get("shape")
    chunks, grid = metadata.get("chunks"), _table(metadata.get("chunk_grid"))
    if grid.get("name") == "regular":
        chunks = _table(grid.get("configuration")).get("chunk_shape")
    _check_sizes("shape", shape, 0, what)
    if chunks is not None:
        _check_sizes("chunk shape", chunks, 1, what)
        if len(chunks) != len(shape):
            raise InvalidData(f"{what} has the shape {excerpt(shape)}, but chunks of {excerpt(chunks)}.")


def _check_sizes(name: str, sizes: Any, least: int, what: str) -> None:
    is_shape = isinstance(sizes, list) and len(sizes) <= MOST_DIMENSIONS
    counted = is_shape and all(type(size) is int and size >= least for size in sizes)
    if not counted or math.prod(sizes) > MOST_VALUES:
        raise InvalidData(
            f"{what} has the {name} {excerpt(sizes)}; it must be a list of integers of at least {least}, of at most "
            f"{MOST_DIMENSIONS} dimensions and 2**60 values."
        )
