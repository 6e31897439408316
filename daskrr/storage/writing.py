"""Changing an output: whoever holds its lease, and nobody else.

**What may be deleted** below an output is decided by two rules. In ``.daskrr``: records and generations of ours that
are no longer kept, and of a generation only keys that Zarr gives to chunks and metadata (:func:`deletable`). Beside it:
nothing but plain paths that are links into ``.daskrr`` or, where there are no links, the very keys that were copied
and recorded as such (:mod:`daskrr.storage.view`).
"""

import logging
import os
import re
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import zarr
from zarr.storage import MemoryStore

from daskrr import config
from daskrr.errors import DamagedRecord, InvalidData, InvalidParameter, LeaseLost, OutputExists
from daskrr.storage.lease import Lease
from daskrr.storage.output import (
    BASE,
    COMMIT,
    COPY,
    FORMAT,
    GENERATION,
    LEASE,
    MANIFEST,
    OF_ZARR,
    RESULT_KEY,
    STATE,
    Commit,
    Output,
    StagedGroup,
    folder_of,
)
from daskrr.storage.records import Records, name_of
from daskrr.storage.retry import insist
from daskrr.storage.view import View
from daskrr.storage.zarr_arrays import METADATA, Staged, blueprint, metadata_of

log = logging.getLogger("daskrr")

# Where hosts share a folder, what another has changed may be seen late.
SECONDS_TO_LOOK_AGAIN = 0.05


@contextmanager
def hold(target: str | os.PathLike, wait: bool = False, lost: bool = False) -> Iterator["HeldOutput"]:
    """Hold the lease of an output: whoever does is the only one who may change it; leave nothing there without use.

    With ``lost`` also one of which nobody knows what is published.

    Raises
    ------
    LeaseHeld
        Another job is at work there.
    DamagedRecord
        Nobody knows what is published.
    """
    output = Output(target)
    fresh = not output.exists
    lease = Lease(output.records, name=LEASE, seconds=config.seconds("lease-time"))
    lease.acquire(wait, above=output.last_writer(lost))
    with lease:
        held = HeldOutput(output.target, lease)
        if not lost:
            held.fence()
        try:
            yield held
        finally:
            with suppress(LeaseLost):
                held.clear(fresh)


class HeldOutput(Output):
    """An output whose lease is ours; every change belongs to that lease, and is refused once it is lost."""

    def __init__(self, target: str, lease: Lease) -> None:
        super().__init__(target)
        self.lease = lease
        # Its version is known before it is read: one that somebody has changed since is not swapped for what we read.
        self._commit, self._version = Commit(fence=0), ""

    @property
    def view(self) -> View:
        """The plain paths."""
        return View(self, self.lease.confirm)

    def show(self, anew: bool = False) -> None:
        """Make the plain paths those of the published generation, unless its manifest is damaged or not ours."""
        if self._commit.current is not None:
            try:
                manifest = self.trusted(self._commit.current)
            except (DamagedRecord, InvalidData) as error:
                log.warning("%s", error)
            else:
                self.view.show(manifest, anew)

    def fence(self) -> None:
        """Make sure that no earlier holder of the lease can publish any more, and put right what one has left.

        Until this is done, one may still publish, if it was about to: that counts, and is followed.
        """
        while not self._is_fenced():
            time.sleep(SECONDS_TO_LOOK_AGAIN)
        # As a group, it does not astonish those who list the output with Zarr.
        metadata = metadata_of(blueprint({}, 1)).encode()
        if insist(partial(self.medium.read, f"{STATE}/{METADATA}"), f"read {STATE} of {self}") != metadata:
            self.write(f"{STATE}/{METADATA}", metadata)
        insist(partial(self.medium.clean, STATE), f"clean {self}")
        self.show()

    def _is_fenced(self) -> bool:
        self._look()
        return self._swapped(replace(self.commit or Commit(fence=0), fence=self.lease.generation))

    def _swap(self, wanted: Commit) -> None:
        """Change the commit, and then its copy.

        Raises
        ------
        LeaseLost
            Somebody else has changed it since we did: the lease is not ours any more.
        """
        if not self._swapped(wanted):
            self.lease.lose("another job has changed the commit")

    def _swapped(self, wanted: Commit) -> bool:
        """Change the commit, unless somebody else has since we looked, and then its copy; whether that was done."""
        self.lease.confirm()
        wanted = replace(wanted, serial=max(wanted.serial, self._commit.serial) + 1)
        content, version = asdict(wanted), self._version
        done = self.records.replace(COMMIT, content, version) if version else self.records.create(COMMIT, content)
        found = self.records.read_version(COMMIT)
        if not done or found is None or found[0] != content:
            return False
        self._commit, self._version = wanted, found[1]
        if wanted.published:
            self.records.write_while(self.lease.confirm, COPY, content)
        return True

    def _look(self) -> None:
        """Remember which commit the next one follows; before it is read, so that nothing comes in between."""
        found = self.records.peek(COMMIT)
        self._version = "" if found is None else found[1]

    def begin(self, job: Mapping[str, Any] | None = None) -> str:
        """Begin a generation; one that is told nothing of cannot be gone on with.

        No two have one name, so that what a worker still writes of an earlier one harms nobody.
        """
        self.lease.confirm()
        generation = f"{self.lease.generation:06d}-{uuid.uuid4().hex[:8]}"
        if job is not None:
            self.records.write(f"{generation}/job", job)
        return generation

    def refuse_foreign(self, names: Sequence[str]) -> None:
        """Refuse to write arrays whose plain paths somebody else has taken.

        Raises
        ------
        OutputExists
            Naming them.
        """
        taken = self.view.foreign(names)
        if taken:
            raise OutputExists(
                f"{self} has {', '.join(taken)} already, which daskrr has not written and leaves alone. Move it away, "
                "or name another output."
            )

    def publish(
        self,
        generation: str,
        kind: str,
        staged: Staged | None,
        content: Mapping[str, Any],
        groups: Sequence[StagedGroup] = (),
        keep: int = 1,
    ) -> None:
        """Publish a generation whose arrays are all written, with its ``content``, and keep some of those before.

        It can be repeated if stopped: nothing that is published changes before the commit does.
        """
        self.lease.confirm()
        groups = [self._placed(generation, group) for group in groups]
        metadata, digests = self._describe(generation, kind, staged, content["summary"], groups)
        manifest = {
            "format": FORMAT,
            "kind": kind,
            "generation": generation,
            "at": time.time(),
            "metadata": metadata,
            "files": digests,
            "groups": {group.name: group.folder for group in groups if group.folder != group.name},
            **content,
        }
        for name in (MANIFEST, f"{MANIFEST}-copy"):
            self.records.write_while(self.lease.confirm, f"{generation}/{name}", manifest)
        before = [earlier for earlier in self._commit.published if earlier != generation]
        self._swap(replace(self._commit, published=[generation, *before[:keep]], ledger=content.get("ledger")))
        self.view.show(manifest)
        self.sweep()

    def _placed(self, generation: str, group: StagedGroup) -> StagedGroup:
        """A group of small arrays under its own name, where a folder can be moved."""
        folder = folder_of(generation)
        if group.name == group.folder:
            return group
        self._delete_below(f"{folder}/{group.name}")
        move = partial(self.medium.move, f"{folder}/{group.folder}", f"{folder}/{group.name}")
        return replace(group, folder=group.name) if insist(move, f"move {group.name} of {self}") else group

    def _describe(
        self, generation: str, kind: str, staged: Staged | None, summary: Mapping[str, Any],
        groups: Sequence[StagedGroup],
    ) -> tuple[dict[str, str], dict[str, int]]:  # fmt: skip
        """Write the metadata of a generation, and have all of it on the disk; metadata, checksums of small files."""
        attributes = {"format": FORMAT, "kind": kind, "generation": generation, **summary}
        own = {METADATA: metadata_of(zarr.open_group(MemoryStore(), mode="w", attributes={RESULT_KEY: attributes}))}
        if staged is not None:
            own |= {f"{name}/{METADATA}": metadata_of(array) for name, array in staged.arrays.items()}
        folder = folder_of(generation)
        metadata = {key: text for group in groups for key, text in group.metadata.items()} | own
        digests = {key: digest for group in groups for key, digest in group.digests.items()}
        digests |= {key: zlib.crc32(text.encode()) for key, text in own.items()}
        for key, text in own.items():
            self.write(f"{folder}/{key}", text.encode(), named=False)
        used = {group.folder for group in groups}
        stale = [name for name in self.below(folder) if re.fullmatch(r".+-[0-9a-f]{32}", name) and name not in used]
        for name in stale:
            self._delete_below(f"{folder}/{name}")
        insist(partial(self.medium.settle_tree, folder), f"synchronize {self}")
        return metadata, digests

    def rollback(self, generation: str | None = None) -> str:
        """Publish a generation that is kept from before again, the last one by default; its name.

        Raises
        ------
        InvalidParameter
            It is not kept.
        """
        before = self._commit.published[1:]
        chosen = generation or next(iter(before), "before this one")
        if chosen not in before:
            kept = f"those kept are {', '.join(before)}" if before else "none is kept"
            raise InvalidParameter(f"{self} has no generation {chosen} to return to: {kept}.")
        self.lease.confirm()
        self.trusted(chosen)
        others = [one for one in self._commit.published if one != chosen]
        self._swap(replace(self._commit, published=[chosen, *others]))
        self.show()
        return chosen

    def adopt(self) -> str | None:
        """Publish the newest generation whose manifest is whole, where nobody knows what was; None if there is none."""
        self._look()
        for generation in reversed(self.manifests()):
            with suppress(InvalidData, DamagedRecord):
                manifest = self.trusted(generation)
                self._swap(Commit(self.lease.generation, 0, [generation], manifest.get("ledger")))
                self.show()
                return generation
        return None

    def restore(self) -> None:
        """Write again what is kept twice, and drop other records that are damaged; taking the lease did the rest."""
        self.lease.confirm()
        for generation in self._commit.published:
            with suppress(DamagedRecord):
                manifest = self.manifest(generation)
                base = manifest.get("base_records")
                if base is not None and not all(map(self.records.has, base)):
                    manifest["base_records"] = None
                for name in (f"{generation}/{MANIFEST}", f"{generation}/{MANIFEST}-copy"):
                    if not self.records.has(name) or manifest.get("base_records") != base:
                        self.records.write(name, manifest)
        for key in self.records.damaged():
            name = name_of(key)
            if name not in (COMMIT, COPY, LEASE) and not name.endswith((MANIFEST, f"{MANIFEST}-copy")):
                self.records.delete(name)
            elif self.records.has(name):  # an old version, of no use to anybody
                insist(partial(self.medium.delete, [f"{STATE}/records/{key}"]), f"delete {key} of {self}")
        self.show(anew=True)

    def forget(self, generation: str) -> None:
        """Drop a generation that is not published."""
        self.lease.confirm()
        if generation not in self._commit.published:
            self._drop(generation)

    def sweep(self, going_on: str | None = None) -> None:
        """Forget all generations but those that are published and one; of the former all but what updates need."""
        kept = {*self._commit.published, going_on}
        names = self.records.names()
        generations = {name.split("/")[0] for name in names if "/" in name} | set(self.below(f"{STATE}/generations"))
        self.lease.confirm()  # after the look: what was there before it is not of a later holder
        for generation in sorted(generations - kept):
            if GENERATION.fullmatch(generation):
                self._drop(generation)
        for generation, label in sorted({(*name.split("/"), "")[:2] for name in names}):
            if generation in self._commit.published and not label.startswith((BASE, MANIFEST)):
                self.records.delete(f"{generation}/{label}")

    def _drop(self, generation: str) -> None:
        self.records.delete(generation)
        self._delete_below(folder_of(generation))

    def _delete_below(self, folder: str) -> None:
        keys = insist(partial(self.medium.keys, folder), f"list {folder} of {self}")
        doomed = deletable(key.removeprefix(f"{folder}/") for key in keys)
        insist(partial(self.medium.delete, [f"{folder}/{key}" for key in doomed]), f"delete {folder} of {self}")

    def clear(self, fresh: bool) -> None:
        """Leave nothing behind where nothing is published and there is nothing to go on with.

        With ``fresh`` not even an empty folder, which was not there before.
        """
        if self._commit.published or self.unfinished or self.manifests():
            return
        self.lease.confirm()
        insist(partial(self.medium.remove_state, STATE, self._is_ours), f"remove {STATE} of {self}")
        if fresh:
            self.medium.remove_root()

    def _is_ours(self, state: str) -> bool:
        """Whether the lease in a folder that was moved aside is the one that this object holds."""
        return self.lease.is_in(Records(f"{self.target.rstrip('/')}/{state}/records"))


def deletable(keys: Iterable[str]) -> list[str]:
    """Keys of a generation that may be deleted with it: those that Zarr gives; whatever else is there is not ours."""
    return [key for key in keys if OF_ZARR.fullmatch(key)]
