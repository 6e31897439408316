"""Problems, sources, kernels and oracles that several test modules share."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import dask
import dask.array as da
import numpy as np
import zarr
from extended import scores_extended
from hypothesis import strategies as st
from zarr.storage import MemoryStore

import daskrr
from daskrr.kernels import Bernoulli, Cosine, Gaussian, Laplacian, Linear, Matern, Polynomial
from daskrr.leverage import LeverageResult
from daskrr.storage.output import Output

KERNELS = [
    Linear(),
    Gaussian(1.5),
    Laplacian(1.5),
    Matern(1.5, 0.5),
    Matern(1.5, 1.5),
    Matern(1.5, 2.5),
    Polynomial(2),
    Polynomial(3, 0.5, 2.0),
    Cosine(),
    Bernoulli(1),
    Bernoulli(2),
    3.0 * Linear(),
    Linear() + Gaussian(1.0),
    Gaussian(0.7) + 2.0 * Cosine(),
    Matern(2.0) * Laplacian(3.0) * 0.5,
]
CASES = {
    "plain": lambda rng, X: X,
    "duplicates": lambda rng, X: X[rng.integers(0, max(1, len(X) // 3), len(X))],
    "one repeated row": lambda rng, X: np.repeat(X[:1], len(X), axis=0),
    "zero rows": lambda rng, X: np.where(rng.random((len(X), 1)) < 0.4, 0.0, X),
    "offset": lambda rng, X: X + 1e6,
    "large": lambda rng, X: X * 1e3,
    "small": lambda rng, X: X * 1e-3,
    "heavy tails": lambda rng, X: rng.standard_t(1, X.shape),
    "far row": lambda rng, X: np.concatenate([1e4 * X[:1], X[1:]]),
    "clusters": lambda rng, X: 5 * X[rng.integers(0, min(3, len(X)), len(X))] + 1e-6 * X,
    "smooth": lambda rng, X: 0.05 * np.cumsum(np.abs(X), axis=0),
}
DTYPES = ["float64", "float32", "float16", "int8", "uint8", "bool"]
MEMORY = itertools.count()


def convert(X, dtype):
    """Bring rows to a dtype; integers take three steps per unit, and what does not fit is clipped."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return X > 0
    if dtype.kind in "iu":
        return np.clip(np.rint(3 * X), np.iinfo(dtype).min, np.iinfo(dtype).max).astype(dtype)
    return np.clip(X, np.finfo(dtype).min, np.finfo(dtype).max).astype(dtype)


@dataclass(frozen=True)
class Problem:
    """Rows and a kernel, named by how they were made."""

    X: np.ndarray
    kernel: daskrr.kernels.Kernel
    case: str

    @property
    def diagonal(self):
        return self.kernel.diagonal(self.X)

    def ridge(self, relative):
        return relative * (float(np.mean(self.diagonal)) or 1.0)


@st.composite
def problems(draw, max_rows=14, dtypes=DTYPES, kernels=KERNELS):
    """Hard and easy rows of every dtype, with a kernel."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.integers(1, max_rows)), draw(st.sampled_from([1, 2, 3, 6]))
    case = draw(st.sampled_from(list(CASES)))
    X = convert(CASES[case](rng, rng.standard_normal(shape)), draw(st.sampled_from(dtypes)))
    return Problem(X, draw(st.sampled_from(kernels)), case)


@st.composite
def landmark_choices(draw, n_rows):
    """The arguments that choose landmarks, among ``n_rows`` rows."""
    n_landmarks = draw(st.sampled_from(sorted({1, max(1, n_rows // 2), n_rows, 3 * n_rows})))
    kind = draw(st.sampled_from(["uniform", "diagonal", "given"]))
    if kind != "given":
        return {"sampling": kind, "landmarks": n_landmarks}
    order = np.random.default_rng(draw(st.integers(0, 1000))).permutation(n_rows)
    return {"sampling": order[:n_landmarks]}


# --- Sources ------------------------------------------------------------------------------------------


def as_zarr(X, chunks, store=None, **options):
    """A Zarr array with every chunk written, zeros too."""
    array = zarr.create_array(
        MemoryStore() if store is None else store,
        shape=X.shape,
        dtype=X.dtype,
        chunks=chunks,
        config={"write_empty_chunks": True},
        **options,
    )
    array[...] = X
    return array


def _ragged(n_rows):
    """Chunk heights that differ, some of one row."""
    cuts = sorted({0, 1, n_rows // 3, n_rows // 2, n_rows})
    return tuple(stop - start for start, stop in itertools.pairwise(cuts))


# Every source of rows can be read in blocks of any multiple of five rows.
SOURCES = {
    "numpy": lambda X, folder: X,
    "numpy by columns": lambda X, folder: np.asfortranarray(X),
    "dask": lambda X, folder: da.from_array(X, chunks=(5, -1)),
    "dask ragged": lambda X, folder: da.from_array(X, chunks=(_ragged(len(X)), -1)),
    "dask by features": lambda X, folder: da.from_array(X, chunks=(5, 1)),
    "zarr": lambda X, folder: as_zarr(X, (5, X.shape[1])),
    "zarr by features": lambda X, folder: as_zarr(X, (5, 1)),
    "zarr sharded": lambda X, folder: as_zarr(X, (1, X.shape[1]), shards=(5, X.shape[1])),
    "zarr format 2": lambda X, folder: as_zarr(X, (5, X.shape[1]), zarr_format=2),
    "path": lambda X, folder: str(as_zarr(X, (5, X.shape[1]), f"{folder}/{next(MEMORY)}.zarr").store.root),
}


# --- Runs ---------------------------------------------------------------------------------------------


class Scored(NamedTuple):
    """A result and its computed arrays."""

    result: LeverageResult
    scores: np.ndarray
    estimate: np.ndarray
    residual: np.ndarray


def score(X, kernel, ridge, landmarks=None, **options):
    """Score rows and compute everything; the seed is 0 unless given."""
    options = {"random_state": 0, "progress": False} | options
    result = daskrr.leverage_scores(X, kernel, ridge, landmarks, **options)
    return Scored(result, *dask.compute(result.scores, result.estimate, result.residual))


def certain(scored):
    """What the exact scores cannot be below, round-off included."""
    error = scored.result.summary["score_error"]
    share = scored.result.summary["roundoff_share_of_ridge"]
    return (scored.scores * (1 - error) - share) / (1 - share)


def residual_budget(scored, diagonal):
    """Round-off that a residual may carry."""
    summary = scored.result.summary
    own = 2 * summary["distinct_landmarks"] * summary["kernel_error"] * diagonal
    return own + 2 * summary["kernel_error"] * np.sum(diagonal)


# --- Oracles ------------------------------------------------------------------------------------------


def extended_scores(X, kernel, ridge):
    """Exact scores in extended precision."""
    return scores_extended(X, kernel, ridge, digits=60)


# --- Kernels of a user --------------------------------------------------------------------------------

CALLS = []


def counted(X, Z):
    """The Gaussian of unit length scale; remembers the shape of every call."""
    CALLS.append((len(X), len(Z)))
    return Gaussian(1.0)(X, Z)


def forbidden(X, Z):
    raise AssertionError("the kernel was called")


def negative_distance(X, Z):
    return -np.sum((X[:, None] - Z[None]) ** 2, axis=2)


def negative_inner(X, Z):
    return -(X @ Z.T)


def sigmoid(X, Z):
    return np.tanh(2.0 * X @ Z.T + 1.0)


def forge(path, change):
    """Change the manifest of what is published, in both copies."""
    output = Output(path)
    generation = output.commit.current
    manifest = output.manifest(generation)
    change(manifest)
    for name in ("manifest", "manifest-copy"):
        output.records.write(f"{generation}/{name}", manifest)
