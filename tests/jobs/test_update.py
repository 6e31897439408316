"""Scores of a growing input: pass 1 over the new rows alone, and landmarks drawn anew where they no longer do."""

import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import strategies as st
from strategies import as_zarr
from variants import examples, slow_but

import daskrr
from daskrr.errors import InputGrown, InvalidData, InvalidParameter, SourceChanged
from daskrr.jobs import reader, verification
from daskrr.kernels import Gaussian
from daskrr.leverage import algorithm
from daskrr.leverage.writing import Receipt, few_counts, sum_counts
from daskrr.numerics import histogram
from daskrr.nystrom.audit import BegunAudit
from daskrr.nystrom.ledger import Ledger
from daskrr.nystrom.sampling import Uniform
from daskrr.nystrom.strategies import Certify, Tolerance
from daskrr.runtime import tree
from daskrr.storage.output import RESULT_KEY, Output
from daskrr.storage.records import Records

KERNEL = Gaussian(1.5)
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def large_spans(monkeypatch):
    """Spans of several blocks, on few rows."""
    monkeypatch.setattr(tree, "SPANS_LEFT", 0)


def data(n, d=3, seed=0, offset=0.0):
    return np.random.default_rng(seed).standard_normal((n, d)) + offset


def stored(tmp_path, X, chunk=50):
    return as_zarr(X, (chunk, X.shape[1]), str(tmp_path / "X"))


def append(array, rows):
    before = array.shape[0]
    array.resize((before + len(rows), array.shape[1]))
    array[before:] = rows


OPTIONS = {"certify": True, "random_state": 0, "block_rows": 50, "progress": False}


def score(X, output, landmarks=60, **options):
    return daskrr.score_to_zarr(X, output, KERNEL, 1e-2, landmarks, **OPTIONS | options)


def update(X, output, **options):
    return daskrr.update_scores(X, output, **{"progress": False} | options)


def contents(output):
    group = zarr.open_group(output, mode="r")
    return {name: array[...].tobytes() for name, array in group.arrays()}


def landmarks_of(output):
    store = Output(output)
    return store.committed["base"]["indices"]


@pytest.mark.parametrize(
    ("sizes", "sampling", "certify"),
    [
        pytest.param((400, 430, 610), "residual", True, marks=SLOW),
        pytest.param((450, 451), "leverage", True, marks=SLOW),
        pytest.param((450, 451), "uniform", False, marks=SLOW),
        pytest.param((433, 480, 900), "uniform", True, marks=SLOW),
        ((149, 151, 152), "residual", False),
    ],
)
def test_update__has_the_bits_of_a_full_run_with_the_same_landmarks(sizes, sampling, certify, tmp_path):
    rows = data(sizes[-1])
    X = stored(tmp_path, rows[: sizes[0]])
    options = {"sampling": sampling, "certify": certify}
    score(X, tmp_path / "out.zarr", **options)
    landmarks = landmarks_of(tmp_path / "out.zarr")
    for before, now in itertools.pairwise(sizes):
        append(X, rows[before:now])
        with pytest.raises(InputGrown, match=rf"{before} rows of .* which has {now} now.*daskrr update"):
            score(X, tmp_path / "out.zarr", **options)
        found = update(X, tmp_path / "out.zarr", refresh="never")["update"]
        assert (found["rows_before"], found["rows_added"], found["refreshed"]) == (before, now - before, False)
        assert now - before <= found["rows_summed"] <= now - before + 49
        score(X, tmp_path / f"{now}.zarr", None, **options | {"sampling": landmarks})
        assert contents(tmp_path / "out.zarr") == contents(tmp_path / f"{now}.zarr")
        np.testing.assert_array_equal(landmarks_of(tmp_path / "out.zarr"), landmarks)
        assert verification.verify(tmp_path / "out.zarr") == []
    assert update(X, tmp_path / "out.zarr")["n_rows"] == sizes[-1]
    assert score(X, tmp_path / "out.zarr", **options)["n_rows"] == sizes[-1]


@pytest.mark.slow
def test_update__sums_the_new_rows_alone(tmp_path, monkeypatch):
    X = stored(tmp_path, data(620))
    score(X, tmp_path / "out.zarr")
    append(X, data(40, seed=1))
    events = []
    found = update(X, tmp_path / "out.zarr", progress=events.append)
    assert found["update"]["rows_summed"] == 60
    assert found["update"]["refreshed"] is False
    assert not [event for event in events if "residuals" in event.stage]


@pytest.mark.slow
def test_update__intervals_hold_for_old_and_new_rows(tmp_path):
    rows = data(500)
    X = stored(tmp_path, rows[:420])
    score(X, tmp_path / "out.zarr")
    append(X, rows[420:])
    update(X, tmp_path / "out.zarr", refresh="never")
    exact = daskrr.exact.leverage_scores(rows, KERNEL, 1e-2)
    found = daskrr.open_scores(tmp_path / "out.zarr")
    assert (found["lower"][:] <= exact).all()
    assert (exact <= found["upper"][:]).all()


def test_update__draws_landmarks_anew_where_they_do_not_cover_the_new_rows(tmp_path):
    rows = np.vstack([data(400), data(60, offset=30.0)])
    X = stored(tmp_path, rows[:400])
    score(X, tmp_path / "out.zarr", 100)
    append(X, rows[400:])
    found = update(X, tmp_path / "out.zarr")["update"]
    assert found["refreshed"]
    assert "unexplained" in found["reason"]
    assert found["residual_share"]["new_rows"] > 0.9 > found["residual_share"]["before"]
    assert (landmarks_of(tmp_path / "out.zarr") >= 400).any()
    score(X, tmp_path / "anew.zarr", 100)
    assert contents(tmp_path / "out.zarr") == contents(tmp_path / "anew.zarr")
    [[before, _]], [[now, _]] = found["effective_dimension"]
    assert now > before
    kept = daskrr.update_scores  # the same rows, with the landmarks as they were, if that is asked for
    score(X[:400], tmp_path / "kept.zarr", 100)
    assert kept(rows, tmp_path / "kept.zarr", refresh="never", progress=False)["update"]["refreshed"] is False


@pytest.mark.slow
def test_update__draws_landmarks_anew_with_a_sketch_ridge(tmp_path):
    X, sampling = stored(tmp_path, data(300)), Uniform(sketch_ridge=1e-3)
    score(X, tmp_path / "out.zarr", sampling=sampling)
    append(X, data(60, seed=1))
    found = update(X, tmp_path / "out.zarr", refresh="never")["update"]
    assert (found["refreshed"], found["reason"]) == (True, "the published run has left nothing to go on from")
    score(X, tmp_path / "anew.zarr", sampling=sampling)
    assert contents(tmp_path / "out.zarr") == contents(tmp_path / "anew.zarr")


@pytest.mark.slow
def test_update__draws_landmarks_anew_if_asked(tmp_path):
    X = stored(tmp_path, data(400))
    score(X, tmp_path / "out.zarr")
    append(X, data(50, seed=1))
    found = update(X, tmp_path / "out.zarr", refresh="always")["update"]
    assert (found["refreshed"], found["reason"]) == (True, "asked for")
    score(X, tmp_path / "anew.zarr")
    assert contents(tmp_path / "out.zarr") == contents(tmp_path / "anew.zarr")


@pytest.mark.slow
def test_update__keeps_a_tolerance_or_draws_landmarks_until_it_is_met(tmp_path):
    rows = np.vstack([data(400, 2), data(20, 2, seed=1), data(60, 2, offset=30.0)])
    X = stored(tmp_path, rows[:400])
    first = score(X, tmp_path / "out.zarr", Tolerance(0.3, most=400))
    assert first["tolerance"]["met"]
    append(X, rows[400:420])
    kept = update(X, tmp_path / "out.zarr")
    assert kept["tolerance"]["met"]
    assert not kept["update"]["refreshed"]
    append(X, rows[420:])
    drawn = update(X, tmp_path / "out.zarr")
    assert drawn["tolerance"]["met"]
    assert drawn["update"]["refreshed"]
    spent = sum(one["failure_probability"] for one in drawn["rounds"])
    assert spent < drawn["certificate"]["failure_probability"]
    exact = daskrr.exact.leverage_scores(rows, KERNEL, 1e-2)
    found = daskrr.open_scores(tmp_path / "out.zarr")
    assert (found["lower"][:] <= exact).all()
    assert (exact <= found["upper"][:]).all()


@pytest.fixture
def audits(monkeypatch):
    """Every audit that is made: its stream, its share of the failure probability, and the bound that it found."""
    made, streams = [], []
    begin, outcome = algorithm.begin_audit, BegunAudit.outcome

    def begun(run, sketch, first, size, seed, stream):
        streams.append(stream)
        return begin(run, sketch, first, size, seed, stream)

    def noted(self, executor, failure_probability):
        found = outcome(self, executor, failure_probability)
        made.append((streams[-1], failure_probability, found.delta))
        return found

    monkeypatch.setattr(algorithm, "begin_audit", begun)
    monkeypatch.setattr(BegunAudit, "outcome", noted)
    return made


def ledger_of(output):
    return Ledger.from_record(Output(output).committed["ledger"])


@pytest.mark.parametrize(
    "paths",
    [
        ("never", "auto", "auto"),
        pytest.param(("auto", "never", "always", "auto"), marks=pytest.mark.slow),
        pytest.param(("always", "never", "never", "auto"), marks=pytest.mark.slow),
    ],
    ids=", ".join,
)
def test_update__forgets_neither_a_tolerance_nor_what_was_spent(paths, audits, tmp_path):
    rows = np.vstack([data(400, 2), data(60, 2, seed=1), data(60, 2, offset=30.0)])
    sizes = [400, *np.linspace(420, len(rows), len(paths), dtype=int)]
    X = stored(tmp_path, rows[:400])
    summary = score(X, tmp_path / "out.zarr", Tolerance(0.3, most=400))
    numbers = [ledger_of(tmp_path / "out.zarr").audits]
    for path, (before, now) in zip(paths, itertools.pairwise(sizes), strict=True):
        append(X, rows[before:now])
        summary = update(X, tmp_path / "out.zarr", refresh=path)
        assert summary["tolerance"]["relative"] == 0.3
        assert summary["certificate"]["failure_probability"] == 1e-6
        assert summary["ledger"] == ledger_of(tmp_path / "out.zarr").to_record()
        assert summary["ledger"]["spent"] < 1e-6
        numbers.append(ledger_of(tmp_path / "out.zarr").audits)
        exact = daskrr.exact.leverage_scores(rows[:now], KERNEL, 1e-2)
        found = daskrr.open_scores(tmp_path / "out.zarr")
        assert (found["lower"][:] <= exact).all()
        assert (exact <= found["upper"][:]).all()
    assert summary["tolerance"]["met"]
    assert numbers == sorted(set(numbers))
    streams = [stream for stream, _, _ in audits]
    assert len(set(streams)) == len(streams)
    assert max(streams) < numbers[-1]
    assert math.fsum(share for _, share, _ in audits) <= summary["ledger"]["spent"] * (1 + 1e-12)


def test_update__after_a_rollback_counts_what_was_spent_before_it(tmp_path):
    rows = np.vstack([data(400, 2), data(40, 2, seed=1)])
    X = stored(tmp_path, rows[:400])
    score(X, tmp_path / "out.zarr", Tolerance(0.3, most=400))
    append(X, rows[400:])
    update(X, tmp_path / "out.zarr")
    spent = ledger_of(tmp_path / "out.zarr").audits
    daskrr.jobs.rollback(tmp_path / "out.zarr")
    assert ledger_of(tmp_path / "out.zarr").audits < spent
    update(X, tmp_path / "out.zarr")
    assert ledger_of(tmp_path / "out.zarr").audits > spent


@pytest.mark.slow
def test_update__draws_anew_once_it_may_where_kept_landmarks_missed_the_tolerance(tmp_path, caplog):
    rows = np.vstack([data(400, 2), data(60, 2, offset=30.0), data(20, 2, seed=1)])
    X = stored(tmp_path, rows[:400])
    score(X, tmp_path / "out.zarr", Tolerance(0.3, most=400))
    append(X, rows[400:460])
    kept = update(X, tmp_path / "out.zarr", refresh="never")
    assert (kept["tolerance"]["met"], kept["tolerance"]["met_when_drawn"]) == (False, True)
    assert kept["tolerance"]["text"] in caplog.messages
    append(X, rows[460:])
    drawn = update(X, tmp_path / "out.zarr")
    assert "wider than the tolerance allows" in drawn["update"]["reason"]
    assert drawn["tolerance"]["met"]


@pytest.mark.slow
def test_update__does_not_draw_anew_for_a_tolerance_that_could_not_be_met(tmp_path):
    rows = data(460, 4)
    X = stored(tmp_path, rows[:400])
    first = score(X, tmp_path / "out.zarr", Tolerance(1e-9, most=128))
    assert first["tolerance"]["met_when_drawn"] is False
    for before, now in ((400, 430), (430, 460)):
        append(X, rows[before:now])
        found = update(X, tmp_path / "out.zarr")
        assert (found["update"]["refreshed"], found["tolerance"]["met"]) == (False, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "offset"),
    [
        pytest.param("pass 1", 0.0, id="pass 1-kept"),
        pytest.param("pass 1", 30.0, id="pass 1-drawn anew"),
        pytest.param("pass 2", 0.0, id="pass 2-kept"),
        pytest.param("pass 2", 30.0, id="pass 2-drawn anew"),
    ],
)
def test_update__makes_an_audit_again_that_was_made_and_not_committed(stage, offset, audits, tmp_path):
    rows = np.vstack([data(300, 2), data(60, 2, offset=offset)])
    for name in ("killed", "whole"):
        score(rows[:300], tmp_path / name, Tolerance(0.3, most=300))
    first = len(audits) // 2
    del audits[: first + first]

    def stop(event):
        if event.stage.startswith(stage) and audits:
            raise Stop

    with pytest.raises(Stop):
        update(rows, tmp_path / "killed", progress=stop)
    made = len(audits)
    update(rows, tmp_path / "killed")
    again = audits[made:]
    del audits[:]
    update(rows, tmp_path / "whole")
    assert made
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert ledger_of(tmp_path / "killed") == ledger_of(tmp_path / "whole")
    assert again[-1] == audits[-1]


@pytest.mark.slow
def test_update__without_a_tolerance_spends_all_that_was_asked_each_time(audits, tmp_path):
    rows = data(500)
    for now, path in ((400, None), (430, "never"), (460, "always"), (500, "auto")):
        if path is None:
            score(rows[:now], tmp_path / "out.zarr")
        else:
            update(rows[:now], tmp_path / "out.zarr", refresh=path)
        assert audits[-1][:2] == (0, 1e-6)
        assert ledger_of(tmp_path / "out.zarr").spent == 1e-6


@pytest.mark.slow
def test_update__without_chance_spends_nothing(audits, tmp_path):
    rows = data(440, 2)
    score(rows[:400], tmp_path / "out.zarr", Tolerance(0.5, most=400), certify=Certify(failure_probability=0))
    for now, path in ((420, "never"), (440, "always")):
        summary = update(rows[:now], tmp_path / "out.zarr", refresh=path)
        assert summary["tolerance"]["met"]
        assert summary["ledger"]["spent"] == summary["certificate"]["failure_probability"] == 0
    assert {share for _, share, _ in audits} == {0.0}


@pytest.mark.parametrize("refresh", slow_but(["always", "never"], "never"))
def test_update__keeps_a_length_scale_that_was_measured(refresh, tmp_path):
    rows = np.vstack([data(300), data(300, seed=1) * 3.0])
    first = daskrr.score_to_zarr(rows[:300], tmp_path / "out.zarr", Gaussian("median"), 1e-2, 60, **OPTIONS)
    found = update(rows, tmp_path / "out.zarr", refresh=refresh)
    assert found["update"]["refreshed"] == (refresh == "always")
    assert found["parameters"]["kernel"] == first["parameters"]["kernel"]
    exact = daskrr.exact.leverage_scores(rows, daskrr.kernels.from_spec(first["parameters"]["kernel"]), 1e-2)
    scores = daskrr.open_scores(tmp_path / "out.zarr")
    assert (scores["lower"][:] <= exact).all()
    assert (exact <= scores["upper"][:]).all()


def test_update__of_unchanged_input_does_nothing(tmp_path, monkeypatch):
    X = stored(tmp_path, data(400))
    first = score(X, tmp_path / "out.zarr")
    monkeypatch.setattr("daskrr.jobs.update.compute", lambda *_arguments: pytest.fail("it was done again"))
    assert update(X, tmp_path / "out.zarr")["sum_of_scores"] == first["sum_of_scores"]


def test_update__refuses_what_does_not_continue_the_rows(tmp_path):
    rows = data(400)
    with pytest.raises(InvalidData, match="no finished scores to update"):
        update(rows, tmp_path / "out.zarr")
    assert list(tmp_path.iterdir()) == []
    score(rows, tmp_path / "out.zarr")
    old = contents(tmp_path / "out.zarr")
    changed = np.vstack([rows, rows])
    changed[7] += 1e-9
    for wrong, error, message in [
        (rows[:300], SourceChanged, "has only 300"),
        (rows + 1.0, SourceChanged, "has changed since"),
        (changed, SourceChanged, "changed between the passes"),
        (np.hstack([rows, rows]), InvalidData, "has 6 of dtype float64"),
        (rows.astype(np.float32), InvalidData, "dtype float32"),
    ]:
        with pytest.raises(error, match=message):
            update(wrong, tmp_path / "out.zarr")
        assert contents(tmp_path / "out.zarr") == old
        assert reader.status(tmp_path / "out.zarr")["unfinished"] == []
    with pytest.raises(InvalidParameter, match="refresh must be one of auto, always, never"):
        update(rows, tmp_path / "out.zarr", refresh="sometimes")


def test_update__sums_all_rows_again_if_published_residuals_are_damaged(tmp_path, caplog):
    rows = data(400)
    score(rows[:320], tmp_path / "out.zarr")
    zarr.open_array(tmp_path / "out.zarr" / "residual", mode="r+")[60] = 0.5
    with caplog.at_level("WARNING"):
        found = update(rows, tmp_path / "out.zarr", refresh="never")
    assert "the published residuals of rows 50–99 are not those that were written" in caplog.text
    assert found["update"]["rows_summed"] == 400
    score(rows, tmp_path / "full.zarr", sampling=landmarks_of(tmp_path / "out.zarr"))
    assert contents(tmp_path / "out.zarr") == contents(tmp_path / "full.zarr")


class Stop(BaseException):
    """The process ends here."""


@pytest.mark.parametrize(
    ("offset", "step"),
    [(0.0, 15), pytest.param(0.0, 1, marks=pytest.mark.slow), pytest.param(30.0, 3, marks=pytest.mark.slow)],
)
def test_update__goes_on_from_every_durable_write_to_the_same_bits(offset, step, tmp_path, monkeypatch):
    rows = np.vstack([data(320), data(40, offset=offset)])
    score(rows[:320], tmp_path / "reference.zarr")
    old = contents(tmp_path / "reference.zarr")
    update(rows, tmp_path / "reference.zarr")
    new, write = contents(tmp_path / "reference.zarr"), Records.write
    number, points = 0, 0
    while True:
        output, seen = tmp_path / f"{number}.zarr", []
        score(rows[:320], output)

        def counted(self, name, content, seen=seen, number=number):
            if not name.endswith("/progress"):
                if len(seen) == number:
                    raise Stop
                seen.append(name)
            return write(self, name, content)

        with monkeypatch.context() as patch:
            patch.setattr(Records, "write", counted)
            try:
                update(rows, output)
                break
            except Stop:
                pass
        published = daskrr.open_scores(output)
        before = old if published.summary["n_rows"] == 320 else new
        assert {name: published[name][...].tobytes() for name in sorted(before)} == before, seen
        assert contents(output) in (old, new), seen
        update(rows, output)
        assert contents(output) == new, seen
        number, points = number + step, points + 1
    assert points * step > 10


@pytest.mark.parametrize("since", [0, 7, 40, 65, 100])
def test_counts__of_blocks_are_those_of_all_rows_before_and_after_a_row(since):
    scores, starts = np.random.default_rng(since).uniform(size=100) ** 8, [0, 40, 65]
    receipts = [
        Receipt(start, [], None, None, [], few_counts(block, since - start), {}, None)
        for start, block in zip(starts, np.split(scores, starts[1:]), strict=True)
    ]
    expected = [histogram.count(scores[:since]), histogram.count(scores[since:])]
    np.testing.assert_array_equal(sum_counts(receipts), expected)
    assert all(receipt.counts.nbytes <= 8 * 40 for receipt in receipts)


def test_histogram__knows_quantiles():
    values = 10.0 ** np.random.default_rng(0).uniform(-10, 0, 20_000)
    found = np.array(histogram.quantiles(histogram.count(values), [0.01, 0.5, 0.99]))
    ratio = found / np.quantile(values, [0.01, 0.5, 0.99])
    assert (ratio > 0.99).all()
    assert (ratio < 1.07).all()
    assert histogram.count(np.array([0.0, 1.0])).sum() == 2
    assert histogram.quantiles(histogram.count(np.zeros(0)), [0.5]) is None


@st.composite
def growing(draw):
    """Rows with duplicates and zeros among them, of some dtype, in chunks; how many there are first, and a block."""
    n = draw(st.integers(30, 90))
    rows = data(n, draw(st.integers(1, 4)), draw(st.integers(0, 99)), draw(st.sampled_from([0.0, 1e3])))
    rows[draw(st.integers(0, n - 1)) :: draw(st.integers(2, 9))] = rows[0]
    rows[:: draw(st.integers(5, 40))] = 0.0
    dtype = draw(st.sampled_from(["float64", "float32", "int16"]))
    first = draw(st.integers(15, n - 1))
    return rows.astype(dtype), first, draw(st.integers(3, 40)), draw(st.sampled_from([None, 7, 16, 64]))


@pytest.mark.parametrize(("chunk", "wanted", "found"), slow_but([(23, 16, 12), (36, 7, 6), (36, 8, 8)], (23, 16, 12)))
def test_update__of_fewer_rows_than_a_chunk_has_cuts_blocks_as_a_full_run(chunk, wanted, found, tmp_path, caplog):
    rows = data(40, 2, 0, 0.0)
    X = stored(tmp_path, rows[:15], chunk=chunk)
    score(X, tmp_path / "out.zarr", 10, block_rows=wanted)
    append(X, rows[15:])
    update(X, tmp_path / "out.zarr", refresh="never")
    assert "summed again" not in caplog.text
    landmarks = landmarks_of(tmp_path / "out.zarr")
    score(X, tmp_path / "anew.zarr", None, block_rows=wanted, sampling=landmarks)
    attributes = [zarr.open_group(tmp_path / name).attrs[RESULT_KEY] for name in ("out.zarr", "anew.zarr")]
    assert [one["parameters"]["block_rows"] for one in attributes] == [found, found]
    assert contents(tmp_path / "out.zarr") == contents(tmp_path / "anew.zarr")


@examples(2, 5, growing(), st.sampled_from(["residual", "uniform", "diagonal"]), st.sampled_from([0, 0.5, 2]))
def test_update__has_the_bits_of_a_full_run_and_holds_the_exact_scores(growing, sampling, spans_left):
    rows, first, chunk, block_rows = growing
    options = {"sampling": sampling, "block_rows": block_rows}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "SPANS_LEFT", spans_left)
        folder = Path(name)
        X = stored(folder, rows[:first], chunk)
        score(X, folder / "out.zarr", 10, **options)
        append(X, rows[first:])
        update(X, folder / "out.zarr", refresh="never")
        patch.setattr(tree, "SPANS_LEFT", 1)
        score(X, folder / "anew.zarr", None, **options | {"sampling": landmarks_of(folder / "out.zarr")})
        assert contents(folder / "out.zarr") == contents(folder / "anew.zarr")
        exact = daskrr.exact.leverage_scores(rows.astype(float), KERNEL, 1e-2)
        found = daskrr.open_scores(folder / "out.zarr")
        assert (found["lower"][:] <= exact).all()
        assert (exact <= found["upper"][:]).all()
