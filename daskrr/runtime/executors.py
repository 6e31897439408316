"""Where tasks run: on threads of this process, or on a Dask cluster.

An *executor* runs tasks through a bounded window of those in flight and hands out *handles* of their results, each to
be released before the next.
"""

import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future as LocalFuture
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import dask
import distributed
from dask.delayed import Delayed
from dask.system import cpu_count

from daskrr.errors import DaskrrError, PoisonBlock, SourceUnreachable
from daskrr.runtime.devices import PROCESSOR, TASKS_AT_ONCE, Choice, call_on, choose
from daskrr.runtime.futures import GOES_ON, Flights, PendingTask, Watch, check_condition, reachable
from daskrr.runtime.rows import Rows
from daskrr.runtime.sealing import Graph, call_unsealed, constant, seal
from daskrr.runtime.workers import ask, describe, facts
from daskrr.storage.pieces import KeptPieces

# Tasks are handed out in about so many messages for all that may be in flight, which are no fewer than this, and no
# fewer than that where rows are sent with them.
LAUNCHES = 4
LEAST_IN_FLIGHT = 32
LEAST_WITH_ROWS = 4

# So few threads are on few workers, which fetch what all tasks share from each other, and tasks are handed out
# meanwhile. To many it is copied before, or all would ask the one that has it.
FEW_THREADS = 4

# Calls that are made together wait for each other; that may be those of the results of this part of all threads.
SHARE_TOGETHER = 1 / 2

# A task whose workers died is given so many more, alone, before it is blamed.
TRIES_ALONE = 2


def batch_size(executor: "Executor") -> int:
    """How many calls of :meth:`Executor.apply_all` are worth waiting for: few, since their arguments take memory."""
    return max(1, int(SHARE_TOGETHER * executor.n_threads))


S = TypeVar("S")  # has ``start`` and ``stop``


def window_size(n_threads: int, least: int) -> int:
    """How many tasks are in flight: four for every thread, so that none waits for the client, though some are short."""
    return max(least, 4 * n_threads)


class Executor(Protocol):
    """Where tasks run; a *handle* stands for a result that need not be in this process."""

    workers: dict[str, Any]
    device: Choice
    kept_pieces: Any

    @property
    def n_threads(self) -> int:
        """Threads that tasks run on."""

    def window(
        self, tasks: Iterable[Delayed], spans: Iterable[S], *, spare: bool = False, light: bool = False
    ) -> Iterator[tuple[S, Any]]:
        """Run one task per span with a bounded number in flight; yield each span with a handle of its result.

        They come as they end. With ``spare``, a :class:`PoisonBlock` stands for the result of a span that kills its
        workers, and the others go on; otherwise it is raised. ``light`` tasks bring no rows with them.
        """

    def apply(self, name: str, function: Callable, *handles: Any) -> Any:
        """Handle of ``function(*results)``, computed where the results are."""

    def apply_all(self, name: str, function: Callable, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Handles of ``function(*results)`` for several lists of handles."""

    def begin(self, task: Delayed) -> Any:
        """Handle of the result of a task, which runs beside others."""

    def value(self, handle: Any) -> Any:
        """The result behind a handle, in this process."""

    def values(self, handles: Sequence[Any]) -> list[Any]:
        """The results behind several handles, in this process."""

    def settle(self, handles: Sequence[Any]) -> None:
        """Wait until the results behind ``handles`` are there, wherever that is."""

    def hold(self, shared: Any) -> Any:
        """What all tasks of a pass share (a task, a handle or a value), ready as an argument of each."""

    def keep_pieces(self, most_bytes: int) -> None:
        """Have every worker keep what it decodes of the input, up to so many bytes, while this is in use."""

    def check(self, rows: Rows) -> None:
        """Raise unless every worker can read ``rows``; note in ``workers`` what they are."""


class LocalExecutor:
    """Runs tasks on threads of this process; handles are the results themselves."""

    def __init__(self, device: Choice = PROCESSOR) -> None:
        self.n_threads = cpu_count() if device.gpu is None else TASKS_AT_ONCE
        self.device = device
        self.workers: dict[str, Any] = {}
        self.kept_pieces: Any = None

    def window(
        self, tasks: Iterable[Delayed], spans: Iterable[S], *, spare: bool = False, light: bool = False
    ) -> Iterator[tuple[S, Any]]:
        """Run ``tasks`` on one thread per core, always in order."""
        pending: deque[tuple[S, LocalFuture]] = deque()
        work = zip(tasks, spans, strict=True)
        with ThreadPoolExecutor(self.n_threads) as pool:
            try:
                while True:
                    free = 2 * self.n_threads - len(pending)
                    pending.extend(
                        (span, pool.submit(_compute_here, one)) for one, span in itertools.islice(work, free)
                    )
                    if not pending:
                        return
                    span, future = pending.popleft()
                    check_condition()
                    yield span, future.result()
                    del future
            finally:
                for _, future in pending:
                    future.cancel()

    def apply(self, name: str, function: Callable, *handles: Any) -> Any:
        """Call the function."""
        given = [_compute_here(one) if isinstance(one, Delayed) else one for one in handles]
        return call_on(self.device.name, function, *given)

    def apply_all(self, name: str, function: Callable, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call the function for each."""
        return [self.apply(name, function, *handles) for handles in arguments]

    def begin(self, task: Delayed) -> Any:
        """Compute it."""
        return _compute_here(task)

    def value(self, handle: Any) -> Any:
        """The handle is the value."""
        return handle

    def values(self, handles: Sequence[Any]) -> list[Any]:
        """The handles are the values."""
        return list(handles)

    def settle(self, handles: Sequence[Any]) -> None:
        """The values are there already."""

    def hold(self, shared: Any) -> Any:
        """Nothing to do: it is in this process already."""
        return shared if isinstance(shared, Delayed) else constant(shared, f"shared-{uuid.uuid4().hex}")

    def keep_pieces(self, most_bytes: int) -> None:
        """Keep it here."""
        self.kept_pieces = self.hold(KeptPieces(most_bytes))

    def check(self, rows: Rows) -> None:
        """This process has opened the rows already."""
        self.workers = describe([facts(self.device.name)], self.device.name)


def _compute_here(one: Delayed) -> Any:
    return dask.compute(one, scheduler="synchronous")[0]


class ClusterExecutor:
    """Runs tasks on a Dask cluster; handles are futures, and results stay on the workers."""

    def __init__(self, client: distributed.Client, run: str, device: Choice = PROCESSOR) -> None:
        self.client, self.run, self.watch, self.device = client, run, Watch(client), device
        self.workers: dict[str, Any] = {}
        self.kept_pieces: Any = None
        self._counter = itertools.count()
        self._checked: Rows | None = None
        self._flying: set[PendingTask] = set()

    @property
    def n_threads(self) -> int:
        """Threads of all workers."""
        return self.watch.count_threads()

    def window(
        self, tasks: Iterable[Delayed], spans: Iterable[S], *, spare: bool = False, light: bool = False
    ) -> Iterator[tuple[S, Any]]:
        """Keep four tasks per worker thread in flight, the first of them to run first."""
        flights = Flights(self.watch)
        least = LEAST_IN_FLIGHT if light else LEAST_WITH_ROWS
        work, order = zip(tasks, spans, strict=True), itertools.count()
        try:
            while True:
                check_condition()
                self._launch(work, flights, least, order)
                ended = flights.next_ended()
                if ended is None:
                    return
                outcome = self._verdict(ended)
                self._flying.discard(ended)
                if isinstance(outcome, PoisonBlock) and not spare:
                    raise outcome
                yield ended.span, outcome
                del ended, outcome
        finally:
            self._flying -= flights.pending.keys()
            if flights.pending and self.client.status == "running":
                self.client.cancel([flight.future for flight in flights.pending])

    def _launch(self, work: Iterator[tuple[Delayed, Any]], flights: Flights, least: int, order: Iterator[int]) -> None:
        """Hand the next tasks to the cluster in one message, as many as there is room for, unless these are few.

        At the beginning, when nothing runs, those that can run at once go first. All run in the ``order`` in which they
        are handed out.
        """
        n_threads = self.watch.count_threads()
        limit = window_size(n_threads, least)
        free = limit - len(flights.pending)
        if free < limit // LAUNCHES:
            return
        for number in (free,) if flights.pending else (min(free, n_threads), max(0, free - n_threads)):
            ready = list(itertools.islice(work, number))
            futures = self._begun([one for one, _ in ready], order)
            for future, (_, span) in zip(futures, ready, strict=True):
                flight = PendingTask(future, f"the block of rows {span.start}–{span.stop - 1}", span)
                flights.add(flight)
                self._flying.add(flight)

    def _begun(self, tasks: Sequence[Delayed], order: Iterable[int]) -> list[distributed.Future]:
        """The futures of some tasks, to be run in this order, what is below one of them with it.

        They are sent as they are, since they have nothing that Dask could make simpler; of a lazy array, only what they
        need.
        """
        graph = Graph()
        priorities: dict[Any, int] = {}
        for one, place in zip(tasks, order, strict=False):
            for key, node in (one.dask if len(one.dask) == 1 else one.dask.cull({one.key})).items():
                graph[key] = node
                priorities.setdefault(key, -place)
        keys = [one.key for one in tasks]
        return self.client.get(graph, keys, sync=False, priority=priorities.__getitem__) if tasks else []

    def _verdict(self, flight: PendingTask) -> Any:
        """The handle of a task that has ended, or the proof that it ends its workers; any other failure is raised.

        Dask blames every task on a worker that dies. So one that it gave up is run again with nothing else in flight.
        """
        for _ in range(TRIES_ALONE):
            if flight.poison or not flight.was_killed:
                break
            # A copy, since another thread may hand out tasks meanwhile.
            self.watch.wait([other for other in list(self._flying) if other is not flight])
            try:
                with reachable(self.client):
                    self.client.retry([flight.future])
            except KeyError:  # it is an input of the block, a task of somebody else, that ends workers
                break
            flight.began = time.monotonic()
            self.watch.wait([flight])
        if flight.poison is None and flight.was_killed:
            flight.poison = _deadly(flight)
        if flight.poison is not None:
            return flight.poison
        _raise_failure(flight.future)
        self.watch.note(flight)
        return flight.future

    def hold(self, shared: Any) -> Any:
        """Compute what all tasks of a pass share, and copy it to every worker before they start if there are many."""
        if isinstance(shared, Delayed):
            shared = self.client.compute(shared)
        elif not isinstance(shared, distributed.Future):
            return self.client.scatter(shared, broadcast=True, hash=False)
        if self.n_threads > FEW_THREADS:
            self.settle([shared])
            self.client.replicate(shared)
        return shared

    def apply(self, name: str, function: Callable, *handles: Any) -> Any:
        """Submit the function to where its arguments are."""
        return self.apply_all(name, function, [handles])[0]

    def apply_all(self, name: str, function: Callable, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Submit the calls in one message."""
        sealed = seal(partial(call_on, self.device.name, function))
        tasks = [call_unsealed(f"{name}-{self.run}-{next(self._counter)}", sealed, *handles) for handles in arguments]
        return self._begun(tasks, itertools.repeat(0))

    def begin(self, task: Delayed) -> Any:
        """Submit it."""
        return self.client.compute(task)

    def value(self, handle: Any) -> Any:
        """Gather one small result."""
        return self.values([handle])[0]

    def values(self, handles: Sequence[Any]) -> list[Any]:
        """Gather small results in one message."""
        self.settle(handles)
        with reachable(self.client):
            return self.client.gather(handles)

    def settle(self, handles: Sequence[Any]) -> None:
        """Wait on the scheduler's word; nothing is moved."""
        flights = [PendingTask(handle, f"the task {handle.key}") for handle in handles]
        self.watch.wait(flights)
        for flight in flights:
            found = self._verdict(flight)
            if isinstance(found, PoisonBlock):
                raise found

    def keep_pieces(self, most_bytes: int) -> None:
        """Give every worker an object that keeps it, and goes when this does."""
        self.kept_pieces = self.hold(KeptPieces(most_bytes))

    def check(self, rows: Rows) -> None:
        """Open the input once on every worker, and compare versions, before any long work.

        Raises
        ------
        SourceUnreachable
            Naming the worker and what it cannot do.
        """
        if self._checked is not rows:
            self.workers, self._checked = ask(self.client, rows, self.device.name), rows


def _deadly(flight: PendingTask) -> PoisonBlock:
    error = flight.future.exception()
    return PoisonBlock(
        f"{flight.what} ended every worker that it ran on, also alone; the last was {error.last_worker.address}. Look "
        "at its log; raise the memory limit if it was killed for memory. All other blocks of a job that writes to "
        "storage are kept, and the same line goes on with this one."
    )


def _raise_failure(future: distributed.Future) -> None:
    """Raise a failed task's own error, without the machinery around it; a result that is lost is made again."""
    if future.status not in ("error", "cancelled"):
        return
    if future.status != "error":
        raise SourceUnreachable(
            f"task {future.key} was {future.status}: its scheduler or workers are gone. Run again on a live cluster. "
            f"{GOES_ON}"
        )
    error = future.exception()
    raise error from (error.__cause__ if isinstance(error, DaskrrError) else None)


def executor(run: str, device: str | None = None) -> LocalExecutor | ClusterExecutor:
    """The current Dask client's cluster, or this process where there is none; see :func:`choose` for the device."""
    try:
        client = distributed.get_client()
    except ValueError:
        return LocalExecutor(choose(device, None))
    return ClusterExecutor(client, run, choose(device, client))
