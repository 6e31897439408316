"""Those who read an output: they see nothing before the commit, whole arrays after it, and damage if they ask."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zarr
from click.testing import CliRunner
from processes import running
from scenes import DASKRR, GENEROUS, make_points, run, score_here

import daskrr
from daskrr.apps.cli import main
from daskrr.errors import InvalidData

NAMES = ("estimate", "lower", "residual", "scores", "upper")

# --- Row 20: damage after the commit ------------------------------------------------------------------


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


def published_files(output: Path) -> list[Path]:
    found = [path for path in output.rglob("*") if path.is_file() and ".daskrr" not in path.relative_to(output).parts]
    return [*sorted(found), output / ".daskrr/records/commit.record"]


@pytest.mark.slow
def test_verify__finds_every_damage_of_every_published_file(tmp_path: Path) -> None:
    points, output = make_points(tmp_path / "points.zarr", n_rows=150, chunk_rows=50), tmp_path / "out.zarr"
    score_here(points, output, block_rows=50)
    files = published_files(output)
    sketch = [path for path in files if "sketch" in path.relative_to(output).parts]
    assert len(sketch) > 20
    assert len(files) == 5 * 3 + 5 + 1 + 1 + len(sketch)
    unnoticed = []
    for path in files:
        content = path.read_bytes()
        for number, damage in enumerate(DAMAGES):
            damage(path)
            assert not path.exists() or path.read_bytes() != content
            code = CliRunner().invoke(main, ["verify", str(output)]).exit_code
            if code not in (1, 2):
                unnoticed.append((path.relative_to(output), number, code))
            path.write_bytes(content)
        assert CliRunner().invoke(main, ["verify", str(output)]).exit_code == 0
    assert not unnoticed


@pytest.mark.slow
def test_verify__exits_with_1_as_a_command(tmp_path: Path) -> None:
    points, output = make_points(tmp_path / "points.zarr", n_rows=150, chunk_rows=50), tmp_path / "out.zarr"
    score_here(points, output, block_rows=50)
    text, _ = run([*DASKRR, "verify", str(output)])
    assert "everything is as it was written" in text
    for path in (output / "scores/c/1", output / "zarr.json", output / ".daskrr/records/commit.record"):
        content = path.read_bytes()
        flip_at(0.5)(path)
        _, complaints = run([*DASKRR, "verify", str(output)], 1)
        assert "Traceback" not in complaints
        path.write_bytes(content)


# --- Row 21: readers during a run ---------------------------------------------------------------------


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
    """A reader that tries again and again, and remembers what it read, and whether the commit was there by then.

    Plain Zarr reads chunk by chunk, and cannot know that the arrays are exchanged meanwhile. It has been so if the
    metadata of the group is not the same before and after.
    """

    def __init__(self, read: Callable[[Path], dict[str, bytes]], output: Path) -> None:
        super().__init__()
        self.read, self.output, self.leave = read, output, threading.Event()
        self.refused = self.disturbed = 0
        self.seen: list[tuple[dict[str, bytes], bool]] = []

    def run(self) -> None:
        commit = self.output / ".daskrr/records/commit.record"
        while not self.leave.wait(0.001):
            before = self.metadata()
            try:
                found = self.read(self.output)
            except (InvalidData, FileNotFoundError, KeyError, zarr.errors.NodeNotFoundError):
                self.refused += 1
                continue
            exchanged = self.seen and (before is None or before != self.metadata())
            if exchanged and self.read is not by_open_scores:
                self.disturbed += 1
            elif not self.seen or self.seen[-1][0] != found:
                self.seen.append((found, commit.exists()))

    def metadata(self) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return (self.output / "zarr.json").read_bytes()
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


def test_readers__see_nothing_before_the_commit_and_old_or_new_arrays_after_it(tmp_path: Path) -> None:
    points, output = make_points(tmp_path / "points.zarr", n_rows=5000), tmp_path / "out.zarr"
    whole = []
    for seed in (0, 1):
        score_here(points, tmp_path / f"{seed}.zarr", random_state=seed)
        whole.append(by_group(tmp_path / f"{seed}.zarr"))
    assert whole[0]["scores"] != whole[1]["scores"]
    with watching(output) as watchers:
        with running(score_seed, points, output, 0) as process:
            process.join(GENEROUS)
            assert process.exitcode == 0
        assert all(one.refused for one in watchers)
        all_have_seen(watchers, 1)
        with running(score_seed, points, output, 1) as process:
            process.join(GENEROUS)
            assert process.exitcode == 0
        all_have_seen(watchers, 2)
    for one in watchers:
        found = [{name: seen[name] == of[name] for name in seen} for seen, _ in one.seen for of in whole]
        print(f"{one.read.__name__}: {one.refused} refused, {one.disturbed} during the exchange")
        assert len(one.seen) == 2, found
        for (seen, committed), expected in zip(one.seen, whole, strict=True):
            assert seen == {name: expected[name] for name in seen}
            assert committed or one.read is not by_open_scores
