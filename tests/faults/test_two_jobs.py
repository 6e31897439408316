"""Two jobs on one output: one works and the other is told so, until the one is dead."""

import contextlib
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from processes import race, stop_when
from scenes import digest, ended, make_points, n_receipts, reference, run, score_command, score_here, started, until

from daskrr.apps.cli.telling import failure
from daskrr.errors import DaskrrError
from daskrr.jobs import reader
from daskrr.runtime.progress import Event

# --- Row 22: started together -------------------------------------------------------------------------


ROUNDS = 50


def score_each(barrier: Any, points: Path, folder: Path, rounds: int) -> list[int]:
    """Exit codes of jobs that start together with another's; whoever wins goes on only when the other has ended."""
    codes = []
    for number in range(rounds):
        other_ended = _Once(barrier)
        barrier.wait()
        try:
            score_here(points, folder / f"{number}.zarr", progress=other_ended)
            codes.append(0)
        except Exception as error:
            codes.append(failure(error)[1])
        other_ended()
        barrier.wait()
    return codes


class _Once:
    """Meet the other process once, at the first event of a job or at its end."""

    def __init__(self, barrier: Any) -> None:
        self._barrier, self._met = barrier, False

    def __call__(self, event: Event | None = None) -> None:
        if not self._met:
            self._met = True
            self._barrier.wait()


@pytest.mark.slow
def test_jobs__started_together_have_one_winner_and_the_other_exits_with_5(tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr", n_rows=1000)
    expected = reference(points, tmp_path)
    codes = list(zip(*race(score_each, 2, points, tmp_path, ROUNDS), strict=True))
    assert [sorted(pair) for pair in codes] == [[0, 5]] * ROUNDS
    assert {digest(tmp_path / f"{number}.zarr") for number in range(ROUNDS)} == {expected}
    print(f"the first process won {sum(pair[0] == 0 for pair in codes)} of {ROUNDS}")


@pytest.mark.slow
def test_commands__started_together_have_one_winner_and_the_other_exits_with_5(tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr", n_rows=50_000)
    expected = reference(points, tmp_path)
    for number in range(3):
        output = tmp_path / f"{number}.zarr"
        command = score_command(points, output)
        with started(command) as one, started(command) as other:
            holder = until(lambda output=output: holder_of(output))
            winner, loser = (one, other) if one.pid == holder else (other, one)
            winner.send_signal(signal.SIGSTOP)  # however long the other takes to begin
            _, complaints = ended(loser, 5)
            assert f"process {winner.pid} on " in complaints
            winner.send_signal(signal.SIGCONT)
            ended(winner, 0)
        assert digest(output) == expected
        shutil.rmtree(output)


def holder_of(output: Path) -> int | None:
    """The process that works on an output, if there is one."""
    with contextlib.suppress(DaskrrError):  # nothing is there yet
        lease = reader.status(output)["lease"]
        return lease["pid"] if lease and lease["held"] else None
    return None


# --- Row 23: a holder that is dead --------------------------------------------------------------------

ELSEWHERE = ("unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh")


def killed_within(command: list[str], output: Path) -> None:
    """Run a job, and kill it when it has scored some blocks."""
    stop_when(lambda: n_receipts(output) > 3, lambda: started(command), output)
    assert reader.status(output)["lease"]["held"]


@pytest.mark.slow
def test_lease__of_a_dead_job_on_this_host_is_taken_over_at_once(tmp_path: Path) -> None:
    points, output = make_points(tmp_path / "points.zarr", n_rows=40_000), tmp_path / "out.zarr"
    killed_within(score_command(points, output), output)
    assert reader.status(output)["lease"]["dead"]
    run(score_command(points, output))
    assert digest(output) == reference(points, tmp_path)


@pytest.mark.slow
def test_lease__of_a_dead_job_on_another_host_is_taken_over_after_its_time_and_not_before(tmp_path: Path) -> None:
    if subprocess.run([*ELSEWHERE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("another host cannot be made up here")
    points, output = make_points(tmp_path / "points.zarr", n_rows=40_000), tmp_path / "out.zarr"
    killed_within([*ELSEWHERE, *score_command(points, output)], output)
    about = reader.status(output)["lease"]
    assert (about["host"], about["dead"], about["seconds"]) == ("elsewhere", False, 60.0)
    _, complaints = run(score_command(points, output), 5)
    assert "on elsewhere" in complaints
    began = time.monotonic()
    score_here(points, output, wait=True)
    took = time.monotonic() - began
    print(f"taken over after {took:.1f} s")
    assert 60.0 < took < 120.0
    assert digest(output) == reference(points, tmp_path)
