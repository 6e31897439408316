"""Choices that are made for people: explained, recorded, and spelled out as a command line."""

import json
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from daskrr.apps.convert.likeness import stem
from daskrr.apps.report import write_report
from daskrr.errors import DaskrrError, InvalidData
from daskrr.jobs.export import points_of
from daskrr.jobs.reader import open_scores, top_rows
from daskrr.jobs.row_values import RowValues
from daskrr.kernels import Kernel, from_spec
from daskrr.leverage import plan
from daskrr.leverage.pilot import Pilot, pilot
from daskrr.leverage.plan import measure_matmul
from daskrr.nystrom.sketch import load_sketch
from daskrr.runtime.rows import open_rows
from daskrr.storage.zarr_input import RESPONSES

SEED, SHOWN = 0, 20


def default_output(points: str) -> str:
    """Where scores go if nobody says: beside the rows.

    Raises
    ------
    InvalidData
        The rows are not in a folder.
    """
    if "://" in points:
        raise InvalidData(f"say where the scores of {points} are to be written: daskrr score POINTS OUTPUT")
    place = Path(points.rstrip("/"))
    return str(place.with_name(f"{stem(place)}.scores.zarr"))


def report_beside(output: str) -> str | None:
    """Where the report of scores goes if nobody says; nowhere beside a bucket."""
    return None if "://" in output else str(Path(output).with_name(f"{stem(output)}.report.html"))


def made_pilot(points: str, kernel: Kernel, arguments: Mapping[str, Any]) -> Pilot:
    """A pilot of stored rows, and of their response if it is kept beside them."""
    response = response_beside(points)
    rows = open_rows(points, missing_chunks=arguments.get("missing_chunks", "refuse"))
    return pilot(rows, kernel, None if response is None else open_rows(response, ndim=1, name="the response"))


def response_beside(points: str) -> str | None:
    """The response that a table had, where its store keeps it."""
    place = f"{points}/{RESPONSES}"
    return place if "://" not in points and Path(place).is_dir() else None


def choose(
    points: str, kernel: Kernel, arguments: Mapping[str, Any], is_ours: bool
) -> tuple[Kernel, dict[str, Any], dict[str, Any]]:
    """Kernel and arguments with a ridge, landmarks and a seed, and the record of how they were chosen.

    The choice for a store that is ours is noted beside it, so that it is the same however the store grows; in the
    store it would look like a change of the rows.
    """
    seed = arguments.get("random_state", SEED)
    key = str(kernel.to_spec())
    noted = Path(points).with_name(f"{stem(points)}.choices.json")
    known = _noted(noted) if is_ours and noted.exists() else {}
    record = known.get(key) or made_pilot(points, kernel, arguments).to_record()
    if is_ours and key not in known:
        _write(noted, json.dumps(known | {key: record}, indent=2))
    given = {"ridge": record["ridge"], "certify": True, "random_state": seed}
    if "sampling" not in arguments:
        given["landmarks"] = record["landmarks"]
    return from_spec(record["kernel"]), given | dict(arguments), record


def _noted(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for one in found.values():
            from_spec(one["kernel"]), float(one["ridge"]), int(one["landmarks"])
    except (ValueError, TypeError, KeyError, AttributeError, DaskrrError) as error:
        raise InvalidData(f"{path} does not tell what was chosen ({error!r}): remove it, to choose anew") from None
    return found


def _write(path: Path, text: str) -> None:
    """A small file, there as a whole or not at all."""
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def spelled_out(points: str, output: str, kernel: Kernel, arguments: Mapping[str, Any]) -> str:
    """The command line that does the same with every choice given."""
    words = ["daskrr", "score", points, output]
    spec = kernel.to_spec()
    scale = spec.get("length_scale")
    if spec["kernel"] == "gaussian" and isinstance(scale, float):
        words += ["--kernel", "gaussian", "--length-scale", repr(scale)]
    else:
        words += ["--kernel-spec", json.dumps(spec)]
    names = {"ridge": "--ridge", "landmarks": "--landmarks", "random_state": "--seed"}
    words += [word for name, option in names.items() for word in (option, f"{arguments[name]}")]
    return shlex.join([*words, "--certify"])


def highest_rows(output: str, rows: list[dict[str, Any]], points: str | None = None) -> list[dict[str, Any]]:
    """Rows of a ranking with their values, and what sets each apart; as they are where the points cannot be read."""
    found = points_of(open_scores(output), points, needed=points is not None)
    if found is None:
        return rows
    numbers = [one["row"] for one in rows]
    about = zip(rows, found.of(numbers), found.reasons(numbers, load_sketch(output)), strict=True)
    return [one | known | {"why": why} for one, known, why in about]


def named_rows(output: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a ranking with their numbers in the table and what identifies them, where the points can be read."""
    found = points_of(open_scores(output), None, needed=False)
    if found is None:
        return rows
    return [one | known for one, known in zip(rows, found.named([one["row"] for one in rows]), strict=True)]


def concluded(points: str, output: str, kernel: Kernel, arguments: Mapping[str, Any], quiet: bool) -> dict[str, Any]:
    """What is told after a run that chose for itself; writes the report."""
    report = report_beside(output)
    if report is not None:
        write_report(output, report, overwrite=True, progress=not quiet)
    return {
        "rows": highest_rows(output, top_rows(output, SHOWN)),
        "report": report,
        "points": points,
        "dropped": RowValues.at(points).dropped,
        "again": spelled_out(points, output, kernel, arguments),
    }


def outlook(points: str, kernel: Kernel, arguments: Mapping[str, Any], workers: int, shown: str) -> dict[str, Any]:
    """What some ridges make of the data, which is called ``shown``, and cost, ready for JSON."""
    made = made_pilot(points, kernel, arguments)
    rate = measure_matmul(arguments.get("dtype", "float64"))
    found = []
    for one in made.outlooks():
        given = {"ridge": one.ridge, "landmarks": one.landmarks, "certify": True} | dict(arguments)
        cost = plan(points, made.kernel, workers=workers, **given)
        found.append(asdict(one) | {"seconds": cost.seconds(rate)})
    again = spelled_out(shown, "OUTPUT", made.kernel, found[1] | {"random_state": arguments.get("random_state", SEED)})
    return {"outlooks": found, "pilot_rows": len(made.eigenvalues), "n_rows": made.n_rows, "again": again}
