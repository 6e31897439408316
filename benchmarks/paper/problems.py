"""The problems of the paper's experiments, whose dimensions and risks the dense oracle knows in closed form.

The problems have 2000 rows at most. Matrices are known by their eigenvalues and eigenvectors, and those of the linear
kernel come from the singular values of X, since its kernel matrix has lost the small ones.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from daskrr import exact
from daskrr.exact import Risk, Spectrum
from daskrr.kernels import Bernoulli, Gaussian, Kernel, Linear
from daskrr.nystrom.landmarks import Landmarks

# Of d_eff = tr K(K + nλεI)⁻¹ in Theorem 3; not printed, but found by comparison with the printed d_eff.
EPSILON = 0.01
SYNTH_ROWS = 500
SYNTH_ORDER = 2
SYNTH_BETA = 0.07
SYNTH_RIDGE = 1e-6
PUMADYN_ROWS = 2000
FILES = {
    "Gas2": "gas-batch2.npz",
    "Gas3": "gas-batch3.npz",
    "Pum-32fm": "pumadyn-32fm.npz",
    "Pum-32fh": "pumadyn-32fh.npz",
    "Pum-32nh": "pumadyn-32nh.npz",
}
RESULTS = Path(__file__).parents[1] / "results"

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Truth:
    """What is to be estimated: f* at the rows (n,), and the variance of the noise."""

    values: Vector
    noise: float


@dataclass(frozen=True)
class Problem:
    """Rows, kernel and ridge, the spectrum of the kernel matrix, and what could be the truth, the main one first."""

    name: str
    X: Matrix
    kernel: Kernel
    ridge: float
    spectrum: Spectrum
    truths: dict[str, Truth]

    @property
    def effective_dimension(self) -> float:
        """As the table has it, at the ridge λε."""
        return float(np.sum(self.spectrum.filter(self.ridge * EPSILON)))

    @property
    def truth(self) -> Truth:
        """The main one."""
        return next(iter(self.truths.values()))

    def ratio(self, approximate: Spectrum, truth: Truth | None = None) -> float:
        """The risk with an approximate kernel matrix in units of the exact one's."""
        truth = truth or self.truth
        return risk(approximate, self.ridge, truth).total / risk(self.spectrum, self.ridge, truth).total


def risk(spectrum: Spectrum, ridge: float, truth: Truth) -> Risk:
    """The risk of kernel ridge regression."""
    return spectrum.risk(ridge, truth.values, truth.noise)


def rank_scores(spectrum: Spectrum, k: int) -> Vector:
    """The leverage score of every row relative to the best rank-k space (Gittens & Mahoney)."""
    largest = np.argsort(spectrum.values)[len(spectrum.values) - k :]
    return np.sum(np.square(spectrum.vectors[:, largest]), axis=1)


def optimal_noise(spectrum: Spectrum, ridge: float, values: Vector) -> float:
    """The noise variance for which this ridge has the least risk: where the derivative by the ridge vanishes."""
    kept = spectrum.filter(ridge)
    coordinates = spectrum.vectors.T @ values
    return float(np.sum(kept * np.square((1 - kept) * coordinates)) / np.sum(np.square(kept) * (1 - kept)))


def residual_noise(spectrum: Spectrum, ridge: float, y: Vector) -> float:
    """The noise variance from the residuals of the fit: ‖(I − H)y‖² / tr (I − H)²."""
    kept = spectrum.filter(ridge)
    freedom = len(y) - len(kept) + np.sum(np.square(1 - kept))
    return float(np.sum(np.square(y - spectrum.smooth(ridge, y))) / freedom)


def nystrom_spectrum(problem: Problem, landmarks: Landmarks, sketch_ridge: float | None = None) -> Spectrum:
    """The spectrum of L = C W⁺ Cᵀ, or with γ of L_γ = C (W + penalty)⁻¹ Cᵀ."""
    penalty = None if sketch_ridge is None else landmarks.penalty(len(problem.X), sketch_ridge)
    return exact.nystrom_spectrum(problem.X, problem.kernel, landmarks.indices, penalty)


def synth_points() -> Vector:
    """Quantiles of a symmetric beta distribution: dense at the ends of (0, 1), rare in the middle."""
    return beta.ppf((np.arange(SYNTH_ROWS) + 0.5) / SYNTH_ROWS, SYNTH_BETA, SYNTH_BETA)


def synth() -> Problem:
    """The synthetic problem of the paper; its noise makes the printed λ the ridge of least risk."""
    points = synth_points()
    functions = {
        "sine": np.sin(2 * np.pi * points),
        "Bernoulli": 12 * np.sqrt(3) * points * (points - 0.5) * (points - 1),
    }
    return known_function("Synth", points[:, None], Bernoulli(SYNTH_ORDER), SYNTH_RIDGE, functions)


def known_function(name: str, X: Matrix, kernel: Kernel, ridge: float, functions: dict[str, Vector]) -> Problem:
    """A problem whose truth is known, with the noise that makes the ridge the one of least risk."""
    spectrum = exact.spectrum(X, kernel)
    truths = {title: Truth(values, optimal_noise(spectrum, ridge, values)) for title, values in functions.items()}
    return Problem(name, X, kernel, ridge, spectrum, truths)


def measured(name: str, X: Matrix, kernel: Kernel, ridge: float, y: Vector) -> Problem:
    """A problem with targets: the truth is their exact fit at the same ridge, the noise what the fit leaves."""
    spectrum = exact.spectrum(X, kernel)
    fit, noise = spectrum.smooth(ridge, y), residual_noise(spectrum, ridge, y)
    truths = {
        "fit": Truth(fit, noise),
        "fit, λ optimal": Truth(fit, optimal_noise(spectrum, ridge, fit)),
        "targets": Truth(y, noise),
    }
    return Problem(name, X, kernel, ridge, spectrum, truths)


def linear(dataset: str, ridge: float, folder: Path) -> Problem:
    """Linear kernel on the features as they are."""
    X, y = load(dataset, folder)
    return measured(dataset, X, Linear(), ridge, y)


def rbf(dataset: str, ridge: float, bandwidth: float, folder: Path) -> Problem:
    """The kernel exp(−‖x − z‖²/bandwidth²) on features of mean 0 and variance 1."""
    X, y = load(dataset, folder)
    standardized = (X - X.mean(axis=0)) / X.std(axis=0)
    return measured(dataset, standardized, Gaussian(bandwidth / np.sqrt(2)), ridge, y)


def load(dataset: str, folder: Path) -> tuple[Matrix, Vector]:
    """Features and targets: all rows of a batch of Gas, the first 2000 of Pumadyn."""
    with np.load(folder / FILES[dataset]) as arrays:
        rows = slice(PUMADYN_ROWS if dataset.startswith("Pum") else None)
        return arrays["X"][rows].astype(np.float64), arrays["y"][rows].astype(np.float64)


def data_missing(dataset: str, folder: Path | None) -> str | None:
    """Why a data set cannot be read, if so."""
    if folder is None:
        return "no data folder: give --data or set DASKRR_DATA"
    return None if (folder / FILES[dataset]).is_file() else f"{FILES[dataset]} is not in the data folder"


def parser(command: str, description: str | None, seeds: int, output: str) -> argparse.ArgumentParser:
    """The options that the commands have in common."""
    found = argparse.ArgumentParser(prog=f"python -m benchmarks.paper.{command}", description=description)
    found.add_argument("--seeds", type=int, default=seeds, metavar="N", help=f"draws of landmarks; {seeds} by default")
    found.add_argument("--output", type=Path, default=RESULTS / output, metavar="FILE", help="report to write")
    return found


def add_data(options: argparse.ArgumentParser) -> None:
    """Add ``--data``, whose default is the environment's."""
    folder = os.environ.get("DASKRR_DATA")
    default = Path(folder) if folder else None
    options.add_argument(
        "--data", type=Path, default=default, metavar="DIR", help="folder of .npz files; $DASKRR_DATA by default"
    )


def spread(values: list[float]) -> dict[str, Any]:
    """Median and range of the seeds, and the values themselves."""
    return {
        "median": float(np.median(values)),
        "least": min(values),
        "most": max(values),
        "values": values,
    }
