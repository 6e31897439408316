"""Clusters to compute on: one started here for the occasion, or one that already runs elsewhere."""

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dask
from dask.system import CPU_COUNT
from dask.utils import parse_bytes
from distributed import Client, LocalCluster

from daskrr.errors import InvalidParameter, SourceUnreachable

CONNECT_SECONDS = 10.0
WORKER_SECONDS = 30.0


def local_cluster(workers: int | None = None, memory_limit: str | int | None = None) -> LocalCluster:
    """Start worker processes on this machine that nothing outside of it can reach.

    Parameters
    ----------
    workers
        Number of single-threaded processes, by default one for each core this process may use.
    memory_limit
        Memory of each worker, such as ``"2GiB"``; by default an equal share of the machine's memory.

    Returns
    -------
    cluster
        To be closed by the caller.
    """
    count = CPU_COUNT if workers is None else workers
    if count < 1:
        raise InvalidParameter(f"a cluster needs at least one worker, not {count}")
    settings = {
        # Dask looks at what every worker does a hundred times a second, which costs a few percent of its core.
        "distributed.worker.profile.interval": "200ms",
        # A task that Dask gives up after two workers is run again, alone, which tells more than two workers more.
        "distributed.scheduler.allowed-failures": 1,
    }
    # Dask reads this while the cluster lives. It looks 15 s after a worker was lost, and takes one that has died again
    # and is being restarted at that moment for one that never came back: its nanny is closed, for good.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1 day"})
    with dask.config.set(settings):
        return LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            processes=True,
            memory_limit="auto" if memory_limit is None else _bytes(memory_limit),
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            # Failures come back as exceptions; the log would only repeat them, each with its traceback.
            silence_logs=logging.CRITICAL,
            preload=[__name__],
        )


def dask_setup(worker: Any) -> None:
    """Make a starting worker ignore the interrupt key; Dask calls this for preloaded modules.

    The key reaches every process of the terminal. The one that started the workers answers it by stopping them, and
    they need not each print how they were interrupted.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def connect(
    scheduler: str | None = None,
    workers: int | None = None,
    memory_limit: str | int | None = None,
    *,
    worker_seconds: float = WORKER_SECONDS,
    echo: Callable[[str], None] | None = None,
) -> Iterator[Client]:
    """Give a client of a cluster that has workers, and leave nothing behind.

    Parameters
    ----------
    scheduler
        Address of a running scheduler, such as ``"tcp://10.0.0.1:8786"``. Without one a cluster is started on this
        machine and stopped at the end.
    workers, memory_limit
        Size of the cluster to start, as in :func:`local_cluster`.
    worker_seconds
        How long to wait for the first worker of a running scheduler.
    echo
        Takes the line that tells where the dashboard is; standard error by default.

    Raises
    ------
    SourceUnreachable
        No scheduler answers at the address, or it has no workers.
    """
    if scheduler is None:
        client_of = _embedded(workers, memory_limit)
    elif workers is not None or memory_limit is not None:
        raise InvalidParameter("workers and memory_limit describe a cluster to start, not one that runs already")
    else:
        client_of = _running(scheduler, worker_seconds)
    with client_of as client:
        if client.dashboard_link:
            (echo or _to_stderr)(f"dashboard: {client.dashboard_link}")
        yield client


@contextmanager
def _embedded(workers: int | None, memory_limit: str | int | None) -> Iterator[Client]:
    with local_cluster(workers, memory_limit) as cluster, Client(cluster) as client:
        yield client


@contextmanager
def _running(address: str, worker_seconds: float) -> Iterator[Client]:
    client = _open(address)
    with client, client.as_current():
        _await_worker(client, address, worker_seconds)
        yield client


def _open(address: str) -> Client:
    advice = "check the address, and that this machine can reach it, or leave it out to compute on this machine"
    try:
        # Not the default: one that fails to connect would stay it.
        return Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise SourceUnreachable(f"no Dask scheduler answers at {address} ({error}): {advice}") from error
    except Exception as error:
        # Another service, such as the dashboard, sends bytes that cannot be read as Dask's protocol.
        raise SourceUnreachable(f"what answers at {address} is no Dask scheduler: {advice}") from error


def _await_worker(client: Client, address: str, seconds: float) -> None:
    try:
        client.wait_for_workers(1, timeout=seconds)
    except TimeoutError as error:
        raise SourceUnreachable(
            f"the scheduler at {address} has had no worker for {seconds:g} seconds: start one with "
            f"'dask worker {address}', or look why its workers do not come up"
        ) from error


def _bytes(size: str | int) -> int:
    try:
        count = int(parse_bytes(size))
    except ValueError as error:
        raise InvalidParameter(f"{size!r} is not an amount of memory; one looks like 2GiB") from error
    if count < 1:
        raise InvalidParameter(f"a worker cannot live with {size} of memory")
    return count


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
