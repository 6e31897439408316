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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Protocol

import distributed
import psutil
from dask.delayed import Delayed
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.serialize import Serialize, Serialized, merge_and_deserialize, to_serialize
from distributed.system import MEMORY_LIMIT

from daskrr import config
from daskrr.engine.factors import Factors
from daskrr.engine.passes import ClusterExecutor, Executor, constant, task
from daskrr.engine.watch import Flight, Watch, reachable
from daskrr.errors import DaskrrError, SourceUnreachable
from daskrr.numerics import blas

log = logging.getLogger("daskrr")

# Asked for instead of a kind of payload.
EVERYTHING = "everything"


def _perform(factors: Factors, step: str, inputs: Any, parameters: dict[str, Any]) -> dict[str, Any]:
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
        scheduler.handlers["daskrr_fork"] = self.fork
        scheduler.handlers["daskrr_free"] = self.free
        _load_more(scheduler)

    async def close(self) -> None:
        """Let the thread go."""
        self.pool.shutdown(wait=False)

    async def hello(self) -> dict[str, Any]:
        """Say that the plugin is here, and how much memory is left."""
        return {"available": min(psutil.virtual_memory().available, MEMORY_LIMIT), "runs": sorted(self.runs)}

    async def perform(
        self, run: str, step: str, key: str | None, parameters: dict[str, Any], owner: str
    ) -> dict[str, Any]:
        """Gather the inputs of a step from the workers, if it has any, and run it on the plugin's thread."""
        inputs = None
        if run not in self.runs and step != "whiten":
            return {"status": "gone"}
        if key is not None:
            gathered = await self.scheduler.gather([key])
            if gathered["status"] != "OK":
                return {"status": "lost", "keys": [str(lost) for lost in gathered["keys"]]}
            inputs = gathered["data"][key]
        factors = self.runs.setdefault(run, Factors())
        self.owners[run] = owner
        loop = asyncio.get_running_loop()
        try:
            summary = await loop.run_in_executor(self.pool, _gathered_perform, factors, step, inputs, parameters)
        except DaskrrError as error:
            return {"status": "refused", "error": to_serialize(error)}
        return {"status": "OK", "summary": to_serialize(summary)}

    async def fetch(self, run: str, kind: str) -> dict[str, Any]:
        """The factors that a pass of ``run`` needs."""
        if run not in self.runs:
            return {"status": "gone"}
        factors = self.runs[run]
        return {"status": "OK", "payload": to_serialize(factors if kind == EVERYTHING else factors.payload(kind))}

    async def fork(self, run: str, copy: str, owner: str) -> dict[str, Any]:
        """Copy the factors of a run for another one."""
        if run not in self.runs:
            return {"status": "gone"}
        self.runs[copy], self.owners[copy] = replace(self.runs[run]), owner
        return {"status": "OK"}

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
    elif isinstance(data, Serialize):  # from a worker in this process
        data = data.data
    return _perform(factors, step, data, parameters)


def _load_more(scheduler: Any) -> None:
    """Have the scheduler load what is set for it, such as a page in the dashboard; jobs can do without."""
    for name in config.get("scheduler-preload"):
        with suppress(Exception):
            import_module(name).dask_setup(scheduler)


async def dask_setup(scheduler: Any) -> None:
    """Entry point of ``dask scheduler --preload daskrr.engine.scheduler``."""
    await scheduler.register_scheduler_plugin(FactorPlugin(), idempotent=True)


def _fetch_prefix(run: str) -> str:
    return f"fetch-factor-{run}-"


def _ask(client: Any, question: str, **arguments: Any) -> Any:
    """Call a handler of the plugin and wait for its answer; a scheduler without the plugin answers None.

    Raises
    ------
    SourceUnreachable
        The client is closed, or what was asked about is no longer there.
    """
    answer = None
    if client.status == "running":
        with reachable(client):
            answer = client.sync(getattr(client.scheduler, f"daskrr_{question}"), **arguments)
    if "run" in arguments and (answer is None or answer.get("status") == "gone"):
        raise _gone(arguments["run"])
    return answer


def fetch_factor(run: str, kind: str) -> dict[str, Any]:
    """Ask the scheduler for the factors of a run; runs as a task on a worker."""
    try:
        client = distributed.get_client()
    except ValueError:
        raise _gone(run) from None
    return _fetched(client, run, kind)


def _fetched(client: distributed.Client, run: str, kind: str) -> Any:
    return _ask(client, "fetch", run=run, kind=kind)["payload"]


def _gone(run: str) -> SourceUnreachable:
    return SourceUnreachable(
        f"the factors of run {run} are gone with the scheduler that held them: it was closed or restarted, or the "
        "client that made them has left. Run leverage_scores or fit again; save a model before its cluster ends."
    )


class Algebra(Protocol):
    """Where the p × p algebra of one run is done and kept."""

    place: str

    def perform(self, step: str, handle: Any, parameters: dict[str, Any]) -> dict[str, Any]:
        """Run a step of :class:`Factors` on the inputs behind ``handle``, if any; return its small summary."""

    def payload(self, kind: str) -> Delayed:
        """A task whose result is :meth:`Factors.payload`."""

    def fetch(self, kind: str) -> dict[str, Any]:
        """What :meth:`Factors.payload` returns, in this process."""

    def bring(self) -> Factors:
        """All factors, in this process."""

    def fork(self, run: str) -> "Algebra":
        """A copy for another run: what is done to one is not seen by the other."""


class InProcess:
    """Algebra without a cluster."""

    place = "this process"

    def __init__(self, factors: Factors | None = None) -> None:
        self.factors = factors or Factors()
        self.run = uuid.uuid4().hex

    def perform(self, step: str, handle: Any, parameters: dict[str, Any]) -> dict[str, Any]:
        """Run the step here, on inputs that a cluster may have made."""
        inputs = handle.result() if isinstance(handle, distributed.Future) else handle
        return _perform(self.factors, step, inputs, parameters)

    def payload(self, kind: str) -> Delayed:
        """The factors themselves."""
        return constant(self.factors.payload(kind), f"factor-{self.run}-{kind.replace(' ', '')}")

    def fetch(self, kind: str) -> dict[str, Any]:
        """The factors themselves."""
        return self.factors.payload(kind)

    def bring(self) -> Factors:
        """They are here."""
        return self.factors

    def fork(self, run: str) -> "InProcess":
        """A copy that shares the arrays, none of which is ever written to."""
        return InProcess(replace(self.factors))


class OnScheduler:
    """Algebra in the scheduler process, through :class:`FactorPlugin`."""

    place = "scheduler"

    def __init__(self, client: distributed.Client, run: str) -> None:
        self.client, self.run, self.watch = client, run, Watch(client)
        self._steps = 0
        weakref.finalize(self, _free_later, weakref.ref(client), run)

    def perform(self, step: str, handle: Any, parameters: dict[str, Any]) -> dict[str, Any]:
        """Have the plugin gather the inputs and run the step; try again when a worker died meanwhile."""
        self._steps += 1
        for _ in range(5):
            if handle is not None:
                self.watch.wait([Flight(handle, f"the inputs of {step!r}")])
            answer = _ask(
                self.client,
                "perform",
                run=self.run,
                step=step,
                key=None if handle is None else handle.key,
                parameters=parameters,
                owner=self.client.id,
            )
            if answer["status"] == "refused":
                raise answer["error"]
            if answer["status"] == "OK":
                return answer["summary"]
            if handle is not None and handle.status == "error":
                raise handle.exception()
        raise RuntimeError(f"the inputs of {step!r} were lost five times in a row with their workers")

    def payload(self, kind: str) -> Delayed:
        """A task that asks the scheduler. It holds this object, so the factors live while a graph needs them."""
        fetch = _Fetch(self, self.run, kind)
        return task(f"fetch-factor-{self.run}", kind.replace(" ", ""), self._steps, fetch)

    def fetch(self, kind: str) -> dict[str, Any]:
        """Ask the scheduler from here."""
        return _fetched(self.client, self.run, kind)

    def bring(self) -> Factors:
        """Ask the scheduler for all."""
        return _fetched(self.client, self.run, EVERYTHING)

    def __reduce__(self) -> tuple:
        return InProcess, (self.bring(),)

    def fork(self, run: str) -> "OnScheduler":
        """Have the plugin copy them."""
        _ask(self.client, "fork", run=self.run, copy=run, owner=self.client.id)
        return OnScheduler(self.client, run)


def held(algebra: Algebra, kind: str, executor: Executor) -> Any:
    """A payload, ready as an argument of every task of a pass."""
    return executor.hold(algebra.fetch(kind) if isinstance(algebra, InProcess) else algebra.payload(kind))


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
    _steps: int = 0

    def perform(self, step: str, handle: Any, parameters: dict[str, Any]) -> dict[str, Any]:
        """Run the step where its inputs are, and keep the factors there."""
        self._check_alive()
        done = self.executor.apply("factor", _step_on_worker, step, handle, parameters, *self._factors)
        self._steps += 1
        self._factors = [self.executor.apply("factor-kept", _first, done)]
        return self.executor.value(self.executor.apply("factor-summary", _second, done))

    def payload(self, kind: str) -> Delayed:
        """A task that picks what is needed from the factors."""
        self._check_alive()
        name = f"{self.run}-{kind.replace(' ', '')}"
        return task("fetch-factor", name, self._steps, _pick, *self._factors, kind)

    def fetch(self, kind: str) -> dict[str, Any]:
        """Gather it from the worker."""
        self._check_alive()
        return self.executor.value(self.executor.apply("fetch-factor-here", _pick, *self._factors, kind))

    def bring(self) -> Factors:
        """Gather all from the worker."""
        self._check_alive()
        return self.executor.value(self._factors[0])

    def __reduce__(self) -> tuple:
        return InProcess, (self.bring(),)

    def _check_alive(self) -> None:
        if self.executor.client.status != "running":
            raise _gone(self.run)

    def fork(self, run: str) -> "OnWorker":
        """The same futures, to which others will be added."""
        return OnWorker(self.executor, run, _factors=list(self._factors))


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
