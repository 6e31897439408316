"""Kernel ridge leverage scores of data larger than memory, on Dask and Zarr.

Names are loaded when they are first used, so that ``import daskrr`` is light.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "leverage_scores": "daskrr.leverage",
    "plan": "daskrr.leverage",
    "score_to_zarr": "daskrr.jobs",
    "update_scores": "daskrr.jobs",
    "open_scores": "daskrr.jobs",
    "load": "daskrr.regression.loading",
    "NystromKernelRidge": "daskrr.regression.ridge",
    "NystromKernelRidgeCV": "daskrr.regression.cross_validation",
    "NystromKernelRidgeClassifier": "daskrr.regression.classifier",
    "NystromTransformer": "daskrr.regression.transformer",
    "Residual": "daskrr.nystrom.sampling",
    "Leverage": "daskrr.nystrom.sampling",
    "Tolerance": "daskrr.nystrom.strategies",
    "Certify": "daskrr.nystrom.strategies",
}
_MODULES = ("errors", "exact", "jobs", "kernels")

__all__ = ["__version__", *_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"daskrr.{name}")
    raise AttributeError(f"module 'daskrr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
