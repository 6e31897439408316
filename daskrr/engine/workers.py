"""What the workers of a cluster are, and whether they can do their work; asked before any long work starts."""

import logging
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask
import distributed
import numpy as np
import scipy
import zarr

from daskrr import __version__
from daskrr.engine.rows import Rows, check_reachable, has_no_path, is_process_bound
from daskrr.engine.watch import reachable
from daskrr.errors import SourceUnreachable

log = logging.getLogger("daskrr")


def ask(client: distributed.Client, rows: Rows) -> dict[str, Any]:
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
    with reachable(client):
        answers = client.run(_worker_report, _reference(rows), on_error="return")
    return describe([_checked(address, answer) for address, answer in answers.items()])


def _reference(rows: Rows) -> Rows | None:
    """What a worker must be able to open; arrays that travel with their tasks need no check."""
    return None if has_no_path(rows.origin) else rows


def _worker_report(rows: Rows | None) -> tuple[str, str, dict[str, str]]:
    """The version of daskrr on this worker, why it cannot read ``rows``, if so, and its :func:`facts`."""
    try:
        if rows is not None:
            check_reachable(rows)
    except SourceUnreachable as error:
        return __version__, str(error), {}
    return __version__, "", facts()


def _checked(address: str, answer: Any) -> dict[str, str]:
    """The facts of a worker that can do its work."""
    if isinstance(answer, Exception):
        raise SourceUnreachable(f"worker {address} cannot run daskrr: {answer}. Install daskrr {__version__} there.")
    version, problem, found = answer
    if version != __version__:
        raise SourceUnreachable(f"worker {address} runs daskrr {version}, this process {__version__}. Align them.")
    if problem:
        raise SourceUnreachable(f"worker {address}: {problem}")
    return found


def facts() -> dict[str, str]:
    """What decides the last bits that this process computes: its kind of processor, and versions of libraries."""
    modules = {"numpy": np, "scipy": scipy, "zarr": zarr, "dask": dask}
    return {"processor": _processor()} | {name: module.__version__ for name, module in modules.items()}


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def describe(found: Sequence[dict[str, str]]) -> dict[str, Any]:
    """How many workers there are and of which kinds; a mixture is reported, since bits may differ between them."""
    kinds = {name: sorted({one[name] for one in found}) for name in found[0]}
    for name, values in kinds.items():
        if len(values) > 1:
            log.warning(
                "the workers differ in their %s (%s): the last bits of a result depend on which of them does what",
                name, ", ".join(values),
            )  # fmt: skip
    return {"count": len(found), "processors": kinds.pop("processor"), "versions": kinds}
