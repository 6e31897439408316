"""Scoring jobs that are stopped at any moment, continued, published, damaged and replaced."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from processes import stop_when
from strategies import as_zarr

import daskrr
from daskrr import jobs, outputs
from daskrr.engine import passes
from daskrr.engine.lease import Lease
from daskrr.engine.records import Records
from daskrr.errors import CheckFailed, InvalidData, LeaseHeld, OutputExists, SourceChanged
from daskrr.kernels import Gaussian, Linear

GENEROUS = 120
NAMES = ("estimate", "lower", "residual", "scores", "upper")


@pytest.fixture(autouse=True)
def small_superblocks(monkeypatch):
    """Several superblocks of several blocks each, on few rows."""
    monkeypatch.setattr(passes, "SUPERBLOCK_ROWS", 100)


def data(n=450, d=3, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def score(X, output, **options):
    options = {"certify": True, "random_state": 0, "block_rows": 50, "progress": False} | options
    return daskrr.score_to_zarr(X, output, Gaussian(1.5), 1e-2, 40, **options)


def contents(output):
    """Bytes of all that is published but metadata, which tell times."""
    found = {name: zarr.open_array(output / name, mode="r")[...].tobytes() for name in NAMES}
    files = (path for path in (output / "sketch").rglob("*") if path.is_file())
    return found | {str(path.relative_to(output)): path.read_bytes() for path in files}


class Stop(BaseException):
    """The process ends here."""


def stop_at(monkeypatch, number, before):
    """End the run at its n-th durable write, before or after it; what was written so far.

    Notes of progress do not count: how many there are depends on time.
    """
    write, seen = Records.write, []

    def counted(self, name, content):
        if name.endswith("/progress"):
            return write(self, name, content)
        if before and len(seen) >= number:
            raise Stop
        found = write(self, name, content)
        seen.append(name)
        if not before and len(seen) > number:
            raise Stop
        return found

    monkeypatch.setattr(Records, "write", counted)
    return seen


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
    ("sampling", "before"),
    [
        ("residual", True),
        pytest.param("residual", False, marks=SLOW),
        pytest.param("leverage", True, marks=SLOW),
        pytest.param("leverage", False, marks=SLOW),
        pytest.param("uniform", True, marks=SLOW),
        pytest.param("uniform", False, marks=SLOW),
    ],
)
def test_score_to_zarr__goes_on_from_every_durable_write_to_the_same_bits(sampling, before, tmp_path, monkeypatch):
    X = as_zarr(data(250), (50, 3), str(tmp_path / "X"))
    writes = writes_of(monkeypatch, X, tmp_path / "reference.zarr", sampling=sampling)
    expected = contents(tmp_path / "reference.zarr")
    assert len(writes) > 10
    for number in range(len(writes)):
        output = tmp_path / f"{number}.zarr"
        stopped(monkeypatch, number, before, X, output, sampling=sampling)
        if not jobs.JobStore(output).committed:
            with pytest.raises(InvalidData, match=r"no scores at|unfinished job and no finished scores|not a finished"):
                daskrr.open_scores(output)
        score(X, output, sampling=sampling)
        assert contents(output) == expected, writes[number]
        assert sorted(path.name for path in output.iterdir()) == sorted([".daskrr", "sketch", *NAMES, "zarr.json"])


def test_score_to_zarr__does_not_do_again_what_was_recorded(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    writes = writes_of(monkeypatch, X, tmp_path / "reference.zarr")
    assert len([name for name in writes if "/fit-0/sums/" in name]) == 5
    number = [place for place, name in enumerate(writes) if "/receipts/" in name][2]
    stopped(monkeypatch, number, False, X, tmp_path / "out.zarr")
    again = writes_of(monkeypatch, X, tmp_path / "out.zarr")
    assert not [name for name in again if "/sums/" in name or name.endswith("/job")]
    assert 0 < len([name for name in again if "/receipts/" in name]) <= 6


def test_score_to_zarr__that_is_done_does_nothing(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    first = score(X, tmp_path / "out.zarr")
    monkeypatch.setattr(jobs, "score_job", lambda *_arguments: pytest.fail("it was done again"))
    assert score(X, tmp_path / "out.zarr")["sum_of_scores"] == first["sum_of_scores"]


def test_score_to_zarr__refuses_other_work_on_an_output(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    score(X, tmp_path / "out.zarr")
    for change in ({"certify": False}, {"random_state": 1}, {"sampling": "uniform"}):
        with pytest.raises(OutputExists, match="scores with another options"):
            score(X, tmp_path / "out.zarr", **change)
    with pytest.raises(OutputExists, match="scores with another kernel"):
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


def test_overwrite__leaves_the_old_scores_whole_until_the_new_ones_are(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    score(X, tmp_path / "out.zarr")
    old = contents(tmp_path / "out.zarr")
    writes = writes_of(monkeypatch, X, tmp_path / "new.zarr", random_state=1)
    decided = next(place for place, name in enumerate(writes) if name.endswith("/publish"))
    for number in (0, 3, decided - 1, decided, decided + 1):
        output = tmp_path / f"{number}.zarr"
        shutil.copytree(tmp_path / "out.zarr", output)
        stopped(monkeypatch, number, True, X, output, random_state=1, overwrite=True)
        if number <= decided:
            assert contents(output) == old
            assert daskrr.open_scores(output).summary["parameters"]["random_state"] == 0
        score(X, output, random_state=1, overwrite=True)
        assert contents(output) == contents(tmp_path / "new.zarr")


def test_overwrite__leaves_no_array_of_the_old_scores(tmp_path):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    score(X, tmp_path / "out.zarr")
    score(X, tmp_path / "out.zarr", certify=False, overwrite=True)
    assert daskrr.open_scores(tmp_path / "out.zarr").keys() == ["estimate", "residual", "scores"]
    assert outputs.verify(tmp_path / "out.zarr") == []


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


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_verify__finds_all_damage(damage, tmp_path):
    X = as_zarr(data(150), (50, 3), str(tmp_path / "X"))
    score(X, tmp_path / "out.zarr")
    assert outputs.verify(tmp_path / "out.zarr") == []
    for name in NAMES:
        for chunk in sorted(path for path in (tmp_path / "out.zarr" / name / "c").rglob("*") if path.is_file()):
            content = chunk.read_bytes()
            damage(chunk)
            found = outputs.verify(tmp_path / "out.zarr")
            assert len(found) == 1
            assert found[0].startswith(f"{name}: rows ")
            chunk.write_bytes(content)
    (tmp_path / "out.zarr" / "scores" / "zarr.json").unlink()
    assert "cannot be opened" in outputs.verify(tmp_path / "out.zarr")[1]
    with pytest.raises(InvalidData, match="no commit record"):
        outputs.verify(tmp_path / "nothing.zarr")


def test_status__tells_where_a_job_is(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    writes = writes_of(monkeypatch, X, tmp_path / "reference.zarr")
    number = [place for place, name in enumerate(writes) if "/receipts/" in name][3]
    stopped(monkeypatch, number, False, X, tmp_path / "out.zarr")
    found = outputs.status(tmp_path / "out.zarr")
    assert found["published"] is None
    (job,) = found["unfinished"]
    assert (job["rows"], job["blocks"], job["superblocks"]) == (450, 9, 5)
    assert job["summed"]["fit-0"] == 5
    assert 4 <= job["scored"] < 9
    assert job["progress"]["stage"] == "pass 2: scores"
    score(X, tmp_path / "out.zarr")
    found = outputs.status(tmp_path / "out.zarr")
    assert found["published"]["rows"] == 450
    assert found["unfinished"] == []
    json.dumps(found)


def test_score_to_zarr__scores_a_block_again_whose_chunk_is_gone(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    writes = writes_of(monkeypatch, X, tmp_path / "reference.zarr")
    number = [place for place, name in enumerate(writes) if "/receipts/" in name][4]
    stopped(monkeypatch, number, False, X, tmp_path / "out.zarr")
    (staged,) = (tmp_path / "out.zarr" / ".daskrr").glob("arrays-*")
    chunks = sorted(path for path in (staged / "scores" / "c").iterdir())
    chunks[0].unlink()
    chunks[1].write_bytes(b"")
    flip(chunks[2])
    score(X, tmp_path / "out.zarr")
    assert contents(tmp_path / "out.zarr") == contents(tmp_path / "reference.zarr")
    assert outputs.verify(tmp_path / "out.zarr") == []


def test_exchange__that_was_stopped_is_finished_by_whoever_comes_next(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    score(X, tmp_path / "out.zarr")
    writes = writes_of(monkeypatch, X, tmp_path / "new.zarr", random_state=1)
    decided = next(place for place, name in enumerate(writes) if name.endswith("/publish"))
    stopped(monkeypatch, decided, False, X, tmp_path / "out.zarr", random_state=1, overwrite=True)
    with pytest.raises(OutputExists, match="scores with another options"):
        score(X, tmp_path / "out.zarr")
    assert contents(tmp_path / "out.zarr") == contents(tmp_path / "new.zarr")
    assert outputs.verify(tmp_path / "out.zarr") == []


def test_scores__whose_commit_record_is_gone_are_none(tmp_path):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    score(X, tmp_path / "out.zarr")
    shutil.rmtree(tmp_path / "out.zarr" / ".daskrr")
    with pytest.raises(InvalidData, match="no commit record"):
        daskrr.open_scores(tmp_path / "out.zarr")
    with pytest.raises(InvalidData, match="no commit record"):
        daskrr.top_rows(tmp_path / "out.zarr")


def test_landmarks__that_come_out_otherwise_are_noticed_and_the_job_starts_over(tmp_path, monkeypatch):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    writes = writes_of(monkeypatch, X, tmp_path / "reference.zarr")
    recorded = next(place for place, name in enumerate(writes) if name.endswith("/landmarks-0"))
    stopped(monkeypatch, recorded, False, X, tmp_path / "out.zarr")
    store = jobs.JobStore(tmp_path / "out.zarr")
    (name,) = [one for one in store.records.names() if one.endswith("/landmarks-0")]
    record = store.records.read(name)
    store.records.write(name, record | {"indices": record["indices"] + 1})
    with pytest.raises(CheckFailed, match="are not those of the unfinished run"):
        score(X, tmp_path / "out.zarr")
    assert score(X, tmp_path / "out.zarr")["n_rows"] == 450


def test_versions__of_another_day_start_a_job_over(tmp_path, monkeypatch, caplog):
    X = as_zarr(data(), (50, 3), str(tmp_path / "X"))
    stopped(monkeypatch, 8, False, X, tmp_path / "out.zarr")
    monkeypatch.setattr(jobs, "versions", lambda: {"daskrr": "9.9"})
    again = writes_of(monkeypatch, X, tmp_path / "out.zarr")
    assert len([name for name in again if "/fit-0/sums/" in name]) == 5
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
        patch.setattr(jobs.JobStore, "staged", no_room)
        with pytest.raises(OSError, match="no room"):
            score(data(), tmp_path / "out.zarr")
    assert outputs.status(tmp_path / "out.zarr")["unfinished"][0]["error"] == "OSError: no room"
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
    assert outputs.status(output)["unfinished"]
    ended(started(points, output), 0)
    daskrr.score_to_zarr(str(points), tmp_path / "reference.zarr", Gaussian(1.5), 1e-2, 60, **options)
    assert contents(output) == contents(tmp_path / "reference.zarr")
    assert outputs.verify(output) == []


@pytest.mark.slow
def test_lease__keeps_a_second_job_out(tmp_path):
    points = as_zarr(data(600), (500, 3), str(tmp_path / "points.zarr")).store.root
    output = tmp_path / "out.zarr"
    lease = Lease(jobs.JobStore(output).records)
    lease.acquire()
    with lease:
        _, complaints = ended(started(points, output), 5)
        assert f"process {os.getpid()}" in complaints or str(os.getpid()) in complaints
        patient = started(points, output, "--wait", "--json")
        with pytest.raises(LeaseHeld, match="--wait"):
            score(data(600), output)
    text, _ = ended(patient, 0)
    assert json.loads(text)["n_rows"] == 600
    assert outputs.verify(output) == []
