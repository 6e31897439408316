"""The fixed tree by which sums over blocks are added, and the spans of blocks that tasks work on.

Blocks are the leaves, numbered from the first row on. A node of level k has :data:`FAN_IN` nodes of level k − 1 below
it, so FAN_IN**k blocks, and its sum is theirs, added from left to right. So no bit of a sum depends on which nodes were
summed by one task (a *span* is a node, of any level), on how many workers there are, or on the order in which tasks
end; and a run over more rows goes on from the nodes of an earlier one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskrr.runtime.blocks import Block

# Children of a node. Small, so that some level has tasks of about the wished size.
FAN_IN = 4

# A task takes about a second on a fast core, and no result of its rows takes much memory. Where there are many tasks,
# the smallest take no less than a twentieth of that; and there are no more large ones than this, however many rows.
SPAN_FLOPS = 1e11
SMALLEST = 0.05
MAX_SPAN_ROWS = 2**17
MAX_SPANS = 15_000

# Blocks of a GPU are large, and a task computes some of them at a time: also the last ones.
GPU_SPAN_BLOCKS, LEAST_GPU_SPAN_BLOCKS = FAN_IN**2, FAN_IN

# What the sums of the levels of a span may take, and the highest level there is.
MAX_SUM_BYTES = 2**27
MAX_LEVEL = 30

# Large spans first, small ones at the end, so that all threads end together: while one is at a span, there is so much
# left for each of the others, which may be so many times as fast. As long as every thread gets so many spans, none is
# smaller than it has to be.
SPANS_LEFT = 2
SPANS_EACH = 16

# One scheduler hands out some 400 tasks a second, and so keeps this many threads at work on tasks of full size. Where
# there are more, tasks are larger and for a longer time, and the more there are, the larger are the smallest, if every
# thread gets two.
THREADS_OF_A_SCHEDULER = 400


@dataclass(frozen=True)
class Span:
    """Rows ``start`` to ``stop``, the unit of work of a task: blocks of ``height`` rows, number ``index`` of a run.

    They are a whole node of the tree; or the last block, which may have fewer rows and is no part of any node.
    """

    index: int
    start: int
    stop: int
    height: int

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return -(-self.n_rows // self.height)

    @property
    def first_block(self) -> int:
        """Number of its first block."""
        return self.start // self.height

    @property
    def blocks(self) -> list[Block]:
        """Its blocks."""
        starts = range(self.start, self.stop, self.height)
        return [Block(start // self.height, start, min(start + self.height, self.stop)) for start in starts]

    @property
    def is_whole(self) -> bool:
        """Whether it stays as it is when rows are appended."""
        return self.n_rows % self.height == 0

    @property
    def level(self) -> int:
        """Of its node."""
        return level_below(self.n_blocks)


def level_below(n_blocks: float) -> int:
    """The highest level of which a node has no more than ``n_blocks`` blocks."""
    level = 0
    while FAN_IN ** (level + 1) <= n_blocks:
        level += 1
    return level


def single_blocks(blocks: Sequence[Block]) -> list[Span]:
    """A span for every block."""
    return [Span(block.index, block.start, block.stop, max(1, block.n_rows)) for block in blocks]


def cut(
    n_rows: int, height: int, n_threads: int, most_blocks: float, cut_at: int = 0, least_blocks: int = 1
) -> list[Span]:
    """Cut rows in blocks of ``height`` into spans of at most ``most_blocks``, for so many threads.

    No span has rows before and after block ``cut_at``, where the sums of an earlier run end.
    """
    n_whole, n_threads = n_rows // height, max(1, n_threads)
    most = max(1.0, most_blocks)
    if most > 1 and n_whole > MAX_SPANS * FAN_IN ** level_below(most):
        most = FAN_IN ** (level_below(n_whole / MAX_SPANS) + 1)
    by_scheduler = n_threads / THREADS_OF_A_SCHEDULER * max(most_blocks, most / FAN_IN)
    least = max(
        float(least_blocks),
        min(SMALLEST * most_blocks, n_whole / (SPANS_EACH * n_threads)),
        min(by_scheduler, n_whole / (2 * n_threads)),
    )
    spans_left = SPANS_LEFT if n_threads <= THREADS_OF_A_SCHEDULER else 1
    shares = max(spans_left, 1 + spans_left * (n_threads - 1))
    spans: list[Span] = []
    first = 0
    while first < n_whole:
        stop = cut_at if first < cut_at else n_whole
        fair = max(least, (stop - first) / shares)
        level = min(level_below(min(most, fair)), _alignment(first), level_below(stop - first))
        spans.append(Span(len(spans), first * height, (first + FAN_IN**level) * height, height))
        first += FAN_IN**level
    if n_whole * height < n_rows:
        spans.append(Span(len(spans), n_whole * height, n_rows, height))
    return spans


def _alignment(first: int) -> int:
    """The highest level of a node that begins with block ``first``."""
    level = 0
    while level < MAX_LEVEL and first % FAN_IN ** (level + 1) == 0:
        level += 1
    return level


def blocks_of_a_span(height: int, row_flops: float, sum_bytes: int, n_threads: int = 1) -> float:
    """How many blocks of ``height`` rows one task of so many at a time may work on.

    It has one sum for every level in memory, which is why large ones are summed in small spans.
    """
    highest = min(MAX_SUM_BYTES // max(sum_bytes, 1), MAX_LEVEL)
    many = n_threads / THREADS_OF_A_SCHEDULER
    flops, rows = SPAN_FLOPS * max(1.0, many), MAX_SPAN_ROWS * max(1.0, 4.0 * many)
    return min(flops / max(row_flops * height, 1.0), rows / height, FAN_IN**highest)


def sum_node(level: int, parts: Iterator[Any], add: Callable[[Any, Any], Any]) -> Any:
    """The sum of a node of the tree, of the parts of its blocks, with one sum for every level in memory."""
    if level == 0:
        return next(parts)
    total = sum_node(level - 1, parts, add)
    for _ in range(FAN_IN - 1):
        total = add(total, sum_node(level - 1, parts, add))
    return total


@dataclass(frozen=True)
class Partial:
    """The sum of the first ``count`` children, of ``level``, of a node whose others are not there."""

    level: int
    count: int
    part: Any


@dataclass
class NodeSums:
    """Sums of nodes, in any order, added when all children of one are there, and of ``batch`` such nodes at a time.

    ``add_all`` makes of lists of parts the sum of each, from left to right; a part is whatever that takes, such as a
    handle of a result.
    """

    add_all: Callable[[list[list[Any]]], Sequence[Any]]
    batch: int = 1
    tail: Any = None
    _children: dict[tuple[int, int], dict[int, tuple[int, Any]]] = field(default_factory=dict)
    _complete: list[tuple[int, int]] = field(default_factory=list)

    def go_on_from(self, earlier: Sequence[Partial], n_blocks: int) -> None:
        """Begin with the sums of the first ``n_blocks`` blocks, as :meth:`partials` gave them."""
        for one in earlier:
            number = n_blocks // FAN_IN**one.level - one.count
            self._children[one.level + 1, number // FAN_IN] = {0: (one.count, one.part)}

    def push(self, span: Span, part: Any) -> None:
        """Take the sum of a span."""
        if not span.is_whole:
            self.tail = part
            return
        self._push(span.level, span.first_block // FAN_IN**span.level, part)
        if len(self._complete) >= self.batch:
            self._add_complete()

    def _push(self, level: int, number: int, part: Any) -> None:
        parent, place = divmod(number, FAN_IN)
        children = self._children.setdefault((level + 1, parent), {})
        children[place] = (1, part)
        if _count(children) == FAN_IN:
            self._complete.append((level + 1, parent))

    def _add_complete(self) -> None:
        while self._complete:
            nodes, self._complete = self._complete, []
            sums = self.add_all([_parts(self._children.pop(node)) for node in nodes])
            for (level, number), part in zip(nodes, sums, strict=True):
                self._push(level, number, part)

    def partials(self) -> list[Partial]:
        """What a run over more rows can go on from, lowest level first: sums of whole blocks alone."""
        self._add_complete()
        for node, children in self._children.items():
            if len(children) > 1:
                (part,) = self.add_all([_parts(children)])
                self._children[node] = {0: (_count(children), part)}
        return [
            Partial(level - 1, _count(children), *_parts(children))
            for (level, _), children in sorted(self._children.items())
        ]

    def total(self) -> Any:
        """The sum of all, in the order of rows: what is there of every level, highest first, then the last block."""
        parts = [one.part for one in reversed(self.partials())]
        parts += [self.tail] * (self.tail is not None)
        return parts[0] if len(parts) == 1 else self.add_all([parts])[0]


def _count(children: dict[int, tuple[int, Any]]) -> int:
    return sum(count for count, _ in children.values())


def _parts(children: dict[int, tuple[int, Any]]) -> list[Any]:
    return [children[place][1] for place in sorted(children)]


def partial_nodes(n_blocks: int) -> list[tuple[int, int]]:
    """Level and number of the nodes which wait for others when so many blocks are summed, lowest level first."""
    return [
        (level, count)
        for level in range(level_below(max(1, n_blocks)) + 1)
        if (count := n_blocks // FAN_IN**level % FAN_IN)
    ]


def most_additions(n_rows: int, height: int) -> int:
    """At most how many additions a block's sum goes through on its way to that of all rows."""
    levels = level_below(max(1, n_rows // height)) + 1
    return FAN_IN * levels + 1
