"""Points and scores on an S3-compatible store, over HTTP."""

import itertools

import numpy as np
import pytest
import zarr

import daskrr
from daskrr import outputs
from daskrr.engine import passes
from daskrr.engine.places import open_place, zarr_store
from daskrr.engine.records import Records
from daskrr.errors import InvalidData, InvalidParameter, OutputExists

OPTIONS = {
    "kernel": daskrr.kernels.Gaussian(1.0),
    "ridge": 1e-2,
    "n_landmarks": 50,
    "random_state": 0,
    "block_rows": 250,
    "progress": False,
}
NUMBER = itertools.count()


@pytest.fixture
def prefix(bucket: str) -> str:
    """A prefix that no other test uses."""
    return f"{bucket}/test-{next(NUMBER)}"


def points(prefix: str, n: int = 1000) -> np.ndarray:
    X = np.random.default_rng(0).standard_normal((n, 3))
    array = zarr.create_array(zarr_store(f"{prefix}/x.zarr"), shape=X.shape, chunks=(250, 3), dtype=X.dtype)
    array[:] = X
    return X


def contents(address: str) -> dict[str, bytes]:
    group = zarr.open_group(zarr_store(address), mode="r")
    return {name: array[...].tobytes() for name, array in group.arrays()}


def keys(address: str) -> list[str]:
    return open_place(address).below("")


def test_score_to_zarr__reads_and_writes_s3(prefix: str) -> None:
    X = points(prefix)
    output = f"{prefix}/scores.zarr"
    summary = daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS)
    assert summary["parameters"]["input"] == f"{prefix}/x.zarr"
    assert "secret-of-the-test" not in repr(summary)
    stored = daskrr.open_scores(output)["scores"][:]
    np.testing.assert_array_equal(stored, daskrr.leverage_scores(X, **OPTIONS).scores.compute())
    assert daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS)["sum_of_scores"] == summary["sum_of_scores"]
    with pytest.raises(OutputExists, match="scores with another ridges"):
        daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS | {"ridge": 1e-3})
    assert daskrr.top_rows(output, 1)[0]["row"] == summary["top"][0]["row"]
    assert outputs.verify(output) == []
    assert outputs.status(output)["published"]["rows"] == 1000
    assert keys(output) == [".daskrr", "estimate", "residual", "scores", "sketch", "zarr.json"]


class Stop(BaseException):
    """The process ends here."""


@pytest.mark.slow
def test_jobs__on_s3_go_on_from_durable_writes_to_the_same_bits(prefix: str, monkeypatch) -> None:
    monkeypatch.setattr(passes, "SUPERBLOCK_ROWS", 500)
    points(prefix)
    daskrr.score_to_zarr(f"{prefix}/x.zarr", f"{prefix}/reference.zarr", **OPTIONS)
    expected, write = contents(f"{prefix}/reference.zarr"), Records.write
    for number in itertools.count(0, 4):
        seen = []

        def counted(self, name, content, seen=seen, number=number):
            if not name.endswith("/progress"):
                if len(seen) == number:
                    raise Stop
                seen.append(name)
            return write(self, name, content)

        output = f"{prefix}/{number}.zarr"
        with monkeypatch.context() as patch:
            patch.setattr(Records, "write", counted)
            try:
                daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS)
                break
            except Stop:
                pass
        with pytest.raises(InvalidData):
            daskrr.open_scores(output)
        daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS)
        assert contents(output) == expected, seen
        assert keys(output) == [".daskrr", "estimate", "residual", "scores", "sketch", "zarr.json"]
    assert number > 10


def test_overwrite__on_s3_leaves_nothing_of_the_old_scores(prefix: str) -> None:
    points(prefix)
    output = f"{prefix}/scores.zarr"
    daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS, certify=True)
    daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS | {"block_rows": 500}, overwrite=True)
    assert keys(output) == [".daskrr", "estimate", "residual", "scores", "sketch", "zarr.json"]
    assert open_place(output).below("scores/c") == ["0", "1"]
    assert outputs.verify(output) == []
    assert "arrays" not in " ".join(open_place(output).below(".daskrr"))
    assert daskrr.load(output).certainty is None


def test_open_scores__on_s3_shows_an_unfinished_job_only_if_asked(prefix: str, monkeypatch) -> None:
    points(prefix)
    output, write = f"{prefix}/scores.zarr", Records.write

    def stopping(self, name, content):
        if name.endswith("/receipts/500"):
            raise Stop
        return write(self, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(Records, "write", stopping)
        with pytest.raises(Stop):
            daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS)
    partial = daskrr.open_scores(output, allow_partial=True)
    assert partial.complete[:500].all()
    assert not partial.complete[500:750].any()
    assert np.isfinite(partial["scores"][:500]).all()
    (generation,) = [name for name in open_place(output).below(".daskrr") if name.startswith("arrays-")]
    for path in ("", "scores", f".daskrr/{generation}", f".daskrr/{generation}/scores"):
        with pytest.raises(FileNotFoundError):
            zarr.open(zarr_store(f"{output}/{path}".rstrip("/")), mode="r")


def test_addresses__with_secrets_or_of_other_kinds_are_refused(prefix: str) -> None:
    X = np.ones((10, 2))
    with pytest.raises(InvalidParameter, match="without user name, password or query") as caught:
        daskrr.score_to_zarr(X, "s3://me:hunter2@bucket/out.zarr", **OPTIONS)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidParameter, match=r"cannot be written to gs://bucket/out\.zarr"):
        daskrr.score_to_zarr(X, "gs://bucket/out.zarr", **OPTIONS)
