"""Points, jobs on them, and the damage that is done to their files."""

import os
from pathlib import Path

import numpy as np
import pytest
import zarr
from strategies import as_zarr

import daskrr
from daskrr.errors import InvalidData
from daskrr.kernels import Gaussian
from daskrr.storage import retry as patience

NAMES = ("estimate", "lower", "residual", "scores", "upper")
KERNEL, RIDGE, N_LANDMARKS = Gaussian(1.5), 1e-2, 40


def shorten_pauses(monkeypatch):
    """As many tries as ever in this process, in less time."""
    for name in ("PAUSES", "PAUSES_IF_ABSENT"):
        monkeypatch.setattr(patience, name, (0.01,) * len(getattr(patience, name)))


def points(n=250, d=3, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d))


def stored(folder, X, chunks=(50, 3), **options):
    """Path of the rows as a Zarr array, every chunk written."""
    return Path(as_zarr(X, chunks, str(folder), **options).store.root)


def score(X, output, **options):
    options = {"certify": True, "random_state": 0, "block_rows": 100, "progress": False} | options
    return daskrr.score_to_zarr(X, output, KERNEL, RIDGE, N_LANDMARKS, **options)


def nothing_published(output):
    """No reader finds scores."""
    assert not (output / "zarr.json").exists()
    with pytest.raises(InvalidData):
        daskrr.open_scores(output)


def contents(output):
    """Bytes of all published arrays."""
    return {name: zarr.open_array(output / name, mode="r")[...].tobytes() for name in NAMES}


def chunk_files(folder):
    """Every stored chunk of an array, in the order of their names."""
    return sorted(path for path in (Path(folder) / "c").rglob("*") if path.is_file())


def key_of(path, array):
    return path.relative_to(array).as_posix()


def flip(path, place=0.5):
    """Change one bit as a failing disk does: size and time of the file stay."""
    about, content = path.stat(), bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


class Saboteur:
    """A reporter of progress that does something once, when a stage begins or has come so far."""

    def __init__(self, stage, action, done=0):
        self.stage, self.action, self.done, self.fired = stage, action, done, 0

    def __call__(self, event):
        if not self.fired and event.stage.startswith(self.stage) and event.done >= self.done:
            self.fired += 1
            self.action()
