"""What is sealed passes through Dask as plain bytes."""

from typing import Any

from distributed.protocol import dask_deserialize, dask_serialize
from distributed.protocol.pickle import dumps, loads

from daskrr.runtime.sealing import seal, unseal


class OnlyForDask:
    """What pickle and cloudpickle refuse, so that Dask's own pickler has to do."""

    def __reduce__(self) -> tuple:
        raise TypeError("no pickle")


@dask_serialize.register(OnlyForDask)
def _to_frames(_: OnlyForDask) -> tuple[dict[str, Any], list[bytes]]:
    return {}, []


@dask_deserialize.register(OnlyForDask)
def _from_frames(header: dict[str, Any], frames: list[bytes]) -> OnlyForDask:
    return OnlyForDask()


def test_seal__is_pickled_by_dask_without_recursion() -> None:
    sent = dumps((OnlyForDask(), seal({"some": "content"})))
    other, sealed = loads(sent)
    assert (type(other), type(sealed), unseal(sealed)) == (OnlyForDask, bytes, {"some": "content"})
