"""What the tests of faults share: rows to score, jobs and clusters as real processes, and a digest of what comes out.

Everything that is started here is ended here, with all that it has started itself.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zarr
from strategies import as_zarr

import daskrr
from daskrr.kernels import Gaussian

GENEROUS = 120
N_LANDMARKS = 60
BLOCK_ROWS = 500
DASKRR = (sys.executable, "-m", "daskrr.apps.cli")
MODEL = (
    *("--kernel", "gaussian", "--length-scale", "1.5", "--ridge", "1e-2", "--landmarks", str(N_LANDMARKS)),
    *("--certify", "--seed", "0", "--block-rows", str(BLOCK_ROWS)),
)


def make_points(path: Path, n_rows: int = 20_000, chunk_rows: int = BLOCK_ROWS, seed: int = 0, **options: Any) -> Path:
    """A Zarr array of rows to score."""
    as_zarr(np.random.default_rng(seed).standard_normal((n_rows, 3)), (chunk_rows, 3), str(path), **options)
    return path


def score_here(points: Path, output: Path, **options: Any) -> dict[str, Any]:
    """The job of :func:`score_command` in this process."""
    settings = {"certify": True, "random_state": 0, "block_rows": BLOCK_ROWS, "progress": False} | options
    return daskrr.score_to_zarr(str(points), output, Gaussian(1.5), 1e-2, N_LANDMARKS, **settings)


def digest(output: Path) -> str:
    """Of all published arrays, to the bit, by plain paths; where or how often the job was stopped is no matter."""
    names = sorted(zarr.open_group(output, mode="r").array_keys())
    return _digest({name: zarr.open_array(output / name, mode="r") for name in names})


def digest_of_readers(output: Path) -> str:
    """Of the same arrays as our own readers find them, who do not ask for plain paths."""
    found = daskrr.open_scores(output)
    return _digest({name: found[name] for name in found.keys()})  # noqa: SIM118


def _digest(arrays: dict[str, zarr.Array]) -> str:
    found = hashlib.sha256()
    for name, array in arrays.items():
        found.update(name.encode())
        found.update(array[...].tobytes())
    return found.hexdigest()


def reference(points: Path, folder: Path, **options: Any) -> str:
    """Digest of an undisturbed run."""
    output = folder / "reference.zarr"
    score_here(points, output, **options)
    return digest(output)


def score_command(points: Path, output: Path, *more: str, program: tuple[str, ...] = DASKRR) -> list[str]:
    """The line that scores; with one worker unless ``more`` has a scheduler."""
    where = () if "--cluster" in more or "--workers" in more else ("--workers", "1")
    return [*program, "score", str(points), str(output), *MODEL, "--quiet", *where, *more]


@contextlib.contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed at the end with all its descendants, if it still runs."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    with subprocess.Popen(command, **streams) as process:
        try:
            yield process
        finally:
            for one in [*family(process.pid), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


def family(pid: int) -> list[psutil.Process]:
    """All that a process has started, directly or not, and that still runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs, and does not just wait to be buried."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def until(happened: Callable[[], Any], process: subprocess.Popen[str] | None = None, seconds: float = GENEROUS) -> Any:
    """What ``happened`` returns when it is true at last; the process has to run until then."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert process is None or process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
    return found


def ended(process: subprocess.Popen[str], code: int, seconds: float = GENEROUS) -> tuple[str, str]:
    """What a process wrote that ends by itself with this code."""
    output, complaints = process.communicate(timeout=seconds)
    assert process.returncode == code, f"exit code {process.returncode}: {complaints}"
    return output, complaints


def run(command: list[str], code: int = 0, **options: Any) -> tuple[str, str]:
    """What a command writes that ends with this code."""
    with started(command, **options) as process:
        return ended(process, code)


def everything(output: Path) -> dict[str, bytes | Path]:
    """All files and links below an output, but for the lease, whose heart beats."""
    found = [path for path in output.rglob("*") if path.is_symlink() or path.is_file()]
    found = [path for path in found if "lease.record" not in str(path)]
    return {
        path.relative_to(output).as_posix(): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in found
    }


def n_receipts(output: Path) -> int:
    """Blocks that the unfinished job of an output has scored."""
    return len(list(output.glob(".daskrr/records/*/receipts/*.record")))


def n_sums(output: Path) -> int:
    """Superblocks of all passes that the unfinished job of an output has summed."""
    return len(list(output.glob(".daskrr/records/*/*/sums/*.record")))


@dataclass(frozen=True)
class Cluster:
    """A scheduler and its workers, each a process of its own."""

    address: str
    scheduler: subprocess.Popen[str]
    workers: list[subprocess.Popen[str]]


@contextlib.contextmanager
def cluster(folder: Path, n_workers: int = 2, worker_options: tuple[str, ...] = ("--no-nanny",)) -> Iterator[Cluster]:
    """A cluster started by its commands on loopback; logs are in ``folder``."""
    file = folder / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    common = ["--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(file)]
    worker = [*dask, "worker", *common, "--nthreads", "1", "--memory-limit", "2GiB", *worker_options]
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:

        def start(name: str, command: list[str]) -> subprocess.Popen[str]:
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            return stack.enter_context(started(command, stdout=log, stderr=log, env=settings, cwd=folder))

        scheduler = start("scheduler", [*dask, "scheduler", *common, "--port", "0"])
        address = until(
            lambda: file.exists() and file.stat().st_size and json.loads(file.read_text())["address"], scheduler
        )
        yield Cluster(address, scheduler, [start(f"worker-{number}", worker) for number in range(n_workers)])
