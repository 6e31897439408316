"""The one view of the input: every source gives the same rows, and refuses what it cannot read."""

import os
import pickle
import re
from pathlib import Path
from threading import Event

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import zarr
from hypothesis import strategies as st
from strategies import DTYPES, SOURCES, as_zarr, convert, score
from variants import examples
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ZstdCodec
from zarr.storage import MemoryStore

import daskrr
from daskrr.errors import DaskrrError, InvalidData, InvalidParameter, MissingChunks, SourceUnreachable
from daskrr.kernels import Gaussian, Linear
from daskrr.runtime import rows as module
from daskrr.runtime.rows import check_reachable, for_one_task, open_rows, opened, pieces, redact
from daskrr.storage import pieces as pieces_module
from daskrr.storage import retry as patience
from daskrr.storage import zarr_input as chunks
from daskrr.storage.pieces import KeptPieces
from daskrr.storage.zarr_input import ZarrBlock


@pytest.fixture(autouse=True, scope="module")
def impatient():
    """Damage does not pass: tell it at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patience, "PAUSES", (0.001,))
        patch.setattr(patience, "PAUSES_IF_ABSENT", (0.001,))
        yield


def data(n=23, d=3, dtype="float64", seed=0):
    return convert(np.random.default_rng(seed).standard_normal((n, d)), dtype)


def read(rows, start=0, stop=None):
    source = rows.source(start, rows.n_rows if stop is None else stop)
    source = dask.compute(source, scheduler="synchronous")[0] if isinstance(rows, module.DaskRows) else source
    return list(pieces(source))


def chunk_files(folder):
    return sorted(
        path for path in Path(folder).rglob("*") if path.is_file() and not path.name.startswith((".z", "zarr"))
    )


# --- Reading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", SOURCES)
def test_open_rows__gives_the_same_rows_of_every_source(source, dtype, tmp_path):
    X = data(dtype=dtype)
    rows = open_rows(SOURCES[source](X, tmp_path))
    assert (rows.shape, rows.dtype, rows.n_rows, rows.nbytes) == (X.shape, X.dtype, 23, X.nbytes)
    for start, stop in [(0, 23), (5, 15), (20, 23)]:
        found = np.concatenate(read(rows, start, stop))
        assert found.dtype == X.dtype
        np.testing.assert_array_equal(found, X[start:stop])


@pytest.mark.parametrize(
    ("make", "unit"),
    [
        (lambda X: X, 1),
        (lambda X: da.from_array(X, chunks=(4, -1)), 4),
        (lambda X: da.from_array(X, chunks=((4, 4, 15), -1)), 4),
        (lambda X: da.from_array(X, chunks=((4, 3, 16), -1)), 1),
        (lambda X: da.from_array(X, chunks=((0, 23), -1)), 1),
        (lambda X: as_zarr(X, (6, 2)), 6),
        (lambda X: as_zarr(X, (50, 3)), 50),
        (lambda X: as_zarr(X, (3, 3), shards=(9, 3)), 9),
    ],
)
def test_unit_rows__is_what_is_decoded_at_once(make, unit):
    rows = open_rows(make(data()))
    assert rows.unit_rows == unit
    np.testing.assert_array_equal(np.concatenate(read(rows)), data())


def test_unit_rows__of_a_huge_shard_is_its_inner_chunk(monkeypatch):
    monkeypatch.setattr(chunks, "SHARD_BYTES", 100)
    assert open_rows(as_zarr(data(), (3, 3), shards=(9, 3))).unit_rows == 3


@pytest.mark.parametrize(("limit", "heights"), [(1, [5, 5, 5, 5, 3]), (2 * 5 * 24, [10, 10, 3]), (10**6, [23])])
def test_pieces__are_whole_chunks_within_a_limit(limit, heights, monkeypatch):
    monkeypatch.setattr(chunks, "PIECE_BYTES", limit)
    rows = open_rows(as_zarr(data(), (5, 3)))
    found = read(rows)
    assert [len(piece) for piece in found] == heights
    np.testing.assert_array_equal(np.concatenate(found), data())
    assert rows.piece_rows(23) >= max(map(len, found))


def test_source__of_a_zarr_array_travels(tmp_path):
    rows = open_rows(as_zarr(data(), (5, 3), str(tmp_path / "x.zarr")))
    again = pickle.loads(pickle.dumps(rows.source(5, 20)))
    np.testing.assert_array_equal(np.concatenate(list(pieces(again))), data()[5:20])


def test_source__does_not_depend_on_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    as_zarr(data(), (5, 3), "x.zarr")
    opened = [open_rows("x.zarr"), open_rows(zarr.open_array("x.zarr", mode="r"))]
    monkeypatch.chdir(os.path.dirname(tmp_path))
    for rows in opened:
        np.testing.assert_array_equal(np.concatenate(read(rows)), data())


LAZY = {
    "rechunked": lambda X: da.from_array(X, chunks=4).rechunk((9, -1)),
    "concatenated": lambda X: da.concatenate([da.from_array(X[:10], chunks=3), da.from_array(X[10:], chunks=4)]),
    "sliced": lambda X: da.from_array(np.repeat(X, 2, axis=0), chunks=7)[::2],
    "indexed": lambda X: da.from_array(X[::-1].copy(), chunks=5)[np.arange(23)[::-1]],
    "transposed": lambda X: da.from_array(np.ascontiguousarray(X.T), chunks=(2, 6)).T,
    "mapped": lambda X: (da.from_array(X, chunks=(6, 3)) + 1.0).map_blocks(lambda block: block - 1.0),
    "delayed": lambda X: da.from_delayed(dask.delayed(lambda: X)(), X.shape, X.dtype),
    "stored": lambda X: da.from_zarr(as_zarr(X, (5, 3))),
    "persisted": lambda X: da.from_array(X, chunks=(6, 2)).persist(scheduler="synchronous"),
    "overlapped": lambda X: da.from_array(X, chunks=(8, 3)).map_overlap(lambda block: block, depth=1, boundary="none"),
    "stacked": lambda X: da.stack([da.from_array(column, chunks=9) for column in X.T], axis=1),
    "with empty chunks": lambda X: da.from_array(X, chunks=((0, 0, 23), 3)),
    "filtered": lambda X: (lambda a: a[a[:, 0] < np.inf].compute_chunk_sizes())(da.from_array(X, chunks=(5, 3))),
}


@pytest.mark.parametrize("kind", LAZY)
def test_anew__gives_the_same_rows_under_other_keys(kind):
    X = data()
    rows = open_rows(LAZY[kind](X))
    again = rows.anew("purpose")
    np.testing.assert_allclose(np.concatenate(read(again, 3, 17)), X[3:17], rtol=1e-15, atol=1e-15)
    shared = set(rows.array.__dask_graph__()) & set(again.array.__dask_graph__())
    assert not shared
    np.testing.assert_allclose(
        score(LAZY[kind](X), Linear(), 0.1, 5).scores, score(X, Linear(), 0.1, 5).scores, rtol=1e-9
    )


def test_open_rows__computes_nothing():
    def explode(block):
        raise AssertionError("a block was computed")

    rows = open_rows(da.from_array(data(), chunks=(5, 3)).map_blocks(explode, dtype=float, meta=np.empty((0, 0))))
    rows.anew("purpose").source(0, 10)
    with pytest.raises(AssertionError, match="was computed"):
        read(rows)


# --- What cannot be read ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (np.zeros((0, 3)), "X is empty"),
        (np.zeros((3, 0)), "X is empty"),
        (np.zeros(3), r"X must have 2 dimension\(s\).*Reshape"),
        (np.zeros((3, 2, 1)), r"its shape is \(3, 2, 1\)"),
        (np.zeros((3, 2), complex), "must be real .* dtype is complex128"),
        (np.zeros((3, 2), object), "dtype is object"),
        (np.zeros((3, 2), "U3"), "dtype is <U3"),
        (np.zeros((3, 2), "M8[s]"), "dtype is datetime64"),
        (np.zeros((3, 2), np.longdouble), "dtype is float128"),
        ([["a", "b"]], "dtype is <U1"),
        (da.zeros((0, 2)), "X is empty"),
        (da.zeros((3, 2), dtype=complex), "dtype is complex128"),
        (da.zeros(3), "must have 2"),
        (da.zeros((4, 2))[da.ones(4) > 0], "unknown size; call its compute_chunk_sizes"),
    ],
)
def test_open_rows__refuses_what_are_no_rows(X, message):
    with pytest.raises(InvalidData, match=message):
        open_rows(X)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (3,)])
def test_open_rows__refuses_a_zarr_array_that_has_no_rows(shape):
    array = zarr.create_array(MemoryStore(), shape=shape, dtype="f8", chunks=tuple(max(1, size) for size in shape))
    with pytest.raises(InvalidData, match=r"empty|dimension"):
        open_rows(array)


def test_open_rows__lists_the_arrays_of_a_group(tmp_path):
    group = zarr.create_group(str(tmp_path / "g.zarr"))
    group.create_array("rows", shape=(3, 2), dtype="f8")
    group.create_array("labels", shape=(3,), dtype="f8")
    for source in (str(tmp_path / "g.zarr"), group):
        with pytest.raises(InvalidData, match=r"\['labels', 'rows'\]"):
            open_rows(source)


@pytest.mark.parametrize("content", [None, "folder", "", "{", '{"zarr_format": 9}'])
def test_open_rows__says_that_there_is_no_array(content, tmp_path):
    path = tmp_path / "x.zarr"
    if content is not None:
        path.mkdir()
    if content not in (None, "folder"):
        (path / "zarr.json").write_text(content)
    with pytest.raises(InvalidData, match=re.escape(str(path))):
        open_rows(path)


def test_open_rows__says_that_a_protocol_is_unknown():
    with pytest.raises(InvalidData, match=r"nosuch://(?!.*secret)"):
        open_rows("nosuch://user:secret@host/x.zarr")


def test_open_rows__refuses_another_word_for_missing_chunks():
    with pytest.raises(InvalidParameter, match="'refuse' or 'fill', got 'ignore'"):
        open_rows(data(), missing_chunks="ignore")


def test_redact__removes_secrets():
    text = redact("at s3://key:secret@host/bucket/x.zarr?token=abc and https://host/y?sig=1")
    assert "secret" not in text
    assert "abc" not in text
    assert "sig" not in text
    assert "s3://***@host/bucket/x.zarr" in text


def test_check_reachable__compares_with_what_is_there(tmp_path):
    path = tmp_path / "x.zarr"
    rows = open_rows(as_zarr(data(), (5, 3), str(path)))
    check_reachable(rows)
    zarr.create_array(str(path), shape=(9, 3), dtype="f8", overwrite=True)
    with pytest.raises(SourceUnreachable, match=r"has shape \(9, 3\)"):
        check_reachable(rows)
    os.rename(path, tmp_path / "away")
    with pytest.raises(SourceUnreachable, match="cannot open"):
        check_reachable(rows)


# --- Missing and damaged chunks -----------------------------------------------------------------------

OPTIONS = {
    "chunks": {"chunks": (5, 3)},
    "feature chunks": {"chunks": (5, 2)},
    "format 2": {"chunks": (5, 3), "zarr_format": 2},
    "shards": {"chunks": (1, 3), "shards": (5, 3)},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_missing_chunks__are_refused_before_anything_is_read(options, tmp_path):
    array = as_zarr(data() + 9, store=str(tmp_path / "x.zarr"), **OPTIONS[options])
    files = chunk_files(tmp_path / "x.zarr")
    files[2 if "feature" not in options else 4].unlink()
    with pytest.raises(MissingChunks, match=rf"1 of {len(files)} chunks .* \(rows 10–14\).*missing_chunks='fill'"):
        open_rows(array)
    filled = np.concatenate(read(open_rows(array, missing_chunks="fill")))
    np.testing.assert_array_equal(filled[10:15, 0], 0)
    np.testing.assert_array_equal(np.delete(filled, slice(10, 15), 0), np.delete(data() + 9, slice(10, 15), 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fill", [0, 1])
def test_missing_chunks__inside_a_shard_are_refused_when_read(dtype, fill):
    X = np.full((20, 3), 1 - fill, dtype)
    array = zarr.create_array(
        MemoryStore(), shape=X.shape, dtype=dtype, chunks=(2, 3), shards=(10, 3), fill_value=np.dtype(dtype).type(fill)
    )
    array[:6], array[10:] = X[:6], X[10:]
    with pytest.raises(MissingChunks, match=r"the chunk with row 6 .* was never written"):
        read(open_rows(array))
    assert np.all(np.concatenate(read(open_rows(array, missing_chunks="fill")))[6:10] == fill)
    with pytest.raises(MissingChunks, match="never written"):
        score(array, Gaussian(1.0), 0.1, 5)


@pytest.mark.parametrize("shards", [None, (10, 3)])
@pytest.mark.parametrize("fill", [0.0, 7.0, np.nan])
def test_missing_chunks__are_told_from_chunks_of_fill_values(shards, fill):
    X = data(20)
    X[4:12] = 0.0 if np.isnan(fill) else fill
    whole = as_zarr(X, (2, 3), shards=shards, fill_value=fill)
    np.testing.assert_array_equal(np.concatenate(read(open_rows(whole))), X)


def test_missing_chunks__of_zeros_that_were_not_written_need_consent():
    X = data(20)
    X[5:10] = 0.0
    array = zarr.create_array(MemoryStore(), shape=X.shape, dtype="f8", chunks=(5, 3))
    array[...] = X
    with pytest.raises(MissingChunks, match="1 of 4 chunks"):
        score(array, Gaussian(1.0), 0.1, 5)
    filled = score(array, Gaussian(1.0), 0.1, 5, missing_chunks="fill", block_rows=5)
    np.testing.assert_array_equal(filled.scores, score(X, Gaussian(1.0), 0.1, 5, block_rows=5).scores)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


CODECS = {"crc32c": [Crc32cCodec()], "zstd": [ZstdCodec(checksum=True)], "gzip": [GzipCodec()]}


@pytest.mark.parametrize("damage", [flip, truncate, empty])
@pytest.mark.parametrize("codec", CODECS)
def test_damaged_chunks__are_named_by_their_rows(codec, damage, tmp_path):
    array = as_zarr(data(), (5, 3), str(tmp_path / "x.zarr"), compressors=CODECS[codec])
    damage(chunk_files(tmp_path / "x.zarr")[2])
    rows = open_rows(array)
    np.testing.assert_array_equal(np.concatenate(read(rows, 0, 10)), data()[:10])
    with pytest.raises(InvalidData, match=r"cannot read rows 10–14 of .*x.zarr"):
        read(rows, 10, 15)
    with pytest.raises(InvalidData, match="cannot read rows 10–14"):
        score(array, Linear(), 0.1, 5, block_rows=5)


@pytest.mark.parametrize("damage", [flip, truncate, empty])
def test_damaged_shards__are_named_by_their_rows(damage, tmp_path):
    codecs = {"compressors": [Crc32cCodec()], "serializer": BytesCodec()}
    array = as_zarr(data(), (1, 3), str(tmp_path / "x.zarr"), shards=(5, 3), **codecs)
    damage(chunk_files(tmp_path / "x.zarr")[2])
    with pytest.raises(InvalidData, match=r"rows 10–14 of .*x.zarr"):
        read(open_rows(array), 10, 15)


@examples(10, 30, position=st.floats(0, 1, exclude_max=True), flipped=st.integers(1, 255))
def test_damaged_chunks__never_give_other_rows(position, flipped):
    store = MemoryStore()
    array = as_zarr(data(), (1, 3), store, shards=(5, 3), compressors=[ZstdCodec(checksum=True), Crc32cCodec()])
    key = "c/2/0"
    content = bytearray(store._store_dict[key].to_bytes())
    content[int(position * len(content))] ^= flipped
    store._store_dict[key] = type(store._store_dict[key]).from_bytes(bytes(content))
    try:
        found = np.concatenate(read(open_rows(array)))
    except DaskrrError:
        return
    np.testing.assert_array_equal(found, data())


# --- Nothing is pulled in or ignored ------------------------------------------------------------------------


class Exploding:
    """Whatever NumPy would read as a whole."""

    def __array__(self, *args, **kwargs):
        raise AssertionError("it was read")


def foreign(name, module, **attributes):
    """A class of another library, by its name."""
    return type(name, (Exploding,), {"__module__": module, **attributes})()


def masked(ndim=2):
    X = np.ma.masked_array(data(), mask=False)
    X[3, 1] = np.ma.masked
    return X if ndim == 2 else X[:, 1]


REFUSED = [
    (lambda: dd.from_pandas(pd.DataFrame(data()), npartitions=2)[0], r"dask\..*Series, all of which"),
    (lambda: foreign("DataArray", "xarray.core.dataarray", chunks=None), r"xarray\..*\.DataArray, .* X\.chunk"),
    (lambda: foreign("Dataset", "xarray.core.dataset", chunks={}), r"xarray\.core\.dataset\.Dataset, all of which"),
    (lambda: foreign("Dataset", "h5py._hl.dataset", chunks=(5, 3)), r"h5py\._hl\.dataset\.Dataset, .*from_array"),
    (lambda: scipy.sparse.csr_matrix(data()), r"sparse \(scipy\.sparse\._csr\.csr_matrix\).*X\.toarray"),
    (lambda: scipy.sparse.coo_array(data()), r"sparse \(scipy\.sparse\._coo\.coo_array\)"),
    (lambda: foreign("COO", "sparse.numba_backend._coo.core"), r"sparse \(sparse\.numba_backend\._coo\.core\.COO\)"),
    (masked, "masked array, and 1 of its 69 values are masked"),
    (lambda: da.from_array(masked(), chunks=(5, 3)), r"Dask array of numpy\.ma.*MaskedArray, and only .*filled"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_open_rows__refuses_by_name_what_it_would_pull_in_or_lose(make, message):
    for name in ("X", "y"):
        with pytest.raises(InvalidData, match=f"^{name} is .*{message}"):
            open_rows(make(), ndim=None, name=name)


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_callers__refuse_by_name_what_they_would_pull_in_or_lose(make, message):
    X, y = data(), data()[:, 0]
    model = daskrr.NystromKernelRidge(Gaussian(1.0), landmarks=10).fit(X, y)
    features = daskrr.NystromTransformer(Gaussian(1.0), landmarks=10).fit(X)
    sketch = daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, 10, progress=False).sketch
    calls = [
        lambda bad: daskrr.leverage_scores(bad, Gaussian(1.0), 1e-2, 10),
        lambda bad: daskrr.plan(X, Gaussian(1.0), 1e-2, 10, sampling=bad),
        lambda bad: sketch.scores(bad),
        lambda bad: model.fit(bad, y),
        lambda bad: model.fit(X, bad),
        lambda bad: model.fit(X, y, bad),
        lambda bad: model.partial_fit(bad, y),
        lambda bad: model.predict(bad),
        lambda bad: model.score(bad, y),
        lambda bad: model.score(X, bad),
        lambda bad: model.score(X, y, bad),
        lambda bad: model.diagnose(bad, y),
        lambda bad: features.fit(bad),
        lambda bad: features.transform(bad),
        lambda bad: daskrr.NystromKernelRidgeCV(landmarks=10).fit(bad, y),
    ]
    for call in calls:
        with pytest.raises(InvalidData, match=message):
            call(make())


def test_open_rows__reads_the_dask_array_of_an_xarray_lazily():
    lazy = da.from_array(data(), chunks=(5, 3))
    found = open_rows(foreign("DataArray", "xarray.core.dataarray", chunks=lazy.chunks, data=lazy))
    assert found.origin.startswith("Dask array")
    assert found.array is lazy
    np.testing.assert_array_equal(dask.compute(found.source(0, 23))[0], data())


@pytest.mark.parametrize("make", [pd.DataFrame, lambda X: np.ma.masked_array(X, mask=False), lambda X: X.tolist()])
def test_open_rows__takes_what_is_in_memory(make):
    np.testing.assert_array_equal(np.concatenate(read(open_rows(make(data())))), data())
    frame = pd.DataFrame(data(), columns=["chunks", "compute", "_mask"])
    np.testing.assert_array_equal(open_rows(frame).array, data())


def test_pieces__refuse_a_mask_that_only_the_block_tells_of():
    with pytest.raises(InvalidData, match=r"a block of the input is a masked array, and 1 of its"):
        list(pieces(masked()))


@pytest.mark.parametrize(
    ("X", "message"),
    [
        ([[1.0, 2.0], [3.0]], "X cannot be made an array: .*inhomogeneous.* same number of features"),
        (np.zeros((2, 3, 4)), r"X must have 2 dimension\(s\).*shape is \(2, 3, 4\)"),
        (np.zeros((2, 2), object), "its dtype is object"),
        (np.array([["a", "b"]]), "its dtype is <U1"),
        (np.zeros((2, 2), complex), "its dtype is complex128"),
        (np.zeros((2, 2), "datetime64[s]"), "its dtype is datetime64"),
        (pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}), "its dtype is object"),
    ],
)
def test_open_rows__says_what_is_no_table_of_real_numbers(X, message):
    with pytest.raises(InvalidData, match=message):
        open_rows(X)


def test_kernels__refuse_masked_rows():
    with pytest.raises(InvalidData, match="rows hold 1 masked values"):
        Gaussian(1.0)(masked(), data())


def test_blocks__of_one_task_decode_a_chunk_that_they_share_once(tmp_path, monkeypatch):
    X = np.arange(20.0).reshape(10, 2)
    array = zarr.create_array(tmp_path / "x.zarr", shape=X.shape, chunks=(4, 2), dtype=X.dtype)
    array[:] = X
    source, read = open_rows(array).source(0, 10), decoded(monkeypatch)
    task = for_one_task(source)
    found = [np.concatenate(list(task.between(first, min(first + 3, 10)))) for first in range(0, 10, 3)]
    np.testing.assert_array_equal(np.concatenate(found), X)
    assert read == [(0, 4), (4, 8), (8, 10)]
    assert opened(source).of_task is None
    assert for_one_task(source).of_task is not task.of_task


def test_blocks__of_one_array_share_it_where_they_arrive(tmp_path):
    X = np.arange(20.0).reshape(10, 2)
    array = zarr.create_array(tmp_path / "x.zarr", shape=X.shape, chunks=(4, 2), dtype=X.dtype)
    array[:] = X
    rows = open_rows(array)
    first, second = (opened(pickle.loads(pickle.dumps(rows.source(at, at + 5)))) for at in (0, 5))
    assert first.array is second.array
    np.testing.assert_array_equal(np.concatenate([*first, *second]), X)


def decoded(monkeypatch):
    """Which rows are decoded together, as that begins."""
    read, plain = [], ZarrBlock._decode_anew
    monkeypatch.setattr(ZarrBlock, "_decode_anew", lambda self, *rows: read.append(rows) or plain(self, *rows))
    return read


@pytest.mark.parametrize("number", range(40))
def test_task__reads_its_rows_once_whatever_its_blocks_and_chunks(number, tmp_path, monkeypatch):
    dice = np.random.default_rng(number)
    n_rows, chunk, per_piece = int(dice.integers(20, 80)), int(dice.integers(1, 9)), int(dice.integers(1, 4))
    height = chunk * int(dice.integers(1, 5)) if number % 2 else int(dice.integers(1, chunk + 1))
    X = dice.standard_normal((n_rows, 2))
    array = zarr.create_array(tmp_path / "x.zarr", shape=X.shape, chunks=(chunk, 2), dtype=X.dtype)
    array[:] = X
    monkeypatch.setattr(chunks, "PIECE_BYTES", per_piece * chunk * 16)
    read = decoded(monkeypatch)
    first = height * int(dice.integers(0, 2))
    stop = min(n_rows, first + height * int(dice.integers(1, 8)))
    task = for_one_task(open_rows(array).source(first, stop))
    starts = range(0, stop - first, height)
    found = [np.concatenate(list(task.between(at, min(at + height, stop - first)))) for at in starts]
    np.testing.assert_array_equal(np.concatenate(found), X[first:stop])
    numbers = [number for begin, end in read for number in range(begin // chunk, -(-end // chunk))]
    assert numbers == [*range(first // chunk, -(-stop // chunk))]


def test_task__has_the_next_piece_read_while_it_is_at_the_one_before(tmp_path, monkeypatch):
    array = zarr.create_array(tmp_path / "x.zarr", shape=(12, 1), chunks=(4, 1), dtype="f8")
    array[:] = 1.0
    monkeypatch.setattr(chunks, "PIECE_BYTES", 32)
    begun, plain = Event(), ZarrBlock._decode

    def decode(self, start, stop):
        if start == 4:
            begun.set()
        if start == 8:
            raise OSError("the disk is gone")
        return plain(self, start, stop)

    monkeypatch.setattr(ZarrBlock, "_decode", decode)
    pieces_of_task = iter(for_one_task(open_rows(array).source(0, 12)))
    next(pieces_of_task)
    assert begun.wait(60)
    np.testing.assert_array_equal(next(pieces_of_task), np.ones((4, 1)))
    with pytest.raises(OSError, match="the disk is gone"):
        next(pieces_of_task)


def test_task__leaves_large_pieces_where_they_are_until_it_needs_them(tmp_path, monkeypatch):
    array = zarr.create_array(tmp_path / "x.zarr", shape=(12, 1), chunks=(4, 1), dtype="f8")
    array[:] = 1.0
    monkeypatch.setattr(chunks, "PIECE_BYTES", 32)
    monkeypatch.setattr(pieces_module, "AHEAD_BYTES", 31)
    read = decoded(monkeypatch)
    next(iter(for_one_task(open_rows(array).source(0, 12))))
    assert read == [(0, 4)]
    assert pieces_module.ahead_bytes(32) == 0
    assert pieces_module.ahead_bytes(31) == 62


@pytest.mark.parametrize(("most_bytes", "again"), [(96, []), (64, [(8, 12)]), (31, [(0, 4), (4, 8), (8, 12)])])
def test_pieces__that_are_kept_are_not_decoded_again(tmp_path, monkeypatch, most_bytes, again):
    array = zarr.create_array(tmp_path / "x.zarr", shape=(12, 1), chunks=(4, 1), dtype="f8")
    array[:] = np.arange(12.0)[:, None]
    monkeypatch.setattr(chunks, "PIECE_BYTES", 32)
    read, kept = decoded(monkeypatch), KeptPieces(most_bytes)
    source = open_rows(array).source(0, 12)
    for _ in range(2):
        found = list(for_one_task(source, ahead=False, kept=kept))
        np.testing.assert_array_equal(np.concatenate(found), np.arange(12.0)[:, None])
    assert read == [(0, 4), (4, 8), (8, 12), *again]
    assert not any(one.flags.writeable for one in found[: 3 - len(again)])
    list(for_one_task(source, ahead=False, kept=pickle.loads(pickle.dumps(kept))))
    assert len(read) == 6 + len(again), "it is sent without any"


def test_pieces__of_another_array_or_height_are_not_taken_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "PIECE_BYTES", 32)
    read, kept = decoded(monkeypatch), KeptPieces(2**20)
    for value in (1.0, 2.0):
        array = zarr.create_array(tmp_path / f"{value}.zarr", shape=(11, 1), chunks=(2, 1), dtype="f8")
        array[:] = value
        for start, stop in ((0, 11), (0, 2), (0, 2), (8, 11)):
            found = np.concatenate(list(for_one_task(open_rows(array).source(start, stop), kept=kept)))
            np.testing.assert_array_equal(found, np.full((stop - start, 1), value))
    assert sorted(read) == sorted(2 * [(0, 4), (4, 8), (8, 11), (0, 2), (0, 2)])
