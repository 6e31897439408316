"""What is known of an output: its published scores, whether they are as they were written, and how far its job is."""

import os
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import zarr
from dask.delayed import Delayed
from numpy.typing import NDArray

from daskrr.aggregates import Profile, added, stored_profile
from daskrr.engine.addresses import redact
from daskrr.engine.feed import reporter
from daskrr.engine.lease import describe
from daskrr.engine.passes import Run, executor, split, superblocks, task
from daskrr.engine.places import read_key
from daskrr.engine.progress import Reporter
from daskrr.engine.rows import open_rows
from daskrr.engine.storage import RESULT_KEY, checksum, column_of
from daskrr.errors import InvalidData, InvalidParameter
from daskrr.jobstore import JobStore, open_published
from daskrr.pictures import ScorePictures
from daskrr.top import CERTIFIED

RECORDED_BY = "the store was written by an earlier version of daskrr and"


def verify(path: str | os.PathLike) -> list[str]:
    """Read all that is published again; what does not agree with the checksums that were taken when it was written.

    Raises
    ------
    InvalidData
        Nothing is published there.
    """
    store = JobStore(path)
    committed = store.committed
    if committed is None:
        raise InvalidData(f"{store} has no commit record: there are no finished scores to verify.")
    found = [
        f"{key}: is not what was written"
        for key, digest in committed["files"].items()
        if zlib.crc32(read_key(store.place.store, key) or b"") != digest
    ]
    for name, digests in committed["digests"].items():
        found += _damage(store, name, digests, committed)
    return found


def _damage(store: JobStore, name: str, digests: Any, committed: dict[str, Any]) -> list[str]:
    try:
        array: Any = zarr.open_array(store.place.store, path=name, mode="r")
        shape = array.shape
    except Exception as error:  # stores and metadata raise errors of many kinds
        return [f"{name}: cannot be opened, {type(error).__name__}: {redact(str(error))}"]
    n_rows = committed["parameters"]["input"]["shape"][0]
    if shape[0] != n_rows:
        return [f"{name}: has {shape[0]} rows where {n_rows} were written"]
    found = []
    for block, digest in zip(split(n_rows, committed["block_rows"]), digests, strict=True):
        try:
            found_now = checksum(array[block.start : block.stop])
        except Exception as error:
            found.append(f"{name}: rows {block.start}–{block.stop - 1} cannot be read, {type(error).__name__}: {error}")
            continue
        if found_now != int(digest):
            found.append(f"{name}: rows {block.start}–{block.stop - 1} are not those that were written")
    return found


class ScoreStore:
    """Published scores, or those of an unfinished job; made by :func:`daskrr.open_scores`.

    Attributes
    ----------
    summary
        Parameters, versions and figures of the run; of an unfinished job only its parameters.
    complete
        (n,) which rows are there, with ``allow_partial``; else None.
    """

    def __init__(
        self, arrays: Mapping[str, zarr.Array], summary: dict[str, Any], complete: NDArray[np.bool_] | None
    ) -> None:
        self._arrays, self.summary, self.complete = arrays, summary, complete
        self._profiles: dict[int, Profile] = {}

    def __getitem__(self, name: str) -> zarr.Array:
        """One of ``scores``, ``estimate``, ``residual``, and of ``lower`` and ``upper`` where they are certified."""
        return self._arrays[name]

    def keys(self) -> list[str]:
        """What there is."""
        return sorted(self._arrays)

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
            name, scores = uuid.uuid4().hex, self._arrays["scores"]
            with reporter(progress) as report:
                blocks = split(scores.shape[0], scores.chunks[0])
                run = Run(name, open_rows(scores, ndim=None), blocks, executor(name), report)
                self._profiles[column] = run.total("reading scores", self._profile_tasks(run, column), added)
        return self._profiles[column]

    def _profile_tasks(self, run: Run, column: int) -> Iterator[Delayed]:
        arrays = {name: open_rows(array, ndim=None, name=name) for name, array in self._arrays.items()}
        work = partial(stored_profile, column, list(arrays))
        for block in run.blocks:
            sources = [rows.source(block.start, block.stop) for rows in arrays.values()]
            yield task("profile-rows", run.name, block.index, work, block.start, *sources)

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


def open_scores(path: str | os.PathLike, allow_partial: bool = False) -> ScoreStore:
    """Open the scores of an output for reading.

    Parameters
    ----------
    allow_partial
        Whether the rows that an unfinished job has scored will do, where nothing is published; those that it has not
        are NaN, and ``complete`` tells which are there.

    Raises
    ------
    InvalidData
        Nothing is published there.

    Examples
    --------
    >>> import numpy as np, daskrr, tempfile
    >>> X = np.random.default_rng(0).standard_normal((500, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = daskrr.score_to_zarr(X, f"{folder}/scores.zarr", daskrr.kernels.Linear(), 1e-2, 50)
    ...     daskrr.open_scores(f"{folder}/scores.zarr")["scores"].shape
    (500,)
    """
    store = JobStore(path)
    if allow_partial and store.committed is None and store.unfinished:
        return _open_unfinished(store, store.unfinished[-1])
    group = open_published(path)
    about: Any = group.attrs[RESULT_KEY]
    # By their names: a list of what is there is not taken at one moment, and others may take their place meanwhile.
    arrays: Any = {name: group[name] for name in (*CERTIFIED, "residual") if name in group}
    return ScoreStore(arrays, dict(about), np.ones(about["n_rows"], bool) if allow_partial else None)


def _open_unfinished(store: JobStore, generation: str) -> ScoreStore:
    begun, journal = store.job(generation), store.journal(generation)
    done = journal.done("receipts")
    if not done:
        raise InvalidData(f"the unfinished job of {store} has scored no rows yet.")
    parameters, height = begun["parameters"], begun["block_rows"]
    n_rows = parameters["input"]["shape"][0]
    complete = np.zeros(n_rows, bool)
    for start in done:
        complete[start : start + height] = True
    columns = () if parameters["single"] else (len(parameters["ridges"]),)
    names = journal.read("receipts", min(done))["digests"]
    shapes = {name: (n_rows,) if name == "residual" else (n_rows, *columns) for name in names}
    return ScoreStore(store.staged(generation, shapes, height, read_only=True).arrays, begun, complete)


def status(path: str | os.PathLike) -> dict[str, Any]:
    """Where the jobs of an output stand: what is published, what is under way, and who holds the lease."""
    store = JobStore(path)
    committed = store.committed
    found: dict[str, Any] = {
        "output": str(store),
        "published": None if committed is None else {
            "generation": committed["generation"],
            "rows": committed["parameters"]["input"]["shape"][0],
        },
        "lease": describe(store.records),
        "unfinished": [],
    }  # fmt: skip
    for generation in store.unfinished:
        begun = store.job(generation)
        n_rows = begun["parameters"]["input"]["shape"][0]
        blocks = split(n_rows, begun["block_rows"])
        journal = store.journal(generation)
        found["unfinished"].append({
            "generation": generation,
            "rows": n_rows,
            "superblocks": len(superblocks(blocks)),
            "summed": {label: len(journal.done(f"{label}/sums")) for label in journal.labels()},
            "blocks": len(blocks),
            "scored": len(journal.done("receipts")),
            "progress": store.records.read(f"{generation}/progress"),
            "error": (store.records.read(f"{generation}/error") or {}).get("text"),
        })  # fmt: skip
    return found
