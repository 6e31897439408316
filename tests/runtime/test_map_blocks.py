"""The verb: a function on every block of rows."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import add

import dask.array as da
import numpy as np
import pytest
import zarr
from processes import GENEROUS
from variants import slow_but

from daskrr.errors import InvalidData
from daskrr.runtime import tree
from daskrr.runtime.blocks import split
from daskrr.runtime.map_blocks import Run, map_blocks
from daskrr.runtime.rows import ConstantRows, JoinedRows, open_rows, pieces
from daskrr.runtime.sealing import seal

X = np.arange(46.0).reshape(23, 2)
STARTS = [0, 5, 10, 15, 20]


def gathered(source):
    return np.concatenate(list(pieces(source)))


def told(shared, source, start, column, *more):
    """What a block is called with."""
    return shared, start, gathered(source).tolist(), gathered(column).tolist(), *more


def scaled(factor, source, start):
    return factor * gathered(source)


@pytest.fixture(params=["one block each", "several blocks"])
def stored(request, tmp_path, monkeypatch):
    """Rows on storage, in spans of one block, or of four where there are as many."""
    if request.param == "several blocks":
        monkeypatch.setattr(tree, "SPANS_LEFT", 0)
    array = zarr.create_array(tmp_path / "X", shape=X.shape, chunks=(5, 2), dtype=X.dtype)
    array[:] = X
    return open_rows(tmp_path / "X")


@pytest.fixture(params=["this process", "cluster"])
def run(request, stored):
    if request.param == "cluster":
        request.getfixturevalue("client")
    return Run.over(stored, 5)


def items(run):
    """Of every block a word, as spans take them."""
    return [[f"block {block.index}" for block in span.blocks] for span in run.spans]


def test_run__has_spans_of_one_block_or_several(run, request):
    several = "several blocks" in request.node.name
    assert [span.n_blocks for span in run.spans] == ([4, 1] if several else [1] * 5)


def test_map_blocks__calls_with_shared_rows_start_others_and_each(run):
    column = ConstantRows(23, 7.0)
    found = map_blocks(run, "tell", told, run.rows, column, shared=["shared"], each=[items(run)]).values()
    for number, block in enumerate(split(23, 5)):
        rows, others = X[block.start : block.stop].tolist(), [7.0] * block.n_rows
        assert found[number] == ("shared", block.start, rows, others, f"block {number}")


class Words:
    """What is read where it is needed."""

    def __init__(self, words):
        self.words = words

    def read(self):
        return self.words


def test_map_blocks__reads_what_is_given_for_each_span_as_a_reference(run):
    references = [seal(Words(words)) for words in items(run)]
    found = map_blocks(run, "pair", lambda start, word: (start, word), each=[references]).values()
    assert found == [(start, f"block {number}") for number, start in enumerate(STARTS)]


@pytest.mark.parametrize("width", slow_but([1, 3], 3))
def test_map_blocks__reads_rows_that_are_in_memory_lazy_or_joined_alike(run, width):
    column = open_rows(np.arange(23.0), ndim=1)
    lazy = open_rows(da.from_array(X, chunks=(7, width)))
    joined = JoinedRows(run.rows, column, 4.0)
    expected = np.column_stack([X, np.sqrt(4.0 * np.arange(23.0))])
    for rows, wanted in ((open_rows(X), X), (lazy, X), (joined, expected)):
        found = map_blocks(Run.over(rows, 5), "scale", scaled, rows, shared=[1.0]).values()
        np.testing.assert_array_equal(np.concatenate(found), wanted)
        over_stored = map_blocks(run, "scale", scaled, rows, shared=[1.0], purpose=type(rows).__name__).values()
        np.testing.assert_array_equal(np.concatenate(over_stored), wanted)


def test_map_blocks__without_rows_calls_with_the_start_alone(run):
    assert map_blocks(run, "count", lambda start: start).values() == STARTS


def test_lazy__is_the_array_of_all_results(run):
    array = map_blocks(run, "scale", scaled, run.rows, shared=[2.0]).lazy(2)
    assert array.chunks == (tuple(span.n_rows for span in run.spans), (2,))
    np.testing.assert_array_equal(array.compute(), 2 * X)


def test_lazy__has_chunks_of_one_height(stored, tmp_path):
    run = Run.over(stored, 1)
    array = map_blocks(run, "scale", scaled, run.rows, shared=[2.0]).lazy(2)
    height = max(span.n_rows for span in run.spans)
    assert set(array.chunks[0][:-1]) <= {height}
    array.to_zarr(str(tmp_path / "stored.zarr"))
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "stored.zarr")[:], 2 * X)


def test_total__is_added_by_the_tree(run):
    parts = map_blocks(run, "start", lambda start: f"({start})")
    # The last block comes first, then what is there of every level, each from left to right.
    assert parts.total(lambda first, second: f"[{first}{second}]") == "[[[[(0)(5)](10)](15)](20)]"
    assert map_blocks(run, "length", lambda start: start, purpose="sum").total(add) == 50


def test_handles__are_of_the_lists_of_spans(run):
    handles = map_blocks(run, "count", lambda start: start).handles()
    found = run.executor.values(handles)
    assert found == [[block.start for block in span.blocks] for span in run.spans]


def test_only__keeps_what_belongs_to_each_span(run):
    some = map_blocks(run, "pair", lambda start, one: (start, one), each=[items(run)]).only(run.spans[-1:])
    assert some.values() == [(20, "block 4")]


def test_finish__holds_nothing_and_runs_every_block(run, tmp_path):
    (tmp_path / "touched").mkdir()
    map_blocks(run, "touch", partial(touch, tmp_path / "touched")).finish(nothing)
    assert sorted(int(path.name) for path in (tmp_path / "touched").iterdir()) == STARTS


def touch(folder, start):
    (folder / str(start)).touch()


def nothing(span, results):
    for _ in results:
        pass


def test_values__of_a_block_that_fails_name_its_rows(run):
    with pytest.raises(InvalidData, match="bad") as caught:
        map_blocks(run, "fail", fail_at_10, run.rows).values()
    assert "in the block of rows 10–14" in caught.value.__notes__


def fail_at_10(source, start):
    if start == 10:
        raise InvalidData("bad")


def test_map_blocks__reads_a_dask_array_anew_each_time(client):
    lazy = open_rows(da.from_array(X, chunks=(7, 2)))
    run = Run.over(lazy, 5)
    first = map_blocks(run, "scale", scaled, lazy, shared=[1.0], purpose="one")
    second = map_blocks(run, "scale", scaled, lazy, shared=[1.0], purpose="other")
    arrays = first.lazy(2), second.lazy(2)
    assert not set(arrays[0].__dask_graph__()) & set(arrays[1].__dask_graph__())
    np.testing.assert_array_equal(np.concatenate(first.values()), X)
    np.testing.assert_array_equal(arrays[1].compute(), X)


def test_progress__tells_tasks_and_rows(run):
    events = []
    told_run = Run(run.name, run.rows, run.spans, run.executor, events.append)
    map_blocks(told_run, "count-rows", lambda start: start).values("counting")
    assert {event.stage for event in events} == {"counting"}
    assert (events[-1].done, events[-1].total, events[-1].rows) == (len(run.spans), len(run.spans), 23)


def wait_for(path, *given):
    """Until there is something at the path."""
    deadline = time.monotonic() + GENEROUS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_map_blocks__deals_out_two_blocks_to_a_thread_and_the_others_to_whichever_is_free_first(client, tmp_path):
    array = zarr.create_array(tmp_path / "X", shape=(55, 2), chunks=(5, 2), dtype=X.dtype)
    array[:] = 1.0
    run, scheduler = Run.over(open_rows(tmp_path / "X"), 5), client.cluster.scheduler
    shared = [tmp_path / "go", *(run.executor.hold(number) for number in range(6))]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(map_blocks(run, "wait", wait_for, run.rows, shared=shared).values)
        dealt = n_queued = 0
        while dealt + n_queued < 11 and not running.done():
            dealt, n_queued = sum(len(one.processing) for one in scheduler.workers.values()), len(scheduler.queued)
        (tmp_path / "go").touch()
        running.result()
    assert (dealt, n_queued) == (4, 7)
