"""Kernel ridge leverage scores of data larger than memory, on Dask and Zarr.

Names are loaded when they are first used, so that ``import daskrr`` is light.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "LeverageResult": "daskrr.result",
    "leverage_scores": "daskrr.leverage",
    "plan": "daskrr.leverage",
    "NystromSketch": "daskrr.nystrom.sketch",
    "NystromKernelRidge": "daskrr.regression.ridge",
    "NystromKernelRidgeCV": "daskrr.regression.selection",
    "NystromTransformer": "daskrr.regression.transformer",
    "load": "daskrr.loading",
    "apply_sketch": "daskrr.applying",
    "ScoreStore": "daskrr.outputs",
    "open_scores": "daskrr.outputs",
    "RowSample": "daskrr.samples",
    "sample_rows": "daskrr.samples",
    "score_to_zarr": "daskrr.scoring",
    "top_rows": "daskrr.scoring",
    "update_scores": "daskrr.updating",
    "write_report": "daskrr.apps.report",
}
_MODULES = ("errors", "exact", "kernels", "leverage", "scoring", "synthetic", "theory")

__all__ = ["__version__", *_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"daskrr.{name}")
    raise AttributeError(f"module 'daskrr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
