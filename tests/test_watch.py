"""Waiting for a cluster that has no workers, no scheduler or a task that hangs, and what workers tell of themselves."""

import logging
import threading

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

import daskrr
from daskrr.engine import workers
from daskrr.engine.passes import Block, ClusterExecutor, LocalExecutor, task
from daskrr.engine.rows import NumpyRows
from daskrr.errors import PoisonBlock, SourceUnreachable
from daskrr.kernels import Gaussian

END = threading.Event()


@pytest.fixture
def threads():
    """An executor whose one worker is a thread of this process, and has no nanny."""
    END.clear()
    options = {"processes": False, "dashboard_address": None, "silence_logs": logging.CRITICAL}
    # Not the default client: closed by a test, it would stay that of the process.
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, **options) as own,
        Client(own, set_as_default=False) as client,
        client.as_current(),
    ):
        yield ClusterExecutor(client, "run")
        END.set()


def blocks(count):
    return [Block(number, number * 10, number * 10 + 10) for number in range(count)]


def tasks(name, function, count):
    return [task(name, "run", number, function, number) for number in range(count)]


def double(number):
    return 2 * number


def hang_on_two(number):
    if number == 2:
        END.wait(60)
    return number


def test_window__gives_results_in_order_or_as_they_end(threads):
    for name, in_order in (("in-order", True), ("as-they-end", False)):
        window = threads.window(tasks(name, double, 9), blocks(9), in_order=in_order)
        found = {block.index: threads.value(handle) for block, handle in window}
        assert found == {number: 2 * number for number in range(9)}
        assert not in_order or list(found) == list(range(9))


def test_window__names_the_rows_of_a_block_that_hangs_where_nobody_can_end_it(threads):
    with dask.config.set({"daskrr.stuck-after": "500ms"}):
        window = threads.window(tasks("hang", hang_on_two, 3), blocks(3))
        assert [threads.value(next(window)[1]) for _ in range(2)] == [0, 1]
        with pytest.raises(PoisonBlock, match=r"the block of rows 20–29 did not end within .* has no nanny"):
            next(window)


def test_wait__for_a_cluster_without_workers_ends():
    options = {"processes": False, "dashboard_address": None, "silence_logs": logging.CRITICAL}
    with (
        LocalCluster(n_workers=0, **options) as own,
        Client(own) as client,
        dask.config.set({"daskrr.no-workers-after": "500ms"}),
        pytest.raises(SourceUnreachable, match=r"no workers for 0\.5 seconds.* same line"),
    ):
        list(ClusterExecutor(client, "run").window(tasks("alone", double, 3), blocks(3)))


def test_wait__for_a_scheduler_that_is_gone_ends(threads):
    window = threads.window(tasks("gone", hang_on_two, 4), blocks(4))
    next(window)
    next(window)
    threads.client.close()
    with pytest.raises(SourceUnreachable, match=r"scheduler .*(is|are) gone.* same line"):
        next(window)


def test_workers__tell_what_they_are(client):
    there = ClusterExecutor(client, "run")
    here = LocalExecutor()
    for one in (there, here):
        one.check(NumpyRows(np.ones((3, 2))))
    assert there.workers["count"] == 2
    assert here.workers["count"] == 1
    assert there.workers["processors"] == here.workers["processors"]
    assert there.workers["versions"]["numpy"] == [np.__version__]
    result = daskrr.leverage_scores(np.random.default_rng(0).random((60, 2)), Gaussian(1.0), 1e-2, 10, progress=False)
    assert result.summary["workers"] == there.workers


def test_workers__that_differ_are_reported(caplog):
    one = workers.facts()
    with caplog.at_level(logging.WARNING, "daskrr"):
        workers.describe([one, one])
        assert not caplog.records
        found = workers.describe([one, one | {"processor": "abacus", "scipy": "0.1"}])
    assert found["processors"] == sorted(["abacus", one["processor"]])
    assert "differ in their processor" in caplog.text
    assert "differ in their scipy" in caplog.text
