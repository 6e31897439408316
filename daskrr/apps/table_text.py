"""Words about tables: what became of columns, what was chosen, and the highest rows with their values."""

from collections.abc import Mapping, Sequence
from typing import Any

from daskrr.leverage.ranking import describe_ceiling, describe_rows
from daskrr.runtime.progress import duration
from daskrr.tables.recipe import Recipe

Summary = Mapping[str, Any]
WIDEST = 40


def conversion(summary: Summary) -> str:
    """What was converted, and into what."""
    pairs = [
        ("rows", f"{summary['rows']:,}" + (f" ({summary['appended']:,} of them new)" if "appended" in summary else "")),
        ("features", f"{len(summary['columns'])}: {_listed(summary['columns'])}"),
        ("type", summary["dtype"]),
        ("chunks", " x ".join(f"{size:,}" for size in summary["chunks"])),
        ("standardized", "yes" if summary["standardized"] else "no"),
    ]
    if summary.get("constant_columns"):
        pairs.append(("constant, only centred", _listed(summary["constant_columns"])))
    if summary["missing"]:
        pairs.append(("values missing", _listed([f"{name} ({count:,})" for name, count in summary["missing"].items()])))
    if summary["dropped"]:
        pairs.append(("rows left out", f"{summary['dropped']:,}, which lack a value"))
    parts = [_table([*pairs, ("written to", summary["target"]), ("time", duration(summary["seconds"]))])]
    return "\n\n".join(parts + [treatment(summary["treatment"])] * bool(summary["treatment"]))


def treatment(columns: Sequence[Sequence[str]]) -> str:
    """What became of every column of a table."""
    return "columns\n" + "\n".join(f"  {name}: {done}" for name, done in columns)


def choices(record: Summary, seconds: float) -> str:
    """What a pilot chose, and why."""
    return (
        f"λ = {record['ridge']:g}: effective dimension about {record['effective_dimension']:.0f} of "
        f"{record['n_rows']:,} rows; {record['landmarks']:,} landmarks, {duration(max(seconds, 1.0))} or more on this "
        "machine\n"
        f"(by {record['pilot_rows']:,} rows: {record['criterion']})"
    )


def outlook(summary: Summary) -> str:
    """What some ridges make of the data, by a pilot."""
    lines = [f"{'ridge':>10}  {'effective dimension':>20}  {'landmarks':>10}  {'time or more':>14}"]
    lines += [
        f"{one['ridge']:>10.2g}  {one['effective_dimension']:>20.0f}  {one['landmarks']:>10,}  "
        f"{duration(max(one['seconds'], 1.0)):>14}"
        for one in summary["outlooks"]
    ]
    return "\n".join(
        [f"by a pilot of {summary['pilot_rows']:,} rows of {summary['n_rows']:,}:", *lines, summary["again"]]
    )


def top(summary: Summary) -> str:
    """The highest rows, with their values where they are known."""
    rows = summary["rows"]
    if not rows or "values" not in rows[0]:
        return describe_rows(rows)
    lines = [line for number, one in enumerate(rows, 1) for line in _row(number, one)]
    return "\n".join([*lines, *filter(None, [describe_ceiling(rows)])])


def _row(number: int, one: Summary) -> list[str]:
    ends = f", certainly between {one['lower']:.3g} and {one['upper']:.3g}" if "lower" in one else ""
    name = f"row {one['table_row']:,}" + (f" ({one['id']})" if one.get("id") else "")
    lines = [f"{number:>3}. {name}: {one['estimate']:.3g}{ends}"]
    lines.append("     " + ", ".join(f"{name} {_short(value)}" for name, value in one["values"].items()))
    if one["why"]:
        lines.append(f"     unlike its neighbours in {reasons(one['why'])}")
    return lines


def reasons(why: Sequence[Summary]) -> str:
    """In what a row is far from the landmarks that are nearest to it."""
    return ", ".join(f"{one['column']} ({_short(one['value'])}, theirs {_short(one['nearest'])})" for one in why)


def scored(summary: Summary, rows: str) -> str:
    """A run that chose for itself: what it chose and found, the highest rows, and how to have the same again."""
    made = (summary["features"] or {}).get("recipe")
    parts = [treatment(Recipe.from_record(made).describe())] if made is not None else []
    if summary["dropped"]:
        parts.append(f"{summary['dropped']:,} rows of the table lack a value and are left out")
    parts += [choices(summary["choices"], summary["expected_seconds"]), rows, "The highest rows\n" + top(summary)]
    if summary["report"] is not None:
        parts.append(f"A report of it: {summary['report']}")
    return "\n\n".join([*parts, f"The same with every choice spelled out:\n  {summary['again']}"])


def export(summary: Summary) -> str:
    """What was written as a table."""
    return _table(
        [
            ("rows", f"{summary['rows']:,}"),
            ("columns", _listed(summary["columns"])),
            ("written to", summary["target"]),
            ("time", duration(summary["seconds"])),
        ]
    )


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f", … ({len(names)})" if len(names) > 8 else "")


def _table(pairs: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in pairs)
