"""Jobs that are run, killed, continued, damaged, deleted, overwritten and looked at in any order, against a model."""

import random
import re
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
from daskrr import jobstore, outputs
from daskrr.engine import passes
from daskrr.engine.places import FolderPlace
from daskrr.engine.records import Records
from daskrr.errors import CheckFailed, DamagedRecord, InvalidData, OutputExists
from daskrr.kernels import Gaussian

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
    """Ends a run before or after its n-th durable write: of a record, a published file, or a folder that is moved."""

    def __init__(self, patch, number, before):
        self.number, self.before, self.done = number, before, []
        self.over = False
        for kind, name in ((Records, "write"), (FolderPlace, "write"), (FolderPlace, "move")):
            patch.setattr(kind, name, self.hooked(getattr(kind, name)))

    def hooked(self, write):
        def counted(itself, name, content):
            if name.endswith("/progress"):
                return write(itself, name, content)
            if self.over or (self.before and len(self.done) >= self.number):
                self.end()
            found = write(itself, name, content)
            self.done.append(name)
            if not self.before and len(self.done) > self.number:
                self.end()
            return found

        return counted

    def end(self):
        """Threads that still run write nothing more either."""
        self.over = True
        raise Stop


class Jobs(RuleBasedStateMachine):
    """The model knows what is published, what may be unfinished, and what was damaged.

    A job is a seed and a number of rows. ``deciding`` is one that was stopped while it took the place of another,
    ``orphan`` one whose commit record was deleted.
    """

    steps = 0
    fired: ClassVar = Counter()

    @initialize()
    def begin(self):
        self.folder = Path(tempfile.mkdtemp(dir=FAST))
        self.output, self.n_rows = self.folder / "out.zarr", START
        self.source = stored(self.folder / "X", ROWS[:START], (25, 2))
        self.published, self.deciding, self.pending = None, None, {None}
        self.orphan, self.hurt, self.broken = None, set(), set()

    def teardown(self):
        shutil.rmtree(self.folder)

    @property
    def records(self):
        return Records(self.output / ".daskrr" / "records")

    # --- What is done ---------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 1), overwrite=st.booleans())
    def run(self, seed, overwrite):
        self.attempt((seed, self.n_rows), overwrite)

    @rule(seed=st.integers(0, 1), overwrite=st.booleans(), number=st.integers(0, 30), before=st.booleans())
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
        except DamagedRecord as error:
            assert self.broken
            self.follow_advice(str(error))
        except CheckFailed as error:
            # A record that others depend on was deleted: the job is forgotten, and the next run starts over.
            assert "is gone" in str(error)  # noqa: PT017
            assert self.fired["delete record"]
            self.pending = {None}
        except OutputExists:
            assert not overwrite
            assert self.may_refuse(job)
        else:
            assert overwrite or not self.must_refuse(job)
            if overwrite or self.published != job:
                self.hurt, self.broken = set(), set()
                self.published, self.deciding, self.pending = job, None, {None}

    def may_refuse(self, job):
        known = {self.published} if self.published else self.pending
        return bool((known | {self.deciding}) - {None, job})

    def must_refuse(self, job):
        return self.published not in (None, job) and self.deciding is None

    def after_kill(self, job, done):
        """Follow what was written before the end; a job may first have finished what another had decided."""
        self.pending |= {job, None}
        for name in done:
            if name.endswith("/job"):
                self.pending = {job}
            elif name.endswith("/publish"):
                self.deciding = job
            elif name == jobstore.COMMIT:
                self.published, self.deciding, self.hurt = self.deciding, None, set()

    def follow_advice(self, complaint):
        """Delete the record that is damaged, as the message says."""
        name = re.search(r"the record '(.*?)' of .* is damaged: .*delete it and run again", complaint)[1]
        self.records.delete(name)
        self.fired["delete record"] += 1
        self.broken.discard(name)
        if name == jobstore.COMMIT:
            self.published, self.orphan = None, self.published
        self.pending |= {None}

    @precondition(lambda self: self.n_rows < 200)
    @rule()
    def append_rows(self):
        array = zarr.open_array(self.source, mode="r+")
        array.resize((self.n_rows + STEP, 2))
        array[self.n_rows :] = ROWS[self.n_rows : self.n_rows + STEP]
        self.n_rows += STEP
        self.fired["append"] += 1
        if self.published is not None and not self.broken and self.deciding is None:
            with pytest.raises(OutputExists, match=f"which has {self.n_rows} now"):
                score(self.source, self.output, self.published[0])

    # --- What is damaged ------------------------------------------------------------------------------

    @precondition(lambda self: self.published and self.deciding is None)
    @rule(number=st.integers(0, 99), place=st.floats(0, 0.99), delete=st.booleans())
    def damage_published_chunk(self, number, place, delete):
        files = [file for name in NAMES for file in chunk_files(self.output / name) if file not in self.hurt]
        if files:
            file = files[number % len(files)]
            file.unlink() if delete else flip(file, place)
            self.hurt.add(file)
            self.fired["damage published"] += 1

    @precondition(lambda self: self.deciding is None and not self.broken)
    @rule(number=st.integers(0, 99), place=st.floats(0, 0.99))
    def damage_record(self, number, place):
        names = [name for name in self.records.names() if name != jobstore.LEASE]
        if names:
            name = names[number % len(names)]
            flip(self.output / ".daskrr" / "records" / f"{name}.record", place)
            self.broken.add(name)
            self.fired["damage record"] += 1

    @precondition(lambda self: self.deciding is None and not self.broken)
    @rule(number=st.integers(0, 99))
    def delete_record(self, number):
        names = self.records.names()
        if names:
            name = names[number % len(names)]
            self.records.delete(name)
            self.fired["delete record"] += 1
            if name == jobstore.COMMIT:
                self.published, self.orphan = None, self.published
            self.pending |= {None}

    @property
    def staged(self):
        folders = (self.output / ".daskrr").glob("arrays-*")
        return sorted(file for folder in folders for name in NAMES for file in chunk_files(folder / name))

    @precondition(lambda self: self.staged and self.deciding is None)
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
        if jobstore.COMMIT in self.broken:
            with pytest.raises(DamagedRecord):
                daskrr.open_scores(self.output)
            return
        if self.deciding is not None:
            try:
                found = arrays_of(self.output)
            except InvalidData:
                return
            except ValueError:
                assert self.hurt
                return
            known = [reference(self.source, job) for job in (self.deciding, self.published) if job]
            assert found in known
        elif self.published is not None:
            self.check_arrays(self.published)
            assert len(outputs.verify(self.output)) == len(self.hurt)
        elif self.orphan is not None and not (self.output / ".daskrr").exists():
            # Nothing is left that tells it from a result that was stored as a whole.
            self.check_arrays(self.orphan)
        else:
            with pytest.raises(InvalidData):
                daskrr.open_scores(self.output)

    def check_arrays(self, job):
        expected, store = reference(self.source, job), daskrr.open_scores(self.output)
        assert store.summary["n_rows"] == job[1]
        for name in NAMES:
            if not any(file.is_relative_to(self.output / name) for file in self.hurt):
                assert store[name][...].tobytes() == expected[name]

    @invariant()
    def status_agrees(self):
        if not hasattr(self, "published") or self.broken or self.deciding is not None:
            return
        found = outputs.status(self.output)
        assert (found["published"] or {}).get("rows") == (self.published or (None, None))[1]
        assert found["lease"] is None or not found["lease"].get("alive", False)
        for job in found["unfinished"]:
            assert job["scored"] <= job["blocks"]


def walk(monkeypatch, examples, steps):
    """Random walks; nothing of them is shrunk, since each step is a job."""
    monkeypatch.setattr(passes, "SUPERBLOCK_ROWS", 50)
    monkeypatch.setattr(jobstore, "EXCHANGE_SECONDS", 0.1)
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
    walk(monkeypatch, 8, 12)
    assert Jobs.steps >= 60
    assert Jobs.fired["kill"] > 2


@pytest.mark.slow
def test_jobs__agree_with_the_model_for_500_steps(monkeypatch):
    walk(monkeypatch, 30, 25)
    assert Jobs.steps >= 500
    for fault in ("kill", "append", "damage published", "damage record", "delete record", "delete staged"):
        assert Jobs.fired[fault] > 0, Jobs.fired


# --- Real processes -----------------------------------------------------------------------------------

PROGRAM = """
import sys
import daskrr
from daskrr.engine import passes
passes.SUPERBLOCK_ROWS = 100
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
@pytest.mark.parametrize("walk_number", range(10))
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
            # Nothing is published yet, or the job was killed while it exchanged two generations.
            assert None in possible or code == -9
        if chance.random() < 0.5:
            staged = sorted(output.glob(".daskrr/arrays-*/*/c/*"))
            records = sorted(output.glob(".daskrr/records/*/receipts/*"))
            for file in chance.sample(staged + records, min(2, len(staged + records))):
                file.unlink()
    seed = chance.randrange(2)
    code, complaints = finished(started(source, output, seed, True))
    assert code == 0, complaints
    assert arrays_of(output) == expected[seed]
    assert outputs.verify(output) == []
    assert outputs.status(output)["unfinished"] == []
