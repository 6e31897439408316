"""Records of a job that are damaged or gone: it goes on without, to the same bits, and says so."""

import contextlib
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr
from damage import Saboteur, flip
from scenes import digest, make_points, score_here
from strategies import as_zarr
from variants import slow_but

import daskrr
from daskrr.errors import DamagedRecord, StoreFailed
from daskrr.jobs.verification import repair, verify
from daskrr.runtime import executors, tree
from daskrr.storage.output import Output

RECORDS = ".daskrr/records"
BLOCK_ROWS = 50
N_ROWS, N_GROWN = 450, 620
MOMENTS = ("pass 1", "pass 2", "published")
SLOW = pytest.mark.slow
# What is told to people, written anew whenever a job goes on, or tells by its name alone, and so is never read by it.
UNREAD = {"progress", "error", "fit-0/kept", "fit-0/summed", "base"}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: dict[str, Callable[[Path], None]] = {"torn": cut, "flipped": flip, "emptied": empty, "deleted": Path.unlink}


def kind_of(path: Path, output: Path) -> str:
    """Of a record: its name without its generation and numbers."""
    name = path.relative_to(output / RECORDS).as_posix().removesuffix(".record").partition(".record+")[0]
    return re.sub(r"(/\d+)+$|-[0-9a-f]{8}$", "", re.sub(r"^\d{6}-[0-9a-f]{8}/", "", name))


def current_records(output: Path) -> dict[str, list[Path]]:
    """Files of all records that count, by kind; not old versions of them."""
    files = sorted(path for path in (output / RECORDS).rglob("*") if path.is_file())
    newest = {path.parent if "+versions" in str(path) else path: path for path in files}
    found: dict[str, list[Path]] = {}
    for path in newest.values():
        found.setdefault(kind_of(path, output), []).append(path)
    return found


class Scene:
    """Jobs of the same points at three moments, each as a folder to be copied, and what they have to give."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.points = make_points(folder / "points.zarr", n_rows=N_ROWS, chunk_rows=BLOCK_ROWS)
        X = np.random.default_rng(1).standard_normal((N_GROWN, 3))
        X[:N_ROWS] = zarr.open_array(self.points, mode="r")[...]
        self.grown = folder / "grown.zarr"
        as_zarr(X, (BLOCK_ROWS, 3), str(self.grown))
        for moment in MOMENTS:
            self.make(moment, 0)
            self.make(moment, 1)
        whole = shutil.copytree(self.of("published"), folder / "whole.zarr", symlinks=True)
        self.expected = {"pass 1": digest(whole), "pass 2": digest(whole)}
        self.go_on("published", whole)
        self.expected["published"] = digest(whole)

    def make(self, moment: str, seed: int) -> None:
        """A job that stops, at the fifth task of six of a pass or when it is done."""

        def stop() -> None:
            raise StoreFailed("the disk hums")

        saboteur = Saboteur(moment, stop, done=5)
        with contextlib.suppress(StoreFailed):
            score_here(self.points, self.of(moment, seed), block_rows=BLOCK_ROWS, random_state=seed, progress=saboteur)
        assert saboteur.fired == (moment != "published")

    def of(self, moment: str, seed: int = 0) -> Path:
        """The job; seed 1 is that of a stranger."""
        return self.folder / f"{moment}-{seed}.zarr"

    def go_on(self, moment: str, output: Path) -> None:
        """Run the job to its end, or update what it has published."""
        if moment == "published":
            daskrr.update_scores(str(self.grown), output, wait=True, progress=False)
        else:
            score_here(self.points, output, block_rows=BLOCK_ROWS, wait=True)

    def kinds(self, moment: str) -> list[str]:
        """Kinds of records that there are."""
        return sorted(current_records(self.of(moment)))

    def swap(self, path: Path, output: Path, moment: str) -> None:
        """Put a sibling of the same kind in the place of a record; if there is none, that of another generation.

        Those that belong to no generation are exchanged among themselves.
        """
        kind, found = kind_of(path, output), current_records(output)
        others = [one for one in found[kind] if one != path]
        if path.relative_to(output / RECORDS).parts[0].startswith(f"{kind}."):
            others = found["commit" if kind == "view" else "lease" if kind == "commit" else "commit"]
        path.write_bytes((others or current_records(self.of(moment, 1))[kind])[0].read_bytes())


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "SPANS_LEFT", 1)
        patch.setattr(executors, "cpu_count", lambda: 2)
        yield Scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(autouse=True)
def short_leases() -> Iterator[None]:
    """One that is damaged is waited for, and so is one whose last version is gone, which says that it was left."""
    with dask.config.set({"daskrr.lease-time": "2s"}):
        yield


@pytest.mark.parametrize(
    ("moment", "count", "kinds"),
    [
        ("pass 1", 13, {"job", "processors", "landmarks-0", "sample-rows", "fit-0/sums", "fit-0/kept", "spans"}),
        ("pass 2", 16, {"receipts", "fit-0/summed", "base", "base-fit-0-0", "base-fit-0-1", "progress", "error"}),
        ("published", 8, {"manifest", "manifest-copy", "commit", "commit-copy", "view", "lease", "base-fit-0-0"}),
    ],
)  # fmt: skip
def test_scene__has_every_kind_of_record(moment: str, count: int, kinds: set[str], scene: Scene) -> None:
    assert kinds <= set(scene.kinds(moment))
    assert len(scene.kinds(moment)) == count, scene.kinds(moment)


def assert_heals(scene: Scene, moment: str, path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """Damage a record of a copy of a job, and have the job go on; what is damaged of the past, `verify` tells still."""
    output = shutil.copytree(scene.of(moment), scene.folder / "damaged.zarr", symlinks=True)
    try:
        victim = output / path.relative_to(scene.of(moment))
        intact, kind = victim.read_bytes(), kind_of(victim, output)
        scene.swap(victim, output, moment) if damage == "swapped" else DAMAGES[damage](victim)
        assert not victim.exists() or victim.read_bytes() != intact
        caplog.clear()
        scene.go_on(moment, output)
        assert digest(output) == scene.expected[moment], (kind, damage)
        assert verify(output) == [] or is_of_the_past(victim, output), (kind, damage)
        repair(output)
        assert verify(output) == [], (kind, damage)
        if damage != "deleted" and kind not in UNREAD:
            assert [one for one in caplog.records if one.levelno >= logging.WARNING], (kind, damage)
    finally:
        shutil.rmtree(output)


def is_of_the_past(record: Path, output: Path) -> bool:
    """Whether it is an old version, or of a generation that is kept and no longer published."""
    generation = record.relative_to(output / RECORDS).parts[0]
    is_old = "+versions" in str(record) and record not in current_records(output)[kind_of(record, output)]
    return is_old or generation in Output(output).commit.published[1:]


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_record__of_every_kind_that_is_damaged_is_computed_again(
    moment: str, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """One damage of each kind of record, another one for the next."""
    damages = [*DAMAGES, "swapped"]
    for number, (kind, paths) in enumerate(current_records(scene.of(moment)).items()):
        assert_heals(scene, moment, paths[-1], damages[(number + MOMENTS.index(moment)) % len(damages)], caplog)
        assert kind in scene.kinds(moment)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("damage", ["torn", "swapped"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_record__that_is_damaged_in_any_way_is_computed_again(
    moment: str, damage: str, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    for paths in current_records(scene.of(moment)).values():
        assert_heals(scene, moment, paths[0], damage, caplog)


@pytest.mark.parametrize(
    "damage", ["torn", *(pytest.param(kind, marks=SLOW) for kind in ("flipped", "emptied", "deleted", "swapped"))]
)
def test_commit__that_is_damaged_with_its_copy_is_told_and_nothing_is_unpublished(
    damage: str, scene: Scene, tmp_path: Path
) -> None:
    output = shutil.copytree(scene.of("published"), tmp_path / "out.zarr", symlinks=True)
    before, published = digest(output), Output(output).commit.published
    found = current_records(output)
    for kind, other in (("commit", "commit-copy"), ("commit-copy", "commit")):
        for path in (output / RECORDS / f"{kind}.record+versions").iterdir():
            if damage == "swapped":
                path.write_bytes(current_records(scene.of("published"))[other][0].read_bytes())
            else:
                DAMAGES[damage](path)
    assert found
    for attempt in (lambda: scene.go_on("published", output), lambda: daskrr.open_scores(output)):
        with pytest.raises(DamagedRecord, match=r"Nothing was deleted\. .*daskrr verify --repair"):
            attempt()
    assert digest(output) == before
    assert any("nobody knows what is published" in one for one in verify(output))
    assert repair(output)
    assert verify(output) == []
    assert Output(output).commit.published == published
    assert digest(output) == before
    scene.go_on("published", output)
    assert digest(output) == scene.expected["published"]


@pytest.mark.parametrize("damage", slow_but(DAMAGES, "torn"))
def test_manifest__that_is_damaged_with_its_copy_is_told_and_can_be_replaced(
    damage: str, scene: Scene, tmp_path: Path
) -> None:
    output = shutil.copytree(scene.of("published"), tmp_path / "out.zarr", symlinks=True)
    before, found = digest(output), current_records(output)
    for path in (*found["manifest"], *found["manifest-copy"]):
        DAMAGES[damage](path)
    for attempt in (lambda: scene.go_on("published", output), lambda: daskrr.open_scores(output)):
        with pytest.raises(DamagedRecord, match=r"its arrays cannot be trusted\. .*rollback, or .*--overwrite"):
            attempt()
    assert digest(output) == before
    assert any("manifest" in one for one in verify(output))
    score_here(scene.points, output, block_rows=BLOCK_ROWS, overwrite=True)
    assert digest(output) == before
