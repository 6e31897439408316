"""The power goes at any moment: what readers find, and what a job makes of it that is run again.

Runs are recorded operation by operation, and every beginning of them is played with what was not yet synchronized kept,
lost or torn, by the model of a disk in :mod:`recorder`.
"""

import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from damage import shorten_pauses, stored
from recorder import TORN, Disk, Recorder, Tree, read_tree, write_tree

import daskrr
from daskrr import machine
from daskrr.errors import InvalidData
from daskrr.jobs import verification
from daskrr.kernels import Gaussian
from daskrr.runtime import tree
from daskrr.storage.output import PUBLISHED, Output, folder_of

ROWS = np.random.default_rng(0).standard_normal((400, 2))
# In memory, where there is such a place: what reaches the disk is for the model to say.
FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None
Arrays = dict[str, bytes]


def score(source: Path, output: Path, **options: Any) -> None:
    settings = {"random_state": 0, "block_rows": 25, "progress": False} | options
    daskrr.score_to_zarr(source, output, Gaussian(1.5), 1e-2, 20, **settings)


def update(source: Path, output: Path) -> None:
    daskrr.update_scores(source, output, progress=False)


def arrays_of(output: Path) -> Arrays:
    store = daskrr.open_scores(output)
    return {name: store[name][...].tobytes() for name in store.keys()}  # noqa: SIM118


def by_plain_paths(output: Path) -> Arrays:
    group = zarr.open_group(output, mode="r")
    return {name: array[...].tobytes() for name, array in group.arrays()}


@dataclass(frozen=True)
class Recording:
    """A job that was recorded: the disk, the line to run again, and what readers may see before and after it."""

    disk: Disk
    job: Callable[[Path], None]
    old: Arrays | None
    new: Arrays


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For recordings, on a machine that is started anew whenever :func:`start_machine` is called."""
    monkeypatch.setattr(tree, "SPANS_LEFT", 0)
    monkeypatch.setattr(socket, "gethostname", lambda: "the-machine-that-loses-power")
    start_machine(monkeypatch)
    shorten_pauses(monkeypatch)
    with tempfile.TemporaryDirectory(dir=FAST) as made:
        yield Path(made)


def start_machine(patch: pytest.MonkeyPatch) -> None:
    """All processes of before are dead, and known to be."""
    boot = f"boot-{random.SystemRandom().getrandbits(64):x}"
    patch.setattr(machine, "boot_id", lambda: boot)


def recorded(folder: Path, job: Callable[[Path], None], before: Tree, old: Arrays | None) -> Recording:
    """A job, run on a disk with what was there before, of which readers see ``old``."""
    write_tree(before, folder)
    output = folder / "out.zarr"
    recorder = Recorder(folder)
    with recorder.installed():
        job(output)
    disk = Disk(recorder)
    assert disk.after_loss(disk.length, {}) == read_tree(folder), "something was done that was not noted"
    return Recording(disk, job, old, arrays_of(output))


def recorded_run(folder: Path, n_rows: int = 75, **options: Any) -> Recording:
    source = stored(folder / "X", ROWS[:n_rows], (25, 2))
    return recorded(folder / "run", lambda output: score(source, output, **options), {}, None)


def recorded_update(folder: Path, n_rows: int = 75, more: int = 50, **options: Any) -> Recording:
    source = stored(folder / "X", ROWS[:n_rows], (25, 2))
    (folder / "before").mkdir()
    score(source, folder / "before/out.zarr", **options)
    array = zarr.open_array(source, mode="r+")
    array.resize((n_rows + more, 2))
    array[n_rows:] = ROWS[n_rows : n_rows + more]
    old = arrays_of(folder / "before/out.zarr")
    return recorded(folder / "update", partial(update, source), read_tree(folder / "before"), old)


@dataclass
class Judge:
    """Plays losses of power and judges what is left; states that were judged already are not judged again."""

    recording: Recording = field(repr=False)
    folder: Path
    patch: pytest.MonkeyPatch = field(repr=False)
    known: set[int] = field(default_factory=set, repr=False)
    judged: int = 0
    saw_old: int = 0
    saw_new: int = 0
    run_again: int = 0

    def play(self, moment: int, fates: dict[int, str], again: bool) -> None:
        """Lose the power after so many operations, with these fates of what was not synchronized."""
        tree = self.recording.disk.after_loss(moment, fates)
        state = hash((again, frozenset(tree.items())))
        if state not in self.known:
            self.known.add(state)
            place = self.folder / "state"
            write_tree(tree, place)
            self._look(place / "out.zarr", is_done=moment == self.recording.disk.length)
            if again:
                self._run_again(place / "out.zarr")
            self.judged += 1
            shutil.rmtree(place)

    def _look(self, output: Path, is_done: bool) -> None:
        try:
            seen: Arrays | None = arrays_of(output)
        except InvalidData:
            seen = None
        assert seen == self.recording.new or (seen == self.recording.old and not is_done)
        self.saw_old += seen == self.recording.old
        self.saw_new += seen == self.recording.new
        if is_done:
            assert by_plain_paths(output) == self.recording.new
        if seen is not None:
            assert damage_of_published(output) == []

    def _run_again(self, output: Path) -> None:
        start_machine(self.patch)
        self.recording.job(output)
        assert arrays_of(output) == self.recording.new
        assert by_plain_paths(output) == self.recording.new
        assert verification.verify(output) == []
        assert Output(output).unfinished == []
        self.run_again += 1


def damage_of_published(output: Path) -> list[str]:
    """What is wrong with arrays and manifests of generations that are published or kept; links may lag behind."""
    commit = Output(output).commit
    assert commit is not None
    found = verification.verify(output)
    return [
        one for one in found
        if any(one.startswith((folder_of(name), f".daskrr/records/{name}/", name)) for name in commit.published)
        and not one.startswith(PUBLISHED)
    ]  # fmt: skip


def everything(disk: Disk, moment: int) -> dict[int, str]:
    """All that can be lost at a moment is."""
    return {one.at: "empty" for one in disk.unsettled(moment)}


def by_chance(disk: Disk, moment: int, dice: random.Random) -> dict[int, str]:
    """Some of what can be lost or torn at a moment is."""
    share = dice.random()
    return {one.at: dice.choice(TORN[1:]) for one in disk.unsettled(moment) if dice.random() < share}


def around_commits(disk: Disk) -> Iterator[int]:
    """Moments just before and after each time that a commit is given its name."""
    for at, operation in enumerate(disk.operations):
        if operation[0] == "link" and "/commit.record" in operation[2]:
            yield from range(at, at + 5)


@pytest.mark.parametrize("record", [recorded_run, pytest.param(recorded_update, marks=pytest.mark.slow)])
def test_power_loss__leaves_old_or_new_scores_and_a_job_that_goes_on(
    record: Callable[[Path], Recording], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, dice = record(folder), random.Random(0)
    disk, judge = recording.disk, Judge(recording, folder, monkeypatch)
    moments = sorted({*range(0, disk.length, disk.length // 50), *around_commits(disk), disk.length})
    for number, moment in enumerate(moments):
        judge.play(moment, everything(disk, moment), again=number % 6 == 0)
        if number % 3 == 0:
            judge.play(moment, by_chance(disk, moment, dice), again=number % 24 == 0)
    print(disk.length, judge)
    assert judge.saw_old > 20
    assert judge.saw_new > 3
    assert judge.run_again > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("record", [recorded_run, recorded_update])
def test_power_loss__at_every_moment_with_many_subsets_lost(
    record: Callable[..., Recording], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, dice = record(folder, n_rows=50), random.Random(1)
    disk, judge = recording.disk, Judge(recording, folder, monkeypatch)
    for moment in range(disk.length + 1):
        for fates in disk.losses(moment, dice, 1):
            judge.play(moment, fates, again=dice.random() < 0.1)
    print(disk.length, judge)
    assert judge.judged > disk.length // 2
    assert judge.saw_new > 30
    assert judge.run_again > 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("record", [recorded_run, recorded_update])
def test_power_loss__of_a_larger_job_and_again_while_it_goes_on(
    record: Callable[..., Recording], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, dice = record(folder, n_rows=300, certify=True), random.Random(2)
    for number in range(8):
        moment = dice.randrange(first.disk.length)
        Judge(first, folder, monkeypatch).play(moment, by_chance(first.disk, moment, dice), again=True)
        start_machine(monkeypatch)
        left = first.disk.after_loss(moment, by_chance(first.disk, moment, dice))
        again = recorded(folder / f"again-{number}", first.job, left, first.old)
        assert again.new == first.new
        judge = Judge(again, folder, monkeypatch)
        for _ in range(3):
            moment = dice.randrange(again.disk.length + 1)
            judge.play(moment, by_chance(again.disk, moment, dice), again=True)
