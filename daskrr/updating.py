"""Rows were appended: scores of all rows, with pass 1 over the new ones alone as long as the landmarks cover them."""

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from daskrr.arguments import Job, Options, Target, prepare
from daskrr.engine.feed import reporter
from daskrr.engine.lease import Lease
from daskrr.engine.passes import split, superblocks
from daskrr.engine.progress import Reporter
from daskrr.engine.rows import Rows, open_rows
from daskrr.errors import InvalidData, InvalidParameter, SourceChanged
from daskrr.fitting import Pace, versions
from daskrr.growth import verdict
from daskrr.identity import described_input, is_same
from daskrr.jobs import Work, at_work, begin, summary_of, unfinished, unpacked
from daskrr.jobstore import JobStore
from daskrr.kernels import from_spec
from daskrr.ledger import Ledger
from daskrr.leverage import score_job
from daskrr.numerics import histogram
from daskrr.nystrom.certificates import Certificate
from daskrr.nystrom.sums import Earlier
from daskrr.result import LEVELS, LeverageResult

log = logging.getLogger("daskrr")

REFRESH = ("auto", "always", "never")
# Landmarks are drawn anew when they leave so many times as much of the effective dimension open as they did, and more
# than this share of it.
WORSE = 1.25
NEGLIGIBLE = 0.01


def update_scores(
    X: Any,
    output: str | os.PathLike,
    *,
    refresh: str = "auto",
    wait: bool = False,
    allow_functions: Collection[str] = (),
    progress: Reporter | bool | None = None,
) -> dict[str, Any]:
    """Score the rows of X, of which the first are those that ``output`` has scores of, and replace these as a whole.

    Parameters are those of the published scores, and so is the kernel, with a length scale that was measured. With the
    landmarks as they were, pass 1 runs over the new rows alone (and at most one block of old ones), and the bits are
    those of a run over all rows with the same landmarks; pass 2 runs over all rows, since every score depends on all of
    them, and finds out if an old one has changed. With a tolerance, intervals rest on audit rows drawn anew among all
    rows, and the failure probability is that of all updates together (:class:`daskrr.ledger.Ledger`). It survives being
    killed as :func:`daskrr.score_to_zarr` does. Returns the summary that is stored with the result, with what
    has changed under ``"update"``.

    Parameters
    ----------
    refresh
        Whether landmarks are drawn anew: ``"auto"`` if they leave much more unexplained than before or no longer meet a
        tolerance that they met when they were drawn, or ``"always"``, or ``"never"``.
    wait
        Wait for another job that holds the output, instead of failing.
    allow_functions
        Names ``"package.module:function"`` that the stored kernel may import.

    Raises
    ------
    InvalidData
        Nothing is published, or the rows have another number of features or another dtype.
    SourceChanged
        Rows that were scored have changed or are gone.
    LeaseHeld
        Another job is at work there.

    Examples
    --------
    >>> import numpy as np, daskrr, tempfile
    >>> X = np.random.default_rng(0).standard_normal((600, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = daskrr.score_to_zarr(X[:500], f"{folder}/scores.zarr", daskrr.kernels.Linear(), 1e-2, 50)
    ...     daskrr.update_scores(X, f"{folder}/scores.zarr")["update"]["rows_added"]
    100
    """
    if refresh not in REFRESH:
        raise InvalidParameter(f"refresh must be one of {', '.join(REFRESH)}, got {refresh!r}")
    store = JobStore(output)
    rows = _opened(X, store)
    update = Update.of(store, rows, allow_functions)
    if update.is_done:
        return summary_of(store, update.known)
    with at_work(store, wait) as lease, reporter(progress) as report:
        update = Update.of(store, rows, allow_functions)
        if update.is_done:
            return summary_of(store, update.known)
        return update.run(lease, report, refresh)


def up_to_date(X: Any, output: str | os.PathLike) -> dict[str, Any] | None:
    """The summary of the published scores, if they are of all rows; runs nothing.

    Raises
    ------
    InvalidData, SourceChanged
        As :func:`update_scores`.
    """
    store = JobStore(output)
    update = Update.of(store, _opened(X, store), ())
    return summary_of(store, update.known) if update.is_done else None


def _opened(X: Any, store: JobStore) -> Rows:
    return open_rows(X, missing_chunks=_committed(store)["parameters"]["options"]["missing_chunks"])


def _committed(store: JobStore) -> dict[str, Any]:
    found = store.committed
    if found is None:
        raise InvalidData(f"{store} has no finished scores to update. Score it first (daskrr score).")
    if found["parameters"].get("options", {}).get("sample_weight") is not None:
        raise InvalidData(
            f"{store} has scores of weighted rows, whose sums depend on all weights. Score all rows again with "
            "--overwrite."
        )
    if "sketch" in found["parameters"]:
        raise InvalidData(f"{store} has scores of new rows by a sketch. Apply that again instead (daskrr apply).")
    return found


@dataclass(frozen=True)
class Coverage:
    """How well landmarks cover rows: what they leave of the trace, of all rows and of those that are new."""

    open_share: float
    before: float
    new_rows: float

    @property
    def is_worse(self) -> bool:
        """Whether they leave much more of the effective dimension open than they did."""
        return self.open_share > max(WORSE * self.before, NEGLIGIBLE)


@dataclass(frozen=True)
class Update:
    """Published scores, and the rows that they are to be brought up to."""

    store: JobStore
    rows: Rows
    known: dict[str, Any]
    wanted: dict[str, Any]
    functions: Collection[str]

    @classmethod
    def of(cls, store: JobStore, rows: Rows, functions: Collection[str]) -> "Update":
        """Look at what is published, and refuse rows that do not continue it."""
        known = _committed(store)
        update = cls(store, rows, known, known["parameters"] | {"input": described_input(rows)}, functions)
        update.check()
        return update

    def check(self) -> None:
        """Refuse rows that do not continue those that were scored."""
        before, now = self.known["parameters"]["input"], self.wanted["input"]
        if (before["shape"][1], before["dtype"]) != (now["shape"][1], now["dtype"]):
            raise InvalidData(
                f"{self.store} has scores of {before['shape'][1]} features of dtype {before['dtype']}; "
                f"{now['origin']} has {now['shape'][1]} of dtype {now['dtype']}. Score it to another output."
            )
        if now["shape"][0] < before["shape"][0]:
            raise SourceChanged(
                f"{self.store} has scores of {before['shape'][0]} rows, and {now['origin']} has only "
                f"{now['shape'][0]}. Score it anew with --overwrite if that is meant."
            )
        if now["shape"][0] == before["shape"][0] and not self.is_done:
            raise SourceChanged(
                f"{now['origin']} has as many rows as were scored, but has changed since, or cannot be told from one "
                "that has. Score it anew with --overwrite."
            )

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to do."""
        return is_same(self.known["parameters"], self.wanted)

    @property
    def n_before(self) -> int:
        """Rows that have been scored."""
        return self.known["parameters"]["input"]["shape"][0]

    @cached_property
    def base(self) -> dict[str, Any] | None:
        """What the published run has left to go on from."""
        return self.store.journal(self.known["generation"]).read_one("base")

    def run(self, lease: Lease, report: Reporter, refresh: str) -> dict[str, Any]:
        """Keep the landmarks if they will do, or draw new ones."""
        reason = self._why_not_kept(refresh)
        coverage = None
        if not reason:
            found = self._keep(lease, report, refresh == "auto")
            if isinstance(found, dict):
                return found
            reason, coverage = found
        log.info("landmarks are drawn anew: %s", reason)
        return self._refresh(lease, report, reason, coverage)

    def _why_not_kept(self, refresh: str) -> str:
        if refresh == "always":
            return "asked for"
        if unfinished(self.store, self.wanted, "refresh"):
            return "an update that was stopped had begun to"
        if self.base is None or self.wanted["options"]["sketch_ridge"]:
            return "the published run has left nothing to go on from"
        return ""

    def _options(self) -> Options:
        return Options(**self.wanted["options"] | {"random_state": self.known["seed"]})

    def _prepared(self, kernel: Any, n_landmarks: int | None, options: Options) -> Job:
        ridges = self.wanted["ridges"]
        return prepare(
            self.rows, from_spec(kernel, self.functions), ridges[0] if self.wanted["single"] else ridges, n_landmarks,
            options,
        )  # fmt: skip

    @cached_property
    def ledger(self) -> Ledger:
        """What the published scores and all before them have spent."""
        return Ledger.from_record(self.known["ledger"])

    def _original(self) -> Job:
        """The job as it was asked for, over all rows, with the kernel as it was found to be."""
        if not isinstance(self.wanted["options"]["sampling"], str):
            raise InvalidParameter(
                f"{self.store} was scored with landmarks or probabilities that were given, so that new ones cannot be "
                "drawn. Keep them with refresh='never' (--refresh never), or score anew with --overwrite."
            )
        return self._prepared(self._kernel, self.wanted["n_landmarks"], self._options())

    @property
    def _kernel(self) -> Any:
        """With every parameter resolved: scores with another length scale are no update of these."""
        return self.known["summary"]["parameters"]["kernel"]

    def _kept_job(self, base: dict[str, Any]) -> Job:
        """The job with the landmarks as they were."""
        options = self._options()
        given = replace(
            options, sampling=base["indices"], tolerance=None, absolute_tolerance=None, max_landmarks=None,
            certify=options.certify or self.ledger.chooses, block_rows=self.known["block_rows"],
        )  # fmt: skip
        job = replace(self._prepared(self._kernel, None, given), ledger=self.ledger)
        return replace(job, target=self._original().target) if self.ledger.chooses else job

    def _earlier(self, job: Job, base: dict[str, Any]) -> Earlier | None:
        """What the published run has left, if this one rounds and cuts the rows as it did."""
        job.executor.check(job.rows)
        summary = self.known["summary"]
        before = (summary["versions"], summary["workers"]["processors"], self.known["block_rows"])
        if before != (versions(), job.executor.workers["processors"], job.plan.block_rows):
            log.warning(
                "library versions, processors or chunks are not those of the published run: all rows are summed again"
            )
            return None
        residual = zarr.open_array(self.store.place.store, path="residual", mode="r")
        return Earlier(
            self.store.journal(self.known["generation"]), self._pace(job, base).label, base["pivots"],
            base["superblocks"], base["blocks"], residual, self.known["digests"]["residual"],
            unpacked(self.known["checksums"]),
        )  # fmt: skip

    def _keep(self, lease: Lease, report: Reporter, may_refresh: bool) -> dict[str, Any] | tuple[str, Coverage]:
        """Publish with the landmarks as they were; or why they will not do."""
        base = self.base or {}
        job = self._kept_job(base)
        earlier = self._earlier(job, base)
        generation, seed = begin(self.store, lease, self.wanted, job, "update")
        with Work(self.store, generation, lease, self.wanted, seed, report) as work:
            result = score_job(job, work.report, work.journal, earlier, self._pace(job, base))
            coverage = self._coverage(result)
            reason = self._why_refresh(job, result, coverage, work.report) if may_refresh else ""
            if reason:
                work.forget()
                return reason, coverage
            summed = self.rows.n_rows - (0 if earlier is None else self._summed(job, earlier))
            drift = partial(self._drift, "", summed, coverage)
            return work.publish(result, self.n_before, partial(self._kept_facts, job, result, drift))

    def _pace(self, job: Job, base: dict[str, Any]) -> Pace:
        """That of the published run, with an audit of its own where audits choose."""
        return Pace(
            round=base["round"], following=0, audit_rows=base["audit_rows"], ledger=job.ledger,
            audit_apart=job.ledger.chooses,
        )  # fmt: skip

    def _summed(self, job: Job, earlier: Earlier) -> int:
        """Rows that need not be summed again."""
        group = superblocks(split(self.rows.n_rows, job.plan.block_rows))[earlier.superblocks]
        return group.blocks[earlier.blocks].start

    def _coverage(self, result: LeverageResult) -> Coverage:
        before, now = self.known["summary"], result.summary
        residual, trace = now["residual_sum"] - before["residual_sum"], now["trace"] - before["trace"]
        return Coverage(_open_share(now), _open_share(before), max(residual, 0.0) / trace if trace > 0 else 0.0)

    def _why_refresh(self, job: Job, result: LeverageResult, coverage: Coverage, report: Reporter) -> str:
        if coverage.is_worse:
            return (
                f"the landmarks leave up to {coverage.open_share:.2g} times the effective dimension unexplained, "
                f"{coverage.before:.2g} before"
            )
        if job.target is None:
            return ""
        found = self._verdict(job, job.target, result.measure(report), result)
        if found["met"] or not found["met_when_drawn"]:
            return ""
        return f"with the landmarks as they were {found['misses']:,} rows would be wider than the tolerance allows"

    def _verdict(self, job: Job, target: Target, certificate: Certificate, result: LeverageResult) -> dict[str, Any]:
        met_when_drawn = self.known["summary"]["tolerance"]["met_when_drawn"]
        return verdict(target, job.settings, certificate, result.summary["distinct_landmarks"], met_when_drawn)

    def _kept_facts(
        self, job: Job, result: LeverageResult, drift: Callable[..., Any], summary: dict[str, Any], counts: Any
    ) -> dict[str, Any]:
        """What is told of landmarks that were kept: what has changed, and whether the tolerance is met."""
        facts = {"update": drift(summary, counts)}
        if job.target is None:
            return facts
        found = self._verdict(job, job.target, result.certificate, result)
        if not found["met"]:
            log.warning(found["text"])
        return facts | {"tolerance": found}

    def _refresh(self, lease: Lease, report: Reporter, reason: str, coverage: Coverage | None) -> dict[str, Any]:
        """Run the job anew over all rows."""
        # The next number belongs to the audit of the landmarks as they were, whether it took place or not.
        ledger = self.ledger.after_audit() if self.ledger.chooses else self.ledger
        job = replace(self._original(), ledger=ledger)
        generation, seed = begin(self.store, lease, self.wanted, job, "refresh")
        drift = partial(self._drift, reason, self.rows.n_rows, coverage)
        with Work(self.store, generation, lease, self.wanted, seed, report) as work:
            result = score_job(job, work.report, work.journal)
            return work.publish(result, self.n_before, lambda summary, counts: {"update": drift(summary, counts)})

    def _drift(
        self, reason: str, summed: int, coverage: Coverage | None, summary: dict[str, Any], counts: NDArray[np.int64]
    ) -> dict[str, Any]:
        """What has changed: the effective dimension, what landmarks leave open, and quantiles of the scores."""
        before = self.known["summary"]
        return {
            "rows_before": self.n_before,
            "rows_added": self.rows.n_rows - self.n_before,
            "rows_summed": summed,
            "refreshed": bool(reason),
            "reason": reason or "the landmarks cover the new rows",
            "effective_dimension": [before["effective_dimension"], summary["effective_dimension"]],
            "residual_share": {
                "before": before["residual_sum"] / before["trace"] if before["trace"] else 0.0,
                "new_rows": None if coverage is None else coverage.new_rows,
            },
            "quantiles": {
                "levels": list(LEVELS),
                "before": histogram.quantiles(self.known["counts"], LEVELS),
                "new_rows": histogram.quantiles(counts[1], LEVELS),
                "all": histogram.quantiles(counts.sum(axis=0), LEVELS),
            },
        }


def _open_share(summary: dict[str, Any]) -> float:
    """What the landmarks leave open of the trace over nλ, a bound on what the scores lack in sum, over their sum."""
    ridges = np.atleast_1d(summary["parameters"]["ridge"])
    decides = int(ridges.argmin())
    dimension = float(np.atleast_1d(summary["sketch_dimension"])[decides])
    lacking = summary["residual_sum"] / (summary["n_rows"] * float(ridges[decides]))
    return lacking / dimension if dimension else 0.0
