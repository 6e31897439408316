"""Which of many candidate rows to take as landmarks: those that explain most of what is left of all rows."""

import numpy as np
from numpy.typing import NDArray

# A candidate of which no more than this share of its residual is left is explained by those taken before.
EXPLAINED = 1e-5


def most_explaining(E: NDArray[np.float32], weights: NDArray[np.float64], size: int) -> NDArray[np.intp]:
    """Positions of ``size`` candidates, each the one that reduces the weighted trace of the residual matrix most.

    Taking candidate j turns E into E − E_j E_jᵀ/E_jj, which reduces Σ_b weight_b·E_bb by Σ_b weight_b·E_bj²/E_jj. These
    sums are kept up to date, so that a step costs one product with E (c, c). Weights are how many rows of the data each
    candidate stands for. Once all candidates are explained, the others follow in their order.
    """
    n = len(E)
    size = min(size, n)
    w = weights.astype(np.float32)
    taken = np.zeros(n, bool)
    F = np.empty((size, n), np.float32)  # rows span what the candidates taken explain
    left = np.diagonal(E).astype(np.float64)
    least = EXPLAINED * left
    gains = np.einsum("bj,bj,b->j", E, E, w, optimize=True).astype(np.float64)
    chosen: list[int] = []
    while len(chosen) < size:
        open_ones = (left > least) & ~taken
        if not open_ones.any():
            break
        j = int(np.argmax(np.where(open_ones, gains / np.where(open_ones, left, 1.0), -1.0)))
        k = len(chosen)
        v = (E[j] - F[:k, j] @ F[:k]) / np.float32(np.sqrt(left[j]))
        weighted = w * v
        product = E @ weighted - (F[:k] @ weighted) @ F[:k]
        gains += v * (np.dot(weighted, v) * v - 2.0 * product).astype(np.float64)
        np.maximum(gains, 0.0, out=gains)
        left -= np.square(v, dtype=np.float64)
        F[k] = v
        taken[j] = True
        chosen.append(j)
    rest = np.flatnonzero(~taken)[: size - len(chosen)]
    return np.concatenate([np.array(chosen, np.intp), rest])
