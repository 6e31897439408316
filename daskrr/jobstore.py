"""What is stored of the jobs of one output: OUT, a Zarr group, and all that is not published under OUT/.daskrr.

There is a lease, so that two jobs never share an output, and a *generation* for every begun job, with its parameters,
its journal and its arrays, which have no metadata there, so that no reader finds them. When all rows are there and the
checks hold, the arrays are moved into the group, their metadata last, and a commit record says so.
"""

import os
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import zarr

from daskrr.engine.addresses import locate, redact
from daskrr.engine.journal import Journal
from daskrr.engine.patience import patiently
from daskrr.engine.places import (
    METADATA,
    Staged,
    array_at,
    blueprint,
    holds_jobs,
    listing,
    metadata_of,
    open_place,
    read_key,
)
from daskrr.engine.published import of_one_generation
from daskrr.engine.records import Records
from daskrr.engine.storage import RESULT_KEY, open_stored, stamped, write_group
from daskrr.errors import InvalidData, StoreFailed

STATE = ".daskrr"
COMMIT = "commit"
LEASE = "lease"
# What a later job with more rows goes on from; it stays as long as the scores that it belongs to.
BASE = "base"
# An exchange takes milliseconds on a file system, and a moment for every chunk on an object store.
EXCHANGE_SECONDS = 10.0


@dataclass(frozen=True)
class StagedGroup:
    """Small arrays of an unfinished job with attributes: checksums of their files, and the group's own metadata.

    It waits in a ``folder`` of its own: a worker that a killed job has left at work writes to another one.
    """

    name: str
    folder: str
    digests: dict[str, int]
    metadata: str


class JobStore:
    """The state of the jobs of one output, a local path or ``s3://bucket/prefix``."""

    def __init__(self, target: str | os.PathLike) -> None:
        self.target = locate(target)
        self.place = open_place(self.target)
        self.records = Records(f"{self.target.rstrip('/')}/{STATE}/records")

    def __str__(self) -> str:
        return redact(self.target)

    @property
    def is_begun(self) -> bool:
        """Whether there is any state at all."""
        return STATE in self.place.below("")

    @property
    def is_of_a_job(self) -> bool:
        """Whether a job made what is there; it may be at its very beginning, or have been killed there."""
        names = self.place.below("")
        return STATE in names or (not names and os.path.isdir(self.target))

    @property
    def committed(self) -> dict[str, Any] | None:
        """The commit record, if anything was published."""
        return self.records.read(COMMIT)

    @property
    def unfinished(self) -> list[str]:
        """Generations that were begun and not committed, oldest first."""
        found = {name.split("/")[0] for name in self.records.names() if name.endswith("/job")}
        return sorted(found - {(self.committed or {}).get("generation")})

    @property
    def is_exchanging(self) -> bool:
        """Whether a job has begun to publish, and has not finished."""
        return any(self.records.names(f"{generation}/publish") for generation in self.unfinished)

    def begin(self, generation: str, about: Mapping[str, Any]) -> None:
        """Begin a generation."""
        # As a group, it does not astonish those who list the output with Zarr.
        self.place.write_new(f"{STATE}/{METADATA}", metadata_of(blueprint({}, 1)).encode())
        self.records.write(f"{generation}/job", about)

    def job(self, generation: str) -> dict[str, Any]:
        """What a generation was begun with."""
        found = self.records.read(f"{generation}/job")
        if found is None:
            raise RuntimeError(f"generation {generation} of {self} is gone: something else writes to this output.")
        return found

    def journal(self, generation: str) -> Journal:
        """What a generation has finished."""
        return Journal(self.records, generation)

    def staged(
        self, generation: str, shapes: Mapping[str, tuple[int, ...]], chunk_rows: int, read_only: bool = False
    ) -> Staged:
        """The arrays of a generation until they are published."""
        drawn: Any = blueprint(shapes, chunk_rows)
        store = self.place.store.with_read_only(read_only)
        return Staged(self.place, {name: array_at(store, _staged(generation, name), drawn[name]) for name in shapes})

    def checkpoints(self, generation: str) -> dict[str, int]:
        """How many records a generation has, and their bytes."""
        found = listing(self.place.store, f"{STATE}/records/{generation}") or {}
        return {"records": len(found), "bytes": sum(size for size, _ in found.values())}

    def stage_group(
        self, generation: str, name: str, kind: str, arrays: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> StagedGroup:
        """Write small arrays as a group that will be published with the generation.

        Raises
        ------
        StoreFailed
            The store is full, or refused several times.
        """
        folder, store = f"{name}-{uuid.uuid4().hex}", self.place.store
        path = _staged(generation, folder)
        what = f"write {name} of {self}"

        def write() -> None:
            write_group(store, path, arrays).attrs[RESULT_KEY] = stamped(kind, attributes)
            self.place.settle(listing(store, path) or {})

        try:
            patiently(write, what)
        except Exception as error:  # stores raise errors of many kinds
            failure = StoreFailed(f"cannot {what}: {type(error).__name__}: {redact(str(error))}.")
            failure.errno = getattr(error, "errno", None)
            raise failure from None
        found = {key.removeprefix(f"{path}/"): read_key(store, key) or b"" for key in listing(store, path) or {}}
        digests = {f"{name}/{key}": zlib.crc32(content) for key, content in found.items()}
        return StagedGroup(name=name, folder=folder, digests=digests, metadata=found[METADATA].decode())

    def publish(
        self,
        generation: str,
        staged: Staged,
        commit: Mapping[str, Any],
        still_ours: Callable[[], None],
        groups: Sequence[StagedGroup] = (),
    ) -> None:
        """Move arrays and groups of a generation into the output, metadata last, and commit.

        It can be finished if stopped.
        """
        group = blueprint({}, 1)
        group.attrs[RESULT_KEY] = stamped("scores", {"generation": generation, **commit["summary"]})
        metadata = {f"{name}/{METADATA}": metadata_of(array) for name, array in staged.arrays.items()}
        metadata |= {f"{one.name}/{METADATA}": one.metadata for one in groups}
        metadata[METADATA] = metadata_of(zarr.open_group(group.store, mode="r"))
        files = {key: zlib.crc32(text.encode()) for key, text in metadata.items()}
        for one in groups:
            files |= one.digests
        commit = {**commit, "groups": {one.name: one.folder for one in groups}, "files": files}
        self.records.write(f"{generation}/publish", {"commit": commit, "metadata": metadata})
        self.finish_publishing(generation, still_ours)

    def finish_publishing(self, generation: str, still_ours: Callable[[], None]) -> None:
        """Carry out what was decided, if anything was; every step is harmless if it was done before.

        ``still_ours`` raises for who does not hold the lease any more, and is asked before every step.
        """
        decided = self.records.read(f"{generation}/publish")
        if decided is None:
            return
        commit, metadata = decided["commit"], decided["metadata"]
        # Without metadata the group and its arrays are none, so that nobody reads a mixture of two generations.
        names = set(self.place.below("")) - {STATE, METADATA}
        steps: list[Callable[[], Any]] = [partial(self.place.delete, METADATA)]
        steps += [partial(self.place.delete, f"{name}/{METADATA}") for name in sorted(names)]
        parts = {name: name for name in commit["digests"]} | commit["groups"]
        steps += [partial(self.place.move, _staged(generation, folder), name) for name, folder in parts.items()]
        steps += [partial(self.place.delete, name) for name in names - set(parts)]
        steps += [partial(self.place.write, key, text.encode()) for key, text in metadata.items()]
        steps.append(partial(self.records.write, COMMIT, commit))
        for step in steps:
            still_ours()
            step()
        self.sweep({generation: BASE})

    def sweep(self, keep: Mapping[str, str]) -> None:
        """Forget all generations but some, and of these all but the records whose names begin as is said."""
        labels = {tuple(name.split("/")[:2]) for name in self.records.names() if "/" in name}
        for generation in {generation for generation, _ in labels} - set(keep):
            self.records.delete(generation)
        for generation, label in labels:
            if generation in keep and not label.startswith(keep[generation]):
                self.records.delete(f"{generation}/{label}")
        whole = {f"arrays-{generation}" for generation, label in keep.items() if not label}
        for name in self.place.below(STATE):
            if name.startswith("arrays-") and name not in whole:
                self.place.delete(f"{STATE}/{name}")

    def clear(self) -> None:
        """Leave nothing behind where there is nothing to go on with."""
        if self.committed is None and not self.unfinished:
            self.place.delete(STATE)
            self.place.remove_empty()


def has_job(path: str | os.PathLike) -> bool:
    """Whether a job was ever begun at an address."""
    return holds_jobs(locate(path)) and JobStore(path).is_begun


def open_published(path: str | os.PathLike) -> zarr.Group:
    """Open finished scores for reading; if others take their place, reads fail.

    Raises
    ------
    InvalidData
        Nothing is published there, or a job died while it replaced what was.
    """
    if not has_job(path):
        return _open_whole(path)
    store = JobStore(path)
    deadline = time.monotonic() + EXCHANGE_SECONDS
    while True:
        committed = store.committed
        if committed is None:
            raise InvalidData(f"{store} has an unfinished job and no finished scores. Run it again to finish it.")
        with suppress(InvalidData):
            group = of_one_generation(open_stored(path, "scores"), str(store))
            about: Any = group.attrs[RESULT_KEY]
            if about.get("generation") == committed["generation"]:
                return group
        if time.monotonic() > deadline:
            raise InvalidData(
                f"the scores of {store} were being exchanged for new ones when that job ended, or are damaged. Run the "
                "job again to finish it; daskrr verify tells what is damaged."
            )
        time.sleep(0.05)


def _open_whole(path: str | os.PathLike) -> zarr.Group:
    """Open scores that were stored as a whole, not by a job."""
    group, name = open_stored(path, "scores"), redact(locate(path))
    about: Any = group.attrs[RESULT_KEY]
    if "generation" in about:
        raise InvalidData(f"{name} has scores of a job, and no commit record of them. Run the job again.")
    return of_one_generation(group, name)


def _staged(generation: str, name: str) -> str:
    return f"{STATE}/arrays-{generation}/{name}"
