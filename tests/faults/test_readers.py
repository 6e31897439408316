"""Those who read an output: nothing before the commit, one generation after it, damage if asked; and their own."""

import contextlib
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from damage import Saboteur
from processes import running
from scenes import DASKRR, GENEROUS, digest, make_points, run, score_here

import daskrr
import daskrr.jobs.reader
from daskrr import config
from daskrr.errors import InvalidData, StoreFailed
from daskrr.jobs.verification import repair, verify

NAMES = ("estimate", "lower", "residual", "scores", "upper")

# --- Row 35: damage after the commit ------------------------------------------------------------------


def flip_at(share: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(share * (len(content) - 1))] ^= 1 << random.Random(share).randrange(8)
        path.write_bytes(bytes(content))

    return flip


def cut_to(share: float) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])

    return cut


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


DAMAGES = [*map(flip_at, (0.0, 0.3, 0.6, 1.0)), *map(cut_to, (0.0, 0.5, 0.999)), lengthen, Path.unlink]


def published_output(folder: Path) -> Path:
    """Scores that were updated: a generation is kept from before, and all state that a next update stands on."""
    points = make_points(folder / "points.zarr", n_rows=150, chunk_rows=50)
    output = folder / "out.zarr"
    score_here(points, output, block_rows=50)
    rows = zarr.open_array(points, mode="r+")
    rows.append(np.random.default_rng(1).standard_normal((60, 3)))
    daskrr.update_scores(str(points), output, progress=False)
    return output


def files_of(output: Path) -> list[Path]:
    """Everything below an output, each file once."""
    return sorted(
        path
        for path in output.rglob("*")
        if path.is_file() and output.resolve() / path.relative_to(output) == path.resolve()
    )


def is_harmless(path: Path, output: Path, damage: Callable[[Path], None]) -> bool:
    """Whether nobody misses it: an old version of a record that is deleted, as the next writer would do.

    So is the last version of the lease, if it is deleted: the one before is waited for until it stands still. And the
    first version of any record, emptied, is what later writers leave of it.
    """
    versions = sorted(path.parent.iterdir()) if path.parent.name.endswith("+versions") else [path]
    is_old = len(versions) > 1 and (path != versions[-1] or "lease.record" in str(path))
    return is_old and (damage is Path.unlink or (path == versions[0] and damage is EMPTIED))


EMPTIED = DAMAGES[4]


def unnoticed_damages(output: Path, damages: Sequence[Callable[[Path], None]], every: int = 1) -> list[tuple[str, int]]:
    """Which damages of which files `verify` does not tell of, of all that do harm; every n-th is tried."""
    found = []
    for place, path in enumerate(files_of(output)):
        content = path.read_bytes()
        for number, damage in list(enumerate(damages))[place % every :: every]:
            harmless = is_harmless(path, output, damage)
            damage(path)
            assert not path.exists() or path.read_bytes() != content
            if not verify(output) and not harmless:
                found.append((path.relative_to(output).as_posix(), number))
            path.write_bytes(content)
    assert verify(output) == []
    return found


@pytest.mark.slow
def test_verify__finds_damage_of_every_file(tmp_path: Path) -> None:
    output = published_output(tmp_path)
    assert len(files_of(output)) > 100
    assert unnoticed_damages(output, DAMAGES[1:2]) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_verify__finds_every_damage_of_many_files(tmp_path: Path) -> None:
    assert unnoticed_damages(published_output(tmp_path), DAMAGES, every=8) == []


def is_beyond_repair(path: Path, output: Path) -> bool:
    """Whether it is a file of the arrays, which only scoring again brings back."""
    return path.is_relative_to(output / ".daskrr/generations")


@pytest.mark.parametrize(
    "damage", [DAMAGES[1], *(pytest.param(one, marks=pytest.mark.slow) for one in (EMPTIED, Path.unlink))]
)
@pytest.mark.slow
def test_repair__puts_right_all_but_the_arrays(
    damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State is put right; of arrays it is told which rows are lost."""
    # A lease that is damaged is waited for; a busy machine may keep its own heartbeat from being written for a while.
    monkeypatch.setattr(config, "seconds", lambda name: 15.0)
    output = published_output(tmp_path)
    before = digest(output)
    for name in [path.relative_to(output) for path in files_of(output) if not is_beyond_repair(path, output)]:
        broken = shutil.copytree(output, tmp_path / "broken.zarr", symlinks=True)
        if not (broken / name).is_symlink():
            damage(broken / name)
            repair(broken, wait=True)
            assert verify(broken) == [], name
            assert digest(broken) == before
        shutil.rmtree(broken)
    chunk = next(path for path in files_of(output) if path.match("scores/c/*"))
    damage(chunk)
    told = verify(output)
    assert told
    repair(output)
    assert verify(output) == told
    assert all(".daskrr/generations/" in one for one in told)


@pytest.mark.slow
def test_verify__exits_with_1_as_a_command_and_repairs_when_asked(tmp_path: Path) -> None:
    output = published_output(tmp_path)
    text, _ = run([*DASKRR, "verify", str(output)])
    assert "everything is as it was written" in text
    record = next((output / ".daskrr/records/commit-copy.record+versions").iterdir())
    flip_at(0.5)(record)
    _, complaints = run([*DASKRR, "verify", str(output)], 1)
    assert "Traceback" not in complaints
    run([*DASKRR, "verify", "--repair", str(output)])
    run([*DASKRR, "verify", str(output)])


# --- Row 36: readers before, during and after updates -------------------------------------------------


def by_open_scores(output: Path) -> dict[str, bytes]:
    store = daskrr.open_scores(output)
    return {name: store[name][...].tobytes() for name in NAMES}


def by_group(output: Path) -> dict[str, bytes]:
    group: Any = zarr.open_group(output, mode="r")
    return {name: group[name][...].tobytes() for name in NAMES}


def by_array(output: Path) -> dict[str, bytes]:
    return {"scores": zarr.open_array(output / "scores", mode="r")[...].tobytes()}


READERS = (by_open_scores, by_group, by_array)


class Watcher(threading.Thread):
    """A reader that tries again and again, and remembers what it read.

    Plain Zarr reads chunk by chunk by paths, and cannot know that the link among them was exchanged meanwhile; it has
    been so if that does not lead to the same place before and after.
    """

    def __init__(self, read: Callable[[Path], dict[str, bytes]], output: Path) -> None:
        super().__init__()
        self.read, self.output, self.leave = read, output, threading.Event()
        self.refused = self.disturbed = 0
        self.without_a_group: list[Exception] = []
        self.seen: list[dict[str, bytes]] = []

    def run(self) -> None:
        while not self.leave.wait(0.001):
            before = self.pointer()
            try:
                found = self.read(self.output)
            except (InvalidData, FileNotFoundError, KeyError, zarr.errors.NodeNotFoundError) as error:
                self.refused += 1
                if self.seen:
                    self.without_a_group.append(error)
                continue
            if self.read is not by_open_scores and before != self.pointer():
                self.disturbed += 1
            elif not self.seen or self.seen[-1] != found:
                self.seen.append(found)

    def pointer(self) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return os.readlink(self.output / ".daskrr/generations/published")
        return None


@contextlib.contextmanager
def watching(output: Path) -> Iterator[list[Watcher]]:
    watchers = [Watcher(read, output) for read in READERS]
    for one in watchers:
        one.start()
    try:
        yield watchers
    finally:
        for one in watchers:
            one.leave.set()
        for one in watchers:
            one.join(GENEROUS)


def all_have_seen(watchers: list[Watcher], count: int) -> None:
    """Wait until every reader has read so many results."""
    deadline = time.monotonic() + GENEROUS
    while min(len(one.seen) for one in watchers) < count:
        assert time.monotonic() < deadline, [len(one.seen) for one in watchers]
        time.sleep(0.01)


def score_seed(points: Path, output: Path, seed: int) -> None:
    score_here(points, output, random_state=seed, overwrite=seed != 0)


@pytest.mark.slow
@pytest.mark.parametrize("n_jobs", [2, 4])
def test_readers__see_nothing_before_the_commit_and_one_generation_after_it(n_jobs: int, tmp_path: Path) -> None:
    """While a job and those that replace its scores publish, each in a process of its own."""
    points, output = make_points(tmp_path / "points.zarr", n_rows=5000), tmp_path / "out.zarr"
    whole = []
    for seed in range(n_jobs):
        score_here(points, tmp_path / f"{seed}.zarr", random_state=seed)
        whole.append(by_group(tmp_path / f"{seed}.zarr"))
    assert len({one["scores"] for one in whole}) == n_jobs
    with watching(output) as watchers:
        for seed in range(n_jobs):
            with running(score_seed, points, output, seed) as process:
                process.join(GENEROUS)
                assert process.exitcode == 0
            assert all(one.refused for one in watchers)
            all_have_seen(watchers, seed + 1)
    for one in watchers:
        print(f"{one.read.__name__}: {one.refused} refused, {one.disturbed} during the exchange")
        assert not one.without_a_group
        assert len(one.seen) == n_jobs
        for seen, expected in zip(one.seen, whole, strict=True):
            assert seen == {name: expected[name] for name in seen}


def scored(output: Path, seed: int, keep: int = 1) -> tuple[daskrr.jobs.reader.ScoreStore, bytes]:
    """Publish a generation and open it; what a reader has to get."""
    points = output.parent / "points.zarr"
    if not points.exists():
        make_points(points, n_rows=150, chunk_rows=50)
    score_here(points, output, block_rows=50, random_state=seed, overwrite=True, keep=keep)
    store = daskrr.open_scores(output)
    return store, store["scores"][...].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0, 1, 2])
def test_reader__keeps_its_generation_until_so_many_have_followed(keep: int, tmp_path: Path) -> None:
    output = tmp_path / "out.zarr"
    opened = [scored(output, 0, keep)]
    for seed in range(1, 5):
        opened.append(scored(output, seed, keep))
        generations = [one["generation"] for one in daskrr.jobs.status(output)["generations"]]
        kept = opened[-1 - keep :]
        assert len(generations) == len(kept) == min(keep, seed) + 1
        for (store, expected), generation in zip(kept, reversed(generations), strict=True):
            assert store["scores"][...].tobytes() == expected
            again = daskrr.open_scores(output, generation=generation)
            assert again["scores"][...].tobytes() == expected
        for store, _ in opened[: -1 - keep]:
            with pytest.raises(InvalidData, match=r"is gone: its generation is no longer kept.*Open it again"):
                store["scores"][...]
    gone = "000001-00000000"
    with pytest.raises(InvalidData, match=rf"has no generation {gone}: those published and kept are {generations[0]}"):
        daskrr.open_scores(output, generation=gone)


def test_reader__that_opens_during_an_update_gets_the_generation_before(tmp_path: Path) -> None:
    output = tmp_path / "out.zarr"
    _, before = scored(output, 0)
    during = []

    def look() -> None:
        during.append(daskrr.open_scores(output))
        assert zarr.open_array(output / "scores", mode="r")[...].tobytes() == before

    spy = Saboteur("pass 2", look, done=2)
    score_here(tmp_path / "points.zarr", output, block_rows=50, random_state=1, overwrite=True, progress=spy)
    assert spy.fired
    after = daskrr.open_scores(output)["scores"][...].tobytes()
    assert during[0]["scores"][...].tobytes() == before != after
    assert zarr.open_array(output / "scores", mode="r")[...].tobytes() == after


# --- Row 33: what users put beside the scores ---------------------------------------------------------


def put_things_beside(output: Path) -> dict[str, bytes]:
    """A user's file, folder, array, group with an array, and link; all that is theirs."""
    (output / "notes.txt").write_text("mine")
    (output / "mine" / "c").mkdir(parents=True)
    (output / "mine" / "c" / "0").write_text("mine")
    (output / "mine" / "manifest.record").write_text("mine")
    (output / "empty").mkdir()
    group = zarr.open_group(output, mode="r+")
    group.create_array("labels", data=np.arange(150), chunks=(50,))
    group.create_group("more").create_array("weights", data=np.ones(3))
    return theirs(output)


def theirs(output: Path) -> dict[str, bytes]:
    names = ("notes.txt", "mine", "empty", "labels", "more")
    found = [path for name in names for path in [output / name, *(output / name).rglob("*")]]
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in found if path.exists()}


def fail_in_pass_2(points: Path, output: Path) -> None:
    def stop() -> None:
        raise StoreFailed("the disk hums")

    with pytest.raises(StoreFailed, match="the disk hums"):
        score_here(points, output, block_rows=50, random_state=7, overwrite=True, progress=Saboteur("pass 2", stop))


def grow_and_update(points: Path, output: Path) -> None:
    zarr.open_array(points, mode="r+").append(np.random.default_rng(1).standard_normal((60, 3)))
    assert daskrr.update_scores(str(points), output, progress=False)["update"]["rows_added"] == 60


@pytest.mark.slow
def test_outputs__leave_what_users_put_beside_the_scores_alone(tmp_path: Path) -> None:
    points, output = make_points(tmp_path / "points.zarr", n_rows=150, chunk_rows=50), tmp_path / "out.zarr"
    score_here(points, output, block_rows=50)
    before = put_things_beside(output)
    assert len(before) > 10
    steps: list[Callable[[], object]] = [
        lambda: grow_and_update(points, output),
        lambda: score_here(points, output, block_rows=50, random_state=3, overwrite=True),
        lambda: score_here(points, output, block_rows=50, random_state=4, certify=False, overwrite=True),
        lambda: daskrr.jobs.rollback(output),
        lambda: fail_in_pass_2(points, output),
        lambda: repair(output),
        lambda: score_here(points, output, block_rows=50, random_state=5, overwrite=True, keep=0),
    ]
    seen = set()
    for step in steps:
        step()
        assert theirs(output) == before
        np.testing.assert_array_equal(zarr.open_group(output, mode="r")["labels"][...], np.arange(150))
        seen.add(daskrr.jobs.status(output)["published"]["generation"])
    assert len(seen) == 4
    assert verify(output) == []


@pytest.mark.slow
def test_attributes__of_our_group_belong_to_a_generation_and_those_of_users_do_not(tmp_path: Path) -> None:
    """An edit of ours is told by verify, not believed by our readers, and put right; that of a user's array stays."""
    points, output = make_points(tmp_path / "points.zarr", n_rows=150, chunk_rows=50), tmp_path / "out.zarr"
    score_here(points, output, block_rows=50)
    put_things_beside(output)
    zarr.open_array(output / "labels", mode="r+").attrs["mine"] = 1
    zarr.open_group(output, mode="r+").attrs["daskrr"] = {"n_rows": -5}
    assert [one for one in verify(output) if "zarr.json" in one]
    assert daskrr.open_scores(output).summary["n_rows"] == 150
    repair(output)
    assert verify(output) == []
    assert zarr.open_group(output, mode="r").attrs["daskrr"]["n_rows"] == 150
    grow_and_update(points, output)
    assert zarr.open_array(output / "labels", mode="r").attrs["mine"] == 1
