"""Jobs on a real GPU: killed, and on workers of which some have none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, Nanny, Scheduler, SpecCluster
from scenes import digest, make_points, reference, run, score_command, started, until

import daskrr
from daskrr.errors import SourceUnreachable
from daskrr.jobs import reader
from daskrr.jobs.verification import verify
from daskrr.kernels import Gaussian
from daskrr.runtime.devices import usable_gpu
from daskrr.storage.output import Output

pytestmark = pytest.mark.gpu


MOMENTS = {"in pass 1": lambda told: any(told["summed"].values()), "in pass 2": lambda told: told["scored"]}


@pytest.mark.parametrize("came", MOMENTS.values(), ids=MOMENTS)
def test_job__that_is_killed_goes_on_to_the_same_bits(came: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    points, output = make_points(tmp_path / "points.zarr", 60_000), tmp_path / "out.zarr"
    with started(score_command(points, output, "--device", "cuda")) as process:
        until(lambda: Output(output).is_begun and any(map(came, reader.status(output)["unfinished"])), process)
    run(score_command(points, output, "--device", "cuda"))
    assert digest(output) == reference(points, tmp_path, device="cuda")
    assert verify(output) == []


@contextmanager
def one_of_two_with_a_gpu() -> Iterator[Client]:
    options = [{"nthreads": 1, "env": {"CUDA_VISIBLE_DEVICES": seen}} for seen in ("0", "")]
    scheduler = {"cls": Scheduler, "options": {"dashboard_address": None}}
    workers = {number: {"cls": Nanny, "options": one} for number, one in enumerate(options)}
    with SpecCluster(workers, scheduler) as cluster, Client(cluster) as client:
        client.wait_for_workers(2)
        yield client


def test_workers__of_which_one_has_none_are_refused_or_all_compute_on_processors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    X = np.random.default_rng(0).standard_normal((500, 3))
    with one_of_two_with_a_gpu() as client:
        without = [address for address, gpu in client.run(usable_gpu).items() if gpu is None]
        assert len(without) == 1
        with pytest.raises(SourceUnreachable, match=f"1 workers have none: {without[0]}"):
            daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, 20, device="cuda", progress=False)
        found = daskrr.leverage_scores(X, Gaussian(1.0), 1e-2, 20, device="auto", progress=False)
    assert found.summary["workers"]["device"] == "cpu"
    assert "1 of 2 workers have a GPU" in caplog.text
