"""Rows were appended: scores of all rows, with pass 1 over the new ones alone as long as the landmarks cover them."""

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskrr.errors import InvalidData, InvalidParameter, SourceChanged
from daskrr.jobs.fingerprint import described_input, is_same, options_of
from daskrr.jobs.job import (
    ActiveJob,
    base_records,
    begin,
    check_keep,
    healed,
    put_right,
    summary_of,
    unfinished,
    unpacked,
)
from daskrr.kernels import from_spec
from daskrr.leverage.algorithm import Round, compute
from daskrr.leverage.problem import Problem, state_problem
from daskrr.leverage.result import LeverageResult
from daskrr.leverage.summary import verdict, versions
from daskrr.leverage.writing import LEVELS
from daskrr.numerics import histogram
from daskrr.nystrom.certificate import Certificate
from daskrr.nystrom.checkpoints import Earlier
from daskrr.nystrom.ledger import Ledger
from daskrr.nystrom.sampling import BY_NAME
from daskrr.nystrom.strategies import Tolerance
from daskrr.runtime.progress import Reporter
from daskrr.runtime.rows import Rows, open_rows
from daskrr.runtime.telemetry import reporter
from daskrr.storage.output import Output
from daskrr.storage.writing import HeldOutput, hold

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
    keep: int = 1,
    allow_functions: Collection[str] = (),
    progress: Reporter | bool | None = None,
) -> dict[str, Any]:
    """Score the rows of X, of which the first are those that ``output`` has scores of, and replace these as a whole.

    Parameters are those of the published scores, and so is the kernel, with a length scale that was measured. With the
    landmarks as they were, pass 1 runs over the new rows alone (and at most one block of old ones), and the bits are
    those of a run over all rows with the same landmarks; pass 2 runs over all rows, since every score depends on all of
    them, and finds out if an old one has changed. With a tolerance, intervals rest on audit rows drawn anew among all
    rows, and the failure probability is that of all updates together (:class:`daskrr.nystrom.ledger.Ledger`).
    It survives being killed as :func:`daskrr.score_to_zarr` does. Returns the summary that is stored with the result,
    with what has changed under ``"update"``.

    Parameters
    ----------
    refresh
        Whether landmarks are drawn anew: ``"auto"`` if they leave much more unexplained than before or no longer meet a
        tolerance that they met when they were drawn, or ``"always"``, or ``"never"``.
    wait
        Wait for another job that holds the output, instead of failing.
    keep
        How many generations from before stay with the published one, as in :func:`daskrr.score_to_zarr`.
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
    check_keep(keep)
    store = Output(output)
    rows = _opened(X, store)
    update = Update.of(store, rows, allow_functions)
    if update.is_done:
        put_right(store)
        return summary_of(store, update.known)
    with hold(store.target, wait) as held, reporter(progress) as report:
        update = Update.of(held, rows, allow_functions)
        if update.is_done:
            return summary_of(held, update.known)
        return healed(held, partial(update.run, held, report, refresh, keep))


def up_to_date(X: Any, output: str | os.PathLike) -> dict[str, Any] | None:
    """The summary of the published scores, if they are of all rows; runs nothing.

    Raises
    ------
    InvalidData, SourceChanged
        As :func:`update_scores`.
    """
    store = Output(output)
    update = Update.of(store, _opened(X, store), ())
    if not update.is_done:
        return None
    put_right(store)
    return summary_of(store, update.known)


def _opened(X: Any, store: Output) -> Rows:
    return open_rows(X, missing_chunks=_committed(store)["parameters"]["options"]["missing_chunks"])


def _committed(store: Output) -> dict[str, Any]:
    committed = store.committed
    if committed is None or committed["kind"] != "scores":
        raise InvalidData(f"{store} has no finished scores to update. Score it first (daskrr score).")
    if "parameters" not in committed:
        raise InvalidData(f"{store} has scores of a result in memory, which no job made. Score it with --overwrite.")
    if committed["parameters"].get("options", {}).get("sample_weight") is not None:
        raise InvalidData(
            f"{store} has scores of weighted rows, whose sums depend on all weights. Score all rows again with "
            "--overwrite."
        )
    if "sketch" in committed["parameters"]:
        raise InvalidData(f"{store} has scores of new rows by a sketch. Apply that again instead (daskrr apply).")
    return committed


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

    store: Output
    rows: Rows
    known: dict[str, Any]
    wanted: dict[str, Any]
    functions: Collection[str]

    @classmethod
    def of(cls, store: Output, rows: Rows, functions: Collection[str]) -> "Update":
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

    @property
    def base(self) -> dict[str, Any] | None:
        """What the published run has left to go on from."""
        return self.known["base"]

    def run(self, held: HeldOutput, report: Reporter, refresh: str, keep: int) -> dict[str, Any]:
        """Keep the landmarks if they will do, or draw new ones."""
        reason = self._why_not_kept(refresh)
        coverage = None
        if not reason:
            found = self._keep(held, report, refresh == "auto", keep)
            if isinstance(found, dict):
                return found
            reason, coverage = found
        log.info("landmarks are drawn anew: %s", reason)
        return self._refresh(held, report, reason, coverage, keep)

    def _why_not_kept(self, refresh: str) -> str:
        if refresh == "always":
            return "asked for"
        if unfinished(self.store, self.wanted, "refresh", None):
            return "an update that was stopped had begun to"
        if self.base is None or self.wanted["options"]["sampling"].get("sketch_ridge"):
            return "the published run has left nothing to go on from"
        return ""

    def _stated(self, **changes: Any) -> Problem:
        """The problem of the published run over all rows, with the kernel as it was found to be, but for changes."""
        ridges = self.wanted["ridges"]
        options = options_of(self.wanted) | {"random_state": self.known["seed"]} | changes
        kernel = from_spec(self._kernel, self.functions)
        return state_problem(self.rows, kernel, ridges[0] if self.wanted["single"] else ridges, **options)

    @cached_property
    def ledger(self) -> Ledger:
        """What the published scores and all before them have spent."""
        commit = self.store.commit
        spent = None if commit is None else commit.ledger
        return Ledger.from_record(spent or self.known["ledger"])

    def _original(self) -> Problem:
        """The problem as it was asked for, over all rows."""
        if self.wanted["options"]["sampling"]["strategy"] not in BY_NAME:
            raise InvalidParameter(
                f"{self.store} was scored with landmarks or probabilities that were given, so that new ones cannot be "
                "drawn. Keep them with refresh='never' (--refresh never), or score anew with --overwrite."
            )
        return self._stated()

    @property
    def _kernel(self) -> Any:
        """With every parameter resolved: scores with another length scale are no update of these."""
        return self.known["summary"]["parameters"]["kernel"]

    def _with_landmarks(self, base: dict[str, Any]) -> Problem:
        """The problem with the landmarks as they were."""
        given = self._stated(sampling=base["indices"], landmarks=None, block_rows=self.known["block_rows"])
        landmarks = self._original().landmarks if self.ledger.chooses else None
        return replace(given, ledger=self.ledger, landmarks=landmarks)

    def _earlier(self, problem: Problem, base: dict[str, Any]) -> Earlier | None:
        """What the published run has left, if this one rounds and cuts the rows as it did."""
        problem.executor.check(problem.rows)
        summary = self.known["summary"]
        before = (summary["versions"], summary["workers"]["processors"], self.known["block_rows"])
        if before != (versions(), problem.executor.workers["processors"], problem.plan.block_rows):
            log.warning(
                "library versions, processors or chunks are not those of the published run: all rows are summed again"
            )
            return None
        journal = self.store.journal(self.known["generation"])
        if self.known["base_records"] is None or self.known["base_records"] != base_records(journal):
            log.warning("sums that the published run has left are damaged or gone: all rows are summed again")
            return None
        residual: Any = self.store.open("scores")[0]["residual"]
        return Earlier(
            journal=journal,
            record=next(iter(self.known["base_records"]), ""),
            label=self._round(problem, base).label,
            pivots=base["pivots"],
            n_blocks=base["blocks"],
            residual=residual,
            digests=self.known["digests"]["residual"],
            checksums=unpacked(self.known["checksums"]),
        )

    def _keep(
        self, held: HeldOutput, report: Reporter, may_refresh: bool, keep: int
    ) -> dict[str, Any] | tuple[str, Coverage]:
        """Publish with the landmarks as they were; or why they will not do."""
        base = self.base or {}
        problem = self._with_landmarks(base)
        earlier = self._earlier(problem, base)
        generation, seed = begin(held, self.wanted, problem, "update")
        with ActiveJob(held, generation, self.wanted, seed, report, keep) as active:
            result = compute(problem, active.report, active.journal, earlier, self._round(problem, base))
            coverage = self._coverage(result)
            reason = self._why_refresh(problem, result, coverage, active.report) if may_refresh else ""
            if reason:
                active.forget()
                return reason, coverage
            summed = self.rows.n_rows - (0 if earlier is None else earlier.n_blocks * problem.plan.block_rows)
            drift = partial(self._drift, "", summed, coverage)
            return active.publish(result, self.n_before, partial(self._kept_facts, problem, result, drift))

    def _round(self, problem: Problem, base: dict[str, Any]) -> Round:
        """That of the published run, with an audit of its own where audits choose."""
        return Round(
            number=base["round"],
            audit_rows=base["audit_rows"],
            ledger=problem.ledger,
            audit_apart=problem.ledger.chooses,
        )

    def _coverage(self, result: LeverageResult) -> Coverage:
        before, now = self.known["summary"], result.summary
        residual, trace = now["residual_sum"] - before["residual_sum"], now["trace"] - before["trace"]
        return Coverage(_open_share(now), _open_share(before), max(residual, 0.0) / trace if trace > 0 else 0.0)

    def _why_refresh(self, problem: Problem, result: LeverageResult, coverage: Coverage, report: Reporter) -> str:
        if coverage.is_worse:
            return (
                f"the landmarks leave up to {coverage.open_share:.2g} times the effective dimension unexplained, "
                f"{coverage.before:.2g} before"
            )
        if problem.tolerance is None:
            return ""
        found = self._verdict(problem, problem.tolerance, result.measure(report), result)
        if found["met"] or not found["met_when_drawn"]:
            return ""
        return f"with the landmarks as they were {found['misses']:,} rows would be wider than the tolerance allows"

    def _verdict(
        self, problem: Problem, tolerance: Tolerance, certificate: Certificate, result: LeverageResult
    ) -> dict[str, Any]:
        met_when_drawn = self.known["summary"]["tolerance"]["met_when_drawn"]
        return verdict(tolerance, problem.settings, certificate, result.summary["distinct_landmarks"], met_when_drawn)

    def _kept_facts(
        self, problem: Problem, result: LeverageResult, drift: Callable[..., Any], summary: dict[str, Any], counts: Any
    ) -> dict[str, Any]:
        """What is told of landmarks that were kept: what has changed, and whether the tolerance is met."""
        facts = {"update": drift(summary, counts)}
        if problem.tolerance is None:
            return facts
        found = self._verdict(problem, problem.tolerance, result.certificate, result)
        if not found["met"]:
            log.warning(found["text"])
        return facts | {"tolerance": found}

    def _refresh(
        self, held: HeldOutput, report: Reporter, reason: str, coverage: Coverage | None, keep: int
    ) -> dict[str, Any]:
        """Run the job anew over all rows."""
        # The next number belongs to the audit of the landmarks as they were, whether it took place or not.
        ledger = self.ledger.after_audit() if self.ledger.chooses else self.ledger
        problem = replace(self._original(), ledger=ledger)
        generation, seed = begin(held, self.wanted, problem, "refresh")
        drift = partial(self._drift, reason, self.rows.n_rows, coverage)
        with ActiveJob(held, generation, self.wanted, seed, report, keep) as active:
            result = compute(problem, active.report, active.journal)
            return active.publish(result, self.n_before, lambda summary, counts: {"update": drift(summary, counts)})

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
