"""The process that drives a job is killed, ends at any moment or is asked to stop; its job goes on to the same bits."""

import itertools
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from distributed import Client
from exits import EXIT, exit_before
from processes import running, stop_when, stopped
from scenes import (
    GENEROUS,
    cluster,
    digest,
    digest_of_readers,
    ended,
    family,
    is_alive,
    make_points,
    n_receipts,
    n_sums,
    reference,
    run,
    score_command,
    score_here,
    started,
    until,
)

import daskrr
from daskrr.errors import InvalidData
from daskrr.jobs import reader, verification
from daskrr.storage.output import Output

NAMES = ("estimate", "lower", "residual", "scores", "upper")
PUBLISHED = sorted([".daskrr", *NAMES, "sketch", "zarr.json"])


@contextmanager
def watched(output: Path) -> Iterator[list[str]]:
    """A reader that tries all the time; digests of all that it could read."""
    seen: list[str] = []
    leave = threading.Event()

    def look() -> None:
        while not leave.wait(0.01):
            with suppress(InvalidData, FileNotFoundError):
                seen.append(digest_of_readers(output))

    reader = threading.Thread(target=look)
    reader.start()
    try:
        yield seen
    finally:
        leave.set()
        reader.join()


# --- Row 6: SIGKILL -----------------------------------------------------------------------------------


def score_small(points: Path, output: Path) -> None:
    score_here(points, output)


def is_killed(holds: Callable[[], bool], points: Path, output: Path) -> bool:
    """Kill a driver while something holds; False if it had ended by itself before, or all but."""
    with running(score_small, points, output) as process:
        until(lambda: holds() or not process.is_alive())
        process.kill()
        process.join(GENEROUS)
        assert process.exitcode in (-signal.SIGKILL, 0)
        return process.exitcode != 0 and holds()


def attempts(folder: Path, name: str = "attempt") -> Iterator[Path]:
    """An output for each time that a job is started anew, since it had ended before its kill."""
    return (folder / f"{name}-{number}.zarr" for number in itertools.count())


@pytest.mark.slow
def test_kill__of_a_driver_at_two_moments_and_going_on_gives_the_same_bits(tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr")
    expected = reference(points, tmp_path)
    for output in attempts(tmp_path):
        with watched(output) as seen:
            if not is_killed(lambda output=output: n_sums(output) > 0, points, output):
                continue
            assert reader.status(output)["unfinished"]
            if not is_killed(lambda output=output: n_receipts(output) > 10, points, output):
                continue
            assert reader.status(output)["unfinished"]
            assert not seen
            score_here(points, output)
            until(lambda seen=seen: seen)
            break
    assert set(seen) == {expected}
    assert digest(output) == expected


def moments(seed: int, duration: float) -> list[tuple[str, float]]:
    """When to kill: a random time after the start, after the first record, or after all rows were scored."""
    dice = random.Random(seed)
    longest = {"start": 0.3 * duration, "record": 0.6 * duration, "publish": 0.02}
    kinds = ["start", "record", "record", "record", "publish", "publish"]
    return [(kind, dice.uniform(0.0, longest[kind])) for kind in kinds]


def wait_for(kind: str, output: Path, process: subprocess.Popen[str]) -> None:
    """Until the process has started, has begun its job, or is about to publish it."""
    name = {"start": "*", "record": f"{output.name}/.daskrr/records/*/job.record"}
    pattern = name.get(kind, f"{output.name}/.daskrr/records/*/manifest.record*")
    while process.poll() is None and not any(output.parent.glob(pattern)):
        pass


def killed(kind: str, delay: float, command: list[str], output: Path, whole_group: bool) -> dict[str, int] | None:
    """Kill a command at a moment of its life; how far it was, or None if it had ended before."""
    with started(command, start_new_session=True) as process:
        wait_for(kind, output, process)
        time.sleep(delay)
        children = family(process.pid)
        if stopped(process, whole_group=whole_group) is None:
            return None
        until(lambda: not any(map(is_alive, children)))
    commit = Output(output).commit
    committed = commit is not None and commit.current is not None
    return {"sums": n_sums(output), "receipts": n_receipts(output), "committed": committed, "workers": len(children)}


def go_on(points: Path, output: Path, by_command: bool) -> None:
    if by_command:
        run(score_command(points, output))
    else:
        score_here(points, output)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kill__of_the_command_at_six_random_moments_gives_the_same_bits(tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr")
    expected = reference(points, tmp_path)
    began = time.monotonic()
    run(score_command(points, tmp_path / "undisturbed.zarr"))
    assert digest(tmp_path / "undisturbed.zarr") == expected
    fired = []
    for number, (kind, delay) in enumerate(moments(0, time.monotonic() - began)):
        for output in attempts(tmp_path, str(number)):
            with watched(output) as seen:
                state = killed(kind, delay, score_command(points, output), output, whole_group=bool(number % 2))
                if state is not None:
                    assert state["committed"] or not seen
                    go_on(points, output, by_command=number % 5 == 0)
                    until(lambda seen=seen: seen)
                    break
            delay /= 2
        fired.append(state)
        assert set(seen) == {expected}, (number, kind, delay)
        assert digest(output) == expected
        assert sorted(path.name for path in output.iterdir()) == PUBLISHED
        shutil.rmtree(output)
    print(*fired, sep="\n")
    assert len(fired) == 6
    assert sum(state["workers"] > 0 for state in fired) >= 3
    # Receipts go once the scores are published.
    assert sum(state["receipts"] > 0 or state["committed"] for state in fired) >= 2


# --- Row 7: the end before and after every change on the disk -----------------------------------------


def score_tiny(points: Path, output: Path) -> None:
    score_here(points, output, block_rows=50)


def score_until(number: int, points: Path, output: Path) -> None:
    exit_before(number, str(output))
    score_tiny(points, output)


def exits(number: int, points: Path, output: Path) -> bool:
    """Whether a process that is to end before its n-th change of the output did, or got to the end before."""
    with running(score_until, number, points, output) as process:
        process.join(GENEROUS)
        assert process.exitcode in (EXIT, 0)
        return process.exitcode == EXIT


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [97, 5])
def test_exit__before_and_after_changes_on_the_disk_can_be_gone_on_from(step: int, tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr", n_rows=100, chunk_rows=50)
    expected = reference(points, tmp_path, block_rows=50)
    number = early = 0
    while exits(number, points, output := tmp_path / f"{number}.zarr"):
        try:
            assert digest_of_readers(output) == expected
        except InvalidData:
            early += 1
        score_tiny(points, output)
        assert digest(output) == expected, number
        assert verification.verify(output) == []
        assert sorted(path.name for path in output.iterdir()) == PUBLISHED
        shutil.rmtree(output)
        number += step
    print(f"{number // step} moments, {early} of them before the commit")
    assert digest(output) == expected
    assert number > 150
    assert early > 100 / step


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_exit__of_the_command_at_some_of_its_changes_can_be_gone_on_from(tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr", n_rows=3000)
    expected = reference(points, tmp_path)
    for number in (0, 15, 30, 45, 55):
        output = tmp_path / f"{number}.zarr"
        program = (sys.executable, str(Path(__file__).with_name("exits.py")), str(number), str(output))
        with started(score_command(points, output, program=program)) as process:
            ended(process, EXIT)
        score_here(points, output)
        assert digest(output) == expected, number
        assert verification.verify(output) == []


# --- Row 8: tasks of a dead driver that still write ---------------------------------------------------


@pytest.mark.slow
def test_zombies__of_a_killed_driver_do_not_harm_the_run_that_follows_at_once(tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr")
    expected = reference(points, tmp_path)
    output = tmp_path / "out.zarr"
    with cluster(tmp_path) as there, Client(there.address, set_as_default=False) as client:
        command = score_command(points, output, "--cluster", there.address)
        stop_when(lambda: n_receipts(output) > 3, lambda: started(command), output)
        before = n_receipts(output)
        assert not (output / "zarr.json").exists()
        with client.as_current():
            score_here(points, output)
        assert 3 < before < 40
    assert digest(output) == expected
    assert verification.verify(output) == []


def half_written(output: Path) -> set[str]:
    """Numbers of blocks of which some arrays have their chunk, and some have not."""
    found = [{path.name for path in output.glob(f".daskrr/generations/0*/{name}/c/[0-9]*")} for name in NAMES]
    return {name for name in set.union(*found) - set.intersection(*found) if name.isdecimal()}


def is_within_a_block(worker: subprocess.Popen[str], output: Path) -> bool:
    """Stop a worker if it writes the chunks of a block; whether it has not written all of them."""
    if not half_written(output):
        return False
    worker.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
    if half_written(output):
        return True
    worker.send_signal(signal.SIGCONT)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_zombies__that_write_after_the_commit_change_nothing(seed: int, tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr")
    expected = reference(points, tmp_path, random_state=seed)
    output = tmp_path / "out.zarr"
    with cluster(tmp_path, n_workers=1) as there:
        (worker,) = there.workers
        command = score_command(points, output, "--cluster", there.address)
        stop_when(lambda: is_within_a_block(worker, output), lambda: started(command), output)
        block = half_written(output).pop()
        (folder,) = output.glob(".daskrr/generations/0*")
        score_here(points, output, random_state=seed, overwrite=seed != 0)
        assert digest(output) == expected
        # What a stopped writer has not renamed yet stays where it is.
        left = [path.name for path in folder.rglob("*") if path.is_file() and "+" not in path.name]
        assert bool(left) == (seed == 0), left
        began = time.time_ns()
        worker.send_signal(signal.SIGCONT)
        until(lambda: any(path.stat().st_mtime_ns >= began for path in folder.glob(f"*/c/{block}")))
    assert digest(output) == expected
    assert verification.verify(output) == []
    assert reader.status(output)["unfinished"] == []
    score_here(points, output, random_state=seed, certify=False, overwrite=True)
    assert daskrr.open_scores(output).keys() == ["estimate", "residual", "scores"]
    assert verification.verify(output) == []


# --- Rows 9 and 10: asked to stop ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("stage", ["pass 1", "pass 2"])
def test_stopping__ends_soon_and_leaves_no_process_behind(
    stage: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    points = make_points(tmp_path / "points.zarr", n_rows=40_000)
    output = tmp_path / "out.zarr"
    is_reached = {"pass 1": lambda pid: len(family(pid)) >= 2, "pass 2": lambda _: n_receipts(output) > 3}[stage]
    complaints = None
    while complaints is None:
        shutil.rmtree(output, ignore_errors=True)
        with started(score_command(points, output, "--workers", "2"), start_new_session=True) as process:
            wait_for("record", output, process)
            until(lambda process=process: process.poll() is not None or is_reached(process.pid))
            children = family(process.pid)
            began = time.monotonic()
            # A terminal interrupts the whole group.
            complaints = stopped(process, number, code, whole_group=number == signal.SIGINT)
            took = time.monotonic() - began
            until(lambda children=children: not any(map(is_alive, children)), seconds=30)
    assert len(children) >= 2
    # Ten seconds, and what other programs on the machine may add.
    assert took < 30.0
    assert "Traceback" not in complaints
    about = reader.status(output)
    assert about["published"] is None
    assert len(about["unfinished"]) == 1
    assert not about["lease"]["held"]
    score_here(points, output)
    assert digest(output) == reference(points, tmp_path)


SESSION = """
import sys; sys.path[:0] = {paths!r}
from pathlib import Path
from contextlib import nullcontext
from scenes import score_here
from daskrr.apps.clusters import connect

def score(points, output):
    with {where}:
        return score_here(Path(points), Path(output))["n_rows"]

print("ready", flush=True)
score({points!r}, {output!r})
print(f"afterwards {{score({small!r}, {small!r} + '-scores')}} rows", flush=True)
"""


def mind_interrupts() -> None:
    """A shell has what it starts in the background ignore them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["nullcontext()", "connect(workers=1)"])
def test_interrupt__leaves_an_interactive_python_usable(where: str, tmp_path: Path) -> None:
    points = make_points(tmp_path / "points.zarr", n_rows=100_000)
    small = make_points(tmp_path / "small.zarr", n_rows=1000)
    output = tmp_path / "out.zarr"
    folder = Path(__file__).parent
    lines = SESSION.format(
        paths=[str(folder), str(folder.parent / "helpers")],
        where=where,
        points=str(points),
        output=str(output),
        small=str(small),
    )
    with started([sys.executable, "-i", "-q"], stdin=subprocess.PIPE, preexec_fn=mind_interrupts) as process:
        process.stdin.write(lines)
        process.stdin.flush()
        until(lambda: n_receipts(output) > 3, process)
        process.send_signal(signal.SIGINT)
        text, complaints = process.communicate(timeout=GENEROUS)
    assert "KeyboardInterrupt" in complaints
    assert "afterwards 1000 rows" in text, complaints
    assert process.returncode == 0
    assert reader.status(output)["published"] is None
    assert 3 < reader.status(output)["unfinished"][0]["scored"] < 200
