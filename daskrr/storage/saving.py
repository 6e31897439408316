"""Outputs that are written in one go: samples, predictions, models, sketches, and scores of a result in memory."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import zarr
from numpy.typing import NDArray

from daskrr.errors import DamagedRecord, InvalidParameter, LeaseLost, OutputExists
from daskrr.storage.output import STATE, Output, StagedGroup
from daskrr.storage.urls import is_local, locate
from daskrr.storage.writing import HeldOutput, hold
from daskrr.storage.zarr_arrays import Staged, checksum


class Saving:
    """An output being written; use as a context manager and call :meth:`commit` when all is there.

    Until then nothing is visible but what was there before; without it, nothing is left.

    Raises
    ------
    OutputExists
        At once, if something is there and may not be replaced; LeaseHeld, when it is entered, if others write to it.
    """

    def __init__(self, target: str | os.PathLike, overwrite: bool, kind: str = "scores") -> None:
        self._output, self._overwrite, self.kind = Output(target), overwrite, kind
        self.target = self._output.target
        self.generation = ""
        self._staged: Staged | None = None
        self._groups: list[StagedGroup] = []
        self._exits = ExitStack()
        self._check()

    def _check(self) -> None:
        check_target(self._output, self._overwrite, self.kind)
        if self._output.unfinished and not self._overwrite:
            raise OutputExists(
                f"{self._output} holds an unfinished job. Pass overwrite=True (--overwrite) to replace it."
            )

    def __enter__(self) -> Self:
        self._held: HeldOutput = self._exits.enter_context(hold(self.target))
        try:
            self._check()
            self._held.sweep()
            self.generation = self._held.begin()
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._exits, suppress(LeaseLost):  # whoever holds it now clears what is left
            self._held.forget(self.generation)

    def create(
        self, shapes: Mapping[str, tuple[int, ...]], chunk_rows: int, second: str = "ridge", **dtypes: str
    ) -> None:
        """Create the named arrays; see :func:`daskrr.storage.zarr_arrays.blueprint`."""
        self._held.refuse_foreign([*shapes])
        self._staged = self._held.staged(self.generation, shapes, chunk_rows, second, dtypes=dtypes)

    @property
    def staged(self) -> Staged:
        """The created arrays, which can be written to wherever they are sent."""
        if self._staged is None:
            raise RuntimeError("no arrays were created")
        return self._staged

    @property
    def arrays(self) -> dict[str, zarr.Array]:
        """The created arrays by name."""
        return {} if self._staged is None else self._staged.arrays

    def write(self, arrays: Mapping[str, NDArray]) -> None:
        """Write small arrays of any shape, each as one chunk."""
        self._held.refuse_foreign([*arrays])
        self._groups.append(self._held.stage_group(self.generation, "", self.kind, arrays, {}))

    @property
    def stage(self) -> Callable[..., StagedGroup]:
        """Writes a group of small arrays wherever it is called: name, kind, arrays, attributes; :meth:`add` it then."""
        return partial(Output(self.target).stage_group, self.generation)

    def add(self, groups: Iterable[StagedGroup]) -> None:
        """Publish groups that were staged, too."""
        self._groups += groups

    def commit(self, summary: dict[str, Any], digests: Mapping[str, Sequence[int]] | None = None) -> None:
        """Publish; ``digests`` are checksums of the blocks of each created array, from where they were written.

        There they have also been settled; without digests, they were written here.
        """
        height = max([1, *(array.chunks[0] for array in self.arrays.values())])
        content = {
            "summary": summary,
            "block_rows": height,
            "digests": {name: np.array(found, np.uint32) for name, found in (digests or self._digests()).items()},
        }
        if digests is None and self.arrays:
            self.staged.settle(range(0, max([0, *(one.shape[0] for one in self.arrays.values())]), height))
        self._held.publish(self.generation, self.kind, self._staged, content, self._groups)

    def _digests(self) -> dict[str, list[int]]:
        """Of arrays that are small enough to be read again."""
        return {
            name: [
                checksum(np.asarray(array[at : at + array.chunks[0]]))
                for at in range(0, array.shape[0], array.chunks[0])
            ]
            for name, array in self.arrays.items()
        }


def check_target(output: Output, overwrite: bool, kind: str) -> None:
    """Refuse to replace anything that was not asked to be replaced, or is not an output of the same kind.

    Raises
    ------
    OutputExists
        It is there.
    InvalidParameter
        There is no folder that it could be in.
    """
    target = output.target
    if is_local(target) and not os.path.isdir(os.path.dirname(target)):
        raise InvalidParameter(
            f"there is no folder {os.path.dirname(target)}, so {target} cannot be written. Create it first."
        )
    if is_local(target) and os.path.lexists(target) and not os.path.isdir(target):
        raise OutputExists(f"{output} exists and is not a result of daskrr; it is left alone. Name another.")
    there = output.medium.below("")  # one look: a second might see what another job has begun since
    if STATE not in there:
        if there:
            raise OutputExists(f"{output} exists and is not a result of daskrr; it is left alone. Name another.")
        return
    manifest = known(output, overwrite)
    found = None if manifest is None else manifest["kind"]
    if found not in (None, kind):
        raise OutputExists(f"{output} holds {found}, not {kind}; it is left alone. Name another.")
    if found and not overwrite:
        raise OutputExists(f"{output} holds {kind} already. Pass overwrite=True (--overwrite) to replace it.")


def known(output: Output, overwrite: bool) -> dict[str, Any] | None:
    """The manifest of what is published; one that is damaged is no matter if it is to be replaced."""
    try:
        return output.committed
    except DamagedRecord:
        if not overwrite or output.commit is None:
            raise
        return None


def kind_of(path: str | os.PathLike) -> str | None:
    """What kind of output is published at an address; None if there is none."""
    name = locate(path)
    if "://" in name and not name.startswith("s3://"):
        return None
    found = Output(name).committed
    return None if found is None else found["kind"]
