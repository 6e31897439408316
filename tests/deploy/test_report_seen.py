"""The report as a person sees it: in a wide and in a narrow window, by day and by night."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from strategies import as_zarr

import daskrr
from daskrr.apps.report import write_report
from daskrr.kernels import Gaussian
from daskrr.synthetic import clusters_with_outliers

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.deploy, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

MILLISECONDS = 60_000
HEADINGS = ["What is certain", "Scores", "Highest rows", "Spectrum", "Last update", "Parameters", "The run"]
# Smallest ratio of the luminance of text to that of what is behind it, over all elements with text of their own.
CONTRAST = """() => {
  const luminance = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    const colour = getComputedStyle(e).backgroundColor;
    return colour !== 'rgba(0, 0, 0, 0)' ? colour : behind(e.parentElement);
  };
  const worded = [...document.querySelectorAll('body *')].filter(
    e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()));
  return Math.min(...worded.map(e => {
    const [a, b] = [luminance(getComputedStyle(e).color), luminance(behind(e))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }));
}"""
# Cells of tables that reach beyond what is shown of their table.
CUT = """() => [...document.querySelectorAll('.scroll')].flatMap(e => [...e.querySelectorAll('td, th')].filter(
  c => c.getBoundingClientRect().right > e.getBoundingClientRect().right + 1).map(c => c.textContent))"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    X = clusters_with_outliers(6000, 3, n_outliers=8, random_state=1)[0]
    points = as_zarr(X[:5000], (1000, 3), folder / "a rather long name & <b>signs.zarr")
    options = {"certify": True, "random_state": 0, "progress": False}
    daskrr.score_to_zarr(points, folder / "scores.zarr", Gaussian(2.0), [1e-2, 1e-3], 120, **options)
    points.resize(X.shape)
    points[5000:] = X[5000:]
    daskrr.update_scores(points, folder / "scores.zarr", progress=False)
    write_report(folder / "scores.zarr", folder / "report.html", progress=False)
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_report__can_be_read(report, browser, width, scheme, tmp_path):
    page = browser.new_page(viewport={"width": width, "height": 850}, color_scheme=scheme)
    page.set_default_timeout(MILLISECONDS)
    asked, complaints = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    try:
        page.goto(report.as_uri())
        assert [heading.inner_text() for heading in page.locator("h2").all()] == HEADINGS
        assert all(heading.is_visible() for heading in page.locator("h1, h2").all())
        assert page.locator(".cards dd").first.inner_text() == "6,000 × 3"
        images = page.locator("img").all()
        assert len(images) == 4
        for image in images:
            image.scroll_into_view_if_needed()
            assert image.evaluate("one => one.complete && one.naturalWidth") > 100
            assert image.bounding_box()["width"] > 0.6 * min(width, 550)
        assert page.get_by_role("columnheader", name="certainly between").is_visible() == (width > 640)
        assert page.evaluate(CUT) == []
        assert page.get_by_text("Every one of the 6,000 exact scores lies in its interval").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CONTRAST) >= 4.5
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        assert complaints == []
        kept = Path(os.environ.get("DASKRR_ARTEFACTS", tmp_path))
        kept.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=kept / f"report-{width}-{scheme}.png", full_page=True)
    finally:
        page.close()
