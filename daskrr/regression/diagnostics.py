"""How every training row fits its model, and how much it decides."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Diagnostics:
    """Arrays over the training rows, (n,) or (n, t) for several targets: lazy, or NumPy for arrays in memory.

    Computed together, they cost one reading of the rows. Of a row whose weight counts repeats, all is said of one of
    them; of one whose weight is a precision, of the row.

    Attributes
    ----------
    leverage
        (n,) h_i: the diagonal of the smoother, by how much a row's fitted value follows its own target.
    fitted
        ŷ_i.
    residuals
        y_i − ŷ_i.
    loo_residuals
        (y_i − ŷ_i)/(1 − h_i): residuals of the predictions that the model would make without the row, with λ·Σw and the
        landmarks as they are; a row that is a landmark still serves as one.
    studentized
        (y_i − ŷ_i)/(σ·√(1 − h_i)), where σ² is the model's ``noise_variance_``, over the weight if that is a precision:
        residuals over their standard deviation if f is a Gaussian process, as for standard errors.
    cooks_distance
        Sum of the squared changes of all predictions if the row is left out, over the effective number of parameters
        times the noise variance.
    influence
        h_i·(y_i − ŷ_i)/(1 − h_i): by how much the row moves its own prediction.
    studentized_fixed
        (y_i − ŷ_i)/(σ·√[(I − H)²]_ii), H the smoother: the same if f is fixed and only the noise is random, apart from
        the bias of the fit. Never smaller in size than ``studentized``.

    Examples
    --------
    >>> import numpy as np, daskrr
    >>> X = np.linspace(0, 6, 200)[:, None]
    >>> y = np.sin(X[:, 0])
    >>> y[30] += 3.0
    >>> model = daskrr.NystromKernelRidge(daskrr.kernels.Gaussian(1.0), 1e-3, landmarks=30, random_state=0).fit(X, y)
    >>> int(np.argmax(model.diagnose(X, y).cooks_distance))
    30
    """

    leverage: Any
    fitted: Any
    residuals: Any
    loo_residuals: Any
    studentized: Any
    cooks_distance: Any
    influence: Any
    studentized_fixed: Any

    @classmethod
    def of(cls, columns: Any, single: bool) -> "Diagnostics":
        """From columns (n, 1 + 7·t) that stand side by side."""
        t = (columns.shape[1] - 1) // 7
        parts = [columns[:, 1 + i * t] if single else columns[:, 1 + i * t : 1 + (i + 1) * t] for i in range(7)]
        return cls(columns[:, 0], *parts)
