"""Several writes at a time, since a store takes longer to answer than to write."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import BoundedSemaphore

# So many writes that somebody has begun and not waited for may be under way, with what they write in memory.
MOST_BEGUN = 8

_WRITERS = ThreadPoolExecutor(thread_name_prefix="daskrr-write")
_ROOM = BoundedSemaphore(MOST_BEGUN)


def side_by_side(writes: Iterable[Callable[[], object]]) -> None:
    """Do all of them; when the last has ended, raise what the first that failed has raised."""
    finish([_WRITERS.submit(write) for write in writes])


def begin(writes: Iterable[Callable[[], object]]) -> list[Future[object]]:
    """Have all of them done, also while the caller goes on; :func:`finish` them then."""
    return [_begun(write) for write in writes]


def _begun(write: Callable[[], object]) -> Future[object]:
    _ROOM.acquire()
    begun = _WRITERS.submit(write)
    begun.add_done_callback(lambda _: _ROOM.release())
    return begun


def finish(begun: Sequence[Future[object]]) -> None:
    """Wait for all; then raise what the first that failed has raised."""
    wait(begun)
    for one in begun:
        one.result()
