"""What is sealed passes through Dask as plain bytes."""

import pickle
from typing import Any

from dask.tokenize import tokenize
from distributed.protocol import dask_deserialize, dask_serialize
from distributed.protocol.pickle import dumps, loads

from daskrr.runtime.sealing import Graph, call_unsealed, seal, sealed_task, unseal


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


def double(number: int) -> int:
    return 2 * number


def test_task__names_no_module_of_ours_once_it_was_sent() -> None:
    task = call_unsealed("double", seal(double), 3)
    (node,) = loads(dumps(Graph(task.dask))).values()
    assert b"daskrr" not in pickle.dumps(node).replace(seal(double), b"")
    assert node({}) == task.compute(scheduler="synchronous") == 6


def test_task__in_this_process_is_given_the_very_content() -> None:
    ran: list[int] = []
    sealed_task("append", ran.append, 3).compute(scheduler="synchronous")
    assert ran == [3]


def test_graph__has_any_name_and_arrives_as_a_plain_dictionary() -> None:
    graph = Graph(a=1)
    assert tokenize(graph) != tokenize(graph)
    assert type(pickle.loads(pickle.dumps(graph))) is dict
