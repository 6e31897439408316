"""Output on an S3 store whose changes are seen late: the same bits or an error, and never half of them."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zarr
from damage import NAMES, points, score, shorten_pauses, stored
from stores import LateProxy

import daskrr
from daskrr.errors import DaskrrError
from daskrr.jobs.verification import verify
from daskrr.storage.zarr_arrays import zarr_store

SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(6)]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Rows, some of them and all, and their scores."""
    folder = tmp_path_factory.mktemp("reference")
    some, all_rows = (stored(folder / f"{n}", points(300)[:n]) for n in (250, 300))
    score(some, folder / "out.zarr")
    old = seen(str(folder / "out.zarr"))
    daskrr.update_scores(all_rows, folder / "out.zarr", progress=False)
    return some, all_rows, old, seen(str(folder / "out.zarr"))


def seen(output: str) -> dict[str, bytes]:
    store = daskrr.open_scores(output)
    return {name: store[name][...].tobytes() for name in NAMES}


def by_plain_paths(output: str) -> dict[str, bytes]:
    group = zarr.open_group(zarr_store(output), mode="r")
    return {name: np.asarray(group[name][...]).tobytes() for name in NAMES}


@pytest.fixture
def server(bucket: str) -> str:
    return os.environ["AWS_ENDPOINT_URL"]


@pytest.fixture
def late(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateProxy]:
    seed = request.getfixturevalue("seed")
    how = ({"longest": 12}, {"longest": 60}, {"longest": 1000, "lists_only": True})[seed % 3]
    with LateProxy(server, seed=seed, **how) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


def tried(work: Any) -> DaskrrError | None:
    """The named error that something ends with, if it does."""
    try:
        work()
    except DaskrrError as error:
        return error
    return None


@pytest.mark.parametrize("seed", SEEDS)
def test_late_store__gives_the_same_bits_or_a_named_error(
    seed: int, late: LateProxy, server: str, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, all_rows, old, new = reference
    output = f"s3://points/late-{seed}/out.zarr"
    for job, allowed in (
        (lambda: score(some, output), [old]),
        (lambda: daskrr.update_scores(all_rows, output, progress=False), [old, new]),
    ):
        error = tried(job)
        found: list[Any] = []
        tried(lambda found=found: found.append(seen(output)))
        assert not found or found[0] in allowed
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", server)
            if error is None:
                assert seen(output) == by_plain_paths(output) == allowed[-1]
                assert verify(output) == []
            job()
            assert seen(output) == by_plain_paths(output) == allowed[-1]
            assert verify(output) == []
        print(f"{type(error).__name__}: {error}; {late.late} of {late.requests} requests were answered late")
    # Which ones are late depends on the names of generations, and so on chance.
    assert late.late
