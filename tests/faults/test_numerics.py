"""Numbers that are hard: scores agree with the exact ones within their intervals, or an error names what is wrong."""

import re

import dask
import numpy as np
import pytest
from strategies import SOURCES, extended_scores
from variants import slow_but

import daskrr
from daskrr import exact
from daskrr.errors import CheckFailed, InvalidData, RidgeTooSmall
from daskrr.kernels import Cosine, Gaussian, Laplacian, Linear, Matern, Polynomial

SLOW = pytest.mark.slow
U64 = 2.0**-53
N = 15
RNG = np.random.default_rng(0)
PLAIN = RNG.standard_normal((N, 3))


def with_row(value):
    X = PLAIN.copy()
    X[7, 1] = value
    return X


CASES = {
    "plain": PLAIN,
    "duplicates": PLAIN[np.arange(N) // 3],
    "rank 1": np.repeat(PLAIN[:1], N, axis=0),
    "zero rows": np.where(np.arange(N)[:, None] % 3 == 0, 0.0, PLAIN),
    "only zeros": np.zeros((N, 3)),
    "offset 1e6": PLAIN + 1e6,
    "offset 1e6 in float32": (PLAIN + 1e6).astype(np.float32),
    "huge": 1e100 * PLAIN,
    "beyond huge": 1e200 * PLAIN,
    "tiny": 1e-100 * PLAIN,
    "denormal": 1e-310 * PLAIN,
    "huge and tiny": PLAIN * np.array([1e100, 1.0, 1e-100]),
    "one far row": np.concatenate([1e8 * PLAIN[:1], PLAIN[1:]]),
    "int8": RNG.integers(-128, 128, (N, 3)).astype(np.int8),
    "uint8": RNG.integers(0, 256, (N, 3)).astype(np.uint8),
    "bool": PLAIN > 0,
    "float16": PLAIN.astype(np.float16),
    "float16 at its limit": np.full((N, 3), np.finfo(np.float16).max, np.float16),
    "one row": PLAIN[:1],
    "one feature": PLAIN[:, :1],
    "one number": PLAIN[:1, :1],
}
BAD = {
    "NaN": with_row(np.nan),
    "infinity": with_row(np.inf),
    "minus infinity": with_row(-np.inf),
    "NaN in float16": with_row(np.nan).astype(np.float16),
    "every row NaN": np.full((N, 3), np.nan),
}
KERNELS = {"gaussian": Gaussian(1.5), "linear": Linear()}
MORE_KERNELS = {"laplacian": Laplacian(1.5), "matern": Matern(1.5, 2.5), "cubic": Polynomial(3), "cosine": Cosine()}
NAMED = "overflow the dtype of the tiles|weight of row 0 is inf|the kernel is zero on every row"
# Ridges, each with so many landmarks for every row.
TRIED = [(1e-18, 0.5), (1e-12, 3), (1e-6, 0.5), (1e-6, 3), (1.0, 0.5), (1e18, 3)]


def certified(X, kernel, ridge, n_landmarks, **options):
    """Scores, estimate, lower and upper, which are finite and in range whatever the numbers."""
    options = {"random_state": 0, "progress": False, "block_rows": 5} | options
    result = daskrr.leverage_scores(X, kernel, ridge, n_landmarks, certify=True, **options)
    found = dask.compute(result.scores, result.estimate, result.lower, result.upper)
    for values in found:
        assert np.all((values >= 0) & (values <= 1))
    assert np.isfinite(result.sketch_dimension)
    return found


def expected_scores(X, kernel, ridge):
    """Exact scores and their error; in extended precision where float64 would decide them."""
    X = X.astype(np.float64)
    with np.errstate(over="ignore"):
        spread = 4 * U64 * len(X) * float(np.max(kernel.diagonal(X))) / ridge
    if spread < 1e-9:
        return exact.leverage_scores(X, kernel, ridge), 1e-12 + spread
    return np.array(extended_scores(X, kernel, ridge), np.float64), 1e-15


def agrees(X, kernel, ridge, n_landmarks, tiles):
    """Whether there are scores; if so, they are right, and else the error says what to do."""
    try:
        _, estimate, lower, upper = certified(X, kernel, ridge, n_landmarks, dtype=tiles)
    except RidgeTooSmall as error:
        assert "ridge" in str(error)  # noqa: PT017
        return False
    except InvalidData as error:
        assert re.search(NAMED, str(error))  # noqa: PT017
        return False
    except CheckFailed as error:
        assert tiles == "float32"
        assert "use dtype='float64'" in str(error)  # noqa: PT017
        return False
    expected, slack = expected_scores(X, kernel, ridge)
    assert np.all(lower - expected <= slack)
    assert np.all(expected - upper <= slack)
    assert np.all((lower <= estimate) & (estimate <= upper))
    return True


def is_easy(X, kernel, ridge, tiles):
    """Whether there is no excuse: round-off of the tiles is far below the ridge, and numbers are far from limits."""
    with np.errstate(over="ignore"):
        largest = float(np.max(kernel.diagonal(X.astype(np.float64))))
    return 1e-30 < largest < 1e30 and ridge >= {"float64": 1e-9, "float32": 1e-1}[tiles] * largest


QUICK = ("gaussian", "float64")
TRIED_FIRST = ("duplicates", "only zeros", "offset 1e6 in float32", "huge", "tiny", "one far row", "int8", "one number")
THOROUGH = [(name, tiles) for name in KERNELS | MORE_KERNELS for tiles in ("float64", "float32")]


@pytest.mark.parametrize(
    ("kernel", "tiles"), [pytest.param(*one, marks=() if one == QUICK else SLOW) for one in THOROUGH]
)
@pytest.mark.parametrize("case", slow_but(CASES, *TRIED_FIRST))
def test_scores__agree_with_the_exact_ones_or_say_why_there_are_none(case, kernel, tiles):
    X, chosen = CASES[case], (KERNELS | MORE_KERNELS)[kernel]
    for ridge, share in TRIED:
        answered = agrees(X, chosen, ridge, max(1, int(share * len(X))), tiles)
        assert answered or not is_easy(X, chosen, ridge, tiles), ridge


@pytest.mark.parametrize("tiles", ["float64", pytest.param("float32", marks=SLOW)])
@pytest.mark.parametrize(
    "source", slow_but([one for one in SOURCES if one not in ("numpy", "path")], "dask ragged", "zarr sharded")
)
def test_scores__agree_with_the_exact_ones_however_the_rows_are_cut(source, tiles, tmp_path):
    for case in ("duplicates", "int8", "float16"):
        X = SOURCES[source](CASES[case], tmp_path)
        for kernel in KERNELS.values():
            ridge = 1e-1 * float(np.mean(kernel.diagonal(CASES[case].astype(float))))
            _, _, lower, upper = certified(X, kernel, ridge, 7, dtype=tiles)
            expected = exact.leverage_scores(CASES[case].astype(float), kernel, ridge)
            assert np.all((lower <= expected + 1e-12) & (expected <= upper + 1e-12))


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows__that_are_not_finite_are_named(case, kernel, tmp_path):
    for source in ("numpy", "dask ragged", "zarr"):
        row = r"\d+" if case == "every row NaN" else "7"
        with pytest.raises(InvalidData, match=rf"hold NaN or infinity in \d+ rows: {row}"):
            certified(SOURCES[source](BAD[case], tmp_path), KERNELS[kernel], 0.1, 5)
    with pytest.raises(InvalidData, match="hold NaN or infinity"):
        daskrr.score_to_zarr(BAD[case], tmp_path / "out.zarr", KERNELS[kernel], 0.1, 5, progress=False)
    assert not (tmp_path / "out.zarr").exists()


@pytest.mark.parametrize("case", ["duplicates", "int8", "one number"])
def test_jobs__publish_what_is_right(case, tmp_path):
    X, kernel = CASES[case], Gaussian(1.5)
    options = {"certify": True, "random_state": 0, "block_rows": 5, "progress": False}
    daskrr.score_to_zarr(X, tmp_path / "out.zarr", kernel, 1e-2, 3 * len(X), **options)
    found = daskrr.open_scores(tmp_path / "out.zarr")
    expected, slack = expected_scores(X, kernel, 1e-2)
    assert np.all((found["lower"][:] <= expected + slack) & (expected <= found["upper"][:] + slack))
