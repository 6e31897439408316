"""A job that was stopped for longer than its lease, and wakes when another has its output: it changes nothing there."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest
from scenes import (
    DASKRR,
    digest,
    ended,
    everything,
    family,
    make_points,
    n_receipts,
    n_sums,
    reference,
    run,
    score_command,
    started,
    until,
)

from daskrr.jobs import reader, verification
from daskrr.storage.output import Output

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LEASE_SECONDS = 5
# A heartbeat, and as long as a busy machine may take to end a process and its workers.
PROMPT = 30.0
SETTINGS = {"DASK_DASKRR__LEASE_TIME": f"{LEASE_SECONDS}s"}
N_ROWS = 40_000
# What the driver is about to name when it is stopped.
NAMED = {
    "sampling": r"/landmarks-[^/]*\.record$",
    "manifest": r"/manifest\.record\+versions/0*1$",
    "commit": r"/commit\.record\+versions/0*2$",
    "copy of the commit": r"/commit-copy\.record",
    "plain paths": r"/generations/published$",
}
# What the workers have done of a pass when it is stopped.
REACHED: dict[str, Callable[[Path], bool]] = {
    "pass 1": lambda output: n_sums(output) > 0,
    "pass 2": lambda output: n_receipts(output) > 3,
}


@dataclass(frozen=True)
class Stopped:
    """A job that is stopped in the middle of its work."""

    process: Popen[str]
    workers: list[psutil.Process]
    generation: str

    def wake(self) -> None:
        """Have it go on, with its workers."""
        for one in [*self.workers, psutil.Process(self.process.pid)]:
            one.resume()


def is_stopped(process: Popen[str]) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


@contextmanager
def stopped_in(phase: str, points: Path, output: Path, whole_group: bool) -> Iterator[Stopped]:
    """A job that was stopped in a phase; one that had got further starts again."""
    program = (sys.executable, str(Path(__file__).with_name("exits.py")), NAMED.get(phase, "never"), str(output))
    command = score_command(points, output, program=program)
    while True:
        shutil.rmtree(output, ignore_errors=True)
        with started(command, start_new_session=True, env=os.environ | SETTINGS) as process:
            if phase in NAMED:
                until(lambda process=process: is_stopped(process), process)
            else:
                until(lambda: REACHED[phase](output), process)
                process.send_signal(signal.SIGSTOP)
                until(lambda process=process: is_stopped(process), process)
            workers = family(process.pid) if whole_group else []
            for one in workers:
                one.suspend()
            if not output.joinpath("zarr.json").exists() and (phase in NAMED or is_within(phase, output)):
                (generation,) = {path.parent.name for path in output.glob(".daskrr/records/*/job.record")}
                yield Stopped(process, workers, generation)
                return


def is_within(phase: str, output: Path) -> bool:
    """Whether a pass is not over yet."""
    return n_receipts(output) < (1 if phase == "pass 1" else N_ROWS // 500)


def following(points: Path, output: Path, *more: str) -> Any:
    """Another job that waits for the output, as long as the one that is stopped has its lease."""
    return started(score_command(points, output, "--wait", *more), env=os.environ | SETTINGS)


def ends_with_its_lease_lost(stopped: Stopped) -> None:
    """It was stopped until now, and ends soon after it goes on."""
    began = time.monotonic()
    assert is_stopped(stopped.process)
    stopped.wake()
    _, complaints = ended(stopped.process, 5)
    print(f"it ended {time.monotonic() - began:.1f} s after it went on")
    assert "no longer owns" in complaints
    assert "Traceback" not in complaints
    assert time.monotonic() - began < PROMPT


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Points, and digests of undisturbed runs by seed."""
    folder = tmp_path_factory.mktemp("scene")
    points = make_points(folder / "points.zarr", n_rows=N_ROWS)
    found = {}
    for seed in ("0", "1"):
        shutil.rmtree(folder / "reference.zarr", ignore_errors=True)
        found[seed] = reference(points, folder, random_state=int(seed))
    assert found["0"] != found["1"]
    return points, found


CASES = [("sampling", "1", False), ("manifest", "0", False), ("commit", "1", False)]
CASES += [("copy of the commit", "1", False), ("plain paths", "1", False)]
CASES += [("pass 1", "1", True), ("pass 2", "0", True)]


@pytest.mark.parametrize(("phase", "seed", "whole_group"), CASES)
def test_job__that_wakes_after_another_has_published_touches_nothing(
    phase: str, seed: str, whole_group: bool, scene: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """The other goes on with the same job (seed 0), or replaces it (seed 1)."""
    points, expected = scene
    output = tmp_path / "out.zarr"
    with stopped_in(phase, points, output, whole_group) as first:
        with following(points, output, "--seed", seed, *(["--overwrite"] if seed == "1" else [])) as second:
            ended(second, 0)
        assert digest(output) == expected[seed]
        assert verification.verify(output) == []
        before, commit = everything(output), Output(output).commit
        assert (commit.current == first.generation) == (seed == "0")
        ends_with_its_lease_lost(first)
    after = everything(output)
    assert {path: after.get(path) for path in before} == before
    assert all(first.generation in path for path in set(after) - set(before)), set(after) - set(before)
    assert Output(output).commit == commit
    assert digest(output) == expected[seed]
    assert verification.verify(output) == []
    # What a worker of the first may have written late is cleared by the next who holds the output.
    run([*DASKRR, "verify", "--repair", str(output)])
    assert digest(output) == expected[seed]


def other_receipts(output: Path, generation: str) -> list[Path]:
    """Of what another generation has scored."""
    found = output.glob(".daskrr/records/*/receipts/*.record")
    return [path for path in found if path.parent.parent.name != generation]


@pytest.mark.parametrize("phase", ["sampling", "pass 2", "commit"])
def test_job__that_wakes_while_another_is_at_work_does_not_disturb_it(
    phase: str, scene: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    points, expected = scene
    output = tmp_path / "out.zarr"
    with (
        stopped_in(phase, points, output, whole_group=phase in REACHED) as first,
        following(points, output, "--seed", "1", "--overwrite") as second,
    ):
        until(lambda: other_receipts(output, first.generation), second)
        ends_with_its_lease_lost(first)
        ended(second, 0)
    assert digest(output) == expected["1"]
    assert verification.verify(output) == []
    assert reader.status(output)["unfinished"] == []
