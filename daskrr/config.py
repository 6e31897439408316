"""The settings of daskrr in Dask's configuration; ``daskrr.yaml`` beside this file says what they mean."""

from pathlib import Path
from typing import Any

import dask
from dask.utils import parse_timedelta

(_FILE,) = dask.config.collect_yaml([str(Path(__file__).with_name("daskrr.yaml"))])
dask.config.update_defaults(_FILE)
DEFAULTS: dict[str, Any] = _FILE["daskrr"]


def get(name: str) -> Any:
    """What is set for ``name``, such as ``"clusters.slurm"``."""
    return dask.config.get(f"daskrr.{name}")


def seconds(name: str) -> float:
    """A length of time that is set."""
    return float(parse_timedelta(get(name)))
