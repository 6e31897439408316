"""What a run has finished, on storage, so that one that is killed goes on where it was.

Workers write the sums of every span and receipts of its blocks of results; the driver reads which are there.
Records hold numbers and arrays, never code, and each knows its own checksum.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from daskrr.errors import DamagedRecord
from daskrr.storage.records import Records
from daskrr.storage.several import side_by_side
from daskrr.storage.urls import redact

SUMMED = "summed"  # below the label of a pass: all its spans are summed, and sums of single ones may be gone


@dataclass(frozen=True)
class Journal:
    """The records of one job, under one prefix; travels to workers by its address."""

    records: Records
    prefix: str

    def done(self, label: str) -> set[int]:
        """Numbers of what was recorded under a label."""
        start = f"{self.prefix}/{label}/"
        return {int(name.removeprefix(start)) for name in self.records.names(start)}

    def write(self, label: str, number: int, content: dict[str, Any]) -> int:
        """Record something for good; returns its bytes."""
        return self.records.write(f"{self.prefix}/{label}/{number}", content)

    def write_several(self, contents: Mapping[str, dict[str, Any]], number: int) -> None:
        """The same of several labels, in whatever order."""
        side_by_side(partial(self.write, label, number, content) for label, content in contents.items())

    def find(self, label: str, number: int) -> dict[str, Any] | None:
        """What was recorded; None if there is nothing, or nothing that is whole."""
        return self.records.find(f"{self.prefix}/{label}/{number}")

    def read(self, label: str, number: int | None = None) -> dict[str, Any]:
        """What was recorded, under a number or under the label alone.

        Raises
        ------
        DamagedRecord
            It is gone or damaged, and has to be computed again.
        """
        name = f"{self.prefix}/{label}" if number is None else f"{self.prefix}/{label}/{number}"
        found = self.records.read(name)
        if found is None:
            raise DamagedRecord(f"the record {name!r} of {redact(self.records.root)} is gone.", name)
        return found

    def has(self, label: str) -> bool:
        """Whether something was recorded under a label alone."""
        return bool(self.records.names(f"{self.prefix}/{label}"))

    def read_one(self, label: str) -> dict[str, Any] | None:
        """What was recorded under a label alone; None if there is nothing, or nothing that is whole."""
        return self.records.find(f"{self.prefix}/{label}")

    def write_one(self, label: str, content: dict[str, Any]) -> int:
        """Record something under a label alone; returns its bytes."""
        return self.records.write(f"{self.prefix}/{label}", content)

    def forget(self, label: str, number: int) -> None:
        """Delete what was recorded, if anything was."""
        self.records.delete(f"{self.prefix}/{label}/{number}")

    def labels(self) -> dict[str, bool]:
        """Labels of passes that have sums, and whether all their spans are summed."""
        names = [name.split("/") for name in self.records.names(f"{self.prefix}/")]
        found = {(*parts[1:3],) for parts in names if len(parts) > 2 and parts[2] in ("sums", SUMMED)}
        return {label: (label, SUMMED) in found for label, _ in sorted(found)}

    def once(self, label: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was recorded under a label, or what ``make`` makes, recorded now."""
        record = self.read_one(label)
        if record is None:
            record = make()
            self.write_one(label, record)
        return record
