"""The p × p algebra on the Dask scheduler, and where it runs when the scheduler may not do it.

A scheduler plugin gathers one small matrix from the workers, factors it on a thread of its own with calls that
release the GIL, and keeps the factors of each run. Tasks never carry factors: one task per run, ``fetch-factor``,
asks the plugin for them, and Dask can run it again when a worker dies. Start a scheduler with
``dask scheduler --preload daskrr.engine.scheduler`` where clients may not register plugins themselves.

Everything of Dask that is not public API is used here: the scheduler's ``handlers``, ``gather`` and ``tasks``, and
``merge_and_deserialize`` for frames above 64 MiB.
"""

import asyncio
import logging
import os
import socket
import time
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import distributed
import numpy as np
import psutil
from dask.delayed import Delayed
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.serialize import Serialized, merge_and_deserialize, to_serialize
from distributed.system import MEMORY_LIMIT
from numpy.typing import NDArray

from daskrr.engine.passes import ClusterExecutor, Executor, constant, task
from daskrr.errors import DaskrrError
from daskrr.numerics import blas
from daskrr.numerics.algebra import RidgeFactor, Whitening, ridge_factor, shift_of, solve_ridges, subset_factor, whiten

log = logging.getLogger("daskrr")


@dataclass
class Factors:
    """The factors of one run: of the landmarks' kernel matrix first, of the ridge once the Gram matrix is known."""

    landmarks: NDArray | None = None
    n_landmarks: int = 0
    whitening: Whitening | None = None
    ridge: RidgeFactor | None = None
    kernel_matrix: NDArray | None = None
    subset: tuple[NDArray, ...] = ()

    def whiten(self, inputs: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
        """Factor W; ``inputs`` holds W, the landmarks' rows X, the tile kernel's error and the penalty, if any."""
        dtype = np.dtype(parameters["dtype"])
        self.n_landmarks = len(inputs["W"])
        self.whitening = whiten(inputs["W"], inputs["error"], dtype, inputs["penalty"])
        pivots = self.whitening.pivots
        self.landmarks = inputs["X"][pivots]
        if parameters["subset"]:
            self.kernel_matrix = inputs["W"][np.ix_(pivots, pivots)]
        return {
            "pivots": pivots,
            "shift": self.whitening.shift,
            "kernel_error": self.whitening.kernel_error,
            "smallest_pivot": self.whitening.smallest_pivot,
        }

    def add_ridge(self, inputs: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
        """Factor G + n·λ·I for every ridge; ``inputs`` holds the lower triangle of G."""
        if self.whitening is None:
            raise RuntimeError("the landmarks of this run were not factored")
        dtype, n_rows, ridges = np.dtype(parameters["dtype"]), parameters["n_rows"], parameters["ridges"]
        self.ridge = ridge_factor(inputs["G"], self.whitening, n_rows, ridges, dtype, parameters["leading"])
        if self.kernel_matrix is not None:
            self.subset = tuple(subset_factor(self.kernel_matrix, shift_of(n_rows, ridge)) for ridge in ridges)
        return {
            "effective_dimensions": self.ridge.effective_dimensions.tolist(),
            "score_errors": self.ridge.score_errors.tolist(),
            "gram_norm": self.ridge.gram_norm,
            "combined": self.ridge.combined is not None,
        }

    def regress(self, inputs: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
        """Solve the ridge regression for every ridge; ``inputs`` holds the lower triangle of G and the moments."""
        if self.whitening is None:
            raise RuntimeError("the landmarks of this run were not factored")
        found = solve_ridges(
            inputs["G"], inputs["features"], inputs["targets"], self.whitening, parameters["n_rows"],
            parameters["ridges"], np.dtype(parameters["dtype"]), parameters["intercept"],
        )  # fmt: skip
        return vars(found) | {"landmarks": self.landmarks}

    def payload(self, kind: str) -> dict[str, Any]:
        """What a pass needs: the factor of W ("whitener"), the ridge's too ("scorer"), or both apart.

        The last is for rows that pass 1 has not seen ("new rows"), or has not kept the residuals of ("drawn rows").
        """
        if self.whitening is None:
            raise RuntimeError("the landmarks of this run were not factored")
        found: dict[str, Any] = {"landmarks": self.landmarks, "n_landmarks": self.n_landmarks}
        found["kernel_error"] = self.whitening.kernel_error
        if kind == "whitener" or self.ridge is None:
            return found | {"factors": (self.whitening.inverse,)}
        found |= {"eigenvalues": self.ridge.eigenvalues}
        if kind != "new rows":
            found |= {"leading": self.ridge.leading}
        if kind == "scorer":
            found |= {"subset": self.subset}
        if kind == "scorer" and self.ridge.combined is not None:
            return found | {"factors": (self.ridge.combined,)}
        return found | {"factors": (self.whitening.inverse, self.ridge.inverse)}


def _perform(factors: Factors, step: str, inputs: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Run one step and say where it ran. One BLAS thread, so that bits do not depend on the number of cores."""
    began = time.perf_counter()
    with blas.one_thread():
        summary = getattr(factors, step)(inputs, parameters)
    where = {"host": socket.gethostname(), "pid": os.getpid(), "seconds": time.perf_counter() - began}
    return summary | {"where": where}


class FactorPlugin(SchedulerPlugin):
    """Keeps the factors of every run on the scheduler, and frees them when the run ends or its client leaves."""

    name = "daskrr"
    idempotent = True

    async def start(self, scheduler: Any) -> None:
        """Add the handlers that clients and ``fetch-factor`` tasks call."""
        self.scheduler = scheduler
        self.runs: dict[str, Factors] = {}
        self.owners: dict[str, str] = {}
        self.ending: dict[str, str] = {}
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="daskrr-algebra")
        scheduler.handlers["daskrr_hello"] = self.hello
        scheduler.handlers["daskrr_perform"] = self.perform
        scheduler.handlers["daskrr_fetch"] = self.fetch
        scheduler.handlers["daskrr_free"] = self.free

    async def close(self) -> None:
        """Let the thread go."""
        self.pool.shutdown(wait=False)

    async def hello(self) -> dict[str, Any]:
        """Say that the plugin is here, and how much memory is left."""
        return {"available": min(psutil.virtual_memory().available, MEMORY_LIMIT), "runs": sorted(self.runs)}

    async def perform(self, run: str, step: str, key: str, parameters: dict[str, Any], owner: str) -> dict[str, Any]:
        """Gather the inputs of a step from the workers and run it on the plugin's thread."""
        gathered = await self.scheduler.gather([key])
        if gathered["status"] != "OK":
            return {"status": "lost", "keys": [str(lost) for lost in gathered["keys"]]}
        factors = self.runs.setdefault(run, Factors())
        self.owners[run] = owner
        loop = asyncio.get_running_loop()
        try:
            summary = await loop.run_in_executor(
                self.pool, _gathered_perform, factors, step, gathered["data"][key], parameters
            )
        except DaskrrError as error:
            return {"status": "refused", "error": to_serialize(error)}
        return {"status": "OK", "summary": to_serialize(summary)}

    async def fetch(self, run: str, kind: str) -> dict[str, Any]:
        """The factors that a pass of ``run`` needs."""
        if run not in self.runs:
            return {"status": "gone"}
        return {"status": "OK", "payload": to_serialize(self.runs[run].payload(kind))}

    async def free(self, run: str) -> None:
        """Drop the run's factors as soon as no task on the cluster can ask for them."""
        keys = [key for key in self.scheduler.tasks if str(key).startswith(_fetch_prefix(run))]
        if keys:
            self.ending.update(dict.fromkeys(keys, run))
        else:
            self._drop(run)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Drop a run that ended once the last of its ``fetch-factor`` tasks is forgotten."""
        if finish == "forgotten" and key in self.ending:
            run = self.ending.pop(key)
            if run not in self.ending.values():
                self._drop(run)

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Drop the runs of a client that left."""
        for run in [run for run, owner in self.owners.items() if owner == client]:
            self._drop(run)

    def _drop(self, run: str) -> None:
        self.runs.pop(run, None)
        self.owners.pop(run, None)


def _gathered_perform(factors: Factors, step: str, data: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    if isinstance(data, Serialized):
        data = merge_and_deserialize(data.header, data.frames)
    return _perform(factors, step, data, parameters)


async def dask_setup(scheduler: Any) -> None:
    """Entry point of ``dask scheduler --preload daskrr.engine.scheduler``."""
    await scheduler.register_scheduler_plugin(FactorPlugin(), idempotent=True)


def _fetch_prefix(run: str) -> str:
    return f"fetch-factor-{run}-"


def _ask(client: Any, question: str, **arguments: Any) -> Any:
    """Call a handler of the plugin and wait for its answer."""
    return client.sync(getattr(client.scheduler, f"daskrr_{question}"), **arguments)


def fetch_factor(run: str, kind: str) -> dict[str, Any]:
    """Ask the scheduler for the factors of a run; runs as a task on a worker."""
    answer = _ask(distributed.get_client(), "fetch", run=run, kind=kind)
    if answer["status"] != "OK":
        raise RuntimeError(
            f"the scheduler no longer holds the factors of run {run}: it was restarted, or the client that made them "
            "has left. Run leverage_scores again."
        )
    return answer["payload"]


class Algebra(Protocol):
    """Where the p × p algebra of one run is done and kept."""

    place: str

    def perform(self, step: str, handle: Any, parameters: dict[str, Any]) -> dict[str, Any]:
        """Run a step of :class:`Factors` on the inputs behind ``handle``; return its small summary."""

    def payload(self, kind: str) -> Delayed:
        """A task whose result is :meth:`Factors.payload`."""


class InProcess:
    """Algebra without a cluster."""

    place = "this process"

    def __init__(self) -> None:
        self.factors = Factors()
        self.run = uuid.uuid4().hex

    def perform(self, step: str, handle: Any, parameters: dict[str, Any]) -> dict[str, Any]:
        """Run the step here."""
        return _perform(self.factors, step, handle, parameters)

    def payload(self, kind: str) -> Delayed:
        """The factors themselves."""
        return constant(self.factors.payload(kind), f"factor-{self.run}-{kind.replace(' ', '')}")


class OnScheduler:
    """Algebra in the scheduler process, through :class:`FactorPlugin`."""

    place = "scheduler"

    def __init__(self, client: distributed.Client, run: str) -> None:
        self.client, self.run = client, run
        weakref.finalize(self, _free_later, weakref.ref(client), run)

    def perform(self, step: str, handle: Any, parameters: dict[str, Any]) -> dict[str, Any]:
        """Have the plugin gather the inputs and run the step; try again when a worker died meanwhile."""
        for _ in range(5):
            distributed.wait(handle)
            answer = _ask(
                self.client,
                "perform",
                run=self.run,
                step=step,
                key=handle.key,
                parameters=parameters,
                owner=self.client.id,
            )
            if answer["status"] == "refused":
                raise answer["error"]
            if answer["status"] == "OK":
                return answer["summary"]
            if handle.status == "error":
                raise handle.exception()
        raise RuntimeError(f"the inputs of {step!r} were lost five times in a row with their workers")

    def payload(self, kind: str) -> Delayed:
        """A task that asks the scheduler. It holds this object, so the factors live while a graph needs them."""
        fetch = _Fetch(self, self.run, kind)
        return task(f"fetch-factor-{self.run}", kind.replace(" ", ""), 0, fetch)


class _Fetch:
    """Callable of a ``fetch-factor`` task: keeps the run alive in the client, travels as two strings."""

    def __init__(self, owner: OnScheduler | None, run: str, kind: str) -> None:
        self.owner, self.run, self.kind = owner, run, kind
        self.__name__ = "fetch_factor"

    def __reduce__(self) -> tuple:
        return _Fetch, (None, self.run, self.kind)

    def __call__(self) -> dict[str, Any]:
        return fetch_factor(self.run, self.kind)


def _free_later(client: "weakref.ref[distributed.Client]", run: str) -> None:
    live: Any = client()
    if live is not None and live.status == "running":
        live.loop.add_callback(live.scheduler.daskrr_free, run=run)


@dataclass
class OnWorker:
    """Algebra as an ordinary task, where the scheduler may not do it."""

    executor: ClusterExecutor
    run: str
    place: str = "worker"
    _factors: list[Any] = field(default_factory=list)

    def perform(self, step: str, handle: Any, parameters: dict[str, Any]) -> dict[str, Any]:
        """Run the step where its inputs are, and keep the factors there."""
        earlier = self._factors[-1:]
        done = self.executor.apply("factor", _step_on_worker, step, handle, parameters, *earlier)
        self._factors.append(self.executor.apply("factor-kept", _first, done))
        return self.executor.value(self.executor.apply("factor-summary", _second, done))

    def payload(self, kind: str) -> Delayed:
        """A task that picks what is needed from the factors."""
        return task("fetch-factor", f"{self.run}-{kind.replace(' ', '')}", 0, _pick, self._factors[-1], kind)


def _step_on_worker(
    step: str, inputs: dict[str, Any], parameters: dict[str, Any], earlier: Factors | None = None
) -> tuple[Factors, dict[str, Any]]:
    factors = Factors() if earlier is None else Factors(**vars(earlier))
    return factors, _perform(factors, step, inputs, parameters)


def _first(pair: tuple) -> Any:
    return pair[0]


def _second(pair: tuple) -> Any:
    return pair[1]


def _pick(factors: Factors, kind: str) -> dict[str, Any]:
    return factors.payload(kind)


def algebra(executor: Executor, run: str, scheduler_bytes: int) -> Algebra:
    """Choose where the p × p algebra of ``run`` is done: the scheduler, else a worker; in process without a cluster."""
    if not isinstance(executor, ClusterExecutor):
        return InProcess()
    client = executor.client
    refusal = _register(client)
    hello = _hello(client)
    if hello is None:
        log.warning("the scheduler cannot do the p × p algebra (%s): a worker does it instead", refusal)
        return OnWorker(executor, run)
    if hello["available"] < scheduler_bytes:
        log.warning(
            "the scheduler has %.0f MiB free and the p × p algebra needs %.0f MiB: a worker does it instead",
            hello["available"] / 2**20,
            scheduler_bytes / 2**20,
        )
        return OnWorker(executor, run)
    return OnScheduler(client, run)


def _hello(client: distributed.Client) -> dict[str, Any] | None:
    try:
        return _ask(client, "hello")
    except Exception:
        return None


def _register(client: distributed.Client) -> Exception | None:
    """Register the plugin; a scheduler that forbids it may have loaded it at its start."""
    try:
        client.register_plugin(FactorPlugin())
    except Exception as error:
        return error
    return None
