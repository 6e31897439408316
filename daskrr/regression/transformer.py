"""Features whose inner products are the Nyström approximation of the kernel, for any linear model after them."""

from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from daskrr.kernels import Kernel
from daskrr.leverage.problem import Problem
from daskrr.numerics.pass1 import whitened_rows
from daskrr.numerics.tiles import BlockReader, check_overflow
from daskrr.nystrom.audit import audit, audit_draws
from daskrr.nystrom.drawing import resolve_kernel
from daskrr.nystrom.factors import TileFactors, whitener
from daskrr.nystrom.first_pass import first_pass, whiten
from daskrr.nystrom.reading import whitener_of
from daskrr.nystrom.strategies import Certify, Tolerance
from daskrr.regression.estimator import SketchedEstimator, all_or_nothing, given_kernel, started
from daskrr.regression.fitting import Deviation, audited_rows, choose, fresh_stream
from daskrr.runtime.progress import Reporter
from daskrr.runtime.rows import open_rows, pieces
from daskrr.runtime.telemetry import reporter


class NystromTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SketchedEstimator):
    """Maps rows x to features b(x) with b(x)·b(z) = L(x, z), the Nyström approximation of the kernel.

    L is never above the kernel as a matrix, and exact on the landmarks. A ridge regression on these features at the
    shift n·λ is :class:`daskrr.NystromKernelRidge` at the ridge λ.

    Parameters
    ----------
    kernel
        A kernel of :mod:`daskrr.kernels`, its name or its specification, see :func:`daskrr.kernels.as_kernel`; None is
        a Gaussian with the median distance.
    landmarks, sampling
        As of :func:`daskrr.leverage_scores`; so are dtype, missing_chunks and block_rows.
    ridge
        λ > 0 for sampling by leverage and for a tolerance; nothing else depends on it.
    certify
        Whether to bound how far L is below the kernel matrix of the rows, or a :class:`daskrr.Certify` that says how
        certain that shall be; one more pass.
    random_state
        Seed of the landmarks; None draws one.
    progress
        None: a bar on a terminal, a widget in a notebook; False: nothing.

    Attributes
    ----------
    landmarks_
        (r, d), brought here when it is asked for.
    kernel_
        With every parameter resolved.
    deviation_
        With ``certify``: ``delta``, a bound of the largest eigenvalue of the kernel matrix minus L, and its
        ``failure_probability``; else None.

    Examples
    --------
    >>> import numpy as np, daskrr
    >>> X = np.random.default_rng(0).standard_normal((200, 2))
    >>> B = daskrr.NystromTransformer(daskrr.kernels.Gaussian(2.0), landmarks=40, random_state=0).fit_transform(X)
    >>> bool(np.abs(B @ B.T - daskrr.kernels.Gaussian(2.0)(X, X)).max() < 0.01)
    True
    """

    deviation_: Deviation | None
    _n_features_out: int

    def __init__(
        self,
        kernel: Kernel | dict | str | None = None,
        landmarks: int | Tolerance | None = None,
        *,
        ridge: float = 1e-3,
        sampling: Any = "residual",
        certify: bool | Certify = False,
        dtype: DTypeLike = "float64",
        missing_chunks: str = "refuse",
        block_rows: int | None = None,
        random_state: int | None = None,
        progress: Reporter | bool | None = False,
    ) -> None:
        self.kernel = kernel
        self.landmarks = landmarks
        self.ridge = ridge
        self.sampling = sampling
        self.certify = certify
        self.dtype = dtype
        self.missing_chunks = missing_chunks
        self.block_rows = block_rows
        self.random_state = random_state
        self.progress = progress

    @all_or_nothing
    def fit(self, X: Any, y: Any = None) -> Self:
        """Choose landmarks among the rows X (n, d) and factor their kernel matrix; y is not used.

        Raises
        ------
        InvalidParameter, InvalidData, DoesNotFit, SourceUnreachable
            Before any long work, as far as metadata tell.
        KernelNotPositive, RidgeTooSmall, CheckFailed
            When the numbers cannot be trusted.
        """
        problem = self._stated(X)
        problem.executor.check(problem.rows)
        with reporter(self.progress) as report:
            run = started(problem, report)
            kernel = resolve_kernel(run, problem.settings.kernel, problem.seed)
            settings = replace(problem.settings, kernel=kernel)
            sketch, _ = whiten(run, f"{run.name}-features", settings, choose(problem, run, settings))
            deviation = None
            if self.certify:
                size, seed, number = audited_rows(problem), problem.seed, fresh_stream(problem)
                first = first_pass(run, sketch, audit_draws(seed, number, size), with_gram=False, title="residuals")
                found = audit(run, sketch, first, size, problem.failure_probability, seed, number)
                deviation = Deviation(found.delta, found.failure_probability)
        self.kernel_, self.deviation_ = sketch.kernel, deviation
        self._algebra, self._n_features_out = sketch.algebra, sketch.rank
        self.n_features_in_ = problem.rows.shape[1]
        self._remember_features(problem.rows)
        return self

    def _stated(self, X: Any) -> Problem:
        rows = open_rows(self._validated(X), missing_chunks=self.missing_chunks)
        kernel = given_kernel(self.kernel, rows.n_rows)
        return self._problem(rows, kernel, self.ridge)

    def transform(self, X: Any) -> Any:
        """Features (m, r) of rows (m, d): a NumPy array for what is in memory, else a lazy Dask array."""
        check_is_fitted(self)
        work = partial(_transform, self.kernel_, np.dtype(self.dtype))
        n_features = self._n_features_out
        return self._apply("transform", whitener, n_features, work, n_features, self._new_rows(X))


def _transform(kernel: Kernel, dtype: np.dtype, payload: TileFactors, source: Any, start: int) -> NDArray[np.float64]:
    ready = whitener_of(payload, kernel, dtype)
    features = [np.empty((0, len(ready.inverse)))]
    features += [whitened_rows(ready, piece) for piece in BlockReader(pieces(source), start)]
    for one in features:
        check_overflow(one, start)
    return np.concatenate(features)
