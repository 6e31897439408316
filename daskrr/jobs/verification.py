"""Whether an output is as it was written, all of it, and what can be put right."""

import os
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from daskrr.errors import DamagedRecord, DaskrrError, InvalidData
from daskrr.runtime.blocks import split
from daskrr.storage.output import COMMIT, COPY, MANIFEST, PUBLISHED, STATE, VIEW, Commit, Output, folder_of
from daskrr.storage.retry import insist
from daskrr.storage.urls import redact
from daskrr.storage.writing import hold
from daskrr.storage.zarr_arrays import METADATA, blueprint, checksum, metadata_of


def verify(path: str | os.PathLike) -> list[str]:
    """Read all of an output again, and all state that a later job stands on; what is not as it was written.

    Raises
    ------
    InvalidData
        Nothing is published there.
    """
    store = Output(path)
    try:
        commit = store.commit
    except DamagedRecord as error:
        return [*_damaged_records(store), str(error)]
    if commit is None or commit.current is None:
        raise InvalidData(f"nothing is published at {store}: there is nothing to verify.")
    found = [*_damaged_records(store), *_damaged_commit(store), *_damaged_view(store, commit)]
    for generation in commit.published:
        found += _damaged_generation(store, generation)
    return found


def repair(path: str | os.PathLike, wait: bool = False) -> list[str]:
    """Put right what can be: copies of commit and manifest, plain paths, our own metadata; what was done.

    Sums that an update would go on from are dropped if they are damaged, and that update sums all rows again. Arrays
    cannot be repaired: return to the generation before (:func:`daskrr.jobs.rollback`), or score again.

    Raises
    ------
    InvalidData
        There is nothing of daskrr.
    LeaseHeld
        A job is at work there.
    """
    store = Output(path)
    if not store.is_begun:
        raise InvalidData(f"there is nothing of daskrr at {store} to repair.")
    done = _adopted(store, wait)
    before = _faults(store)
    with hold(store.target, wait) as held:
        held.restore()
    after = _faults(store)
    return done + [f"repaired: {one}" for one in before if one not in after]


def _faults(store: Output) -> list[str]:
    try:
        return verify(store.target)
    except DaskrrError:
        return []


def _adopted(store: Output, wait: bool) -> list[str]:
    """Where the commit and its copy are lost, publish what can be found of it."""
    try:
        store.commit  # noqa: B018
    except DamagedRecord:
        with hold(store.target, wait, lost=True) as held:
            found = held.adopt()
        return [
            f"published again: {found}, the newest generation that is whole" if found else "nothing was found whole"
        ]
    return []


def _damaged_records(store: Output) -> Iterator[str]:
    for key, fault in store.records.damaged().items():
        yield f"{STATE}/records/{key}: {fault}"
    if store.medium.read(f"{STATE}/{METADATA}") != metadata_of(blueprint({}, 1)).encode():
        yield f"{STATE}/{METADATA}: is not what was written"


def _damaged_commit(store: Output) -> Iterator[str]:
    commits = {name: store.records.find(name) for name in (COMMIT, COPY)}
    for name, one in commits.items():
        if one is None:
            yield f"{STATE}/records/{name}: is gone or damaged"
        elif one["serial"] < max(other["serial"] for other in commits.values() if other is not None):
            yield f"{STATE}/records/{name}: is an older one"


def _damaged_view(store: Output, commit: Commit) -> Iterator[str]:
    """Plain paths that do not show the published generation."""
    view = store.records.find(VIEW)
    if view is None:
        yield f"{STATE}/records/{VIEW}: is gone or damaged"
        return
    try:
        manifest = store.manifest(str(commit.current))
    except DaskrrError:
        return  # told of elsewhere
    if view["keys"]:
        yield from _damaged_copies(store, manifest, view)
        return
    if store.medium.pointed(PUBLISHED) != folder_of(str(commit.current)):
        yield f"{PUBLISHED}: does not lead to the published generation"
    for name in view["names"]:
        if store.medium.pointed(name) != f"{PUBLISHED}/{name}":
            yield f"{name}: does not lead to the published generation"


def _damaged_copies(store: Output, manifest: Mapping[str, Any], view: Mapping[str, Any]) -> Iterator[str]:
    folder = folder_of(manifest["generation"])
    for key in view["keys"]:
        first, _, rest = key.partition("/")
        place = "/".join(part for part in (manifest["groups"].get(first, first), rest) if part)
        if store.medium.read(key) != store.medium.read(f"{folder}/{place}"):
            yield f"{key}: is not what was published"


def _damaged_generation(store: Output, generation: str) -> Iterator[str]:
    for name in (MANIFEST, f"{MANIFEST}-copy"):
        if store.records.find(f"{generation}/{name}") is None:
            yield f"{STATE}/records/{generation}/{name}: is gone or damaged"
    try:
        group, manifest = store.open(store.manifest(generation)["kind"], generation)
    except DaskrrError as error:
        yield f"{generation}: {error}"
        return
    for name in manifest.get("base_records") or ():
        if not store.records.has(name):
            yield f"{STATE}/records/{name}: is gone or damaged"
    for key, digest in manifest["files"].items():
        first, _, rest = key.partition("/")
        place = "/".join(part for part in (manifest["groups"].get(first, first), rest) if part)
        read = partial(store.medium.read, f"{folder_of(generation)}/{place}")
        if zlib.crc32(insist(read, f"read {key} of {store}") or b"") != digest:
            yield f"{folder_of(generation)}/{key}: is not what was written"
    for name, digests in manifest["digests"].items():
        yield from _damaged_array(f"{folder_of(generation)}/{name}", group[name], digests, manifest)


def _damaged_array(name: str, array: Any, digests: Any, manifest: Mapping[str, Any]) -> Iterator[str]:
    blocks = split(array.shape[0], array.chunks[0])
    if len(blocks) != len(digests):
        yield f"{name}: has {len(blocks)} blocks where {len(digests)} were written"
        return
    for block, digest in zip(blocks, digests, strict=True):
        rows = f"rows {block.start}–{block.stop - 1}"
        try:
            stored = checksum(array[block.start : block.stop])
        except Exception as error:  # stores and codecs raise errors of many kinds
            yield f"{name}: {rows} cannot be read, {type(error).__name__}: {redact(str(error))}"
            continue
        if stored != int(digest):
            yield f"{name}: {rows} are not those that were written"
