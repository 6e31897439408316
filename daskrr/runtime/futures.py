"""Waiting for tasks of a cluster without waiting for ever: its scheduler may die, its workers stay away, a task hang.

``dask.config`` has two limits: ``daskrr.stuck-after``, the least time after which a task that takes far longer than its
siblings is moved to another worker, and ``daskrr.no-workers-after``, how long a cluster may be without workers.
"""

import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future as LocalFuture
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import distributed

from daskrr import config
from daskrr.errors import DaskrrError, PoisonBlock, SourceUnreachable

log = logging.getLogger("daskrr")

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_COUNTS = 2.0
TIMES_ITS_SIBLINGS = 20
RESTART_SECONDS = 30.0

_condition: ContextVar[Callable[[], None] | None] = ContextVar("daskrr-condition", default=None)

GOES_ON = "A job that writes to storage goes on where it was if the same line is run again."


@contextmanager
def only_while(condition: Callable[[], None]) -> Iterator[None]:
    """Stop waiting for tasks as soon as ``condition`` raises."""
    token = _condition.set(condition)
    try:
        yield
    finally:
        _condition.reset(token)


def check_condition() -> None:
    """Raise if there is no use in waiting any longer."""
    condition = _condition.get()
    if condition is not None:
        condition()


@dataclass(eq=False)
class PendingTask:
    """A task that was handed to the cluster: its future, what people call it, and since when it is under way."""

    future: distributed.Future
    what: str
    span: Any = None
    began: float = field(default_factory=time.monotonic)
    restarts: int = 0
    poison: PoisonBlock | None = None

    @property
    def done(self) -> bool:
        """Whether there is nothing to wait for, for better or worse."""
        return self.poison is not None or self.future.done()

    @property
    def was_killed(self) -> bool:
        """Whether Dask gave up on the task because its workers died."""
        return self.future.status == "error" and isinstance(self.future.exception(), distributed.KilledWorker)


class Flights:
    """Tasks under way, in their order, which tell when they end, so that nobody has to look at all of them."""

    def __init__(self, watch: "Watch") -> None:
        self.pending: dict[PendingTask, None] = {}
        self._watch, self._ended = watch, SimpleQueue[PendingTask]()

    def add(self, flight: PendingTask) -> None:
        """Take one more."""
        self.pending[flight] = None
        self._await(flight)

    def _await(self, flight: PendingTask) -> None:
        flight.future.add_done_callback(lambda _: self._ended.put(flight))

    def next_ended(self) -> PendingTask | None:
        """The next that ends, for better or worse; None if there is none left.

        Raises
        ------
        SourceUnreachable
            The scheduler is gone, or has no workers.
        """
        while self.pending:
            check_condition()
            self._watch.look(self.pending)
            with reachable(self._watch.client):
                ended = self._wait() or next((flight for flight in self.pending if flight.poison), None)
            if ended is None or ended not in self.pending:
                continue
            if ended.done:
                del self.pending[ended]
                return ended
            self._await(ended)  # its result was lost with a worker, and is made again
        return None

    def _wait(self) -> PendingTask | None:
        try:
            return self._ended.get(timeout=SECONDS_BETWEEN_LOOKS)
        except Empty:
            return None


@contextmanager
def reachable(client: distributed.Client) -> Iterator[None]:
    """Say in our own words that the scheduler is gone, whichever way Dask found that out."""
    try:
        yield
    except DaskrrError:
        raise
    except (CancelledError, OSError) as error:
        raise _gone(client, type(error).__name__) from None
    if client.status != "running":
        raise _gone(client, f"the client is {client.status}")


def _gone(client: distributed.Client, found: str) -> SourceUnreachable:
    address = client.scheduler.address if client.scheduler else "its address"
    return SourceUnreachable(
        f"the scheduler at {address} is gone, or its connection is ({found}). Start it again. {GOES_ON}"
    )


class Watch:
    """Waits for the tasks of one client."""

    def __init__(self, client: distributed.Client) -> None:
        self.client, self.n_threads = client, 0
        self._asked, self._looked, self._last_seen = -math.inf, -math.inf, time.monotonic()
        self._took: deque[float] = deque(maxlen=101)

    def wait(self, flights: Sequence[PendingTask], first: bool = False) -> None:
        """Wait until all are done, or the first of them.

        Raises
        ------
        SourceUnreachable
            The scheduler is gone, or has no workers.
        """
        while waiting := [flight for flight in flights if not flight.done]:
            check_condition()
            if first and len(waiting) < len(flights):
                return
            self.look(waiting)
            with reachable(self.client), suppress(TimeoutError):
                distributed.wait(
                    [flight.future for flight in waiting if not flight.done],
                    timeout=SECONDS_BETWEEN_LOOKS,
                    return_when="FIRST_COMPLETED" if first else "ALL_COMPLETED",
                )

    def look(self, flights: Iterable[PendingTask]) -> None:
        """See, now and then, that there are workers, and that none of the tasks is stuck."""
        self.count_threads()
        if time.monotonic() >= self._looked + SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            self._free_stuck([flight for flight in flights if not flight.done])

    def note(self, flight: PendingTask) -> None:
        """Learn from a task that ended how long its siblings may take."""
        self._took.append(time.monotonic() - flight.began)

    def count_threads(self) -> int:
        """Threads of all workers; the scheduler is asked again now and then, since workers come and go."""
        now = time.monotonic()
        if now >= self._asked + SECONDS_BETWEEN_COUNTS:
            with reachable(self.client):
                self._asked, self.n_threads = now, sum(self.client.nthreads().values())
            patience = config.seconds("no-workers-after")
            if self.n_threads:
                self._last_seen = now
            elif now > self._last_seen + patience:
                raise SourceUnreachable(
                    f"the cluster has had no workers for {patience:g} seconds. Look why they died, and start some. "
                    f"{GOES_ON}"
                )
        return self.n_threads

    def _free_stuck(self, flights: Sequence[PendingTask]) -> None:
        """Restart workers on which a task takes far too long; the task is run elsewhere."""
        now = time.monotonic()
        limit = max(config.seconds("stuck-after"), TIMES_ITS_SIBLINGS * statistics.median(self._took or [0.0]))
        late = [flight for flight in flights if now > flight.began + limit]
        if not late:
            return
        with reachable(self.client):
            found = self.client.processing()
        place = {key: worker for worker, keys in found.items() for key in keys}
        restarted = set()
        for flight in late:
            worker = place.get(flight.future.key)
            if worker is not None and worker not in restarted:
                # Of the tasks of a worker the first is at work; the others wait for it.
                restarted.add(worker)
                self._restart(flight, worker, now - flight.began)
            flight.began = time.monotonic()

    def _restart(self, flight: PendingTask, worker: str, seconds: float) -> None:
        flight.restarts += 1
        if flight.restarts > 1:
            flight.poison = _stuck(flight, f"twice did not end within {seconds:.0f} s, the second time on {worker}")
            self.client.cancel([flight.future])
        log.warning(
            "%s did not end within %.0f s on worker %s, which is restarted: other tasks take %.1f s",
            flight.what, seconds, worker, statistics.median(self._took or [0.0]),
        )  # fmt: skip
        try:
            with reachable(self.client):
                self.client.restart_workers([worker], timeout=RESTART_SECONDS, raise_for_error=False)
        except ValueError:
            flight.poison = flight.poison or _stuck(
                flight, f"did not end within {seconds:.0f} s on {worker}, which has no nanny that could restart it"
            )


def _stuck(flight: PendingTask, found: str) -> PoisonBlock:
    return PoisonBlock(
        f"{flight.what} {found}. Look at what hangs there: a store that does not answer, or a kernel function. "
        "dask.config's daskrr.stuck-after sets the limit."
    )


def begun(call: Callable[[], Any], in_background: bool) -> LocalFuture[Any]:
    """The result of a call, to come where it runs elsewhere and this process can go on; else there at once."""
    found: LocalFuture[Any] = LocalFuture()
    if in_background:
        # It may last, and must not keep this process from ending.
        context = copy_context()  # such as which client is the current one
        threading.Thread(target=context.run, args=(_fulfil, found, call), name="daskrr-begun", daemon=True).start()
    else:
        _fulfil(found, call)
    return found


def _fulfil(found: LocalFuture[Any], call: Callable[[], Any]) -> None:
    try:
        found.set_result(call())
    except Exception as error:
        found.set_exception(error)
