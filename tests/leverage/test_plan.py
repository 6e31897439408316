"""What a run costs, known before it runs."""

import itertools
import json
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client
from strategies import as_zarr, forbidden

import daskrr
from benchmarks.harness import peak_bytes, worker_pids
from daskrr.apps.clusters import local_cluster
from daskrr.errors import DoesNotFit, InvalidParameter
from daskrr.kernels import Cosine, Function, Gaussian, Linear, Matern
from daskrr.leverage.plan import Workers, check_fits, make_plan, measure_matmul
from daskrr.numerics.tiles import tile_rows
from daskrr.nystrom.workload import Workload
from daskrr.runtime.blocks import Block, block_rows, split
from daskrr.runtime.executors import LocalExecutor
from daskrr.runtime.rows import Rows, open_rows


def rows(n=1000, d=4):
    return np.random.default_rng(0).standard_normal((n, d))


GAUSSIAN = Gaussian(1.0)


def plan(X=None, kernel=GAUSSIAN, landmarks=50, **options):
    options = {"sampling": "diagonal"} | options
    return daskrr.plan(rows() if X is None else X, kernel, 1e-2, landmarks, **options)


# --- Blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_rows", [1, 9, 10, 11, 47])
def test_split__covers_every_row_once(n_rows):
    blocks = split(n_rows, 10)
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(n_rows))
    assert [block.index for block in blocks] == list(range(len(blocks)))
    assert blocks[0] == Block(0, 0, min(10, n_rows))
    assert sum(block.n_rows for block in blocks) == n_rows


class Chunked(Rows):
    """Rows of which only the chunks matter."""

    def __init__(self, unit_rows, n_features=8):
        self.shape, self.dtype, self.unit_rows = (10**9, n_features), np.dtype(float), unit_rows


@pytest.mark.parametrize("n_landmarks", [1, 100, 5000])
@pytest.mark.parametrize("unit", [1, 7, 1000])
def test_block_rows__are_whole_small_chunks(unit, n_landmarks):
    assert block_rows(n_landmarks, Chunked(unit)) % unit == 0
    assert block_rows(n_landmarks, Chunked(unit), 2000) == unit * round(2000 / unit)


@pytest.mark.parametrize(("n_landmarks", "parts"), [(2, 1), (300, 3), (1024, 8), (4000, 2)])
def test_block_rows__share_a_large_chunk_where_decoding_it_again_is_cheap(n_landmarks, parts):
    assert block_rows(n_landmarks, Chunked(65536)) == -(-65536 // parts)


def test_block_rows__leave_a_huge_chunk_whole():
    assert block_rows(100, Chunked(10**7)) == 10**7


def test_block_rows__of_wide_rows_are_few():
    assert block_rows(500, Chunked(1, n_features=50_000)) * 50_000 * 8 <= 128 * 2**20
    assert block_rows(500, Chunked(1, n_features=8)) == 4096


def test_block_rows__smaller_than_a_chunk_cut_it_evenly():
    assert block_rows(10, Chunked(1000), 300) == 250
    for unit, wanted in itertools.product(
        (1, 2, 7, 10, 36, 100, 1000, 65_537), (1, 2, 3, 5, 7, 8, 33, 300, 2000, 70_000)
    ):
        found = block_rows(10, Chunked(unit), wanted)
        assert block_rows(10, Chunked(unit), found) == found
        assert found <= wanted or found % unit == 0


@pytest.mark.parametrize("bad", [0, -5, 2.5, "7", True, float("nan")])
def test_block_rows__must_be_a_positive_integer(bad):
    with pytest.raises(InvalidParameter, match="block_rows must be an int of at least 1"):
        plan(block_rows=bad)


# --- Figures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, 7, 64, 5000])
@pytest.mark.parametrize(
    "make", [lambda X: X, lambda X: da.from_array(X, chunks=(30, 2)), lambda X: as_zarr(X, (30, 4))]
)
def test_plan__figures_are_consistent(make, block):
    made = plan(make(rows()), block_rows=block)
    assert made.n_blocks * made.block_rows >= 1000 > (made.n_blocks - 1) * made.block_rows
    assert (made.n_rows, made.n_features, made.n_landmarks) == (1000, 4, 50)
    assert made.tile_rows == tile_rows(50)
    assert made.flops == 1000 * (4 * 50 * 4 + 3 * 50**2)
    assert made.bytes_written == 3 * 8 * 1000
    assert 2 * rows().nbytes <= made.bytes_read <= 3 * rows().nbytes
    assert made.worker_bytes < made.memory_limit
    assert made.scheduler_bytes >= 8 * 50**2
    assert made.n_tasks >= made.n_blocks / 16
    assert made.seconds(1e9) == pytest.approx(made.flops / (1e9 * made.n_threads))


def test_plan__is_that_of_the_run():
    options = {"random_state": 0, "block_rows": 64, "dtype": "float32", "sampling": "diagonal"}
    result = daskrr.leverage_scores(rows(), Gaussian(1.0), 1e-2, 50, progress=False, **options)
    assert result.plan == plan(**options)
    assert result.scores.chunks[0] == tuple(block.n_rows for block in split(1000, 64))


def test_plan__grows_with_what_is_asked():
    small, large = plan(landmarks=50), plan(landmarks=500)
    assert small.flops < large.flops
    assert small.worker_bytes < large.worker_bytes
    assert plan(kernel=Linear()).readings == small.readings + 1
    assert plan(kernel=Linear(), sampling="uniform").readings == small.readings
    assert plan(sampling=np.full(1000, 1e-3)).readings == small.readings + 1


def test_plan__counts_no_more_landmarks_than_rows():
    assert plan(landmarks=10**6).flops == plan(landmarks=1000).flops
    assert plan(landmarks=None, sampling=np.arange(30)).n_landmarks == 30


def test_plan__can_be_read():
    text = str(plan(as_zarr(rows(), (30, 4))))
    for part in ("1,000 rows × 4 features", "50 draws", "float64", "tasks", "Tflop", "memory limit", "scheduler"):
        assert part in text
    assert "evaluated" in str(plan(da.from_array(rows(), chunks=(30, 4))))
    figures = json.loads(json.dumps(plan().to_dict()))
    assert figures["n_rows"] == 1000
    assert figures["seconds_at_matmul_speed"] > 0


def test_measure_matmul__is_a_speed():
    assert measure_matmul("float32", 64) > 0


def test_plan__runs_nothing():
    def explode(block):
        raise AssertionError("a block was computed")

    lazy = da.from_array(rows(), chunks=(30, 4)).map_blocks(explode, dtype=float, meta=np.empty((0, 0)))
    weights = da.full(1000, 1e-3, chunks=99).map_blocks(explode, dtype=float, meta=np.empty(0))
    made = plan(lazy, Function(forbidden), sampling=weights)
    assert str(made)
    with pytest.raises(AssertionError, match="a block was computed"):
        daskrr.leverage_scores(lazy, Gaussian(1.0), 1e-2, 50, progress=False)


def test_plan__takes_a_number_of_workers():
    alone, four = plan(workers=1), plan(workers=4)
    assert (alone.n_threads, four.n_threads) == (1, 4)
    assert alone.bytes_moved < four.bytes_moved
    assert alone.flops == four.flops
    with pytest.raises(InvalidParameter, match="workers must be an int of at least 1"):
        plan(workers=0)


def test_check_fits__names_the_worker_without_room():
    made = plan(landmarks=500)
    limits = {"tcp://a": made.memory_limit, "tcp://b": 0}
    check_fits(made, Workers(2, 1, 2, limits, apart=True))
    check_fits(made, Workers.of(LocalExecutor()))
    with pytest.raises(DoesNotFit, match=r"500 landmarks need .* worker tcp://c has 1 MiB"):
        check_fits(made, Workers(3, 1, 3, limits | {"tcp://c": 2**20}, apart=True))


def test_worker_bytes__begin_with_what_workers_take_before_their_first_task():
    def planned(idle):
        workers = replace(Workers.embedded(2), idle_bytes=idle)
        return make_plan(open_rows(rows()), np.dtype(float), Workload(50), None, workers).worker_bytes

    assert planned(0) == planned(180 * 2**20)
    assert planned(400 * 2**20) - planned(300 * 2**20) == 100 * 2**20


# --- Memory, measured -----------------------------------------------------------------------------------


def write_rows(path, n, d, dtype="float64"):
    """Random rows in chunks of about 8 MiB."""
    height = max(1, min(n, 2**20 // d))
    array = zarr.create_array(path, shape=(n, d), chunks=(height, d), dtype=dtype)
    random = np.random.default_rng(0)
    for start in range(0, n, height):
        array[start : start + height] = random.standard_normal((min(height, n - start), d))
    return str(path)


def wide(d):
    return Gaussian(d**0.5)


SLOW = pytest.mark.slow
SHAPES = [
    (8, 12_000, 200),
    pytest.param(2000, 3000, 200, marks=SLOW),
    pytest.param(20_000, 800, 200, marks=SLOW),
    pytest.param(50_000, 400, 150, marks=SLOW),
]


def check_worker(points, kernel, n_landmarks, slack=3.5, durable=None, **options):
    """Run on a worker with no more memory than planned: it survives, and its peak is below the plan, not by far."""
    options |= {"random_state": 0}
    made = daskrr.plan(points, kernel, 1e-3, n_landmarks, workers=1, **options)
    with local_cluster(1, made.memory_limit) as cluster, Client(cluster) as client:
        before = worker_pids(client)
        if durable is None:
            daskrr.leverage_scores(points, kernel, 1e-3, n_landmarks, progress=False, **options).scores.sum().compute()
        else:
            daskrr.score_to_zarr(points, durable, kernel, 1e-3, n_landmarks, progress=False, **options)
        assert worker_pids(client) == before
        peak = max(map(peak_bytes, before.values()))
    assert peak <= made.worker_bytes <= slack * peak


@SLOW
@pytest.mark.parametrize("certify", [False, True])
@pytest.mark.parametrize(("d", "n", "n_landmarks"), SHAPES)
def test_worker_bytes__are_no_less_than_a_worker_takes(d, n, n_landmarks, certify, tmp_path):
    check_worker(write_rows(tmp_path / "x.zarr", n, d), wide(d), n_landmarks, slack=2.5, certify=certify)


@SLOW
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (wide(20_000) + Matern(150.0), {}),
        (Cosine(), {"dtype": "float32", "block_rows": 200, "certify": True}),
    ],
)
def test_worker_bytes__of_wide_rows_know_the_kernel_and_the_sampling(kernel, options, tmp_path):
    check_worker(write_rows(tmp_path / "x.zarr", 800, 20_000), kernel, 200, **options)


@SLOW
def test_worker_bytes__of_wide_rows_hold_for_durable_jobs_and_stored_dtypes(tmp_path):
    points = write_rows(tmp_path / "x.zarr", 800, 20_000, "int8")
    check_worker(points, wide(20_000), 200, durable=tmp_path / "out.zarr", certify=True)


@SLOW
@pytest.mark.filterwarnings("ignore:Sending large graph:UserWarning")
def test_worker_bytes__of_wide_rows_hold_for_an_array_that_travels():
    X = np.random.default_rng(0).standard_normal((2000, 20_000))
    check_worker(X, wide(20_000), 50, sampling="diagonal")


def test_scheduler_bytes__count_the_landmarks():
    few, many = plan(rows(1000, 4)), plan(rows(1000, 400))
    assert many.scheduler_bytes - few.scheduler_bytes >= 3 * 8 * 50 * 396
    assert many.bytes_moved > few.bytes_moved
