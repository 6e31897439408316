"""Pictures of scores, in memory or on storage: ``result.plot`` and ``daskrr.open_scores(...).plot``.

Rows are counted where they are, on the workers; what is drawn are a few hundred numbers.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from daskrr.errors import InvalidParameter
from daskrr.leverage.profile import Profile, bars, ranked
from daskrr.leverage.ranking import CERTIFIED, check_top, not_certified
from daskrr.runtime.progress import interval

TITLES = {"estimate": "Estimated leverage scores", "scores": "Leverage scores of the sketch"}
TITLES |= {"lower": "Lower ends of leverage scores", "upper": "Upper ends of leverage scores"}
PATH = ("ridges", "sketch_dimension", "lower", "upper")


def drawings() -> Any:
    """The module that draws. It needs matplotlib, which the workers, who import this one, need not load."""
    return import_module("daskrr.plots")


class Scored(Protocol):
    """Scores of many rows, wherever they are."""

    summary: dict[str, Any]

    @property
    def certified(self) -> bool:
        """Whether every score comes with an interval."""

    @property
    def dimension_ends(self) -> Sequence[tuple[float, float | None]]:
        """For every ridge, what the sum of the exact scores is between; no end above where nothing is certified."""

    def column(self, ridge: float | None) -> int:
        """Which column belongs to a ridge; the smallest ridge by default."""

    def profile(self, ridge: float | None = None) -> Profile:
        """How large scores are, counted on the workers."""

    def spectrum(self) -> Mapping[str, Any]:
        """Eigenvalues of the sketch: ``ranks`` and ``eigenvalues``, in descending order."""

    def dimension_path(self, ridges: Sequence[float] | None = None) -> Mapping[str, Any]:
        """Effective dimension at many ridges: ``ridges``, ``sketch_dimension``, ``lower`` and ``upper``."""


class ScorePictures:
    """Pictures of scores; each method draws on the axes ``ax``, or on new ones, and returns them.

    Examples
    --------
    >>> import numpy as np, daskrr
    >>> X = np.random.default_rng(0).standard_normal((500, 2))
    >>> result = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-3, 80, certify=True, random_state=0)
    >>> result.plot.scores().get_xlabel()
    'leverage score'
    """

    def __init__(self, source: Scored) -> None:
        self._source = source

    def scores(self, *, ax: Any = None, of: str = "estimate", ridge: float | None = None) -> Any:
        """Histogram of the scores of all rows, with their mean, the interval ends and the highest rows.

        Parameters
        ----------
        ax
            Axes to draw on; new ones by default.
        of
            ``"estimate"``, ``"scores"``, ``"lower"`` or ``"upper"``.
        ridge
            Which of several; the smallest by default.
        """
        source = self._source
        check_top(1, of, source.certified)
        profile = source.profile(ridge)
        wanted = [of, *(name for name in ("lower", "upper") if name in profile.counts and name != of)]
        counts = bars({name: profile.counts[name] for name in wanted})
        dimension, ends = self._dimensions(ridge)
        mean = np.array([dimension, *(ends if source.certified else ())], np.float64) / profile.n_rows
        top = {int(row): float(value) for row, value in zip(profile.top.rows, getattr(profile.top, of), strict=True)}
        return drawings().draw_scores(
            ax, counts.edges, counts.counts[of], {name: counts.counts[name] for name in wanted[1:]}, mean, top,
            int(profile.counts[of][0]), f"{TITLES[of]} of {profile.n_rows:,} rows", self._subtitle(ridge),
        )  # fmt: skip

    def intervals(self, *, ax: Any = None, ridge: float | None = None) -> Any:
        """Rows in order of their estimate, highest first: between which ends their exact scores are, and how far apart.

        On axes of your own there is no second panel with the width.

        Raises
        ------
        NotCertified
            The scores were computed without ``certify=True``.
        """
        if not self._source.certified:
            raise not_certified("interval")
        profile = self._source.profile(ridge)
        found = ranked(profile)
        bands = {name: found.means[name] for name in CERTIFIED} | {"lowest": found.lowest, "highest": found.highest}
        title = f"Certified intervals of {profile.n_rows:,} rows"
        return drawings().draw_intervals(ax, found.edges, bands, found.width, title, self._subtitle(ridge))

    def spectrum(self, *, ax: Any = None) -> Any:
        """Eigenvalues of the sketch, with n·λ and the effective dimension at every ridge."""
        spectrum, summary = self._source.spectrum(), self._source.summary
        ridges = np.atleast_1d(summary["parameters"]["ridge"])
        labels = [
            f"nλ at λ = {ridge:g}: effective dimension {interval(ends)}"
            for ridge, ends in zip(ridges, self._source.dimension_ends, strict=True)
        ]
        return drawings().draw_spectrum(
            ax, spectrum["ranks"], spectrum["eigenvalues"], labels, summary["n_rows"] * ridges,
            np.atleast_1d(summary["sketch_dimension"]), f"Spectrum of the sketch, rank {summary['rank']:,}",
        )  # fmt: skip

    def path(self, *, ridges: Sequence[float] | None = None, ax: Any = None) -> Any:
        """Effective dimension against the ridge, with its interval where it is certified.

        Parameters
        ----------
        ridges
            Where to compute it; by default from a hundredth of the smallest that was scored, or what can be resolved,
            to a hundred times the largest.
        ax
            Axes to draw on; new ones by default.

        Raises
        ------
        InvalidParameter
            Fewer than two ridges, of which there is no path.
        """
        path = self._source.dimension_path(ridges)
        if len(path["ridges"]) < 2:
            raise InvalidParameter(f"a path needs two ridges or more, got {path['ridges']}. Give more, or none at all.")
        summary = self._source.summary
        scored = {float(one): self._dimensions(one) for one in np.atleast_1d(summary["parameters"]["ridge"])}
        title = f"Effective dimension of {summary['n_rows']:,} rows"
        return drawings().draw_path(ax, *(path[name] for name in PATH), scored, title)

    def _dimensions(self, ridge: float | None) -> tuple[float, tuple[float, float | None]]:
        """Effective dimension of the sketch at a ridge, and what that of the data is between."""
        column = self._source.column(ridge)
        dimension = float(np.atleast_1d(self._source.summary["sketch_dimension"])[column])
        return dimension, self._source.dimension_ends[column]

    def _subtitle(self, ridge: float | None) -> str:
        column = self._source.column(ridge)
        shown = float(np.atleast_1d(self._source.summary["parameters"]["ridge"])[column])
        certainly = "certainly " if self._source.certified else ""
        return f"ridge λ = {shown:g}, effective dimension {certainly}{interval(self._dimensions(ridge)[1])}"
