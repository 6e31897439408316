"""Which metadata of arrays is believed."""

import json

import numpy as np
import pytest
import zarr
from numcodecs import Delta, Zlib
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec, ZstdCodec

from daskrr.errors import MOST_LEVELS, InvalidData
from daskrr.storage.trust import INPUTS, MOST_BYTES, OUTPUTS, check_depth, check_metadata, parse_json
from daskrr.storage.zarr_arrays import blueprint, metadata_of

FORMAT_2 = {"zarr_format": 2, "shape": [20, 3], "chunks": [20, 3], "dtype": "<f8", "filters": None, "compressor": None}
FORMAT_3 = {
    "zarr_format": 3, "node_type": "array", "shape": [20, 3], "data_type": "float64", "codecs": [{"name": "bytes"}],
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [20, 3]}},
}  # fmt: skip
DTYPES = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
]


def sharded(**inner):
    codecs = {"codecs": [{"name": "bytes"}], "index_codecs": [{"name": "bytes"}, {"name": "crc32c"}]}
    return [{"name": "sharding_indexed", "configuration": {"chunk_shape": [5, 3], **codecs, **inner}}]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("order", ["<", ">"])
def test_check_metadata__believes_what_zarr_writes_of_numbers(dtype, zarr_format, order, tmp_path):
    zarr.create_array(tmp_path, shape=(4, 3), dtype=np.dtype(dtype).newbyteorder(order), zarr_format=zarr_format)
    stored = (tmp_path / ("zarr.json" if zarr_format == 3 else ".zarray")).read_bytes()
    assert check_metadata(stored, INPUTS, "X") == json.loads(stored)
    assert check_metadata(json.loads(stored), INPUTS, "X") == json.loads(stored)


@pytest.mark.parametrize(
    "options",
    [
        {"compressors": [ZstdCodec(), Crc32cCodec()]},
        {"compressors": [BloscCodec()], "filters": [TransposeCodec(order=(1, 0))]},
        {"compressors": [GzipCodec()], "shards": (4, 3), "chunks": (2, 3)},
        {
            "serializer": ShardingCodec(chunk_shape=(2, 3), codecs=[BytesCodec(), ZstdCodec()]),
            "chunks": (4, 3),
            "compressors": None,
        },
        {"compressors": [Zlib()], "filters": [Delta("<f8")], "zarr_format": 2},
    ],
    ids=["zstd", "blosc", "shards", "shards by codec", "zarr 2"],
)
def test_check_metadata__believes_the_codecs_that_people_use(options, tmp_path):
    zarr.create_array(tmp_path, shape=(4, 3), dtype=float, **options)
    stored = (tmp_path / (".zarray" if "zarr_format" in options else "zarr.json")).read_bytes()
    assert check_metadata(stored, INPUTS, "X") == json.loads(stored)


def test_check_metadata__believes_of_outputs_what_daskrr_writes_and_no_more():
    group = blueprint({"scores": (40,), "counts": (40, 2)}, 10, counts="int64")
    for name in ("scores", "counts"):
        check_metadata(metadata_of(group[name]), OUTPUTS, name)
    for other in (FORMAT_2, FORMAT_3 | {"codecs": [{"name": "gzip"}]}):
        check_metadata(other, INPUTS, "X")
        with pytest.raises(InvalidData, match=r"X has the (zarr_format|dtype|codec) .* which is not read"):
            check_metadata(other, OUTPUTS, "X")


@pytest.mark.parametrize(
    "dtype", ["|O", "<U8", "|S8", "<M8[ns]", "<c16", "|V8", "<f16", [["a", "<f8"]], None, 7, "", "O8"]
)
@pytest.mark.parametrize("metadata", [FORMAT_2, FORMAT_3], ids=["2", "3"])
def test_check_metadata__refuses_what_is_not_a_plain_number(dtype, metadata):
    key = "data_type" if metadata["zarr_format"] == 3 else "dtype"
    with pytest.raises(InvalidData, match=r"X has the dtype .*, which is not read: it must be one of bool, float16"):
        check_metadata(metadata | {key: dtype}, INPUTS, "X")


CODES = [
    "pickle",
    "json2",
    "msgpack2",
    "vlen-utf8",
    "vlen-array",
    "categorize",
    "base64",
    "astype",
    "no-such",
    None,
    3,
    {},
]


@pytest.mark.parametrize("name", CODES)
def test_check_metadata__refuses_codecs_that_it_does_not_know(name):
    for metadata in (
        FORMAT_2 | {"filters": [{"id": name}]},
        FORMAT_2 | {"filters": [{"id": "shuffle"}], "compressor": {"id": name}},
        FORMAT_3 | {"codecs": [{"name": "bytes"}, {"name": name}]},
        FORMAT_3 | {"codecs": [{"name": "bytes"}, name]},
        FORMAT_3 | {"codecs": [{"name": "bytes"}, {"name": f"numcodecs.{name}"}]},
        FORMAT_3 | {"codecs": sharded(codecs=[{"name": name}])},
        FORMAT_3 | {"codecs": sharded(index_codecs=[{"name": name}])},
        FORMAT_3 | {"codecs": sharded(codecs=sharded(codecs=[{"name": name}]))},
    ):
        with pytest.raises(InvalidData, match="X has the codec"):
            check_metadata(metadata, INPUTS, "X")
    check_metadata(FORMAT_3 | {"codecs": sharded(codecs=sharded())}, INPUTS, "X")


@pytest.mark.parametrize("settings", [{"dtype": "|O"}, {"dtype": "<f8", "astype": "|O"}, {"dtype": ["<f8"]}])
def test_check_metadata__refuses_filters_of_objects(settings):
    for metadata in (
        FORMAT_2 | {"filters": [{"id": "delta", **settings}]},
        FORMAT_3 | {"codecs": [{"name": "numcodecs.delta", "configuration": settings}, {"name": "bytes"}]},
    ):
        with pytest.raises(InvalidData, match="X has the dtype"):
            check_metadata(metadata, INPUTS, "X")


@pytest.mark.parametrize(
    "shape", [[-5, 3], [2**61, 3], [10**400, 1], [1.5, 3], [True, 3], ["20", 3], None, {}, "20", [2] * 65, [2**62] * 65]
)
@pytest.mark.parametrize("metadata", [FORMAT_2, FORMAT_3], ids=["2", "3"])
def test_check_metadata__refuses_shapes_that_cannot_be(shape, metadata):
    with pytest.raises(InvalidData, match=r"X has the shape .*; it must be a list of integers of at least 0"):
        check_metadata(metadata | {"shape": shape}, INPUTS, "X")
    if shape is not None:
        grid = {"name": "regular", "configuration": {"chunk_shape": shape}}
        with pytest.raises(InvalidData, match=r"X has the chunk shape .*; it must be a list of integers of at least 1"):
            check_metadata(metadata | {"chunks": shape, "chunk_grid": grid}, INPUTS, "X")


@pytest.mark.parametrize("chunks", [[20], [0, 3], [20, 3, 1]])
@pytest.mark.parametrize("metadata", [FORMAT_2, FORMAT_3], ids=["2", "3"])
def test_check_metadata__refuses_chunks_that_do_not_fit(chunks, metadata):
    grid = {"name": "regular", "configuration": {"chunk_shape": chunks}}
    with pytest.raises(InvalidData, match=r"X has the (chunk )?shape"):
        check_metadata(metadata | {"chunks": chunks, "chunk_grid": grid}, INPUTS, "X")


@pytest.mark.parametrize("other", [{}, {"zarr_format": 4}, {"zarr_format": "3"}, {"zarr_format": True}, [], None, 3])
def test_check_metadata__refuses_what_is_no_metadata(other):
    for found in (other, json.dumps(other)):
        with pytest.raises(InvalidData, match=r"X (has the zarr_format|is .* not a table)"):
            check_metadata(found, INPUTS, "X")
    for found in (FORMAT_3 | {"codecs": None}, FORMAT_3 | {"codecs": "bytes"}, FORMAT_2 | {"filters": {"id": "zlib"}}):
        with pytest.raises(InvalidData, match="X has no list of"):
            check_metadata(found, INPUTS, "X")


def nested(levels):
    found = "leaf"
    for _ in range(levels):
        found = {"deep": found}
    return found


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 900, 200_000])
def test_parse_json__refuses_endless_nesting(opening, closing, levels):
    with pytest.raises(InvalidData, match=r"^X is nested deeper than 64 levels"):
        parse_json(opening * levels + "1" + closing * levels, "X")


def test_check_depth__counts_levels_however_many():
    check_depth(nested(MOST_LEVELS), "X")
    assert parse_json("[" * MOST_LEVELS + "]" * MOST_LEVELS, "X")
    for levels in (MOST_LEVELS + 1, 200_000):
        with pytest.raises(InvalidData, match="X is nested deeper"):
            check_depth(nested(levels), "X")
    with pytest.raises(InvalidData, match="X is nested deeper"):
        check_metadata(FORMAT_3 | {"attributes": nested(200_000)}, INPUTS, "X")


def test_parse_json__refuses_what_is_too_large_or_no_json():
    with pytest.raises(InvalidData, match=r"^X is larger than 8 MiB"):
        parse_json(b"[" + b" " * MOST_BYTES + b"]", "X")
    for text in (b"", b"{", b"\xff\xfe\x00", "[1,]", "9" * 5000):
        with pytest.raises(InvalidData, match=r"^X is not JSON: "):
            parse_json(text, "X")


def test_messages__show_what_was_found_without_its_tricks():
    tricky = "\x1b[2J\n\u202e<script>" + "x" * 10_000
    for found in (
        FORMAT_3 | {"data_type": tricky},
        FORMAT_3 | {"codecs": [{"name": tricky}]},
        FORMAT_3 | {"shape": tricky},
    ):
        with pytest.raises(InvalidData, match=r"\\x1b\[2J\\n\\u202e<script>x+…") as caught:
            check_metadata(found, INPUTS, "X")
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 700
