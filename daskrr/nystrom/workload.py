"""What a run has to do at most, for the plan to count; strategies say what they add to it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """What a run has to do, at most.

    Attributes
    ----------
    n_landmarks
        Of the final passes.
    n_ridges
        How many ridges are scored.
    weighs_rows
        Whether a light pass weighs every row before landmarks are drawn.
    residual_rounds, full_rounds
        Landmarks of earlier rounds: those that need residuals alone, and those that run both passes.
    audit_rows
        Rows of the audit.
    draws
        Rows that the pass which draws most draws meanwhile, each number for a use of its own.
    n_sums
        Gram matrices that pass 1 keeps apart.
    landmark_copies
        Copies of the landmarks that the kernel makes.
    """

    n_landmarks: int
    n_ridges: int = 1
    weighs_rows: bool = False
    residual_rounds: tuple[int, ...] = ()
    full_rounds: tuple[int, ...] = ()
    audit_rows: int = 0
    draws: tuple[int, ...] = ()
    n_sums: int = 1
    landmark_copies: int = 2

    def pass_flops(self, d: int) -> float:
        """Floating-point operations of a row of d features in pass 1."""
        return 2.0 * self.n_landmarks * (self.n_landmarks + d)

    @property
    def sum_bytes(self) -> int:
        """Of the Gram matrices."""
        return 8 * self.n_landmarks**2 * self.n_sums

    def flops(self, n: int, d: int) -> float:
        """Floating-point operations of all passes over n rows of d features."""
        p = min(self.n_landmarks, n)
        last = 1.0 if self.n_ridges == 1 else 2.0
        per_row = 4.0 * p * d + (2.0 + last) * p * p
        per_row += sum(2.0 * q * d + q * q for q in self.residual_rounds)
        per_row += sum(4.0 * q * d + 3.0 * q * q for q in self.full_rounds)
        return n * per_row + 2.0 * self.audit_rows**2 * p

    @property
    def passes(self) -> int:
        """Passes that read all rows."""
        return 2 + self.weighs_rows + len(self.residual_rounds) + 2 * len(self.full_rounds)
