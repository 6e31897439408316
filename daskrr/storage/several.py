"""Several writes at a time, since a store takes longer to answer than to write."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

_WRITERS = ThreadPoolExecutor(thread_name_prefix="daskrr-write")


def side_by_side(writes: Iterable[Callable[[], object]]) -> None:
    """Do all of them; when the last has ended, raise what the first that failed has raised."""
    begun = [_WRITERS.submit(write) for write in writes]
    wait(begun)
    for one in begun:
        one.result()
