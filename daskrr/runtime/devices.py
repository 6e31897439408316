"""Which device the tasks of a run compute on: what was asked for, and what its workers have.

Bits differ between processors and GPUs, so all tasks of a run compute on the same kind. What one GPU computes in a
task comes of several blocks at a time, so that it does not wait while others are read, checked and written.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import distributed

from daskrr import config, machine
from daskrr.errors import InvalidParameter, SourceUnreachable, install
from daskrr.kernels import device
from daskrr.kernels.cuda import BLOCKS_AT_ONCE, PARTS_AT_ONCE, CudaDevice, cuda_device
from daskrr.kernels.device import Device
from daskrr.machine import Gpu

log = logging.getLogger("daskrr")

T = TypeVar("T")

CPU, CUDA, AUTO = "cpu", "cuda", "auto"

# Tasks that a worker with a GPU is given at a time, and blocks of one that are under way: some tasks begin while what
# others have found is written.
TASKS_AT_ONCE, BLOCKS_OF_A_TASK = 4, BLOCKS_AT_ONCE // 2


@dataclass(frozen=True)
class Choice:
    """The device of a run: its name, and the GPU of its workers, that with the least memory."""

    name: str
    gpu: Gpu | None = None

    @property
    def chain_rows(self) -> int:
        """See :class:`Device`."""
        return (device.HOST if self.gpu is None else CudaDevice).chain_rows


PROCESSOR = Choice(CPU)


def choose(asked: str | None, client: distributed.Client | None) -> Choice:
    """Choose the device of a run: what was asked for, or else is set, among what the workers or this process have.

    Raises
    ------
    InvalidParameter
        There is no such device, or it was asked for and is not here.
    SourceUnreachable
        It was asked for, and some workers have none; they are named.
    """
    wanted = config.get("device") if asked is None else asked
    if wanted not in (AUTO, CPU, CUDA):
        raise InvalidParameter(f"device must be 'auto', 'cpu' or 'cuda', got {wanted!r}")
    if wanted == CPU:
        return PROCESSOR
    found: Mapping[str, Any] = {"": working_gpu()} if client is None else client.run(working_gpu, on_error="return")
    gpus = {name: one for name, one in found.items() if isinstance(one, Gpu)}
    if len(gpus) == len(found) and gpus:
        return Choice(CUDA, min(gpus.values(), key=lambda one: one.memory))
    without = sorted(set(found) - set(gpus))
    if wanted == CUDA:
        raise _missing(without, client)
    if gpus:
        log.warning(
            "%d of %d workers have a GPU, and bits differ between GPUs and processors: all compute on processors. Ask "
            "for device='cuda' on GPUs alone.", len(gpus), len(found),
        )  # fmt: skip
    return PROCESSOR


def _missing(without: list[str], client: distributed.Client | None) -> Exception:
    advice = (
        f"A GPU of NVIDIA and CuPy are needed ({install('cuda')}); where both are there, the log of the worker says "
        "what is wrong"
    )
    if client is None:
        return InvalidParameter(f"device='cuda' was asked for, and this process has none. {advice}.")
    if not without:
        return SourceUnreachable("device='cuda' was asked for, and the cluster has no workers. Start some with GPUs.")
    named = ", ".join(without[:5]) + (", …" if len(without) > 5 else "")
    return SourceUnreachable(
        f"device='cuda' was asked for, and {len(without)} workers have none: {named}. {advice}; or stop these workers."
    )


def usable_gpu() -> Gpu | None:
    """The GPU of this process, if CuPy is there for it."""
    return None if find_spec("cupy") is None else machine.gpu()


def working_gpu() -> Gpu | None:
    """The same if it has been tried out; why it does not work is told in the log of this process."""
    found = usable_gpu()
    if found is None:
        return None
    try:
        where = cuda_device()
        with device.using(where):
            where.get(where.zeros((1, 1)))
    except Exception as error:  # of CuPy, of its libraries and of the driver
        log.warning("CuPy cannot use the %s of this process: %s: %s", found.name, type(error).__name__, error)
        return None
    return found


def computes_on_gpu() -> bool:
    """Whether this process has a GPU, and the device that is set may be one."""
    return config.get("device") != CPU and usable_gpu() is not None


def device_of(name: str) -> Device:
    """The device that a task computes on, where it runs."""
    return cuda_device() if name == CUDA else device.HOST


def call_on(name: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that computes on a device."""
    with device.using(device_of(name)):
        return function(*arguments)


def in_order(
    name: str, calls: Iterator[Callable[[], T]], threads: Callable[[], ThreadPoolExecutor] | None = None
) -> Iterator[T]:
    """What the calls return, one after the other; on a GPU, some that follow are under way meanwhile."""
    where, pool = device_of(name), threads or _threads
    if where.is_host:
        yield from (call() for call in calls)
        return
    waiting: deque[Future[T]] = deque()
    try:
        for call in calls:
            # Of its own, since two threads cannot be in the same one.
            waiting.append(pool().submit(copy_context().run, call_on, name, call))
            if len(waiting) == BLOCKS_OF_A_TASK:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for one in waiting:
            one.cancel()
        wait(waiting)


def within_call(calls: Iterator[Callable[[], T]]) -> Iterator[T]:
    """What :func:`in_order` gives, for calls that are parts of one on the device of this thread."""
    return in_order(device.current().name, calls, _more_threads)


@cache
def _threads() -> ThreadPoolExecutor:
    """Threads that compute on the GPU of this process; each keeps its memory there."""
    return ThreadPoolExecutor(BLOCKS_AT_ONCE, thread_name_prefix="daskrr-gpu")


@cache
def _more_threads() -> ThreadPoolExecutor:
    """Others, for those that wait for parts of what they do: if they waited for their like, all might."""
    return ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="daskrr-gpu-part")
