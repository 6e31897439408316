"""What does daskrr need to be as accurate as other libraries, and what do they need?

At equal true error: every peer scores the same few rows, and its error is measured against the exact scores. Then the
least number of landmarks is looked for, on a ladder of steps of 2^¼, with which daskrr's estimate is at least as
accurate, there and on all higher rungs that were run. Both are timed there, and with the same landmarks on many rows,
whose exact scores nobody knows.

The error is the root mean square of answer/exact - 1 over all rows, the median of three seeds; what the median over the
rows would have decided is in the report. Times are the smallest of the seeds, of which there are fewer where one takes
long, since other processes only add to them. Processor time is with one thread for the algebra, since threads that wait
for each other would count as work. Time on the wall is that or the one with a thread for each core, whichever is
shorter; daskrr has two threads, or two workers. A ratio is the peer's time over daskrr's: below 1 the peer wins.

Rows of real data sets are from the folder that ``DASKRR_DATA`` names, drawn at random and standardized. Where a set
has fewer rows than are wanted, they are drawn with repetition, and each is moved by a hundredth of a standard
deviation. The kernel is Gaussian with the median distance for its length scale, and the ridge gives an effective
dimension of about 100. A data set that is not run is kept as it is in the report.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.clouds import median_distance
from benchmarks.peers import CLUSTER, IN_PROCESS, PEERS, Rows, Run, Task, missing
from daskrr import exact
from daskrr.kernels import Gaussian
from daskrr.synthetic import planted_outliers

DATA = "DASKRR_DATA"
RIDGE = 1e-4
SEED = 0
JITTER = 0.01
FEATURES, ROWS_FOR_AN_OUTLIER = 10, 200
CHUNK_ROWS = 8192
QUIET = 0.1
LEAST_LANDMARKS, RUNGS_TO_DOUBLE = 16, 4
SMALL, LARGE = "small", "large"
PLACES = (IN_PROCESS, CLUSTER)
CLOCKS = {"processor": "processor_seconds", "wall": "seconds"}
TARGETS = ("rms_error", "median_error")
MADE_UP = "made up"
# The real ones are those with the most rows.
FILES = {
    "nycflights13": "nycflights13.npz",
    "keggdirected": "uci-keggdirected.npz",
    "kin40k": "uci-kin40k.npz",
}
PARTS = (MADE_UP, *FILES)


# Figures of daskrr by place, size and number of landmarks.
Times = dict[str, dict[str, dict[int, dict[str, Any]]]]


@dataclass(frozen=True)
class Sizes:
    """Numbers of rows, of landmarks of the peers that take it, the most that daskrr may need, and of seeds."""

    small: int
    large: int
    n_landmarks: int
    most: int
    repeats: int

    @property
    def ladder(self) -> tuple[int, ...]:
        """The numbers of landmarks that daskrr is tried with."""
        steps = np.arange(RUNGS_TO_DOUBLE * np.log2(self.most / LEAST_LANDMARKS) + 1)
        return tuple(int(p) for p in np.round(LEAST_LANDMARKS * 2 ** (steps / RUNGS_TO_DOUBLE)))


FULL = Sizes(6000, 100_000, 500, 2048, 3)
QUICK = Sizes(600, 1500, 60, 256, 1)


def absent(name: str) -> str | None:
    """Why a data set cannot be read, if so."""
    if name == MADE_UP or (Path(os.environ.get(DATA, "")) / FILES[name]).is_file():
        return None
    return f"{DATA} names no folder that has {FILES[name]}"


def rows_of(name: str, n_rows: int) -> tuple[Rows, str]:
    """Standardized rows of a data set, and how they were come by."""
    if name == MADE_UP:
        outliers = n_rows // ROWS_FOR_AN_OUTLIER
        X = planted_outliers(n_rows, FEATURES, outliers, SEED).block(0, n_rows)
        return standardized(X), f"clusters with {outliers} isolated rows"
    with np.load(Path(os.environ[DATA]) / FILES[name]) as data:
        found = data["X"].astype(np.float64)
    generator = np.random.default_rng(SEED)
    if n_rows <= len(found):
        return standardized(found[generator.choice(len(found), n_rows, replace=False)]), f"of {len(found):,} rows"
    X = standardized(found[generator.integers(len(found), size=n_rows)])
    return X + JITTER * generator.standard_normal(X.shape), f"{len(found):,} rows with repetition, jittered"


def standardized(X: Rows) -> Rows:
    """Columns of mean 0 and deviation 1; those that are constant, of 0."""
    spread = X.std(axis=0)
    return (X - X.mean(axis=0)) / np.where(spread > 0, spread, 1.0)


def write_rows(folder: Path, size: str, X: Rows) -> None:
    """Write the same rows as a NumPy file and as a Zarr store."""
    np.save(folder / f"{size}.npy", X)
    harness.create_store(folder / f"{size}.zarr", *X.shape, CHUNK_ROWS)[:] = X


def compare(name: str, sizes: Sizes) -> dict[str, Any]:
    """Run everything on one data set."""
    with tempfile.TemporaryDirectory() as folder:
        (few, how_few), (many, how_many) = rows_of(name, sizes.small), rows_of(name, sizes.large)
        write_rows(Path(folder), SMALL, few)
        write_rows(Path(folder), LARGE, many)
        scale = median_distance(few)
        truth = exact.leverage_scores(few, Gaussian(scale), RIDGE)
        np.save(Path(folder) / f"{SMALL}-exact.npy", truth)
        bench = Bench(folder, sizes, scale)
        opponents, failed = bench.opponents()
        rungs = bench.climb(opponents)
        ours = bench.times_of_ours(opponents, rungs)
    comparisons = [compared(one, rungs, ours) for one in opponents]
    return {
        "n_features": few.shape[1],
        "rows": {SMALL: {"n_rows": len(few), "what": how_few}, LARGE: {"n_rows": len(many), "what": how_many}},
        "length_scale": scale,
        "effective_dimension": float(truth.sum()),
        "comparisons": comparisons,
        "ladder": rungs,
        "failed": failed,
        "disturbed": max(others_of(comparisons), default=0.0) > QUIET,
    }


class Failed(Exception):
    """A library ended with an error, which is told."""


@dataclass(frozen=True)
class Bench:
    """The processes that run on the rows of one data set."""

    folder: str
    sizes: Sizes
    length_scale: float

    def run(self, library: str, **changes: Any) -> list[Run]:
        """Run one library in a process of its own."""
        usual = {"sizes": (SMALL, LARGE), "landmarks": (self.sizes.n_landmarks,), "repeats": self.sizes.repeats}
        task = Task(library, self.folder, length_scale=self.length_scale, ridge=RIDGE, **usual | changes)
        path = task.path("task.json")
        path.write_text(json.dumps(asdict(task)))
        command = [sys.executable, "-m", "benchmarks.peers", str(path)]
        began = time.perf_counter()
        with harness.others_load() as load:
            done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
        if done.returncode:
            raise Failed((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
        print(f"{library}: {time.perf_counter() - began:.0f} s, others took {load['others']:.0%} meanwhile", flush=True)
        return [run | load for run in json.loads(done.stdout.splitlines()[-1])]

    def opponents(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The figures of all answers of all peers that are here, and why some of them failed."""
        found, failed = [], {}
        for peer in PEERS:
            if missing(peer):
                continue
            try:
                found += answers(peer, self.run(peer))
            except Failed as error:
                failed[peer] = str(error)
        return found, failed

    def climb(self, opponents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run daskrr up the ladder, until it is as accurate as the best of the others by both errors."""
        if not opponents:
            return []
        targets = {name: min(one[SMALL][name] for one in opponents) for name in TARGETS}
        runs = self.run(IN_PROCESS, sizes=(SMALL,), landmarks=self.sizes.ladder, targets=targets)
        return list(by_landmarks(runs, SMALL).values())

    def times_of_ours(self, opponents: Sequence[dict[str, Any]], rungs: Sequence[dict[str, Any]]) -> Times:
        """Figures of daskrr with the landmarks that are needed, by place, size and landmarks; the ladder has some."""
        needed = {as_accurate(rungs, one[SMALL], "rms_error") for one in opponents}
        landmarks = tuple(sorted(p for p in needed if p is not None))
        if not landmarks:
            return {}
        apart = self.run(IN_PROCESS, landmarks=landmarks, sizes=(LARGE,))
        together = self.run(CLUSTER, landmarks=landmarks)
        return {
            IN_PROCESS: {SMALL: {rung["n_landmarks"]: rung for rung in rungs}, LARGE: by_landmarks(apart, LARGE)},
            CLUSTER: {size: by_landmarks(together, size) for size in (SMALL, LARGE)},
        }


def of(runs: Iterable[Run], **wanted: Any) -> list[Run]:
    """The runs that have what is wanted."""
    return [run for run in runs if all(run[name] == value for name, value in wanted.items())]


def by_landmarks(runs: Sequence[Run], size: str) -> dict[int, dict[str, Any]]:
    """The figures of one size for each number of landmarks."""
    numbers = dict.fromkeys(run["n_landmarks"] for run in runs)
    return {p: summary(of(runs, size=size, n_landmarks=p)) for p in numbers}


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Smallest times and medians of the rest; processor time is that with one thread for the algebra."""
    alone = of(runs, threads=1)
    found = {
        "n_landmarks": round(float(np.median([run["n_landmarks"] for run in runs]))),
        "processor_seconds": min(run["processor_seconds"] for run in alone),
        "seconds": min(run["seconds"] for run in runs),
        "seconds_with_one_thread": min(run["seconds"] for run in alone),
        "runs": len(alone),
    }
    medians = [name for name in runs[0] if name.endswith("_error")]
    found |= {name: float(np.median([run[name] for run in alone])) for name in medians}
    return found | {name: runs[-1][name] for name in ("peak_bytes", "others")}


def answers(peer: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The answers of a peer, each with its figures at both sizes."""
    return [
        {"peer": peer, "answer": kind} | {size: summary(of(runs, answer=kind, size=size)) for size in (SMALL, LARGE)}
        for kind in dict.fromkeys(run["answer"] for run in runs)
    ]


def as_accurate(rungs: Sequence[dict[str, Any]], other: dict[str, Any], error: str) -> int | None:
    """The least number of landmarks from which on every rung is at least as accurate as another; None without one."""
    least = None
    for rung in sorted(rungs, key=lambda one: -one["n_landmarks"]):
        if rung[error] > other[error]:
            break
        least = rung["n_landmarks"]
    return least


def others_of(comparisons: Sequence[dict[str, Any]]) -> list[float]:
    """Shares of the cores that other programs took during what is compared."""
    places = [one["daskrr"][place] for one in comparisons if one["daskrr"] for place in PLACES]
    return [found[size]["others"] for found in [*comparisons, *places] for size in (SMALL, LARGE)]


def compared(one: dict[str, Any], rungs: Sequence[dict[str, Any]], ours: Times) -> dict[str, Any]:
    """An answer of a peer with what daskrr takes to be as accurate, and the ratios of the times."""
    needed = as_accurate(rungs, one[SMALL], "rms_error")
    by_median = as_accurate(rungs, one[SMALL], "median_error")
    found = one | {"daskrr": None, "ratios": {}, "peer_wins": ["daskrr is never as accurate"], "by_median": None}
    if by_median is not None:
        (rung,) = of(rungs, n_landmarks=by_median)
        ratio = one[SMALL]["processor_seconds"] / rung["processor_seconds"]
        found["by_median"] = {"n_landmarks": by_median, "processor_ratio": ratio}
    if needed is None:
        return found
    figures = {place: {size: ours[place][size][needed] for size in (SMALL, LARGE)} for place in PLACES}
    ratios = {size: {place: _ratios(one[size], figures[place][size]) for place in PLACES} for size in (SMALL, LARGE)}
    return found | {
        "daskrr": {"n_landmarks": needed} | figures,
        "ratios": ratios,
        "peer_wins": [
            f"{size} rows, {place}, {clock}"
            for size in (SMALL, LARGE)
            for place in PLACES
            for clock in CLOCKS
            if ratios[size][place][clock] < 1
        ],
    }


def _ratios(peer: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    return {clock: peer[key] / ours[key] for clock, key in CLOCKS.items()}


def _title(one: dict[str, Any]) -> str:
    return one["peer"] if one["answer"] == "plain" else f"{one['peer']}, {one['answer']}"


def _line(one: dict[str, Any], size: str) -> dict[str, str]:
    """A row of the printed table: seconds of the peer, seconds of daskrr and the ratios."""
    ours = one["daskrr"]
    text = {
        "peer": _title(one),
        "p": str(one[size]["n_landmarks"]),
        "error": f"{one[SMALL]['rms_error']:.4f}",
        "processor": f"{one[size]['processor_seconds']:.2f}",
        "wall": f"{one[size]['seconds']:.2f}",
        "MiB": _mib(one[size]),
        "daskrr's p": str(ours["n_landmarks"]) if ours else "never",
    }
    for place in PLACES:
        for clock, key in CLOCKS.items():
            text[f"{place}, {clock}"] = _ours(ours[place][size][key], one["ratios"][size][place][clock]) if ours else ""
        text[f"{place}, MiB"] = _mib(ours[place][size]) if ours else ""
    return text


def _mib(figures: dict[str, Any]) -> str:
    return f"{sum(figures['peak_bytes']) / harness.MIB:.0f}"


def _ours(seconds: float, ratio: float) -> str:
    return f"{seconds:.2f} ({ratio:.2f}{'*' if ratio < 1 else ' '})"


def show(name: str, result: dict[str, Any]) -> None:
    """Print the tables of one data set, and which peers failed on it."""
    for peer, reason in result["failed"].items():
        print(f"{name}: {peer} failed: {reason}")
    if result["disturbed"]:
        print(f"{name}: DISTURBED: other programs competed with the runs, which spoils times on the wall")
    for size in (SMALL, LARGE) if result["comparisons"] else ():
        rows = result["rows"][size]
        title = f"{name}, {rows['n_rows']:,} rows ({rows['what']}), d = {result['n_features']}, λ = {RIDGE:g}"
        lines = [_line(one, size) for one in result["comparisons"]]
        harness.print_table(
            f"{title}, d_eff = {result['effective_dimension']:.0f}; seconds (ratio), * the peer wins", lines
        )


def ranges(results: dict[str, Any], size: str) -> list[dict[str, str]]:
    """For every answer of a peer the least and the largest ratio over the data sets."""
    comparisons = [one for result in results.values() for one in result["comparisons"]]
    lines = []
    for title in dict.fromkeys(map(_title, comparisons)):
        those = [one for one in comparisons if _title(one) == title]
        line = {"peer": title, "data sets": str(len(those))}
        for place in PLACES:
            for clock in CLOCKS:
                line[f"{place}: {clock}"] = _range(
                    [one["ratios"][size][place][clock] for one in those if one["ratios"]]
                )
        lines.append(line | {"never as accurate": str(sum(not one["ratios"] for one in those))})
    return lines


def _range(values: Sequence[float]) -> str:
    ends = dict.fromkeys(f"{end:.1f}" for end in (min(values, default=0), max(values, default=0)))
    return "–".join(ends) if values else ""


def measured(part: str, sizes: Sizes) -> dict[str, Any]:
    """What one data set gives, with the machine as it was then."""
    began, head = time.perf_counter(), harness.report("peers", SEED, sizes == QUICK, {})
    found = compare(part, sizes)
    show(part, found)
    return {
        "date": head["date"], "machine": head["machine"], "elapsed_seconds": time.perf_counter() - began,
    } | found  # fmt: skip


def main() -> int:
    """Run the comparison."""
    options = harness.arguments("peers", __doc__, PARTS)
    sizes = QUICK if options.quick else FULL
    parameters = {"ridge": RIDGE, "workers": harness.WORKERS, "jitter": JITTER} | asdict(sizes)
    content = harness.report("peers", SEED, options.quick, parameters)
    results = {} if options.quick else _before(options.output)
    parts = options.part or ((MADE_UP,) if options.quick else PARTS)
    left_out = _told({peer: missing(peer) for peer in PEERS} | {part: absent(part) for part in parts})
    for part in parts:
        if part not in left_out:
            results[part] = measured(part, sizes)
    for size in (SMALL, LARGE):
        lines = ranges(results, size)
        if lines:
            harness.print_table(f"the peer's time over daskrr's at equal error, {getattr(sizes, size):,} rows", lines)
    harness.write_report(options.output, content | {"left_out": left_out, "results": results})
    return 0


def _told(reasons: dict[str, str | None]) -> dict[str, str]:
    """Say in a line each what is left out and why."""
    found = {name: reason for name, reason in reasons.items() if reason}
    for name, reason in found.items():
        print(f"{name} left out: {reason}")
    return found


def _before(output: Path) -> dict[str, Any]:
    """Data sets that an earlier report of the same kind has."""
    found = json.loads(output.read_text()).get("results", {}) if output.exists() else {}
    return {part: found[part] for part in PARTS if part in found}


if __name__ == "__main__":
    sys.exit(main())
