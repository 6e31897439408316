"""What the benchmarks share: machine, clusters, stores of random rows, tables and reports."""

import argparse
import json
import multiprocessing
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dask
import numpy as np
import psutil
import zarr
from distributed import Client
from threadpoolctl import threadpool_limits
from zarr.codecs import BloscCodec, Crc32cCodec

from daskrr.apps.clusters import local_cluster

MIB = 2**20
WORKERS = 2
CHUNK_BYTES = 8 * MIB
PACKAGES = ("daskrr", "numpy", "scipy", "dask", "distributed", "zarr", "scikit-learn", "dppy")


def arguments(
    question: str, description: str, parts: Sequence[str] = (), **whole_numbers: tuple[int, str]
) -> argparse.Namespace:
    """Read ``--quick``, ``--output`` and whole numbers, given by their defaults and help, from the command line.

    A benchmark of several parts has ``--part``, which may be given more than once; all of them otherwise.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.bench_{question}", description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes that take seconds; nothing can fail")
    default = Path(__file__).parent / "results" / f"bench_{question}.json"
    parser.add_argument("--output", type=Path, default=default, metavar="FILE", help="JSON report to write")
    if parts:
        parser.add_argument("--part", choices=parts, action="append", help="run this part (default: all)")
    for name, (usual, text) in whole_numbers.items():
        parser.add_argument(f"--{name}", type=int, default=usual, metavar="N", help=f"{text} (default: {usual})")
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """Describe the processor, the cores that this process may use, and the memory."""
    return {
        "cpu": _found(r"model name\s*:\s*(.+)", "/proc/cpuinfo") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": 1024 * int(_found(r"MemTotal:\s*(\d+)", "/proc/meminfo") or 0),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
    }


def _found(pattern: str, path: str) -> str | None:
    match = re.search(pattern, Path(path).read_text())
    return match[1] if match else None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def report(question: str, seed: int, quick: bool, parameters: dict[str, Any]) -> dict[str, Any]:
    """Start a report with everything but its results; call it before the measurements."""
    return {
        "benchmark": question,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "seed": seed,
        "machine": machine(),
        "versions": versions(),
        "parameters": parameters,
    }


def write_report(path: Path, content: dict[str, Any]) -> None:
    """Write a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"\nreport: {path}")


def print_table(title: str, rows: Sequence[dict[str, str]]) -> None:
    """Print rows of texts under the names of their columns."""
    names = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in names]
    print(f"\n{title}")
    for line in [dict(zip(names, names, strict=True)), *rows]:
        print("  ".join(line[name].rjust(width) for name, width in zip(names, widths, strict=True)))


def print_checks(checks: dict[str, bool], quick: bool) -> None:
    """Print PASS or FAIL of every requirement; small sizes are not judged."""
    for name, passed in checks.items():
        print(f"{name}: {'not judged' if quick else 'PASS' if passed else 'FAIL'}")


@contextmanager
def processes(number: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """A ``map`` that works in ``number`` processes, each with one thread for its algebra; in this one if it is 1."""
    if number == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(number, context, initializer=threadpool_limits, initargs=(1,)) as pool:
        yield pool.map


def computing_on(device: str = "cpu") -> AbstractContextManager[Any]:
    """Have runs compute there meanwhile: on processors, also where there is a GPU, unless that is what is measured."""
    return dask.config.set({"daskrr.device": device})


@contextmanager
def cluster(memory_limit: int | None = None, workers: int | None = WORKERS, device: str = "cpu") -> Iterator[Client]:
    """Start a fresh cluster of single-threaded processes on the loopback interface."""
    with computing_on(device), local_cluster(workers, memory_limit) as started, Client(started) as client:
        yield client


@contextmanager
def others_load() -> Iterator[dict[str, float]]:
    """Measure which share of the cores other processes take meanwhile, under ``"others"``."""
    found: dict[str, float] = {}
    began, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
    yield found
    others = (_busy_seconds() - busy) - (_own_seconds() - own)
    found["others"] = max(0.0, others / (time.perf_counter() - began) / len(os.sched_getaffinity(0)))


def _busy_seconds() -> float:
    """Processor time of the whole machine that was not idle."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def _own_seconds() -> float:
    """Processor time of this process and of all that it started, also of those that have ended."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:4]) for process in processes)


def processor_seconds(pids: Iterable[int]) -> float:
    """Processor time that some processes have taken so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def worker_pids(client: Client) -> dict[str, int]:
    """Process ids of the workers by address."""
    return client.run(os.getpid)


def peak_bytes(pid: int | str = "self") -> int:
    """Largest resident memory that a process has had so far (VmHWM)."""
    found = _found(r"VmHWM:\s*(\d+)", f"/proc/{pid}/status")
    if found is None:
        raise RuntimeError(f"/proc/{pid}/status tells no VmHWM")
    return 1024 * int(found)


def chunk_rows(n_features: int, itemsize: int = 8) -> int:
    """Rows of a chunk of about 8 MiB."""
    return CHUNK_BYTES // (n_features * itemsize)


def create_store(path: Path, n_rows: int, n_features: int, rows: int) -> zarr.Array:
    """Create an empty float64 array with chunks of ``rows`` rows and a checksummed codec."""
    return zarr.create_array(
        str(path),
        shape=(n_rows, n_features),
        chunks=(min(rows, n_rows), n_features),
        dtype="float64",
        compressors=(BloscCodec(cname="lz4", shuffle="shuffle"), Crc32cCodec()),
    )


def write_normal_store(path: Path, n_rows: int, n_features: int, rows: int, seed: int) -> None:
    """Write standard normal rows, one chunk at a time."""
    check_disk(path.parent, 8 * n_rows * n_features)
    array = create_store(path, n_rows, n_features, rows)
    generator = np.random.default_rng(seed)
    for start in range(0, n_rows, rows):
        stop = min(start + rows, n_rows)
        array[start:stop] = generator.standard_normal((stop - start, n_features))


def write_store_on(client: Client, path: Path, shape: tuple[int, int], rows: int, dtype: str, seed: int) -> None:
    """Have the workers write standard normal rows, which do not depend on who writes them."""
    array = zarr.create_array(str(path), shape=shape, chunks=(rows, shape[1]), dtype=dtype)
    check_disk(path.parent, array.nbytes + 40 * shape[0])
    chunks = range(-(-shape[0] // rows))
    client.gather(client.map(partial(_write_chunk, str(path), seed), chunks, pure=False))


def _write_chunk(store: str, seed: int, number: int) -> None:
    array = zarr.open_array(store, mode="r+")
    start = number * array.chunks[0]
    stop = min(start + array.chunks[0], array.shape[0])
    generator = np.random.default_rng([seed, number])
    array[start:stop] = generator.standard_normal((stop - start, array.shape[1]), dtype=array.dtype)


def check_disk(folder: Path, needed: int) -> None:
    """Stop unless a folder has room for ``needed`` bytes and half as many again."""
    free = shutil.disk_usage(folder).free
    if free < 1.5 * needed:
        raise SystemExit(f"{needed / 2**30:.1f} GiB are needed under {folder}, {free / 2**30:.1f} GiB are free")
