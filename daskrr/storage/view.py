"""The plain paths of an output, for readers that know nothing of daskrr: a view of the published generation.

On files it consists of links, of which one is exchanged when another generation is published, so that there is never a
moment without a group, and no mixture but of reads before and after. Where there are no links, as on S3, it consists of
copies: metadata are taken away first and come back last, so that there is no group while chunks are exchanged.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from daskrr.errors import DamagedRecord, LeaseLost
from daskrr.storage.output import OF_ZARR, PUBLISHED, STATE, VIEW, Output, folder_of
from daskrr.storage.retry import insist
from daskrr.storage.zarr_arrays import METADATA, keys_of

log = logging.getLogger("daskrr")


class View:
    """Makes and repairs the plain paths; ``still_ours`` raises for who does not hold the lease any more."""

    def __init__(self, output: Output, still_ours: Callable[[], None]) -> None:
        self._output, self._still_ours = output, still_ours
        self._medium, self._records = output.medium, output.records

    @property
    def known(self) -> dict[str, Any]:
        """What was shown: names, and the keys of copies with the generation that they are of."""
        return self._records.find(VIEW) or {"names": [], "keys": [], "generation": None}

    def foreign(self, names: Sequence[str]) -> list[str]:
        """Those of some names that somebody else has taken."""
        known, there = self.known, set(self._output.below(""))
        return sorted(name for name in names if name in there and not self._is_ours(name, known))

    def _is_ours(self, name: str, known: Mapping[str, Any]) -> bool:
        """Whether what is at a plain path may be replaced or removed."""
        copied = any(key == name or key.startswith(f"{name}/") for key in known["keys"])
        linked = (self._medium.pointed(name) or "").startswith(f"{PUBLISHED}/")
        return name == METADATA or copied or linked or self._is_replica(name)

    def _is_replica(self, name: str) -> bool:
        """Whether a folder is a copy of ours: on S3, or made by a program that follows links."""
        commit = self._output.commit
        kept = commit.published if commit else ()
        told = set()
        for one in kept:
            with suppress(DamagedRecord):
                told.add(self._output.manifest(one)["metadata"].get(f"{name}/{METADATA}"))
        found = insist(partial(self._medium.read, f"{name}/{METADATA}"), f"read {name} of {self._output}")
        keys = insist(partial(self._medium.keys, name), f"list {name} of {self._output}")
        return found is not None and found.decode(errors="replace") in told and all(map(OF_ZARR.fullmatch, keys))

    def show(self, manifest: Mapping[str, Any], anew: bool = False) -> None:
        """Make the plain paths those of a generation; ``anew`` also copies that should be there already."""
        known = self.known
        names = {key.partition("/")[0] for key in manifest["metadata"]}
        foreign = self.foreign([*names])
        for name in foreign:
            log.warning("%s of %s is not ours and is left alone: it does not show our %s", name, self._output, name)
        shown = sorted(names - set(foreign))
        self._still_ours()
        if not set(shown) <= set(known["names"]):
            self._note(sorted({*known["names"], *shown}), known["keys"], None)
        if self._medium.has_links(STATE):
            self._link(manifest["generation"], shown, known)
        elif anew or known["generation"] != manifest["generation"]:
            self._copy(manifest, shown, known)

    def _note(self, names: Sequence[str], keys: Sequence[str], generation: str | None) -> None:
        content = {"names": [*names], "keys": [*keys], "generation": generation}
        self._records.write_while(self._still_ours, VIEW, content)

    def _delete(self, keys: Sequence[str]) -> None:
        self._still_ours()
        insist(partial(self._medium.delete, keys), f"delete what {self._output} showed")

    def _link(self, generation: str, names: Sequence[str], known: Mapping[str, Any]) -> None:
        """Show a generation by links; files of ours in their places go first."""
        stale = [name for name in set(known["names"]) - set(names) if self._is_ours(name, known)]
        replicas = [name for name in (*stale, *names, PUBLISHED) if self._medium.pointed(name) is None]
        self._delete(self._keys_of(replicas))
        links = {PUBLISHED: folder_of(generation)} | {name: f"{PUBLISHED}/{name}" for name in names}
        for name, target in links.items():
            insist(partial(self._point, name, target), f"link {name} of {self._output}")
        self._delete(stale)
        noted = self.known
        if (noted["names"], noted["keys"]) != ([*names], []):
            self._note(names, [], None)

    def _point(self, name: str, target: str) -> None:
        """Exchange a link; whoever was stopped meanwhile, and too late, puts back what the commit says."""
        self._still_ours()
        self._medium.point(name, target)
        try:
            self._still_ours()
        except LeaseLost:
            commit = self._output.commit
            if name == PUBLISHED and commit is not None and commit.current is not None:
                self._medium.point(name, folder_of(commit.current))
            raise

    def _keys_of(self, names: Sequence[str]) -> list[str]:
        """All keys below some names."""
        found = (insist(partial(self._medium.keys, name), f"list {name} of {self._output}") for name in names)
        return [key for keys in found for key in keys]

    def _copy(self, manifest: Mapping[str, Any], names: Sequence[str], known: Mapping[str, Any]) -> None:
        """Show a generation by copies."""
        folder = folder_of(manifest["generation"])
        copies: dict[str, str] = {}
        for key in keys_of(manifest["metadata"]):
            name, _, rest = key.partition("/")
            if rest and name in names:
                copies[key] = f"{folder}/{manifest['groups'].get(name, name)}/{rest}"
        chunks = {key: source for key, source in copies.items() if not key.endswith(METADATA)}
        links = [name for name in names if self._medium.pointed(name)]  # of a file system that had them
        self._delete([METADATA, *links])
        unknown = [name for name in names if not any(key.startswith(f"{name}/") for key in known["keys"])]
        keys, before = sorted({*copies, METADATA}), {*known["keys"], *self._keys_of(unknown)}
        self._delete([key for key in before if key.endswith(METADATA)])
        self._note(names, sorted({*before, *keys}), None)
        for key, source in chunks.items():
            self._still_ours()
            insist(partial(self._medium.copy, source, key), f"copy {key} of {self._output}")
        self._delete(sorted(before - set(keys)))
        for key in sorted(set(keys) - set(chunks), key=len, reverse=True):
            self._still_ours()
            self._output.write(key, manifest["metadata"][key].encode())
        self._note(names, keys, manifest["generation"])
