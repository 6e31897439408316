"""Waiting for a cluster that has no workers, no scheduler or a task that hangs, and what workers tell of themselves."""

import logging
import threading
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

import daskrr
from daskrr.errors import PoisonBlock, SourceUnreachable
from daskrr.kernels import Gaussian
from daskrr.runtime import executors, workers
from daskrr.runtime.blocks import Block
from daskrr.runtime.executors import ClusterExecutor, LocalExecutor
from daskrr.runtime.futures import Flights, PendingTask, begun, check_condition, only_while
from daskrr.runtime.rows import NumpyRows, open_rows
from daskrr.runtime.sealing import sealed_task

END = threading.Event()
RAN: list[int] = []


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
    return (sealed_task(f"{name}-run-{number}", function, number) for number in range(count))


def double(number):
    return 2 * number


def note(number):
    RAN.append(number)
    return number


def hang_on_two(number):
    if number == 2:
        END.wait(60)
    return number


def test_window__hands_over_first_what_can_run_at_once(threads, monkeypatch):
    sizes, get = [], threads.client.get
    monkeypatch.setattr(threads.client, "get", lambda graph, *a, **k: sizes.append(len(graph)) or get(graph, *a, **k))
    found = [threads.value(handle) for _, handle in threads.window(tasks("first", double, 9), blocks(9), light=True)]
    assert sorted(found) == [2 * number for number in range(9)]
    assert sizes[0] == 1
    assert sum(sizes) == 9


def test_window__runs_its_tasks_in_order(threads):
    RAN.clear()
    assert len(list(threads.window(tasks("ordered", note, 100), blocks(100), light=True))) == 100
    assert list(range(100)) == RAN


def test_window__runs_what_is_below_a_task_with_it(threads):
    RAN.clear()
    above = (sealed_task(f"above-{n}", note, sealed_task(f"below-{n}", note, n)) for n in range(20))
    assert len(list(threads.window(above, blocks(20)))) == 20
    ahead = [number - place // 2 for place, number in enumerate(RAN)]
    assert sorted(RAN) == sorted([*range(20), *range(20)])
    assert max(ahead) <= 2  # a worker is sent one more than it can run


def test_window__sends_no_more_of_a_lazy_array_than_its_tasks_need(threads, monkeypatch):
    sent, get = [], threads.client.get
    monkeypatch.setattr(threads.client, "get", lambda graph, *a, **k: sent.append(dict(graph)) or get(graph, *a, **k))
    rows = open_rows(da.ones((400, 2), chunks=(1, 2)) + 1)
    work = (sealed_task(f"first-{n}", np.sum, rows.source(n, n + 1)) for n in range(5))
    found = [threads.value(handle) for _, handle in threads.window(work, blocks(5))]
    assert found == [4.0] * 5
    assert sum(map(len, sent)) <= 5 * 5


def test_check__asks_the_workers_once_for_the_same_rows(threads, monkeypatch):
    asked = []
    monkeypatch.setattr(executors, "ask", lambda client, rows, device: asked.append(rows) or {})
    one, other = (open_rows(np.ones((3, 2))) for _ in range(2))
    for rows in (one, one, other):
        threads.check(rows)
    assert asked == [one, other]


def test_window__gives_each_result_with_its_span(threads):
    window = threads.window(tasks("double", double, 9), blocks(9))
    assert {block.index: threads.value(handle) for block, handle in window} == {n: 2 * n for n in range(9)}


@pytest.mark.slow
@pytest.mark.parametrize(("few", "copied_when_done"), [(0, [True]), (1, [])])
def test_hold__copies_what_is_shared_to_many_workers_before_their_tasks(few, copied_when_done, threads, monkeypatch):
    copied, copy = [], threads.client.replicate
    monkeypatch.setattr(executors, "FEW_THREADS", few)
    monkeypatch.setattr(threads.client, "replicate", lambda future: (copied.append(future.done()), copy(future)))
    held = threads.hold(sealed_task("shared-run", double, 4))
    assert threads.value(threads.apply("double", double, held)) == 16
    assert copied == copied_when_done


def test_window__names_the_rows_of_a_block_that_hangs_where_nobody_can_end_it(threads):
    with dask.config.set({"daskrr.stuck-after": "500ms"}):
        window = threads.window(tasks("hang", hang_on_two, 3), blocks(3))
        assert sorted(threads.value(next(window)[1]) for _ in range(2)) == [0, 1]
        with pytest.raises(PoisonBlock, match=r"the block of rows 20–29 did not end within .* has no nanny"):
            next(window)


class LostOnce:
    """A future that is done, lost with its worker before anybody looks, and done again."""

    status = "finished"

    def __init__(self):
        self.told = 0

    def add_done_callback(self, tell):
        self.told += 1
        tell(self)

    def done(self):
        return self.told > 1


def test_flights__wait_again_for_a_result_that_was_lost():
    flights = Flights(SimpleNamespace(look=lambda pending: None, client=SimpleNamespace(status="running")))
    flight = PendingTask(LostOnce(), "the task")
    flights.add(flight)
    assert flights.next_ended() is flight
    assert flight.future.told == 2
    assert flights.next_ended() is None


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


@pytest.mark.parametrize("in_background", [False, True])
def test_begun__has_the_result(in_background):
    assert begun(lambda: 5, in_background).result(timeout=60) == 5


@pytest.mark.parametrize("in_background", [False, True])
def test_begun__tells_its_failure_when_it_is_asked(in_background):
    failed = begun(lambda: 1 / 0, in_background)
    with pytest.raises(ZeroDivisionError):
        failed.result(timeout=60)


def test_begun__at_once_can_be_interrupted():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begun(interrupted, in_background=False)


def test_begun__in_background_knows_what_its_caller_knows():
    def no_use():
        raise SourceUnreachable("there is no use in waiting")

    with only_while(no_use):
        failed = begun(check_condition, in_background=True)
    with pytest.raises(SourceUnreachable, match="no use in waiting"):
        failed.result(timeout=60)
