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

from daskrr import machine
from daskrr.errors import InvalidParameter, LeaseHeld, LeaseLost
from daskrr.storage import lease as module
from daskrr.storage.lease import Holder, Lease, describe
from daskrr.storage.medium import open_medium
from daskrr.storage.record_format import encode
from daskrr.storage.records import Records, name_of


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


@pytest.mark.parametrize("rounds", [20, pytest.param(50, marks=pytest.mark.slow)])
def test_acquire__has_one_winner_of_two_jobs_started_together(records: Records, rounds: int) -> None:
    generations = np.array(race(acquire_each, 2, records.root, rounds))
    np.testing.assert_array_equal((generations > 0).sum(axis=0), 1)
    np.testing.assert_array_equal(generations.max(axis=0), 1 + np.arange(rounds) // 2)
    assert len(set(generations.argmax(axis=0))) == 2, "always the same process won, so they did not race"


@pytest.mark.slow
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
        content, version = records.read_version("lease")
        if content["beat"] != beat:
            assert records.replace("lease", content | {"beat": beat}, version)
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert set(describe(records)) == {
        "generation",
        "held",
        "host",
        "pid",
        "since",
        "seconds",
        "beat",
        "dead",
        "damaged",
    }


# --- Leases that are lost -----------------------------------------------------------------------------

DAMAGES = ["gone", "empty", "torn", "flipped", "swapped", "none"]


def damage(records: Records, kind: str) -> None:
    """Do something to the record of the lease, or replace it by a whole one that is no lease."""
    if kind == "gone":
        records.delete("lease")
        return
    whole = records.peek("lease")[0].tobytes()
    content = {
        "empty": b"", "torn": whole[:-1], "flipped": whole[:20] + bytes([whole[20] ^ 1]) + whole[21:],
        "swapped": np.concatenate(encode("commit", {}).parts).tobytes(),
        "none": np.concatenate(encode("lease", {"generation": "1"}).parts).tobytes(),
    }[kind]  # fmt: skip
    medium = open_medium(records.root)
    medium.write(max(key for key in medium.stored("") if name_of(key) == "lease"), content)


@pytest.mark.parametrize("kind", DAMAGES)
def test_beat__writes_a_lost_lease_again(records: Records, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    lease = Lease(records, clock=clock)
    assert lease.acquire(above=6) == 7
    lease._beat()
    clock.now += 50
    damage(records, kind)
    lease.check()
    lease.confirm()
    lease._beat()
    assert "was lost and is written again" in caplog.text
    found = describe(records)
    assert (found["generation"], found["pid"], found["held"], found["damaged"]) == (7, os.getpid(), True, False)
    with pytest.raises(LeaseHeld, match=f"process {os.getpid()}"):
        Lease(records).acquire()
    clock.now += 50  # longer than the time of the lease since it was taken, but not since it was written again
    lease.confirm()
    lease.release()
    assert Lease(records).acquire() == 8


def test_enter__writes_a_lost_lease_again_by_itself(records: Records, lively: None) -> None:
    with Lease(records, seconds=30.0) as lease:
        for kind in ("gone", "torn"):
            damage(records, kind)
            until(lambda: (describe(records) or {"damaged": True})["damaged"] is False)
        lease.confirm()
    assert describe(records)["generation"] == 1
    assert not describe(records)["held"]


def test_beat__does_not_write_a_lost_lease_again_when_its_time_is_over(records: Records) -> None:
    clock = Clock()
    lease = Lease(records, clock=clock)
    lease.acquire()
    damage(records, "torn")
    clock.now += 60
    with pytest.raises(LeaseLost, match="no heartbeat could be written for 60 s"):
        lease._beat()
    assert describe(records)["damaged"]


@pytest.mark.parametrize("kind", DAMAGES[1:])
def test_acquire__takes_a_damaged_lease_when_it_stands_still(
    records: Records, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by who does not wait for others: nobody can tell who holds it, and what there is to wait for is short."""
    Lease(records).acquire()
    damage(records, kind)
    assert describe(records)["damaged"]
    clock, slept = Clock(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(module.time, "sleep", sleep)
    assert Lease(records, clock=clock).acquire(above=41) == 42
    assert 60 <= sum(slept) <= 62
    assert caplog.text.count("is damaged: it is taken over when it stands still for 60 s") == 1
    assert not describe(records)["damaged"]


def test_acquire__of_a_damaged_lease_is_refused_when_its_holder_writes_it_again(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, clock = Lease(records), Clock()
    holder.acquire()
    damage(records, "torn")

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now == 1030.0:
            holder._beat()

    monkeypatch.setattr(module.time, "sleep", sleep)
    with pytest.raises(LeaseHeld, match=f"process {os.getpid()}"):
        Lease(records, clock=clock).acquire()
    assert clock.now == 1030.0
    holder.confirm()


def test_acquire__of_a_deleted_lease_gives_a_generation_above_what_is_known(records: Records) -> None:
    """Its holder, if it lives, finds out at its next heartbeat and before anything that counts."""
    clock = Clock()
    first = Lease(records, clock=clock)
    assert first.acquire(above=3) == 4
    records.delete("lease")
    assert Lease(records).acquire(above=4) == 5
    with pytest.raises(LeaseLost, match="generation 5 took over"):
        first.confirm()
    with pytest.raises(LeaseLost, match="generation 5 took over"):
        first.check()
    first.release()
    assert describe(records)["held"]


@pytest.mark.parametrize(("seconds", "is_mended"), [(59, True), (60, False)])
def test_release__of_a_damaged_lease_mends_it_or_leaves_it_to_run_out(
    seconds: float, is_mended: bool, records: Records
) -> None:
    """Before its time is over nobody else can have taken it, and after that somebody may have."""
    clock = Clock()
    lease = Lease(records, clock=clock)
    lease.acquire()
    damage(records, "torn")
    clock.now += seconds
    lease.release()
    found = describe(records)
    assert (found["damaged"], found["held"]) == (not is_mended, not is_mended)


def test_release__that_the_store_does_not_confirm_is_known_to_this_process(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that tells of changes late has not heard of the lease when it is given up."""
    lease = Lease(records)
    assert lease.acquire() == 1
    with monkeypatch.context() as patch:
        patch.setattr(Records, "peek", lambda self, name: None)
        lease.release()
    assert describe(records)["held"]
    assert Lease(records).acquire() == 2


# --- Clocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-0.001, -1e6, 60.0, 1e6])
def test_check__takes_any_jump_of_the_clock_for_a_loss(records: Records, jump: float) -> None:
    clock = Clock()
    lease = Lease(records, clock=clock)
    lease.acquire()
    clock.now += jump
    for work in (lease.check, lease.confirm, lease._beat):
        with pytest.raises(LeaseLost, match="no heartbeat could be written for 60 s"):
            work()
    clock.now = 1000.0
    with pytest.raises(LeaseLost, match="no heartbeat could be written for 60 s"):
        lease.check()
    assert describe(records)["beat"] == 0


def test_init__counts_time_that_goes_on_while_the_machine_sleeps(records: Records) -> None:
    assert Lease(records)._clock is machine.clock


def test_confirm__reads_who_holds_it_whatever_the_clock_says(records: Records) -> None:
    clock = Clock()
    lease = Lease(records, clock=clock)
    lease.acquire()
    lease.confirm()
    content, version = records.read_version("lease")
    assert records.replace("lease", content | {"generation": 2, "token": "another"}, version)
    lease.check()
    with pytest.raises(LeaseLost, match="generation 2 took over"):
        lease.confirm()
    with pytest.raises(LeaseLost, match="generation 2 took over"):
        lease.check()


def test_lose__keeps_the_first_reason(records: Records) -> None:
    lease = Lease(records)
    lease.acquire()
    for reason in ("another job has changed the commit", "something else"):
        with pytest.raises(LeaseLost, match=r"no longer owns .*: another job has changed the commit"):
            lease.lose(reason)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_init__refuses_times_that_are_none(records: Records, seconds: float) -> None:
    with pytest.raises(InvalidParameter, match="seconds must be positive"):
        Lease(records, seconds=seconds)
