"""Scoring jobs that are stopped at any moment, continued, published, damaged and replaced."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import zarr
from distributed.diagnostics.plugin import SchedulerPlugin
from processes import stop_when
from strategies import as_zarr
from variants import slow_but

import daskrr
from daskrr.errors import CheckFailed, InvalidData, LeaseHeld, OutputExists, SourceChanged
from daskrr.jobs import job, reader
from daskrr.jobs.verification import verify
from daskrr.jobs.writer import RecordedReceipts
from daskrr.kernels import Gaussian, Linear
from daskrr.leverage.ranking import TopRows
from daskrr.leverage.writing import Receipt
from daskrr.runtime import executors, tree
from daskrr.runtime.tree import Span
from daskrr.storage.journal import Journal
from daskrr.storage.lease import Lease
from daskrr.storage.local import Files
from daskrr.storage.output import Output
from daskrr.storage.records import Records

GENEROUS = 120
NAMES = ("estimate", "lower", "residual", "scores", "upper")


@pytest.fixture(autouse=True)
def large_spans(monkeypatch):
    """Of nine blocks one span has four, the others have one."""
    monkeypatch.setattr(tree, "SPANS_LEFT", 1)
    monkeypatch.setattr(executors, "cpu_count", lambda: 2)


def data(n=450, d=3, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def score(X, output, **options):
    options = {"certify": True, "random_state": 0, "block_rows": 50, "progress": False} | options
    return daskrr.score_to_zarr(X, output, Gaussian(1.5), 1e-2, 40, **options)


def contents(output):
    """Bytes of all that plain paths show but metadata, which tell times."""
    found = {name: zarr.open_array(output / name, mode="r")[...].tobytes() for name in NAMES}
    files = (path for path in (output / "sketch").rglob("*") if path.is_file())
    return found | {str(path.relative_to(output)): path.read_bytes() for path in files}


def bits(output):
    """Bytes of what our own readers read."""
    found = daskrr.open_scores(output)
    return {name: found[name][...].tobytes() for name in NAMES}


class Stop(BaseException):
    """The process ends here."""


def stop_at(monkeypatch, number, before):
    """End the run at its n-th durable write, before or after it; what was written so far.

    Notes of progress do not count: how many there are depends on time. Threads that still run write nothing more.
    """
    seen, over, turn = [], [], threading.RLock()

    def hooked(change, name_of):
        def counted(self, *arguments):
            name = name_of(*arguments)
            if name is None:
                return change(self, *arguments)
            with turn:
                if over or (before and len(seen) >= number):
                    over.append(name)
                    raise Stop
                found = change(self, *arguments)
                seen.append(name)
                if not before and len(seen) > number:
                    over.append(name)
                    raise Stop
                return found

        return counted

    for change in ("write", "create", "replace"):
        monkeypatch.setattr(Records, change, hooked(getattr(Records, change), lambda name, *_: told(name)))
    for change in ("write", "point", "move", "delete"):
        monkeypatch.setattr(Files, change, hooked(getattr(Files, change), lambda *_, change=change: change))
    return seen


def told(name):
    """Of a record, but for those whose number depends on time."""
    return None if name.endswith("/progress") or name == "lease" else name


def stopped(monkeypatch, number, before, X, output, **options):
    """Score until the n-th durable write."""
    with monkeypatch.context() as patch:
        stop_at(patch, number, before)
        with pytest.raises(Stop):
            score(X, output, **options)


def writes_of(monkeypatch, X, output, **options):
    """Score to the end; all durable writes."""
    with monkeypatch.context() as patch:
        writes = stop_at(patch, 10**9, before=False)
        score(X, output, **options)
    return writes


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("sampling", "before", "step"),
    [
        pytest.param("residual", True, 2, marks=SLOW),
        pytest.param("residual", False, 3, marks=SLOW),
        pytest.param("leverage", True, 3, marks=SLOW),
        pytest.param("leverage", False, 3, marks=SLOW),
    ],
)
def test_score_to_zarr__goes_on_from_durable_writes_to_the_same_bits(sampling, before, step, tmp_path, monkeypatch):
    X = as_zarr(data(250), (50, 3), str(tmp_path / "X"))
    writes = writes_of(monkeypatch, X, tmp_path / "reference.zarr", sampling=sampling)
    expected = contents(tmp_path / "reference.zarr")
    assert len(writes) > 10
    for number in range(0, len(writes), step):
        output = tmp_path / f"{number}.zarr"
        stopped(monkeypatch, number, before, X, output, sampling=sampling)
        if not Output(output).committed:
            with pytest.raises(InvalidData, match=r"no scores at|unfinished job and no finished scores"):
                daskrr.open_scores(output)
        score(X, output, sampling=sampling)
        assert contents(output) == expected, writes[number]
        assert sorted(path.name for path in output.iterdir()) == sorted([".daskrr", "sketch", *NAMES, "zarr.json"])
        assert verify(output) == []


def test_receipts__of_an_attempt_are_made_once_and_of_another_anew(tmp_path):
    """A worker may die between the end of a task and the moment at which the scheduler hears of it."""
    journal, settled, span = Journal(Records(tmp_path), "0001"), [], Span(0, 0, 100, 50)
    staged = SimpleNamespace(settle=settled.extend)

    def receipts():
        for start in (0, 50):
            walked.append(start)
            values = np.ones(1)
            top = TopRows(np.array([start]), values, values, values, by="scores")
            yield Receipt(start, [1.0], top, None, [0], np.zeros((2, 1), np.int32), {}, None)

    for attempt, expected in (("first", [0, 50]), ("first", []), ("second", [0, 50])):
        walked = []
        RecordedReceipts(journal, staged, attempt, ("fit-0",))(span, receipts())
        assert walked == expected
    assert settled == [0, 50, 0, 50]
    assert [one["start"] for one in journal.read("receipts", 0)["blocks"]] == [0, 50]


def test_score_to_zarr__does_not_do_again_what_was_recorded(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    writes = writes_of(monkeypatch, X, tmp_path / "reference.zarr")
    assert len([name for name in writes if "/fit-0/sums/" in name]) == 6
    number = [place for place, name in enumerate(writes) if "/receipts/" in name][2]
    stopped(monkeypatch, number, False, X, tmp_path / "out.zarr")
    again = writes_of(monkeypatch, X, tmp_path / "out.zarr")
    assert not [name for name in again if "/sums/" in name or name.endswith("/job")]
    assert 0 < len([name for name in again if "/receipts/" in name]) <= 4


@pytest.mark.parametrize("n_rows", [pytest.param(450, marks=SLOW), 430])
@pytest.mark.parametrize("lost", slow_but(["nothing", "sums", "kept", "base-fit-0-0.record", "summed.record"], "sums"))
def test_score_to_zarr__deletes_sums_of_scored_rows_and_goes_on_to_the_same_bits(n_rows, lost, tmp_path, monkeypatch):
    """From what is left of pass 1, or, where that was lost since, from the rows again."""
    X, output = as_zarr(data(n_rows), (50, 3), str(tmp_path / "X")), tmp_path / "out.zarr"
    score(X, tmp_path / "reference.zarr")
    writes = writes_of(monkeypatch, X, tmp_path / "other.zarr")
    number = [place for place, name in enumerate(writes) if "/receipts/" in name][4]
    stopped(monkeypatch, number, False, X, output)
    (job,) = reader.status(output)["unfinished"]
    records = [path for path in output.rglob("*.record") if "/fit-0/sums/" in path.as_posix()]
    assert len(records) < job["tasks"] - 3
    assert job["summed"]["fit-0"] == job["tasks"]
    for path in [path for path in output.rglob("*.record") if lost in path.parts]:
        path.unlink()
    score(X, output)
    for name in ("estimate", "lower", "upper"):
        expected = daskrr.open_scores(tmp_path / "reference.zarr")[name][...]
        np.testing.assert_array_equal(daskrr.open_scores(output)[name][...], expected)
    assert verify(output) == []


def test_score_to_zarr__that_is_done_does_nothing(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    first = score(X, tmp_path / "out.zarr")
    monkeypatch.setattr(job, "compute", lambda *_arguments: pytest.fail("it was done again"))
    assert score(X, tmp_path / "out.zarr")["sum_of_scores"] == first["sum_of_scores"]


def test_score_to_zarr__refuses_other_work_on_an_output(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    score(X, tmp_path / "out.zarr")
    for change, told in (
        ({"certify": False}, r"certify\. "),
        ({"random_state": 1}, r"random_state \(0, not 1\)\. "),
        ({"sampling": "uniform"}, r"sampling\. "),
    ):
        with pytest.raises(OutputExists, match=f"scores that differ in {told}"):
            score(X, tmp_path / "out.zarr", **change)
    for ridge, landmarks, told in (
        ([1e-2], 40, r"ridge \(0\.01, not \[0\.01\]\)\. "),
        (1e-3, 30, r"landmarks \(40, not 30\), ridge \(0\.01, not 0\.001\)\. "),
    ):
        with pytest.raises(OutputExists, match=f"scores that differ in {told}"):
            daskrr.score_to_zarr(
                X, tmp_path / "out.zarr", Gaussian(1.5), ridge, landmarks,
                certify=True, random_state=0, block_rows=50, progress=False,
            )  # fmt: skip
    with pytest.raises(OutputExists, match="scores that differ in kernel"):
        daskrr.score_to_zarr(X, tmp_path / "out.zarr", Linear(), 1e-2, 40, progress=False)
    X[7] = 0.0
    with pytest.raises(OutputExists, match="it has changed since"):
        score(X, tmp_path / "out.zarr")
    X.resize((500, 3))
    X[450:] = 1.0
    with pytest.raises(OutputExists, match=r"scores of 450 rows of .* which has 500 now"):
        score(X, tmp_path / "out.zarr")
    assert score(X, tmp_path / "out.zarr", overwrite=True)["n_rows"] == 500


def test_score_to_zarr__refuses_input_that_changed_while_it_was_stopped(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    stopped(monkeypatch, 8, False, X, tmp_path / "out.zarr")
    X[7] = 0.0
    with pytest.raises(OutputExists, match=r"unfinished job: scores of .* as it was, and it has changed since"):
        score(X, tmp_path / "out.zarr")
    score(X, tmp_path / "out.zarr", overwrite=True)
    score(X, tmp_path / "other.zarr")
    assert contents(tmp_path / "out.zarr") == contents(tmp_path / "other.zarr")


def test_score_to_zarr__notices_input_that_changes_meanwhile(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    write = Records.write

    def meddled(self, name, content):
        if "/receipts/0" in name:
            X[449] = 1.0
        return write(self, name, content)

    monkeypatch.setattr(Records, "write", meddled)
    with pytest.raises(SourceChanged, match="changed"):
        score(X, tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()


@pytest.mark.slow
@pytest.mark.parametrize("follows_links", [False, True])
def test_overwrite__leaves_the_old_scores_whole_until_the_new_ones_are(follows_links, tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    score(X, tmp_path / "out.zarr")
    old = bits(tmp_path / "out.zarr")
    shutil.copytree(tmp_path / "out.zarr", tmp_path / "new.zarr", symlinks=not follows_links)
    writes = writes_of(monkeypatch, X, tmp_path / "new.zarr", random_state=1, overwrite=True)
    decided = [place for place, name in enumerate(writes) if name == "commit"][-1]
    more = (3, decided + 2) if follows_links else ()
    for number in (0, decided - 1, decided, decided + 1, *more):
        output = tmp_path / f"{number}.zarr"
        shutil.copytree(tmp_path / "out.zarr", output, symlinks=not follows_links)
        stopped(monkeypatch, number, True, X, output, random_state=1, overwrite=True)
        assert bits(output) == (old if number <= decided else bits(tmp_path / "new.zarr"))
        score(X, output, random_state=1, overwrite=True)
        assert contents(output) == contents(tmp_path / "new.zarr")
        assert verify(output) == []


@pytest.mark.slow
def test_overwrite__leaves_no_array_of_the_old_scores(tmp_path):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    score(X, tmp_path / "out.zarr")
    score(X, tmp_path / "out.zarr", certify=False, overwrite=True)
    assert daskrr.open_scores(tmp_path / "out.zarr").keys() == ["estimate", "residual", "scores"]
    assert verify(tmp_path / "out.zarr") == []


def test_numpy_input__is_told_apart_by_its_content(tmp_path, monkeypatch):
    X = data()
    stopped(monkeypatch, 8, False, X, tmp_path / "out.zarr")
    assert score(X, tmp_path / "out.zarr")["n_rows"] == 450
    with pytest.raises(OutputExists, match="it has changed since"):
        score(X + 1.0, tmp_path / "out.zarr")


def test_open_scores__shows_an_unfinished_job_only_if_asked(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    writes = writes_of(monkeypatch, X, tmp_path / "reference.zarr")
    number = [place for place, name in enumerate(writes) if "/receipts/" in name][3]
    stopped(monkeypatch, number, False, X, tmp_path / "out.zarr")
    with pytest.raises(InvalidData, match="unfinished job and no finished scores"):
        daskrr.open_scores(tmp_path / "out.zarr")
    partial, whole = (
        daskrr.open_scores(tmp_path / name, allow_partial=True) for name in ("out.zarr", "reference.zarr")
    )  # fmt: skip
    assert whole.complete.all()
    assert 50 * 4 <= partial.complete.sum() < 450
    complete = partial.complete
    np.testing.assert_array_equal(partial["scores"][:][complete], whole["scores"][:][complete])
    assert whole.summary["n_rows"] == 450
    assert daskrr.open_scores(tmp_path / "reference.zarr").complete is None
    assert whole.keys() == list(NAMES)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def test_status__tells_where_a_job_is(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    writes = writes_of(monkeypatch, X, tmp_path / "reference.zarr")
    number = [place for place, name in enumerate(writes) if "/receipts/" in name][3]
    stopped(monkeypatch, number, False, X, tmp_path / "out.zarr")
    found = reader.status(tmp_path / "out.zarr")
    assert found["published"] is None
    (job,) = found["unfinished"]
    assert (job["rows"], job["tasks"]) == (450, 6)
    assert job["summed"]["fit-0"] == 6
    assert 4 <= job["scored"] < 6
    assert job["progress"]["stage"] == "pass 2: scores"
    score(X, tmp_path / "out.zarr")
    found = reader.status(tmp_path / "out.zarr")
    assert found["published"]["rows"] == 450
    assert found["unfinished"] == []
    json.dumps(found)


@pytest.mark.parametrize(
    ("name", "found"),
    [("nothing", "where nothing is"), ("X", "which daskrr has not written"), ("file", "has not written")],
)
def test_status__of_what_is_no_job_is_refused(name, found, tmp_path):
    as_zarr(data(), (50, 3), str(tmp_path / "X"))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidData, match=rf"there is no job at .*{name}, .*{found}\. Name what a job writes"):
        reader.status(tmp_path / name)


def test_score_to_zarr__scores_a_block_again_whose_chunk_is_gone(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    writes = writes_of(monkeypatch, X, tmp_path / "reference.zarr")
    number = [place for place, name in enumerate(writes) if "/receipts/" in name][4]
    stopped(monkeypatch, number, False, X, tmp_path / "out.zarr")
    (staged,) = (tmp_path / "out.zarr" / ".daskrr").glob("generations/0*")
    chunks = sorted(path for path in (staged / "scores" / "c").iterdir())
    chunks[0].unlink()
    chunks[1].write_bytes(b"")
    flip(chunks[2])
    score(X, tmp_path / "out.zarr")
    assert contents(tmp_path / "out.zarr") == contents(tmp_path / "reference.zarr")
    assert verify(tmp_path / "out.zarr") == []


def test_view__that_was_left_behind_is_put_right_by_whoever_comes_next(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    score(X, tmp_path / "out.zarr")
    old = contents(tmp_path / "out.zarr")
    shutil.copytree(tmp_path / "out.zarr", tmp_path / "new.zarr", symlinks=True)
    writes = writes_of(monkeypatch, X, tmp_path / "new.zarr", random_state=1, overwrite=True)
    decided = [place for place, name in enumerate(writes) if name == "commit"][-1]
    stopped(monkeypatch, decided, False, X, tmp_path / "out.zarr", random_state=1, overwrite=True)
    assert daskrr.open_scores(tmp_path / "out.zarr").summary["parameters"]["random_state"] == 1
    assert contents(tmp_path / "out.zarr") == old
    assert score(X, tmp_path / "out.zarr", random_state=1)["parameters"]["random_state"] == 1
    assert contents(tmp_path / "out.zarr") == contents(tmp_path / "new.zarr")
    assert verify(tmp_path / "out.zarr") == []


def test_scores__without_their_commit_are_none(tmp_path):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    score(X, tmp_path / "out.zarr")
    shutil.copytree(tmp_path / "out.zarr", tmp_path / "copy.zarr", ignore=lambda *_: [".daskrr"])
    assert zarr.open_group(tmp_path / "copy.zarr", mode="r")["scores"].shape == (450,)
    for read in (daskrr.open_scores, daskrr.jobs.top_rows):
        with pytest.raises(InvalidData, match="are no scores at"):
            read(tmp_path / "copy.zarr")


@pytest.mark.slow
def test_landmarks__that_come_out_otherwise_are_noticed_and_the_job_starts_over(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    writes = writes_of(monkeypatch, X, tmp_path / "reference.zarr")
    recorded = next(place for place, name in enumerate(writes) if name.endswith("/landmarks-0"))
    stopped(monkeypatch, recorded, False, X, tmp_path / "out.zarr")
    store = Output(tmp_path / "out.zarr")
    (name,) = [one for one in store.records.names() if one.endswith("/landmarks-0")]
    record = store.records.read(name)
    store.records.write(name, record | {"indices": record["indices"] + 1})
    with pytest.raises(CheckFailed, match="are not those of the unfinished run"):
        score(X, tmp_path / "out.zarr")
    assert score(X, tmp_path / "out.zarr")["n_rows"] == 450


def test_versions__of_another_day_start_a_job_over(tmp_path, monkeypatch, caplog):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    stopped(monkeypatch, 8, False, X, tmp_path / "out.zarr")
    monkeypatch.setattr(job, "versions", lambda: {"daskrr": "9.9"})
    again = writes_of(monkeypatch, X, tmp_path / "out.zarr")
    assert len([name for name in again if "/fit-0/sums/" in name]) == 6
    assert "starts over with" in caplog.text


def no_room(*_arguments):
    raise OSError("no room")


def test_failures__that_will_not_pass_leave_nothing_and_others_are_told(tmp_path, monkeypatch):
    bad = data()
    bad[13] = np.nan
    with pytest.raises(InvalidData, match="13"):
        score(bad, tmp_path / "out.zarr")
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(Output, "staged", no_room)
        with pytest.raises(OSError, match="no room"):
            score(data(), tmp_path / "out.zarr")
    assert reader.status(tmp_path / "out.zarr")["unfinished"][0]["error"] == "OSError: no room"
    assert score(data(), tmp_path / "out.zarr")["n_rows"] == 450


# --- Real processes -----------------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "daskrr.apps.cli", "score"]
MODEL = ["--kernel", "gaussian", "--length-scale", "1.5", "--ridge", "1e-2", "--landmarks", "60", "--seed", "0"]


def started(points, output, *more):
    command = [*COMMAND, str(points), str(output), *MODEL, "--certify", "--workers", "1", "--block-rows", "500", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process, code):
    output, complaints = process.communicate(timeout=GENEROUS)
    assert process.returncode == code, complaints
    return output, complaints


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, -9),
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
    ],
)
@pytest.mark.slow
def test_signals__stop_a_job_that_goes_on_to_the_same_bits(number, code, tmp_path):
    points = as_zarr(data(60_000), (500, 3), str(tmp_path / "points.zarr")).store.root
    output, options = tmp_path / "out.zarr", {"certify": True, "random_state": 0, "block_rows": 500, "progress": False}
    stop_when(
        lambda: len(list(output.glob(".daskrr/records/*/receipts/*"))) > 3,
        lambda: started(points, output),
        output,
        number,
        code,
    )
    assert not (output / "zarr.json").exists()
    assert reader.status(output)["unfinished"]
    ended(started(points, output), 0)
    daskrr.score_to_zarr(str(points), tmp_path / "reference.zarr", Gaussian(1.5), 1e-2, 60, **options)
    assert contents(output) == contents(tmp_path / "reference.zarr")
    assert verify(output) == []


@pytest.mark.slow
def test_lease__keeps_a_second_job_out(tmp_path):
    points = as_zarr(data(600), (500, 3), str(tmp_path / "points.zarr")).store.root
    output = tmp_path / "out.zarr"
    lease = Lease(Output(output).records)
    lease.acquire()
    with lease:
        _, complaints = ended(started(points, output), 5)
        assert f"process {os.getpid()}" in complaints or str(os.getpid()) in complaints
        patient = started(points, output, "--wait", "--json")
        with pytest.raises(LeaseHeld, match="--wait"):
            score(data(600), output)
    text, _ = ended(patient, 0)
    assert json.loads(text)["n_rows"] == 600
    assert verify(output) == []


class Remembered(SchedulerPlugin):
    """Whenever a task of pass 2 ends, the names of all tasks of its run that the scheduler knows."""

    name = "remembered"

    def __init__(self, scheduler):
        self.scheduler, self.names = scheduler, []

    def transition(self, key, start, finish, *args, **kwargs):
        name, _, rest = str(key).partition("-span-")[0].rpartition("-store")[0].rpartition("-")
        if name == "score-rows" and finish == "memory":
            known = [str(one).partition(f"-{rest}") for one in self.scheduler.tasks]
            self.names.append({name for name, found, _ in known if found})


@pytest.mark.parametrize("sampling", ["residual", "uniform"])
def test_pass_2__needs_no_result_of_pass_1_that_a_worker_has(sampling, client, tmp_path):
    """What pass 1 has left for it is forgotten as it goes: to make that again would mean pass 1 over these rows."""
    as_zarr(data(), (50, 3), str(tmp_path / "x.zarr"))
    scheduler = client.cluster.scheduler
    plugin = Remembered(scheduler)
    scheduler.add_plugin(plugin)
    try:
        score(tmp_path / "x.zarr", tmp_path / "out.zarr", sampling=sampling)
    finally:
        scheduler.remove_plugin(plugin.name)
    assert len(plugin.names) >= 4
    assert plugin.names[-1] == {"fetch-factor", "score-rows"}
