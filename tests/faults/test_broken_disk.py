"""Disks that are full or broken at a moment of a job's choosing: nothing is lost, and the same line ends with the bits.

Moments are recognized by the names of files; the disk is a small one of our own, or its errors are played.
"""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from damage import contents, points, score, shorten_pauses, stored
from test_resources import SmallDisk
from trouble import Trouble
from variants import slow_but

import daskrr
from daskrr.errors import DaskrrError, InvalidData, StoreFailed, UnreadableData
from daskrr.jobs import verification

# After these names were given, the disk is full.
MOMENTS = {
    "pass 2": ("rename", r"/generations/[^/]+/scores/c/0$"),
    "publishing": ("rename", r"/receipts/200\.record$"),
    "the manifest": ("link", r"/manifest\.record\+versions/"),
    "the commit": ("link", r"/manifest-copy\.record\+versions/"),
    "after the commit": ("link", r"/commit\.record\+versions/"),
}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


class PlayedDisk:
    """A folder whose disk is said to be full."""

    def __init__(self, path: Path) -> None:
        self.path, self.is_full = path, False
        path.mkdir()

    def fill(self) -> None:
        self.is_full = True

    def make_room(self) -> None:
        self.is_full = False

    def rule(self, kind: str, path: str) -> int | None:
        return errno.ENOSPC if self.is_full and kind in ("write", "link", "symlink", "mkdir") else None


class RealDisk(SmallDisk):
    """A small file system that is filled by another file, which grows by what is freed."""

    def fill(self) -> None:
        filler = os.open(self.path / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            while os.write(filler, bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017
        finally:
            os.close(filler)

    def make_room(self) -> None:
        (self.path / "filler").unlink()

    def rule(self, kind: str, path: str) -> int | None:
        return None


@pytest.fixture(params=["played", pytest.param("real", marks=pytest.mark.slow)])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "played":
        yield PlayedDisk(tmp_path / "disk")
        return
    found = RealDisk(tmp_path / "disk")
    yield found
    found.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Rows, some of them and all, and the scores of an undisturbed run and an update."""
    folder = tmp_path_factory.mktemp("reference")
    some, all_rows = (stored(folder / f"{n}", points(300)[:n]) for n in (250, 300))
    score(some, folder / "out.zarr")
    old = contents(folder / "out.zarr")
    daskrr.update_scores(all_rows, folder / "out.zarr", progress=False)
    return some, all_rows, old, contents(folder / "out.zarr")


def seen(output: Path) -> Any:
    """What readers find, if anything."""
    try:
        store = daskrr.open_scores(output)
    except InvalidData:
        return None
    return {name: store[name][...].tobytes() for name in store.keys()}  # noqa: SIM118


class FullFrom:
    """Keeps a disk full from when something was given its name on; a commit only if it is that of a new manifest."""

    def __init__(self, disk: Any, moment: str) -> None:
        self.disk, (self.kind, self.pattern) = disk, MOMENTS[moment]
        self.before = self.n_manifests
        self.waits = self.fired = False

    @property
    def n_manifests(self) -> int:
        return len(list(self.disk.path.glob("out.zarr/.daskrr/records/*/manifest-copy.record+versions/*")))

    def __call__(self, kind: str, path: str) -> int | None:
        if self.waits:
            self.fired = True
            self.disk.fill()
        if kind == self.kind and re.search(self.pattern, path):
            self.waits = self.waits or "commit" not in self.pattern or self.n_manifests > self.before
        return self.disk.rule(kind, path)


def assert_tells(complaint: str, output: Path) -> None:
    assert str(output) in complaint
    assert "No space left on device" in complaint
    assert "Make room" in complaint
    assert re.search(r"[1-9][\d,]* bytes", complaint), complaint


@pytest.mark.parametrize("moment", slow_but(MOMENTS, "publishing", "after the commit"))
def test_full_disk__from_any_moment_of_a_run_on_is_told_and_the_job_goes_on(
    moment: str, disk: Any, reference: Any
) -> None:
    source, _, expected, _ = reference
    output = disk.path / "out.zarr"
    fills = FullFrom(disk, moment)
    with Trouble(fills).installed(), pytest.raises(StoreFailed) as caught:
        score(source, output)
    assert fills.fired
    assert_tells(str(caught.value), output)
    assert seen(output) == (expected if moment == "after the commit" else None)
    disk.make_room()
    score(source, output)
    assert seen(output) == expected
    assert contents(output) == expected
    assert verification.verify(output) == []


@pytest.mark.parametrize("moment", slow_but(MOMENTS, "pass 2", "the commit"))
def test_full_disk__from_any_moment_of_an_update_on_leaves_what_is_published(
    moment: str, disk: Any, reference: Any
) -> None:
    source, all_rows, old, new = reference
    output = disk.path / "out.zarr"
    score(source, output)
    fills = FullFrom(disk, moment)
    with Trouble(fills).installed(), pytest.raises(StoreFailed) as caught:
        daskrr.update_scores(all_rows, output, progress=False)
    assert fills.fired
    assert_tells(str(caught.value), output)
    assert seen(output) == contents(output) or moment == "after the commit"
    assert seen(output) == (new if moment == "after the commit" else old)
    disk.make_room()
    daskrr.update_scores(all_rows, output, progress=False)
    assert seen(output) == contents(output) == new
    assert verification.verify(output) == []


# --- Input and output errors --------------------------------------------------------------------------

SLOW = pytest.mark.slow
BROKEN = [
    ("write", r"/generations/[^/]+/scores/c/1\b"),
    ("fsync", r"/generations/[^/]+/scores/c/1$"),
    ("fsync", r"/generations/[^/]+/scores/c$"),
    ("rename", r"/generations/[^/]+/scores/c/1$"),
    ("read", r"/generations/[^/]+/scores/c/1$"),
    ("write", r"/receipts/100\.record"),
    ("fsync", r"/receipts/100\.record"),
    ("read", r"/receipts/100\.record"),
    ("write", r"/sums/"),
    ("read", r"/kept/"),
    ("write", r"/generations/[^/]+/sketch-"),
    ("fsync", r"/generations$"),
    ("write", r"/manifest\.record"),
    ("link", r"/manifest\.record"),
    ("link", r"/commit\.record\+versions/000000000002$"),
    ("read", r"/commit\.record\+versions/"),
    ("fsync", r"/commit\.record\+versions$"),
    ("write", r"/lease\.record"),
    ("symlink", r"/scores"),
    ("read", r"/points/c/2/0$"),
]


class Breaks:
    """Fails calls of a kind with names of a pattern, so many times or for ever."""

    def __init__(self, kind: str, pattern: str, times: float = float("inf")) -> None:
        self.kind, self.pattern, self.left = kind, pattern, times

    def __call__(self, kind: str, path: str) -> int | None:
        if kind != self.kind or not re.search(self.pattern, path) or self.left <= 0:
            return None
        self.left -= 1
        return errno.EIO


def some_slow(cases: list[tuple[str, str]]) -> list[Any]:
    """Every sixth is tried in the quick tests too."""
    return [pytest.param(*one, marks=() if at % 6 == 1 else SLOW) for at, one in enumerate(cases)]


@pytest.mark.parametrize(("kind", "pattern"), some_slow(BROKEN))
def test_broken_disk__is_told_with_its_path_and_the_same_line_ends_with_the_same_bits(
    kind: str, pattern: str, tmp_path: Path, reference: Any
) -> None:
    source, output = stored(tmp_path / "points", points(300)[:250]), tmp_path / "out.zarr"
    with Trouble(Breaks(kind, pattern)).installed() as trouble:
        try:
            score(source, output)
            error = None
        except DaskrrError as caught:
            error = caught
    assert trouble.failed
    if error is not None:
        assert isinstance(error, (StoreFailed, UnreadableData))
        assert str(tmp_path) in str(error)
        assert "Input/output error" in str(error)
    found = seen(output)
    assert found in (None, reference[2])
    assert found is not None or error is not None
    score(source, output)
    assert seen(output) == contents(output) == reference[2]
    assert verification.verify(output) == []


# What was not synchronized is not tried again, but written again.
PASSING = [one for one in BROKEN if "/scores/c" not in one[1] or one[0] in ("write", "rename")]


@pytest.mark.parametrize(("kind", "pattern"), some_slow(PASSING))
def test_broken_disk__that_recovers_is_asked_again(kind: str, pattern: str, tmp_path: Path, reference: Any) -> None:
    source, output = stored(tmp_path / "points", points(300)[:250]), tmp_path / "out.zarr"
    with Trouble(Breaks(kind, pattern, times=2)).installed() as trouble:
        score(source, output)
    assert len(trouble.failed) == 2 or kind == "read"
    assert contents(output) == reference[2]
    assert verification.verify(output) == []
