"""Pictures: what is counted on the workers against NumPy, what is drawn of it, and how little of it is moved."""

import itertools
import math
import pickle
import subprocess
import sys
from collections.abc import Iterator

import dask.array as da
import matplotlib.pyplot as plt
import numpy as np
import pytest
from distributed import Client
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from strategies import as_zarr, problems
from variants import examples, slow_but

import daskrr
from daskrr import exact, plots
from daskrr.errors import DaskrrError, InvalidData, InvalidParameter, NotCertified, RidgeTooSmall
from daskrr.kernels import Gaussian
from daskrr.leverage import profile
from daskrr.leverage.profile import CLASSES, EDGES, bars, class_of, ranked
from daskrr.regression import plotting
from daskrr.regression.plotting import CellSums, cell_of, fit_of, normal_quantiles
from daskrr.runtime.progress import interval
from daskrr.synthetic import clusters_with_outliers

RIDGES = [1e-2, 1e-4]
NAMES = ("scores", "estimate", "lower", "upper")


@pytest.fixture(autouse=True)
def _figures_are_closed() -> Iterator[None]:
    before = plt.get_backend()
    plt.switch_backend("agg")
    yield
    plt.close("all")
    plt.switch_backend(before)


@pytest.fixture(scope="module")
def X():
    return clusters_with_outliers(700, 3, n_outliers=5, random_state=3)[0]


@pytest.fixture(scope="module")
def result(X):
    return daskrr.leverage_scores(X, Gaussian(2.0), RIDGES, 60, certify=True, random_state=0, block_rows=97)


@pytest.fixture(scope="module")
def columns(result):
    return {name: getattr(result, name).compute()[:, 1] for name in NAMES}


@pytest.fixture
def store(result, tmp_path):
    result.store(tmp_path / "scores.zarr", progress=False)
    return daskrr.open_scores(tmp_path / "scores.zarr")


# --- Counting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_profile__counts_what_numpy_counts(result, columns, name):
    profile, values = result.profile(), columns[name]
    expected = [np.sum((values > low) & (values <= high)) for low, high in itertools.pairwise(EDGES)]
    expected[0] += np.sum(values <= EDGES[0])
    np.testing.assert_array_equal(profile.counts[name], expected)
    assert profile.n_rows == len(values)


def test_profile__has_sums_and_extremes_of_the_rows_of_a_class(result, columns):
    profile, place = result.profile(), class_of(columns["estimate"])
    for one in np.unique(place):
        rows = place == one
        for name in NAMES:
            assert profile.sums[name][one] == pytest.approx(columns[name][rows].sum(), rel=1e-12)
        assert profile.lowest[one] == columns["lower"][rows].min()
        assert profile.highest[one] == columns["upper"][rows].max()


def test_profile__has_the_highest_rows(result):
    found, expected = result.profile().top, result.top(10)
    assert found.to_records() == expected.to_records()


def test_profile__quantiles_are_those_of_numpy_but_for_the_class(result, columns):
    levels = [0.05, 0.5, 0.95]
    for name in NAMES:
        expected = np.quantile(columns[name], levels, method="inverted_cdf")
        found = np.array(result.profile().quantiles(name, levels))
        assert np.all((found >= expected) & (found <= expected * 10 ** (1 / profile.PER_DECADE) * (1 + 1e-12)))


def test_profile__of_a_store_is_that_of_its_result(result, store):
    for ridge in RIDGES:
        one, other = result.profile(ridge), store.profile(ridge)
        for name in NAMES:
            np.testing.assert_array_equal(one.counts[name], other.counts[name])
        np.testing.assert_array_equal(one.highest, other.highest)
        assert one.top.to_records() == other.top.to_records()


def test_class_of__zero_and_one_have_classes():
    assert class_of(np.array([0.0, 1e-15, 1.0])).tolist() == [0, 0, CLASSES - 1]


def test_bars__lose_no_row(result, columns):
    found = bars(result.profile().counts)
    for name in NAMES:
        classes = np.searchsorted(found.edges, columns[name]) - 1
        shown = np.bincount(classes[classes >= 0], minlength=len(found.edges) - 1)
        np.testing.assert_array_equal(found.counts[name], shown)
    assert len(found.edges) > 40


def test_bars__of_one_value_are_one_bar():
    counts = np.bincount(class_of(np.full(9, 0.5)), minlength=CLASSES)
    found = bars({"estimate": counts})
    assert found.counts["estimate"].tolist() == [9]
    assert found.edges[0] < 0.5 <= found.edges[1]


def test_bars__of_no_value_that_can_be_drawn():
    found = bars({"estimate": np.bincount(class_of(np.zeros(9)), minlength=CLASSES)})
    assert found.counts["estimate"].sum() == 0


def test_ranked__has_means_and_extremes_in_order_of_the_estimate(result, columns):
    found, n = ranked(result.profile()), len(columns["estimate"])
    assert found.edges[0] == 1
    assert found.edges[-1] == n + 1
    total = np.sum(np.diff(found.edges) * found.means["estimate"])
    assert total == pytest.approx(columns["estimate"].sum(), rel=1e-12)
    assert np.all(np.diff(found.means["estimate"]) <= 0)
    assert np.all(found.lowest <= found.means["lower"] * (1 + 1e-12))
    assert np.all(found.highest >= found.means["upper"] * (1 - 1e-12))
    assert found.means["estimate"][0] <= columns["estimate"].max()
    assert found.lowest.min() == columns["lower"].min()
    assert found.highest.max() == columns["upper"].max()


def test_ranked__has_no_group_with_rows_on_both_sides_of_a_cliff():
    estimate = np.concatenate([np.full(40, 0.5), np.geomspace(0.1, 1e-3, 3000)])
    found = ranked(profile.profile_of(dict.fromkeys((*NAMES, "residual"), estimate), 0))
    assert 41 in found.edges
    np.testing.assert_allclose(found.means["estimate"][found.edges[:-1] < 41], 0.5)
    assert found.means["estimate"][found.edges[:-1] >= 41].max() <= 0.1


# --- Spectrum and path --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"ridge": 1e-3}, {"ridge": 1e-3, "certify": True}, {"ridge": RIDGES}], ids=str)
def test_eigenvalues__with_every_row_as_a_landmark_are_those_of_the_kernel_matrix(options, X):
    K = Gaussian(2.0)(X[:80], X[:80])
    expected = np.linalg.eigvalsh(K)[::-1]
    found = daskrr.leverage_scores(X[:80], Gaussian(2.0), sampling=np.arange(80), **options).eigenvalues
    np.testing.assert_allclose(found, expected[: len(found)], atol=1e-9 * expected[0])


def test_dimension_path__meets_the_ridges_scored_and_holds_the_exact_one(result, X):
    scored = result.dimension_path(RIDGES)
    np.testing.assert_allclose(scored["sketch_dimension"], result.sketch_dimension, rtol=1e-9)
    path = result.dimension_path()
    assert min(path["ridges"]) <= min(RIDGES) / 50
    S = np.linalg.eigvalsh(Gaussian(2.0)(X, X))
    for ridge, low, high in zip(path["ridges"], path["lower"], path["upper"], strict=True):
        assert low <= np.sum(S / (S + len(X) * ridge)) <= high


@examples(
    12, 40, problems(), st.sampled_from([1e-5, 1e-3, 1e-1]), st.sampled_from(["float64", "float32"]), st.integers(0, 9)
)
def test_dimension_path__holds_the_exact_one_on_hard_rows(problem, relative, dtype, seed):
    ridge = problem.ridge(relative)
    try:
        found = daskrr.leverage_scores(
            problem.X, problem.kernel, ridge, max(1, len(problem.X) // 2), certify=True, dtype=dtype, random_state=seed
        )
    except DaskrrError:
        return
    S = np.maximum(np.linalg.eigvalsh(problem.kernel(problem.X.astype(float), problem.X.astype(float))), 0.0)
    path = found.dimension_path()
    for ridge, low, high in zip(path["ridges"], path["lower"], path["upper"], strict=True):
        shift = len(S) * ridge
        slack = 1e-12 + len(S) * 1e-14 * S.max() / shift
        assert low - slack <= np.sum(S / (S + shift)) <= high + slack


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_dimension_path__does_not_fail_a_run_at_the_smallest_ridge_that_works(dtype, X):
    refused, works = 1e-20, 1e-2
    while works / refused > 1.0 + 1e-9:
        ridge = math.sqrt(refused * works)
        try:
            found = daskrr.leverage_scores(X[:60], Gaussian(2.0), ridge, 20, dtype=dtype, random_state=0, certify=True)
        except RidgeTooSmall:
            refused = ridge
        else:
            works = ridge
            assert len(found.dimension_path()["ridges"]) == 61
    assert 1e-18 < works < 1e-2


def test_dimension_path__of_a_ridge_next_to_infinity(X):
    found = daskrr.leverage_scores(X[:60], Gaussian(2.0), 1e306, 20, random_state=0, certify=True)
    assert max(found.dimension_path()["sketch_dimension"]) < 1e-290


def test_dimension_path__refuses_what_round_off_would_decide(result):
    with pytest.raises(RidgeTooSmall, match="smallest ridge that works"):
        result.dimension_path([1e-3, 1e-18])
    with pytest.raises(InvalidParameter, match="ridge must be positive"):
        result.dimension_path([0.0])


def test_spectrum__of_a_store_is_recorded(result, store):
    assert store.spectrum() == result.spectrum()
    assert store.dimension_path() == result.dimension_path()
    assert max(map(len, (*store.spectrum().values(), *store.dimension_path().values()))) <= 200


def test_thinned__keeps_first_and_last_of_many():
    found = profile.thinned(np.arange(5000.0, 0.0, -1.0))
    assert found["ranks"][0] == 1
    assert found["ranks"][-1] == 5000
    assert len(found["ranks"]) <= profile.MOST_EIGENVALUES
    assert found["eigenvalues"] == [5001.0 - rank for rank in found["ranks"]]


# --- Drawing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_but(["scores", "intervals", "spectrum", "path"], "intervals", "path"))
@pytest.mark.parametrize("source", ["result", pytest.param("store", marks=pytest.mark.slow)])
def test_plot__draws_on_the_axes_given_and_on_new_ones(request, source, name):
    draw = getattr(request.getfixturevalue(source).plot, name)
    _, axes = plt.subplots()
    assert draw(ax=axes) is axes
    fresh = draw()
    assert fresh is not axes
    assert fresh.get_title(loc="left")
    assert fresh.get_xlabel() or name == "intervals"
    fresh.figure.canvas.draw()


def test_plot_scores__shows_the_counts_and_where_the_mean_is(result, columns):
    axes = result.plot.scores()
    heights, edges, _ = axes.patches[0].get_data()
    assert heights.sum() == np.sum(columns["estimate"] > edges[0])
    assert axes.lines[0].get_xdata()[0] == pytest.approx(result.sketch_dimension[1] / 700)
    assert "certainly" in axes.texts[0].get_text()


def test_plot_scores__has_an_axis_of_counts_that_ends_with_the_highest():
    rng = np.random.default_rng(0)
    many = daskrr.leverage_scores(rng.standard_normal((4000, 2)), Gaussian(1.0), 1e-2, 40, certify=True, random_state=0)
    axes = many.plot.scores()
    assert axes.get_yscale() == "log"
    highest = max(patch.get_data()[0].max() for patch in axes.patches if hasattr(patch, "get_data"))
    assert highest < axes.get_ylim()[1] < 2 * highest
    axes.figure.canvas.draw()
    legend, picture = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert legend.y1 < picture.y0  # it covers no bar


def test_plot_intervals__shows_a_cliff_as_a_cliff():
    """Forty rows, each by itself and far from a crowd: no line is drawn between the heights of both."""
    rng = np.random.default_rng(0)
    alone = np.arange(40)[:, None] * [50.0, 0.0]
    X = np.concatenate([alone, rng.uniform(-1, 1, (4000, 2)) - 50.0])
    axes = daskrr.leverage_scores(X, Gaussian(1.0), 1e-4, 150, certify=True, random_state=0).plot.intervals()
    (drawn,) = [patch for patch in axes.patches if patch.get_label() == "estimate"]
    heights, edges, _ = drawn.get_data()
    assert np.all(heights[edges[:-1] <= 40] > 0.7)
    assert np.all(heights[edges[:-1] > 40] < 0.2)
    corners = drawn.get_path().vertices
    steps = np.diff(corners, axis=0)
    assert np.all((steps[:, 0] == 0) | (steps[:, 1] == 0))


@pytest.mark.parametrize("n_rows", slow_but([700, 30_000, 3_000_000, 500_000_000], 700, 500_000_000))
def test_plot_intervals__has_labels_of_ranks_that_do_not_touch(n_rows):
    edges = np.unique(np.geomspace(1, n_rows + 1, 200).astype(int))
    bands = dict.fromkeys((*NAMES, "lowest", "highest"), 1 / edges[:-1])
    figure = plots.new_figure(4.9, 3.7)  # as in a report
    axes = plots.draw_intervals(figure.subplots(), edges, bands, bands["scores"])
    FigureCanvasAgg(figure).draw()
    labels = [
        label.get_window_extent() for label in axes.get_xticklabels() if label.get_text() and is_inside(axes, label)
    ]
    assert len(labels) >= 3
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(labels))


def is_inside(axes, label):
    low, high = axes.get_xlim()
    return low <= label.get_position()[0] <= high


def test_plot_scores__says_what_is_too_small_to_be_drawn(X):
    far = np.concatenate([0.1 * X[:50], [[1e3, 0, 0]]])
    result = daskrr.leverage_scores(far, Gaussian(1.0), 1e-2, sampling=np.arange(50))
    assert "1 rows below" in result.plot.scores(of="scores").get_xlabel()


def test_plot_spectrum__draws_the_shift_of_every_ridge(result):
    labels = [text.get_text() for text in result.plot.spectrum().get_legend().get_texts()]
    assert [f"λ = {ridge:g}" in label for ridge, label in zip(RIDGES, labels[1:], strict=True)] == [True, True]


def all_texts(axes):
    legend = axes.get_legend()
    shown = [*axes.texts, *(legend.get_texts() if legend else [])]
    return " | ".join(text.get_text() for text in shown)


def test_effective_dimension__without_a_certificate_is_a_lower_bound_everywhere(X, tmp_path):
    result = daskrr.leverage_scores(X, Gaussian(2.0), RIDGES, 30, random_state=0)
    summary = result.store(tmp_path / "out.zarr")
    exactly = [exact.effective_dimension(X, Gaussian(2.0), ridge) for ridge in RIDGES]
    stored = daskrr.open_scores(tmp_path / "out.zarr")
    for (low, high), most, sketch in zip(summary["effective_dimension"], exactly, result.sketch_dimension, strict=True):
        assert high is None
        assert 0.99 * sketch < low < min(sketch, most)
    for source in (result, stored):
        for axes in (source.plot.scores(), source.plot.spectrum(), source.plot.path()):
            assert "at least" in all_texts(axes)
    for text in (repr(result), result._repr_html_()):
        assert text.count("at least") == len(RIDGES)


def test_effective_dimension__with_a_certificate_is_the_same_interval_everywhere(result, tmp_path):
    summary = result.store(tmp_path / "out.zarr")
    shown = [interval(ends) for ends in result.certificate.effective_dimension]
    assert summary["effective_dimension"] == [list(ends) for ends in result.certificate.effective_dimension]
    assert result.effective_dimension_bounds == result.certificate.effective_dimension
    smallest = shown[int(np.argmin(RIDGES))]
    for source in (result, daskrr.open_scores(tmp_path / "out.zarr")):
        assert smallest in all_texts(source.plot.scores())
        assert smallest in all_texts(source.plot.intervals())
        assert all(one in all_texts(source.plot.spectrum()) for one in shown)
        ends = [segment[:, 1] for line in source.plot.path().collections[1:-1] for segment in line.get_segments()]
        np.testing.assert_allclose(ends, result.certificate.effective_dimension)
    assert all(one in repr(result) and one in result._repr_html_() for one in shown)


def test_plot__refuses_what_there_is_not(X, result, store):
    plain = daskrr.leverage_scores(X, Gaussian(2.0), 1e-3, 30, random_state=0)
    with pytest.raises(NotCertified, match="certify=True"):
        plain.plot.intervals()
    with pytest.raises(NotCertified, match="certify=True"):
        plain.plot.scores(of="upper")
    with pytest.raises(InvalidParameter, match="by must be one of"):
        plain.plot.scores(of="residual")
    with pytest.raises(InvalidParameter, match=r"ridge=0.5 is none"):
        result.plot.scores(ridge=0.5)
    with pytest.raises(InvalidParameter, match="two ridges or more"):
        plain.plot.path(ridges=[1e-3])
    with pytest.raises(InvalidParameter, match="recorded with it"):
        store.plot.path(ridges=[1e-3, 1e-2])
    assert plain.plot.path().get_ylabel() == "effective dimension"


def test_plot__of_a_store_of_an_earlier_version_or_an_unfinished_job(store):
    for name in ("spectrum", "path"):
        del store.summary[name]
        with pytest.raises(InvalidData, match="earlier version"):
            getattr(store.plot, name)()
    store.complete = np.arange(700) < 300
    with pytest.raises(InvalidData, match="need all rows"):
        _ = store.plot


@pytest.mark.slow
def test_matplotlib__is_not_loaded_where_rows_are_counted():
    script = "import sys, daskrr.jobs.reader, daskrr.regression.model; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"


# --- Regression ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def training():
    rng = np.random.default_rng(5)
    X = rng.standard_normal((900, 2))
    y = np.column_stack([np.sin(2 * X[:, 0]) + 0.3 * rng.standard_normal(900), X[:, 1] ** 2 + rng.standard_t(3, 900)])
    return X, y


@pytest.fixture(scope="module")
def model(training):
    return daskrr.NystromKernelRidge(Gaussian(1.0), 1e-4, landmarks=60, random_state=0, block_rows=128).fit(*training)


def counted(model, training, target=1):
    sigma = float(np.sqrt(model.noise_variance_[target]))
    return model.sum_diagnostics(*training, None, plotting.partial(fit_of, target, 2, sigma), profile.added), sigma


def test_fit__counts_what_numpy_counts(model, training):
    found, sigma = counted(model, training)
    about = model.diagnose(*training)
    fitted, residuals, studentized = (getattr(about, name)[:, 1] for name in ("fitted", "residuals", "studentized"))
    edges = np.linspace(-plotting.REACH, plotting.REACH, plotting.CELLS + 1)
    clipped = np.clip(residuals / sigma, -plotting.REACH, plotting.REACH)
    expected = np.histogram2d(fitted, clipped, [found.fitted.edges, edges])[0]
    np.testing.assert_array_equal(found.fitted.sums[:, :-1], expected)
    sums = np.histogram(fitted, found.fitted.edges, weights=residuals)[0]
    np.testing.assert_allclose(found.fitted.sums[:, -1], sums, atol=1e-9)
    inside = np.clip(studentized, -plotting.REACH, plotting.REACH)
    plane = np.histogram2d(about.leverage, inside, [plotting.LEVERAGE_EDGES, edges])[0]
    np.testing.assert_array_equal(found.leverage, plane)
    order = np.argsort(-about.cooks_distance[:, 1], kind="stable")[:10]
    assert found.top["rows"].tolist() == order.tolist()
    np.testing.assert_allclose(found.top["cooks_distance"], about.cooks_distance[order, 1], rtol=1e-9)
    assert found.skipped == 0


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e12])
def test_table__of_parts_is_that_of_the_whole(scale):
    rng = np.random.default_rng(0)
    values = scale * (rng.standard_normal(500) + np.repeat([0.0, 40.0], 250))
    parts = [CellSums.of(part, np.zeros(len(part), int), 1, part) for part in np.split(values, [3, 90, 250, 251])]
    found = sum(parts[1:], start=parts[0])
    assert len(found.sums) <= plotting.MOST_CELLS + 1
    np.testing.assert_array_equal(found.sums[:, 0], np.histogram(values, found.edges)[0])
    assert found.sums[:, 1].sum() == pytest.approx(values.sum())


def test_table__of_equal_values_and_of_none():
    same, none = (
        CellSums.of(values, np.zeros(len(values), int), 1, values) for values in (np.full(4, 7.5), np.empty(0))
    )
    found = same + none
    assert found.sums[:, 0].sum() == 4
    assert found.edges[0] <= 7.5 < found.edges[-1]


def test_normal_quantiles__are_those_of_numpy():
    values = np.random.default_rng(2).standard_t(4, 20_000)
    counts = np.bincount(cell_of(values, plotting.FINE_REACH, plotting.FINE_CLASSES), minlength=plotting.FINE_CLASSES)
    normal, found = normal_quantiles(counts)
    inner = np.abs(normal) < 3
    expected = np.quantile(values, plotting.ndtr(normal[inner]))
    np.testing.assert_allclose(found[inner], expected, atol=0.06)


def test_plot_diagnostics__draws_four_panels(model, training):
    figure = model.plot.diagnostics(*training, target=1)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert {"Residuals against fitted values", "Rows that move the predictions most"} <= set(titles)
    influence = next(axes for axes in figure.axes if axes.get_xlabel() == "Cook's distance")
    highest = int(np.argmax(model.diagnose(*training).cooks_distance[:, 1]))
    assert influence.get_yticklabels()[0].get_text() == str(highest)
    figure.canvas.draw()
    given = plt.figure()
    assert model.plot.diagnostics(*training, figure=given) is given


def test_plot_diagnostics__says_what_is_wrong(model, training):
    with pytest.raises(InvalidParameter, match="target=2 is none of the 2"):
        model.plot.diagnostics(*training, target=2)
    X = training[0][:30]
    exactly = daskrr.NystromKernelRidge(Gaussian(1.0), 1e-6, landmarks=30, random_state=0).fit(X, np.zeros(30))
    with pytest.raises(InvalidData, match="noise variance"):
        exactly.plot.diagnostics(X, np.zeros(30))


# --- How much is moved --------------------------------------------------------------------------------


@pytest.mark.slow
def test_plot__brings_the_same_few_bytes_of_any_number_of_rows(client, tmp_path, monkeypatch):
    gather, moved = Client.gather, []

    def counting(self, futures, *arguments, **options):
        found = gather(self, futures, *arguments, **options)
        moved.append(len(pickle.dumps(found)))
        return found

    def bytes_of(n_rows):
        X = clusters_with_outliers(n_rows, 2, random_state=0)[0]
        path = as_zarr(X, (1000, 2), tmp_path / str(n_rows))
        result = daskrr.leverage_scores(path, Gaussian(1.0), 1e-3, 20, certify=True, random_state=0, block_rows=1000)
        y = da.from_array(X[:, 0], chunks=1000)
        model = daskrr.NystromKernelRidge(Gaussian(1.0), 1e-3, landmarks=20, random_state=0, block_rows=1000)
        model.fit(path, y)
        result.store(tmp_path / f"scores-{n_rows}", progress=False)
        moved.clear()
        daskrr.open_scores(tmp_path / f"scores-{n_rows}").plot.scores()
        for name in ("scores", "intervals", "spectrum", "path"):
            getattr(result.plot, name)()
        model.plot.diagnostics(path, y)
        return sum(moved)

    monkeypatch.setattr(Client, "gather", counting)
    few, many = bytes_of(1000), bytes_of(10_000)
    assert many < 900_000
    assert many < 1.5 * few
