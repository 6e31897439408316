"""The p × p algebra on the Dask scheduler, and where it runs when the scheduler may not do it, or GPUs can.

A scheduler plugin gathers one small matrix from the workers, factors it on a thread of its own with calls that
release the GIL, and keeps the factors of each run. Tasks never carry factors: one task per run, ``fetch-factor``,
asks the plugin for them, and Dask can run it again when a worker dies. Start a scheduler with
``dask scheduler --preload daskrr.preload`` where clients may not register plugins themselves.

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import distributed
import psutil
from dask.delayed import Delayed
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.serialize import Serialize, Serialized, merge_and_deserialize, to_serialize
from distributed.system import MEMORY_LIMIT

from daskrr import config
from daskrr.errors import DaskrrError, SourceUnreachable
from daskrr.numerics import blas
from daskrr.runtime.devices import CPU, call_on
from daskrr.runtime.executors import ClusterExecutor, Executor
from daskrr.runtime.futures import reachable
from daskrr.runtime.sealing import constant, seal, sealed_task, unseal

log = logging.getLogger("daskrr")

# What is kept of a run, and what workers have computed for the next step, give what is kept then and a small summary.
Step = Callable[[Any, Any], tuple[Any, Any]]
# What is kept of a run gives what tasks need of it.
Pick = Callable[[Any], Any]


def _perform(kept: Any, step: Step, inputs: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Run one step, and say where it ran. One BLAS thread, so that bits do not depend on the number of cores."""
    began = time.perf_counter()
    with blas.one_thread():
        kept, summary = step(kept, inputs)
    return kept, summary, {"host": socket.gethostname(), "pid": os.getpid(), "seconds": time.perf_counter() - began}


def _name(function: Any) -> str:
    return getattr(function, "func", function).__name__


def everything(kept: Any) -> Any:
    """All that is kept of a run."""
    return kept


class FactorPlugin(SchedulerPlugin):
    """Keeps the factors of every run on the scheduler, and frees them when the run ends or its client leaves."""

    name = "daskrr"
    idempotent = True

    async def start(self, scheduler: Any) -> None:
        """Add the handlers that clients and ``fetch-factor`` tasks call."""
        self.scheduler = scheduler
        self.runs: dict[str, Any] = {}
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

    async def perform(self, run: str, step: bytes, key: str | None, owner: str, begins: bool) -> dict[str, Any]:
        """Gather the inputs of a step from the workers, if it has any, and run it on the plugin's thread."""
        if begins and owner in self.scheduler.clients:
            self.runs.setdefault(run, None)
            self.owners[run] = owner
        if run not in self.runs:
            return {"status": "gone"}
        kept, inputs = self.runs[run], None
        # Whatever is awaited from here on, the run may be freed, or its client leave, meanwhile.
        if key is not None:
            gathered = await self.scheduler.gather([key])
            if gathered["status"] != "OK":
                return {"status": "lost", "keys": [str(lost) for lost in gathered["keys"]]}
            inputs = gathered["data"][key]
        loop = asyncio.get_running_loop()
        try:
            kept, *answer = await loop.run_in_executor(self.pool, _gathered_perform, kept, step, inputs)
        except DaskrrError as error:
            return {"status": "refused", "error": to_serialize(error)}
        if run in self.runs:
            self.runs[run] = kept
        return {"status": "OK", "found": to_serialize(answer)}

    async def fetch(self, run: str, pick: bytes) -> dict[str, Any]:
        """What a pass of ``run`` needs."""
        if run not in self.runs:
            return {"status": "gone"}
        return {"status": "OK", "payload": to_serialize(unseal(pick)(self.runs[run]))}

    async def fork(self, run: str, copy: str, owner: str) -> dict[str, Any]:
        """Copy the factors of a run for another one."""
        if run not in self.runs or owner not in self.scheduler.clients:
            return {"status": "gone"}
        self.runs[copy], self.owners[copy] = self.runs[run], owner
        return {"status": "OK"}

    async def free(self, run: str) -> None:
        """Drop the run's factors as soon as no task on the cluster can ask for them."""
        keys = [key for key in self.scheduler.tasks if _is_fetch_of(run, str(key))]
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


def _gathered_perform(kept: Any, step: bytes, data: Any) -> tuple[Any, Any, dict[str, Any]]:
    if isinstance(data, Serialized):
        data = merge_and_deserialize(data.header, data.frames)
    elif isinstance(data, Serialize):  # from a worker in this process
        data = data.data
    return _perform(kept, unseal(step), data)


def _load_more(scheduler: Any) -> None:
    """Have the scheduler load what is set for it, such as a page in the dashboard; jobs can do without."""
    for name in config.get("scheduler-preload"):
        with suppress(Exception):
            import_module(name).dask_setup(scheduler)


def _fetch_name(run: str) -> str:
    return f"fetch-factor-{run}"


def _is_fetch_of(run: str, key: str) -> bool:
    """Whether it is the key of a payload's task, which ends in a kind and a number; runs are named after others."""
    return key.rsplit("-", 2)[0] == _fetch_name(run)


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


def fetch_factor(run: str, pick: Pick) -> Any:
    """Ask the scheduler for what is kept of a run; runs as a task on a worker."""
    try:
        client = distributed.get_client()
    except ValueError:
        raise _gone(run) from None
    return _fetched(client, run, pick)


def _fetched(client: distributed.Client, run: str, pick: Pick) -> Any:
    return _ask(client, "fetch", run=run, pick=seal(pick))["payload"]


def _gone(run: str) -> SourceUnreachable:
    return SourceUnreachable(
        f"the factors of run {run} are gone with the scheduler that held them: it was closed or restarted, or the "
        "client that made them has left. Run leverage_scores or fit again; save a model before its cluster ends."
    )


class Algebra(Protocol):
    """Where the p × p algebra of one run is done, and what it leaves is kept.

    ``steps`` tells of every step by its name on which host and in which process it ran, and how long.
    """

    place: str
    steps: dict[str, dict[str, Any]]

    def perform(self, step: Step, handle: Any = None) -> Any:
        """Run a step on the inputs behind ``handle``, if any; return its small summary."""

    def payload(self, pick: Pick) -> Delayed:
        """A task whose result is ``pick`` of what is kept."""

    def fetch(self, pick: Pick) -> Any:
        """The same, in this process."""

    def fork(self, run: str) -> "Algebra":
        """A copy for another run: what is done to one is not seen by the other."""


class InProcess:
    """Algebra without a cluster."""

    place = "this process"

    def __init__(self, kept: Any = None, device: str = CPU) -> None:
        self.kept, self.device, self.run = kept, device, uuid.uuid4().hex
        self.steps: dict[str, dict[str, Any]] = {}

    def perform(self, step: Step, handle: Any = None) -> Any:
        """Run the step here, on inputs that a cluster may have made."""
        inputs = handle.result() if isinstance(handle, distributed.Future) else handle
        self.kept, summary, self.steps[_name(step)] = call_on(self.device, _perform, self.kept, step, inputs)
        return summary

    def payload(self, pick: Pick) -> Delayed:
        """A value that is here already."""
        return constant(pick(self.kept), f"factor-{self.run}-{_name(pick)}")

    def fetch(self, pick: Pick) -> Any:
        """It is here."""
        return pick(self.kept)

    def fork(self, run: str) -> "InProcess":
        """What is kept is never written to, so that it can be shared."""
        return InProcess(self.kept, self.device)


class OnScheduler:
    """Algebra in the scheduler process, through :class:`FactorPlugin`."""

    place = "scheduler"

    def __init__(self, executor: ClusterExecutor, run: str, begins: bool = True) -> None:
        self.executor, self.client, self.run = executor, executor.client, run
        self.steps: dict[str, dict[str, Any]] = {}
        self._begins, self._n_steps = begins, 0
        weakref.finalize(self, _free_later, weakref.ref(self.client), run)

    def perform(self, step: Step, handle: Any = None) -> Any:
        """Have the plugin gather the inputs and run the step; try again when a worker died meanwhile."""
        name = _name(step)
        self._n_steps += 1
        for _ in range(5):
            if handle is not None:
                self.executor.settle([handle])
            answer = _ask(
                self.client,
                "perform",
                run=self.run,
                step=seal(step),
                key=None if handle is None else handle.key,
                owner=self.client.id,
                begins=self._begins,
            )
            if answer["status"] == "refused":
                raise answer["error"]
            if answer["status"] == "OK":
                self._begins = False
                summary, self.steps[name] = answer["found"]
                return summary
        raise RuntimeError(f"the inputs of {name!r} were lost five times in a row with their workers")

    def payload(self, pick: Pick) -> Delayed:
        """A task that asks the scheduler. It holds this object, so the factors live while a graph needs them."""
        return sealed_task(f"{_fetch_name(self.run)}-{_name(pick)}-{self._n_steps}", _Fetch(self, self.run, pick))

    def fetch(self, pick: Pick) -> Any:
        """Ask the scheduler from here."""
        return _fetched(self.client, self.run, pick)

    def __reduce__(self) -> tuple:
        return InProcess, (self.fetch(everything),)

    def fork(self, run: str) -> "OnScheduler":
        """Have the plugin copy them."""
        _ask(self.client, "fork", run=self.run, copy=run, owner=self.client.id)
        return OnScheduler(self.executor, run, begins=False)


def held(algebra: Algebra, pick: Pick, executor: Executor) -> Any:
    """A payload, ready as an argument of every task of a pass."""
    return executor.hold(algebra.fetch(pick) if isinstance(algebra, InProcess) else algebra.payload(pick))


class _Fetch:
    """Callable of a ``fetch-factor`` task: keeps the run alive in the client, travels as two names."""

    def __init__(self, owner: OnScheduler | None, run: str, pick: Pick) -> None:
        self.owner, self.run, self.pick = owner, run, pick
        self.__name__ = "fetch_factor"

    def __reduce__(self) -> tuple:
        return _Fetch, (None, self.run, self.pick)

    def __call__(self) -> Any:
        return fetch_factor(self.run, self.pick)


def _free_later(client: "weakref.ref[distributed.Client]", run: str) -> None:
    live: Any = client()
    if live is not None and live.status == "running":
        live.loop.add_callback(live.scheduler.daskrr_free, run=run)


@dataclass
class OnWorker:
    """Algebra as an ordinary task, where the scheduler may not do it, or the worker has a GPU for it."""

    executor: ClusterExecutor
    run: str
    place: str = "worker"
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    def perform(self, step: Step, handle: Any = None) -> Any:
        """Run the step where its inputs are, and keep the factors there."""
        self._check_alive()
        done = self.executor.apply("factor", partial(_step_on_worker, step), handle, *self._kept)
        self._kept = [self.executor.apply("factor-kept", _first, done)]
        summary, self.steps[_name(step)] = self.executor.value(self.executor.apply("factor-summary", _others, done))
        return summary

    def payload(self, pick: Pick) -> Delayed:
        """A task that picks what is needed from the factors."""
        self._check_alive()
        name = f"{_fetch_name(self.run)}-{_name(pick)}-{len(self.steps)}"
        return sealed_task(name, partial(_pick, pick), *self._kept)

    def fetch(self, pick: Pick) -> Any:
        """Gather it from the worker."""
        self._check_alive()
        return self.executor.value(self.executor.apply("fetch-factor-here", partial(_pick, pick), *self._kept))

    def __reduce__(self) -> tuple:
        return InProcess, (self.fetch(everything),)

    def _check_alive(self) -> None:
        if self.executor.client.status != "running":
            raise _gone(self.run)

    def fork(self, run: str) -> "OnWorker":
        """The same futures, to which others will be added."""
        return OnWorker(self.executor, run, _kept=list(self._kept))


def _step_on_worker(step: Step, inputs: Any, kept: Any = None) -> tuple[Any, Any, dict[str, Any]]:
    return _perform(kept, step, inputs)


def _first(found: tuple) -> Any:
    return found[0]


def _others(found: tuple) -> tuple:
    return found[1:]


def _pick(pick: Pick, kept: Any) -> Any:
    return pick(kept)


def algebra(executor: Executor, run: str, scheduler_bytes: int) -> Algebra:
    """Choose where the p × p algebra of ``run`` is done: the scheduler, else a worker; in process without a cluster.

    Where workers compute on GPUs, one that has the matrix in its memory: it would take longer to move it than that.
    """
    if not isinstance(executor, ClusterExecutor):
        return InProcess(device=executor.device.name)
    client = executor.client
    refusal = _register(client)  # which has the scheduler show its page, too
    if executor.device.gpu is not None:
        return OnWorker(executor, run)
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
    return OnScheduler(executor, run)


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
