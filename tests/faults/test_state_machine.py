"""Jobs that are run, killed, continued, damaged, deleted, overwritten and looked at in any order, against a model."""

import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import zarr
from damage import chunk_files, flip, stored
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import daskrr
from daskrr.errors import DamagedRecord, InvalidData, OutputExists
from daskrr.jobs import reader, verification
from daskrr.kernels import Gaussian
from daskrr.runtime import tree
from daskrr.storage.local import Files
from daskrr.storage.output import COMMIT, COPY, LEASE, MANIFEST, Output
from daskrr.storage.records import Records

NAMES = ("estimate", "residual", "scores")
ROWS = np.random.default_rng(0).standard_normal((400, 2))
START, STEP = 100, 50
REFERENCES = {}
# In memory, where there is such a place: every step waits for the disk many times.
FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None


def score(source, output, seed, **options):
    return daskrr.score_to_zarr(
        source, output, Gaussian(1.5), 1e-2, 20, random_state=seed, block_rows=25, progress=False, **options
    )  # fmt: skip


def arrays_of(output):
    store = daskrr.open_scores(output)
    return {name: store[name][...].tobytes() for name in NAMES}


def reference(source, job):
    """What an undisturbed run of a job, a seed and a number of rows, publishes."""
    if job not in REFERENCES:
        with tempfile.TemporaryDirectory(dir=FAST) as folder:
            X = stored(Path(folder) / "X", ROWS[: job[1]], (25, 2))
            score(X, Path(folder) / "out.zarr", job[0])
            REFERENCES[job] = arrays_of(Path(folder) / "out.zarr")
    return REFERENCES[job]


class Stop(BaseException):
    """The process ends here."""


class Hook:
    """Ends a run before or after its n-th durable change: of a record, a file, a link, or a folder that is moved."""

    def __init__(self, patch, number, before):
        self.number, self.before, self.done = number, before, []
        self.over = False
        for kind, names in ((Records, ("write", "create", "replace")), (Files, ("write", "point", "move"))):
            for name in names:
                patch.setattr(kind, name, self.hooked(getattr(kind, name)))

    def hooked(self, change):
        def counted(itself, name, *more):
            if name.endswith("/progress") or name == LEASE:
                return change(itself, name, *more)
            if self.over or (self.before and len(self.done) >= self.number):
                self.end()
            found = change(itself, name, *more)
            self.done.append(name)
            if not self.before and len(self.done) > self.number:
                self.end()
            return found

        return counted

    def end(self):
        """Threads that still run write nothing more either."""
        self.over = True
        raise Stop


def newest(folder, name):
    """File that a record is read from."""
    versions = folder / f"{name}.record+versions"
    return max(versions.iterdir()) if versions.is_dir() else folder / f"{name}.record"


PAIRS = ((COMMIT, COPY), (MANIFEST, f"{MANIFEST}-copy"))


def twin(name):
    """The record that has the same content as another, if any."""
    for first, second in PAIRS:
        if name.endswith(second):
            return name.removesuffix(second) + first
        if name.endswith(first):
            return name.removesuffix(first) + second
    return name


class Jobs(RuleBasedStateMachine):
    """The model knows what is published, what is kept from before, what may be unfinished, and what was damaged.

    A job is a seed and a number of rows. No damage of a record un-publishes anything, as long as not both of a pair
    are damaged; no job stops for one; and nobody touches what users put beside the scores.
    """

    steps = 0
    fired: ClassVar = Counter()

    @initialize()
    def begin(self):
        self.folder = Path(tempfile.mkdtemp(dir=FAST))
        self.output, self.n_rows = self.folder / "out.zarr", START
        self.source = stored(self.folder / "X", ROWS[:START], (25, 2))
        self.published, self.kept, self.pending = None, None, {None}
        self.hurt, self.broken, self.theirs = {}, set(), {}

    def teardown(self):
        shutil.rmtree(self.folder)

    @property
    def records(self):
        return Records(self.output / ".daskrr" / "records")

    @property
    def current(self):
        return Output(self.output).commit.current

    # --- What is done ---------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 1), overwrite=st.booleans())
    def run(self, seed, overwrite):
        self.attempt((seed, self.n_rows), overwrite)

    @rule(seed=st.integers(0, 1), overwrite=st.booleans(), number=st.integers(0, 70), before=st.booleans())
    def run_and_kill(self, seed, overwrite, number, before):
        job = seed, self.n_rows
        with pytest.MonkeyPatch.context() as patch:
            hook = Hook(patch, number, before)
            try:
                self.attempt(job, overwrite)
            except Stop:
                self.fired["kill"] += 1
                self.after_kill(job, hook.done)

    def attempt(self, job, overwrite):
        """Run a job; what comes of it must agree with the model."""
        try:
            score(self.source, self.output, job[0], overwrite=overwrite)
        except OutputExists:
            assert not overwrite
            assert (({self.published} if self.published else self.pending) - {None, job}) or self.broken
        else:
            assert overwrite or self.published in (None, job)
            if overwrite or self.published != job:
                self.publish(job)

    def publish(self, job):
        self.published, self.kept, self.pending = job, self.published, {None}

    def after_kill(self, job, done):
        """Follow what was written before the end: the commit is written first to take it, and then to publish."""
        self.pending |= {job, None}
        if any(name.endswith("/job") for name in done):
            self.pending = {job}
        if done.count(COMMIT) > 1:
            self.publish(job)
            self.broken.add("view")  # it may not be shown yet
        if done.count(COMMIT) > done.count(COPY):
            self.broken.add(COPY)

    @precondition(lambda self: self.kept and not self.broken)
    @rule()
    def roll_back(self):
        daskrr.jobs.rollback(self.output)
        self.published, self.kept = self.kept, self.published
        self.fired["rollback"] += 1

    @precondition(lambda self: self.broken and self.published)
    @rule()
    def repair(self):
        verification.repair(self.output)
        self.broken = set()
        self.pending |= {None}
        self.fired["repair"] += 1

    @precondition(lambda self: self.n_rows < 200)
    @rule()
    def append_rows(self):
        array = zarr.open_array(self.source, mode="r+")
        array.resize((self.n_rows + STEP, 2))
        array[self.n_rows :] = ROWS[self.n_rows : self.n_rows + STEP]
        self.n_rows += STEP
        self.fired["append"] += 1
        if self.published is not None:
            with pytest.raises(OutputExists, match=f"which has {self.n_rows} now"):
                score(self.source, self.output, self.published[0])

    @precondition(lambda self: self.published)
    @rule(name=st.sampled_from(["mine.txt", "mine/notes.txt", "mine.zarr/zarr.json"]))
    def add_what_is_not_ours(self, name):
        path = self.output / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{len(self.theirs)} {{}}")
        self.theirs[path] = path.read_text()
        self.fired["foreign"] += 1

    # --- What is damaged ------------------------------------------------------------------------------

    @precondition(lambda self: self.published)
    @rule(number=st.integers(0, 99), place=st.floats(0, 0.99), delete=st.booleans())
    def damage_published_chunk(self, number, place, delete):
        hurt = self.hurt.setdefault(self.current, {})
        folder = self.output / ".daskrr" / "generations" / self.current
        files = [file for name in NAMES if name not in hurt for file in chunk_files(folder / name)]
        if files:
            file = files[number % len(files)]
            file.unlink() if delete else flip(file, place)
            hurt[file.parent.parent.name] = file
            self.fired["damage published"] += 1

    @rule(number=st.integers(0, 99), place=st.floats(0, 0.99), kind=st.sampled_from(["flip", "cut", "empty", "swap"]))
    def damage_record(self, number, place, kind):
        folder = self.output / ".daskrr" / "records"
        # What is broken already might be mended by the same change.
        whole = (name for name in self.records.names() if name != LEASE and name not in self.broken)
        names = [name for name in whole if twin(name) not in self.broken]
        if not names:
            return
        name = names[number % len(names)]
        path = newest(folder, name)
        if kind == "flip":
            flip(path, place)
        elif kind == "swap":
            other = newest(folder, names[(number + 1) % len(names)])
            path.write_bytes(other.read_bytes()) if other != path else flip(path, place)
        else:
            path.write_bytes(path.read_bytes()[: int(place * 60)] if kind == "cut" else b"")
        self.broken.add(name)
        self.pending |= {None}
        self.fired["damage record"] += 1
        assert self.records.damaged()

    @rule(number=st.integers(0, 99))
    def delete_record(self, number):
        names = [name for name in self.records.names() if name != LEASE and twin(name) not in self.broken]
        if names:
            name = names[number % len(names)]
            self.records.delete(name)
            self.broken.add(name)
            self.pending |= {None}
            self.fired["delete record"] += 1

    @property
    def staged(self):
        kept = Output(self.output).commit.published if self.published else []
        folders = [one for one in (self.output / ".daskrr").glob("generations/0*") if one.name not in kept]
        return sorted(file for folder in folders for name in NAMES for file in chunk_files(folder / name))

    @precondition(lambda self: self.staged)
    @rule(number=st.integers(0, 99))
    def delete_staged_chunk(self, number):
        self.staged[number % len(self.staged)].unlink()
        self.fired["delete staged"] += 1

    # --- What is seen ---------------------------------------------------------------------------------

    @invariant()
    def readers_see_what_is_published_or_nothing(self):
        Jobs.steps += 1
        if not hasattr(self, "published"):
            return
        if self.published is None:
            with pytest.raises((InvalidData, DamagedRecord)):
                daskrr.open_scores(self.output)
            return
        expected, store = reference(self.source, self.published), daskrr.open_scores(self.output)
        assert store.summary["n_rows"] == self.published[1]
        hurt = self.hurt.get(self.current, {})
        for name in NAMES:
            if name not in hurt:
                assert store[name][...].tobytes() == expected[name]
        found = verification.verify(self.output)
        for generation, files in self.hurt.items():
            if generation in Output(self.output).commit.published:
                assert len([one for one in found if f"{generation}/" in one and ": rows" in one]) == len(files)
        assert found == [] or self.broken or self.hurt

    @invariant()
    def nobody_touches_what_is_theirs(self):
        for path, text in getattr(self, "theirs", {}).items():
            assert path.read_text() == text

    @invariant()
    def status_agrees(self):
        if not hasattr(self, "published") or (self.published is None and self.broken):
            return
        if not Output(self.output).is_begun:
            assert self.published is None
            return
        found = reader.status(self.output)
        assert (found["published"] or {}).get("rows") == (self.published or (None, None))[1]
        assert len(found["generations"]) == (self.published is not None) + (self.kept is not None)
        for job in found["unfinished"]:
            # What tells how many there are may be damaged.
            assert job["tasks"] is None or job["scored"] <= job["tasks"]


def walk(monkeypatch, examples, steps):
    """Random walks; nothing of them is shrunk, since each step is a job."""
    monkeypatch.setattr(tree, "SPANS_LEFT", 0)
    monkeypatch.setattr(Jobs, "steps", 0)
    monkeypatch.setattr(Jobs, "fired", Counter())
    run_state_machine_as_test(
        Jobs,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, derandomize=True, database=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
        ),
    )  # fmt: skip


def test_jobs__agree_with_the_model(monkeypatch):
    walk(monkeypatch, 4, 12)
    assert Jobs.steps >= 30
    assert Jobs.fired["kill"]


@pytest.mark.slow
def test_jobs__agree_with_the_model_for_250_steps(monkeypatch):
    walk(monkeypatch, 15, 25)
    assert Jobs.steps >= 250
    for fault in (
        "kill",
        "append",
        "damage published",
        "damage record",
        "delete record",
        "delete staged",
        "rollback",
        "repair",
        "foreign",
    ):
        assert Jobs.fired[fault] > 0, Jobs.fired


# --- Real processes -----------------------------------------------------------------------------------

PROGRAM = """
import sys
import daskrr
from daskrr.runtime import tree
tree.SPANS_LEFT = 0
source, output, seed, overwrite = sys.argv[1:]
daskrr.score_to_zarr(
    source, output, daskrr.kernels.Gaussian(1.5), 1e-2, 20, random_state=int(seed), block_rows=25,
    overwrite=bool(int(overwrite)), progress=lambda event: print(event.stage, event.done, flush=True),
)
"""
GENEROUS = 120
# As many as a whole run tells.
LINES = 60


def started(source, output, seed, overwrite):
    command = [sys.executable, "-c", PROGRAM, str(source), str(output), str(seed), str(int(overwrite))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process):
    complaints = process.communicate(timeout=GENEROUS)[1]
    return process.returncode, complaints


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Points, and what undisturbed processes publish for each of two seeds."""
    folder = tmp_path_factory.mktemp("scene")
    source, found = stored(folder / "X", ROWS, (25, 2)), {}
    for seed in (0, 1):
        code, complaints = finished(started(source, folder / f"{seed}.zarr", seed, False))
        assert code == 0, complaints
        found[seed] = arrays_of(folder / f"{seed}.zarr")
    assert found[0] != found[1]
    return source, found


@pytest.mark.slow
@pytest.mark.parametrize("walk_number", range(1, 4))
def test_processes__that_are_killed_at_random_agree_with_the_model(walk_number, scene, tmp_path):
    (source, expected), output, chance = scene, tmp_path / "out.zarr", random.Random(walk_number)
    # What may be published now: a seed, or nothing.
    possible, kills = {None}, 0
    while kills < 2:
        seed, overwrite = chance.randrange(2), chance.random() < 0.8
        process = started(source, output, seed, overwrite)
        for _ in range(chance.randrange(LINES)):
            process.stdout.readline()
        process.kill()
        code, complaints = finished(process)
        assert code in (-9, 0, 1), complaints
        kills += code == -9
        if code == 1:
            assert not overwrite
            assert "OutputExists" in complaints
        else:
            possible = {seed} if code == 0 and overwrite else possible | {seed}
        try:
            assert arrays_of(output) in [expected[one] for one in possible - {None}]
        except InvalidData:
            assert None in possible
        if chance.random() < 0.5:
            kept = {one["generation"] for one in reader.status(output)["generations"]}
            staged = sorted(output.glob(".daskrr/generations/0*/*/c/*"))
            staged = [file for file in staged if file.parents[2].name not in kept]
            records = sorted(output.glob(".daskrr/records/*/receipts/*"))
            for file in chance.sample(staged + records, min(2, len(staged + records))):
                file.unlink()
    seed = chance.randrange(2)
    code, complaints = finished(started(source, output, seed, True))
    assert code == 0, complaints
    assert arrays_of(output) == expected[seed]
    assert verification.verify(output) == []
    assert reader.status(output)["unfinished"] == []
