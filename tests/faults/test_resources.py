"""Jobs that run out of disk or would run out of memory."""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster
from scenes import GENEROUS, cluster, digest, make_points, reference, run, score_command, score_here, until

import daskrr
from daskrr.errors import DoesNotFit, StoreFailed
from daskrr.jobs import verification
from daskrr.kernels import Gaussian

# --- Row 11: a full disk ------------------------------------------------------------------------------


class SmallDisk:
    """A file system of a few pages that can be made larger."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a file system of our own cannot be mounted here")

    def resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.path)], check=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    found = SmallDisk(tmp_path / "disk")
    yield found
    found.close()


def assert_tells_what_to_do(complaint: str, output: Path) -> None:
    assert str(output) in complaint
    assert re.search(r"[1-9][\d,]* bytes", complaint), complaint
    assert "No space left on device" in complaint
    assert "Make room" in complaint


SIZES = ("4k", "8k", "16k", "32k", "64k", "160k", "400k", "600k")


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_full_disk__is_told_and_the_job_goes_on_when_there_is_room(size: str, disk: SmallDisk, tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr", n_rows=10_000)
    expected = reference(points, tmp_path)
    output = disk.path / "out.zarr"
    disk.resize(size)
    with pytest.raises(StoreFailed) as caught:
        score_here(points, output)
    assert_tells_what_to_do(str(caught.value), output)
    assert not (output / "zarr.json").exists()
    disk.resize("16m")
    score_here(points, output)
    assert digest(output) == expected
    assert verification.verify(output) == []


@pytest.mark.slow
def test_full_disk__is_told_by_the_command_and_the_job_goes_on(disk: SmallDisk, tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr", n_rows=10_000)
    output = disk.path / "out.zarr"
    disk.resize("300k")
    _, complaints = run(score_command(points, output), 3)
    assert_tells_what_to_do(complaints, output)
    assert "Traceback" not in complaints
    disk.resize("16m")
    run(score_command(points, output))
    assert digest(output) == reference(points, tmp_path)


# --- Row 12: memory -----------------------------------------------------------------------------------


def score_with_1000(points: Path, output: Path) -> dict[str, Any]:
    return daskrr.score_to_zarr(str(points), output, Gaussian(1.5), 1e-2, 1000, certify=True, progress=False)


def limit_for_1000(points: Path) -> int:
    """What the plan asks of a worker."""
    return daskrr.plan(str(points), Gaussian(1.5), 1e-2, 1000, certify=True, workers=1).memory_limit


def test_memory_limit__half_of_what_is_needed_is_refused_within_a_second(tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr")
    needed = limit_for_1000(points)
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with LocalCluster(memory_limit=needed // 2, **options) as small, Client(small):
        # Of the processor, since other programs may have it meanwhile.
        began = time.process_time()
        with pytest.raises(DoesNotFit, match=rf"limit of {needed / 2**20:.0f} MiB .* has {needed / 2**21:.0f} MiB"):
            score_with_1000(points, tmp_path / "out.zarr")
        assert time.process_time() - began < 1.0
    assert not (tmp_path / "out.zarr").exists()


ALARMS = re.compile(r"pausing|exceeded|high memory|restarting|spill", re.IGNORECASE)


@pytest.mark.slow
def test_memory_limit__of_what_is_needed_is_enough(tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr", n_rows=60_000, chunk_rows=5000)
    needed = limit_for_1000(points)
    log = tmp_path / "worker-0.log"
    options = ("--nanny", "--memory-limit", str(needed))

    def hold() -> None:
        held = np.ones(needed // 8)
        time.sleep(GENEROUS)
        del held

    with cluster(tmp_path, n_workers=1, worker_options=options) as there, Client(there.address) as client:
        client.wait_for_workers(1, timeout=GENEROUS)
        before = list(client.nthreads())
        assert score_with_1000(points, tmp_path / "out.zarr")["n_rows"] == 60_000
        assert list(client.nthreads()) == before
        assert not ALARMS.findall(log.read_text())
        greedy = client.submit(hold)
        until(lambda: ALARMS.search(log.read_text()))
        greedy.cancel()
    assert verification.verify(tmp_path / "out.zarr") == []
