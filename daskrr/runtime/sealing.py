"""Functions and objects that travel through a scheduler unopened.

A Dask scheduler unpickles every graph that it receives, so it needs each module that a task names. Tasks of daskrr name
none: what is daskrr's own is a string of bytes that only the worker opens. A scheduler without daskrr can run them.
"""

import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
from dask.delayed import Delayed, delayed
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


# A lambda, because cloudpickle sends functions without a name by value, so that no module of ours is needed to load it.
call_sealed = lambda function, *arguments: (  # noqa: E731
    function.content if hasattr(function, "content") else __import__("pickle").loads(function)
)(*arguments)


def sealed_task(key: str, function: Callable[..., Any], *arguments: Any) -> Delayed:
    """A task of which the scheduler sees nothing but its key and what it depends on."""
    return call_unsealed(key, seal(function), *arguments)


def call_unsealed(key: str, function: bytes, *arguments: Any) -> Delayed:
    """The same with a function that was sealed before, once for many tasks."""
    return delayed(call_sealed, pure=False, traverse=False)(function, *arguments, dask_key_name=key)


def constant(value: Any, name: str) -> Delayed:
    """A value as a task argument, not looked into by Dask."""
    return delayed(value, name=name, traverse=False)
