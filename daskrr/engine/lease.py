"""A lease on a folder of records, so that two jobs never share an output.

The lease is one record that says who holds it. Every change of it is a compare-and-swap, so exactly one of many takers
wins, and every taking has a generation one higher than any before. The holder moves a counter, its heartbeat. A taker
never compares clocks of two machines: it watches the counter by its own clock, and takes over when it has stood still
for the time of the lease. The holder counts that time from before each heartbeat was written, and stops at its end:
whoever was suspended for longer finds on waking that it has lost, however late.
"""

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from daskrr.engine.addresses import redact
from daskrr.engine.records import Records
from daskrr.errors import DamagedRecord, DaskrrError, InvalidParameter, LeaseHeld, LeaseLost

LOGGER = logging.getLogger("daskrr.lease")
BEATS_PER_LEASE = 4
LONGEST_GOODBYE = 5.0
# Machines that were never given a name all have this one.
NAMELESS = ("", "localhost", "localhost.localdomain")
# Tokens of leases that this process has given up while the store took no writes, as a full disk does.
ABANDONED: set[str] = set()


@dataclass(frozen=True)
class Holder:
    """What the record of a lease says; the clock of its holder is told for people alone."""

    generation: int
    held: bool
    token: str
    host: str
    boot: str
    namespace: str
    pid: int
    start: int
    since: str
    seconds: float
    beat: int


class Lease:
    """The right to write to an output, for one job at a time; a context manager that keeps it alive.

    Parameters
    ----------
    records
        Where the job keeps its records.
    name
        Of the record that says who holds the lease.
    seconds
        How long the heartbeat of a holder that cannot be seen to be dead must stand still before another takes over.
        The holder writes four heartbeats in this time.
    clock
        Seconds that never go back.
    """

    def __init__(
        self,
        records: Records,
        *,
        name: str = "lease",
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < seconds < float("inf"):
            raise InvalidParameter(f"seconds must be positive, got {seconds!r}")
        self._records, self._name, self._clock = records, name, clock
        self.seconds = float(seconds)
        self.generation = 0
        self._token = ""
        self._lost = "it was never acquired"
        self._renewed = 0.0
        self._watched: tuple[Any, float] = (None, 0.0)
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._lost:
            self.acquire()
        self._leave.clear()
        self._thread = threading.Thread(target=self._keep, name="daskrr-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        if self._thread is not None:
            self._thread.join(LONGEST_GOODBYE)
        self.release()

    @property
    def facts(self) -> dict[str, Any]:
        """Who holds it and how it is kept alive, for people."""
        return {
            "host": socket.gethostname(), "pid": os.getpid(), "generation": self.generation,
            "renewed_every": self.seconds / BEATS_PER_LEASE,
        }  # fmt: skip

    def acquire(self, wait: bool = False) -> int:
        """Take the lease and return its generation, 1 more than any before.

        A holder that is dead for certain (its process is gone from this host, or this host was started anew) is
        followed at once; any other when its heartbeat has stood still for the time of the lease, as seen by this
        object, over as many calls as it takes.

        Parameters
        ----------
        wait
            Wait until the lease is free, instead of raising.

        Raises
        ------
        LeaseHeld
            Another job holds the lease and may be alive.
        """
        if not self._lost:
            self.check()
            return self.generation
        self._token = uuid.uuid4().hex
        while (holder := self._take()) is not None:
            if not wait:
                raise LeaseHeld(self._who_holds(holder))
            time.sleep(min(1.0, self.seconds / 10))
        return self.generation

    def check(self) -> None:
        """Make sure that the lease is still ours; cheap, nothing is read.

        Raises
        ------
        LeaseLost
            Another job took over, or no heartbeat was written for the time of the lease, so that another may have.
        """
        if not self._lost and self._clock() - self._renewed >= self.seconds:
            self._lost = f"no heartbeat could be written for {self.seconds:g} s"
        if self._lost:
            raise LeaseLost(
                f"this job no longer owns {redact(self._records.root)}: {self._lost}. What it has stored stays valid. "
                "Run it again to go on."
            )

    def release(self) -> None:
        """Leave the lease to others, if it is ours; its generation stays known. A store that fails is only logged."""
        self._lost = self._lost or "it was released"
        if not self._token:
            return
        try:
            while (found := self._find()) is not None and found[0].token == self._token and found[0].held:
                if self._store(replace(found[0], held=False), found[1]):
                    break
        except DaskrrError as error:
            ABANDONED.add(self._token)
            LOGGER.warning("the lease could not be released and will run out: %s", error)
        self._token = ""

    def _take(self) -> Holder | None:
        """Take the lease if it is free; otherwise tell who holds it."""
        while True:
            before = self._clock()
            found = self._find()
            if found is not None and found[0].token == self._token:  # taken by a try whose answer got lost
                self._own(found[0], before)
                return None
            if found is not None and not self._is_free(found[0]):
                return found[0]
            mine = self._claim(found[0].generation + 1 if found else 1)
            if self._store(mine, found[1] if found else None):
                self._own(mine, before)
                return None

    def _own(self, holder: Holder, since: float) -> None:
        self.generation, self._renewed, self._lost = holder.generation, since, ""

    def _claim(self, generation: int) -> Holder:
        since = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
        boot, namespace = _this_boot(), _this_namespace()
        pid, host = os.getpid(), socket.gethostname()
        start = _start_of(pid) or 0
        return Holder(generation, True, self._token, host, boot, namespace, pid, start, since, self.seconds, 0)

    def _find(self) -> tuple[Holder, str] | None:
        return _find(self._records, self._name)

    def _store(self, holder: Holder, expected: str | None) -> bool:
        if expected is None:
            return self._records.create(self._name, asdict(holder))
        return self._records.replace(self._name, asdict(holder), expected)

    def _is_free(self, holder: Holder) -> bool:
        return not holder.held or holder.token in ABANDONED or is_dead(holder) or self._stands_still(holder)

    def _stands_still(self, holder: Holder) -> bool:
        seen = (holder.generation, holder.token, holder.beat)
        if self._watched[0] != seen:
            self._watched = (seen, self._clock())
        return self._clock() - self._watched[1] > max(self.seconds, holder.seconds)

    def _who_holds(self, holder: Holder) -> str:
        still = self._clock() - self._watched[1]
        return (
            f"{redact(self._records.root)} belongs to process {holder.pid} on {holder.host}, since {holder.since} by "
            f"its clock; heartbeat {holder.beat} was seen {still:.0f} s ago. Wait for it with wait=True (--wait): it "
            f"is taken over when it stands still for {max(self.seconds, holder.seconds):g} s. Or end it, or name "
            "another output."
        )

    def _keep(self) -> None:
        """Write heartbeats until told to leave or the lease is lost."""
        while not self._lost and not self._leave.wait(self.seconds / BEATS_PER_LEASE):
            try:
                self._beat()
            except LeaseLost as error:
                LOGGER.error("%s", error)
            except DaskrrError as error:
                LOGGER.warning("a heartbeat could not be written: %s", error)

    def _beat(self) -> None:
        """Move the counter, unless it is too late or another generation is there."""
        renewed = False
        while not renewed:
            self.check()
            before = self._clock()
            found = self._find()
            if found is None or found[0].token != self._token:
                self._lost = f"generation {found[0].generation} took over" if found else "its lease was deleted"
                continue
            renewed = self._store(replace(found[0], beat=found[0].beat + 1), found[1])
        self._renewed = before


def describe(records: Records, name: str = "lease") -> dict[str, Any] | None:
    """Who holds the lease, or held it last; None if nobody ever did.

    The heartbeat is a counter: whether it moves says whether the holder lives. ``dead`` is whether that is known not to
    be so.
    """
    found = _find(records, name)
    if found is None:
        return None
    holder = found[0]
    told = {key: value for key, value in asdict(holder).items() if key not in ("token", "boot", "namespace", "start")}
    return told | {"dead": holder.held and is_dead(holder)}


def is_dead(holder: Holder) -> bool:
    """Whether the holder was a process of this host that is gone for certain."""
    boot = _this_boot()
    if holder.host != socket.gethostname() or not boot or not holder.boot:
        return False
    if holder.boot != boot:
        return holder.host not in NAMELESS
    if holder.namespace != _this_namespace():  # a container: its process numbers are not ours
        return False
    return _is_gone(holder.pid) or _start_of(holder.pid) not in (holder.start, None)


def _is_gone(pid: int) -> bool:
    """Whether no process has this number, or only one that waits to be buried."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _stat_of(pid)[:1] in (["Z"], ["X"])


def _start_of(pid: int) -> int | None:
    """When a process was started, in ticks since the boot; None if hidden or gone."""
    fields = _stat_of(pid)
    return int(fields[19]) if fields else None


def _stat_of(pid: int) -> list[str]:
    """What the kernel tells of a process, from its state on; its name before that may hold anything."""
    return _told(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _this_boot() -> str:
    return _told("/proc/sys/kernel/random/boot_id").strip()


def _this_namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _told(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def _find(records: Records, name: str) -> tuple[Holder, str] | None:
    found = records.read_version(name)
    if found is None:
        return None
    content, version = found
    if {key: type(value) for key, value in content.items()} != {field.name: field.type for field in fields(Holder)}:
        raise DamagedRecord(f"the record {name!r} of {redact(records.root)} is no lease. Delete it and run again.")
    return Holder(**content), version
