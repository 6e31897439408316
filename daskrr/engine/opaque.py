"""Functions and objects that travel through a scheduler unopened.

A Dask scheduler unpickles every graph that it receives, so it needs each module that a task names. Tasks of daskrr name
none: what is daskrr's own is a string of bytes that only the worker opens. A scheduler without daskrr can run them.
"""

import pickle
from typing import Any

import cloudpickle


class _Sealed(bytes):
    """Pickled bytes that keep what they were made of alive in this process, and arrive elsewhere as plain bytes."""

    content: Any

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(self),)


def seal(content: Any) -> bytes:
    """Pickle ``content``; it lives at least as long as the result does."""
    sealed = _Sealed(cloudpickle.dumps(content))
    sealed.content = content
    return sealed


def unseal(sealed: bytes) -> Any:
    """The content of :func:`seal`."""
    return sealed.content if isinstance(sealed, _Sealed) else pickle.loads(sealed)


# A lambda, because cloudpickle sends functions without a name by value, so that no module of ours is needed to load it.
call_sealed = lambda function, *arguments: (  # noqa: E731
    function.content if hasattr(function, "content") else __import__("pickle").loads(function)
)(*arguments)
