"""Stores, specs and texts that somebody wrote to do harm: no code runs, nothing hangs, nothing raw reaches a reader."""

import itertools
import json
import logging
import os
import pickle
import re
import sys
import traceback
from pathlib import Path

import click
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from damage import KERNEL, RIDGE, points, score, shorten_pauses, stored
from zarr.storage import LocalStore, MemoryStore

import daskrr
from daskrr.apps.cli import main
from daskrr.apps.dashboard import view
from daskrr.apps.dashboard.state import Board
from daskrr.apps.report import write_report
from daskrr.errors import InvalidData, InvalidParameter, MissingChunks, printable
from daskrr.kernels import as_kernel, from_spec
from daskrr.runtime import notebook
from daskrr.runtime.notebook import html_table
from daskrr.runtime.rows import open_rows
from daskrr.storage.urls import LOGGERS
from daskrr.storage.zarr_input import open_zarr

MODEL = ["--kernel", "gaussian", "--length-scale", "1.5", "--ridge", "1e-2", "--landmarks", "20", "--seed", "0"]
FORMAT_2 = {
    "zarr_format": 2, "shape": [20, 3], "chunks": [20, 3], "dtype": "<f8", "order": "C", "fill_value": 0.0,
    "filters": None, "compressor": None,
}  # fmt: skip
OBJECTS = {"dtype": "|O", "fill_value": 0, "filters": [{"id": "pickle"}]}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    shorten_pauses(monkeypatch)


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def planted(path, mark, **changes):
    """An array of Zarr 2 whose only chunk is a pickle."""
    path.mkdir(parents=True)
    (path / ".zarray").write_text(json.dumps(FORMAT_2 | changes))
    (path / "0.0").write_bytes(pickle.dumps(Bomb(mark)))
    return path


def of_format_3(path, **changes):
    """An array of Zarr 3 with other metadata than it was written with."""
    stored(path, points(20), chunks=(20, 3))
    metadata = json.loads((path / "zarr.json").read_text())
    (path / "zarr.json").write_text(json.dumps(metadata | changes))
    return path


# --- Arrays that would run code: row 37 ---------------------------------------------------------------

# Zarr itself refuses most, but opens this one as text, and asks numcodecs to unpickle it on the way.
TEXT = {"dtype": "|O", "fill_value": "", "filters": [{"id": "vlen-utf8"}, {"id": "pickle"}]}
PICKLES = [
    TEXT,
    OBJECTS,
    {"dtype": "|O", "fill_value": 0, "compressor": {"id": "pickle"}},
    {"filters": [{"id": "pickle"}]},
    {"compressor": {"id": "pickle"}},
    {"dtype": "|O", "fill_value": 0, "filters": [{"id": "json2"}]},
    {"dtype": "|O", "fill_value": 0, "filters": [{"id": "msgpack2"}]},
    {"dtype": "|O", "fill_value": 0, "filters": [{"id": "vlen-array", "dtype": "<f8"}]},
]


@pytest.mark.parametrize("changes", PICKLES, ids=str)
def test_pickles__are_refused_by_name_wherever_an_array_is_read(changes, tmp_path):
    mark, X = tmp_path / "mark", points(20)
    bad = planted(tmp_path / "X", mark, **changes)
    line = planted(tmp_path / "y", mark, **changes | {"shape": [20], "chunks": [20]})
    fit = daskrr.NystromKernelRidge(KERNEL, RIDGE, 5, random_state=0).fit
    for action in (
        lambda: open_zarr(str(bad)),
        lambda: score(bad, tmp_path / "out.zarr"),
        lambda: daskrr.leverage_scores(bad, KERNEL, RIDGE, 5, progress=False),
        lambda: daskrr.leverage_scores(X, KERNEL, RIDGE, 5, sample_weight=line, progress=False),
        lambda: fit(bad, X[:, 0]),
        lambda: fit(X, line),
    ):
        with pytest.raises(InvalidData, match=r"the metadata of .*[Xy] has the (dtype|codec) .*, which is not read"):
            action()
    assert not mark.exists()
    assert not (tmp_path / "out.zarr").exists()


def test_pickles__in_an_array_that_was_opened_elsewhere_are_refused(tmp_path):
    mark = tmp_path / "mark"
    opened = zarr.open_array(planted(tmp_path / "X", mark, **TEXT), mode="r")
    with pytest.raises(InvalidData, match="the metadata of X has the dtype"):
        open_rows(opened)
    opened = zarr.open_array(planted(tmp_path / "p", mark, **TEXT | {"shape": [20], "chunks": [20]}), mode="r")
    with pytest.raises(InvalidData, match="the metadata of sampling has the dtype"):
        daskrr.leverage_scores(points(20), KERNEL, RIDGE, 5, sampling=opened, progress=False)
    assert not mark.exists()


@pytest.mark.parametrize("option", [["--sampling"], ["--weights"]])
def test_pickles__named_by_options_are_bad_input(option, tmp_path):
    mark = tmp_path / "mark"
    line = planted(tmp_path / "line", mark, **OBJECTS | {"shape": [20], "chunks": [20]})
    X = stored(tmp_path / "X", points(20))
    found = CliRunner().invoke(main, ["plan", str(X), *MODEL, *option, str(line)])
    assert found.exit_code == 2, found.output
    assert "which is not read" in found.output
    assert not mark.exists()


def test_consolidated_metadata__is_not_asked(tmp_path):
    mark = tmp_path / "mark"
    planted(tmp_path / "group" / "X", mark, **OBJECTS)
    (tmp_path / "group" / ".zgroup").write_text('{"zarr_format": 2}')
    consolidated = {"metadata": {".zgroup": {"zarr_format": 2}, "X/.zarray": FORMAT_2}, "zarr_consolidated_format": 1}
    (tmp_path / "group" / ".zmetadata").write_text(json.dumps(consolidated))
    with pytest.raises(InvalidData, match="X has the dtype"):
        open_zarr(str(tmp_path / "group" / "X"))
    with pytest.raises(InvalidData, match=r"is a Zarr group, .* with NAME one of \['X'\]"):
        open_zarr(str(tmp_path / "group"))
    assert not mark.exists()


class TwoFaced(LocalStore):
    """Shows other metadata when it is asked again."""

    async def get(self, key, prototype, byte_range=None):
        found = await super().get(key, prototype, byte_range)
        if key.endswith(".zarray"):
            (self.root / key).write_text(json.dumps(FORMAT_2 | OBJECTS))
        return found


def test_store__that_shows_other_metadata_later_is_held_to_the_first(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    planted(tmp_path / "X", mark)
    monkeypatch.setattr("daskrr.storage.zarr_input.zarr_store", TwoFaced)
    assert open_zarr(str(tmp_path / "X")).dtype == float
    assert json.loads((tmp_path / "X" / ".zarray").read_text())["dtype"] == "|O"
    assert not mark.exists()


@pytest.mark.parametrize("name", ["vlen-utf8", "vlen-bytes", "numcodecs.pickle", "numcodecs.zfpy", "no.such"])
def test_codecs__of_format_3_that_are_not_known_are_refused(name, tmp_path):
    bad = of_format_3(tmp_path / "X", codecs=[{"name": "bytes"}, {"name": name}])
    with pytest.raises(InvalidData, match=f"the metadata of .*X has the codec '{name}'"):
        open_rows(bad)


# --- Metadata that are too much ---------------------------------------------------------------------------

DEEP = "[" * 200_000 + "]" * 200_000
BAD_TEXT = {
    "50 MB": lambda text: text[:-1] + f', "attributes": {{"x": "{"x" * 50_000_000}"}}}}',
    "deep": lambda text: text[:-1] + f', "attributes": {{"x": {DEEP}}}}}',
    "only deep": lambda text: DEEP,
    "not JSON": lambda text: text[:-5],
    "empty": lambda text: "",
    "no table": lambda text: "[20]",
    "digits": lambda text: text.replace("20", "9" * 5000, 1),
}


# Attributes are nobody's business as long as they are JSON.
MAY_BE = {(".zattrs", "no table"), (".zattrs", "empty")}


@pytest.mark.parametrize(
    ("key", "kind"), sorted({*itertools.product(["zarr.json", ".zarray", ".zattrs"], BAD_TEXT)} - MAY_BE)
)
def test_metadata__that_is_huge_deep_or_torn_is_bad_input(key, kind, tmp_path):
    if key == "zarr.json":
        bad = of_format_3(tmp_path / "X")
    else:
        bad = planted(tmp_path / "X", tmp_path / "mark")
        (bad / ".zattrs").write_text('{"a": 20}')
    (bad / key).write_text(BAD_TEXT[kind]((bad / key).read_text()))
    for command in (["plan", str(bad), *MODEL], ["score", str(bad), str(tmp_path / "out.zarr"), *MODEL]):
        found = CliRunner().invoke(main, command)
        assert found.exit_code == 2, found.output
        assert "metadata of" in found.output or ".zattrs" in found.output
        assert len(found.output) < 1000
    assert not (tmp_path / "out.zarr").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [-20, 3]},
        {"shape": [2**62, 3]},
        {"shape": [20, -1]},
        {"shape": "many"},
        {"fill_value": "\x1b[2J\n"},
        {"fill_value": {"a": []}},
        {"codecs": [{"name": "bytes"}, {"name": "blosc", "configuration": {"cname": "\x1b[2J\n"}}]},
        {"codecs": [{"name": "zstd"}]},
        {"codecs": []},
        {"chunk_grid": {"name": "\x1b[2J"}},
        {"chunk_key_encoding": {"name": "\x1b[2J"}},
        {"dimension_names": 5},
        {"storage_transformers": [{"name": "x"}]},
        {"\x1b[2J\n": 1},
        {"node_type": "\x1b[2J"},
    ],
    ids=str,
)
def test_metadata__that_contradicts_itself_is_bad_input(changes, tmp_path):
    with pytest.raises(InvalidData, match=r"the metadata of .*X ") as caught:
        open_rows(of_format_3(tmp_path / "X", **changes))
    assert str(caught.value).isprintable()


def test_missing_chunks__of_a_shape_beyond_all_bounds_are_told_at_once(tmp_path):
    bad = of_format_3(tmp_path / "X", shape=[2**50, 3])
    with pytest.raises(MissingChunks, match=r"\d{14} of \d{14} chunks .* the first is 'c/1/0'"):
        open_rows(bad)
    wide = of_format_3(tmp_path / "wide", shape=[20, 2**50])
    with pytest.raises(MissingChunks, match=r"the first is 'c/0/1'"):
        open_rows(wide)


def test_missing_chunks__are_counted_without_foreign_files(tmp_path):
    X = stored(tmp_path / "X", points(250), chunks=(50, 3))
    (X / "c" / "2" / "0").unlink()
    for name in ("note-2-0.txt", "c/7/0", "c/2/0.bak", "c/02/0"):
        (X / name).parent.mkdir(parents=True, exist_ok=True)
        (X / name).write_text("mine")
    with pytest.raises(MissingChunks, match=r"^1 of 5 chunks .* the first is 'c/2/0' \(rows 100–149\)"):
        open_rows(X)


def test_open_zarr__reads_what_zarr_does(tmp_path):
    X = points(40)
    for zarr_format in (2, 3):
        path = tmp_path / str(zarr_format)
        made = zarr.create_array(path, shape=X.shape, chunks=(10, 3), dtype=float, zarr_format=zarr_format)
        made[:] = X
        made.attrs["unit"] = "m"
        found = open_zarr(str(path))
        np.testing.assert_array_equal(found[...], X)
        assert found.metadata == zarr.open_array(path, mode="r").metadata
        assert found.attrs["unit"] == "m"
        assert found.read_only
    memory = zarr.create_array(MemoryStore(), name="X", shape=X.shape, chunks=(10, 3), dtype=float)
    memory[:] = X
    assert open_rows(memory).n_rows == 40


# --- Texts that act on who reads them: row 38 -------------------------------------------------------------

TRICK = "a\x1b[2J\nDone.\r\x9b1m\u202e\u2028<script>alert(1)</script>b"


def is_harmless(text):
    """Whether every line can be shown, and none is one that the trick has made."""
    return all(line.isprintable() for line in text.split("\n")) and "\nDone." not in text


@pytest.mark.slow
def test_printable__escapes_whatever_is_not_printed_and_nothing_else():
    for code in range(sys.maxunicode + 1):
        shown = printable(chr(code))
        assert shown.isprintable()
        assert (shown == chr(code)) == chr(code).isprintable()
        assert code > 0xFF or shown == chr(code) or shown == ascii(chr(code))[1:-1]
    for text in (TRICK, "\ud800", "", "λ = 1e-3 – 50 × é 漢"):
        assert printable(printable(text)) == printable(text)
    assert printable("λ = 1e-3 – 50 × é 漢") == "λ = 1e-3 – 50 × é 漢"
    assert printable("a\n\x1b", keep="\n") == "a\n\\x1b"


def test_errors__are_one_line_for_every_argument():
    for kind in (InvalidData, MissingChunks, daskrr.errors.SourceUnreachable, daskrr.errors.DoesNotFit):
        assert str(kind(TRICK, "and more")) == f"{printable(TRICK)}\n  and more"
        assert is_harmless("".join(traceback.format_exception(kind(TRICK))))
        again = pickle.loads(pickle.dumps(kind(TRICK)))
        assert (str(again), again.args) == (printable(TRICK), (TRICK,))


def test_logs__are_one_line_without_secrets(caplog):
    for name in LOGGERS:
        logging.getLogger(name).warning("%s of %s", TRICK, "s3://me:PASSW0RD@points/x")
        assert caplog.messages[-1] == f"{printable(TRICK)} of s3://***@points/x"


def test_loggers__of_the_package_all_have_the_filter():
    package = Path(daskrr.__file__).parent
    named = {name for path in package.rglob("*.py") for name in re.findall(r'getLogger\("(.*?)"\)', path.read_text())}
    assert named == set(LOGGERS)


@pytest.fixture
def tricky(tmp_path):
    """A folder with a name that nobody should have to read raw."""
    folder = tmp_path / TRICK.replace("/", "")
    folder.mkdir()
    return folder


def told(*arguments, code=0):
    """What a command tells."""
    found = CliRunner().invoke(main, list(map(str, arguments)), terminal_width=300)
    assert found.exit_code == code, found.output
    assert found.output
    assert is_harmless(found.output), repr(found.output)
    return found.output


@pytest.mark.slow
def test_commands__tell_no_path_raw(tricky):
    X, out = stored(tricky / "X", points(60)), tricky / "out.zarr"
    told("plan", X, *MODEL)
    told("score", X, out, *MODEL, "--certify", "--workers", 1)
    shown = printable(str(out))
    assert shown in told("score", X, out, *MODEL, "--certify", "--workers", 1)
    for command in (["status", out], ["verify", out], ["top", out], ["update", X, out, "--workers", 1]):
        told(*command)
    told("sample", out, tricky / "sample.zarr", "--size", 5)
    told("report", out, "-o", tricky / "report.html")
    y = stored(tricky / "y", points(60)[:, 0], chunks=(50,))
    told("fit", X, y, tricky / "model.zarr", *MODEL, "--workers", 1)
    told("predict", tricky / "model.zarr", X, tricky / "p.zarr", "--workers", 1)
    assert json.loads(told("status", out, "--json"))


def test_commands__repeat_nothing_raw_that_they_refuse(tricky):
    nothing = tricky / "nothing"
    for command in (
        ["plan", nothing, *MODEL],
        ["score", nothing, tricky / "out", *MODEL, "--debug"],
        ["verify", nothing],
        ["report", nothing],
        ["run", nothing],
        ["convert", nothing, tricky / "X"],
        ["plan", nothing, *MODEL, "--sampling", TRICK],
        ["plan", nothing, *MODEL, "--kernel-spec", TRICK],
        ["plan", nothing, "--kernel-spec", TRICK, "--ridge", 1],
        ["plan", nothing, "--kernel", TRICK],
        ["plan", nothing, f"--{TRICK}"],
        ["plan", nothing, "--ridge", TRICK],
        ["plan", nothing, *MODEL, TRICK],
        ["score", nothing, tricky / "out", *MODEL, "--cluster", TRICK],
        ["convert", nothing, tricky / "X", "--dtype", TRICK],
        [TRICK],
        [f"--{TRICK}"],
    ):
        told(*command, code=2)


@pytest.mark.slow
def test_job_files__with_tricks_are_told_escaped(tricky):
    job = tricky / "job.toml"
    quoted = json.dumps(TRICK)
    job.write_text(
        f"input = {quoted}\n{quoted} = 1\n[kernel]\nkernel = {quoted}\n[x.{quoted}]\nx = 1\n"
        f"[cluster]\ncluster = {quoted}\n[scores]\nridge = {quoted}\n"
    )
    output = told("run", job, code=2)
    assert len(output.strip().split("\n")) > 4, "the mistakes have a line each"
    job.write_text(f"input = 1{TRICK}")
    told("run", job, code=2)
    stored(tricky / "X", points(60))
    job.write_text(
        'input = "X"\noutput = "out.zarr"\n[kernel]\nkernel = "gaussian"\nlength-scale = 1.0\n'
        "[scores]\nridge = 0.01\nlandmarks = 20\n[cluster]\nworkers = 1\n"
    )
    assert "of results" in told("run", job, "--check")
    told("run", job)


def test_usage__is_told_escaped_by_every_version_of_click(monkeypatch):
    def refuse(*_, **__):
        raise click.UsageError(TRICK)

    monkeypatch.setattr(click.Group, "make_context", refuse)
    told("plan", code=2)


def test_help__is_told_in_lines():
    assert len(CliRunner().invoke(main, []).output.split("\n")) > 20


def test_tables__with_tricks_in_their_names_are_told_escaped(tricky):
    header = ",".join(f'"{name}"' for name in (TRICK, "y"))
    (tricky / "x.csv").write_text(f"{header}\n1,2\n3,4\n", newline="")
    told("convert", tricky / "x.csv", tricky / "x.zarr")
    (tricky / "x.csv").write_text(f'{header}\n1,2\n"{TRICK}",4\n', newline="")
    told("convert", tricky / "x.csv", tricky / "words.zarr")
    (tricky / "x.csv").write_text(f'{header}\n{9 * "1,2%"}"{TRICK}",4\n'.replace("%", "\n"), newline="")
    told("convert", tricky / "x.csv", tricky / "y.zarr", code=2)
    told("convert", tricky / "x.csv", tricky / "y.zarr", "--columns", "no\x1b[2J", code=2)


def test_unexpected_failures__are_told_escaped(monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError(TRICK)

    monkeypatch.setattr("daskrr.jobs.reader.status", fail)
    told("status", tmp_path, code=1)
    output = CliRunner().invoke(main, ["status", str(tmp_path), "--debug"]).output
    assert all(line.isprintable() for line in output.split("\n"))


def test_report__holds_no_markup_of_others(tricky):
    X, out = stored(tricky / "X<script>", points(60)), tricky / "out.zarr"
    score(X, out)
    write_report(out, tricky / "report.html")
    written = (tricky / "report.html").read_text()
    assert "X&lt;script&gt;" in written
    assert "<script" not in written
    assert is_harmless(written)


def test_dashboard_and_widgets__hold_no_markup_of_others():
    facts = {"input": f"/{TRICK}", "output": TRICK, "rows": 1, "features": 1, "kernel": TRICK, "ridge": 1.0}
    lease = {"pid": TRICK, "host": TRICK, "generation": TRICK, "renewed_every": 1.0}
    board = Board()
    board.take(
        {"job": TRICK, "at": 1.0, "state": TRICK, "error": TRICK, "facts": {**facts, "landmarks": 1, "lease": lease}}
    )
    for shown in (view.head(board.current, 0.0), notebook._line(TRICK), html_table(TRICK, {TRICK: TRICK})):
        assert "<script" not in shown
        assert shown.isprintable()
        assert "&lt;script&gt;" in shown


# --- Specs that never end ---------------------------------------------------------------------------------


def nested_spec(levels, key="part"):
    spec = {"kernel": "linear"}
    for _ in range(levels):
        spec = {"kernel": "scaled", "factor": 1.0, key: spec} if key == "part" else {"kernel": "sum", key: [spec]}
    return spec


def nested_list(levels):
    found = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize("levels", [64, 900, pytest.param(200_000, marks=pytest.mark.slow)])
def test_from_spec__refuses_endless_nesting(levels):
    for spec in (
        nested_spec(levels),
        nested_spec(levels, "parts"),
        nested_list(levels),
        {"kernel": nested_list(levels)},
        {"kernel": "gaussian", "length_scale": nested_list(levels)},
    ):
        for make in (from_spec, as_kernel):
            with pytest.raises(InvalidParameter, match="the kernel spec is nested deeper than 64 levels"):
                make(spec)
    with pytest.raises(InvalidParameter, match="the kernel spec is nested deeper than 64 levels"):
        daskrr.leverage_scores(points(20), nested_spec(levels), RIDGE, 5, progress=False)


def test_from_spec__makes_what_is_nested_as_deep_as_that():
    kernel = from_spec(nested_spec(63))
    assert from_spec(kernel.to_spec()) == kernel


@pytest.mark.parametrize("levels", [64, 200_000])
def test_kernel_specs__that_never_end_are_bad_input_of_commands(levels, tmp_path):
    X = stored(tmp_path / "X", points(60))
    spec = '{"kernel":"scaled","factor":1,"part":' * levels + '{"kernel":"linear"}' + "}" * levels
    (tmp_path / "spec.json").write_text(spec)
    assert "nested deeper than 64" in told("plan", X, "--kernel-spec", tmp_path / "spec.json", "--ridge", 1, code=2)
    assert "nested deeper than 64" in told("plan", X, "--kernel-spec", spec, "--ridge", 1, code=2)


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 200_000 + "]" * 200_000,
        "x = " + "{a=" * 200_000 + "1" + "}" * 200_000,
        ".".join(["a"] * 200_000) + " = 1",
        "[kernel]\nkernel-spec." + ".".join(["part"] * 200) + " = 1",
        "[" + ".".join(["a"] * 200_000) + "]\nx = 1",
        "x = '" + "x" * 50_000_000 + "'",
    ],
    ids=["lists", "tables", "keys", "spec", "header", "50 MB"],
)
def test_job_files__that_never_end_are_bad_input(text, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(text)
    assert re.search("nested deeper than 64|is larger than 1 MiB", told("run", job, code=2))
