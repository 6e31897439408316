"""The report: what is in it, that nothing in it is taken for HTML, and what it does not replace."""

import json
from html.parser import HTMLParser

import numpy as np
import pytest
from click.testing import CliRunner
from strategies import as_zarr, forge

import daskrr
from daskrr import errors, plots
from daskrr.apps import report
from daskrr.apps.cli import main
from daskrr.kernels import Gaussian
from daskrr.synthetic import clusters_with_outliers

EVIL = 'p"><script>alert(1)<b>.zarr'


class Page(HTMLParser):
    """Tags with their attributes, and what a person reads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._style = tag == "style"

    def handle_endtag(self, tag):
        self._style = False

    def handle_data(self, data):
        self.text += "" if self._style else data + " "

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Scores of rows to which some were appended, certified at two ridges; and a plain one, stored as a whole."""
    folder = tmp_path_factory.mktemp("report")
    X = clusters_with_outliers(900, 3, n_outliers=4, random_state=1)[0]
    points = as_zarr(X[:600], (100, 3), folder / EVIL)
    options = {"certify": True, "random_state": 0, "progress": False}
    daskrr.score_to_zarr(folder / EVIL, folder / "scores.zarr", Gaussian(2.0), [1e-2, 1e-3], 50, **options)
    points.resize((900, 3))
    points[600:] = X[600:]
    daskrr.update_scores(folder / EVIL, folder / "scores.zarr", progress=False)
    result = daskrr.leverage_scores(X, Gaussian(2.0), 1e-3, 40, random_state=0)
    result.store(folder / "plain.zarr", progress=False)
    return folder


@pytest.fixture(scope="module")
def written(folder):
    report.write_report(folder / "scores.zarr", folder / "report.html", progress=False)
    return (folder / "report.html").read_text()


def invoke(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_report__says_what_the_scores_say(folder, written):
    page, summary = Page(written), daskrr.open_scores(folder / "scores.zarr").summary
    for low, high in summary["certificate"]["effective_dimension"]:
        assert f"{low:.6g} – {high:.6g}" in page.text
    for one in summary["top"]:
        assert f" {one['row']} " in page.text
        assert f"{one['lower']:.3e} – {one['upper']:.3e}" in page.text
    assert "900 × 3" in page.text
    assert "Every one of the 900 exact scores lies in its interval" in page.text
    assert "at most 1e-06" in page.text
    assert "600 before, 300 new" in page.text
    for version in summary["versions"].values():
        assert version in page.text
    assert EVIL in page.text


def test_report__takes_no_name_for_html(written):
    assert "<script" not in written.lower()
    assert "<b>" not in written
    assert "alert(1)" in Page(written).text


def test_report__needs_no_network(written):
    page = Page(written)
    assert "http:" not in written
    assert "https:" not in written
    assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in page.all("img"))
    assert not page.all("link")
    assert len(written) < 400_000


def test_report__is_accessible(written):
    page = Page(written)
    assert [tag for tag, _ in page.tags if tag in ("h1", "h2")] == ["h1"] + ["h2"] * 7
    assert page.all("html")[0]["lang"] == "en"
    assert len(page.all("img")) == 4
    assert all(len(image["alt"]) > 40 for image in page.all("img"))
    assert all(cell["scope"] in ("row", "col") for cell in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table")) > 5
    assert any("width=device-width" in (one.get("content") or "") for one in page.all("meta"))


def test_report__says_what_no_score_exceeds_and_how_many_are_there(folder, written):
    store = daskrr.open_scores(folder / "scores.zarr")
    ceiling, values = store.summary["ceiling"][1], np.asarray(store["estimate"])[:, 1]
    assert ceiling == pytest.approx(1 / (1 + 900 * 1e-3))
    count, above = store.profile().at_ceiling
    assert 0.97 * ceiling < above < 0.99 * ceiling
    assert count == np.sum(values > above)
    told = (
        f"No score exceeds k/(k + nλ) = {ceiling:.4g}, that of a row which is like no other; {count} of 900 estimates"
    )
    assert told in Page(written).text


def test_report__names_every_figure_of_a_table_for_windows_that_show_no_heads(written):
    figures = [about for about in Page(written).all("td") if about.get("class") != "wide"]
    named = [about["data-name"] for about in figures if "data-name" in about]
    assert {"certainly between", "score of the sketch", "median width", "upper"} <= set(named)


def test_report__quantiles_are_those_of_numpy(folder, written):
    values = np.asarray(daskrr.open_scores(folder / "scores.zarr")["estimate"])[:, 1]
    cell = next(line for line in written.split("<tr>") if line.startswith('<th scope="row" data-name="share">50%</th>'))
    shown = float(cell.split('<td data-name="estimate">')[1].split("<")[0])
    assert np.quantile(values, 0.5, method="inverted_cdf") == pytest.approx(shown, rel=0.0125)


@pytest.mark.slow
def test_report__of_scores_without_intervals_or_spectrum(folder, tmp_path):
    report.write_report(folder / "plain.zarr", tmp_path / "plain.html", progress=False)
    page = Page((tmp_path / "plain.html").read_text())
    assert "Nothing is certified" in page.text
    assert "Last update" not in page.text
    assert len(page.all("img")) == 3
    forge(folder / "plain.zarr", lambda manifest: [manifest["summary"].pop(name) for name in ("spectrum", "path")])
    report.write_report(folder / "plain.zarr", tmp_path / "older.html", progress=False)
    assert "Eigenvalues" not in Page((tmp_path / "older.html").read_text()).text


def test_report__replaces_only_reports_and_only_if_asked(folder, tmp_path):
    target = tmp_path / "report.html"
    assert invoke(folder / "scores.zarr", "-o", target, "--quiet").exit_code == 0
    first = target.read_text()
    again = invoke(folder / "plain.zarr", "-o", target, "--quiet")
    assert (again.exit_code, target.read_text()) == (4, first)
    assert "--overwrite" in again.output
    assert invoke(folder / "plain.zarr", "-o", target, "--quiet", "--overwrite").exit_code == 0
    assert "Nothing is certified" in target.read_text()
    notes = tmp_path / "notes.html"
    notes.write_text("<p>mine")
    assert invoke(folder / "scores.zarr", "-o", notes, "--quiet", "--overwrite").exit_code == 4
    assert invoke(folder / "scores.zarr", "-o", tmp_path, "--quiet", "--overwrite").exit_code == 4
    assert notes.read_text() == "<p>mine"
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "notes.html"}


@pytest.mark.slow
def test_report__tells_machines_what_it_wrote(folder, tmp_path):
    done = invoke(folder / "scores.zarr", "-o", tmp_path / "r.html", "--json", "--quiet")
    told = json.loads(done.stdout)
    assert told["rows"] == 900
    assert told["bytes"] == (tmp_path / "r.html").stat().st_size


@pytest.mark.slow
def test_report__leaves_nothing_behind_when_it_fails(folder, tmp_path, monkeypatch):
    def fail(*_arguments):
        raise OSError("no space")

    monkeypatch.setattr(report.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        report.write_report(folder / "scores.zarr", tmp_path / "report.html", progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "message"), [("s3://bucket/report.html", "not a local file"), ("gone/report.html", "no folder")]
)
def test_report__says_where_it_cannot_be_written(folder, tmp_path, monkeypatch, output, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.InvalidParameter, match=message):
        report.write_report(folder / "scores.zarr", output)


def test_report__reads_published_scores_only(folder, tmp_path):
    as_zarr(np.ones((10, 2)), (5, 2), tmp_path / "points.zarr")
    for source in (tmp_path / "points.zarr", tmp_path / "nothing.zarr"):
        assert invoke(source, "-o", tmp_path / "report.html", "--quiet").exit_code == 2
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_report__of_a_bucket(bucket, tmp_path):
    X = np.random.default_rng(0).standard_normal((300, 2))
    daskrr.score_to_zarr(X, f"{bucket}/scores.zarr", Gaussian(1.0), 1e-2, 30, certify=True, progress=False)
    told = report.write_report(f"{bucket}/scores.zarr", tmp_path / "report.html", progress=False)
    assert told["scores"] == f"{bucket}/scores.zarr"
    assert "300 × 2" in (tmp_path / "report.html").read_text()


def test_save_svg__is_the_same_for_the_same_figure():
    def draw():
        figure = plots.new_figure(3, 2)
        figure.subplots().plot([1, 2], [3, 4], label="<&>")
        return plots.save_svg(figure)

    assert draw() == draw()
