"""One job at a time: among processes that start together, die, are stopped, or live on another host."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import CONTEXT, GENEROUS, acquire_each, hold, race, running

from daskrr.engine import lease as module
from daskrr.engine.lease import Holder, Lease, describe
from daskrr.engine.records import Records
from daskrr.errors import DamagedRecord, InvalidParameter, LeaseHeld, LeaseLost


@pytest.fixture
def lively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats that are frequent for leases that are long, so that a busy machine loses none."""
    monkeypatch.setattr(module, "BEATS_PER_LEASE", 300)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "job")


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + GENEROUS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def holding(records: Records, seconds: float = 60.0) -> Iterator[tuple[Any, Any, Any]]:
    """A process that holds the lease; what it tells, and how to make it leave."""
    told, leave = CONTEXT.Queue(), CONTEXT.Event()
    with running(hold, records.root, seconds, told, leave) as process:
        assert told.get(timeout=GENEROUS) == 1
        yield process, told, leave


def leave_a_lease(records: Records, **changes: Any) -> Holder:
    """As this process would have left it, but for the changes."""
    Lease(records).acquire()
    content, version = records.read_version("lease")
    holder = dataclasses.replace(Holder(**content), **changes)
    assert records.replace("lease", dataclasses.asdict(holder), version)
    return holder


def test_acquire__has_one_winner_of_two_jobs_started_together(records: Records) -> None:
    generations = np.array(race(acquire_each, 2, records.root, 50))
    np.testing.assert_array_equal((generations > 0).sum(axis=0), 1)
    np.testing.assert_array_equal(generations.max(axis=0), 1 + np.arange(50) // 2)
    assert len(set(generations.argmax(axis=0))) == 2, "always the same process won, so they did not race"


def test_acquire__has_one_winner_of_many_on_s3(bucket: str) -> None:
    generations = np.array(race(acquire_each, 4, f"{bucket}/leases", 6))
    np.testing.assert_array_equal((generations > 0).sum(axis=0), 1)
    np.testing.assert_array_equal(generations.max(axis=0), 1 + np.arange(6) // 2)


def test_acquire__says_who_holds_it_and_what_to_do(records: Records) -> None:
    with holding(records) as (process, _, _):
        with pytest.raises(LeaseHeld, match=rf"process {process.pid} on {socket.gethostname()}, since 2\d+-") as caught:
            Lease(records).acquire()
        assert "heartbeat" in str(caught.value)
        assert "--wait" in str(caught.value)
        assert records.root in str(caught.value)


def test_acquire__follows_a_killed_holder_at_once(records: Records) -> None:
    with holding(records) as (process, _, _):
        process.kill()
        process.join(GENEROUS)
        assert describe(records)["dead"]
        assert Lease(records).acquire() == 2


def test_acquire__follows_one_that_waits_to_be_buried(records: Records) -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        process.stdout.read()
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "Z")
        start = int(Path(f"/proc/{process.pid}/stat").read_text().split()[21])
        leave_a_lease(records, pid=process.pid, start=start)
        assert Lease(records).acquire() == 2


@pytest.mark.parametrize(
    "changes", [{"start": 1}, {"boot": "another"}, {"pid": 2**22 - 1, "start": 1}, {"held": False}]
)
def test_acquire__follows_the_certainly_dead_at_once(records: Records, changes: dict[str, Any]) -> None:
    leave_a_lease(records, generation=41, **changes)
    assert Lease(records).acquire() == 42


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"host": "elsewhere"},
        {"host": "elsewhere", "boot": "another", "pid": 2**22 - 1},
        {"namespace": "pid:[1]", "pid": 2**22 - 1},
        {"boot": "", "start": 1},
    ],
)
def test_acquire__waits_for_the_time_of_those_that_may_live(records: Records, changes: dict[str, Any]) -> None:
    clock = Clock()
    holder = leave_a_lease(records, **changes)
    lease = Lease(records, clock=clock)
    for moment, beat in [(0, 0), (59.9, 0), (59.9, 1), (119.8, 1), (119.8, 2), (179.7, 2)]:
        clock.now = 1000.0 + moment
        _, version = records.read_version("lease")
        assert records.replace("lease", dataclasses.asdict(holder) | {"beat": beat}, version)
        with pytest.raises(LeaseHeld, match=f"process {holder.pid} on {holder.host}, .* heartbeat {beat} was seen"):
            lease.acquire()
    clock.now += 0.2
    assert lease.acquire() == 2


def test_acquire__grants_the_holder_its_own_longer_time(records: Records) -> None:
    clock = Clock()
    leave_a_lease(records, host="elsewhere", seconds=600.0)
    lease = Lease(records, clock=clock)
    for _ in range(2):
        with pytest.raises(LeaseHeld, match="stands still for 600 s"):
            lease.acquire()
        clock.now += 599
    clock.now += 2
    assert lease.acquire() == 2


def test_acquire__does_not_trust_the_name_of_nameless_machines(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    leave_a_lease(records, boot="another")
    with pytest.raises(LeaseHeld, match="on localhost"):
        Lease(records).acquire()


def test_acquire__waits_until_released(records: Records) -> None:
    with holding(records) as (process, _, leave):
        lease = Lease(records, seconds=2.0)
        taker = threading.Thread(target=lease.acquire, kwargs={"wait": True})
        taker.start()
        taker.join(0.5)
        assert taker.is_alive()
        leave.set()
        taker.join(GENEROUS)
        assert lease.generation == 2
        process.join(GENEROUS)
        assert process.exitcode == 0
        lease.check()


def test_acquire__again_changes_nothing(records: Records) -> None:
    lease = Lease(records)
    assert lease.acquire() == lease.acquire() == 1


def test_generation__only_grows(records: Records) -> None:
    for expected in range(1, 30):
        with Lease(records) as lease:
            assert lease.generation == expected
            lease.check()
        assert not describe(records)["held"]
    lease = Lease(records)
    assert lease.acquire() == 30
    lease.release()
    lease.release()
    assert lease.acquire() == 31


def test_enter__moves_the_heartbeat(records: Records, lively: None) -> None:
    with Lease(records, seconds=30.0) as lease:
        until(lambda: describe(records)["beat"] >= 6)
        lease.check()
        found = describe(records)
    assert found["generation"] == 1
    assert found["pid"] == os.getpid()
    assert found["held"]
    assert not found["dead"]
    assert all(thread.name != "daskrr-lease" for thread in threading.enumerate())


def test_check__of_a_process_that_was_stopped_tells_that_it_lost(records: Records) -> None:
    with holding(records, seconds=2.0) as (process, told, _):
        os.kill(process.pid, signal.SIGSTOP)
        lease, seen = Lease(records, seconds=2.0), time.monotonic()
        with pytest.raises(LeaseHeld, match=f"process {process.pid}"):
            lease.acquire()
        assert lease.acquire(wait=True) == 2
        assert time.monotonic() - seen > 2.0, "taken over too early"
        with lease:
            os.kill(process.pid, signal.SIGCONT)
            assert "no longer owns" in told.get(timeout=GENEROUS)
            process.join(GENEROUS)
            assert process.exitcode == 0
            beat = describe(records)["beat"]
            until(lambda: describe(records)["beat"] > beat)
            lease.check()
        assert describe(records)["generation"] == 2


def test_check__raises_when_the_time_is_over(records: Records) -> None:
    clock = Clock()
    lease = Lease(records, clock=clock)
    with pytest.raises(LeaseLost, match="never acquired"):
        lease.check()
    lease.acquire()
    clock.now += 59.9
    lease.check()
    clock.now += 0.2
    for _ in range(2):
        with pytest.raises(LeaseLost, match=r"no heartbeat could be written for 60 s.*Run it again"):
            lease.check()
    lease.release()
    assert Lease(records).acquire() == 2
    with pytest.raises(LeaseLost, match="no heartbeat"):
        lease.check()


def test_check__raises_after_another_generation_took_over(records: Records, lively: None) -> None:
    with Lease(records, seconds=30.0) as lease:
        content, version = records.read_version("lease")
        while not records.replace("lease", content | {"generation": 7, "token": "another"}, version):
            content, version = records.read_version("lease")
        until(lambda: lease._lost)
        with pytest.raises(LeaseLost, match="generation 7 took over"):
            lease.check()
    assert describe(records)["generation"] == 7
    assert describe(records)["held"], "what belongs to another was released"


def test_check__raises_when_the_lease_was_deleted(records: Records, lively: None) -> None:
    with Lease(records, seconds=30.0) as lease:
        records.delete("")
        until(lambda: lease._lost)
        with pytest.raises(LeaseLost, match="its lease was deleted"):
            lease.check()


def test_check__raises_when_heartbeats_fail_for_too_long(
    records: Records, lively: None, caplog: pytest.LogCaptureFixture
) -> None:
    root = Path(records.root)
    with Lease(records, seconds=3.0) as lease:
        root.rename(root.with_name("away"))
        root.write_text("a file in the way")
        until(lambda: "a heartbeat could not be written" in caplog.text)
        lease.check()
        until(lambda: lease._lost)
        with pytest.raises(LeaseLost, match="no heartbeat could be written for 3 s"):
            lease.check()
    assert "the lease could not be released and will run out" in caplog.text


def test_check__survives_heartbeats_that_fail_for_a_while(
    records: Records, lively: None, caplog: pytest.LogCaptureFixture
) -> None:
    root = Path(records.root)
    with Lease(records, seconds=30.0) as lease:
        root.rename(root.with_name("away"))
        root.write_text("a file in the way")
        until(lambda: "a heartbeat could not be written" in caplog.text)
        root.unlink()
        root.with_name("away").rename(root)
        beat = describe(records)["beat"]
        until(lambda: describe(records)["beat"] > beat)
        lease.check()


def test_describe__of_nothing_is_none(records: Records) -> None:
    assert describe(records) is None


def test_describe__tells_no_token(records: Records) -> None:
    Lease(records).acquire()
    assert set(describe(records)) == {"generation", "held", "host", "pid", "since", "seconds", "beat", "dead"}


def test_acquire__refuses_what_is_no_lease(records: Records) -> None:
    records.write("lease", {"generation": "1"})
    with pytest.raises(DamagedRecord, match=r"'lease' of .* is no lease"):
        Lease(records).acquire()


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_init__refuses_times_that_are_none(records: Records, seconds: float) -> None:
    with pytest.raises(InvalidParameter, match="seconds must be positive"):
        Lease(records, seconds=seconds)
