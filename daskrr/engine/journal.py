"""What a run has finished, on storage, so that one that is killed goes on where it was.

Workers write the sums of every superblock and a receipt of every block of results; the driver reads which are there.
Records hold numbers and arrays, never code, and each knows its own checksum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from daskrr.engine.records import Records
from daskrr.errors import CheckFailed


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

    def lay_aside(self, label: str, number: int, content: dict[str, Any]) -> None:
        """Record something until :meth:`discard`; a loss of power may take it."""
        self.records.lay_aside(f"{self.prefix}/{label}/{number}", content)

    def discard(self, label: str) -> None:
        """Forget what was recorded under a label."""
        self.records.delete(f"{self.prefix}/{label}")

    def read(self, label: str, number: int) -> dict[str, Any]:
        """What was recorded.

        Raises
        ------
        CheckFailed
            It is gone, and the job cannot go on from what is left.
        """
        found = self.records.read(f"{self.prefix}/{label}/{number}")
        if found is None:
            raise CheckFailed(
                f"record {label}/{number} of the unfinished job is gone, and what is left of the job is dropped. "
                "Run the same line again: it starts over."
            )
        return found

    def has(self, label: str) -> bool:
        """Whether something was recorded under a label alone."""
        return bool(self.records.names(f"{self.prefix}/{label}"))

    def read_one(self, label: str) -> dict[str, Any] | None:
        """What was recorded under a label alone, if anything."""
        return self.records.read(f"{self.prefix}/{label}")

    def write_one(self, label: str, content: dict[str, Any]) -> int:
        """Record something under a label alone; returns its bytes."""
        return self.records.write(f"{self.prefix}/{label}", content)

    def labels(self) -> list[str]:
        """Labels of passes that have sums."""
        names = (name.split("/") for name in self.records.names(f"{self.prefix}/"))
        return sorted({parts[1] for parts in names if len(parts) == 4 and parts[2] == "sums"})

    def once(self, label: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was recorded under a label, or what ``make`` makes, recorded now."""
        found = self.read_one(label)
        if found is None:
            found = make()
            self.write_one(label, found)
        return found
