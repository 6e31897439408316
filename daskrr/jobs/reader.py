"""What is known of an output: its published scores, what is kept from before, and how far its job is."""

import itertools
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
import zarr
from numpy.typing import NDArray

from daskrr.errors import InvalidData, InvalidParameter
from daskrr.leverage.plotting import ScorePictures
from daskrr.leverage.profile import Profile, added, stored_profile
from daskrr.leverage.ranking import CERTIFIED, TopRows, check_top, column_of, merge_top
from daskrr.leverage.tabulated import ORDER, Tabulated
from daskrr.runtime.map_blocks import Run, map_blocks
from daskrr.runtime.progress import Reporter
from daskrr.runtime.rows import open_rows
from daskrr.runtime.telemetry import reporter
from daskrr.storage.lease import describe
from daskrr.storage.output import Output
from daskrr.storage.writing import hold

RECORDED_BY = "the store was written by an earlier version of daskrr and"


class ScoreStore(Tabulated):
    """Published scores, or those of an unfinished job; made by :func:`daskrr.open_scores`.

    Attributes
    ----------
    summary
        Parameters, versions and figures of the run; of an unfinished job only its parameters.
    source
        Where the rows that a job scored are, how many there were, and what changes if they do; None if it was no job.
    complete
        (n,) which rows are there, with ``allow_partial``; else None.
    """

    def __init__(
        self,
        arrays: Mapping[str, zarr.Array],
        summary: dict[str, Any],
        source: Mapping[str, Any] | None,
        complete: NDArray[np.bool_] | None,
    ) -> None:
        self._arrays, self.summary, self.source, self.complete = arrays, summary, source, complete
        self._profiles: dict[int, Profile] = {}

    def __getitem__(self, name: str) -> zarr.Array:
        """One of ``scores``, ``estimate``, ``residual``, and of ``lower`` and ``upper`` where they are certified."""
        return self._arrays[name]

    def keys(self) -> list[str]:
        """What there is."""
        return sorted(self._arrays)

    @property
    def lazy_arrays(self) -> dict[str, da.Array]:
        """Every quantity there is."""
        return {name: da.from_zarr(self._arrays[name]) for name in ORDER if name in self._arrays}

    @property
    def certified(self) -> bool:
        """Whether every score comes with an interval."""
        return "upper" in self._arrays

    @property
    def dimension_ends(self) -> list[tuple[float, float | None]]:
        """For every ridge, what the sum of the exact scores is between; no end above where nothing is certified."""
        return self.summary["effective_dimension"]

    @property
    def plot(self) -> ScorePictures:
        """Pictures: ``plot.scores()``, ``plot.intervals()``, ``plot.spectrum()`` and ``plot.path()``.

        Raises
        ------
        InvalidData
            The job is not finished.
        """
        self.check_whole_data()
        if self.complete is not None and not self.complete.all():
            raise InvalidData("pictures need all rows, and this job has not scored all yet. Run it again to finish it.")
        return ScorePictures(self)

    def check_whole_data(self) -> None:
        """Refuse scores of new rows, which have no effective dimension, spectrum or certificate of their own.

        Raises
        ------
        InvalidData
            They are.
        """
        if "sketch" in self.summary:
            raise InvalidData(
                "these are scores of new rows by a sketch, each for itself: they sum to nothing that a report or a "
                f"picture could show. Ask for one of the scores of {self.summary['sketch']['origin']}."
            )

    def column(self, ridge: float | None) -> int:
        """Which column belongs to a ridge; the smallest ridge by default."""
        return column_of(np.atleast_1d(self.summary["parameters"]["ridge"]).tolist(), ridge)

    def profile(self, ridge: float | None = None, progress: Reporter | bool | None = None) -> Profile:
        """How large scores and interval ends are, counted chunk by chunk where Dask computes."""
        column = self.column(ridge)
        if column not in self._profiles:
            arrays = {name: open_rows(array, ndim=None, name=name) for name, array in self._arrays.items()}
            with reporter(progress) as report:
                run = Run.over(arrays["scores"], self._arrays["scores"].chunks[0], report)
                read = map_blocks(run, "profile-rows", partial(stored_profile, column, list(arrays)), *arrays.values())
                found = read.total(added, "reading scores")
            self._profiles[column] = found.below(self.summary.get("ceiling"), column)
        return self._profiles[column]

    def spectrum(self) -> Mapping[str, Any]:
        """Eigenvalues of the sketch with their ranks, as they were recorded.

        Raises
        ------
        InvalidData
            They were not.
        """
        if "spectrum" not in self.summary:
            raise InvalidData(f"{RECORDED_BY} has no spectrum of them. Score again to have it.")
        return self.summary["spectrum"]

    def dimension_path(self, ridges: Sequence[float] | None = None) -> Mapping[str, Any]:
        """Effective dimension at the ridges that were recorded.

        Raises
        ------
        InvalidData
            None were.
        InvalidParameter
            Other ridges are asked for.
        """
        if ridges is not None:
            raise InvalidParameter(
                "a store knows the effective dimension at the ridges that were recorded with it, and no others. Leave "
                "out ridges=, or ask the result of leverage_scores."
            )
        if "path" not in self.summary:
            raise InvalidData(f"{RECORDED_BY} has no path of ridges. Score again to have it.")
        return self.summary["path"]

    def __repr__(self) -> str:
        state = "" if self.complete is None or self.complete.all() else f", {self.complete.mean():.0%} of the rows"
        return f"ScoreStore({', '.join(self.keys())}{state})"


def open_scores(path: str | os.PathLike, allow_partial: bool = False, generation: str | None = None) -> ScoreStore:
    """Open the scores of an output for reading.

    What was opened is of one generation, whatever is published meanwhile, and stays readable until that is no longer
    kept: by default until the next but one is published.

    Parameters
    ----------
    allow_partial
        Whether the rows that an unfinished job has scored will do, where nothing is published; those that it has not
        are NaN, and ``complete`` tells which are there.
    generation
        One that is kept from before, by its name (:func:`daskrr.jobs.status` lists them), instead of the current one.

    Raises
    ------
    InvalidData
        Nothing is published there, or that generation is not kept.

    Examples
    --------
    >>> import numpy as np, daskrr, tempfile
    >>> X = np.random.default_rng(0).standard_normal((500, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = daskrr.score_to_zarr(X, f"{folder}/scores.zarr", daskrr.kernels.Linear(), 1e-2, 50)
    ...     daskrr.open_scores(f"{folder}/scores.zarr")["scores"].shape
    (500,)
    """
    store = Output(path)
    commit = store.commit
    if allow_partial and (commit is None or commit.current is None) and store.unfinished:
        return _open_unfinished(store, store.unfinished[-1])
    if generation is not None and (commit is None or generation not in commit.published):
        kept = ", ".join(commit.published if commit else ()) or "none"
        raise InvalidData(f"{store} has no generation {generation}: those published and kept are {kept}.")
    group, manifest = store.open("scores", generation)
    summary = _believable(manifest, group, str(store))
    arrays: Any = {name: group[name] for name in (*CERTIFIED, "residual") if name in group}
    complete = np.ones(summary["n_rows"], bool) if allow_partial else None
    return ScoreStore(arrays, summary, _source(manifest), complete)


def _source(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a manifest tells of the input of a job."""
    parameters = manifest.get("parameters")
    found = parameters.get("input") if isinstance(parameters, dict) else None
    return found if isinstance(found, dict) and isinstance(found.get("fingerprint"), str) else None


def _believable(manifest: Mapping[str, Any], group: zarr.Group, name: str) -> dict[str, Any]:
    """The summary of published scores, if it is of the arrays beside it.

    Raises
    ------
    InvalidData
        It tells of other arrays, or of what cannot be.
    """
    summary, scores, arrays = manifest.get("summary"), group.get("scores"), dict(group.arrays())
    told = summary if isinstance(summary, dict) else {}
    ridges = np.atleast_1d(np.asarray(told.get("parameters", {}).get("ridge", 0.0), object))
    certified = told.get("certificate") is not None or "sketch" in told
    right = (
        isinstance(scores, zarr.Array)
        and told.get("n_rows") == scores.shape[0]
        and all(isinstance(one, float) and 0 < one < np.inf for one in ridges)
        and scores.shape[1:] in ((), (len(ridges),))
        and all(one in arrays and arrays[one].dtype == np.float64 for one in manifest["digests"])
        and (certified or "upper" not in manifest["digests"])
    )
    if not right:
        raise InvalidData(
            f"what {name} tells of its scores does not belong to them: a summary of {told.get('n_rows')} rows and "
            f"ridges {ridges.tolist()[:5]} with an array of shape {getattr(scores, 'shape', None)}. Nothing is read."
        )
    return told


def _open_unfinished(store: Output, generation: str) -> ScoreStore:
    begun, journal = store.job(generation), store.journal(generation)
    done = journal.done("receipts")
    if not done or begun is None:
        raise InvalidData(f"the unfinished job of {store} has scored no rows yet.")
    parameters, height = begun["parameters"], begun["block_rows"]
    n_rows = parameters["input"]["shape"][0]
    complete = np.zeros(n_rows, bool)
    for start, stop in itertools.pairwise(journal.read("spans")["bounds"]):
        complete[start:stop] = start in done
    columns = () if parameters["single"] else (len(parameters["ridges"]),)
    names = journal.read("receipts", min(done))["blocks"][0]["digests"]
    shapes = {name: (n_rows,) if name == "residual" else (n_rows, *columns) for name in names}
    arrays = store.staged(generation, shapes, height, read_only=True).arrays
    return ScoreStore(arrays, begun, _source(begun), complete)


def status(path: str | os.PathLike) -> dict[str, Any]:
    """Where the jobs of an output stand: what is published and kept, what is under way, and who holds the lease.

    Raises
    ------
    InvalidData
        daskrr has never written there.
    """
    store = Output(path)
    if not store.is_begun:
        found = "which daskrr has not written" if store.exists else "where nothing is"
        raise InvalidData(f"there is no job at {store}, {found}. Name what a job writes, such as the output of score.")
    return standing(path)


def standing(path: str | os.PathLike) -> dict[str, Any]:
    """What :func:`status` tells, also of an output where no job was begun yet."""
    store = Output(path)
    commit = store.commit
    kept = [] if commit is None else [_generation(store, name) for name in commit.published]
    return {
        "output": str(store),
        "published": kept[0] if kept else None,
        "generations": kept,
        "lease": describe(store.records),
        "unfinished": [one for one in (_progress(store, name) for name in store.unfinished) if one is not None],
    }


def _generation(store: Output, name: str) -> dict[str, Any]:
    """What is told of a generation that is published or kept."""
    manifest = store.manifest(name)
    at = datetime.fromtimestamp(manifest["at"], UTC).isoformat(sep=" ", timespec="seconds")
    return {
        "generation": name,
        "kind": manifest["kind"],
        "rows": manifest["summary"].get("n_rows"),
        "at": at,
        "bytes": store.size_of(name),
    }


def _progress(store: Output, generation: str) -> dict[str, Any] | None:
    """How far a job is; None if nobody knows what it was begun with."""
    begun = store.job(generation)
    if begun is None:
        return None
    n_rows = begun["parameters"]["input"]["shape"][0]
    journal = store.journal(generation)
    spans = journal.read_one("spans")
    tasks = None if spans is None else len(spans["bounds"]) - 1
    return {
        "generation": generation,
        "rows": n_rows,
        "tasks": tasks,
        "summed": {
            label: tasks if whole else len(journal.done(f"{label}/sums")) for label, whole in journal.labels().items()
        },
        "scored": len(journal.done("receipts")),
        "progress": store.records.find(f"{generation}/progress"),
        "error": (store.records.find(f"{generation}/error") or {}).get("text"),
    }


def rollback(path: str | os.PathLike, generation: str | None = None, wait: bool = False) -> dict[str, Any]:
    """Return to the generation that was published before, or to another one that is kept; what is published then.

    The one that is left stays until the next is published, so that this can be undone. What certificates of all of
    them have spent of their failure probability stays spent.

    Parameters
    ----------
    generation
        Its name, as :func:`daskrr.jobs.status` lists it; the last before the current one by default.
    wait
        Wait for a job that holds the output, instead of failing.

    Raises
    ------
    InvalidParameter
        It is not kept.
    InvalidData
        Nothing is published there.
    LeaseHeld
        A job is at work there.

    Examples
    --------
    >>> import numpy as np, daskrr, tempfile
    >>> X = np.random.default_rng(0).standard_normal((600, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = daskrr.score_to_zarr(X[:500], f"{folder}/scores.zarr", daskrr.kernels.Linear(), 1e-2, 50)
    ...     second = daskrr.update_scores(X, f"{folder}/scores.zarr")
    ...     daskrr.jobs.rollback(f"{folder}/scores.zarr")["rows"]
    500
    """
    store = Output(path)
    commit = store.commit
    if commit is None or commit.current is None:
        raise InvalidData(f"nothing is published at {store}, so that there is nothing to return to.")
    with hold(store.target, wait) as held:
        return _generation(held, held.rollback(generation))


def top_rows(
    path: str | os.PathLike, k: int = 10, by: str = "estimate", ridge: float | None = None
) -> list[dict[str, Any]]:
    """The k highest rows of a store of scores, read chunk by chunk; of several ridges the smallest by default.

    Raises
    ------
    InvalidData
        ``path`` holds no finished result.
    """
    store = open_scores(path)
    arrays: dict[str, Any] = {name: store[name] for name in store.keys()}  # noqa: SIM118
    check_top(k, by, store.certified)
    column = store.column(ridge)
    n_rows, height = arrays["scores"].shape[0], arrays["scores"].chunks[0]
    best: list[TopRows] = []
    for start in range(0, n_rows, height):
        parts = {name: _read(array, start, start + height, column) for name, array in arrays.items()}
        rows = np.arange(start, start + len(parts["scores"]))
        best = [merge_top([*best, TopRows(rows, **parts, by=by)], k)]
    return best[0].below(store.summary.get("ceiling"), column).to_records()


def _read(array: Any, start: int, stop: int, column: int) -> NDArray[np.float64]:
    values = np.asarray(array[start:stop])
    return values if values.ndim == 1 else values[:, column]
