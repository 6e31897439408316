"""What a run will cost, known before anything runs; the run refuses what the plan says cannot fit."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from dask.utils import format_bytes, format_time

from daskrr.errors import DoesNotFit, printable
from daskrr.kernels import cuda
from daskrr.kernels.base import PANEL_BYTES, PANEL_INPUT_BYTES, panel_rows
from daskrr.machine import Gpu
from daskrr.numerics.blas import one_thread
from daskrr.numerics.pass1 import chain_rows
from daskrr.numerics.tiles import tile_rows
from daskrr.nystrom.workload import Workload
from daskrr.runtime.blocks import block_rows
from daskrr.runtime.devices import BLOCKS_OF_A_TASK, CPU, PROCESSOR, TASKS_AT_ONCE, Choice
from daskrr.runtime.executors import LEAST_WITH_ROWS, ClusterExecutor, Executor, window_size
from daskrr.runtime.map_blocks import spans_of
from daskrr.runtime.rows import JoinedRows, Rows, ZarrRows
from daskrr.runtime.tree import FAN_IN, Span
from daskrr.runtime.workers import IDLE_METRIC
from daskrr.storage.pieces import ahead_bytes
from daskrr.storage.several import MOST_BEGUN

# What a process keeps between its arrays, since they differ in size.
KEPT_BYTES = 48 * 2**20

# That, and resident bytes of a worker process that has imported everything and computed nothing yet, unless it tells of
# more: Dask imports what else is installed, such as xarray, pandas and Arrow, which are a third of it, or CuPy.
IDLE_WORKER_BYTES = 236 * 2**20 + KEPT_BYTES

# Dask spills to disk from 0.7 of the memory limit; staying below 0.65 keeps it from starting.
USABLE_SHARE = 0.65

# Copies of the landmarks: as chosen, as sent to be factored, and the factor's own of this round and the one before; on
# the scheduler, as received, decoded and factored, and on their way to workers.
WORKER_LANDMARKS = 3
SCHEDULER_LANDMARKS = 5

# Copies that kernels make of a panel of rows, in float64.
PANEL_COPIES = 5

# Copies of the rows of an audit besides those that were drawn: rows drawn by chance, and all together.
COMPARED_COPIES = 2


@dataclass(frozen=True)
class Plan:
    """Cost of one run, before it runs.

    Attributes
    ----------
    flops
        Floating-point operations of both passes.
    bytes_read
        Decoded bytes: every pass reads all rows, and p random rows may touch every chunk.
    bytes_moved
        Partial sums and factors sent between processes.
    worker_bytes
        Peak resident bytes of a worker process, interpreter and imports included.
    memory_limit
        What each worker's memory limit must be, so that Dask does not start to spill.
    scheduler_bytes
        Peak of the p × p algebra where it runs: on the scheduler, or on a worker with a GPU, which has freed more.
    device, gpu, gpu_bytes
        What tasks compute on, the name of the GPU, if it is one, and the peak of its memory.
    """

    origin: str
    n_rows: int
    n_features: int
    n_landmarks: int
    dtype: str
    block_rows: int
    tile_rows: int
    n_blocks: int
    n_tasks: int
    n_threads: int
    readings: int
    flops: float
    bytes_read: int
    bytes_moved: int
    bytes_written: int
    worker_bytes: int
    memory_limit: int
    scheduler_bytes: int
    device: str = CPU
    gpu: str = ""
    gpu_bytes: int = 0

    def seconds(self, flops_per_second: float | None = None) -> float:
        """Expected time at the matrix-multiply speed of a core here (measured now), on all worker threads."""
        rate = measure_matmul(self.dtype) if flops_per_second is None else flops_per_second
        return self.flops / (rate * self.n_threads)

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        return asdict(self) | {"seconds_at_matmul_speed": None if self.gpu else self.seconds()}

    @property
    def _time(self) -> list[tuple[str, str]]:
        """That of cores; how fast a GPU is, nobody knows here."""
        if self.gpu:
            return []
        return [("time", f"{format_time(self.seconds())} at matrix-multiply speed on {self.n_threads} threads")]

    @property
    def _algebra(self) -> list[tuple[str, str]]:
        """That of a scheduler; a worker with a GPU has freed more by then."""
        if self.gpu:
            return []
        return [("scheduler", f"peak {format_bytes(self.scheduler_bytes)} for the p × p algebra")]

    @property
    def _draws(self) -> str:
        if self.n_landmarks <= self.n_rows:
            return f"{self.n_landmarks:,} draws"
        return f"{self.n_landmarks:,} draws, cut to the {self.n_rows:,} rows there are"

    def __str__(self) -> str:
        lazy = self.origin.startswith("Dask")
        rows = [
            ("input", f"{self.n_rows:,} rows × {self.n_features} features, {self.origin}"),
            ("landmarks", f"{self._draws}, {self.dtype} tiles of {self.tile_rows:,} rows"),
            ("blocks", f"{self.n_blocks:,} of {self.block_rows:,} rows; {self.n_tasks:,} tasks in all"),
            (
                "input is " + ("evaluated" if lazy else "read"),
                f"up to {self.readings} times, {format_bytes(self.bytes_read)} decoded",
            ),
            ("moved", f"{format_bytes(self.bytes_moved)} between processes"),
            (
                "written",
                f"{format_bytes(self.bytes_written)} of results; an output takes up to "
                f"{format_bytes(3 * self.bytes_written)} with one kept from before while the next is written",
            ),
            ("work", f"{self.flops / 1e12:.3g} Tflop"),
            *self._time,
            (
                "worker",
                f"peak {format_bytes(self.worker_bytes)}; memory limit {format_bytes(self.memory_limit)} or more"
                + (", of which decoded rows may fill what is left" if self.gpu else ""),
            ),
            *self._algebra,
        ]
        if self.gpu:
            rows.append(("GPU", f"peak {format_bytes(self.gpu_bytes)} on {self.gpu}, one for each worker"))
        return "\n".join(f"{name:>18}  {printable(text)}" for name, text in rows)


@dataclass(frozen=True)
class Workers:
    """Where a run takes place: worker processes with their threads, or this process alone."""

    n_workers: int
    threads_each: int
    n_threads: int
    limits: dict[str, int]
    apart: bool
    idle_bytes: int = 0
    device: Choice = PROCESSOR

    @classmethod
    def of(cls, executor: Executor) -> "Workers":
        """The workers that ``executor`` has now."""
        if not isinstance(executor, ClusterExecutor):
            return cls(1, executor.n_threads, executor.n_threads, {}, apart=False, device=executor.device)
        found = executor.client.scheduler_info(n_workers=-1)["workers"]
        threads = [worker["nthreads"] for worker in found.values()]
        limits = {address: worker["memory_limit"] for address, worker in found.items()}
        idle = max((worker["metrics"].get(IDLE_METRIC, 0) for worker in found.values()), default=0)
        each, n_threads = max(threads, default=1), max(1, sum(threads))
        return cls(max(1, len(found)), each, n_threads, limits, True, idle, executor.device)

    @classmethod
    def embedded(cls, n_workers: int, device: Choice = PROCESSOR) -> "Workers":
        """``n_workers`` processes, as a local cluster has them."""
        threads = 1 if device.gpu is None else TASKS_AT_ONCE
        return cls(n_workers, threads, threads * n_workers, {}, apart=True, device=device)


def make_plan(rows: Rows, dtype: np.dtype, work: Workload, wanted_rows: int | None, workers: Workers) -> Plan:
    """Work out what ``work`` on ``rows`` will cost on ``workers``."""
    n, d = rows.shape
    p = min(work.n_landmarks, n)
    gpu = workers.device.gpu
    height = block_rows(work.n_landmarks, rows, wanted_rows, on_gpu=gpu is not None)
    n_blocks = -(-n // height)
    spans = spans_of(rows, height, workers, work.pass_flops(d), work.sum_bytes)
    sampled = min(p, n_blocks)
    matrix, landmarks = 8 * p * p, 8 * p * d
    carried = 0 if isinstance(rows, ZarrRows) else rows.nbytes * 3
    memory = _Memory(rows, p, dtype, min(height, n), spans, work, workers)
    worker = memory.worker_bytes
    certified = work.audit_rows > 0
    matrices = 5 + work.n_sums if work.n_ridges == 1 and not certified else 8 + work.n_sums
    per_span = work.n_sums * matrix + memory.drawn(height * max(span.n_blocks for span in spans))
    return Plan(
        origin=rows.origin,
        n_rows=n,
        n_features=d - isinstance(rows, JoinedRows),
        n_landmarks=work.n_landmarks,
        dtype=str(dtype),
        block_rows=height,
        tile_rows=tile_rows(p) if gpu is None else cuda.tile_rows(p, gpu.memory),
        n_blocks=n_blocks,
        n_tasks=len(spans) * (2 * work.passes + 3 * work.weighs_rows) + sampled + 6,
        n_threads=workers.n_threads,
        readings=work.passes + 1,
        flops=work.flops(n, d),
        bytes_read=rows.nbytes * work.passes + min(rows.nbytes, sampled * height * rows.nbytes // n),
        bytes_moved=per_span * len(spans) + (matrix + landmarks) * (2 * workers.n_workers + 2) + carried,
        bytes_written=(2 * work.n_ridges * (1 + certified) + 1) * 8 * n,
        worker_bytes=worker,
        memory_limit=int(worker / USABLE_SHARE),
        scheduler_bytes=matrices * matrix + SCHEDULER_LANDMARKS * landmarks,
        device=workers.device.name,
        gpu="" if gpu is None else gpu.name,
        gpu_bytes=0 if gpu is None else memory.gpu_bytes(gpu),
    )


@dataclass(frozen=True)
class _Memory:
    """What is in the memory of a worker, at most, in parts that can be there at the same time."""

    rows: Rows
    p: int
    dtype: np.dtype
    height: int
    spans: Sequence[Span]
    work: Workload
    workers: Workers

    @property
    def worker_bytes(self) -> int:
        """The interpreter, what is held all the time, and either the work of a pass or that on rows which it drew."""
        # What pass 1 keeps of every row is on the disk of workers, but not that by which rows are weighed.
        kept = 10 * self.rows.n_rows * ((not self.workers.apart) + self.work.weighs_rows + bool(self.work.full_rounds))
        held = self._factors + self._landmarks * WORKER_LANDMARKS + kept // self.workers.n_workers
        idle = max(IDLE_WORKER_BYTES, self.workers.idle_bytes + KEPT_BYTES)
        return idle + held + max(self._passing, self._comparing)

    def gpu_bytes(self, gpu: Gpu) -> int:
        """Tiles, chains and sums of the blocks under way; factors and landmarks, as brought and as used."""
        tiles = 8 * max(cuda.tile_rows(self.p, gpu.memory), cuda.LEAST_TILE_ROWS) * self.p * cuda.TILES_OF_A_THREAD
        sums = 3 * self.work.n_sums * self._matrix
        return cuda.BLOCKS_AT_ONCE * (tiles + sums) + 6 * self._matrix + 4 * self._landmarks

    @property
    def _matrix(self) -> int:
        return 8 * self.p**2

    @property
    def _landmarks(self) -> int:
        return 8 * self.p * self.rows.shape[1]

    @property
    def _factors(self) -> int:
        """The factor as received and as used; sums held, sent and received."""
        return self._matrix * ((6 if self.workers.apart else 4) + 4 * self.work.n_sums)

    def drawn(self, height: int) -> int:
        """Rows drawn among ``height`` rows, with their keys, numbers and weights."""
        return sum(min(size, height) for size in self.work.draws) * (self.rows.row_bytes + 24)

    @property
    def _passing(self) -> int:
        """What every thread works on, and what it has found and is written; rows drawn wait to be added to others."""
        waiting = MOST_BEGUN * 8 * self.height * self.work.n_ridges
        if len(self.spans) > 1:
            highest = max(span.n_rows for span in self.spans)
            waiting += min(FAN_IN, len(self.spans)) * self.drawn(highest) + 2 * self.drawn(self.rows.n_rows)
        at_once = self._thread if self.workers.device.gpu is None else self._thread + BLOCKS_OF_A_TASK * self._block
        return self.workers.threads_each * at_once + waiting + self._travelling

    @property
    def _block(self) -> int:
        """What one of several blocks under way on a GPU holds: a piece of the input, and what it has found."""
        found = 8 * self.height * (16 + 8 * (self.work.n_ridges - 1)) + self.drawn(self.height)
        return self.work.n_sums * self._matrix + self._pieces + found

    @property
    def _thread(self) -> int:
        """What one thread holds.

        A tile, or two for several ridges, one of float32 again in float64; the partial sum that it makes, of chains if
        the block is long, those of the levels of its span, and two that wait to be added; a piece of the input; panels;
        some numbers of every row and ridge; what is kept of the rows of its span; what the kernel prepares of the
        landmarks; and the rows that it has drawn, before and after a merge.
        """
        work = self.work
        n_bytes = self.dtype.itemsize * (1 if work.n_ridges == 1 else 2) + (8 if self.dtype == np.float32 else 0)
        tile = min(tile_rows(self.p), self.height) * self.p * n_bytes if self.workers.device.gpu is None else 0
        highest = max(self.spans, key=lambda span: span.n_rows)
        several_chains = self.height > chain_rows(self.p, self.workers.device.chain_rows)
        sums = (3 + highest.level + several_chains) * work.n_sums * self._matrix
        per_row = 8 * self.height * (16 + 8 * (work.n_ridges - 1)) + 16 * highest.n_rows
        prepared = work.landmark_copies * self._landmarks
        return (
            tile + sums + self._pieces + self._panels + per_row + prepared
            + 2 * self.drawn(highest.n_rows)
        )  # fmt: skip

    @property
    def _pieces(self) -> int:
        """Rows of the input as stored and decoded, in float64, and their finite mask; and those that come next."""
        n_rows, row_bytes = self.rows.piece_rows(self.height), self.rows.row_bytes
        ahead = ahead_bytes(n_rows * row_bytes) if self.rows.is_stored else 0
        return n_rows * (3 * row_bytes + 9 * self.rows.shape[1]) + ahead

    @property
    def _travelling(self) -> int:
        """Blocks of an array of the client, which are sent with tasks that wait to be run."""
        waiting = 0
        if self.workers.apart and self.rows.in_memory:
            waiting = window_size(self.workers.threads_each, LEAST_WITH_ROWS)
        return waiting * self.height * self.rows.row_bytes

    @property
    def _panels(self) -> int:
        """Kernels make copies of the rows of a panel, or one of those of a tile."""
        d = self.rows.shape[1]
        copied = max(PANEL_COPIES * panel_rows(self.p, d), min(tile_rows(self.p), PANEL_INPUT_BYTES // (8 * d)))
        return 4 * PANEL_BYTES + min(PANEL_COPIES * self.height, copied) * 8 * (d + 2)

    @property
    def _comparing(self) -> int:
        """An audit or a choice: rows drawn, those compared, what the kernel prepares of them, matrices of all pairs."""
        work, n = self.work, self.rows.n_rows
        m = min(max(work.draws, default=0), n)
        compared = 8 * m * self.rows.shape[1]
        matrices = 8 * m * (4 * m + 2 * self.p)
        prepared = work.landmark_copies * (compared + self._landmarks)
        return self.drawn(n) + COMPARED_COPIES * compared + prepared + matrices + self._panels


def check_fits(plan: Plan, workers: Workers) -> None:
    """Refuse a plan that does not fit the memory limit of some worker, or its GPU.

    Raises
    ------
    DoesNotFit
        With the bytes needed and what to change.
    """
    gpu = workers.device.gpu
    if gpu is not None and (plan.tile_rows == 0 or plan.gpu_bytes > gpu.memory):
        raise DoesNotFit(
            f"{plan.n_landmarks} landmarks need {plan.gpu_bytes / 2**20:.0f} MiB of GPU memory, and a {gpu.name} has "
            f"{gpu.memory / 2**20:.0f} MiB. Use fewer landmarks, or device='cpu'."
        )
    tight = {address: limit for address, limit in workers.limits.items() if limit and limit < plan.memory_limit}
    if tight:
        address, limit = min(tight.items(), key=lambda item: item[1])
        raise DoesNotFit(
            f"{plan.n_landmarks} landmarks need a worker memory limit of {plan.memory_limit / 2**20:.0f} MiB "
            f"(peak {plan.worker_bytes / 2**20:.0f} MiB), and worker {address} has {limit / 2**20:.0f} MiB. Give "
            "workers more memory or fewer threads, or use fewer landmarks or smaller input chunks."
        )


def spare_bytes(plan: Plan, workers: Workers) -> int:
    """What every worker has room for besides, as far as memory limits tell."""
    limits = [limit for limit in workers.limits.values() if limit]
    return max(0, int(USABLE_SHARE * min(limits)) - plan.worker_bytes) if limits else 0


def measure_matmul(dtype: str, size: int = 768) -> float:
    """Flops per second of a matrix multiply on one core of this machine, best of three."""
    A = np.full((size, size), 1e-3, dtype)
    best = float("inf")
    with one_thread():
        for _ in range(3):
            began = time.perf_counter()
            A @ A
            best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best
