"""The fitted small object: landmarks, the factor of their kernel matrix, and the ridge.

A :class:`NystromSketch` is all that is left of the data after pass 1. Its factors stay where they were computed (the
scheduler, as a rule); what it holds itself is small.
"""

import os
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData, NotCertified
from daskrr.kernels import Kernel, from_spec
from daskrr.kernels.weighted import Weighted, unweighted
from daskrr.numerics.bounds import Certainty
from daskrr.numerics.factorize import residual_error, shift_of, shifted_eigenvalues
from daskrr.numerics.pass1 import Draw
from daskrr.nystrom import factors, saving
from daskrr.nystrom.factors import TileFactors, new_rows
from daskrr.nystrom.landmarks import Landmarks
from daskrr.nystrom.reading import BeginSums, Reading, gram_task, new_rows_task, quantity, score_task
from daskrr.nystrom.saving import Arrays
from daskrr.runtime.executors import Executor
from daskrr.runtime.futures import begun
from daskrr.runtime.likeness import check_likeness
from daskrr.runtime.map_blocks import BlockMap, Run, map_blocks
from daskrr.runtime.notebook import html_table
from daskrr.runtime.rows import ConstantRows, JoinedRows, Rows, open_rows
from daskrr.runtime.scheduler import Algebra, InProcess, held
from daskrr.runtime.sealing import sealed_task
from daskrr.storage.saving import Saving
from daskrr.tables.features import Features


def _pack(arrays: Arrays, attributes: dict[str, Any], payload: TileFactors) -> tuple[Arrays, dict[str, Any]]:
    """What a sketch is stored as: its own arrays and attributes, and those of its factors."""
    more, facts = saving.packed(payload)
    return more | arrays, saving.sealed(more | arrays, facts | attributes)


def _call_with(then: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return then(*arguments)


def _and_then(then: Callable[[Any], Any], work: Callable[..., Any], *arguments: Any) -> Any:
    return then(work(*arguments))


@dataclass(frozen=True, repr=False)
class NystromSketch:
    """Landmarks and factors that score any row, also rows that were not in the data.

    Attributes
    ----------
    kernel
        With every parameter resolved.
    ridges, single
        λ, one or several, and whether it was given as a number.
    landmarks
        The rows drawn, duplicates merged.
    rank
        How many of them are linearly independent at working precision.
    certainty
        What is certain about the scores of the data that it was fitted to, or None.
    gram_error
        Bound of the round-off of the Gram matrix, in norm.
    features
        What the columns of the data are, where that is known.
    """

    kernel: Kernel
    ridges: tuple[float, ...]
    single: bool
    n_rows: int
    n_features: int
    dtype: np.dtype
    landmarks: Landmarks
    run: str
    algebra: Algebra = field(compare=False)
    rank: int
    pivots: NDArray[np.int64]
    kernel_error: float
    certainty: Certainty | None = None
    gram_error: float = 0.0
    features: Features | None = None

    @property
    def shifts(self) -> tuple[float, ...]:
        """n·λ for every ridge, with the n of the data that the sketch was fitted to."""
        return tuple(shift_of(self.n_rows, ridge) for ridge in self.ridges)

    @property
    def ceilings(self) -> tuple[float, ...] | None:
        """k/(k + nλ) for every ridge, which no exact score exceeds; None where k, of a row with itself, differs.

        It is the score of a row that is like no other: (K + nλI)⁻¹ has no smaller diagonal than 1/(k + nλ).
        """
        if not self.kernel.constant_diagonal:
            return None
        k = float(self.kernel.diagonal(np.zeros((1, self.n_features)))[0])
        return tuple(k / (k + shift) for shift in self.shifts)

    @property
    def reading(self) -> Reading:
        """What pass 2 shall find out."""
        return Reading(self.kernel, self.dtype, self.shifts, self.certainty, self.pivots)

    @property
    def ridge_text(self) -> str:
        """The ridges, for people."""
        return ", ".join(f"{ridge:g}" for ridge in self.ridges)

    def gram_flops(self, with_gram: bool = True) -> float:
        """Floating-point operations of a row in pass 1: kernel columns, a triangular product, and its Gram matrix."""
        return 2.0 * self.rank * self.n_features + (2.0 if with_gram else 1.0) * self.rank**2

    @property
    def score_flops(self) -> float:
        """Floating-point operations of a row in pass 2: a triangular product, and a full one for several ridges."""
        return 2.0 * self.rank * self.n_features + (1.0 if len(self.ridges) == 1 else 3.0) * self.rank**2

    @property
    def residual_error(self) -> float:
        """Round-off that a residual may carry, as a multiple of k_ii."""
        return residual_error(len(self.landmarks.indices), self.kernel_error)

    def scores(self, X_new: Any) -> da.Array:
        """Lazy scores (m,), (m, L) for a list of ridges, of new rows (m, d): what each has among the data.

        That is as row n + 1, with n·λ kept as it was: s/(1 + s), where s is :meth:`leverage_function`. Every row is
        appended for itself, so that it does not matter which are asked about together. Like the scores of the data they
        are never above the exact ones beyond round-off.

        Examples
        --------
        >>> import numpy as np, daskrr
        >>> X, kernel = np.random.default_rng(0).standard_normal((201, 2)), daskrr.kernels.Gaussian(1.0)
        >>> sketch = daskrr.leverage_scores(X[:200], kernel, 1e-2, 50, certify=True, random_state=0).sketch
        >>> exact = daskrr.exact.leverage_scores(X, kernel, 1e-2 * 200 / 201)[200]
        >>> bool(sketch.lower(X[200:]).compute()[0] <= exact <= sketch.upper(X[200:]).compute()[0])
        True
        """
        return self._evaluate(X_new, "scores")

    def leverage_function(self, X_new: Any) -> da.Array:
        """Lazy s = bᵀ(G + n·λ)⁻¹b of new rows, shaped like :meth:`scores`; may exceed 1.

        b is the row's part in the span of the landmarks. It is a lower bound of the ridge leverage function
        (k(x, x) − k_xᵀ(K + n·λ)⁻¹k_x)/(n·λ), up to round-off, and equals l/(1 − l) where l is the score.
        """
        return self._evaluate(X_new, "leverage_function")

    def estimate(self, X_new: Any) -> da.Array:
        """Lazy point estimates of the scores of new rows, corrected by the part of each that no landmark explains."""
        return self._evaluate(X_new, "estimate")

    def lower(self, X_new: Any) -> da.Array:
        """Lazy, like :meth:`scores`: what the exact score of a new row among the data is certainly not below.

        The failure probability is that of the data's certificate, for all new rows together, however many.

        Raises
        ------
        NotCertified
            The sketch was fitted without ``certify=True``.
        """
        return self._end(X_new, "lower")

    def upper(self, X_new: Any) -> da.Array:
        """Lazy, like :meth:`lower`: what the exact score of a new row among the data is certainly not above."""
        return self._end(X_new, "upper")

    def residual(self, X_new: Any) -> da.Array:
        """Lazy residuals (m,) of new rows: k(x, x) minus what the landmarks explain of it."""
        return self._evaluate(X_new, "residual")

    def _end(self, X_new: Any, name: str) -> da.Array:
        if self.certainty is None:
            raise NotCertified(f"the sketch has no {name}: it was fitted without certify=True (--certify). Fit it so.")
        return self._evaluate(X_new, name)

    def pick(self, array: da.Array, number: int) -> da.Array:
        """One quantity of several that stand side by side, each with a column for every ridge."""
        if self.single:
            return array[:, number]
        return array[:, number * len(self.ridges) : (number + 1) * len(self.ridges)]

    def _evaluate(self, X_new: Any, name: str) -> da.Array:
        rows = self.open_new_rows(X_new)
        run = Run.of_columns(rows, max(self.rank, 1))
        in_process = isinstance(self.algebra, InProcess)
        payload = self.held(run.executor) if in_process else self.algebra.payload(new_rows)
        single = self.single or name == "residual"
        found = self.map_new_rows(run, payload, partial(quantity, name)).lazy(1 if single else len(self.ridges))
        return found[:, 0] if single else found

    def open_new_rows(self, X_new: Any, missing_chunks: str = "refuse", already_scaled: bool = False) -> Rows:
        """View rows as new ones; ``already_scaled`` says that they are made as the data was, whatever is recorded.

        Raises
        ------
        InvalidData
            They have other features than the data that the sketch was fitted to.
        """
        rows = open_rows(X_new, missing_chunks=missing_chunks, name="X_new")
        if rows.shape[1] != self.n_features:
            raise InvalidData(f"X_new has {rows.shape[1]} features; the sketch was fitted to {self.n_features}.")
        check_likeness(rows, self.features, "the sketch", already_scaled)
        if isinstance(self.kernel, Weighted):
            return JoinedRows(rows, ConstantRows(rows.n_rows, 1.0), self.kernel.scale)
        return rows

    def map_new_rows(self, run: Run, payload: Any, then: Callable[..., Any]) -> BlockMap:
        """Score new rows by the factors in ``payload``; ``then`` is called with each block's scores and first row."""
        work = partial(new_rows_task, self.reading, then)
        return map_blocks(run, "score-new-rows", work, run.rows, shared=[payload])

    def packed(self) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and attributes of which :meth:`unpacked` makes a sketch again that gives new rows the same bits."""
        return self._packer(self.algebra.fetch(new_rows))

    def pack_where_factors_go(self, where: Executor, then: Callable[[Arrays, dict[str, Any]], Any]) -> Any:
        """Handle of what ``then`` makes of the same, called by a worker, so that no factor comes to this process."""
        store = partial(_and_then, partial(_call_with, then), self._packer)
        return where.begin(sealed_task(f"store-sketch-{uuid.uuid4().hex}", store, self.algebra.payload(new_rows)))

    @property
    def _packer(self) -> Callable[[TileFactors], tuple[Arrays, dict[str, Any]]]:
        drawn = {name: values for name, values in vars(self.landmarks).items() if values is not None}
        arrays = {"pivots": self.pivots} | {f"landmark_{name}": values for name, values in drawn.items()}
        certainty = self.certainty
        attributes = {
            "kernel": unweighted(self.kernel).to_spec(),
            "weight_scale": self.kernel.scale if isinstance(self.kernel, Weighted) else None,
            "ridges": list(self.ridges),
            "single": self.single,
            "n_rows": self.n_rows,
            "n_features": self.n_features,
            "dtype": str(self.dtype),
            "gram_error": self.gram_error,
            "features": self.features and self.features.to_attributes(),
            "certainty": certainty and vars(certainty) | {"score_errors": certainty.score_errors.tolist()},
        }
        return partial(_pack, arrays, attributes)

    @classmethod
    def unpacked(
        cls, arrays: Arrays, attributes: dict[str, Any], allow_functions: Collection[str] = ()
    ) -> "NystromSketch":
        """What :meth:`packed` was called on, with its factors in this process."""
        known, scale = attributes["certainty"], attributes["weight_scale"]
        kernel = from_spec(attributes["kernel"], allow_functions)
        return cls(
            kernel=kernel if scale is None else Weighted(kernel, scale),
            ridges=tuple(attributes["ridges"]),
            single=attributes["single"],
            n_rows=attributes["n_rows"],
            n_features=attributes["n_features"],
            dtype=np.dtype(attributes["dtype"]),
            landmarks=Landmarks(
                arrays["landmark_indices"], arrays["landmark_counts"], arrays.get("landmark_probabilities")
            ),
            run=uuid.uuid4().hex,
            algebra=InProcess(saving.unpacked(arrays, attributes)),
            rank=len(arrays["landmarks"]),
            pivots=arrays["pivots"],
            kernel_error=attributes["kernel_error"],
            gram_error=attributes["gram_error"],
            features=Features.of(attributes["features"] or {}, attributes["n_features"], "the sketch"),
            certainty=known and Certainty(**known | {"score_errors": np.array(known["score_errors"])}),
        )

    def save(self, path: str | os.PathLike, *, overwrite: bool = False) -> None:
        """Write the sketch to a Zarr group: arrays and JSON, no pickles; :func:`daskrr.load` reads it.

        What was fitted to last month's data scores tonight's rows then, without that data and without a cluster.

        Raises
        ------
        OutputExists
            Something is at ``path`` and may not be replaced.

        Examples
        --------
        >>> import numpy as np, daskrr, tempfile
        >>> X = np.random.default_rng(0).standard_normal((200, 2))
        >>> sketch = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-2, 50, random_state=0).sketch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sketch.save(f"{folder}/sketch.zarr")
        ...     again = daskrr.load(f"{folder}/sketch.zarr")
        >>> bool((again.scores(X + 1.0) == sketch.scores(X + 1.0)).all().compute())
        True
        """
        with Saving(path, overwrite, saving.SKETCH) as output:
            arrays, about = self.packed()
            output.write(arrays)
            output.commit(about)

    @property
    def identity(self) -> str:
        """What tells it from any other sketch: a checksum of all that it is stored as."""
        return f"crc32 {self.packed()[1]['crc32']:08x}"

    def held(self, where: Executor) -> Any:
        """The factors, ready as an argument of every task that scores new rows."""
        return held(self.algebra, new_rows, where)

    def begin_eigenvalues(self, where: Executor) -> Future[NDArray[np.float64]]:
        """Look for the eigenvalues (r,) of G, in descending order, while this process goes on, if they are elsewhere.

        The algebra may know them already. If not, it takes one core longer to find those of many landmarks than GPUs to
        be done with pass 2, and so they are found there.
        """
        algebra, shift = self.algebra, self.shifts[0]
        find = partial(algebra.perform, partial(factors.eigenvalues, shift=shift))
        known = len(self.ridges) > 1 or self.certainty is not None
        on_gpu = where.device.gpu is not None and not known
        if on_gpu:
            find = partial(self._eigenvalues_on_workers, where, shift)
        elsewhere = algebra.place == "scheduler" or (on_gpu and algebra.place == "worker")
        return begun(find, in_background=elsewhere)

    def _eigenvalues_on_workers(self, where: Executor, shift: float) -> NDArray[np.float64]:
        inverse = held(self.algebra, factors.ridge_inverse, where)
        return where.value(where.apply("eigenvalues", partial(shifted_eigenvalues, shift=shift), inverse))

    def map_gram(
        self, run: Run, payload: Any, draws: dict[str, Draw], begin: BeginSums | None, *rows: Rows
    ) -> BlockMap:
        """Pass 1, to which ``payload`` is the factor of W and ``rows`` what ``begin`` needs besides; or residuals."""
        work = partial(gram_task, self.run, self.kernel, self.dtype, draws, begin)
        run = replace(run, name=self.run)
        return map_blocks(run, "residual" if begin is None else "gram", work, run.rows, *rows, shared=[payload])

    def map_scores(
        self,
        run: Run,
        payload: Any,
        kept: Sequence[Any],
        then: Callable[..., Any],
        use: str,
        more: Sequence[Any] | None = None,
    ) -> BlockMap:
        """Pass 2 for one use, with the factors in ``payload`` and what pass 1 kept of each block of the run.

        ``then`` is called with a block's :class:`ScoredRows`, its first row and what ``more`` has for it, in the same
        task.
        """
        return map_blocks(
            replace(run, name=self.run),
            "score-rows",
            partial(score_task, self.run, self.reading, then),
            run.rows,
            shared=[payload],
            each=[kept] if more is None else [kept, more],
            purpose=use,
        )

    def __repr__(self) -> str:
        return (
            f"NystromSketch({unweighted(self.kernel)!r}, ridge={self.ridge_text}, {len(self.landmarks.indices)} "
            f"landmarks of rank {self.rank}, fitted to {self.n_rows:,} rows × {self.n_features} features, "
            f"{self.dtype} tiles)"
        )

    def _repr_html_(self) -> str:
        rows = {
            "kernel": repr(unweighted(self.kernel)),
            "ridge λ": self.ridge_text,
            "landmarks": f"{len(self.landmarks.indices):,} distinct, rank {self.rank:,}",
            "fitted to": f"{self.n_rows:,} rows × {self.n_features} features",
            "factors kept by": self.algebra.place,
        }
        return html_table("NystromSketch", rows)


def load_sketch(path: str | os.PathLike, allow_functions: Collection[str] = ()) -> NystromSketch:
    """Read a sketch that was saved, or that stored scores carry."""
    return NystromSketch.unpacked(*saving.read_stored(path), allow_functions)
