"""Many nights of a job in a few minutes: rows are appended, the job is run, killed, stopped and ended, records are
damaged, generations are returned to, and readers read all the while.

By hand: ``python tests/faults/soak.py --minutes 30 --seed 0`` prints what has happened as JSON; anything that must not
happen is raised.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from damage import NAMES, flip
from processes import stopped
from scenes import DASKRR, ended, family, is_alive, started, until
from strategies import as_zarr

import daskrr
from daskrr import exact
from daskrr.errors import InvalidData
from daskrr.jobs import verification
from daskrr.jobs.reader import status
from daskrr.kernels import Gaussian
from daskrr.storage.local import TEMPORARY
from daskrr.storage.output import PUBLISHED, Output
from daskrr.storage.zarr_arrays import checksum

JOB = """
input = "points.zarr"
output = "scores.zarr"
[kernel]
kernel = "gaussian"
length-scale = 1.5
[scores]
ridge = 1e-2
landmarks = 60
certify = true
seed = 0
block-rows = 100
[retries]
attempts = 1
"""
START, MOST_ROWS, FEATURES = 1000, 6000, 3
EVENTS = ("quiet", "kill", "kill driver", "stop", "terminate", "damage", "rollback")


class Soak:
    """A folder with a store that grows and the scores of it; ``happened`` counts what was done to them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.dice = folder, random.Random(seed)
        self.points, self.output = folder / "points.zarr", folder / "scores.zarr"
        self.rows = np.random.default_rng(seed).standard_normal((MOST_ROWS, FEATURES))
        self.n_rows, self.typical = START, 3.0
        self.happened: Counter[str] = Counter()
        self.generations: set[str] = set()
        (folder / "job.toml").write_text(JOB)
        as_zarr(self.rows[:START], (100, FEATURES), str(self.points))
        group = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {"of": "a user"}})
        texts = {"notes.txt": "remember", "mine/labels.txt": "a b c", "mine.zarr/zarr.json": group}
        self.theirs = {self.output / name: text for name, text in texts.items()}

    def live(self, minutes: float) -> dict[str, Any]:
        """Let nights pass until the time is over and everything has happened; then look whether all is well."""
        begun = time.monotonic()
        self.night("quiet")
        for path, text in self.theirs.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        with reading(self.output) as readers:
            while time.monotonic() - begun < 60 * minutes or not all(map(self.happened.__getitem__, EVENTS)):
                for event in self.dice.sample(EVENTS, len(EVENTS)):
                    self.grow()
                    self.night(event)
                    assert all(map(threading.Thread.is_alive, readers)), "a reader has ended"
            self.grow()
            self.night("quiet")
            for reader in readers:
                until(lambda reader=reader, seen=reader.reads: reader.reads > seen)
        self.check()
        figures = {reader.name: reader.figures for reader in readers}
        seconds = round(time.monotonic() - begun)
        return {"seconds": seconds, "rows": self.n_rows, "generations": len(self.generations)} | self.happened | figures

    def grow(self) -> None:
        """Append some rows, mostly not whole chunks."""
        before, self.n_rows = self.n_rows, min(self.n_rows + self.dice.choice((0, 1, 7, 30, 100)), MOST_ROWS)
        if before == self.n_rows:
            return
        array = zarr.open_array(self.points, mode="r+")
        array.resize((self.n_rows, FEATURES))
        array[before:] = self.rows[before : self.n_rows]

    def night(self, event: str) -> None:
        """Run the job, and have something happen to it, or before it."""
        if event == "damage":
            self.damage()
        elif event == "rollback":
            self.roll_back()
        command = [*DASKRR, "run", str(self.folder / "job.toml"), "--quiet", "--workers", "1"]
        with started(command, start_new_session=True) as process:
            self.happened["runs"] += 1
            disturb = {"kill": self.kill, "kill driver": self.kill, "stop": self.stop, "terminate": self.terminate}
            if event in disturb:
                disturb[event](process, event)
            else:
                begun = time.monotonic()
                ended(process, 0)
                self.typical = time.monotonic() - begun
                self.happened["quiet"] += event == "quiet"
                if event == "damage":
                    self.happened["repairs"] += bool(verification.repair(self.output))
                assert verification.verify(self.output) == []
        with contextlib.suppress(InvalidData):
            self.generations.add(status(self.output)["published"]["generation"])

    def is_still_there(self, process: subprocess.Popen[str]) -> bool:
        """Whether a job has not ended by itself by a random moment."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.dice.uniform(0.2, 1.0) * self.typical)
        return process.poll() is None

    def kill(self, process: subprocess.Popen[str], event: str) -> None:
        """Kill it with its workers, or alone."""
        if self.is_still_there(process):
            children = family(process.pid)
            self.happened[event] += stopped(process, whole_group=event == "kill") is not None
            until(lambda: not any(map(is_alive, children)))
        else:
            ended(process, 0)

    def stop(self, process: subprocess.Popen[str], event: str) -> None:
        """Have it and its workers stand still for a while."""
        if self.is_still_there(process):
            os.killpg(process.pid, signal.SIGSTOP)
            self.happened[event] += 1
            time.sleep(self.dice.uniform(0.1, 3.0))
            os.killpg(process.pid, signal.SIGCONT)
        ended(process, 0)

    def terminate(self, process: subprocess.Popen[str], event: str) -> None:
        """Ask it to end."""
        if self.is_still_there(process):
            code = 128 + signal.SIGTERM
            # A signal that comes before Python listens ends it as it ends any program.
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
            assert process.returncode in (code, -signal.SIGTERM, 0), process.returncode
            self.happened[event] += process.returncode == code
        else:
            ended(process, 0)

    def damage(self) -> None:
        """Flip a bit of a record; of the commit, the version that counts."""
        records = sorted(path for path in self.output.glob(".daskrr/records/**/*.record") if path.is_file())
        commit = max(self.output.glob(".daskrr/records/commit.record+versions/*"))
        flip(self.dice.choice([commit, *records]), self.dice.random())
        self.happened["damage"] += 1
        assert verification.verify(self.output)

    def roll_back(self) -> None:
        """Return to the generation before, if there is one."""
        if len(status(self.output)["generations"]) > 1:
            daskrr.jobs.rollback(self.output)
            self.happened["rollback"] += 1

    def check(self) -> None:
        """All exact scores are inside their intervals, and nothing is left that should not be."""
        store = daskrr.open_scores(self.output)
        assert store.summary["n_rows"] == self.n_rows
        scores = exact.leverage_scores(self.rows[: self.n_rows], Gaussian(1.5), 1e-2)
        assert (store["lower"][...] <= scores).all()
        assert (scores <= store["upper"][...]).all()
        assert verification.verify(self.output) == []
        assert status(self.output)["unfinished"] == []
        assert [path for path in self.output.rglob("*") if TEMPORARY.fullmatch(path.name)] == []
        assert all(path.read_text() == text for path, text in self.theirs.items())


class Reader(threading.Thread):
    """Reads again and again until it is told to leave; an error of its own is kept."""

    def __init__(self, output: Path, read: Callable[["Reader"], None]) -> None:
        super().__init__(name=read.__name__)
        self.output, self.read = output, read
        self.leave, self.error = threading.Event(), None
        self.reads, self.seen, self.straddled = 0, set[str](), 0
        self.held: Any = None

    def run(self) -> None:
        try:
            while not self.leave.wait(0.2):
                self.read(self)
        except BaseException as error:
            self.error = error

    @property
    def figures(self) -> dict[str, int]:
        return {"reads": self.reads, "generations": len(self.seen), "straddled": self.straddled}


def matches(arrays: Any, manifest: dict[str, Any]) -> bool:
    """Whether all blocks of all arrays are those that a generation was published with."""
    for name, digests in manifest["digests"].items():
        values, height = arrays[name][...], manifest["block_rows"]
        blocks = [values[at : at + height] for at in range(0, len(values), height)]
        if [checksum(one) for one in blocks] != digests.tolist():
            return False
    return True


def ours(reader: Reader) -> None:
    """Opens what is published, reads all of it, and closes it."""
    opened = Output(reader.output).open("scores")
    assert matches(*opened)
    reader.reads += 1
    reader.seen.add(opened[1]["generation"])


def plain(reader: Reader) -> None:
    """Reads by the plain paths; a read is of one generation if the link was the same before and after it."""
    before = os.readlink(reader.output / PUBLISHED)
    group = zarr.open_group(reader.output, mode="r")
    arrays = {name: group[name] for name in NAMES}
    manifest = Output(reader.output).manifest(before) if before in Output(reader.output).manifests() else None
    found = manifest is not None and matches(arrays, manifest)
    reader.reads += 1
    if os.readlink(reader.output / PUBLISHED) != before or manifest is None:
        reader.straddled += 1
    else:
        assert found, f"a mixture was read of {before}"
        reader.seen.add(before)


def keeping(reader: Reader) -> None:
    """Keeps a generation open, for as long as that is kept."""
    if reader.held is None:
        reader.held = Output(reader.output).open("scores")
    generation = reader.held[1]["generation"]
    try:
        assert matches(*reader.held)
        reader.reads += 1
        reader.seen.add(generation)
    except InvalidData:
        assert generation not in Output(reader.output).commit.published, "it was taken from a reader too early"
        reader.held = None
        reader.straddled += 1


@contextlib.contextmanager
def reading(output: Path) -> Iterator[list[Reader]]:
    """Readers of three kinds; what went wrong with one is raised at the end."""
    readers = [Reader(output, read) for read in (ours, plain, keeping)]
    for reader in readers:
        reader.start()
    try:
        yield readers
    finally:
        for reader in readers:
            reader.leave.set()
            reader.join()
        for reader in readers:
            if reader.error is not None:
                raise reader.error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(Soak(Path(folder), given.seed).live(given.minutes), indent=2))
