"""What the workers of a cluster are, and whether they can do their work; asked before any long work starts.

From then on the scheduler tells of workers that are lost.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import dask
import distributed
import numpy as np
import psutil
import scipy
import zarr
from distributed.diagnostics.plugin import SchedulerPlugin

from daskrr import __version__, machine
from daskrr.errors import SourceUnreachable
from daskrr.kernels.cuda import BLOCKS_AT_ONCE
from daskrr.runtime import devices
from daskrr.runtime.devices import CPU, CUDA
from daskrr.runtime.futures import reachable
from daskrr.runtime.rows import Rows, check_reachable, has_no_path, is_process_bound

log = logging.getLogger("daskrr")

LOST = "daskrr-lost-workers"
IDLE_METRIC = "daskrr-idle-bytes"


def settle_in(worker: distributed.Worker) -> None:
    """Fit memory and the threads that decode chunks to the tasks of a worker, unless Zarr is configured otherwise.

    Zarr takes as many threads as a machine has cores, in every worker, and each would keep memory of its own. What the
    worker takes before its first task depends on what Dask finds installed, so that it is told with its other metrics.
    """
    n_threads = worker.state.nthreads
    machine.keep_memory(BLOCKS_AT_ONCE if devices.computes_on_gpu() else n_threads)
    idle = psutil.Process().memory_info().rss
    worker.metrics[IDLE_METRIC] = lambda worker: idle
    if zarr.config.get("threading.max_workers") is None:
        zarr.config.set({"threading.max_workers": 2 * n_threads})


def ask(client: distributed.Client, rows: Rows, device: str) -> dict[str, Any]:
    """How many workers there are and of which kinds, once each has opened the input and has our version of daskrr.

    Raises
    ------
    SourceUnreachable
        Naming the worker and what it cannot do.
    """
    with reachable(client):
        workers = client.nthreads()
    if not workers:
        raise SourceUnreachable("the cluster has no workers. Start some, or wait until they have joined.")
    remote = any(not address.startswith("inproc://") for address in workers)
    if is_process_bound(rows) and remote:
        raise SourceUnreachable(
            f"{rows.origin} is a Zarr store in the memory of this process; the workers are other processes and "
            "cannot read it. Write it to a path or URL that they can reach."
        )
    _hear_of_losses(client)
    with reachable(client):
        answers = client.run(_worker_report, _reference(rows), device, on_error="return")
    return describe([_checked(address, answer) for address, answer in answers.items()], device)


class LossPlugin(SchedulerPlugin):
    """Tells clients of workers that died or were cut off, and not of those that were told to go.

    Dask's own topic of all events cannot be followed from elsewhere: some of its messages cannot be sent.
    """

    name = LOST
    idempotent = True

    def remove_worker(self, scheduler: Any, worker: str, **about: Any) -> None:
        """Look at what the scheduler has noted of it just now."""
        noted = scheduler.get_events(worker)[-1][1]
        if not noted["expected"]:
            again = {*noted["processing-tasks"], *noted["lost-computed-tasks"]}
            scheduler.log_event(LOST, {"worker": worker, "tasks": len(again)})


def _hear_of_losses(client: distributed.Client) -> None:
    """Log what the scheduler tells of lost workers, where it lets us ask it to; jobs can do without."""
    with suppress(Exception):
        client.register_plugin(LossPlugin())
        client.subscribe_topic(LOST, _tell_of_loss)


def _tell_of_loss(event: tuple[float, Mapping[str, Any]]) -> None:
    _, lost = event
    log.warning(
        "worker %s was lost: it died, or cannot be reached. What it was at or alone knew runs again elsewhere: "
        "%d task%s.", lost["worker"], lost["tasks"], "" if lost["tasks"] == 1 else "s",
    )  # fmt: skip


def _reference(rows: Rows) -> Rows | None:
    """What a worker must be able to open; arrays that travel with their tasks need no check."""
    return None if has_no_path(rows.origin) else rows


def _worker_report(rows: Rows | None, device: str) -> tuple[str, str, dict[str, str]]:
    """The version of daskrr on this worker, why it cannot read ``rows``, if so, and its :func:`facts`."""
    try:
        if rows is not None:
            check_reachable(rows)
    except SourceUnreachable as error:
        return __version__, str(error), {}
    return __version__, "", facts(device)


def _checked(address: str, answer: Any) -> dict[str, str]:
    """The facts of a worker that can do its work."""
    if isinstance(answer, Exception):
        raise SourceUnreachable(f"worker {address} cannot run daskrr: {answer}. Install daskrr {__version__} there.")
    version, problem, kind = answer
    if version != __version__:
        raise SourceUnreachable(f"worker {address} runs daskrr {version}, this process {__version__}. Align them.")
    if problem:
        raise SourceUnreachable(f"worker {address}: {problem}")
    return kind


def facts(device: str = CPU) -> dict[str, str]:
    """What decides the last bits that this process computes: its processor or GPU, and versions of libraries."""
    modules = {"numpy": np, "scipy": scipy, "zarr": zarr, "dask": dask}
    gpu = devices.usable_gpu() if device == CUDA else None
    kind = machine.processor() if gpu is None else gpu.name
    return {"processor": kind} | {name: module.__version__ for name, module in modules.items()}


def describe(workers: Sequence[dict[str, str]], device: str = CPU) -> dict[str, Any]:
    """How many workers there are and of which kinds; a mixture is reported, since bits may differ between them."""
    kinds = {name: sorted({one[name] for one in workers}) for name in workers[0]}
    for name, values in kinds.items():
        if len(values) > 1:
            log.warning(
                "the workers differ in their %s (%s): the last bits of a result depend on which of them does what",
                name, ", ".join(values),
            )  # fmt: skip
    return {"count": len(workers), "device": device, "processors": kinds.pop("processor"), "versions": kinds}
