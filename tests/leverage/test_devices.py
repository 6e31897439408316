"""All that is computed of blocks, on a device whose arrays are not NumPy's."""

import threading
from collections import Counter
from contextvars import ContextVar
from functools import partial

import dask
import distributed
import numpy as np
import pytest
import zarr
from posing import PosingDevice
from variants import slow_but

import daskrr
from daskrr import exact
from daskrr.apps import text
from daskrr.errors import DoesNotFit, InvalidParameter, SourceUnreachable
from daskrr.kernels import Function, Gaussian, Laplacian, Linear, Matern
from daskrr.kernels.device import current, home
from daskrr.machine import Gpu
from daskrr.numerics import factorize
from daskrr.nystrom import sketch
from daskrr.regression.classifier import NystromKernelRidgeClassifier
from daskrr.regression.cross_validation import NystromKernelRidgeCV
from daskrr.regression.ridge import NystromKernelRidge
from daskrr.runtime import devices
from daskrr.runtime.devices import BLOCKS_OF_A_TASK, Choice, choose, in_order
from daskrr.runtime.scheduler import FactorPlugin
from daskrr.storage import zarr_input
from daskrr.storage.zarr_input import ZarrBlock

GPU = Gpu("posing", 2**33)


def no_cupy(X, Z):
    return X @ Z.T


@pytest.fixture
def posing(monkeypatch):
    """A GPU as it were; ``device="cuda"`` computes there, in blocks that are small enough to be several."""
    posing = PosingDevice()
    monkeypatch.setattr(devices, "cuda_device", lambda: posing)
    monkeypatch.setattr(devices, "usable_gpu", lambda: GPU)
    monkeypatch.setattr("daskrr.runtime.blocks.GPU_BLOCK_ROWS", 128)
    return posing


@pytest.fixture(params=["posing", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A GPU as it were, or a real one."""
    monkeypatch.setattr("daskrr.runtime.blocks.GPU_BLOCK_ROWS", 128)
    return request.getfixturevalue("posing") if request.param == "posing" else devices.cuda_device()


def rows(n=700, d=3, seed=0):
    X = np.random.default_rng(seed).standard_normal((n, d))
    X[n // 2 : n // 2 + n // 10] = X[: n // 10]
    return X


# --- Scores --------------------------------------------------------------------------------------------

OPTIONS = {
    "plain": {"certify": False, "sampling": "uniform"},
    "default": {},
    "leverage": {"sampling": "leverage"},
    "path": {"ridge": [1e-1, 1e-2, 1e-3]},
    "subset": {"certify": daskrr.Certify(subset_bound=True)},
    "tolerance": {"landmarks": daskrr.Tolerance(0.5)},
    "sketch ridge": {"sampling": daskrr.nystrom.sampling.Uniform(sketch_ridge=1e-3)},
}


@pytest.mark.parametrize("options", slow_but(OPTIONS.values(), OPTIONS["default"], OPTIONS["path"]), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=pytest.mark.slow), "float32"])
@pytest.mark.parametrize(
    "kernel",
    [Gaussian(1.5), pytest.param(Laplacian(2.0) + 0.5 * Linear(), marks=pytest.mark.slow)],
    ids=["gaussian", "sum"],
)
def test_scores__are_certified_on_the_device(kernel, dtype, options, device, tmp_path):
    X = rows()
    points = zarr.save(f"{tmp_path}/points.zarr", X) or zarr.open_array(f"{tmp_path}/points.zarr")
    given = {"ridge": 1e-2, "landmarks": 60, "certify": True, "random_state": 0, "dtype": dtype, "progress": False}
    given |= options
    found = daskrr.leverage_scores(points, kernel, device="cuda", **given)
    estimate = np.asarray(found.estimate).reshape(len(X), -1)
    exactly = np.stack([exact.leverage_scores(X, kernel, one) for one in np.atleast_1d(given["ridge"])], axis=1)
    if given["certify"]:
        lower, upper = (np.asarray(one).reshape(len(X), -1) for one in (found.lower, found.upper))
        assert np.all(lower <= exactly)
        assert np.all(exactly <= upper)
    assert np.median(np.abs(estimate / exactly - 1)) < 0.3
    assert found.summary["parameters"]["device"] == "cuda"
    assert found.summary["workers"]["device"] == "cuda"
    assert found.summary["workers"]["processors"] == [devices.usable_gpu().name]


def test_tiles__stay_on_the_device_and_factors_are_brought_once(posing):
    daskrr.leverage_scores(
        rows(), Gaussian(1.0), 1e-2, 60, sampling="uniform", device="cuda", random_state=0, progress=False
    ).estimate.compute()
    assert not [shape for shape in posing.fetched if len(shape) == 2 and shape[0] == posing.height]
    matrices = {shape: number for shape, number in posing.brought.items() if len(shape) == 2 and min(shape) > 20}
    assert max(matrices.values()) == 4, "the factor of each pass, and what the second is made of"


def test_scores__agree_with_those_of_the_processor(device):
    run = partial(daskrr.leverage_scores, ridge=1e-2, landmarks=60, certify=True, random_state=0)
    here, there = (run(rows(), Gaussian(1.0), device=name, progress=False) for name in ("cpu", "cuda"))
    for name in ("scores", "estimate", "lower", "upper"):
        np.testing.assert_allclose(getattr(there, name), getattr(here, name), rtol=1e-8, atol=1e-12)
    new = rows(30, seed=5)
    with dask.config.set({"daskrr.device": "cuda"}):
        np.testing.assert_allclose(there.sketch.scores(new), here.sketch.scores(new), rtol=1e-8)


@pytest.mark.parametrize("ridge", [1e-2, pytest.param([1e-1, 1e-3], marks=pytest.mark.slow)])
def test_eigenvectors__are_found_on_the_device(ridge, device, monkeypatch):
    places, find = [], factorize.decompose

    def note(G, least):
        places.append(home(G).name)
        return find(G, least)

    monkeypatch.setattr(factorize, "decompose", note)
    given = {"certify": True, "random_state": 0, "progress": False}
    here, there = (
        daskrr.leverage_scores(rows(), Gaussian(1.0), ridge, 60, device=name, **given) for name in ("cpu", "cuda")
    )
    assert places == ["cpu", "cuda"]
    for name in ("scores", "estimate", "lower", "upper"):
        np.testing.assert_allclose(getattr(there, name), getattr(here, name), rtol=1e-6, atol=1e-9)
    exactly = np.stack([exact.leverage_scores(rows(), Gaussian(1.0), one) for one in np.atleast_1d(ridge)], axis=-1)
    exactly = exactly.reshape(there.lower.shape)
    assert np.all(np.asarray(there.lower) <= exactly + 1e-12)
    assert np.all(exactly <= np.asarray(there.upper) + 1e-12)


@pytest.mark.slow
def test_algebra__is_done_by_a_worker_that_has_a_gpu(posing, monkeypatch):
    monkeypatch.setattr("daskrr.numerics.panels.SMALLEST", 16)
    given = {"certify": True, "random_state": 0, "progress": False}
    here = daskrr.leverage_scores(rows(), Gaussian(1.0), 1e-2, 60, device="cuda", **given)
    brought = posing.brought.copy()
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster),
    ):
        there = daskrr.leverage_scores(rows(), Gaussian(1.0), 1e-2, 60, device="cuda", **given)
        assert there.summary["algebra"]["place"] == "worker"
        assert FactorPlugin.name in cluster.scheduler.plugins, "its page is wanted all the same"
        assert here.summary["algebra"]["place"] == "this process"
        np.testing.assert_array_equal(there.upper, here.upper)
        np.testing.assert_allclose(there.eigenvalues, here.eigenvalues)
    rank = here.sketch.rank
    assert posing.brought[rank, rank] >= 2 * brought[rank, rank] > 2


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "times"), [("4 GiB", 1), (0, 3)], ids=["room for all", "unknown"])
def test_rows__are_decoded_once_where_there_is_room_for_them(limit, times, posing, tmp_path, monkeypatch):
    array = zarr.create_array(f"{tmp_path}/points.zarr", shape=(700, 3), chunks=(50, 3), dtype="f8")
    array[:] = rows()
    monkeypatch.setattr(zarr_input, "PIECE_BYTES", 1200)
    given = {
        "kernel": Gaussian(1.0), "ridge": 1e-2, "landmarks": 60, "sampling": "uniform", "random_state": 0,
        "device": "cuda", "progress": False,
    }  # fmt: skip
    decode, decoded = ZarrBlock._read_once, Counter()

    def note(block, start, stop):
        decoded[start, stop] += 1
        return decode(block, start, stop)

    monkeypatch.setattr(ZarrBlock, "_read_once", note)
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None, memory_limit=limit
        ) as cluster,
        distributed.Client(cluster),
    ):
        scores = daskrr.leverage_scores(f"{tmp_path}/points.zarr", **given).scores.compute()
    assert set(decoded.values()) == {times}
    assert len(decoded) == 14
    np.testing.assert_allclose(scores, daskrr.leverage_scores(rows(), **given).scores, rtol=1e-9)


def test_eigenvalues__are_found_on_the_device(device, monkeypatch):
    places, find = [], sketch.shifted_eigenvalues

    def note(*given, **more):
        places.append(current().name)
        return find(*given, **more)

    monkeypatch.setattr(sketch, "shifted_eigenvalues", note)
    given = {"certify": False, "sampling": "uniform", "random_state": 0, "progress": False}
    here, there = (
        daskrr.leverage_scores(rows(), Gaussian(1.0), 1e-2, 63, device=name, **given).eigenvalues
        for name in ("cpu", "cuda")
    )
    assert places == ["cuda"]
    assert len(here) == len(there)
    np.testing.assert_allclose(there, here, rtol=1e-9, atol=1e-9 * here.max())


def test_scores__of_weighted_rows_are_certified_on_the_device(device):
    X = rows(300)
    weights = np.random.default_rng(1).integers(1, 4, len(X)).astype(float)
    repeated = np.repeat(np.arange(len(X)), weights.astype(int))
    found = daskrr.leverage_scores(
        X, Gaussian(1.0), 1e-2, 50, certify=True, sample_weight=weights, random_state=0, device="cuda", progress=False
    )
    exactly = exact.leverage_scores(X[repeated], Gaussian(1.0), 1e-2)[np.searchsorted(repeated, np.arange(len(X)))]
    assert np.all(np.asarray(found.lower) <= exactly)
    assert np.all(exactly <= np.asarray(found.upper))


def test_job__that_is_done_is_done_on_any_device_and_one_that_is_not_starts_over(device, tmp_path, monkeypatch, caplog):
    X, output = rows(300), tmp_path / "out.zarr"
    points = zarr.save(f"{tmp_path}/points.zarr", X) or f"{tmp_path}/points.zarr"
    given = {"kernel": Gaussian(1.0), "ridge": 1e-2, "landmarks": 40, "random_state": 0, "progress": False}
    with monkeypatch.context() as broken:
        broken.setattr("daskrr.leverage.result.LeverageResult.concluded", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            daskrr.score_to_zarr(points, output, device="cpu", **given)
    first = daskrr.score_to_zarr(points, output, device="cuda", **given)
    assert "begun with" in caplog.text
    assert first["workers"]["device"] == "cuda"
    assert "computed on" in text.scores(first)
    assert daskrr.score_to_zarr(points, output, device="cpu", **given) == first
    assert daskrr.jobs.verification.verify(output) == []


# --- Regression ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_regression__agrees_with_that_of_the_processor(dtype, intercept, device):
    X = rows(500)
    y = np.stack([np.sin(X[:, 0]), X[:, 1] ** 2], axis=1)
    model = NystromKernelRidge(
        Gaussian(1.0), 1e-3, 60, fit_intercept=intercept, dtype=dtype, random_state=0, certify=False
    )
    found = {}
    for name in ("cpu", "cuda"):
        with dask.config.set({"daskrr.device": name}):
            model.fit(X, y)
            found[name] = [model.predict(X), *model.predict(X[:50], return_std=True)]
            found[name] += list(vars(model.diagnose(X, y)).values())
    tolerance = 1e-8 if dtype == "float64" else 2e-3
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        np.testing.assert_allclose(there, here, rtol=tolerance, atol=tolerance)


def test_selection_and_classes__agree_with_those_of_the_processor(device):
    X = rows(400)
    y, labels = np.sin(X[:, 0]), np.where(X[:, 1] > 0, "up", "down")
    found = []
    for name in ("cpu", "cuda"):
        with dask.config.set({"daskrr.device": name}):
            search = NystromKernelRidgeCV([Gaussian(1.0)], ridges=[1e-4, 1e-2], landmarks=50, random_state=0).fit(X, y)
            classes = NystromKernelRidgeClassifier(Gaussian(1.0), 1e-3, 50, random_state=0).fit(X, labels)
            found.append((search.ridge_, search.predict(X[:20]), classes.predict(X).tolist()))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-8)
    assert found[0][2] == found[1][2]


# --- Which device --------------------------------------------------------------------------------------


def test_functions__that_do_not_take_its_arrays_are_refused_before_any_work(posing):
    with pytest.raises(InvalidParameter, match="takes_cupy"):
        daskrr.leverage_scores(rows(), Function(no_cupy), 1e-2, 20, device="cuda", progress=False)
    assert not posing.brought


@pytest.mark.parametrize(("asked", "match"), [("gpu", "device must be 'auto', 'cpu' or 'cuda'"), ("cuda", "has none")])
def test_device__that_is_not_there_is_refused(asked, match):
    with pytest.raises(InvalidParameter, match=match):
        daskrr.leverage_scores(rows(), Gaussian(1.0), 1e-2, 20, device=asked, progress=False)


def test_gpu__that_does_not_work_is_none_and_its_log_says_why(posing, monkeypatch, caplog):
    def fail(shape):
        raise OSError("no kernel image is available")

    monkeypatch.setattr(posing, "zeros", fail)
    found = daskrr.leverage_scores(rows(), Gaussian(1.0), 1e-2, 20, progress=False)
    assert found.summary["workers"]["device"] == "cpu"
    assert "CuPy cannot use the posing of this process: OSError: no kernel image is available" in caplog.text
    with pytest.raises(InvalidParameter, match="the log of the worker says what is wrong"):
        daskrr.leverage_scores(rows(), Gaussian(1.0), 1e-2, 20, device="cuda", progress=False)


def test_gpu__is_not_asked_for_by_a_run_on_processors(monkeypatch):
    """The driver takes time and memory."""
    monkeypatch.setattr("daskrr.machine.gpu", lambda: pytest.fail("asked"))
    found = daskrr.leverage_scores(rows(200), Gaussian(1.0), 1e-2, 20, device="cpu", progress=False)
    assert found.summary["workers"]["device"] == "cpu"


class FakeClient:
    """Workers that answer what they have."""

    def __init__(self, *gpus):
        self.gpus = gpus

    def run(self, function, on_error):
        assert on_error == "return"
        return {f"tcp://worker-{number}": one for number, one in enumerate(self.gpus)}


SMALL = Gpu("small", 2**30)


@pytest.mark.parametrize(
    ("asked", "gpus", "expected"),
    [
        ("cpu", (GPU, GPU), Choice("cpu")),
        ("auto", (None, None), Choice("cpu")),
        ("auto", (GPU, None), Choice("cpu")),
        ("auto", (GPU, ValueError()), Choice("cpu")),
        ("auto", (GPU, SMALL), Choice("cuda", SMALL)),
        ("auto", (), Choice("cpu")),
        ("cuda", (GPU, GPU), Choice("cuda", GPU)),
    ],
)
def test_choice__is_one_device_for_all_workers(asked, gpus, expected, caplog):
    assert choose(asked, FakeClient(*gpus)) == expected
    assert ("1 of 2 workers have a GPU" in caplog.text) is (len(set(map(type, gpus))) == 2 and asked == "auto")


def test_choice__names_workers_that_have_no_gpu():
    with pytest.raises(SourceUnreachable, match="1 workers have none: tcp://worker-1"):
        choose("cuda", FakeClient(GPU, None))
    with pytest.raises(SourceUnreachable, match="no workers"):
        choose("cuda", FakeClient())


@pytest.mark.usefixtures("posing")
def test_plan__counts_the_memory_of_the_gpu(monkeypatch):
    plan = partial(daskrr.plan, np.zeros((10**5, 4)), Gaussian(1.0), 1e-3)
    made = plan(1000, device="cuda")
    assert (made.device, made.gpu, made.tile_rows) == ("cuda", "posing", 8192)
    assert 0 < made.gpu_bytes < GPU.memory
    assert "on posing" in str(made)
    assert "matrix-multiply speed" not in str(made)
    assert made.to_dict()["seconds_at_matmul_speed"] is None
    assert plan(1000).gpu == "posing"
    assert "on posing" not in str(plan(1000, device="cpu"))
    assert "matrix-multiply speed" in str(plan(1000, device="cpu"))
    assert plan(1000, workers=3, device="cuda").gpu == "posing"
    monkeypatch.setattr(devices, "usable_gpu", lambda: Gpu("tiny", 2**24))
    with pytest.raises(DoesNotFit, match="of GPU memory, and a tiny has 16 MiB"):
        daskrr.leverage_scores(rows(), Gaussian(1.0), 1e-2, 600, device="cuda", progress=False)


# --- Several blocks at a time --------------------------------------------------------------------------

NUMBER: ContextVar[int] = ContextVar("number")


def test_calls__are_under_way_together_and_answered_in_order(device):
    NUMBER.set(7)
    together = threading.Barrier(BLOCKS_OF_A_TASK, timeout=60)

    def call(number):
        assert current() is device
        assert NUMBER.get() == 7
        together.wait()
        return number

    numbers = range(3 * BLOCKS_OF_A_TASK)
    assert list(in_order("cuda", (partial(call, one) for one in numbers))) == list(numbers)


def test_calls__that_fail_leave_none_behind(device):
    begun, ended = [], []

    def call(number):
        begun.append(number)
        if number == 1:
            raise ArithmeticError("no")
        ended.append(number)

    with pytest.raises(ArithmeticError, match="no"):
        list(in_order("cuda", (partial(call, one) for one in range(100))))
    assert len(begun) == len(ended) + 1 < 2 * BLOCKS_OF_A_TASK + 2


def test_calls__of_the_processor_are_made_one_after_the_other():
    began = []
    made = in_order("cpu", (partial(began.append, one) for one in range(3)))
    next(made)
    assert began == [0]
    assert Matern(1.0).takes_gpu_arrays


# --- A real one ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gpu__certifies_many_rows_and_repeats_its_bits(dtype):
    """Rows that repeat, rows far off, and as many as take several tiles."""
    base = np.random.default_rng(0).standard_normal((4000, 12))
    base[:40] *= 5.0
    X = np.tile(base, (25, 1))
    options = {"certify": True, "dtype": dtype, "random_state": 0, "progress": False}
    runs = [daskrr.leverage_scores(X, Gaussian(4.0), 1e-3, 500, device="cuda", **options) for _ in range(2)]
    exactly = np.tile(exact.leverage_scores(base, Gaussian(4.0), 1e-3) / 25, 25)
    lower, upper, estimate = (np.asarray(getattr(runs[0], name)) for name in ("lower", "upper", "estimate"))
    assert np.all(lower <= exactly * (1 + 1e-9))
    assert np.all(exactly <= upper * (1 + 1e-9))
    assert np.median(np.abs(estimate / exactly - 1)) < 0.1
    for name in ("scores", "estimate", "lower", "upper"):
        np.testing.assert_array_equal(*(np.asarray(getattr(run, name)) for run in runs))


@pytest.mark.gpu
def test_gpu__that_is_full_is_told_of(monkeypatch):
    monkeypatch.setattr(devices, "working_gpu", devices.usable_gpu)  # which tries it out
    cupy = devices.cuda_device()._cupy
    pool = cupy.get_default_memory_pool()
    devices._threads.cache_clear()  # those there are have memory already
    pool.free_all_blocks()
    pool.set_limit(size=pool.used_bytes() + 2**20)
    try:
        with pytest.raises(DoesNotFit, match="ran out of memory"):
            daskrr.leverage_scores(rows(5000), Gaussian(1.0), 1e-2, 400, device="cuda", progress=False)
    finally:
        pool.set_limit(size=0)
