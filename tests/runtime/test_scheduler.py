"""The p × p algebra on the scheduler, its fallbacks, and what a run leaves behind."""

import asyncio
import gc
import logging
import os
import signal
import time
from functools import partial
from pathlib import Path

import cloudpickle
import dask
import dask.array as da
import distributed
import numpy as np
import pytest
import zarr
from conftest import GENEROUS, OTHER_VERSION, WITHOUT_DASKRR, command_line_cluster
from distributed import Client, LocalCluster

import daskrr
from daskrr.errors import DoesNotFit, KernelNotPositive, RidgeTooSmall, SourceUnreachable
from daskrr.nystrom import factors
from daskrr.runtime import scheduler as module
from daskrr.runtime.executors import ClusterExecutor
from daskrr.runtime.scheduler import _perform

KERNEL = daskrr.kernels.Gaussian(2.0)
OPTIONS = {
    "kernel": KERNEL,
    "ridge": 1e-3,
    "landmarks": 80,
    "sampling": "diagonal",
    "random_state": 0,
    "block_rows": 300,
    "progress": False,
}


@pytest.fixture(scope="module")
def points() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1500, 4))


@pytest.fixture(scope="module")
def store(points: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("points") / "points.zarr"
    array = zarr.create_array(path, shape=points.shape, chunks=(300, 4), dtype=points.dtype)
    array[:] = points
    return path


@pytest.fixture(scope="module")
def reference(points: np.ndarray) -> np.ndarray:
    """Scores computed in this process, before any client exists."""
    return daskrr.leverage_scores(points, **OPTIONS).scores.compute(scheduler="synchronous")


def test_leverage_scores__cluster_and_source_change_no_bit(reference, points, store, client) -> None:
    sources = [
        points,
        store,
        zarr.open_array(store, mode="r"),
        da.from_array(points, chunks=(300, 2)),
        da.from_array(points, chunks=((700, 11, 789), 4)),
        da.from_array(points, chunks=(300, 4)).persist(),
    ]
    for source in sources:
        result = daskrr.leverage_scores(source, **OPTIONS)
        np.testing.assert_array_equal(result.scores.compute(), reference)
        assert result.summary["algebra"]["place"] == "scheduler"


def test_store__writes_the_same_bits_from_workers(reference, store, client, tmp_path) -> None:
    daskrr.score_to_zarr(store, tmp_path / "scores.zarr", **OPTIONS)
    group = zarr.open_group(tmp_path / "scores.zarr", mode="r")
    np.testing.assert_array_equal(group["scores"][:], reference)


def test_lazy_dask_input__is_evaluated_up_to_three_times(points, client) -> None:
    def count(block: np.ndarray) -> np.ndarray:
        distributed.get_worker().log_event("evaluated", len(block))
        return block

    X = da.from_array(points, chunks=(300, 4)).map_blocks(count, dtype=float)
    result = daskrr.leverage_scores(X, **OPTIONS)
    result.scores.sum().compute()
    rows_evaluated = sum(rows for _, rows in client.get_events("evaluated"))
    assert len(points) * 2 <= rows_evaluated <= len(points) * 3


def test_lazy_dask_input__with_reductions_gives_no_conflict_of_keys(points, client, caplog) -> None:
    X = da.from_array(points, chunks=(500, 4))
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    with caplog.at_level(logging.WARNING, "distributed.scheduler"):
        result = daskrr.leverage_scores(X, **OPTIONS)
        total = float(result.scores.sum().compute())
    assert total == pytest.approx(result.sketch_dimension, rel=1e-9)
    assert not [record for record in caplog.records if "run_spec" in record.getMessage()]


def test_top__is_reduced_on_the_workers(points, store, client) -> None:
    result = daskrr.leverage_scores(store, **OPTIONS)
    top = result.top(7)
    estimate = result.estimate.compute()
    order = np.lexsort((np.arange(len(estimate)), -estimate))[:7]
    np.testing.assert_array_equal(top.rows, order)
    np.testing.assert_array_equal(top.values, estimate[order])


@pytest.mark.slow
def test_sketch__scores_new_rows_on_the_cluster(points, store, client) -> None:
    result = daskrr.leverage_scores(store, **OPTIONS)
    # Rows of the data are in the Gram matrix already.
    function = result.sketch.leverage_function(points).compute()
    np.testing.assert_allclose(function, result.scores.compute(), rtol=1e-6)
    np.testing.assert_allclose(result.sketch.scores(points).compute(), function / (1 + function), rtol=1e-12)


def test_tasks__have_readable_names_and_carry_no_factor(store, client) -> None:
    result = daskrr.leverage_scores(store, **OPTIONS)
    names = {dask.utils.key_split(key) for key in result.scores.__dask_graph__()}
    assert {"score-rows", "fetch-factor"} <= names
    sizes = {key: len(cloudpickle.dumps(node)) for key, node in dict(result.scores.__dask_graph__()).items()}
    assert max(sizes.values()) < 10_000  # the combined factor alone has 51,200 bytes
    prefixes = client.run_on_scheduler(lambda dask_scheduler: set(dask_scheduler.task_prefixes))
    assert {"sample-rows", "gram", "landmark-kernel", "keep-residual", "add-grams"} <= prefixes


def _kept_runs(client: Client) -> list[str]:
    return client.sync(client.scheduler.daskrr_hello)["runs"]


def _wait_until(condition) -> bool:
    deadline = time.monotonic() + GENEROUS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_factors__are_kept_while_an_array_needs_them_and_freed_after(store, client) -> None:
    result = daskrr.leverage_scores(store, **OPTIONS)
    run, scores = result.sketch.run, result.scores
    del result
    gc.collect()
    assert run in _kept_runs(client)
    persisted = scores.persist()
    del scores
    gc.collect()
    assert np.isfinite(persisted.compute()).all()
    del persisted
    gc.collect()
    assert _wait_until(lambda: run not in _kept_runs(client))


@pytest.mark.slow
def test_factors__are_freed_when_their_client_leaves(store, cluster, client) -> None:
    with Client(cluster, set_as_default=False) as other, other.as_current():
        result = daskrr.leverage_scores(store, **OPTIONS)
        assert result.sketch.run in _kept_runs(client)
    assert _wait_until(lambda: result.sketch.run not in _kept_runs(client))
    client.restart()


class LeavingClient:
    """A scheduler whose client leaves while the inputs of a step are gathered."""

    def __init__(self) -> None:
        self.clients, self.handlers, self.tasks = {"client": object()}, {}, {}

    async def gather(self, keys: list[str]) -> dict:
        self.clients.clear()
        self.plugin.remove_client(self, "client")
        return {"status": "OK", "data": dict.fromkeys(keys)}


@pytest.mark.parametrize("begins", [True, False])
def test_perform__for_a_client_that_leaves_meanwhile_keeps_nothing(begins, monkeypatch) -> None:
    monkeypatch.setattr(module, "_gathered_perform", lambda *_: ("kept", "summary", {}))

    async def work() -> list[str]:
        scheduler, plugin = LeavingClient(), module.FactorPlugin()
        scheduler.plugin = plugin
        await plugin.start(scheduler)
        if not begins:
            await plugin.perform("run", b"step", None, "client", begins=True)
        first = await plugin.perform("run", b"step", "key", "client", begins)
        late = await plugin.perform("run", b"step", None, "client", begins=True)
        copied = await plugin.fork("run", "copy", "client")
        await plugin.close()
        assert (plugin.runs, plugin.owners, plugin.ending) == ({}, {}, {})
        return [answer["status"] for answer in (first, late, copied)]

    assert asyncio.run(work()) == ["OK", "gone", "gone"]


@pytest.mark.parametrize("ended", [("run", "run-round1"), ("run-round1", "run")])
def test_free__of_a_run_and_of_one_named_after_it_drops_both(ended, client) -> None:
    kept = [module.OnScheduler(ClusterExecutor(client, run), run) for run in ended]
    keys = [one.payload(pick).key for one in kept for pick in (factors.scorer, factors.new_rows)]
    scheduler, plugin = LeavingClient(), module.FactorPlugin()
    scheduler.tasks = dict.fromkeys(keys)

    async def work() -> None:
        await plugin.start(scheduler)
        for run in ended:
            plugin.runs[run], plugin.owners[run] = None, "client"
        for run in ended:
            await plugin.free(run)
        await plugin.close()

    asyncio.run(work())
    for key in keys:
        assert plugin.runs.keys() == plugin.owners.keys() == set(plugin.ending.values())
        plugin.transition(key, "released", "forgotten")
    assert (plugin.runs, plugin.owners, plugin.ending) == ({}, {}, {})


def inner_until(X: np.ndarray, Z: np.ndarray, fuse: str, row: list[float]) -> np.ndarray:
    """A kernel that fails on a block with a certain row once a file is there."""
    if len(X) > 100 and (row == X).all(axis=1).any() and Path(fuse).exists():
        raise ZeroDivisionError("by zero")
    return X @ Z.T


@pytest.mark.parametrize("where", ["this process", pytest.param("cluster", marks=pytest.mark.slow)])
def test_lazy_scores__of_a_block_that_fails_name_its_rows(where, points, tmp_path, request) -> None:
    if where == "cluster":
        request.getfixturevalue("client")
    kernel = daskrr.kernels.Function(inner_until, {"fuse": str(tmp_path / "fuse"), "row": points[700].tolist()})
    lazy = daskrr.leverage_scores(
        points, **(OPTIONS | {"kernel": kernel, "landmarks": 4, "sampling": "uniform"})
    ).scores
    (tmp_path / "fuse").touch()
    with pytest.raises(ZeroDivisionError, match="by zero") as caught:
        lazy.compute()
    assert "in the block of rows 600–899" in caught.value.__notes__


def test_named_failures__come_back_from_the_scheduler(points, client) -> None:
    with pytest.raises(RidgeTooSmall, match="smallest ridge that works"):
        daskrr.leverage_scores(points, **(OPTIONS | {"ridge": 1e-30}))
    with pytest.raises(KernelNotPositive, match="pivot"):
        daskrr.leverage_scores(points, **(OPTIONS | {"kernel": daskrr.kernels.Function(negative_distance)}))


def negative_distance(X: np.ndarray, Z: np.ndarray) -> np.ndarray:
    """Positive on the diagonal and nowhere near positive semi-definite."""
    return 1.0 + 10.0 * np.linalg.norm(X[:, None] - Z[None], axis=2)


@pytest.mark.slow
def test_plan__refuses_before_anything_runs(points) -> None:
    options = {"n_workers": 1, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**options, memory_limit="300MiB") as small, Client(small) as client:
        needed = daskrr.plan(points, KERNEL, 1e-3, 2000).memory_limit
        with pytest.raises(DoesNotFit, match=f"need a worker memory limit of {needed / 2**20:.0f} MiB"):
            daskrr.leverage_scores(points, KERNEL, 1e-3, 2000, progress=False)
        assert not client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))


def test_check__names_the_worker_that_cannot_open_the_input(client) -> None:
    memory = zarr.create_array({}, shape=(10, 2), chunks=(5, 2), dtype="f8")
    memory[:] = 1.0
    with pytest.raises(SourceUnreachable, match="memory of this process"):
        daskrr.leverage_scores(memory, KERNEL, 1e-3, 5)


def test_check__names_the_worker_when_the_path_is_not_there(client, tmp_path) -> None:
    array = zarr.create_array(tmp_path / "gone.zarr", shape=(10, 2), chunks=(5, 2), dtype="f8")
    (tmp_path / "gone.zarr" / "zarr.json").unlink()
    with pytest.raises(SourceUnreachable, match=r"worker tcp://127\.0\.0\.1:\d+: cannot open"):
        daskrr.leverage_scores(array, KERNEL, 1e-3, 5, missing_chunks="fill")


@pytest.mark.slow
def test_real_processes__factor_on_the_scheduler_process(reference, store, tmp_path) -> None:
    with command_line_cluster(tmp_path) as client:
        result = daskrr.leverage_scores(store, **OPTIONS)
        scheduler = client.run_on_scheduler(os.getpid)
        assert result.summary["algebra"]["place"] == "scheduler"
        assert result.summary["algebra"]["whiten"]["pid"] == scheduler != os.getpid()
        assert result.summary["algebra"]["ridge"]["pid"] == scheduler
        np.testing.assert_array_equal(result.scores.compute(), reference)


BLOCKED = {"DASK_DISTRIBUTED__SCHEDULER__BLOCKED_HANDLERS": '["register_scheduler_plugin"]'}


@pytest.mark.slow
def test_fallback__a_worker_factors_where_the_scheduler_forbids_it(reference, store, tmp_path, caplog) -> None:
    with command_line_cluster(tmp_path, environment=BLOCKED) as client, caplog.at_level(logging.WARNING, "daskrr"):
        result = daskrr.leverage_scores(store, **OPTIONS)
        workers = set(client.run(os.getpid).values())
        assert result.summary["algebra"]["place"] == "worker"
        assert result.summary["algebra"]["ridge"]["pid"] in workers
        assert "a worker does it instead" in caplog.text
        np.testing.assert_array_equal(result.scores.compute(), reference)


@pytest.mark.slow
def test_preload__gives_the_scheduler_the_algebra_where_plugins_are_forbidden(reference, store, tmp_path) -> None:
    preload = ("--preload", "daskrr.preload")
    with command_line_cluster(tmp_path, environment=BLOCKED, scheduler_options=preload):
        result = daskrr.leverage_scores(store, **OPTIONS)
        assert result.summary["algebra"]["place"] == "scheduler"
        np.testing.assert_array_equal(result.scores.compute(), reference)


@pytest.mark.slow
def test_fallback__a_worker_factors_for_a_scheduler_without_daskrr(reference, store, tmp_path) -> None:
    with command_line_cluster(tmp_path, scheduler_setup=WITHOUT_DASKRR):
        result = daskrr.leverage_scores(store, **OPTIONS)
        assert result.summary["algebra"]["place"] == "worker"
        np.testing.assert_array_equal(result.scores.compute(), reference)


def test_fallback__a_worker_factors_for_a_scheduler_that_is_too_small(points, client, caplog, monkeypatch) -> None:
    monkeypatch.setattr("daskrr.runtime.scheduler._hello", lambda client: {"available": 1000})
    with caplog.at_level(logging.WARNING, "daskrr"):
        result = daskrr.leverage_scores(points, **OPTIONS)
    assert result.summary["algebra"]["place"] == "worker"
    assert "the scheduler has 0 MiB free" in caplog.text


@pytest.mark.parametrize(
    ("setup", "found"),
    [
        pytest.param(WITHOUT_DASKRR, "cannot run daskrr", marks=pytest.mark.slow),
        pytest.param(OTHER_VERSION, "runs daskrr 0.0.0", marks=pytest.mark.slow),
    ],
)
def test_check__refuses_workers_that_cannot_run_the_tasks(store, tmp_path, setup, found) -> None:
    with (
        command_line_cluster(tmp_path, n_workers=1, worker_setup=setup),
        pytest.raises(SourceUnreachable, match=rf"worker tcp://127\.0\.0\.1:\d+ {found}"),
    ):
        daskrr.leverage_scores(store, **OPTIONS)


@pytest.mark.slow
def test_factors__survive_the_workers_that_held_them(reference, store, tmp_path) -> None:
    with command_line_cluster(tmp_path, n_workers=2) as client:
        result = daskrr.leverage_scores(store, **OPTIONS)
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        np.testing.assert_array_equal(result.scores.compute(), reference)


P_LARGE = 3000


def _large_inputs() -> factors.LandmarkMatrix:
    X = np.random.default_rng(0).standard_normal((P_LARGE, 20))
    return factors.LandmarkMatrix(X @ X.T + P_LARGE * np.eye(P_LARGE), X, error=1e-15, penalty=None, middle=None)


async def _ticks_during_whitening(dask_scheduler, inline: bool) -> tuple[int, float]:
    """How often a 5 ms ticker on the scheduler's loop advances while W is factored, and how long that took."""
    inputs, ticks, running = _large_inputs(), 0, True

    async def tick() -> None:
        nonlocal ticks
        while running:
            await asyncio.sleep(0.005)
            ticks += 1

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0.02)
    before, began = ticks, time.perf_counter()
    arguments = (None, partial(factors.whiten, dtype=np.dtype("float64"), subset=False), inputs)
    if inline:
        _perform(*arguments)
    else:
        pool = dask_scheduler.plugins["daskrr"].pool
        await asyncio.get_running_loop().run_in_executor(pool, _perform, *arguments)
    counted, seconds = ticks - before, time.perf_counter() - began
    running = False
    await ticker
    return counted, seconds


@pytest.mark.slow
def test_algebra__leaves_the_event_loop_alive(store, tmp_path) -> None:
    with command_line_cluster(tmp_path, n_workers=1) as client:
        daskrr.leverage_scores(store, **OPTIONS)
        control, _ = client.run_on_scheduler(_ticks_during_whitening, inline=True)
        assert control == 0
        tries = [client.run_on_scheduler(_ticks_during_whitening, inline=False) for _ in range(3)]
        ticks, seconds = max(tries, key=lambda tried: tried[0] / tried[1])
        assert ticks > 0.25 * seconds / 0.005


@pytest.mark.slow
def test_factors__above_64_mebibytes_travel_whole(client) -> None:
    X = np.random.default_rng(0).standard_normal((3500, 24))
    indices = np.arange(P_LARGE)
    result = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(2.0), 1e-2, sampling=indices, progress=False)
    assert result.rank == P_LARGE
    assert result.rank**2 * 8 > 64 * 2**20
    assert float(result.scores.sum().compute()) == pytest.approx(result.sketch_dimension, rel=1e-9)
    assert result.summary["algebra"]["place"] == "scheduler"


def test_algebra__works_where_workers_share_the_process():
    X = np.random.default_rng(0).standard_normal((300, 3))
    arguments = (X, daskrr.kernels.Gaussian(1.0), 1e-3, 40)
    expected = daskrr.leverage_scores(*arguments, random_state=0, progress=False).scores.compute()
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as own,
        Client(own),
    ):
        result = daskrr.leverage_scores(*arguments, random_state=0, progress=False)
        assert result.summary["algebra"]["place"] == "scheduler"
        np.testing.assert_array_equal(result.scores.compute(), expected)
