"""Processes of their own for tests that race them, kill them and stop them; everything a test starts, it ends.

They are forked from a server that has imported what they need, so that a process costs milliseconds.
"""

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from daskrr import machine
from daskrr.errors import LeaseHeld, LeaseLost
from daskrr.storage.lease import Lease
from daskrr.storage.records import Records

GENEROUS = 120
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "daskrr.jobs", "daskrr.storage.lease", "obstore.store"])
ENVIRONMENT = ("AWS_", "NO_PROXY", "no_proxy")


@contextlib.contextmanager
def running(work: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A process that does ``work``; it is killed at the end, whatever it does."""
    settings = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}
    process = CONTEXT.Process(target=_enter, args=(settings, work, arguments))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(GENEROUS)


def _enter(settings: dict[str, str], work: Callable[..., None], arguments: tuple) -> None:
    os.environ.update(settings)
    work(*arguments)


def end_soon(*pids: int) -> bool:
    """Whether processes that were killed are gone, for which a busy machine takes its time."""
    deadline = time.monotonic() + GENEROUS
    while not all(map(machine.is_gone, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def stopped(
    process: subprocess.Popen[str], number: int = signal.SIGKILL, code: int = -signal.SIGKILL, whole_group: bool = False
) -> str | None:
    """What a process complained of that a signal ended with ``code``; None if it had ended by itself before."""
    if process.poll() is None:
        os.kill(-process.pid if whole_group else process.pid, number)
    complaints = process.communicate(timeout=GENEROUS)[1]
    assert process.returncode in (code, 0), f"exit code {process.returncode}: {complaints}"
    return complaints if process.returncode == code else None


def stop_when(
    holds: Callable[[], Any],
    start: Callable[[], contextlib.AbstractContextManager[subprocess.Popen[str]]],
    output: Path,
    number: int = signal.SIGKILL,
    code: int = -signal.SIGKILL,
) -> None:
    """Stop a job while something holds; one that ended by itself, or all but, loses its output and starts again."""
    while True:
        with start() as process:
            while process.poll() is None and not holds():
                time.sleep(0.005)
            if stopped(process, number, code) is not None and holds():
                return
        shutil.rmtree(output)


def race(work: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """What ``count`` processes return that call ``work(barrier, *arguments)`` at the same time."""
    barrier, answers = CONTEXT.Barrier(count, timeout=GENEROUS), CONTEXT.Queue()
    with contextlib.ExitStack() as stack:
        for place in range(count):
            stack.enter_context(running(_race, answers, place, work, barrier, *arguments))
        found = dict(answers.get(timeout=GENEROUS) for _ in range(count))
        return [found[place] for place in range(count)]


def _race(answers: Any, place: int, work: Callable[..., Any], *arguments: Any) -> None:
    answers.put((place, work(*arguments)))


def _start(barrier: Any) -> None:
    """Go with the others, but for a moment: on a quiet machine the same one would always be first."""
    barrier.wait()
    time.sleep(0.002 * random.random())


def create_each(barrier: Any, root: str, rounds: int) -> list[bool]:
    records, won = Records(root), []
    for number in range(rounds):
        _start(barrier)
        won.append(records.create(f"round-{number}", {"pid": os.getpid()}))
    return won


def replace_each(barrier: Any, root: str, rounds: int) -> list[bool]:
    records, won = Records(root), []
    for _ in range(rounds):
        content, version = records.read_version("shared")
        _start(barrier)
        won.append(records.replace("shared", {"count": content["count"] + 1}, version))
        _start(barrier)
    return won


def count_up(barrier: Any, root: str, rounds: int) -> int:
    """Add 1 until it worked ``rounds`` times, with no regard for the others."""
    records, done = Records(root), 0
    _start(barrier)
    while done < rounds:
        content, version = records.read_version("shared")
        done += records.replace("shared", {"count": content["count"] + 1}, version)
    return done


def write_forever(root: str, size: int) -> None:
    records = Records(root)
    number = records.read("data")["number"]
    while True:
        number += 1
        records.write("data", {"number": number, "array": np.full(size, float(number))})


def replace_forever(root: str) -> None:
    records = Records(root)
    while True:
        content, version = records.read_version("data")
        assert records.replace("data", {"number": content["number"] + 1, "array": content["array"] + 1}, version)


def acquire_each(barrier: Any, root: str, rounds: int) -> list[int]:
    """Generations that this process was given, 0 where the other was faster."""
    generations = []
    for number in range(rounds):
        lease = Lease(Records(f"{root}/{number % 2}"))
        _start(barrier)
        try:
            generations.append(lease.acquire())
        except LeaseHeld:
            generations.append(0)
        _start(barrier)
        lease.release()
    return generations


def hold(root: str, seconds: float, told: Any, leave: Any) -> None:
    """Hold a lease until told to leave; tell its generation, or how it was lost."""
    with Lease(Records(root), seconds=seconds) as lease:
        told.put(lease.generation)
        try:
            while not leave.is_set():
                lease.check()
                time.sleep(0.01)
        except LeaseLost as error:
            told.put(str(error))
