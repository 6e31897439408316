"""What waits for the next pass in a file of its worker."""

import gc
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace

import distributed
import numpy as np
import pytest

import daskrr
from daskrr.errors import CheckFailed
from daskrr.kernels import Gaussian
from daskrr.runtime import on_disk
from daskrr.runtime.on_disk import OnDisk, put_aside

CONTENT = (np.arange(5.0), "kept")


def test_on_disk__gives_back_what_it_was_given_as_often_as_it_is_asked(tmp_path):
    waiting = OnDisk(CONTENT, str(tmp_path))
    for _ in range(2):
        values, word = waiting.read()
        np.testing.assert_array_equal(values, CONTENT[0])
        assert word == "kept"


def test_on_disk__that_is_damaged_is_not_taken_for_what_it_was(tmp_path):
    waiting = OnDisk(CONTENT, str(tmp_path))
    (file,) = tmp_path.iterdir()
    stored = bytearray(file.read_bytes())
    for place in range(0, len(stored), 7):
        file.write_bytes(bytes(one ^ (16 * (number == place)) for number, one in enumerate(stored)))
        with pytest.raises(CheckFailed, match=r"daskrr-.* was changed or damaged"):
            waiting.read()


def test_on_disk__is_gone_with_its_object(tmp_path):
    waiting = OnDisk(CONTENT, str(tmp_path))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    del waiting
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folders", [[], ["gone"]], ids=["no worker", "a worker that has ended"])
def test_on_disk__is_the_content_again_where_it_is_sent(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(on_disk, "_FOLDERS", [str(tmp_path / folder) for folder in folders])
    values, word = pickle.loads(pickle.dumps(OnDisk(CONTENT, str(tmp_path))))
    np.testing.assert_array_equal(values, CONTENT[0])
    assert word == "kept"


def aside(number):
    return put_aside(np.full(10, float(number)), 10**9)


def kind_place_and_sum(given):
    """Asked on the worker that was sent it, while it needs it: Dask drops such a copy soon after."""
    is_here = Path(given._path).parent == Path(distributed.get_worker().local_directory)
    return type(given).__name__, is_here, float(given.read().sum())


def test_on_disk__is_in_a_file_of_the_worker_it_is_sent_to(client):
    first, second = client.nthreads()
    here, there = (client.submit(aside, n, workers=[worker]) for n, worker in enumerate((first, second)))
    distributed.wait([here, there])
    assert client.submit(kind_place_and_sum, there, workers=[first]).result() == ("OnDisk", True, 10.0)
    np.testing.assert_array_equal(there.result(), np.ones(10))


def test_put_aside__leaves_little_and_what_no_worker_has_made(tmp_path, monkeypatch):
    assert put_aside(CONTENT, 10**9) is CONTENT
    monkeypatch.setattr(on_disk.distributed, "get_worker", lambda: SimpleNamespace(local_directory=str(tmp_path)))
    assert put_aside(CONTENT, on_disk.WORTH_A_FILE - 1) is CONTENT
    assert isinstance(put_aside(CONTENT, on_disk.WORTH_A_FILE), OnDisk)


def test_put_aside__keeps_in_memory_what_the_disk_has_no_room_for(tmp_path, monkeypatch, caplog):
    worker = SimpleNamespace(local_directory=str(tmp_path / "nowhere"))
    monkeypatch.setattr(on_disk.distributed, "get_worker", lambda: worker)
    with caplog.at_level(logging.WARNING, "daskrr"):
        assert put_aside(CONTENT, 10**9) is CONTENT
    assert "stays in memory" in caplog.text


def put_all_aside(worth=1):
    on_disk.WORTH_A_FILE = worth


def files_of(dask_worker):
    return len([*Path(dask_worker.local_directory).glob("daskrr-*")])


@pytest.mark.parametrize("sampling", ["residual", pytest.param("leverage", marks=pytest.mark.slow)])
def test_scores__have_the_same_bits_when_residuals_wait_on_disk(sampling, request):
    X = np.random.default_rng(0).standard_normal((400, 2))

    def result():
        return daskrr.leverage_scores(
            X, Gaussian(1.0), 1e-2, 30, sampling=sampling, certify=True, random_state=0, block_rows=30, progress=False
        )

    def arrays(found):
        return [one.compute() for one in (found.residual, found.scores, found.estimate, found.lower, found.upper)]

    expected = arrays(result())
    client = request.getfixturevalue("client")
    client.run(put_all_aside)
    try:
        found = result()
        assert sum(client.run(files_of).values()) > 0
        for one, other in zip(expected, arrays(found), strict=True):
            np.testing.assert_array_equal(one, other)
    finally:
        client.run(put_all_aside, on_disk.WORTH_A_FILE)
