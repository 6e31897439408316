"""The ordered list of blocks of a pass, and the two ways to execute it.

A pass is a list of :class:`dask.delayed.Delayed` tasks, one per block of rows, each a pure function of the block's
source and of shared factors. :func:`as_array` makes a lazy Dask array of the list; an *executor* runs it through a
bounded window of tasks in flight and hands the results out in block order, each to be released before the next.
"""

import itertools
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future as LocalFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import dask
import dask.array as da
import distributed
import numpy as np
from dask.delayed import Delayed, delayed
from dask.highlevelgraph import HighLevelGraph

from daskrr.engine.journal import Journal
from daskrr.engine.opaque import call_sealed, seal
from daskrr.engine.progress import Reporter, Stage
from daskrr.engine.rows import Rows
from daskrr.engine.watch import GOES_ON, Flight, Watch, reachable
from daskrr.engine.workers import ask, describe, facts
from daskrr.errors import DaskrrError, PoisonBlock, SourceUnreachable, check_count

log = logging.getLogger("daskrr")

# A block should be worth its p × p partial sum and its share of task overhead, no block should take minutes, and that
# of an array without chunks is in memory as a whole.
BLOCK_FLOPS = 1e9
MAX_BLOCK_ROWS = 65536
MAX_BLOCK_BYTES = 128 * 2**20
ROWS_PER_LANDMARK = 8

# A byte is decoded in about the time of 50 flops, and may take a twentieth of a block's time.
FLOPS_PER_DECODED_BYTE = 1000

# A task whose workers died is given so many more, alone, before it is blamed.
TRIES_ALONE = 2

# Results of blocks that one task adds to the sum.
ADDENDS = 4

# Rows of a superblock: enough that writing its p × p sum costs little beside making it.
SUPERBLOCK_ROWS = 65_536


@dataclass(frozen=True)
class Block:
    """Rows ``start`` to ``stop`` of the input, the unit of work of a task."""

    index: int
    start: int
    stop: int

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


def block_rows(n_landmarks: int, rows: Rows, wanted: int | None = None) -> int:
    """Rows of a block, chosen by the number of landmarks and the input's chunks, never by n or the workers.

    Whole chunks where they are small. A large chunk is shared by several blocks, each of which decodes it anew, as long
    as that costs little beside its work: a few large chunks would leave workers idle at the end of a pass.
    """
    unit = rows.unit_rows
    if wanted is None:
        by_flops = min(MAX_BLOCK_ROWS, int(BLOCK_FLOPS / n_landmarks**2))
        wanted = min(max(by_flops, ROWS_PER_LANDMARK * n_landmarks), MAX_BLOCK_ROWS // 2)
        wanted = 1 << (wanted - 1).bit_length()
        wanted = max(1, min(wanted, MAX_BLOCK_BYTES // rows.row_bytes))
        worth_decoding = FLOPS_PER_DECODED_BYTE * unit * rows.row_bytes / (2 * n_landmarks**2)
        wanted = max(wanted, min(unit, int(worth_decoding)))
    check_count("block_rows", wanted)
    if wanted < unit:
        return -(-unit // round(unit / wanted))
    return unit * round(wanted / unit)


def window_size(n_threads: int) -> int:
    """How many tasks are in flight: two for every thread, so that none waits for the client."""
    return max(4, 2 * n_threads)


def split(n_rows: int, height: int) -> list[Block]:
    """Cut ``n_rows`` into blocks of ``height`` rows; the last may be shorter."""
    starts = range(0, n_rows, height)
    return [Block(i, start, min(start + height, n_rows)) for i, start in enumerate(starts)]


@dataclass(frozen=True)
class Superblock:
    """Consecutive blocks whose sums are kept together; ``n_whole`` of them will not change when rows are appended."""

    index: int
    blocks: tuple[Block, ...]
    n_whole: int
    is_whole: bool


def superblocks(blocks: Sequence[Block]) -> list[Superblock]:
    """Group blocks of equal height; boundaries depend on that alone, never on how many blocks there are."""
    height = blocks[0].n_rows
    each = max(1, -(-SUPERBLOCK_ROWS // height))
    found = []
    for number, start in enumerate(range(0, len(blocks), each)):
        group = tuple(blocks[start : start + each])
        # The height of a single block is that of the rows.
        n_whole = sum(block.n_rows == height for block in group) if len(blocks) > 1 else 0
        found.append(Superblock(number, group, n_whole, n_whole == each))
    return found


def task(name: str, run: str, index: int, function: Callable, *arguments: Any) -> Delayed:
    """A task that the dashboard shows as ``name``; its key is unique to the run."""
    key = f"{name}-{run}-{index}"
    return delayed(call_sealed, pure=False, traverse=False)(seal(function), *arguments, dask_key_name=key)


def constant(value: Any, name: str) -> Delayed:
    """A value as a task argument, not looked into by Dask."""
    return delayed(value, name=name, traverse=False)


def as_array(name: str, tasks: Sequence[Any], blocks: Sequence[Block], n_columns: int) -> da.Array:
    """The lazy array (n_rows, n_columns) called ``name`` whose row blocks are the results of ``tasks``."""
    layer: dict[Any, Any] = {(name, index, 0): one.key for index, one in enumerate(tasks)}
    graph = HighLevelGraph.from_collections(name, layer, dependencies=tasks)
    chunks = (tuple(block.n_rows for block in blocks), (n_columns,))
    return da.Array(graph, name, chunks, dtype=np.float64)


class Executor(Protocol):
    """Where tasks run; a *handle* stands for a result that need not be in this process."""

    workers: dict[str, Any]

    @property
    def n_threads(self) -> int:
        """Threads that tasks run on."""

    def window(
        self, tasks: Iterable[Delayed], blocks: Iterable[Block], *, in_order: bool = True, spare: bool = False
    ) -> Iterator[tuple[Block, Any]]:
        """Run one task per block with a bounded number in flight; yield each block with a handle of its result.

        With ``spare``, a :class:`PoisonBlock` stands for the result of a block that kills its workers, and the others
        go on; otherwise it is raised.
        """

    def apply(self, name: str, function: Callable, *handles: Any) -> Any:
        """Handle of ``function(*results)``, computed where the results are."""

    def value(self, handle: Any) -> Any:
        """The result behind a handle, in this process."""

    def values(self, handles: Sequence[Any]) -> list[Any]:
        """The results behind several handles, in this process."""

    def settle(self, handles: Sequence[Any]) -> None:
        """Wait until the results behind ``handles`` are there, wherever that is."""

    def hold(self, shared: Any) -> Any:
        """What all tasks of a pass share (a task, a handle or a value), ready as an argument of each."""

    def check(self, rows: Rows) -> None:
        """Raise unless every worker can read ``rows``; note in ``workers`` what they are."""


@dataclass(frozen=True)
class Run:
    """One run: its name, the rows and their blocks, where tasks are executed, and who is told of progress.

    With a journal, what is finished is recorded, and what was recorded is not done again. ``earlier`` are sums of a run
    over the first of the rows (:class:`daskrr.nystrom.sums.Earlier`).
    """

    name: str
    rows: Rows
    blocks: list[Block]
    executor: Executor
    report: Reporter
    journal: Journal | None = None
    earlier: Any = None

    @property
    def _n_rows(self) -> int:
        return sum(block.n_rows for block in self.blocks)

    def collect(self, title: str, tasks: Iterable[Delayed], row_flops: float = 0.0) -> list[Any]:
        """Run one task per block under a title that people see; a handle of each result, in block order."""
        handles: list[Any] = []
        with Stage(self.report, title, len(self.blocks), self._n_rows, row_flops) as stage:
            for block, handle in self.executor.window(tasks, self.blocks):
                handles.append(handle)
                stage.advance(rows=block.n_rows)
        return handles

    def total(self, title: str, tasks: Iterable[Delayed], add: Callable[[Any, Any], Any]) -> Any:
        """Run one task per block and add up what they find where it is, from left to right; the sum, in this process.

        Nothing but the sum is brought here, so that what a block finds may be larger than what all may send.
        """
        found: Any = None
        with Stage(self.report, title, len(self.blocks), self._n_rows) as stage:
            for block, handle in self.executor.window(tasks, self.blocks):
                found = handle if found is None else self.executor.apply("add-up", add, found, handle)
                stage.advance(rows=block.n_rows)
        return self.executor.value(found)

    def finish(self, title: str, tasks: Iterable[Delayed], row_flops: float = 0.0) -> None:
        """Run one task per block whose results are on storage; nothing is held, so that nothing is lost with a worker.

        Raises
        ------
        PoisonBlock
            When all other blocks are done.
        """
        poison: list[PoisonBlock] = []
        with Stage(self.report, title, len(self.blocks), self._n_rows, row_flops) as stage:
            for block, handle in self.executor.window(tasks, self.blocks, in_order=False, spare=True):
                if isinstance(handle, PoisonBlock):
                    poison.append(handle)
                else:
                    stage.advance(rows=block.n_rows)
            raise_poison(poison)


def raise_poison(found: Sequence[PoisonBlock]) -> None:
    """Raise what was spared, if anything."""
    if found:
        raise PoisonBlock(" ".join(map(str, found)))


class LocalExecutor:
    """Runs tasks on threads of this process; handles are the results themselves."""

    def __init__(self) -> None:
        self.n_threads = len(os.sched_getaffinity(0))
        self.workers: dict[str, Any] = {}

    def window(
        self, tasks: Iterable[Delayed], blocks: Iterable[Block], *, in_order: bool = True, spare: bool = False
    ) -> Iterator[tuple[Block, Any]]:
        """Run ``tasks`` on one thread per core, always in order."""
        pending: deque[tuple[Block, LocalFuture]] = deque()
        work = zip(tasks, blocks, strict=True)
        with ThreadPoolExecutor(self.n_threads) as pool:
            try:
                while True:
                    free = 2 * self.n_threads - len(pending)
                    pending.extend(
                        (block, pool.submit(_compute_here, one)) for one, block in itertools.islice(work, free)
                    )
                    if not pending:
                        return
                    block, future = pending.popleft()
                    yield block, future.result()
                    del future
            finally:
                for _, future in pending:
                    future.cancel()

    def apply(self, name: str, function: Callable, *handles: Any) -> Any:
        """Call the function."""
        return function(*(_compute_here(one) if isinstance(one, Delayed) else one for one in handles))

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

    def check(self, rows: Rows) -> None:
        """This process has opened the rows already."""
        self.workers = describe([facts()])


def _compute_here(one: Delayed) -> Any:
    return dask.compute(one, scheduler="synchronous")[0]


class ClusterExecutor:
    """Runs tasks on a Dask cluster; handles are futures, and results stay on the workers."""

    def __init__(self, client: distributed.Client, run: str) -> None:
        self.client, self.run, self.watch = client, run, Watch(client)
        self.workers: dict[str, Any] = {}
        self._counter = itertools.count()
        self._flying: list[Flight] = []

    @property
    def n_threads(self) -> int:
        """Threads of all workers, as far as is known."""
        return self.watch.n_threads

    def window(
        self, tasks: Iterable[Delayed], blocks: Iterable[Block], *, in_order: bool = True, spare: bool = False
    ) -> Iterator[tuple[Block, Any]]:
        """Keep two tasks per worker thread in flight, the first of them to run first.

        Results that wait for an earlier one are bounded as well, since they take memory on the workers.
        """
        flights: deque[Flight] = deque()
        work = enumerate(zip(tasks, blocks, strict=True))
        try:
            while True:
                self._launch(work, flights)
                if not flights:
                    return
                ended = next(
                    (flight for flight in itertools.islice(flights, 1 if in_order else None) if flight.done), None
                )
                if ended is None:
                    self.watch.wait([flight for flight in flights if not flight.done], first=True)
                    continue
                found = self._verdict(ended)
                flights.remove(ended)
                self._flying.remove(ended)
                if isinstance(found, PoisonBlock) and not spare:
                    raise found
                yield ended.block, found
                del ended, found
        finally:
            self._flying = [flight for flight in self._flying if flight not in flights]
            if flights and self.client.status == "running":
                self.client.cancel([flight.future for flight in flights])

    def _launch(self, work: Iterator[tuple[int, tuple[Delayed, Block]]], flights: deque[Flight]) -> None:
        """Hand the next tasks to the cluster, as many as there is room for."""
        limit = window_size(self.watch.count_threads())
        running = sum(not flight.done for flight in flights)
        free = min(limit - running, limit + self.n_threads - len(flights))
        for index, (one, block) in itertools.islice(work, max(0, free)):
            future = self.client.compute(one, priority=-index)
            flights.append(Flight(future, f"the block of rows {block.start}–{block.stop - 1}", block))
            self._flying.append(flights[-1])

    def _verdict(self, flight: Flight) -> Any:
        """The handle of a task that has ended, or the proof that it ends its workers; any other failure is raised.

        Dask blames every task on a worker that dies. So one that it gave up is run again with nothing else in flight.
        """
        for _ in range(TRIES_ALONE):
            if flight.poison or not flight.was_killed:
                break
            self.watch.wait([other for other in self._flying if other is not flight])
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
        """Compute what all tasks of a pass share and copy it to every worker before they start."""
        if isinstance(shared, Delayed):
            shared = self.client.compute(shared)
        elif not isinstance(shared, distributed.Future):
            return self.client.scatter(shared, broadcast=True, hash=False)
        self.settle([shared])
        self.client.replicate(shared)
        return shared

    def apply(self, name: str, function: Callable, *handles: Any) -> Any:
        """Submit the function to where its arguments are."""
        key = f"{name}-{self.run}-{next(self._counter)}"
        return self.client.submit(call_sealed, seal(function), *handles, key=key, pure=False)

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
        flights = [Flight(handle, f"the task {handle.key}") for handle in handles]
        self.watch.wait(flights)
        for flight in flights:
            found = self._verdict(flight)
            if isinstance(found, PoisonBlock):
                raise found

    def check(self, rows: Rows) -> None:
        """Open the input once on every worker, and compare versions, before any long work.

        Raises
        ------
        SourceUnreachable
            Naming the worker and what it cannot do.
        """
        self.workers = ask(self.client, rows)


def _deadly(flight: Flight) -> PoisonBlock:
    error = flight.future.exception()
    return PoisonBlock(
        f"{flight.what} ended every worker that it ran on, also alone; the last was {error.last_worker.address}. Look "
        "at its log; raise the memory limit if it was killed for memory. All other blocks of a job that writes to "
        "storage are kept, and the same line goes on with this one."
    )


def _raise_failure(future: distributed.Future) -> None:
    """Raise a failed task's own error, without the machinery around it."""
    if future.status not in ("error", "cancelled", "lost"):
        return
    if future.status != "error":
        raise SourceUnreachable(
            f"task {future.key} was {future.status}: its scheduler or workers are gone. Run again on a live cluster. "
            f"{GOES_ON}"
        )
    error = future.exception()
    raise error from (error.__cause__ if isinstance(error, DaskrrError) else None)


def executor(run: str) -> LocalExecutor | ClusterExecutor:
    """The current Dask client's cluster, or this process where there is none."""
    try:
        client = distributed.get_client()
    except ValueError:
        return LocalExecutor()
    return ClusterExecutor(client, run)
