"""What is kept of one run between its passes, and the steps of the p × p algebra that make it.

A step takes inputs that the workers have computed, and parameters; it returns a small summary. What later passes need
is handed out as a *payload*. Where all this lives, :mod:`daskrr.engine.scheduler` decides.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.numerics import blas, regress
from daskrr.numerics.algebra import (
    RidgeFactor,
    Whitening,
    combining_error,
    gram_eigenvalues,
    ridge_factor,
    shift_of,
    subset_factor,
    sum_error,
    whiten,
)
from daskrr.numerics.regress import Solution, Spectrum, Sums

# Relative error of a diagonal entry of the smoother that a sum over all rows may have.
QUICK_LIMIT = 1e-4


@dataclass
class Factors:
    """The factors of one run: of the landmarks' kernel matrix first, of the ridge once the Gram matrix is known.

    A regression keeps its sums and its solution instead of the ridge's factor, and with an intercept the ``row_origin``
    (r,) that is subtracted from rows of B.
    """

    landmarks: NDArray | None = None
    n_landmarks: int = 0
    whitening: Whitening | None = None
    ridge: RidgeFactor | None = None
    kernel_matrix: NDArray | None = None
    subset: tuple[NDArray, ...] = ()
    row_origin: NDArray | None = None
    sums: Sums | None = None
    folds: Sums | None = None
    solution: Solution | None = None
    coefficients: NDArray | None = None
    spectrum: Spectrum | None = None
    quick: NDArray | None = None

    def whiten(self, inputs: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
        """Factor W; ``inputs`` holds W, the landmarks' rows X, the tile kernel's error and the penalty, if any.

        With an intercept, ``inputs`` holds the kernel column in the middle of the landmarks too.
        """
        dtype = np.dtype(parameters["dtype"])
        self.n_landmarks = len(inputs["W"])
        self.whitening = whiten(inputs["W"], inputs["error"], dtype, inputs["penalty"])
        pivots = self.whitening.pivots
        self.landmarks = inputs["X"][pivots]
        if parameters["subset"]:
            self.kernel_matrix = inputs["W"][np.ix_(pivots, pivots)]
        if inputs["middle"] is not None:
            with np.errstate(over="ignore"):  # found in the first block, like that of any row
                origin = (self.whitening.inverse @ inputs["middle"][pivots]).astype(dtype)
            self.row_origin = origin.astype(np.float64)
        return {
            "pivots": pivots,
            "shift": self.whitening.shift,
            "kernel_error": self.whitening.kernel_error,
            "smallest_pivot": self.whitening.smallest_pivot,
        }

    def add_ridge(self, inputs: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
        """Factor G + n·λ·I for every ridge; ``inputs`` holds the lower triangle of G and the height of its sum."""
        dtype, n_rows, ridges = np.dtype(parameters["dtype"]), parameters["n_rows"], parameters["ridges"]
        error = sum_error(float(np.trace(inputs["G"])), inputs["height"])
        self.ridge = ridge_factor(inputs["G"], self._whitening, n_rows, ridges, dtype, error, parameters["leading"])
        if self.kernel_matrix is not None:
            self.subset = tuple(subset_factor(self.kernel_matrix, shift_of(n_rows, ridge)) for ridge in ridges)
        return {
            "effective_dimensions": self.ridge.effective_dimensions.tolist(),
            "score_errors": self.ridge.score_errors.tolist(),
            "gram_norm": self.ridge.gram_norm,
            "gram_error": self.ridge.gram_error,
            "combined": self.ridge.combined is not None,
        }

    def eigenvalues(self, inputs: None, parameters: dict[str, Any]) -> dict[str, Any]:
        """Of G, in descending order."""
        ridge = _known(self.ridge, "the ridge of this run was not added")
        return {"eigenvalues": gram_eigenvalues(ridge, parameters["shift"])}

    def add_sums(self, inputs: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
        """Add the sums of some more rows; ``inputs`` holds those of pass 1, and the first time also their folds'.

        The landmarks of weighted rows are kept without their factors, so that B is that of rows of weight 1.
        """
        if parameters["weighted"] and self.sums is None:
            roots, whitening = self._landmarks[:, -1], self._whitening
            self.landmarks = np.ascontiguousarray(self._landmarks[:, :-1])
            self.whitening = replace(whitening, inverse=whitening.inverse * roots)
        found = Sums(
            gram=inputs["G"],
            features=inputs["features"],
            targets=inputs["targets"],
            origin=np.array(parameters["origin"]),
            row_origin=np.zeros(len(self._landmarks)) if self.row_origin is None else self.row_origin,
            height=inputs["height"],
        )
        if found.gram.ndim == 3:
            self.folds, found = found, found.over_folds()
        self.sums = found if self.sums is None else self.sums + found
        self.spectrum = self.quick = None
        return {"weight": self.sums.weight}

    def resolve(self, inputs: None, parameters: dict[str, Any]) -> dict[str, Any]:
        """The smallest ridge that the sums allow, those without a fold too."""
        dtype, others = np.dtype(parameters["dtype"]), () if self.folds is None else regress.without_folds(self.folds)
        return {"least_ridge": max(regress.least_ridge(sums, dtype) for sums in (self._sums, *others))}

    def regress(self, inputs: None, parameters: dict[str, Any]) -> dict[str, Any]:
        """Solve the ridge regression for every ridge."""
        dtype, ridges = np.dtype(parameters["dtype"]), parameters["ridges"]
        solution = regress.solve(self._sums, ridges, dtype, parameters["intercept"])
        self.keep_solution(solution)
        found = {name: value for name, value in vars(solution).items() if name != "theta"}
        return found | {"weight": self._sums.weight}

    def keep_solution(self, solution: Solution) -> None:
        """Keep a solution, and the coefficients (L, r, t) of kernel columns."""
        self.solution = solution
        with blas.one_thread():
            self.coefficients = self._whitening.inverse.T @ solution.theta

    def diagonalise(self, inputs: None, parameters: dict[str, Any]) -> dict[str, Any]:
        """Make ready for smoothers."""
        found = self.spectrum = self.spectrum or regress.spectrum(self._sums, parameters["intercept"])
        # Factors are multiplied before anything is centred.
        norm = found.eigenvalues.max(initial=0.0) + found.weight * float(found.centre @ found.centre)
        shift = shift_of(found.weight, min(parameters["ridges"]))
        error = combining_error(len(found.eigenvalues), norm, shift, np.dtype(parameters["dtype"]))
        self.quick = found.rotation @ self._whitening.inverse if error < QUICK_LIMIT else None
        return {"effective_dimensions": found.effective_dimensions(parameters["ridges"])}

    def cross_validate(self, inputs: None, parameters: dict[str, Any]) -> dict[str, Any]:
        """Mean squared error of every fold predicted from the others, at every ridge."""
        if self.folds is None:
            raise RuntimeError("the sums of this run have no folds")
        dtype, ridges = np.dtype(parameters["dtype"]), parameters["ridges"]
        errors = regress.fold_errors(self.folds, ridges, dtype, parameters["intercept"])
        self.folds = None
        return {"errors": errors}

    def payload(self, kind: str) -> dict[str, Any]:
        """What a pass needs.

        The factor of W ("whitener"), the ridge's too ("scorer"), or both apart: for rows that pass 1 has not seen ("new
        rows"), or has not kept the residuals of ("drawn rows"). Of a regression: "predictor", "smoother", or the same
        exact enough for sums ("quick smoother").
        """
        found: dict[str, Any] = {"landmarks": self._landmarks, "n_landmarks": self.n_landmarks}
        found["kernel_error"] = self._whitening.kernel_error
        if kind == "predictor":
            return found | {"coefficients": self.coefficients, "intercepts": self._solution.intercepts}
        if kind in ("smoother", "quick smoother"):
            inverse, rotation = self._whitening.inverse, self._spectrum.rotation
            quick = kind == "quick smoother" and self.quick is not None
            factors = (self.quick,) if quick else (inverse, rotation)
            return found | {"factors": factors, "spectrum": vars(self._spectrum)}
        if kind == "whitener" or self.ridge is None:
            return found | {"factors": (self._whitening.inverse,), "row_origin": self.row_origin}
        found |= {"eigenvalues": self.ridge.eigenvalues, "leading": self.ridge.leading}
        if kind != "drawn rows":
            found |= {"subset": self.subset}
        if kind == "scorer" and self.ridge.combined is not None:
            return found | {"factors": (self.ridge.combined,)}
        return found | {"factors": (self._whitening.inverse, self.ridge.inverse)}

    @property
    def _landmarks(self) -> NDArray:
        return _known(self.landmarks, "the landmarks of this run were not factored")

    @property
    def _whitening(self) -> Whitening:
        return _known(self.whitening, "the landmarks of this run were not factored")

    @property
    def _sums(self) -> Sums:
        return _known(self.sums, "this run has no sums for a regression")

    @property
    def _solution(self) -> Solution:
        return _known(self.solution, "the regression of this run was not solved")

    @property
    def _spectrum(self) -> Spectrum:
        return _known(self.spectrum, "the regression of this run was not diagonalised")


def _known(value: Any, otherwise: str) -> Any:
    if value is None:
        raise RuntimeError(otherwise)
    return value
