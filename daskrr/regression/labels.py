"""Labels of rows as what a regression takes: targets of plus and minus one, and weights of their classes."""

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from dask.delayed import Delayed
from numpy.typing import NDArray

from daskrr.errors import InvalidData, InvalidParameter
from daskrr.numerics.tiles import check_finite
from daskrr.nystrom.row_weights import is_lazy
from daskrr.runtime.blocks import block_rows
from daskrr.runtime.executors import executor
from daskrr.runtime.map_blocks import Run, map_blocks
from daskrr.runtime.rows import (
    ConstantRows,
    MadeBlock,
    NumpyRows,
    Rows,
    for_one_task,
    narrowed,
    open_rows,
    opened,
    pieces,
)
from daskrr.runtime.sealing import seal, sealed_task
from daskrr.storage.pieces import KeptPieces

BALANCED = "balanced"

# Every class is one target, whose coefficients and sums are held for all landmarks.
MOST_CLASSES = 1000


@dataclass(frozen=True)
class Labels:
    """Labels (n,) as they are read, the values (k,) among them, ascending, and the classes (k,) that these stand for.

    ``weights`` (k,) are the sums of the sample weights of every class.
    """

    rows: Rows
    values: NDArray
    classes: NDArray
    weights: NDArray[np.float64]

    @property
    def targets(self) -> Rows:
        """(n,) of two classes, 1 for the second and -1 for the first; (n, k) of more, 1 for the class and else -1."""
        n_classes = len(self.values)
        table = np.array([-1.0, 1.0]) if n_classes == 2 else 2.0 * np.eye(n_classes) - 1.0
        return LookupRows(self.rows, Lookup(self.values, table))

    def weighted(self, class_weight: Any, sample_weight: Rows | None) -> Rows | None:
        """Sample weights times those of the classes."""
        if class_weight is None:
            return sample_weight
        return LookupRows(self.rows, Lookup(self.values, self._class_weights(class_weight)), sample_weight)

    def _class_weights(self, class_weight: Any) -> NDArray[np.float64]:
        if class_weight == BALANCED:
            counted = np.where(self.weights > 0, self.weights, np.inf)
            return self.weights.sum() / (len(counted) * counted)
        classes = self.classes.tolist()
        if unknown := [label for label in class_weight if label not in classes]:
            raise InvalidParameter(f"class_weight has {unknown[0]!r}, which is none of the classes {classes}")
        return np.array([float(class_weight.get(label, 1.0)) for label in classes])


def check_class_weight(class_weight: Any) -> None:
    """Raise unless it is None, ``"balanced"`` or weights by class."""
    if class_weight is None or (isinstance(class_weight, str) and class_weight == BALANCED):
        return
    if not isinstance(class_weight, Mapping):
        raise InvalidParameter(f"class_weight must be None, 'balanced' or a dict of weights, got {class_weight!r}")
    for label, weight in class_weight.items():
        if not (np.isreal(weight) and 0 <= weight < np.inf):
            raise InvalidParameter(f"the weight of class {label!r} must be finite and not negative, got {weight!r}")


def open_labels(y: Any, missing_chunks: str, sample_weight: Rows | None) -> Labels:
    """Find the classes: one light pass over the labels and weights.

    Raises
    ------
    InvalidData
        There is one class only, or so many that they can hardly be classes.
    """
    if is_lazy(y):
        rows, classes = open_rows(y, ndim=1, missing_chunks=missing_chunks, name="y"), None
    else:
        classes, codes = np.unique(y, return_inverse=True)
        rows = NumpyRows(codes)
    weights = ConstantRows(rows.n_rows, 1.0) if sample_weight is None else sample_weight
    for one in (rows, weights):
        executor(uuid.uuid4().hex).check(one)
    run = Run.over(rows, block_rows(1, rows))
    counts: dict[Any, float] = {}
    for part in map_blocks(run, "count-classes", _count, rows, weights).values():
        for value, weight in part.items():
            counts[value] = counts.get(value, 0.0) + weight
        _check_number(len(counts))
    if len(counts) < 2:
        raise InvalidData(f"y has one class only, {next(iter(counts))!r}: a classifier needs at least 2 classes.")
    values = np.array(sorted(counts), rows.dtype)
    return Labels(
        rows=rows,
        values=values,
        classes=values if classes is None else classes,
        weights=np.array([counts[value] for value in sorted(counts)]),
    )


def _count(source: Any, start: int, weights: Any) -> dict[Any, float]:
    """The labels of a block, and their weight."""
    labels = _read(source)
    check_finite(labels[:, None], start, "y")
    if labels.dtype.kind == "f" and (labels != np.floor(labels)).any():
        raise InvalidData(f"rows from {start} on of y hold {labels[labels != np.floor(labels)][0]}: labels are whole.")
    values, codes = np.unique(labels, return_inverse=True)
    _check_number(len(values))
    return dict(zip(values.tolist(), np.bincount(codes, _read(weights)).tolist(), strict=True))


def _check_number(n_classes: int) -> None:
    if n_classes > MOST_CLASSES:
        raise InvalidData(
            f"y has {n_classes} different labels or more, and a classifier takes up to {MOST_CLASSES} classes. "
            "If y is a quantity, fit NystromKernelRidge."
        )


def _read(source: Any) -> NDArray:
    return np.concatenate([np.asarray(piece) for piece in pieces(source)])


def codes_of(labels: NDArray, values: NDArray) -> NDArray[np.intp]:
    """(m,) where labels are among ascending values (k,); -1 where they are not."""
    codes = np.minimum(np.searchsorted(values, labels), len(values) - 1)
    return np.where(values[codes] == labels, codes, -1)


@dataclass(frozen=True)
class Lookup:
    """What stands in a table (k,) or (k, t) for each of the values (k,)."""

    values: NDArray
    table: NDArray[np.float64]

    def __call__(self, labels: NDArray) -> NDArray[np.float64]:
        """(m,) or (m, t) of labels (m,)."""
        codes = codes_of(labels, self.values)
        if (codes < 0).any():
            raise InvalidData(f"y holds {labels[codes < 0][0]!r} now, which it did not before: it changed meanwhile.")
        return self.table[codes]


class LookupRows(Rows):
    """What stands for labels (n,) in a table, times a factor (n,) if there is one."""

    def __init__(self, labels: Rows, lookup: Lookup, factor: Rows | None = None) -> None:
        self.labels, self.lookup, self.factor = labels, lookup, factor
        self.shape, self.dtype = (labels.n_rows, *lookup.table.shape[1:]), np.dtype(np.float64)
        self.unit_rows, self.origin = labels.unit_rows, labels.origin

    @property
    def _read(self) -> list[Rows]:
        return [self.labels] if self.factor is None else [self.labels, self.factor]

    @property
    def in_memory(self) -> bool:
        """If all that is read is."""
        return all(one.in_memory for one in self._read)

    @property
    def is_stored(self) -> bool:
        """If all that is read is."""
        return all(one.is_stored for one in self._read)

    def source(self, start: int, stop: int) -> Any:
        """The sources, sealed; or a task that looks them up, where one is a Dask object."""
        sources = [one.source(start, stop) for one in self._read]
        if any(isinstance(one, Delayed) for one in sources):
            return sealed_task(f"look-up-{uuid.uuid4().hex}", partial(_looked_up, self.lookup), *sources)
        return seal(LookupBlock(self.lookup, tuple(opened(one) for one in sources)))

    def anew(self, purpose: str) -> "LookupRows":
        """All anew."""
        labels, *factor = (one.anew(f"{purpose}-{number}") for number, one in enumerate(self._read))
        return LookupRows(labels, self.lookup, *factor)


@dataclass(frozen=True)
class LookupBlock(MadeBlock):
    """The labels of a block, and factors of them if there are any, to be looked up."""

    lookup: Lookup
    sources: tuple[Any, ...]

    def __iter__(self) -> Iterator[NDArray]:
        found = self.lookup(_read(self.sources[0]))
        yield found * _read(self.sources[1]) if len(self.sources) > 1 else found

    def between(self, first: int, last: int) -> "LookupBlock":
        """Some of them."""
        return LookupBlock(self.lookup, tuple(narrowed(one, first, last) for one in self.sources))

    def remembering(self, ahead: bool, kept: KeptPieces | None = None) -> "LookupBlock":
        """The same for one task."""
        return LookupBlock(self.lookup, tuple(for_one_task(one, ahead, kept) for one in self.sources))


def _looked_up(lookup: Lookup, *sources: Any) -> NDArray[np.float64]:
    return np.concatenate(list(LookupBlock(lookup, sources)))
