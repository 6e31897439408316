"""What is tried again, how often and how long, on functions and on stores that fail now and then."""

import errno
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import zarr
from strategies import as_zarr
from zarr.storage import LocalStore

import daskrr
from daskrr.errors import InvalidData, MissingChunks, StoreFailed
from daskrr.kernels import Gaussian
from daskrr.runtime.map_blocks import settled
from daskrr.runtime.rows import open_rows, pieces
from daskrr.runtime.tree import Span
from daskrr.storage import retry as patience
from daskrr.storage import several
from daskrr.storage.local import Files
from daskrr.storage.retry import failure, insist, patiently, reason
from daskrr.storage.zarr_arrays import Staged, array_at, blueprint


class Failing:
    """Raises what it was given, one after the other, and then answers how often it was called."""

    def __init__(self, *errors):
        self.errors, self.calls = list(errors), 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


def test_patiently__tries_again_what_may_pass(caplog):
    with caplog.at_level(logging.WARNING, "daskrr"):
        assert patiently(Failing(OSError("a"), RuntimeError("b"), TimeoutError()), "read rows 0–9 of X") == 4
    assert caplog.text.count("cannot read rows 0–9 of X, trying again") == 3
    assert "trying again: RuntimeError: b" in caplog.text


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (OSError(errno.ENOSPC, "full"), 1),
        (OSError(errno.EFBIG, "too large"), 1),
        (OSError(errno.EROFS, "read-only"), 1),
        (PermissionError(errno.EACCES, "locked"), 1),
        (MemoryError(), 1),
        (InvalidData("NaN"), 1),
        (MissingChunks("none"), 3),
        (FileNotFoundError(errno.ENOENT, "none"), 3),
        (RuntimeError("status code: 403 Forbidden"), 1),
        (RuntimeError("status code: 409 Conflict"), 5),
        (RuntimeError("status code: 429 Too Many Requests"), 5),
        (RuntimeError("status code: 503 Slow Down"), 5),
        (ConnectionError("lost"), 5),
    ],
)
def test_patiently__knows_what_will_not_pass(error, calls, monkeypatch):
    pauses = []
    monkeypatch.setattr(patience.time, "sleep", pauses.append)
    operation = Failing(*[error] * 9)
    with pytest.raises(type(error)) as caught:
        patiently(operation, "do it")
    assert caught.value is error
    assert operation.calls == calls == len(pauses) + 1
    assert all(longest / 2 <= pause <= longest for pause, longest in zip(pauses, patience.PAUSES, strict=False))


def test_insist__tells_what_was_tried_and_what_went_wrong(monkeypatch):
    monkeypatch.setattr(patience.time, "sleep", lambda _: None)
    with pytest.raises(StoreFailed, match=r"^cannot list all of X: RuntimeError: lost$") as caught:
        insist(Failing(*[RuntimeError("lost")] * 9), "list all of X")
    assert caught.value.__suppress_context__
    assert insist(Failing(OSError("mended")), "list all of X") == 2


def test_insist__leaves_our_own_errors_as_they_are():
    error = InvalidData("NaN")
    with pytest.raises(InvalidData, match=r"^NaN$") as caught:
        insist(Failing(error), "read it")
    assert caught.value is error


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_failure__of_a_full_disk_tells_to_make_room(code):
    failed = failure("write X", OSError(code, "no room"), "It needs 7 bytes. ")
    assert str(failed) == (
        "cannot write X: the disk is full (no room). It needs 7 bytes. Make room and run the same line again: it goes "
        "on where it was."
    )
    assert failed.errno == code
    assert str(failure("write X", OSError(errno.EIO, "broken"), "It needs 7 bytes. ")) == "cannot write X: broken"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EIO, "broken", "/data/X"), "broken"),
        (TimeoutError(), "TimeoutError"),
        (RuntimeError("first line\nand more"), "RuntimeError: first line"),
        (OSError("see http://me:hunter2@host/x?token=hunter2"), "see http://***@host/x?***"),
        (RuntimeError("x" * 1000), f"RuntimeError: {'x' * 300}"),
        (
            RuntimeError("status code: 503 Slow Down, body <Code>SlowDown</Code><Key>hunter2"),
            "503 Slow Down (SlowDown)",
        ),
        (RuntimeError("status code: 403 Forbidden\nhunter2"), "403 Forbidden"),
    ],
)
def test_reason__is_short_and_tells_no_secrets(error, told):
    assert reason(error) == told


class Moody(LocalStore):
    """A folder whose every n-th answer is a failure, or that nothing is there."""

    def __init__(self, root, *, every, absent=False, read_only=False):
        super().__init__(root, read_only=read_only)
        self.every, self.absent, self.answers, self.failures = every, absent, 0, 0

    def fails(self):
        self.answers += 1
        if self.answers % self.every == 0:
            self.failures += 1
            return True
        return False

    async def get(self, key, prototype=None, byte_range=None):
        if self.fails():
            if self.absent:
                return None
            raise ConnectionError("the store has gone for a walk")
        return await super().get(key, prototype, byte_range)

    async def set(self, key, value):
        if self.fails():
            raise ConnectionError("the store has gone for a walk")
        return await super().set(key, value)


def values(n=60):
    """No row is all zero, but every chunk begins with the fill value."""
    X = np.random.default_rng(0).standard_normal((n, 2))
    X[::10, 0] = 0.0
    return X


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("every", [2, 3, 7])
def test_rows__come_whole_from_a_store_that_fails_or_forgets(absent, every, tmp_path, monkeypatch):
    monkeypatch.setattr(patience, "PAUSES", (0.001,) * 4)
    monkeypatch.setattr(patience, "PAUSES_IF_ABSENT", (0.001,) * 2)
    X = values()
    as_zarr(X, (10, 2), str(tmp_path / "X"))
    store = Moody(tmp_path / "X", every=10**9, absent=absent, read_only=True)
    rows = open_rows(zarr.open_array(store, mode="r"))
    store.every = every
    read = 0
    for start in range(0, 60, 10):
        try:
            (piece,) = pieces(rows.source(start, start + 10))
        except MissingChunks:
            assert absent
            continue
        np.testing.assert_array_equal(piece, X[start : start + 10])
        read += 1
    assert store.failures > 0
    assert read == 6 or (absent and every == 2)


def test_rows__that_are_not_there_are_refused_soon(tmp_path):
    array = as_zarr(values(), (10, 2), str(tmp_path / "X"))
    rows = open_rows(array)
    (tmp_path / "X" / "c" / "2" / "0").unlink()
    began = time.monotonic()
    with pytest.raises(MissingChunks, match=r"the chunk with row 20 of .* was never written"):
        list(pieces(rows.source(20, 30)))
    with pytest.raises(MissingChunks, match="1 of 6 chunks"):
        open_rows(array)
    assert time.monotonic() - began < 2


def test_rows__that_are_damaged_are_named(tmp_path):
    array = as_zarr(values(), (10, 2), str(tmp_path / "X"))
    rows = open_rows(array)
    (tmp_path / "X" / "c" / "2" / "0").write_bytes(b"no chunk at all")
    began = time.monotonic()
    with pytest.raises(InvalidData, match=r"cannot read rows 20–29 of .*The chunk is damaged or unreachable"):
        list(pieces(rows.source(20, 30)))
    assert time.monotonic() - began < 5


class MoodyFiles(Files):
    """A folder of which every n-th write fails."""

    every, writes, failures = 10**9, 0, 0

    def place(self, key, content):
        self.writes += 1
        if self.writes % self.every == 0:
            self.failures += 1
            raise ConnectionError("the store has gone for a walk")
        super().place(key, content)


def staged_on(medium):
    return Staged(medium, {"scores": array_at(medium.store, "scores", blueprint({"scores": (60,)}, 10)["scores"])})


def test_staged_write__writes_to_a_store_that_fails_now_and_then(tmp_path):
    medium = MoodyFiles(str(tmp_path / "out"))
    staged = staged_on(medium)
    medium.every = 2
    for start in range(0, 60, 10):
        staged.write({"scores": np.arange(start, start + 10.0)}, start)
    staged.settle(range(0, 60, 10))
    assert medium.failures > 0
    np.testing.assert_array_equal(staged.arrays["scores"][:], np.arange(60.0))


def test_staged_write__tells_the_rows_and_the_path_of_what_stays_refused(tmp_path):
    medium = MoodyFiles(str(tmp_path / "out"))
    medium.every = 1
    staged = staged_on(medium)
    staged.write({"scores": np.zeros(10)}, 10)
    with pytest.raises(StoreFailed, match=r"cannot write rows 10–19 of .*out.*scores: the store has gone for a walk"):
        staged.settle([10])


class HeldFiles(Files):
    """A folder to which nothing is written before it may be."""

    def __init__(self, address):
        super().__init__(address)
        self.may_write = threading.Event()

    def place(self, key, content):
        assert self.may_write.wait(60)
        super().place(key, content)


def test_staged_write__lets_the_caller_go_on_until_blocks_are_settled(tmp_path):
    medium = HeldFiles(str(tmp_path / "out"))
    staged = staged_on(medium)
    for start in range(0, 60, 10):
        staged.write({"scores": np.arange(start, start + 10.0)}, start)
    assert not list(tmp_path.rglob("c/*"))
    medium.may_write.set()
    staged.settle(range(0, 60, 10))
    np.testing.assert_array_equal(staged.arrays["scores"][:], np.arange(60.0))


def test_settled__has_nothing_written_any_more_when_a_block_has_failed(tmp_path):
    medium = HeldFiles(str(tmp_path / "out"))
    staged = staged_on(medium)

    def results():
        staged.write({"scores": np.zeros(10)}, 0)
        threading.Timer(0.2, medium.may_write.set).start()
        raise InvalidData("the second block is bad")
        yield

    with pytest.raises(InvalidData, match="the second block is bad"):
        settled(staged.settle, Span(0, 0, 20, 10), results())
    assert len(list(tmp_path.rglob("c/*"))) == 1


def test_begin__waits_where_too_many_are_under_way():
    may_end = threading.Event()
    begun = several.begin([partial(may_end.wait, 60)] * several.MOST_BEGUN)
    assert not several._ROOM.acquire(blocking=False)
    may_end.set()
    several.finish([*begun, *several.begin([may_end.wait] * 3 * several.MOST_BEGUN)])


def test_staged__is_one_object_for_who_writes_and_who_settles_also_where_both_are_sent(tmp_path):
    staged = staged_on(Files(str(tmp_path / "out")))
    staged.write({"scores": np.zeros(10)}, 0)
    write, settle = pickle.loads(cloudpickle.dumps((partial(staged.write, start=10), staged.settle)))
    assert write.func.__self__ is settle.__self__
    write({"scores": np.ones(10)})
    settle([10])
    staged.settle([0])
    np.testing.assert_array_equal(staged.arrays["scores"][:20], np.repeat([0.0, 1.0], 10))


def can_mount():
    return os.geteuid() == 0 and subprocess.run(
        ["unshare", "--mount", "true"], capture_output=True, check=False
    ).returncode == 0  # fmt: skip


FILL_A_DISK = """
import subprocess, sys
import numpy as np
from daskrr.storage.local import Files
from daskrr.storage.zarr_arrays import Staged, array_at, blueprint
from daskrr.errors import StoreFailed
folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
medium = Files(folder + "/out")
drawn = blueprint({"scores": (40_000,)}, 20_000)
staged = Staged(medium, {"scores": array_at(medium.store, "scores", drawn["scores"])})
values = np.random.default_rng(0).random(20_000)
staged.write({"scores": values}, 0)
try:
    staged.settle([0])
except StoreFailed as error:
    print(error.errno, error)
subprocess.run(["mount", "-o", "remount,size=4m", folder], check=True)
staged.write({"scores": values}, 0)
staged.settle([0])
print((staged.arrays["scores"][:20_000] == values).all())
"""


@pytest.mark.skipif(not can_mount(), reason="a small file system cannot be mounted here")
def test_staged_write__tells_how_much_a_full_disk_lacks(tmp_path):
    command = ["unshare", "--mount", sys.executable, "-c", FILL_A_DISK, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=Path.cwd())
    complaint, afterwards = found.stdout.splitlines()
    assert complaint.startswith(f"{errno.ENOSPC} cannot write rows 0–19999 of ")
    assert "the disk is full" in complaint
    assert "needs up to 160,000 bytes, the whole output up to 320,000" in complaint
    assert afterwards == "True"


def test_score_to_zarr__is_not_hurt_by_a_store_that_fails_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(patience, "PAUSES", (0.001,) * 4)
    X = np.random.default_rng(0).standard_normal((600, 3))
    as_zarr(X, (50, 3), str(tmp_path / "X"))
    store = Moody(tmp_path / "X", every=10**9, read_only=True)
    array = zarr.open_array(store, mode="r")
    options = {"random_state": 0, "block_rows": 50, "progress": False}
    reference = daskrr.leverage_scores(array, Gaussian(1.0), 1e-2, 40, **options).scores.compute()
    store.every = 7
    found = daskrr.leverage_scores(array, Gaussian(1.0), 1e-2, 40, **options).scores.compute()
    assert store.failures > 3
    np.testing.assert_array_equal(found, reference)
