"""Kernel ridge regression at one kernel and one ridge."""

from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike

from daskrr.errors import InvalidParameter
from daskrr.kernels import Kernel
from daskrr.nystrom.strategies import Certify, Tolerance
from daskrr.regression.estimator import all_or_nothing, given_kernel, started, without_trace
from daskrr.regression.fitting import Training, train
from daskrr.regression.learning import resolve_with_targets
from daskrr.regression.model import KernelRidgeModel
from daskrr.runtime.progress import Reporter
from daskrr.runtime.telemetry import reporter


class NystromKernelRidge(KernelRidgeModel):
    """Kernel ridge regression on the span of sampled kernel columns, fitted in one pass over the rows.

    Minimises Σ_i w_i·(y_i − f(x_i))² + λ·Σw·‖f‖² over f = Σ_j α_j·k(·, x_j) + intercept, with x_j the landmarks. X, y
    and the weights may be NumPy, Dask or Zarr arrays or paths of Zarr arrays, each in chunks of its own; only NumPy
    arrays and what converts to them are held in memory.

    Parameters
    ----------
    kernel
        A kernel of :mod:`daskrr.kernels`, its name or its specification, see :func:`daskrr.kernels.as_kernel`; None is
        a Gaussian with the median distance. ``length_scale="learn"`` learns one length scale per feature from the
        targets of a sample of the rows.
    ridge
        λ > 0.
    landmarks, sampling
        As of :func:`daskrr.leverage_scores`; so are dtype, missing_chunks and block_rows.
    fit_intercept
        Whether f has a constant part that is not penalised.
    weight_meaning
        What sample weights mean. ``"frequency"``: a row of weight m is m equal rows in all that is said of the fit, and
        diagnostics speak of one of them. ``"precision"``: the variance of a row's noise is in inverse proportion to its
        weight, and a common factor of all weights means nothing. Predictions are the same.
    certify
        Whether to bound how much is lost to the sampling of columns, or a :class:`daskrr.Certify` that says how certain
        that shall be.
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
    >>> model = daskrr.NystromKernelRidge(daskrr.kernels.Gaussian(1.0), 1e-6, landmarks=30, random_state=0)
    >>> bool(model.fit(X, np.sin(X[:, 0])).score(X, np.sin(X[:, 0])) > 0.999)
    True
    """

    def __init__(
        self,
        kernel: Kernel | dict | str | None = None,
        ridge: float = 1e-3,
        landmarks: int | Tolerance | None = None,
        *,
        sampling: Any = "residual",
        fit_intercept: bool = False,
        weight_meaning: str = "frequency",
        certify: bool | Certify = True,
        dtype: DTypeLike = "float64",
        missing_chunks: str = "refuse",
        block_rows: int | None = None,
        random_state: int | None = None,
        progress: Reporter | bool | None = False,
    ) -> None:
        self.kernel = kernel
        self.ridge = ridge
        self.landmarks = landmarks
        self.sampling = sampling
        self.fit_intercept = fit_intercept
        self.weight_meaning = weight_meaning
        self.certify = certify
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
        problem = self._problem(weighed.rows, weighed.kernel(kernel), self.ridge)
        with reporter(self.progress) as report:
            run = started(problem, report)
            kernel = resolve_with_targets(run, problem.settings.kernel, weighed, problem.seed)
            settings = replace(problem.settings, kernel=kernel, intercept=bool(self.fit_intercept))
            trained = train(problem, run, settings, weighed, data.origin())
            deviation = trained.deviation(problem.failure_probability) if problem.certify else None
        self._keep(trained, problem.settings.ridges[0], data, deviation)
        return self

    @without_trace
    def check(self, X: Any, y: Any, sample_weight: Any = None) -> None:
        """Raise what :meth:`fit` would raise before any long work, without a cluster and without reading rows."""
        data, kernel = self._checked(X, y, sample_weight)
        self._problem(data.rows, kernel, self.ridge)

    def _checked(self, X: Any, y: Any, sample_weight: Any) -> tuple[Training, Kernel]:
        if np.ndim(self.ridge):
            raise InvalidParameter(f"a model has one ridge, got {self.ridge!r}")
        data = self._open(X, y, sample_weight)
        return data, given_kernel(self.kernel, data.rows.n_rows)
