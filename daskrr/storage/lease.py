"""A lease on a folder of records, so that two jobs never share an output.

The lease is one record that says who holds it. Every change of it is a compare-and-swap, so exactly one of many takers
wins, and every taking has a generation one higher than any before. The holder moves a counter, its heartbeat. A taker
never compares clocks of two machines: it watches the counter by its own clock, and takes over when it has stood still
for the time of the lease. The holder counts that time from before each heartbeat was written, and stops at its end:
whoever was suspended for longer finds on waking that it has lost, however late.

A lease that is deleted or damaged is written again by its holder: while its time has not run out, nobody else may have
taken it. One that is damaged and has no holder any more is taken when it has stood still for the time of the lease.
"""

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, NoReturn, Self

from daskrr import machine
from daskrr.errors import DamagedRecord, DaskrrError, InvalidParameter, LeaseHeld, LeaseLost
from daskrr.storage.records import Records
from daskrr.storage.urls import redact

LOGGER = logging.getLogger("daskrr.lease")
BEATS_PER_LEASE = 4
LONGEST_GOODBYE = 5.0
# Machines that were never given a name all have this one.
NAMELESS = ("", "localhost", "localhost.localdomain")
# Tokens of leases that this process has given up while the store took no writes, as a full disk does, or told late.
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


# The holder of a lease that is damaged.
UNKNOWN = Holder(
    generation=0, held=True, token="", host="", boot="", namespace="", pid=0, start=0, since="", seconds=0.0, beat=0
)


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
        Seconds that never go back, and go on while the machine sleeps.
    """

    def __init__(
        self,
        records: Records,
        *,
        name: str = "lease",
        seconds: float = 60.0,
        clock: Callable[[], float] = machine.clock,
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

    def acquire(self, wait: bool = False, above: int = 0) -> int:
        """Take the lease and return its generation, 1 more than any before.

        A holder that is dead for certain (its process is gone from this host, or this host was started anew) is
        followed at once; any other when its heartbeat has stood still for the time of the lease, as seen by this
        object, over as many calls as it takes.

        Parameters
        ----------
        wait
            Wait until the lease is free, instead of raising.
        above
            A generation that is known to have been, should the lease itself be lost.

        Raises
        ------
        LeaseHeld
            Another job holds the lease and may be alive.
        """
        if not self._lost:
            self.check()
            return self.generation
        self._token, self.generation = uuid.uuid4().hex, above
        while (holder := self._take()) is not None:
            if not wait and holder is not UNKNOWN:
                raise LeaseHeld(self._who_holds(holder))
            time.sleep(min(1.0, self.seconds / 10))
        return self.generation

    def check(self) -> None:
        """Make sure that the lease is still ours by the clock; cheap, nothing is read.

        Raises
        ------
        LeaseLost
            Another job took over, or no heartbeat was written for the time of the lease, so that another may have.
        """
        if not self._lost and not 0 <= self._clock() - self._renewed < self.seconds:
            self._lost = f"no heartbeat could be written for {self.seconds:g} s"
        if self._lost:
            raise LeaseLost(
                f"this job no longer owns {redact(self._records.root)}: {self._lost}. What it has stored stays valid. "
                "Run it again to go on."
            )

    def confirm(self) -> None:
        """Make sure that the lease is still ours by the record, whatever the clock says: before anything that counts.

        Raises
        ------
        LeaseLost
            Another job took over.
        """
        self.check()
        found = self._find()
        if found is not None and found[0] is not UNKNOWN and found[0].token != self._token:
            self.lose(f"generation {found[0].generation} took over")

    def lose(self, reason: str) -> NoReturn:
        """Know that the lease is lost.

        Raises
        ------
        LeaseLost
            Always.
        """
        self._lost = self._lost or reason
        self.check()
        raise LeaseLost(reason)

    def release(self) -> None:
        """Leave the lease to others, if it is ours; its generation stays known. A store that fails is only logged."""
        self._lost = self._lost or "it was released"
        if not self._token:
            return
        try:
            while (found := self._find()) is not None and (found[0].token == self._token or self._may_mend(*found)):
                if not found[0].held or self._store(replace(self._claim(self.generation), held=False), found[1]):
                    break
            else:  # another took over, or the store tells late that it is ours
                ABANDONED.add(self._token)
        except DaskrrError as error:
            ABANDONED.add(self._token)
            LOGGER.warning("the lease could not be released and will run out: %s", error)
        self._token = ""

    def _may_mend(self, holder: Holder, version: str) -> bool:
        """Whether a lease that is damaged must be ours: nobody else may have taken it before our time ran out."""
        return holder is UNKNOWN and 0 <= self._clock() - self._renewed < self.seconds

    def is_in(self, records: Records) -> bool:
        """Whether the lease among some records is the one that this object holds, or damaged."""
        found = _find(records, self._name)
        return found is None or found[0] is UNKNOWN or found[0].token == self._token

    def _take(self) -> Holder | None:
        """Take the lease if it is free; otherwise tell who holds it."""
        while True:
            before = self._clock()
            current = self._find()
            if current is not None and current[0].token == self._token:  # taken by a try whose answer got lost
                self._own(current[0], before)
                return None
            if current is not None and not self._is_free(*current):
                return current[0]
            mine = self._claim(max(self.generation, current[0].generation if current else 0) + 1)
            if self._store(mine, current[1] if current else None):
                self._own(mine, before)
                return None

    def _own(self, holder: Holder, since: float) -> None:
        self.generation, self._renewed, self._lost = holder.generation, since, ""

    def _claim(self, generation: int) -> Holder:
        pid = os.getpid()
        return Holder(
            generation=generation,
            held=True,
            token=self._token,
            host=socket.gethostname(),
            boot=machine.boot_id(),
            namespace=machine.process_namespace(),
            pid=pid,
            start=machine.process_start(pid) or 0,
            since=datetime.now(UTC).isoformat(sep=" ", timespec="seconds"),
            seconds=self.seconds,
            beat=0,
        )

    def _find(self) -> tuple[Holder, str] | None:
        return _find(self._records, self._name)

    def _store(self, holder: Holder, expected: str | None) -> bool:
        if expected is None:
            return self._records.create(self._name, asdict(holder))
        return self._records.replace(self._name, asdict(holder), expected)

    def _is_free(self, holder: Holder, version: str) -> bool:
        return not holder.held or holder.token in ABANDONED or is_dead(holder) or self._stands_still(holder, version)

    def _stands_still(self, holder: Holder, version: str) -> bool:
        if self._watched[0] != version:
            self._watched = (version, self._clock())
            if holder is UNKNOWN:
                LOGGER.warning(
                    "the lease of %s is damaged: it is taken over when it stands still for %g s",
                    redact(self._records.root), self.seconds,
                )  # fmt: skip
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
            current = self._find()
            if current is None or current[0] is UNKNOWN:
                LOGGER.warning("the lease of %s was lost and is written again", redact(self._records.root))
                renewed = self._store(self._claim(self.generation), current[1] if current else None)
            elif current[0].token == self._token:
                renewed = self._store(replace(current[0], beat=current[0].beat + 1), current[1])
            else:
                self.lose(f"generation {current[0].generation} took over")
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
    return told | {"dead": holder.held and is_dead(holder), "damaged": holder is UNKNOWN}


def is_dead(holder: Holder) -> bool:
    """Whether the holder was a process of this host that is gone for certain."""
    boot = machine.boot_id()
    if holder.host != socket.gethostname() or not boot or not holder.boot:
        return False
    if holder.boot != boot:
        return holder.host not in NAMELESS
    if holder.namespace != machine.process_namespace():  # a container: its process numbers are not ours
        return False
    return machine.is_gone(holder.pid) or machine.process_start(holder.pid) not in (holder.start, None)


def _find(records: Records, name: str) -> tuple[Holder, str] | None:
    """Who holds a lease, and its version; UNKNOWN if it is damaged."""
    try:
        stored = records.read_version(name)
    except DamagedRecord:
        damaged = records.peek(name)
        return None if damaged is None else (UNKNOWN, damaged[1])
    if stored is None:
        return None
    content, version = stored
    if {key: type(value) for key, value in content.items()} != {field.name: field.type for field in fields(Holder)}:
        return UNKNOWN, version
    return Holder(**content), version
