"""Data sets with a known answer, for demonstrations, tests and benchmarks.

:func:`planted_outliers` describes a data set of any length without holding it: every row is a function of the seed and
of the row number alone, so that any slice can be generated anywhere, in any order and in blocks of any size.
"""

from dataclasses import dataclass
from os import PathLike

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, Crc32cCodec

from daskrr.errors import InvalidParameter

# Rows that share one random stream. Part of the definition of the data: another value, other rows.
_STREAM_ROWS = 4096
_CLUSTERS = 6
_CLUSTER_RADIUS = 4.0
_OUTLIER_RADIUS = (14.0, 20.0)
_CANDIDATES = 64


@dataclass(frozen=True)
class PlantedOutliers:
    """A data set of Gaussian clusters with a few isolated rows far from everything.

    Made by :func:`planted_outliers`.

    Attributes
    ----------
    n_rows, n_features, random_state
        What was asked for.
    centres
        Centres of the clusters, one per row.
    planted
        Sorted numbers of the planted rows.
    outliers
        The planted rows themselves, in the order of ``planted``.
    """

    n_rows: int
    n_features: int
    random_state: int
    centres: NDArray[np.float64]
    planted: NDArray[np.int64]
    outliers: NDArray[np.float64]

    def block(self, start: int, stop: int) -> NDArray[np.float64]:
        """Generate the rows (stop - start, n_features) from ``start`` to ``stop``, as in a slice."""
        first, last = start // _STREAM_ROWS, -(-stop // _STREAM_ROWS)
        streams = [self._stream(index) for index in range(first, last)]
        rows = np.concatenate([np.empty((0, self.n_features)), *streams])
        rows = rows[start - first * _STREAM_ROWS : stop - first * _STREAM_ROWS]
        low, high = np.searchsorted(self.planted, [start, stop])
        rows[self.planted[low:high] - start] = self.outliers[low:high]
        return rows

    def _stream(self, index: int) -> NDArray[np.float64]:
        generator = np.random.default_rng([self.random_state, 1, index])
        cluster = generator.integers(len(self.centres), size=_STREAM_ROWS)
        return self.centres[cluster] + generator.standard_normal((_STREAM_ROWS, self.n_features))


def planted_outliers(
    n_rows: int = 500_000, n_features: int = 8, n_outliers: int = 40, random_state: int = 0
) -> PlantedOutliers:
    """Describe clusters of ordinary rows with isolated rows planted at random positions.

    Parameters
    ----------
    n_rows
        Number of rows, the planted ones included.
    n_features
        Number of columns.
    n_outliers
        Number of planted rows.
    random_state
        Seed of everything.

    Examples
    --------
    >>> data = planted_outliers(n_rows=10_000, n_outliers=3)
    >>> data.block(2000, 2005).shape
    (5, 8)
    """
    if min(n_rows, n_features) < 1 or random_state < 0 or not 0 <= n_outliers <= n_rows:
        raise InvalidParameter(
            f"no data set of {n_rows} rows, {n_features} features and {n_outliers} outliers with seed "
            f"{random_state}: rows and features must be positive, the outliers fit in the rows, "
            "and the seed not be negative"
        )
    generator = np.random.default_rng([random_state, 0])
    centres = _CLUSTER_RADIUS * _directions(generator, _CLUSTERS, n_features)
    planted = np.sort(generator.choice(n_rows, size=n_outliers, replace=False)).astype(np.int64)
    outliers = _isolated(generator, n_outliers, n_features)
    return PlantedOutliers(n_rows, n_features, random_state, centres, planted, outliers)


def write_demo_store(path: str | PathLike[str], data: PlantedOutliers, chunk_rows: int = 65_536) -> None:
    """Write a described data set into a new Zarr array, one chunk at a time.

    Parameters
    ----------
    path
        Directory of the new array.
    data
        What to write.
    chunk_rows
        Rows in one chunk; does not change the data.
    """
    array = zarr.create_array(
        str(path),
        shape=(data.n_rows, data.n_features),
        chunks=(min(chunk_rows, data.n_rows), data.n_features),
        dtype="float64",
        compressors=(BloscCodec(cname="lz4", shuffle="shuffle"), Crc32cCodec()),
        config={"write_empty_chunks": True},
        attributes={"planted": data.planted.tolist()},
    )
    for start in range(0, data.n_rows, chunk_rows):
        stop = min(start + chunk_rows, data.n_rows)
        array[start:stop] = data.block(start, stop)


def clusters_with_outliers(
    n_rows: int, n_features: int, n_outliers: int = 5, random_state: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Generate a small data set in memory, and the sorted numbers of the rows planted in it."""
    data = planted_outliers(n_rows, n_features, n_outliers, random_state)
    return data.block(0, n_rows), data.planted


def _directions(generator: np.random.Generator, count: int, n_features: int) -> NDArray[np.float64]:
    vectors = generator.standard_normal((count, n_features))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _isolated(generator: np.random.Generator, count: int, n_features: int) -> NDArray[np.float64]:
    """Points in a shell around the clusters, each the loneliest of several candidates."""
    points = np.zeros((0, n_features))
    for _ in range(count):
        radius = generator.uniform(*_OUTLIER_RADIUS, size=(_CANDIDATES, 1))
        candidates = radius * _directions(generator, _CANDIDATES, n_features)
        # The centre of the clusters counts as one more point, so that the first choice has a rule too.
        others = np.concatenate([np.zeros((1, n_features)), points])
        distances = np.linalg.norm(candidates[:, None, :] - others[None, :, :], axis=2).min(axis=1)
        points = np.concatenate([points, candidates[[np.argmax(distances)]]])
    return points
