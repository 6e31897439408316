"""Functions and objects that travel through a scheduler unopened.

A Dask scheduler unpickles every graph that it receives, so it needs each module that a task names. Tasks of daskrr name
none: what is daskrr's own is a string of bytes that only the worker opens. A scheduler without daskrr can run them.
"""

import operator
import pickle
import uuid
from collections.abc import Callable
from typing import Any

import cloudpickle
from dask._task_spec import Task, TaskRef
from dask.delayed import Delayed, delayed
from dask.highlevelgraph import HighLevelGraph
from dask.tokenize import normalize_token
from distributed.protocol import dask_serialize


class _Sealed(bytes):
    """Pickled bytes that keep what they were made of alive in this process, and arrive elsewhere as plain bytes."""

    content: Any

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(self),)


@dask_serialize.register(_Sealed)
def _as_plain_bytes(sealed: _Sealed) -> tuple[dict[str, Any], list[bytes]]:
    """Dask would take the object itself for its bytes, and pickle it within itself until no recursion is left."""
    return {}, [bytes(sealed)]


def seal(content: Any, sent: Any = None) -> bytes:
    """Pickle ``content``, which lives at least as long as the result does, or what is ``sent`` and becomes it there."""
    sealed = _Sealed(cloudpickle.dumps(content if sent is None else sent))
    sealed.content = content
    return sealed


def unseal(sealed: bytes) -> Any:
    """The content of :func:`seal`."""
    return sealed.content if isinstance(sealed, _Sealed) else pickle.loads(sealed)


class _Unseal:
    """:func:`unseal` within this process; anywhere else it arrives as the function of Python's that does the same."""

    def __call__(self, sealed: bytes) -> Any:
        return unseal(sealed)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return eval, ("__import__('pickle').loads",)


_UNSEAL = _Unseal()


def sealed_task(key: str, function: Callable[..., Any], *arguments: Any) -> Delayed:
    """A task of which the scheduler sees nothing but its key and what it depends on."""
    return call_unsealed(key, seal(function), *arguments)


def call_unsealed(key: str, function: bytes, *arguments: Any, waits_for_thread: bool = False) -> Delayed:
    """The same with a function that was sealed before, once for many tasks.

    One that ``waits_for_thread`` goes to whichever worker has a thread to spare first, wherever its arguments are. Dask
    guesses which tasks should; the others are dealt out at once, and a worker that is slow keeps what it was given.
    """
    tasks: Any = [one for one in arguments if isinstance(one, Delayed)]
    given = (TaskRef(one.key) if isinstance(one, Delayed) else one for one in arguments)
    call = Task(key, operator.call, Task(None, _UNSEAL, function), *given, _data_producer=waits_for_thread)
    graph: Any = {key: call}
    return Delayed(key, HighLevelGraph.from_collections(key, graph, dependencies=tasks))


class Graph(dict[Any, Any]):
    """Tasks by their keys, which arrive elsewhere in a plain dictionary."""

    def __reduce__(self) -> tuple[type[dict], tuple[dict[Any, Any]]]:
        return dict, (dict(self),)


@normalize_token.register(Graph)
def _any_name(graph: Graph) -> str:
    """Dask names a graph by all that is in it, which nobody asks for."""
    return uuid.uuid4().hex


def constant(value: Any, name: str) -> Delayed:
    """A value as a task argument, not looked into by Dask."""
    return delayed(value, name=name, traverse=False)
