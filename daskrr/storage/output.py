"""An output: a Zarr group whose content is exchanged as a whole, by one writer at a time, and never half.

Everything that daskrr writes for users is an output: scores, predictions, samples, models, sketches. Below its address
there is ``.daskrr`` with the *records* and with a folder for every *generation*, that is, for every job begun::

    OUT/.daskrr/records/lease             who may write
    OUT/.daskrr/records/commit            which generation is published, and which are kept from before; twice
    OUT/.daskrr/records/GEN/manifest      what a published generation is: metadata, checksums, summary; twice
    OUT/.daskrr/records/GEN/...           what an unfinished one has finished
    OUT/.daskrr/generations/GEN/          its arrays, a Zarr group
    OUT/.daskrr/generations/published     a link to the published one
    OUT/scores, OUT/zarr.json, ...        links into that, for readers that know nothing of daskrr

A generation is written where it stays. The commit alone says what is published: whoever takes the lease writes its own
number into the commit, and every change of it is a compare-and-swap, so that a writer that has lost the lease cannot
change it any more, however late it wakes. Our own readers ask the commit, then the manifest, and read the arrays of
that generation; the plain paths are a view for others, which the holder of the lease makes and repairs.
"""

import logging
import os
import re
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import zarr
from numpy.typing import NDArray

from daskrr.errors import DamagedRecord, InvalidData
from daskrr.storage.journal import Journal
from daskrr.storage.medium import can_hold, open_medium
from daskrr.storage.records import Records
from daskrr.storage.retry import insist
from daskrr.storage.snapshot import open_snapshot
from daskrr.storage.trust import OUTPUTS, check_metadata, parse_json
from daskrr.storage.urls import is_local, locate, redact
from daskrr.storage.zarr_arrays import METADATA, Staged, array_at, blueprint, small_group

log = logging.getLogger("daskrr")

STATE = ".daskrr"
RESULT_KEY = "daskrr"
FORMAT = 2
LEASE, COMMIT, COPY = "lease", "commit", "commit-copy"
MANIFEST = "manifest"
VIEW = "view"
PUBLISHED = f"{STATE}/generations/published"
# What a later job with more rows goes on from; it stays as long as the scores that it belongs to.
BASE = "base-"
GENERATION = re.compile(r"\d{6,}-[0-9a-f]{8}")
# Keys that Zarr gives to metadata and chunks.
OF_ZARR = re.compile(r"((?!\.{1,2}/)[\w.-]+/)*(zarr\.json|c(/\d+)*)")
REPAIR = "Tell what is left with daskrr verify, and have it repaired with daskrr verify --repair."


@dataclass(frozen=True)
class Commit:
    """Which generations are published, the current one first, and who may change that.

    Attributes
    ----------
    fence
        Generation of the lease of the last writer.
    serial
        One more than that of the commit before.
    ledger
        What all generations together have spent, also those that were rolled back.
    """

    fence: int
    serial: int = 0
    published: list[str] = field(default_factory=list)
    ledger: dict[str, Any] | None = None

    @property
    def current(self) -> str | None:
        """The generation that readers get."""
        return self.published[0] if self.published else None


@dataclass(frozen=True)
class StagedGroup:
    """Small arrays of an unfinished generation: metadata and checksums of their files.

    It waits in a ``folder`` of its own: a worker that a killed job has left at work writes to another one.
    """

    name: str
    folder: str
    digests: dict[str, int]
    metadata: dict[str, str]


class Output:
    """What is stored at a local path or ``s3://bucket/prefix``, for reading; it is changed by who holds its lease."""

    def __init__(self, target: str | os.PathLike) -> None:
        self.target = locate(target)
        self.medium = open_medium(self.target)
        self.records = Records(f"{self.target.rstrip('/')}/{STATE}/records")

    def __str__(self) -> str:
        return redact(self.target)

    @property
    def exists(self) -> bool:
        """Whether anything is there, be it an empty folder."""
        return bool(self.below("")) or (is_local(self.target) and os.path.lexists(self.target))

    @property
    def is_begun(self) -> bool:
        """Whether there is any state at all."""
        return STATE in self.below("")

    @property
    def commit(self) -> Commit | None:
        """What is published; None if nothing was ever begun, or if it is lost and nothing was published yet.

        Raises
        ------
        DamagedRecord
            The commit and its copy are damaged or gone, while there is something that was published.
        """
        found = [one for one in map(self._read_commit, (COMMIT, COPY)) if one is not None]
        if found:
            return max(found, key=lambda one: one.serial)
        if self.records.names(COPY) or self.manifests():  # without both, nothing was published yet
            raise DamagedRecord(
                f"the commit of {self} and its copy are damaged or gone, so that nobody knows what is published. "
                f"Nothing was deleted. {REPAIR}",
                COMMIT,
            )
        return None

    def _read_commit(self, name: str) -> Commit | None:
        found = self.records.find(name)
        return None if found is None else Commit(**found)

    def manifests(self) -> list[str]:
        """Generations that have a manifest."""
        return sorted({name.split("/")[0] for name in self.records.names() if name.endswith(f"/{MANIFEST}")})

    @property
    def committed(self) -> dict[str, Any] | None:
        """The manifest of what is published, if anything is."""
        commit = self.commit
        return None if commit is None or commit.current is None else self.manifest(commit.current)

    def manifest(self, generation: str) -> dict[str, Any]:
        """What a published generation is.

        Raises
        ------
        InvalidData
            It is no longer kept.
        DamagedRecord
            It is damaged, and so is its copy.
        """
        names = [f"{generation}/{MANIFEST}", f"{generation}/{MANIFEST}-copy"]
        for name in names:
            found = self.records.find(name)
            if found is not None:
                return found
        if not self.records.names(generation):
            raise InvalidData(f"the generation {generation} of {self} is no longer kept. Open what is published now.")
        raise DamagedRecord(
            f"the manifest of {generation} of {self} and its copy are damaged or gone, so that its arrays cannot be "
            "trusted. Return to the generation before with daskrr rollback, or run the job again with --overwrite.",
            names[0],
        )

    @property
    def unfinished(self) -> list[str]:
        """Generations that were begun and not published, oldest first."""
        found = {name.split("/")[0] for name in self.records.names() if name.endswith("/job")}
        return sorted(found - set(self.commit.published if self.commit else ()))

    def job(self, generation: str) -> dict[str, Any] | None:
        """What a generation was begun with; None if that is damaged."""
        return self.records.find(f"{generation}/job")

    def journal(self, generation: str) -> Journal:
        """What a generation has finished."""
        return Journal(self.records, generation)

    def staged(
        self, generation: str, shapes: Mapping[str, tuple[int, ...]], chunk_rows: int, second: str = "ridge",
        read_only: bool = False, dtypes: Mapping[str, str] | None = None,
    ) -> Staged:  # fmt: skip
        """The arrays of a generation before it is published."""
        drawn: Any = blueprint(shapes, chunk_rows, second, **(dtypes or {}))
        store = self.medium.store.with_read_only(read_only)
        folder = folder_of(generation)
        return Staged(self.medium, {name: array_at(store, f"{folder}/{name}", drawn[name]) for name in shapes})

    def stage_group(
        self, generation: str, name: str, kind: str, arrays: Mapping[str, NDArray], attributes: Mapping[str, Any]
    ) -> StagedGroup:
        """Write small arrays as a group that will be published with the generation.

        Raises
        ------
        StoreFailed
            The store is full, or refused several times.
        """
        folder = f"{name}-{uuid.uuid4().hex}" if name else ""
        start = f"{name}/" if name else ""
        files = small_group(arrays, {RESULT_KEY: {"format": FORMAT, "kind": kind, **attributes}})
        for key, content in files.items():
            path = "/".join(part for part in (folder_of(generation), folder, key) if part)
            self.write(path, content, named=False)
        return StagedGroup(
            name=name,
            folder=folder,
            digests={f"{start}{key}": zlib.crc32(content) for key, content in files.items()},
            metadata={f"{start}{key}": content.decode() for key, content in files.items() if key.endswith(METADATA)},
        )

    def write(self, key: str, content: bytes, named: bool = True) -> None:
        """Write a small file for good; the names of those of a generation are when it is published.

        Raises
        ------
        StoreFailed
            The store is full, or refused several times.
        """
        insist(partial(self.medium.write, key, content, named), f"write the {len(content)} bytes of {key} of {self}")

    def open(self, kind: str, generation: str | None = None) -> tuple[zarr.Group, dict[str, Any]]:
        """The group of what is published, or of a generation that is kept, and its manifest.

        It stays readable until the generation is no longer kept: with the usual one, until the next but one is
        published. Nothing is read but what the manifest tells of, by metadata that it has itself.

        Raises
        ------
        InvalidData
            Nothing is published there, or something of another kind, or metadata that we never write.
        """
        name = generation or self._published(kind)
        manifest = self.trusted(name)
        if manifest["kind"] != kind:
            raise InvalidData(f"{self} holds {manifest['kind']}, not {kind}.")
        group = open_snapshot(self.medium.store, folder_of(name), manifest["metadata"], manifest["groups"], str(self))
        return group, manifest

    def _published(self, kind: str) -> str:
        commit = self.commit
        if commit is not None and commit.current is not None:
            return commit.current
        if commit is not None or self.is_begun:
            raise InvalidData(f"{self} has an unfinished job and no finished {kind}. Run it again to finish it.")
        what = "are no scores" if kind == "scores" else f"is not {kind}"
        raise InvalidData(f"there {what} at {self}.")

    def trusted(self, generation: str) -> dict[str, Any]:
        """The manifest of a generation, if all that it describes is what we write.

        Raises
        ------
        InvalidData
            It is not.
        """
        manifest = self.manifest(generation)
        named = [*manifest.get("metadata", ()), *(f"{one}/{METADATA}" for one in manifest.get("groups", {}).values())]
        if manifest.get("generation") != generation or not all(map(OF_ZARR.fullmatch, named)):
            raise InvalidData(f"the manifest of {generation} of {self} is none that daskrr writes. Nothing is read.")
        if manifest.get("format") != FORMAT:
            raise InvalidData(f"{self} has format {manifest.get('format')}; this version reads format {FORMAT}.")
        for key, text in manifest["metadata"].items():
            what = f"{key} of {self}"
            found = parse_json(text, what)
            if not (isinstance(found, dict) and found.get("node_type") == "group" and found.get("zarr_format") == 3):
                check_metadata(found, OUTPUTS, what)
        return manifest

    def checkpoints(self, generation: str) -> dict[str, int]:
        """How many records a generation has, and their bytes."""
        found = insist(partial(self.medium.keys, f"{STATE}/records/{generation}"), f"list {generation} of {self}")
        return {"records": len(found), "bytes": sum(size for size, _ in found.values())}

    @property
    def is_shown(self) -> bool:
        """Whether the plain paths are those of what is published."""
        commit, view = self.commit, self.records.find(VIEW)
        current = None if commit is None else commit.current
        if current is None or view is None or view["generation"] == current:
            return current is None or view is not None
        links = {PUBLISHED: folder_of(current)} | {name: f"{PUBLISHED}/{name}" for name in view["names"]}
        return all(self.medium.pointed(name) == target for name, target in links.items())

    def size_of(self, generation: str) -> int:
        """Bytes of the arrays of a generation."""
        keys = insist(partial(self.medium.keys, folder_of(generation)), f"list {generation} of {self}")
        return sum(size for size, _ in keys.values())

    def last_writer(self, lost: bool) -> int:
        """The last generation of the lease that is known, from what there is if the commit is lost."""
        if lost:
            return max([0, *(int(name.partition("-")[0]) for name in self.manifests())])
        commit = self.commit
        return 0 if commit is None else commit.fence

    def below(self, prefix: str) -> list[str]:
        """First parts of all keys below a prefix."""
        return insist(partial(self.medium.below, prefix), f"list {prefix or self}")


def folder_of(generation: str) -> str:
    """Key of the arrays of a generation."""
    return f"{STATE}/generations/{generation}"


def is_begun(path: str | os.PathLike) -> bool:
    """Whether anything of daskrr was ever begun at an address."""
    return can_hold(locate(path)) and Output(path).is_begun
