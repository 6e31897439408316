"""The demonstration: outliers planted in made-up data, and whether the scores find them."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from daskrr import errors, jobs, kernels, plots, synthetic
from daskrr.apps import clusters, text
from daskrr.apps import convert as conversion
from daskrr.apps.cli.telling import emit, silence

_DEMO_MODEL: dict[str, Any] = {
    "kernel": kernels.Gaussian(5.0),
    "ridge": 1e-5,
    "landmarks": 500,
    # Every row is as likely as any other to become a landmark; nothing hints at what was planted.
    "sampling": "uniform",
}
# Small enough to keep every worker busy to the end, which chunks of the usual size would not.
_DEMO_CHUNK_ROWS = 16_384
_DEMO_SHARE = 0.95


def demo(rows: int, directory: str, seed: int, workers: int | None, as_json: bool, quiet: bool) -> None:
    """Run ``daskrr demo``."""
    began = time.perf_counter()
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    points, scores, picture = (folder / f"daskrr-demo{end}" for end in ("-points.zarr", "-scores.zarr", ".png"))
    data = synthetic.planted_outliers(rows, random_state=seed)
    with conversion.staged(points, overwrite=True) as partial:
        synthetic.write_demo_store(partial, data, chunk_rows=_DEMO_CHUNK_ROWS)
    result: dict[str, Any] = {
        "rows": rows,
        "planted": len(data.planted),
        "seconds": {"write rows": time.perf_counter() - began},
    }
    summary = _score_demo(points, scores, seed, workers, quiet)
    _draw(scores, picture, data, summary)
    result |= {name: summary[name] for name in ("rank", "effective_dimension", "dashboard")}
    result["found"] = _count_found(scores, data)
    result["seconds"] |= summary["seconds"] | {"all": time.perf_counter() - began}
    emit(result | _paths(points=points, scores=scores, picture=picture), as_json, text.demo)
    if result["found"] < _DEMO_SHARE * len(data.planted):
        raise errors.CheckFailed(f"only {result['found']} of {len(data.planted)} planted rows were found")


def _score_demo(points: Path, scores: Path, seed: int, workers: int | None, quiet: bool) -> dict[str, Any]:
    with clusters.connect(workers=workers, echo=silence if quiet else None) as client:
        summary = jobs.score_to_zarr(
            points, scores, random_state=seed, overwrite=True, progress=not quiet, **_DEMO_MODEL
        )
        return summary | {"dashboard": client.dashboard_link}


def _paths(**paths: Path) -> dict[str, str]:
    return {name: str(path) for name, path in paths.items()}


def _count_found(scores: Path, data: synthetic.PlantedOutliers) -> int:
    best = jobs.top_rows(scores, len(data.planted), by="estimate")
    return len({row["row"] for row in best} & set(data.planted.tolist()))


def _draw(scores: Path, picture: Path, data: synthetic.PlantedOutliers, summary: Mapping[str, Any]) -> None:
    score, estimate = (np.asarray(zarr.open_array(scores / name, mode="r")[:]) for name in ("scores", "estimate"))
    title = text.demo_title(data.n_rows, len(data.planted), summary["distinct_landmarks"])
    plots.save(plots.outlier_figure(score, estimate, data.planted, title), picture)
