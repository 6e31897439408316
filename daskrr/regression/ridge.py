"""Kernel ridge regression at one kernel and one ridge."""

from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike

from daskrr.arguments import prepare
from daskrr.engine.feed import reporter
from daskrr.engine.progress import Reporter
from daskrr.errors import InvalidParameter
from daskrr.kernels import Kernel
from daskrr.nystrom.selection import resolve_kernel
from daskrr.regression.estimator import all_or_nothing, given_kernel, started, without_trace
from daskrr.regression.model import KernelRidgeModel
from daskrr.regression.training import Training, train


class NystromKernelRidge(KernelRidgeModel):
    """Kernel ridge regression on the span of sampled kernel columns, fitted in one pass over the rows.

    Minimises Σ_i w_i·(y_i − f(x_i))² + λ·Σw·‖f‖² over f = Σ_j α_j·k(·, x_j) + intercept, with x_j the landmarks. X, y
    and the weights may be NumPy, Dask or Zarr arrays or paths of Zarr arrays, each in chunks of its own; only NumPy
    arrays and what converts to them are held in memory.

    Parameters
    ----------
    kernel
        A kernel of :mod:`daskrr.kernels` or its specification; None is a Gaussian with the median distance.
    ridge
        λ > 0.
    n_landmarks, sampling, tolerance, absolute_tolerance, max_landmarks, rounds, replacement, epsilon, sketch_ridge
        As of :func:`daskrr.leverage_scores`; so are dtype, missing_chunks and block_rows.
    fit_intercept
        Whether f has a constant part that is not penalised.
    weight_meaning
        What sample weights mean. ``"frequency"``: a row of weight m is m equal rows in all that is said of the fit, and
        diagnostics speak of one of them. ``"precision"``: the variance of a row's noise is in inverse proportion to its
        weight, and a common factor of all weights means nothing. Predictions are the same.
    certify, failure_probability
        Whether to bound how much is lost to the sampling of columns, and how certain that shall be.
    random_state
        Seed of the landmarks; None draws one.
    progress
        None: a bar on a terminal, a widget in a notebook; False: nothing.

    Attributes
    ----------
    landmarks_, dual_coef_, intercept_
        (r, d), (r,) or (r, t), and a number or (t,): f(x) = k(x, landmarks_) · dual_coef_ + intercept_. The first two
        are brought here from where the factors are, as a rule the scheduler, when they are asked for.
    kernel_, ridge_
        With every parameter resolved.
    effective_dimension_
        Trace of the smoother.
    risk_inflation_
        Certified :class:`RiskInflation`, or None without ``certify``.
    residual_squares_, target_squares_
        (t,) weighted sums over the training rows: of squared residuals, and of squared targets (about their mean with
        an intercept). Precisions are scaled to a mean of 1.
    noise_variance_
        A number or (t,), of a row of weight 1, or of mean precision: sums of squared residuals over what is left of the
        number of rows (the sum of frequencies; of rows with a precision above 0) after the trace of the smoother and
        the intercept.
    n_rows_
        Number of training rows.

    Examples
    --------
    >>> import numpy as np, daskrr
    >>> X = np.linspace(0, 6, 200)[:, None]
    >>> model = daskrr.NystromKernelRidge(daskrr.kernels.Gaussian(1.0), 1e-6, n_landmarks=30, random_state=0)
    >>> bool(model.fit(X, np.sin(X[:, 0])).score(X, np.sin(X[:, 0])) > 0.999)
    True
    """

    def __init__(
        self,
        kernel: Kernel | dict | None = None,
        ridge: float = 1e-3,
        n_landmarks: int | None = None,
        *,
        sampling: Any = "residual",
        tolerance: float | None = None,
        absolute_tolerance: float | None = None,
        max_landmarks: int | None = None,
        rounds: int = 2,
        replacement: bool | None = None,
        epsilon: float = 0.1,
        sketch_ridge: float | None = None,
        fit_intercept: bool = False,
        weight_meaning: str = "frequency",
        certify: bool = True,
        failure_probability: float = 1e-6,
        dtype: DTypeLike = "float64",
        missing_chunks: str = "refuse",
        block_rows: int | None = None,
        random_state: int | None = None,
        progress: Reporter | bool | None = False,
    ) -> None:
        self.kernel = kernel
        self.ridge = ridge
        self.n_landmarks = n_landmarks
        self.sampling = sampling
        self.tolerance = tolerance
        self.absolute_tolerance = absolute_tolerance
        self.max_landmarks = max_landmarks
        self.rounds = rounds
        self.replacement = replacement
        self.epsilon = epsilon
        self.sketch_ridge = sketch_ridge
        self.fit_intercept = fit_intercept
        self.weight_meaning = weight_meaning
        self.certify = certify
        self.failure_probability = failure_probability
        self.dtype = dtype
        self.missing_chunks = missing_chunks
        self.block_rows = block_rows
        self.random_state = random_state
        self.progress = progress

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the model to rows X (n, d) with targets y, (n,) or (n, t), and weights (n,), by default all 1.

        Raises
        ------
        InvalidParameter, InvalidData, DoesNotFit, SourceUnreachable
            Before any long work, as far as metadata tell.
        KernelNotPositive, RidgeTooSmall, CheckFailed
            When the numbers cannot be trusted.
        """
        data, kernel = self._checked(X, y, sample_weight)
        data.check_reachable()
        weighed = data.weighed()
        job = prepare(weighed.rows, weighed.kernel(kernel), self.ridge, self.n_landmarks, self._options())
        with reporter(self.progress) as report:
            run = started(job, report)
            kernel = resolve_kernel(run, job.settings.kernel, job.scheme.seed)
            settings = replace(job.settings, kernel=kernel, intercept=bool(self.fit_intercept))
            trained = train(job, run, settings, weighed, data.origin())
            deviation = trained.deviation(job.failure_probability) if job.certify else None
        self._keep(trained, job.settings.ridges[0], data, deviation)
        return self

    @without_trace
    def check(self, X: Any, y: Any, sample_weight: Any = None) -> None:
        """Raise what :meth:`fit` would raise before any long work, without a cluster and without reading rows."""
        data, kernel = self._checked(X, y, sample_weight)
        prepare(data.rows, kernel, self.ridge, self.n_landmarks, self._options())

    def _checked(self, X: Any, y: Any, sample_weight: Any) -> tuple[Training, Kernel]:
        if np.ndim(self.ridge):
            raise InvalidParameter(f"a model has one ridge, got {self.ridge!r}")
        data = self._open(X, y, sample_weight)
        return data, given_kernel(self.kernel, data.rows.n_rows)
