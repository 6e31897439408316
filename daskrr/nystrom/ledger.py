"""What the audits of one job spend of the failure probability that was asked for."""

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Ledger:
    """The audits that a job has made by now, over all its rounds and updates, and what the next one may spend.

    An audit bounds ‖K − L‖ by rows drawn at random, and is wrong with at most the probability that it may spend, its
    *share*. Who looks at audits to decide which landmarks, which round or which update to publish has as many chances
    to be deceived as there are audits. So a job whose audits *choose*, which is one with a tolerance, numbers them from
    its first round to its last update: audit k = 0, 1, 2, … draws its rows from stream k and has the share
    ρ/((k + 1)(k + 2)) of the probability ρ that was asked for.

    *The shares add up to no more than ρ.* What audit k looks at (landmarks, rows, whether there is such an audit at
    all) is decided by audits before it and by what knows of no audit, hence independently of stream k. Given all that,
    its bound fails with at most its share. Every generation that is published rests on one of the audits, so that some
    generation is wrong only if some audit is: with a probability of at most Σ_{k<m} ρ/((k + 1)(k + 2)) = ρ·m/(m + 1)
    after m audits, below ρ however long the job lives. What is stated of one generation thus holds for all at once.

    The ledger is committed with the scores. An audit that was made and not committed, since the job was killed or has
    failed, is made again under its number: the same rows, and the same outcome, hence no further chance. No number ever
    means two audits: that of landmarks that are kept and that of the first ones drawn anew have one each, whichever
    of them takes place.

    Audits of a job without a tolerance choose nothing: landmarks are kept or drawn anew by the trace of the residuals
    alone, and by streams of their own. Each generation rests on its one audit, which may spend all of ρ; that the next
    does so too makes neither of them less certain. The same holds for audits that choose landmarks and are not what
    a certificate rests on, where the one that is draws from a fresh stream: the first round of ``sampling="leverage"``,
    and the rounds of a regression with a tolerance. With ρ = 0 there are no audits.

    Attributes
    ----------
    asked
        ρ: with at most this probability some interval that the job publishes misses its exact score.
    chooses
        Whether outcomes of audits decide what is published, which parameters alone say.
    audits
        How many numbers were given to audits; also that of the next one.

    Examples
    --------
    >>> ledger = Ledger(asked=1e-6, chooses=True)
    >>> [f"{one.share:.3g}" for one in (ledger, ledger.after_audit())]
    ['5e-07', '1.67e-07']
    """

    asked: float
    chooses: bool
    audits: int = 0

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Ledger":
        """What :meth:`to_record` made."""
        return cls(asked=record["asked"], chooses=record["chooses"], audits=record["audits"])

    def to_record(self) -> dict[str, Any]:
        """Ready for JSON, and what was spent besides."""
        return asdict(self) | {"spent": self.spent}

    @property
    def share(self) -> float:
        """With what probability the next audit may fail."""
        return self.asked / ((self.audits + 1) * (self.audits + 2)) if self.chooses else self.asked

    @property
    def stream(self) -> int:
        """The stream of random numbers that the next audit draws its rows from."""
        return self.audits if self.chooses else 0

    @property
    def spent(self) -> float:
        """What the last generation can fail with: of all audits where they choose, else of its own."""
        if not self.audits:
            return 0.0
        return self.asked * self.audits / (self.audits + 1) if self.chooses else self.asked

    def after_audit(self) -> "Ledger":
        """The ledger with one audit more."""
        return replace(self, audits=self.audits + 1)
