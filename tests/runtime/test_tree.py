"""The tree of sums: no bit depends on how it is cut into tasks, on the order in which they end, or on earlier runs."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskrr.runtime import tree
from daskrr.runtime.blocks import split
from daskrr.runtime.tree import FAN_IN, NodeSums, Span, cut, partial_nodes, sum_node

SHAPES = {
    "n_rows": st.integers(1, 900),
    "height": st.integers(1, 9),
    "n_threads": st.integers(0, 40),
    "most": st.floats(0.5, 300),
}


def numbers(n_blocks):
    """One for every block, whose sum depends on the order of additions."""
    return np.random.default_rng(n_blocks).standard_normal(n_blocks) * 10.0 ** np.arange(n_blocks) ** 0.5


def part_of(span, values):
    """The sum of a span, as a task makes it."""
    blocks = iter([values[block.index] for block in span.blocks])
    return sum_node(span.level, blocks, lambda first, second: first + second)


def added(*parts):
    return list(itertools.accumulate(parts))[-1]


def all_added(lists):
    return [added(*parts) for parts in lists]


def reference(values, n_whole):
    """The sum of all blocks, written down anew: complete nodes of every level, highest level first."""

    def node(level, number):
        if level == 0:
            return values[number]
        return added(*(node(level - 1, FAN_IN * number + child) for child in range(FAN_IN)))

    parts = []
    for level in reversed(range(12)):
        count = n_whole // FAN_IN**level
        waiting = range(count - count % FAN_IN, count)
        if waiting:
            parts.append(added(*(node(level, number) for number in waiting)))
    return added(*parts, *values[n_whole:])


@given(**SHAPES, seed=st.integers(0, 9))
def test_total__has_the_same_bits_however_it_is_cut_and_in_whatever_order(n_rows, height, n_threads, most, seed):
    values = numbers(len(split(n_rows, height)))
    spans = cut(n_rows, height, n_threads, most)
    random.Random(seed).shuffle(spans)
    sums = NodeSums(all_added, 1 + seed)
    for span in spans:
        sums.push(span, part_of(span, values))
    assert sums.total() == reference(values, n_rows // height)


@given(**SHAPES, before=st.integers(0, 900), data=st.data())
def test_go_on_from__gives_the_bits_of_a_full_run(n_rows, height, n_threads, most, before, data):
    values = numbers(len(split(n_rows, height)))
    n_before = min(before, n_rows) // height
    earlier = NodeSums(all_added, data.draw(st.integers(1, 9)))
    for span in cut(n_before * height, height, data.draw(st.integers(1, 9)), data.draw(st.floats(1, 99))):
        earlier.push(span, part_of(span, values))
    partials = earlier.partials()
    assert [(one.level, one.count) for one in partials] == partial_nodes(n_before)
    sums = NodeSums(all_added)
    sums.go_on_from(partials, n_before)
    for span in cut(n_rows, height, n_threads, most, n_before):
        if span.first_block >= n_before:
            sums.push(span, part_of(span, values))
    assert sums.total() == reference(values, n_rows // height)


@given(**SHAPES, before=st.integers(0, 900))
def test_cut__covers_all_rows_by_nodes(n_rows, height, n_threads, most, before):
    cut_at = min(before, n_rows) // height
    spans = cut(n_rows, height, n_threads, most, cut_at)
    assert [span.index for span in spans] == list(range(len(spans)))
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == n_rows
    assert [block for span in spans for block in span.blocks] == split(n_rows, height)
    for span in spans:
        if span.is_whole:
            assert span.n_blocks == FAN_IN**span.level
            assert span.first_block % span.n_blocks == 0
            assert not span.first_block < cut_at < span.first_block + span.n_blocks
        else:
            assert span is spans[-1]
            assert span.n_blocks == 1
        assert span.n_blocks <= max(1.0, most)


@pytest.mark.parametrize("n_threads", [1, 16, 1000])
@pytest.mark.parametrize(("height", "most"), [(16384, 16), (8192, 5.6), (8192, 300)])
@pytest.mark.parametrize("n_rows", [10**8, 10**9, 10**10])
def test_cut__has_few_large_spans_and_small_ones_at_the_end(n_rows, height, most, n_threads):
    spans = cut(n_rows, height, n_threads, most)
    sizes = [span.n_blocks for span in spans if span.is_whole]
    each = 8 if n_threads < 100 else 2
    assert min(each * n_threads, n_rows // height) <= len(sizes) <= 20_000
    assert max(sizes) == sizes[0]
    if n_threads < 100:
        assert sizes[-1] <= max(1.0, tree.SMALLEST * sizes[0] * FAN_IN)


@pytest.mark.parametrize("n_threads", [2, 3, 16])
@pytest.mark.parametrize("n_blocks", [3, 24, 195, 1000, 5000])
def test_cut__leaves_a_thread_half_as_fast_as_others_no_span_that_they_would_wait_for(n_blocks, n_threads):
    """While it is at one, there is twice as much for each of them, where a scheduler has time for so small ones."""
    for span in cut(10 * n_blocks, 10, n_threads, 16):
        if span.n_blocks > 1:
            left_for_each = (n_blocks - span.first_block - span.n_blocks) / (n_threads - 1)
            assert left_for_each >= 2 * span.n_blocks


@pytest.mark.parametrize("n_threads", [100, 256, 1000, 4000])
def test_cut__gives_a_scheduler_no_more_than_it_can_hand_out(n_threads):
    """A task of full size takes about a second; so many rows that every thread has at least two of them."""
    full = tree.blocks_of_a_span(8192, 2.2e6, 8 * 1024**2, n_threads)
    spans = cut(8192 * 16 * n_threads * int(full), 8192, n_threads, full)
    seconds = 16 * max(1.0, n_threads / tree.THREADS_OF_A_SCHEDULER)
    assert len(spans) / seconds <= 2.5 * tree.THREADS_OF_A_SCHEDULER


@pytest.mark.parametrize(("height", "flops", "sum_bytes", "expected"), [
    (8192, 2.2e6, 8 * 1024**2, 5),  # p = 1024: by the time it takes
    (16384, 1.4e5, 8 * 256**2, 8),  # p = 256: by its rows
    (100, 1e2, 8 * 8192**2, 1),  # sums that are too large to have several of
    (100, 0.0, 0, 1310),
])  # fmt: skip
def test_blocks_of_a_span__follow_time_rows_and_memory(height, flops, sum_bytes, expected):
    assert int(tree.blocks_of_a_span(height, flops, sum_bytes)) == expected


@settings(max_examples=30)
@given(n_rows=st.integers(1, 5000), height=st.integers(1, 40))
def test_most_additions__is_no_less_than_the_depth_of_the_sum(n_rows, height):
    sums = NodeSums(lambda lists: [list(itertools.accumulate(one, lambda a, b: max(a, b) + 1))[-1] for one in lists])
    for span in cut(n_rows, height, 1, 1.0):
        sums.push(span, 0)
    assert sums.total() <= tree.most_additions(n_rows, height)


def test_span__of_one_short_block_is_no_node():
    assert not Span(0, 0, 7, 10).is_whole
    assert Span(0, 0, 10, 10).is_whole
