"""Chunks that are decoded without Zarr are those that Zarr decodes."""

import itertools

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from variants import slow_but
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec
from zarr.storage import LocalStore, MemoryStore

from daskrr.errors import MissingChunks, UnreadableData
from daskrr.storage.chunk_files import ChunkFiles
from daskrr.storage.zarr_input import ZarrBlock, open_zarr

VALUES = np.random.default_rng(0).standard_normal((103, 5)) * 50
CODECS = {
    "none": None,
    "zstd": ZstdCodec(),
    "blosc": BloscCodec(),
    "gzip": GzipCodec(),
    "crc32c": Crc32cCodec(),
    "zstd, crc32c": (ZstdCodec(), Crc32cCodec()),
}


def stored(folder, values=VALUES, chunk=(10, 5), codecs=None, **options):
    array = zarr.create_array(
        str(folder), shape=values.shape, chunks=chunk, dtype=values.dtype, compressors=codecs, **options
    )
    array[...] = values
    return array


@pytest.mark.parametrize("codecs", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("endian", slow_but(["little", "big"], "big"))
@pytest.mark.parametrize(
    "dtype", ["f8", "?", *(pytest.param(one, marks=pytest.mark.slow) for one in ("f4", "i2", "u1"))]
)
def test_read__is_what_zarr_reads(codecs, endian, dtype, tmp_path):
    serializer = BytesCodec(endian=endian if np.dtype(dtype).itemsize > 1 else None)
    stored(tmp_path / "X", VALUES.astype(dtype), codecs=codecs, serializer=serializer)
    array = open_zarr(str(tmp_path / "X"))
    files = ChunkFiles.of(array)
    for start, stop in itertools.combinations([0, 1, 9, 10, 11, 50, 102, 103], 2):
        found, expected = files.read(start, stop), array[start:stop]
        np.testing.assert_array_equal(found, expected)
        assert (found.dtype, found.dtype.isnative) == (expected.dtype, True)


@given(n_rows=st.integers(1, 40), chunk_rows=st.integers(1, 50), cut=st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_read__of_any_rows_in_any_chunks(n_rows, chunk_rows, cut, tmp_path_factory):
    folder, values = tmp_path_factory.mktemp("any"), np.arange(1.0, n_rows + 1)
    stored(folder / "y", values, (chunk_rows,))
    start, stop = sorted(min(one, n_rows) for one in cut)
    if start < stop:
        files = ChunkFiles.of(open_zarr(str(folder / "y")))
        np.testing.assert_array_equal(files.read(start, stop), values[start:stop])


class Other(LocalStore):
    """It may do more than to read files."""


OTHERS = {
    "in memory": lambda folder: zarr.array(VALUES, store=MemoryStore()),
    "of another kind": lambda folder: zarr.open_array(Other(stored(folder / "X").store.root), mode="r"),
    "Zarr 2": lambda folder: stored(folder / "X", zarr_format=2),
    "in shards": lambda folder: stored(folder / "X", shards=(50, 5)),
    "columns apart": lambda folder: stored(folder / "X", chunk=(10, 3)),
    "by columns": lambda folder: stored(folder / "X", filters=[TransposeCodec(order=(1, 0))]),
    "another codec": lambda folder: stored(folder / "X", codecs=[zarr.codecs.numcodecs.LZ4()]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_read__is_left_to_zarr(make, tmp_path):
    array = make(tmp_path)
    assert ChunkFiles.of(array) is None
    assert np.array_equal(np.concatenate(list(ZarrBlock(array, 0, 103, 10, refuse_missing=True))), VALUES)


DAMAGE = {
    "a flipped bit": lambda raw: raw[:20] + bytes([raw[20] ^ 1]) + raw[21:],
    "cut off": lambda raw: raw[:-9],
    "empty": lambda raw: b"",
    "another chunk": lambda raw: raw + raw,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("codecs", [(ZstdCodec(), Crc32cCodec()), Crc32cCodec()], ids=["zstd", "plain"])
def test_read__of_damaged_chunks_is_refused_by_name(damage, codecs, tmp_path):
    stored(tmp_path / "X", codecs=codecs)
    path = tmp_path / "X/c/4/0"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnreadableData, match=r"rows 40–49 of .*\(chunk 'c/4/0'\)"):
        list(ZarrBlock(open_zarr(str(tmp_path / "X")), 0, 103, 10, refuse_missing=True))


def test_read__of_a_chunk_of_another_size_is_refused(tmp_path):
    stored(tmp_path / "X", codecs=ZstdCodec())
    stored(tmp_path / "Y", VALUES[:30], (9, 5), ZstdCodec())
    (tmp_path / "X/c/1/0").write_bytes((tmp_path / "Y/c/1/0").read_bytes())
    with pytest.raises(UnreadableData, match="rows 10–19"):
        list(ZarrBlock(open_zarr(str(tmp_path / "X")), 0, 103, 10, refuse_missing=True))


def test_read__of_a_chunk_that_was_never_written_is_as_with_zarr(tmp_path):
    stored(tmp_path / "X")
    (tmp_path / "X/c/4/0").unlink()
    array = open_zarr(str(tmp_path / "X"))
    with pytest.raises(MissingChunks, match="row 40"):
        list(ZarrBlock(array, 0, 103, 10, refuse_missing=True))
    filled = np.concatenate(list(ZarrBlock(array, 0, 103, 10, refuse_missing=False)))
    assert not filled[40:50].any()
    np.testing.assert_array_equal(filled[50:], VALUES[50:])
