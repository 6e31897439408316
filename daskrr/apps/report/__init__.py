"""The report: one file of HTML about published scores, which needs no network and nothing beside it."""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from daskrr import __version__
from daskrr.apps import text
from daskrr.apps.report import html, origins
from daskrr.errors import InvalidParameter, OutputExists
from daskrr.jobs.reader import ScoreStore, open_scores
from daskrr.leverage.plotting import drawings
from daskrr.leverage.profile import Profile
from daskrr.leverage.ranking import CEILING
from daskrr.leverage.writing import LEVELS
from daskrr.runtime.progress import Reporter, duration, interval
from daskrr.storage.urls import locate, redact

# Inches, so that what is written in a picture can still be read on a telephone.
WIDTH, HEIGHT = 4.9, 3.7


def write_report(
    path: str | os.PathLike,
    output: str | os.PathLike,
    *,
    overwrite: bool = False,
    progress: Reporter | bool | None = None,
) -> dict[str, Any]:
    """Write a report of published scores as one HTML file that needs no network.

    It has the summary, what is certified, histograms, the highest rows, the spectrum, parameters, times and versions.
    The scores are read once, chunk by chunk, where Dask computes.

    Parameters
    ----------
    path
        What :func:`daskrr.score_to_zarr` or ``LeverageResult.store`` wrote, local or on ``s3://``.
    output
        Local file to write.
    overwrite
        Whether an earlier report there is replaced.

    Raises
    ------
    InvalidData
        Nothing is published at ``path``.
    OutputExists
        Something is at ``output``, and may not be replaced or is no report.

    Examples
    --------
    >>> import numpy as np, daskrr, tempfile
    >>> from daskrr.apps.report import write_report
    >>> X = np.random.default_rng(0).standard_normal((500, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = daskrr.score_to_zarr(X, f"{folder}/scores.zarr", daskrr.kernels.Linear(), 1e-2, 50)
    ...     write_report(f"{folder}/scores.zarr", f"{folder}/report.html")["rows"]
    500
    """
    target = _checked(output, overwrite)
    name = redact(locate(path))
    store = open_scores(path)
    store.check_whole_data()
    text = render(store, name, progress, path)
    _write(target, text, overwrite)
    return {"scores": name, "rows": store.summary["n_rows"], "output": str(target), "bytes": len(text.encode())}


def _checked(output: str | os.PathLike, overwrite: bool) -> Path:
    """Where to write, if that may be written."""
    if "://" in os.fspath(output):
        raise InvalidParameter(f"{redact(os.fspath(output))} is not a local file: write to one and copy it there.")
    target = Path(output)
    if not target.parent.is_dir():
        raise InvalidParameter(f"there is no folder {target.parent}, so {target} cannot be written. Create it first.")
    if os.path.lexists(target):
        if not (target.is_file() and _is_report(target)):
            raise OutputExists(f"{target} exists and is not a report of daskrr; it is left alone. Name another.")
        if not overwrite:
            raise OutputExists(f"{target} holds a report already. Pass overwrite=True (--overwrite) to replace it.")
    return target


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        return html.GENERATOR.encode() in file.read(1000)


def _write(target: Path, text: str, overwrite: bool) -> None:
    """Put the file in its place when all of it is there."""
    partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, _checked(target, overwrite))
    finally:
        partial.unlink(missing_ok=True)


def render(
    store: ScoreStore, name: str, progress: Reporter | bool | None = None, path: str | os.PathLike | None = None
) -> str:
    """The report of a store that is called ``name`` and is at a path, as HTML."""
    summary, profile = store.summary, store.profile(progress=progress)
    now = datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC")
    title = f"Leverage scores of {os.path.basename(str(summary['parameters']['input']).rstrip('/'))}"
    parts = [
        html.cards(_figures(summary, profile)),
        html.section(
            "What is certain", html.paragraphs([*text.certificate(summary), *summary["notes"]]), *_ridges(summary)
        ),
        html.section("Scores", html.side_by_side(*_score_pictures(store, profile)), _quantiles(profile)),
        html.section("Highest rows", _top(profile), *_values(store, profile, path)),
        *_sketch(store),
        *_update(summary),
        *origins.treatment_of_columns(store),
        html.section("Parameters", html.facts("What the scores were computed with", text.parameters(summary))),
        html.section("The run", _run(summary)),
    ]
    return html.page(title, name, parts, f"Written by daskrr {__version__} on {now}. This file needs no network.")


def _figures(summary: Mapping[str, Any], profile: Profile) -> Iterator[tuple[str, str]]:
    """The key figures, at the smallest ridge."""
    ridges, certificate = np.atleast_1d(summary["parameters"]["ridge"]), summary["certificate"]
    column = int(ridges.argmin())
    at = f" at λ = {ridges[column]:g}"
    yield "rows × features", f"{summary['n_rows']:,} × {summary['n_features']:,}"
    yield "effective dimension" + at, interval(summary["effective_dimension"][column])
    if certificate is not None:
        median = certificate["median_width"][column]
        yield "median width of intervals", "unbounded" if median is None else f"{median:.1%}"
    yield "landmarks", f"{summary['distinct_landmarks']:,}"
    yield "highest estimate", f"{profile.top.estimate[0]:.4g}"


def _ridges(summary: Mapping[str, Any]) -> list[str]:
    """A line for every ridge, if they are certified."""
    certificate = summary["certificate"]
    if certificate is None:
        return []
    names = ("ridges", "effective_dimension", "deviation", "median_width", "most_width", "relative_width")
    rows = [
        [f"{ridge:g}", f"{low:.6g} – {high:.6g}", *map(_bounded, widths)]
        for ridge, (low, high), *widths in zip(*(certificate[name] for name in names), strict=True)
    ]
    heads = ["ridge λ", "effective dimension", "δ/nλ", "median width", "95 % width", "widest"]
    caption = "Width is upper/lower − 1; the widest is of rows of at least average score; δ bounds what is unexplained"
    return [html.table(caption, heads, rows)]


def _bounded(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:.3g}"


def _drawn(draw: Callable[..., Any]) -> str:
    """A picture as SVG; the page has its title."""
    plots = drawings()
    figure = plots.new_figure(WIDTH, HEIGHT)
    axes = draw(ax=figure.subplots())
    axes.set_title("", loc="left")
    for label in list(axes.texts):
        label.remove()
    return plots.save_svg(figure)


def _score_pictures(store: ScoreStore, profile: Profile) -> Iterator[str]:
    half, most = profile.quantiles("estimate", [0.5, 0.95])
    yield html.figure(
        _drawn(store.plot.scores),
        f"Histogram of the estimated scores of {profile.n_rows:,} rows: half are up to {half:.3g}, 95 % up to "
        f"{most:.3g}, and the highest is {profile.top.estimate[0]:.3g}.",
        "How many rows have which estimate. Triangles mark the highest rows.",
    )
    if profile.top.lower is not None and profile.top.upper is not None:
        yield html.figure(
            _drawn(store.plot.intervals),
            f"Certified intervals of {profile.n_rows:,} rows in order of their estimate, beginning with row "
            f"{profile.top.rows[0]}, whose exact score is between {profile.top.lower[0]:.3g} and "
            f"{profile.top.upper[0]:.3g}.",
            "Between which ends exact scores are. The highest rows are on the left; groups of rows are averaged.",
        )


def _quantiles(profile: Profile) -> str:
    names = list(profile.counts)
    found = zip(*(profile.quantiles(name, LEVELS) for name in names), strict=True)
    rows = [
        [f"{level:.0%}", *(f"{value:.3e}" for value in values)] for level, values in zip(LEVELS, found, strict=True)
    ]
    return html.table("Share of the rows whose value is at most (to 1.2 % of it)", ["share", *names], rows)


def _top(profile: Profile) -> str:
    records = profile.top.to_records()
    if profile.top.lower is None or profile.top.upper is None:
        rows = [
            [str(record["row"]), *(f"{record[name]:.4e}" for name in ("estimate", "scores", "residual"))]
            for record in records
        ]
        return html.table(
            f"By estimate.{_ceiling(profile)}", ["row", "estimate", "score of the sketch", "residual"], rows
        )
    most = float(profile.top.upper.max())
    rows = [
        [
            str(record["row"]), f"{record['estimate']:.4e}", f"{record['lower']:.3e} – {record['upper']:.3e}",
            f"{record['scores']:.3e}", f"{record['residual']:.3e}",
        ]
        for record in records
    ]  # fmt: skip
    bars = [html.interval_bar(record["lower"], record["estimate"], record["upper"], most) for record in records]
    heads = ["row", "estimate", "certainly between", "score of the sketch", "residual"]
    caption = f"By estimate, highest first; rows are counted from 0.{_ceiling(profile)}"
    return html.table(caption, heads, rows, bars)


def _ceiling(profile: Profile) -> str:
    """What no row can exceed, and how many are there, where that is known."""
    if profile.top.ceiling is None or profile.at_ceiling is None:
        return ""
    count, above = profile.at_ceiling
    return f" {CEILING.format(profile.top.ceiling)}; {count:,} of {profile.n_rows:,} estimates are above {above:.4g}."


def _values(store: ScoreStore, profile: Profile, path: str | os.PathLike | None) -> list[str]:
    return [] if path is None else origins.values_of_rows(path, store, profile.top.rows.tolist())


def _sketch(store: ScoreStore) -> list[str]:
    """Spectrum and path, if they were recorded."""
    summary = store.summary
    if "spectrum" not in summary or not summary["spectrum"]["ranks"]:
        return []
    largest = summary["spectrum"]["eigenvalues"][0]
    path = summary["path"]
    ends = [f"{path['sketch_dimension'][i]:.4g} at ridge {path['ridges'][i]:.3g}" for i in (0, -1)]
    spectrum = html.figure(
        _drawn(store.plot.spectrum),
        f"Eigenvalues of the sketch in descending order, the largest {largest:.4g}, with n times the ridge as a line.",
        "Eigenvalues of the sketch. Far above nλ they count as 1 towards the effective dimension, far below as 0.",
    )
    ridges = html.figure(
        _drawn(store.plot.path),
        f"Effective dimension of the sketch, a lower bound, against the ridge, from {ends[0]} to {ends[1]}.",
        "How the effective dimension depends on the ridge"
        + (", with the interval that the exact one is in." if path["lower"] is not None else "; it is at least this."),
    )
    return [html.section("Spectrum", html.side_by_side(spectrum, ridges))]


def _update(summary: Mapping[str, Any]) -> list[str]:
    """How the rows of the last update differ, if there was one."""
    if "update" not in summary:
        return []
    quantiles = summary["update"]["quantiles"]
    columns = (quantiles[name] for name in ("levels", "before", "new_rows", "all"))
    rows = [[f"{level:.0%}", *(f"{value:.3e}" for value in values)] for level, *values in zip(*columns, strict=True)]
    drift = html.table("Share of the rows whose score is at most", ["share", "before", "new rows", "all now"], rows)
    return [html.section("Last update", html.facts("What it found", text.drift(summary)), drift)]


def _run(summary: Mapping[str, Any]) -> str:
    seconds, workers = summary["seconds"], summary["workers"]
    times = [(name, duration(value)) for name, value in seconds.items()]
    places = [
        ("workers", f"{workers.get('count', 1):,}"),
        ("processors", ", ".join(workers.get("processors", []))),
        ("p × p algebra", summary["algebra"]["place"]),
    ]
    return html.side_by_side(
        html.facts("Time and place", [*times, *places]), html.facts("Versions", summary["versions"].items())
    )
