"""Results in words: every function takes the summary that a command would print as JSON and gives its text."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from daskrr.leverage.ranking import describe_rows
from daskrr.runtime.progress import Event, duration, interval

# Intervals are called wide if upper/lower - 1 exceeds this for more than 5 % of the rows.
_WIDE = 0.5

Summary = Mapping[str, Any]
Pairs = list[tuple[str, str]]


def scores(summary: Summary, with_rows: bool = True) -> str:
    """How rows were scored, the intervals if they are certified, and the highest rows, unless they are told apart."""
    certificate, highest = summary["certificate"], [_highest(summary)] if with_rows else []
    if certificate is None:
        parts = [_scored(summary), *highest]
    else:
        intervals = _intervals(certificate, summary["parameters"]["failure_probability"])
        parts = [_scored(summary), intervals, *highest, *advice(summary)]
    return "\n\n".join([*parts, *(f"Note: {line}" for line in summary["notes"])])


def _scored(summary: Summary) -> str:
    parameters = summary["parameters"]
    landmarks = f"{parameters['n_landmarks']:,} draws ({parameters['sampling']})"
    return _table(
        [
            ("rows", f"{summary['n_rows']:,} x {summary['n_features']} features"),
            ("kernel", _kernel(parameters["kernel"])),
            ("ridge", _figures(parameters["ridge"], "g")),
            ("landmarks", f"{landmarks}, {summary['distinct_landmarks']:,} distinct"),
            ("rank", f"{summary['rank']:,}"),
            *_outcome(summary),
            ("seed", str(parameters["random_state"])),
            *_gpus(summary["workers"]),
            *_times(summary["seconds"]),
            ("written to", summary["output"]),
        ]
    )


def _gpus(workers: Mapping[str, Any]) -> Pairs:
    return [("computed on", ", ".join(workers["processors"]))] if workers.get("device") == "cuda" else []


def _outcome(summary: Summary) -> Pairs:
    """A lower bound of the effective dimension unless an interval follows, and whether a tolerance was met, if any."""
    if summary["certificate"] is None:
        return [("effective dimension", _dimensions(summary["effective_dimension"]))]
    if "tolerance" not in summary:
        return []
    verdict = summary["tolerance"]
    return [("tolerance", f"{'met' if verdict['met'] else 'not met'}: {verdict['text']}")]


def _intervals(certificate: Mapping[str, Any], failure_probability: float) -> str:
    """A table with a line for every ridge; what is not finite is None in it."""
    chance = _chance(failure_probability if certificate["audit"]["rows"] else 0.0)
    lines = [
        f"every exact score lies in its interval, {chance}",
        "(width is upper/lower − 1; delta bounds what the landmarks leave unexplained of the kernel matrix)",
        f"{'ridge':>12}  {'effective dimension':>24}  {'delta/nλ':>10}  {'median width':>12}  {'95 % width':>10}",
    ]
    names = ("ridges", "effective_dimension", "deviation", "median_width", "most_width")
    for ridge, (low, high), deviation, median, most in zip(*(certificate[name] for name in names), strict=True):
        widths = f"{_bounded(deviation):>10}  {_bounded(median):>12}  {_bounded(most):>10}"
        lines.append(f"{ridge:>12g}  {f'{low:.6g} – {high:.6g}':>24}  {widths}")
    return "\n".join([*lines, *_fidelity(certificate)])


def _fidelity(certificate: Mapping[str, Any]) -> list[str]:
    """What Theorem 3 needs to know of the probabilities that landmarks were drawn by, a sentence for every ridge."""
    return [
        f"At ridge {one['ridge']:g}, {one['draws']:,} landmarks were drawn with at least {one['beta']:.3g} times the "
        f"probabilities that the exact scores give, which inflate their sum to at most "
        f"{_bounded(one['inflated_dimension'])}, {_chance(one['failure_probability'])}."
        for one in certificate["score_fidelity"] or []
    ]


def _bounded(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:.3g}"


def _highest(summary: Summary) -> str:
    ridges = np.atleast_1d(summary["parameters"]["ridge"])
    where = f" at ridge {ridges.min():g}" if len(ridges) > 1 else ""
    return f"highest rows by estimate{where}\n{describe_rows(summary['top'])}"


def advice(summary: Summary) -> list[str]:
    """How much of the width is round-off, and what to do if the intervals are wide."""
    certificate, verdict = summary["certificate"], summary.get("tolerance")
    roundoff = max(certificate["roundoff_share"])
    lines = [f"Round-off makes up {roundoff:.0%} of the width."] if roundoff > 0.01 else []
    if verdict is None:
        wide = any(width is None or width > _WIDE for width in certificate["most_width"])
    else:
        wide = not verdict["met"]
    if wide and roundoff > 0.5:
        remedy = "--dtype float64" if summary["parameters"]["dtype"] == "float32" else "a larger --ridge"
        lines.append(f"For narrower intervals, use {remedy}.")
    elif wide and verdict is None:
        lines.append("For narrower intervals, use more --landmarks, a larger --ridge, or --tolerance to find how many.")
    return [" ".join(lines)] if lines else []


def update(summary: Summary) -> str:
    """What an update did, and how the new rows differ from the old ones."""
    facts = summary["update"]
    residual, quantiles = facts["residual_share"], facts["quantiles"]
    before, now = map(_dimensions, facts["effective_dimension"])
    pairs = [
        ("rows", f"{facts['rows_before']:,} and {facts['rows_added']:,} new ones, {facts['rows_summed']:,} summed"),
        ("landmarks", f"{'drawn anew' if facts['refreshed'] else 'kept'}: {facts['reason']}"),
        ("effective dimension", f"{before} before, {now} now"),
        ("mean residual share", f"{residual['before']:.4g} before" + _in_new_rows(residual["new_rows"])),
        ("written to", summary["output"]),
    ]
    lines = [f"{'scores':>8}  {'before':>10}  {'new rows':>10}  {'all':>10}"]
    columns = (quantiles[name] for name in ("levels", "before", "new_rows", "all"))
    for level, *values in zip(*columns, strict=True):
        lines.append(f"{level:>7.0%}   " + "  ".join(f"{value:>10.3e}" for value in values))
    return "\n\n".join([_table(pairs), "\n".join(lines)])


def _in_new_rows(share: float | None) -> str:
    return "" if share is None else f", {share:.4g} in the new rows"


def unchanged(summary: Summary) -> str:
    """That there was nothing to do."""
    return f"nothing to do: {summary['output']} holds the scores of all {summary['n_rows']:,} rows, which are unchanged"


def outlook(summary: Summary) -> str:
    """What a job would do, and what that costs at most."""
    pairs = [
        ("job", summary["job"]),
        ("input", summary["input"]),
        ("output", summary["output"]),
        ("would", f"{summary['action']}: {summary['reason']}"),
    ]
    if summary["lease"] is not None:
        pairs.append(("but", f"the output is {_holder(summary['lease'])}; --wait waits for it"))
    if summary["action"] == "nothing":
        return _table(pairs)
    return "\n".join([_table(pairs), "", *summary["plan"]])


def status(summary: Summary) -> str:
    """What is published, what is under way, and by whom."""
    published, lease = summary["published"], summary["lease"]
    pairs = [
        ("output", summary["output"]),
        ("published", "nothing" if published is None else _generation(published)),
        *(("kept from before", _generation(generation)) for generation in summary["generations"][1:]),
        ("lease", "free" if lease is None or not lease["held"] else _holder(lease)),
    ]
    for attempt in summary["unfinished"]:
        pairs += _unfinished(attempt)
    return _table(pairs)


def _generation(one: Mapping[str, Any]) -> str:
    rows = "" if one["rows"] is None else f" of {one['rows']:,} rows"
    return f"{one['kind']}{rows} ({one['generation']}, {one['at']}, {one['bytes'] / 2**20:,.1f} MiB)"


def _holder(lease: Mapping[str, Any]) -> str:
    if lease["damaged"]:
        return "damaged; the next job takes it over when it stands still"
    fate = "which is gone" if lease["dead"] else f"heartbeat {lease['beat']}"
    return f"held by process {lease['pid']} on {lease['host']} since {lease['since']}, {fate}"


def _of(count: int, whole: int | None) -> str:
    """How many of all; of an unknown number where nothing tells it."""
    return f"{count:,}" if whole is None else f"{count:,} of {whole:,}"


def _unfinished(attempt: Mapping[str, Any]) -> Pairs:
    sums = ", ".join(f"{label} {_of(count, attempt['tasks'])}" for label, count in attempt["summed"].items())
    pairs = [
        ("unfinished", f"{attempt['rows']:,} rows ({attempt['generation']})"),
        ("tasks summed", sums or "none"),
        ("tasks scored", _of(attempt["scored"], attempt["tasks"])),
    ]
    if attempt["progress"] is not None:
        pairs.append(("last seen", _noted(attempt["progress"])))
    return [*pairs, ("last error", attempt["error"])] if attempt["error"] else pairs


def _noted(record: Mapping[str, Any]) -> str:
    ago = duration(max(0.0, time.time() - record["at"]))
    event = Event(**{name: value for name, value in record.items() if name != "at"})
    rate = f", {event.rate:,.0f} rows/s" if event.rate > 0 else ""
    rest = "" if event.remaining is None else f", {duration(event.remaining)} left"
    return f"{event.stage}, {event.done} of {event.total} tasks{rate}{rest} ({ago} ago)"


def certificate(summary: Summary) -> list[str]:
    """What is certain about scores, in sentences."""
    facts, n_rows = summary["certificate"], f"{summary['n_rows']:,}"
    if facts is None:
        return [
            f"Nothing is certified: the {n_rows} rows were scored without --certify.",
            "Scores of the sketch are at most the exact ones, up to round-off. Estimates correct them by what the "
            "landmarks leave unexplained of each row, and are the better guide to which rows stand out.",
        ]
    audit = facts["audit"]
    sentences = [
        f"Every one of the {n_rows} exact scores lies in its interval, for all rows and ridges at once, "
        f"{_chance(summary['parameters']['failure_probability'] if audit['rows'] else 0.0)}."
    ]
    names = ("ridges", "effective_dimension", "median_width", "most_width")
    for ridge, (low, high), median, most in zip(*(facts[name] for name in names), strict=True):
        sentences.append(
            f"At ridge {ridge:g} the effective dimension of the data, the sum of all exact scores, lies between "
            f"{low:.6g} and {high:.6g}. Half of the intervals are {_wide(median)}, 95 % of them {_wide(most)}: so much "
            "is the upper end above the lower one."
        )
    return [*sentences, _basis(audit), *_fidelity(facts), *advice(summary)]


def _wide(width: float | None) -> str:
    return "wide without bound" if width is None else f"at most {100 * width:.3g} % wide"


def _basis(audit: Mapping[str, Any]) -> str:
    if audit["exact"]:
        return "The landmarks explain every row up to round-off, which is allowed for."
    if not audit["rows"]:
        return "This rests on the trace of what the landmarks leave unexplained, without any chance; round-off is part."
    return (
        f"This rests on {audit['rows']:,} rows drawn at random by what the landmarks leave unexplained of each, which "
        f"bound the largest eigenvalue of all that is unexplained by {audit['delta']:.4g}. Round-off is part of it."
    )


def report(summary: Summary) -> str:
    """What was written where."""
    return _table(
        [("report of", summary["scores"]), ("rows", f"{summary['rows']:,}"), ("written to", summary["output"])]
    )


def parameters(summary: Summary) -> Pairs:
    """By what rows were scored, name by name."""
    settings = summary["parameters"]
    given = {
        "input": settings["input"],
        "kernel": _kernel(settings["kernel"]),
        "ridge λ": _figures(settings["ridge"], "g"),
        "landmarks": f"{settings['n_landmarks']:,} draws, {summary['distinct_landmarks']:,} distinct, rank "
        f"{summary['rank']:,}",
    }
    shown = {name.replace("_", " "): value for name, value in settings.items()}
    for name in ("input", "kernel", "ridge", "n landmarks"):
        del shown[name]
    words = {"True": "yes", "False": "no", "None": "none"}
    rest = {name: words.get(str(value), str(value)) for name, value in shown.items()}
    return list((given | rest).items())


def drift(summary: Summary) -> Pairs:
    """What the last update did."""
    facts = summary["update"]
    before, now = map(_dimensions, facts["effective_dimension"])
    share = facts["residual_share"]
    return [
        ("rows", f"{facts['rows_before']:,} before, {facts['rows_added']:,} new"),
        ("landmarks", f"{'drawn anew' if facts['refreshed'] else 'kept'}: {facts['reason']}"),
        ("effective dimension", f"before: {before}; now: {now}"),
        ("mean residual share", f"{share['before']:.4g} before" + _in_new_rows(share["new_rows"])),
    ]


def verification(summary: Summary) -> str:
    """Whether everything is as it was written."""
    return "\n".join([*summary["repaired"], *(summary["damage"] or ["everything is as it was written"])])


def rollback(summary: Summary) -> str:
    """What is published again."""
    return _table([("output", summary["output"]), ("published again", _generation(summary))])


def top(summary: Summary) -> str:
    """The highest rows."""
    return describe_rows(summary["rows"])


def sample(summary: Summary) -> str:
    """How many rows were drawn, by what, and how much their weights differ."""
    drawn_by = {
        "upper": "nine tenths by the upper ends of intervals, one tenth uniformly",
        "estimate": "half by the estimate, half uniformly",
    }
    return _table(
        [
            ("rows drawn", f"{summary['size']:,}"),
            ("distinct", f"{summary['distinct']:,}"),
            ("drawn by", drawn_by[summary["by"]]),
            ("smallest weight", f"{summary['smallest_weight']:.4g}"),
            ("largest weight", f"{summary['largest_weight']:.4g}"),
            ("sum of weights", f"{summary['sum_of_weights']:.6g}, on average the number of rows"),
            ("seed", str(summary["random_state"])),
            ("written to", summary["output"]),
        ]
    )


def model(summary: Summary) -> str:
    """What was fitted, and how well."""
    inflation = summary["risk_inflation"]
    chance = _chance(inflation["failure_probability"])
    return _table(
        [
            ("rows", f"{summary['n_rows']:,} x {summary['n_features']} features"),
            ("kernel", _kernel(summary["kernel"])),
            ("ridge", f"{summary['ridge']:g}"),
            ("landmarks", f"{summary['n_landmarks']:,}"),
            ("effective dimension of the model", f"{summary['effective_dimension']:.6g}"),
            ("R2 of training rows", _figures(summary["training_r2"], ".4f")),
            ("risk inflation", f"at most {inflation['factor']:.4g}, {chance}"),
            ("time", duration(summary["seconds"])),
            ("written to", summary["output"]),
        ]
    )


def _chance(failure_probability: float) -> str:
    return f"but for a chance of at most {failure_probability:g}" if failure_probability else "without exception"


def selection(summary: Summary) -> str:
    """What was chosen among what, and the model."""
    comparison = summary["selection"]
    over = "all rows" if comparison["errors"] == comparison["errors_all_rows"] else "rows that are no landmarks"
    names = {"loo": f"leave-one-out, over {over}", "gcv": "generalized cross-validation", "kfold": "folds"}
    kernels = [_kernel(spec) for spec in comparison["kernels"]]
    width = max(map(len, kernels))
    lines = [
        f"mean squared error by {names[comparison['scoring']]}, at the best of {len(comparison['ridges'])} ridges",
        f"{'kernel':<{width}}  {'ridge':>10}  {'error':>12}",
    ]
    for kernel, errors in zip(kernels, comparison["errors"], strict=True):
        judged = [
            (error, ridge) for error, ridge in zip(errors, comparison["ridges"], strict=True) if error is not None
        ]
        error, ridge = min(judged, default=(None, None))
        figures = f"{'none':>10}  {'':>12}" if error is None else f"{ridge:>10.3g}  {error:>12.6g}"
        lines.append(f"{kernel:<{width}}  {figures}")
    return "\n".join(lines) + "\n\n" + model(summary)


def predictions(summary: Summary) -> str:
    """How much was predicted."""
    return _table(
        [
            ("rows", f"{summary['n_rows']:,}"),
            ("targets", str(summary["n_targets"])),
            ("arrays", ", ".join(summary["arrays"])),
            ("time", duration(summary["seconds"])),
            ("written to", summary["output"]),
        ]
    )


def application(summary: Summary) -> str:
    """Which sketch new rows were held against, and the highest of them."""
    sketch, parameters = summary["sketch"], summary["parameters"]
    chance = sketch["failure_probability"]
    figures = _table(
        [
            ("new rows", f"{summary['n_rows']:,} x {summary['n_features']} features"),
            ("sketch", f"{sketch['origin']}, of {sketch['n_rows']:,} rows, rank {sketch['rank']:,}"),
            ("kernel", _kernel(parameters["kernel"])),
            ("ridge", _figures(parameters["ridge"], "g")),
            ("intervals", "not certified" if chance is None else f"certified, {_chance(chance)}"),
            *_times(summary["seconds"]),
            ("written to", summary["output"]),
        ]
    )
    return f"{figures}\n\n{_highest(summary)}"


def demo(summary: Summary) -> str:
    """How many planted rows were found, and where everything is."""
    return _table(
        [
            ("rows", f"{summary['rows']:,}, {summary['planted']} of them planted"),
            ("found", f"{summary['found']} of {summary['planted']} planted rows among as many highest estimates"),
            ("rank", f"{summary['rank']:,}"),
            ("effective dimension", _dimensions(summary["effective_dimension"])),
            *_times(summary["seconds"]),
            ("dashboard was", str(summary["dashboard"])),
            ("points", summary["points"]),
            ("scores", summary["scores"]),
            ("picture", summary["picture"]),
        ]
    )


def demo_title(rows: int, planted: int, landmarks: int) -> str:
    """What stands above the picture of the demo."""
    return f"{rows:,} rows, {planted} of them planted far from the others, scored with {landmarks:,} landmarks"


def _kernel(spec: Mapping[str, Any]) -> str:
    values = ", ".join(f"{name}={json.dumps(value)}" for name, value in spec.items() if name != "kernel")
    return f"{spec['kernel']}({values})"


def _dimensions(intervals: Sequence[tuple[float, float | None]]) -> str:
    """What the effective dimension at every ridge is between, or at least."""
    return ", ".join(map(interval, intervals))


def _figures(values: Any, form: str) -> str:
    return ", ".join(f"{value:{form}}" for value in np.atleast_1d(values))


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _times(seconds: Mapping[str, float]) -> Pairs:
    return [(name, duration(value)) for name, value in seconds.items()]


def _table(pairs: Pairs) -> str:
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs)
