"""How near do the products of a tile come to a matrix multiply, by BLAS and by machine code of our own?

The triangular product and the Gram matrix of a tile with p columns, that of 32 features which makes them, and that with
the 32 rows of a probe, each in a loop of its own, as a share of the speed of a large matrix multiply that is measured
in turn with them: one of float64 for Gram matrices, which are summed in it.
As many processes as are asked for do so at the same time, since they share the way to memory. From this follows which
columns :mod:`daskrr.kernels.products` leaves to BLAS.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import harness
from daskrr.kernels import native, products
from daskrr.numerics import blas, tiles
from daskrr.nystrom.audit import PROBE_ROWS

SEED = 0
SIZE = 1536
LIFTED = 32 + 2
COLUMNS = {
    "float64": (64, 128, 256, 512, 768, 1024, 1536, 2048, 4096),
    "float32": (64, 256, 512, 1024, 1536, 4096),
}
SECONDS, ROUNDS = 0.15, 5
QUICK_COLUMNS = {"float64": (64,)}
QUICK_SECONDS, QUICK_ROUNDS = 0.01, 1


def measure(seconds: float, rounds: int, case: tuple[str, int]) -> dict[str, float]:
    """Shares of a matrix multiply, medians of some rounds; those of our own where the processor has what they need."""
    dtype, p = case
    generator = np.random.default_rng(SEED)
    wide = generator.standard_normal((SIZE, SIZE))
    square = wide.astype(dtype)
    # Rows that are multiplied over and over stay of one size: numbers near zero would take many times as long.
    lower = (np.eye(p) + 1e-6 * np.tril(generator.standard_normal((p, p)), -1)).astype(dtype)
    tile = generator.standard_normal((tiles.tile_rows(p), p)).astype(dtype)
    rows = tile.copy()
    whose = {"BLAS": False} | ({"own": True} if native.has_wide_registers() else {})
    features, landmarks, coefficients = (
        generator.standard_normal(shape).astype(dtype) for shape in ((len(tile), LIFTED), (LIFTED, p), (p, PROBE_ROWS))
    )
    explained, one = np.empty((len(tile), PROBE_ROWS), dtype), float(len(tile))
    steps: dict[str, tuple[Callable[[], Any], float, Any]] = {
        "triangular": (partial(blas.multiply_rows, lower, rows), one * p**2, square),
        "Gram": (lambda: blas.add_gram(tile, sums), one * p**2, wide),
        "columns": (partial(products.times, features, landmarks, rows), 2.0 * one * p * LIFTED, square),
        "probe": (partial(products.times, tile, coefficients, explained), 2.0 * one * p * PROBE_ROWS, square),
    }
    found: dict[str, list[float]] = {}
    with blas.one_thread(), np.errstate(all="ignore"):
        for _ in range(rounds):
            for name, (step, flops, like) in steps.items():
                limit = _rate(partial(np.matmul, like, like, out=np.empty_like(like)), 2.0 * SIZE**3, seconds)
                for owner, own in whose.items():
                    rows[...] = tile
                    with (
                        patch.object(products, "suit", lambda p, own=own: own),
                        patch.object(products, "MOST_FACTOR_BYTES", sys.maxsize if own else 0),
                    ):
                        sums = blas.no_sums(p)
                        speed = _rate(step, flops, seconds)
                    found.setdefault(f"{name}, {owner}", []).append(speed / limit)
    return {name: statistics.median(shares) for name, shares in found.items()}


def _rate(step: Callable[[], Any], flops: float, seconds: float) -> float:
    """Flops per second of a step that is repeated for some time."""
    step()
    done, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds or not done:
        step()
        done += 1
    return done * flops / passed


def main() -> int:
    """Run the benchmark; what it finds is a reason for a rule, and nothing is required of it."""
    options = harness.arguments("products", __doc__, processes=(harness.WORKERS, "processes that do so at a time"))
    columns, seconds, rounds = COLUMNS, SECONDS, ROUNDS
    if options.quick:
        columns, seconds, rounds = QUICK_COLUMNS, QUICK_SECONDS, QUICK_ROUNDS
    number = options.processes
    parameters = {"seconds": seconds, "rounds": rounds, "processes": number}
    content = harness.report("products", SEED, options.quick, parameters)
    results = []
    with harness.processes(number) as spread:
        for dtype, p in ((dtype, p) for dtype, sizes in columns.items() for p in sizes):
            found = list(spread(partial(measure, seconds, rounds), [(dtype, p)] * number))
            shares = {name: statistics.median(one[name] for one in found) for name in found[0]}
            used = "own" if products.suit(p) else "BLAS"
            results.append({"dtype": dtype, "p": p, "used": used, "shares": shares})
    harness.print_table("Share of a matrix multiply", [_line(one) for one in results])
    harness.write_report(options.output, content | {"results": results})
    return 0


def _line(result: dict[str, Any]) -> dict[str, str]:
    shares = {name: f"{share:.2f}" for name, share in result["shares"].items()}
    return {"dtype": result["dtype"], "p": str(result["p"]), **shares, "used": result["used"]}


if __name__ == "__main__":
    sys.exit(main())
