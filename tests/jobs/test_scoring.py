"""Scores from store to store, and questions to a store of scores."""

import numpy as np
import pytest
import zarr
from strategies import as_zarr, forbidden
from variants import slow_but

import daskrr
from daskrr.errors import InvalidData, InvalidParameter, OutputExists
from daskrr.kernels import Gaussian, Linear


def rows(n=47, d=2):
    return np.random.default_rng(0).standard_normal((n, d))


def scored(folder, X=None, **options):
    options = {"random_state": 0, "block_rows": 10, "progress": False} | options
    path = folder / "out.zarr"
    return daskrr.score_to_zarr(rows() if X is None else X, path, Gaussian(1.0), 0.01, 12, **options)


def test_score_to_zarr__stores_the_scores_of_the_same_arguments(tmp_path):
    path = str(tmp_path / "in.zarr")
    as_zarr(rows(), (10, 2), path)
    summary = scored(tmp_path, path, sampling="uniform", dtype="float32")
    options = {"sampling": "uniform", "dtype": "float32", "random_state": 0, "block_rows": 10, "progress": False}
    result = daskrr.leverage_scores(rows(), Gaussian(1.0), 0.01, 12, **options)
    group = zarr.open_group(tmp_path / "out.zarr", mode="r")
    for name in ("scores", "estimate", "residual"):
        np.testing.assert_array_equal(group[name][...], getattr(result, name).compute())
    assert summary["sketch_dimension"] == result.sketch_dimension
    assert summary["parameters"]["dtype"] == "float32"


def test_score_to_zarr__checks_the_output_before_it_runs(tmp_path):
    (tmp_path / "out.zarr").mkdir()
    (tmp_path / "out.zarr" / "thesis.tex").touch()
    with pytest.raises(OutputExists, match="not a result"):
        daskrr.score_to_zarr(rows(), tmp_path / "out.zarr", forbidden, 0.01, 5)
    with pytest.raises(InvalidParameter, match="there is no folder"):
        daskrr.score_to_zarr(rows(), tmp_path / "nowhere" / "out.zarr", forbidden, 0.01, 5)


def test_score_to_zarr__replaces_only_when_asked(tmp_path):
    scored(tmp_path)
    with pytest.raises(OutputExists, match="overwrite=True"):
        scored(tmp_path, rows(20))
    scored(tmp_path, rows(20), overwrite=True)
    assert zarr.open_array(tmp_path / "out.zarr" / "scores", mode="r").shape == (20,)


def test_score_to_zarr__leaves_nothing_when_it_fails(tmp_path):
    X = rows()
    X[13] = np.nan
    with pytest.raises(InvalidData, match="13"):
        scored(tmp_path, X)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("by", ["estimate", "scores"])
@pytest.mark.parametrize("k", [7, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 47, 1000))])
def test_top_rows__equals_sorting_the_stored_arrays(by, k, tmp_path):
    scored(tmp_path, np.repeat(rows(24), 2, axis=0)[:47])
    group = zarr.open_group(tmp_path / "out.zarr", mode="r")
    values = {name: group[name][...] for name in ("scores", "estimate", "residual")}
    order = np.argsort(-values[by], kind="stable")[:k]
    assert daskrr.jobs.top_rows(tmp_path / "out.zarr", k, by) == [
        {
            "row": int(row),
            "scores": values["scores"][row],
            "estimate": values["estimate"][row],
            "residual": values["residual"][row],
            "ceiling": daskrr.open_scores(tmp_path / "out.zarr").summary["ceiling"],
        }
        for row in order
    ]


@pytest.mark.parametrize("k", slow_but([0, -1, 2.5, "3", True, None], 0, "3"))
def test_top_rows__needs_a_positive_number(k, tmp_path):
    scored(tmp_path)
    with pytest.raises(InvalidParameter, match="k must be"):
        daskrr.jobs.top_rows(tmp_path / "out.zarr", k)


def test_top_rows__refuses_what_it_cannot_rank(tmp_path):
    scored(tmp_path)
    with pytest.raises(InvalidParameter, match="scores, estimate, lower, upper, got 'residual'"):
        daskrr.jobs.top_rows(tmp_path / "out.zarr", 3, "residual")
    with pytest.raises(InvalidData, match="no scores at"):
        daskrr.jobs.top_rows(tmp_path / "other.zarr")
    as_zarr(rows(), (10, 2), str(tmp_path / "rows.zarr"))
    with pytest.raises(InvalidData, match="no scores at"):
        daskrr.jobs.top_rows(tmp_path / "rows.zarr")


def test_score_to_zarr__scores_linear_rows_of_zeros_as_zero(tmp_path):
    options = {"random_state": 0, "progress": False, "sampling": "uniform"}
    daskrr.score_to_zarr(np.zeros((9, 2)), tmp_path / "out.zarr", Linear(), 0.1, 4, **options)
    assert [row["scores"] for row in daskrr.jobs.top_rows(tmp_path / "out.zarr", 9)] == [0.0] * 9
