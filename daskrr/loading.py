"""What was saved, read back: models, and sketches by themselves or with the scores that they belong to."""

import os
from collections.abc import Collection
from typing import Any

from daskrr.engine.addresses import locate, redact
from daskrr.engine.storage import kind_of, open_stored
from daskrr.errors import InvalidData
from daskrr.jobstore import has_job, open_published
from daskrr.nystrom.saving import SKETCH, read_sealed
from daskrr.nystrom.sketch import NystromSketch
from daskrr.regression import loading as models
from daskrr.regression.saving import MODEL


def load(path: str | os.PathLike, allow_functions: Collection[str] = ()) -> Any:
    """Read what a ``save`` wrote: a model, or a sketch; of stored scores, the sketch that they carry.

    A model predicts, learns from more rows, and can be fitted anew. A sketch scores new rows, with the bits that it had
    before it was saved. Both need no cluster, and use one that is there.

    Parameters
    ----------
    allow_functions
        Names of Python functions, ``"package.module:function"``, that the kernel may import.

    Raises
    ------
    InvalidData
        There is neither, it is damaged, or of a version that this one does not read.
    """
    if kind_of(path) == MODEL:
        return models.load(path, list(allow_functions))
    return load_sketch(path, allow_functions)


def load_sketch(path: str | os.PathLike, allow_functions: Collection[str] = ()) -> NystromSketch:
    """Read a sketch that was saved, or that stored scores carry.

    Raises
    ------
    InvalidData
        There is none, scores are not finished, or the sketch is damaged.
    """
    return NystromSketch.unpacked(*_read(path), allow_functions)


def _read(path: str | os.PathLike) -> tuple[Any, dict[str, Any]]:
    name, kind = redact(locate(path)), kind_of(path)
    if kind == SKETCH:
        return read_sealed(open_stored(path, SKETCH), name)
    if kind is None and not has_job(path):
        raise InvalidData(f"there is no model, no sketch and no scores at {name}.")
    group = open_published(path)
    if "sketch" not in group:
        raise InvalidData(f"the scores at {name} carry no sketch. Score again to have it.")
    found: Any = group["sketch"]
    return read_sealed(found, name)
