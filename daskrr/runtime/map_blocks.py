"""The verb: a pure function on every block of rows, with what all blocks share at hand.

:func:`map_blocks` says what is to be done; the :class:`BlockMap` that it returns does it, as a lazy array, as handles
of results that stay where they were made, as their sum, or for what they leave on storage. A task walks the blocks of
one span (:mod:`daskrr.runtime.tree`), one after the other. Keys of tasks, the sources of blocks, sealing, titles and
progress are made here and nowhere else.
"""

import functools
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import dask.array as da
import numpy as np
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph

from daskrr import machine
from daskrr.errors import PoisonBlock
from daskrr.runtime.blocks import Block, block_rows
from daskrr.runtime.devices import CPU, TASKS_AT_ONCE, Choice, in_order
from daskrr.runtime.executors import Executor, batch_size, executor
from daskrr.runtime.progress import Reporter, Stage, silent
from daskrr.runtime.rows import Rows, for_one_task, narrowed
from daskrr.runtime.sealing import call_unsealed, seal, unseal
from daskrr.runtime.tree import (
    GPU_SPAN_BLOCKS,
    LEAST_GPU_SPAN_BLOCKS,
    NodeSums,
    Span,
    blocks_of_a_span,
    cut,
    single_blocks,
    sum_node,
)
from daskrr.storage.journal import Journal
from daskrr.storage.pieces import KeptPieces

# Small results come to this process so many spans at a time: all of them together would be a load on the workers.
FETCHED_TOGETHER = 64

# Makes what a task returns, of its span and the results of its blocks as they come.
Reduce = Callable[[Span, Iterator[Any]], Any]


class Settle(Protocol):
    """Has what was written of some blocks reach the disk; or only waits until nothing of them is written any more."""

    def __call__(self, starts: Iterable[int], only_end: bool = False) -> None: ...


class Where(Protocol):
    """What the size of tasks depends on: an executor, or a plan for one."""

    @property
    def n_threads(self) -> int:
        """Threads that tasks run on."""

    @property
    def device(self) -> Choice:
        """What they compute on."""


@dataclass(frozen=True)
class Run:
    """One run: its name, the rows and their spans, where tasks are executed, and who is told of progress.

    With a journal, what is finished is recorded, and what was recorded is not done again. ``earlier`` are sums of a run
    over the first of the rows (:class:`daskrr.nystrom.checkpoints.Earlier`).
    """

    name: str
    rows: Rows
    spans: Sequence[Span]
    executor: Executor
    report: Reporter
    journal: Journal | None = None
    earlier: Any = None

    @classmethod
    def over(cls, rows: Rows, height: int, report: Reporter = silent) -> "Run":
        """A run of its own over rows in blocks of ``height``, where Dask computes; on processors, as it does little."""
        name = uuid.uuid4().hex
        where = executor(name, CPU)
        return cls(name, rows, spans_of(rows, height, where), where, report)

    @classmethod
    def of_columns(cls, rows: Rows, n_landmarks: int, report: Reporter = silent) -> "Run":
        """A run of its own that computes kernel columns of so many landmarks."""
        name = uuid.uuid4().hex
        where = executor(name)
        height = block_rows(n_landmarks, rows, on_gpu=where.device.gpu is not None)
        return cls(name, rows, spans_of(rows, height, where), where, report)

    @property
    def height(self) -> int:
        """Rows of a block; the last may have fewer."""
        return self.spans[0].height


def spans_of(
    rows: Rows, height: int, where: Where, row_flops: float = 0.0, sum_bytes: int = 0, cut_at: int = 0
) -> list[Span]:
    """Spans for the threads that there are, of rows that take some flops each and whose sums take some bytes.

    What is sent with a task, or made by others for it, is in memory as a whole: such rows have spans of one block.
    """
    if not rows.is_stored:
        return cut(rows.n_rows, height, where.n_threads, 1.0, cut_at)
    if where.device.gpu is not None:
        n_gpus = max(1, where.n_threads // TASKS_AT_ONCE)
        return cut(rows.n_rows, height, n_gpus, GPU_SPAN_BLOCKS, cut_at, LEAST_GPU_SPAN_BLOCKS)
    return cut(
        rows.n_rows, height, where.n_threads, blocks_of_a_span(height, row_flops, sum_bytes, where.n_threads), cut_at
    )


def map_blocks(
    run: Run,
    name: str,
    function: Callable[..., Any],
    *rows: Rows,
    shared: Sequence[Any] = (),
    each: Sequence[Sequence[Any]] = (),
    blocks: Sequence[Block] | None = None,
    purpose: str = "",
) -> "BlockMap":
    """``function(*shared, source, start, *sources, *each)`` on every block of a run, or on other ``blocks``.

    Parameters
    ----------
    name
        What people who watch the cluster read.
    function
        Pure. ``source`` stands for its block of the first of the rows, the others follow the number of its first row;
        see :func:`daskrr.runtime.rows.pieces`. Without rows there is the number alone.
    shared
        Values, handles or tasks that all blocks are given.
    each
        Sequences with one item for each span: what its blocks are given, in a list, or something that can ``read`` it;
        or a handle of either, or what :func:`daskrr.runtime.sealing.seal` made of the latter.
    purpose
        Tells apart what one run maps by the same name.
    """
    key = f"{name}-{run.name}-{purpose}" if purpose else f"{name}-{run.name}"
    return BlockMap(
        run=run,
        name=name,
        key=key,
        function=function,
        rows=rows,
        shared=tuple(shared),
        each=tuple(each),
        spans=run.spans if blocks is None else single_blocks(blocks),
    )


@dataclass(frozen=True)
class BlockMap:
    """What :func:`map_blocks` was told; nothing has run yet."""

    run: Run
    name: str
    key: str
    function: Callable[..., Any]
    rows: tuple[Rows, ...]
    shared: tuple[Any, ...]
    each: tuple[Sequence[Any], ...]
    spans: Sequence[Span]

    def _tasks(self, reduce: Reduce) -> Iterator[Delayed]:
        """One per span; its rows are read anew, so that no key of a lazy array is shared with another reading."""
        rows = [one.anew(f"{self.key}-{number}") for number, one in enumerate(self.rows)]
        device, kept = self.run.executor.device.name, self.run.executor.kept_pieces
        work = seal(partial(_walk, device, self.function, reduce, len(self.shared), len(rows)))
        light = self._is_light
        for position, span in enumerate(self.spans):
            sources = [one.source(span.start, span.stop) for one in rows]
            given = (*self.shared, *sources, *(items[position] for items in self.each))
            place = (span.index, span.start, span.stop, span.height)
            # "span" keeps it from the keys of :meth:`Executor.apply`, which are numbered too.
            yield call_unsealed(f"{self.key}-span-{span.index}", work, place, kept, *given, waits_for_thread=light)

    @property
    def _is_light(self) -> bool:
        """Whether tasks bring no rows with them."""
        return all(one.is_stored for one in self.rows)

    def only(self, spans: Sequence[Span]) -> "BlockMap":
        """The same on some of the spans."""
        place = {span.index: position for position, span in enumerate(self.spans)}
        each = tuple([items[place[span.index]] for span in spans] for items in self.each)
        return replace(self, spans=spans, each=each)

    def window(self, reduce: Reduce, *, spare: bool = False) -> Iterator[tuple[Span, Any]]:
        """Each span with a handle of its result, as they end; see :meth:`Executor.window`."""
        return self.run.executor.window(self._tasks(reduce), self.spans, spare=spare, light=self._is_light)

    def lazy(self, n_columns: int) -> da.Array:
        """The array (n_rows, n_columns) that the blocks' results make up; nothing runs before it is computed.

        Its chunks are all of one height, but for the last, so that it can be stored as it is.
        """
        tasks: Any
        tasks, name = list(self._tasks(_joined)), f"array-{self.key}"
        layer: dict[Any, Any] = {(name, index, 0): one.key for index, one in enumerate(tasks)}
        graph = HighLevelGraph.from_collections(name, layer, dependencies=tasks)
        chunks = (tuple(span.n_rows for span in self.spans), (n_columns,))
        array = da.Array(graph, name, chunks, dtype=np.float64)
        return array.rechunk({0: max(span.n_rows for span in self.spans)})

    def handles(self, title: str = "", row_flops: float = 0.0) -> list[Any]:
        """Of the list of results of the blocks of each span, in order."""
        handles: dict[int, Any] = {}
        with self._stage(title, row_flops) as stage:
            for span, handle in self.window(_listed):
                handles[span.index] = handle
                stage.advance(rows=span.n_rows)
        return [handles[span.index] for span in self.spans]

    def values(self, title: str = "", row_flops: float = 0.0, settle: Settle | None = None) -> list[Any]:
        """The small results of all blocks themselves, in this process.

        ``settle`` has what was written of some blocks, by their first rows, reach the disk before their task ends.
        """
        found: dict[int, list[Any]] = {}
        waiting: dict[int, Any] = {}
        with self._stage(title, row_flops) as stage:
            for span, handle in self.window(_listed if settle is None else partial(settled, settle)):
                waiting[span.index] = handle
                stage.advance(rows=span.n_rows)
                if len(waiting) == FETCHED_TOGETHER:
                    found |= self._fetched(waiting)
                    waiting = {}
            found |= self._fetched(waiting)
        return [value for span in self.spans for value in found[span.index]]

    def _fetched(self, handles: dict[int, Any]) -> dict[int, list[Any]]:
        return dict(zip(handles, self.run.executor.values([*handles.values()]), strict=True))

    def total(self, add: Callable[[Any, Any], Any], title: str = "") -> Any:
        """Their sum by the tree, made where they are; nothing else is brought to this process.

        So what a block finds may be larger than what all may send.
        """
        return self.run.executor.value(self.total_handle(add, title))

    def total_handle(self, add: Callable[[Any, Any], Any], title: str = "") -> Any:
        """Handle of the same."""
        where = self.run.executor
        sums = NodeSums(partial(where.apply_all, "add-up", partial(_chain, add)), batch_size(where))
        with self._stage(title) as stage:
            for span, handle in self.window(partial(_summed, add)):
                sums.push(span, handle)
                stage.advance(rows=span.n_rows)
        return sums.total()

    def finish(self, reduce: Reduce, title: str = "", row_flops: float = 0.0) -> None:
        """Run what leaves its results on storage; nothing is held, so that nothing is lost with a worker.

        Raises
        ------
        PoisonBlock
            When all other spans are done.
        """
        poison: list[PoisonBlock] = []
        with self._stage(title, row_flops) as stage:
            for span, handle in self.window(reduce, spare=True):
                if isinstance(handle, PoisonBlock):
                    poison.append(handle)
                else:
                    stage.advance(rows=span.n_rows)
            raise_poison(poison)

    def _stage(self, title: str, row_flops: float = 0.0) -> Stage:
        n_rows = sum(span.n_rows for span in self.spans)
        return Stage(self.run.report, title or self.name.replace("-", " "), len(self.spans), n_rows, row_flops)


def _walk(
    device: str,
    function: Callable[..., Any],
    reduce: Reduce,
    n_shared: int,
    n_rows: int,
    place: Sequence[int],
    kept: KeptPieces | None,
    *given: Any,
) -> Any:
    """What ``reduce`` makes of the function's results on the blocks of a span, on a worker."""
    span = Span(*place)
    shared, sources = given[:n_shared], given[n_shared : n_shared + n_rows]
    each = [_read(items) for items in given[n_shared + n_rows :]]
    if device == CPU:
        sources = tuple(map(for_one_task, sources))

    def calls() -> Iterator[Callable[[], Any]]:
        for number, block in enumerate(span.blocks):
            first = block.start - span.start
            parts = [narrowed(one, first, first + block.n_rows) for one in sources] if span.n_blocks > 1 else sources
            if device != CPU:  # its blocks are read side by side, each for itself
                parts = [for_one_task(one, ahead=False, kept=kept) for one in parts]
            items = (*parts[:1], block.start, *parts[1:], *(one[number] for one in each))
            yield partial(_for_rows, block, function, *shared, *items)

    found = reduce(span, in_order(device, calls()))
    machine.tidy_memory()
    return found


def _read(items: Any) -> Any:
    """What the blocks of a span are given, wherever it waited for them."""
    reference = unseal(items) if isinstance(items, bytes) else items
    return reference.read() if hasattr(reference, "read") else reference


def _for_rows(block: Block, function: Callable, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        error.add_note(f"in the block of rows {block.start}–{block.stop - 1}")
        raise


def _listed(span: Span, results: Iterable[Any]) -> list[Any]:
    return list(results)


def settled(settle: Settle, span: Span, results: Iterable[Any]) -> list[Any]:
    """The results of the blocks of a span, once what was written of them is settled.

    Where one fails nothing is written any more when that is known: its job may delete what was.
    """
    starts = [block.start for block in span.blocks]
    try:
        found = list(results)
    except BaseException:
        settle(starts, only_end=True)
        raise
    settle(starts)
    return found


def _joined(span: Span, results: Iterable[Any]) -> Any:
    found = list(results)
    return found[0] if len(found) == 1 else np.concatenate(found)


def _summed(add: Callable[[Any, Any], Any], span: Span, results: Iterator[Any]) -> Any:
    return sum_node(span.level, results, add)


def _chain(add: Callable[[Any, Any], Any], *parts: Any) -> Any:
    return functools.reduce(add, parts)


def raise_poison(found: Sequence[PoisonBlock]) -> None:
    """Raise what was spared, if anything."""
    if found:
        raise PoisonBlock(" ".join(map(str, found)))
