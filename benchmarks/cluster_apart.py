"""A cluster whose scheduler has a process of its own, so that its processor time can be told from the client's.

With ``simulated`` workers, a few processes hold many workers of one thread each, which is enough for tasks that sleep.
"""

import argparse
import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import dask
from distributed import Client, Scheduler, Worker

from benchmarks import harness
from daskrr.apps.clusters import local_cluster

# Simulated workers of a process, at least; more where there are few cores beside those of client and scheduler.
PER_PROCESS = 16

# What looks after a worker several times a second, and would be a thousand times what it is.
SIMULATED = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.system-monitor.interval": "1 hour",
    "distributed.admin.tick.interval": "10 s",
    "distributed.admin.tick.limit": "1 hour",
}


@dataclass(frozen=True)
class ClusterApart:
    """A client, and the process ids of what it speaks to."""

    client: Client
    scheduler: int
    workers: tuple[int, ...]

    def processor_seconds(self) -> dict[str, float]:
        """Processor time of each kind of process so far."""
        return {
            "client": harness.processor_seconds([os.getpid()]),
            "scheduler": harness.processor_seconds([self.scheduler]),
            "workers": harness.processor_seconds(self.workers),
        }


@contextmanager
def cluster_apart(workers: int, simulated: bool = False) -> Iterator[ClusterApart]:
    """Start such a cluster; it ends with the block."""
    command = [sys.executable, "-m", "benchmarks.cluster_apart", str(workers), *["--simulated"] * simulated]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            with Client(process.stdout.readline().strip()) as client, harness.computing_on():
                client.wait_for_workers(workers, timeout=300)
                pids = sorted(set(harness.worker_pids(client).values()))
                yield ClusterApart(client, process.pid, tuple(pids))
        finally:
            process.stdin.close()


async def _until_told() -> None:
    await asyncio.to_thread(sys.stdin.readline)


async def _simulate(workers: int) -> None:
    """A scheduler here, and processes that have some of the workers each."""
    async with Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler:
        command = [sys.executable, "-m", "benchmarks.cluster_apart", "--join", scheduler.address]
        each = max(PER_PROCESS, -(-workers // max(1, os.cpu_count() - 2)))
        counts = [min(each, workers - start) for start in range(0, workers, each)]
        processes = [subprocess.Popen([*command, str(count)], stdin=subprocess.PIPE) for count in counts]
        print(scheduler.address, flush=True)
        await _until_told()
        for process in processes:
            process.stdin.close()
            await asyncio.to_thread(process.wait)


async def _join(address: str, workers: int) -> None:
    """Workers of one thread each that sleep in this process."""
    async with AsyncExitStack() as stack:
        for _ in range(workers):
            await stack.enter_async_context(Worker(address, nthreads=1, memory_limit=0, dashboard=False))
        await _until_told()


def main() -> None:
    """Be a scheduler, or a process with workers, until the standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workers", type=int)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--join", metavar="ADDRESS")
    options = parser.parse_args()
    logging.getLogger("distributed").setLevel(logging.CRITICAL if options.join else logging.WARNING)
    with dask.config.set(SIMULATED if options.simulated or options.join else {}):
        if options.join:
            asyncio.run(_join(options.join, options.workers))
        elif options.simulated:
            asyncio.run(_simulate(options.workers))
        else:
            with local_cluster(options.workers) as cluster:
                print(cluster.scheduler_address, flush=True)
                sys.stdin.readline()


if __name__ == "__main__":
    main()
