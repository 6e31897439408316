"""Points and scores on an S3-compatible store, over HTTP, and on files without links, which do as that does."""

import itertools

import numpy as np
import pytest
import zarr
from variants import slow_but

import daskrr
from daskrr import machine
from daskrr.errors import InvalidData, InvalidParameter, OutputExists
from daskrr.jobs import reader
from daskrr.jobs.verification import repair, verify
from daskrr.runtime import tree
from daskrr.storage.local import Files
from daskrr.storage.medium import open_medium
from daskrr.storage.output import Output, folder_of
from daskrr.storage.records import Records
from daskrr.storage.s3 import Bucket
from daskrr.storage.saving import Saving
from daskrr.storage.zarr_arrays import zarr_store

OPTIONS = {
    "kernel": daskrr.kernels.Gaussian(1.0),
    "ridge": 1e-2,
    "landmarks": 50,
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
    return open_medium(address).below("")


def test_score_to_zarr__reads_and_writes_s3(prefix: str) -> None:
    X = points(prefix)
    output = f"{prefix}/scores.zarr"
    summary = daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS)
    assert summary["parameters"]["input"] == f"{prefix}/x.zarr"
    assert "secret-of-the-test" not in repr(summary)
    stored = daskrr.open_scores(output)["scores"][:]
    np.testing.assert_array_equal(stored, daskrr.leverage_scores(X, **OPTIONS).scores.compute())
    assert daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS)["sum_of_scores"] == summary["sum_of_scores"]
    with pytest.raises(OutputExists, match=r"scores that differ in ridge \(.*, not 0\.001\)"):
        daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS | {"ridge": 1e-3})
    assert daskrr.jobs.top_rows(output, 1)[0]["row"] == summary["top"][0]["row"]
    assert verify(output) == []
    assert reader.status(output)["published"]["rows"] == 1000
    assert keys(output) == [".daskrr", "estimate", "residual", "scores", "sketch", "zarr.json"]


class Stop(BaseException):
    """The process ends here."""


@pytest.mark.slow
def test_jobs__on_s3_go_on_from_durable_writes_to_the_same_bits(prefix: str, monkeypatch) -> None:
    monkeypatch.setattr(tree, "SPANS_LEFT", 0)
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
        if Output(output).committed is None:
            with pytest.raises(InvalidData, match="there are no scores at" if not seen else "has an unfinished job"):
                daskrr.open_scores(output)
        else:
            repair(output)
        daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS)
        assert contents(output) == expected, seen
        assert keys(output) == [".daskrr", "estimate", "residual", "scores", "sketch", "zarr.json"]
    assert number > 10


@pytest.mark.slow
def test_overwrite__on_s3_leaves_nothing_of_the_old_scores(prefix: str) -> None:
    points(prefix)
    output = f"{prefix}/scores.zarr"
    daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS, certify=True)
    daskrr.score_to_zarr(f"{prefix}/x.zarr", output, **OPTIONS | {"block_rows": 500}, overwrite=True)
    assert keys(output) == [".daskrr", "estimate", "residual", "scores", "sketch", "zarr.json"]
    assert open_medium(output).below("scores/c") == ["0", "1"]
    assert verify(output) == []
    assert open_medium(output).below(".daskrr/generations") == sorted(Output(output).commit.published)
    assert daskrr.load(output).certainty is None


@pytest.mark.slow
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
    (generation,) = open_medium(output).below(".daskrr/generations")
    for path in ("", "scores", folder_of(generation), f"{folder_of(generation)}/scores"):
        with pytest.raises(FileNotFoundError):
            zarr.open(zarr_store(f"{output}/{path}".rstrip("/")), mode="r")


# --- Plain paths that are copies ----------------------------------------------------------------------


@pytest.fixture(params=slow_but(["s3", "files without links"], "files without links"))
def place(request: pytest.FixtureRequest, tmp_path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where an output can be, but no link."""
    if request.param == "s3":
        return f"{request.getfixturevalue('prefix')}/out.zarr"
    monkeypatch.setattr(machine, "make_link", lambda target, link: False)
    return str(tmp_path / "out.zarr")


slow_on_s3 = pytest.mark.parametrize(
    "place", [pytest.param("s3", marks=pytest.mark.slow), "files without links"], indirect=True
)


def save(target: str, value: float, n_rows: int = 4, names: tuple[str, ...] = ("scores", "estimate")) -> None:
    with Saving(target, overwrite=True) as output:
        output.create(dict.fromkeys(names, (n_rows,)), 2)
        for name in names:
            output.arrays[name][...] = value
        part = output.stage("part", "a part", {"value": np.full(3, value)}, {})
        output.add([part])
        output.commit({"n_rows": n_rows})


def shown(target: str) -> dict[str, np.ndarray]:
    """What plain Zarr reads, by the paths of the arrays, of those that are there."""
    found = {}
    for name in ("scores", "estimate", "part/value"):
        try:
            found[name] = zarr.open_array(zarr_store(f"{target}/{name}"), mode="r")[...]
        except FileNotFoundError:
            continue
    return found


def test_copies__are_what_plain_zarr_reads(place: str) -> None:
    for value, n_rows in ((1.0, 7), (2.0, 4)):
        save(place, value, n_rows)
        for name, found in shown(place).items():
            np.testing.assert_array_equal(found, np.full(3 if "/" in name else n_rows, value))
        group = zarr.open_group(zarr_store(place), mode="r")
        assert sorted(name for name, _ in group.members() if not name.startswith(".")) == ["estimate", "part", "scores"]
        assert group.attrs["daskrr"]["n_rows"] == n_rows
        assert verify(place) == []
    assert open_medium(place).below("scores/c") == ["0", "1"], "copies of the generation before are left"
    save(place, 3.0, names=("scores",))
    assert keys(place) == [".daskrr", "part", "scores", "zarr.json"]


@slow_on_s3
def test_copies__never_show_a_mixture_while_they_are_exchanged(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(place, 1.0, 6)
    seen: list[set[str]] = []
    mixed: list[object] = []
    kind = Bucket if place.startswith("s3:") else Files

    def watched(name: str):
        work = getattr(kind, name)

        def changed(self, *given):
            found = work(self, *given)
            touched = given[0] if name == "delete" else [given[1 if name == "copy" else 0]]
            if all(key.startswith(".daskrr") for key in touched):
                return found
            there = shown(place)
            whole = "zarr.json" in keys(place)
            seen.append(set(there))
            if len({value for one in there.values() for value in one.tolist()}) > 1 or (whole and len(there) < 3):
                mixed.append(there)
            own = Output(place).open("scores")[0]
            if len({*own["scores"][...].tolist(), *own["estimate"][...].tolist()}) > 1:
                mixed.append(own)
            return found

        return changed

    for name in ("copy", "delete", "write"):
        monkeypatch.setattr(kind, name, watched(name))
    save(place, 2.0, 4)
    monkeypatch.undo()
    assert mixed == []
    assert set() in seen, "the arrays were there all the time, and their chunks exchanged below them"
    assert all((found == 2.0).all() for found in shown(place).values())


@slow_on_s3
def test_copies__are_not_what_our_readers_read(place: str) -> None:
    save(place, 1.0)
    medium = open_medium(place)
    for key in ("scores/c/1", "scores/zarr.json", "zarr.json"):
        medium.write(key, b"damaged")
    medium.delete(["estimate/c/0"])
    np.testing.assert_array_equal(Output(place).open("scores")[0]["scores"][...], 1.0)
    changed = ["estimate/c/0", "scores/c/1", "scores/zarr.json", "zarr.json"]
    assert verify(place) == [f"{key}: is not what was published" for key in changed]
    assert len(repair(place)) == 4
    assert verify(place) == []
    assert [found.tolist() for found in shown(place).values()] == [[1.0] * 4, [1.0] * 4, [1.0] * 3]


@slow_on_s3
def test_copies__replace_nothing_that_others_have_written(place: str) -> None:
    save(place, 1.0, 6)
    medium = open_medium(place)
    theirs = ["notes.txt", "labels/zarr.json", "scores/mine.txt", "part/mine/c/0"]
    for key in theirs:
        medium.write(key, b"mine")
    for value in (2.0, 3.0):
        save(place, value)
    assert [medium.read(key) for key in theirs] == [b"mine"] * 4
    with pytest.raises(OutputExists, match="has labels already, which daskrr has not written"):
        save(place, 4.0, names=("labels",))
    assert all((found == 3.0).all() for found in shown(place).values())


def test_addresses__with_secrets_or_of_other_kinds_are_refused(prefix: str) -> None:
    X = np.ones((10, 2))
    with pytest.raises(InvalidParameter, match="without user name, password or query") as caught:
        daskrr.score_to_zarr(X, "s3://me:hunter2@bucket/out.zarr", **OPTIONS)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidParameter, match=r"cannot be written to gs://bucket/out\.zarr"):
        daskrr.score_to_zarr(X, "gs://bucket/out.zarr", **OPTIONS)
