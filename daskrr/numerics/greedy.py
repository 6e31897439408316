"""Which of many candidate rows to take as landmarks: those that explain most of what is left of all rows."""

import numpy as np
from numpy.typing import NDArray

from daskrr.numerics import panels

# A candidate of which no more than this share of its residual is left is explained by those taken before.
EXPLAINED = 1e-5

# How often the gains of all candidates are computed anew in the course of a choice.
UPDATES = 32


def most_explaining(E: NDArray[np.float32], weights: NDArray[np.float64], size: int) -> NDArray[np.intp]:
    """Positions of ``size`` candidates, each the one that reduces the weighted trace of the residual matrix most.

    Weights are how many rows of the data each candidate stands for. Once all candidates are explained, the others
    follow in their order.
    """
    choice = _Choice(E, weights.astype(np.float32), min(size, len(E)))
    together = max(1, size // UPDATES)
    while choice.take(together):
        choice.update()
    return choice.positions()


class _Choice:
    """Candidates that were taken, and what the others would gain.

    Taking candidate j turns E into E − E_j E_jᵀ/E_jj, which reduces Σ_b weight_b·E_bb by Σ_b weight_b·E_bj²/E_jj. The
    sums are ``gains``. To bring them up to date takes a product with E (c, c), which is worth its while for a few taken
    candidates at once; those of a few are chosen by gains that shrink as the square of what is left of a candidate.
    """

    def __init__(self, E: NDArray[np.float32], weights: NDArray[np.float32], size: int) -> None:
        self.E = E
        self.weights = weights
        self.taken: list[int] = []
        self.n_known = 0
        self.explained = np.empty((size, len(E)), np.float32)  # rows span what the candidates taken explain
        self.left = np.diagonal(E).astype(np.float64)
        self.known_left = self.left.copy()
        self.least = EXPLAINED * self.left
        self.gains = np.einsum("bj,bj,b->j", E, E, weights, optimize=True).astype(np.float64)

    def take(self, number: int) -> bool:
        """Take some more candidates; False if there was none to take."""
        before = len(self.taken)
        is_open = self.left > self.least
        is_open[self.taken] = False
        # gain/left, where the gain has shrunk as left²
        shrunk = np.divide(self.gains, self.known_left**2, out=np.zeros(len(self.E)), where=is_open)
        for k in range(before, min(before + number, len(self.explained))):
            is_open &= self.left > self.least
            if not is_open.any():
                break
            j = int(np.argmax(np.where(is_open, shrunk * self.left, -1.0)))
            is_open[j] = False
            F = self.explained[:k]
            self.explained[k] = (self.E[j] - F[:, j] @ F) / np.float32(np.sqrt(self.left[j]))
            self.left -= np.square(self.explained[k], dtype=np.float64)
            self.taken.append(j)
        return len(self.taken) > before

    def update(self) -> None:
        """Bring the gains up to date: Σ_b weight_b·(E_bj − Σ_i v_ib v_ij)², with the rows v of what was taken since."""
        F, V = self.explained[: self.n_known], self.explained[self.n_known : len(self.taken)]
        weighted = self.weights * V
        products = panels.times(self.E, weighted.T).T - (weighted @ F.T) @ F
        self.gains += np.einsum("ij,ij->j", V, (weighted @ V.T) @ V - 2.0 * products)
        np.maximum(self.gains, 0.0, out=self.gains)
        self.known_left = self.left.copy()
        self.n_known = len(self.taken)

    def positions(self) -> NDArray[np.intp]:
        """Those taken, and others in their order where all are explained."""
        others = np.setdiff1d(np.arange(len(self.E)), self.taken)[: len(self.explained) - len(self.taken)]
        return np.concatenate([np.array(self.taken, np.intp), others])
