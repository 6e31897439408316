"""The page in the dashboard of Dask and in JupyterLab, opened in a browser while a job runs and at its end."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import daskrr
from daskrr.apps.clusters import local_cluster

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
GENEROUS = 120
MILLISECONDS = 1000 * GENEROUS
N_ROWS = 12_000
CONFIG = Path(__file__).parents[2] / "deploy" / "jupyter" / "labextension.yaml"
TITLES = "Array.from(Bokeh.documents[0]._all_models.values()).filter(m => m.type == 'Title').map(m => m.text)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where pictures of pages are kept."""
    folder = Path(os.environ.get("DASKRR_ARTEFACTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def client() -> Iterator[Client]:
    with local_cluster(2, "2GiB") as cluster, Client(cluster) as connected:
        yield connected


@pytest.fixture
def points(tmp_path: Path) -> Path:
    X = np.random.default_rng(0).standard_normal((N_ROWS, 4))
    zarr.create_array(tmp_path / "points.zarr", data=X, chunks=(1000, 4))
    return tmp_path / "points.zarr"


class Paused:
    """A job on a thread that stops in the middle of a stage until it is told to go on, or to fail."""

    def __init__(self, points: Path, stage: str) -> None:
        self.stage, self.failure = stage, None
        self.reached, self.go = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run, args=(points,))
        self.thread.start()

    def run(self, points: Path) -> None:
        with contextlib.suppress(RuntimeError):
            daskrr.score_to_zarr(
                points, points.parent / "scores.zarr", daskrr.kernels.Gaussian(2.0), 1e-3, 150, certify=True,
                random_state=0, block_rows=1000, progress=self.hear,
            )  # fmt: skip
        self.reached.set()

    def hear(self, event: Any) -> None:
        if event.stage == self.stage and event.done == 6:
            time.sleep(0.6)  # longer than the feed waits between two messages
        if event.stage == self.stage and event.done == 7:
            self.reached.set()
            assert self.go.wait(GENEROUS)
            if self.failure is not None:
                raise self.failure

    def finish(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.go.set()
        self.thread.join(GENEROUS)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def paused(points: Path, stage: str) -> Iterator[Paused]:
    job = Paused(points, stage)
    try:
        assert job.reached.wait(GENEROUS)
        yield job
    finally:
        job.go.set()
        job.thread.join(GENEROUS)


def open_page(browser: Any, url: str, width: int = 1400) -> tuple[Any, list[str]]:
    """A page, and what goes wrong on it from now on."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(MILLISECONDS)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(url)
    return page, wrong


def wait_for_titles(page: Any, *wanted: str) -> list[str]:
    """The titles of all figures, once these are among them."""
    page.wait_for_function(f"wanted => wanted.every(one => ({TITLES}).includes(one))", arg=list(wanted))
    return page.evaluate(TITLES)


def take_picture(page: Any, path: Path) -> None:
    page.wait_for_timeout(1000)  # figures fade in
    page.screenshot(path=path, full_page=True)


class TestPage:
    def test_fills_in_while_a_job_runs(self, browser, client, points, pictures):
        base = client.dashboard_link.removesuffix("/status")
        page, wrong = open_page(browser, f"{base}/status")
        page.locator(".navbar a", has_text=re.compile("^Daskrr$")).first.click()
        page.get_by_text("No job has run on this cluster yet").wait_for()
        with paused(points, "pass 1: gram") as job:
            page.get_by_text("running", exact=True).wait_for()
            page.get_by_text("pass 1: gram").wait_for()
            page.get_by_text("12,000 rows × 4 features · Gaussian(length_scale=2.0) · λ = 0.001").wait_for()
            page.get_by_text(f"process {os.getpid()} on").wait_for()
            titles = wait_for_titles(page, "Passes", "Rows per second", "Share of matrix-multiply speed")
            assert any(title.startswith("Residuals / k(x, x), ") for title in titles)
            take_picture(page, pictures / "dashboard-running.png")
            job.finish()
        page.get_by_text("done", exact=True).wait_for()
        page.get_by_text("of matrix-multiply speed").wait_for()
        page.get_by_text("effective dimension").wait_for()
        wait_for_titles(page, f"Residuals / k(x, x), {N_ROWS:,} rows", f"Leverage scores, {N_ROWS:,} rows")
        take_picture(page, pictures / "dashboard-done.png")
        page.set_viewport_size({"width": 420, "height": 900})
        take_picture(page, pictures / "dashboard-narrow.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
        assert wrong == []
        page.close()

    def test_tells_the_last_error(self, browser, client, points, pictures):
        with paused(points, "pass 2: scores") as job:
            job.finish(RuntimeError("the <disk> is full"))
        base = client.dashboard_link.removesuffix("/status")
        page, wrong = open_page(browser, f"{base}/individual-daskrr", width=700)
        page.get_by_text("failed", exact=True).wait_for()
        page.get_by_text("RuntimeError: the <disk> is full").wait_for()
        take_picture(page, pictures / "dashboard-failed.png")
        assert wrong == []
        page.close()


@contextlib.contextmanager
def jupyter_lab(folder: Path) -> Iterator[str]:
    """Address of a JupyterLab with the configuration of deploy/jupyter; its token is ``t``."""
    pytest.importorskip("dask_labextension", reason="dask-labextension is not installed")
    homes = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root"]
    options = ["--IdentityProvider.token=t", f"--ServerApp.root_dir={folder}", "--LabApp.news_url=None"]
    with (folder / "jupyter.log").open("w+") as log:
        server = subprocess.Popen(
            [*command, *options], env=os.environ | homes | {"DASK_CONFIG": str(CONFIG), "HOME": str(folder)},
            stdout=log, stderr=log, cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            yield _address_of(folder / "JUPYTER_RUNTIME_DIR", server)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(GENEROUS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.pid, signal.SIGKILL)


def _address_of(runtime: Path, server: subprocess.Popen) -> str:
    """Wait until the server says where it is, and answers there."""
    deadline = time.monotonic() + GENEROUS
    while time.monotonic() < deadline:
        assert server.poll() is None, "JupyterLab has stopped; see jupyter.log"
        for file in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(OSError, ValueError):
                url = json.loads(file.read_text())["url"].removesuffix("/")
                urllib.request.urlopen(f"{url}/api/status?token=t", timeout=10).close()
                return url
        time.sleep(0.2)
    raise TimeoutError("JupyterLab does not answer")


class TestJupyterLab:
    def test_its_panel_starts_a_cluster_and_shows_the_page(self, browser, tmp_path, points, pictures):
        with jupyter_lab(tmp_path) as url:
            page, _ = open_page(browser, f"{url}/lab?token=t&reset")
            page.locator("[data-id='dask-dashboard-launcher']").click()
            panel = page.locator("#dask-dashboard-launcher")
            panel.get_by_text("NEW", exact=True).click()
            panel.get_by_text("Scheduler Address").wait_for()
            panel.locator("button", has_text="Daskrr").click()
            shown = page.frame_locator("iframe[src*='individual-daskrr']")
            shown.get_by_text("No job has run on this cluster yet").wait_for()
            cluster = json.loads(ask(f"{url}/dask/clusters"))[0]
            with Client(cluster["scheduler_address"]):
                daskrr.score_to_zarr(points, tmp_path / "scores.zarr", daskrr.kernels.Gaussian(2.0), 1e-3, 100)
            shown.get_by_text("done", exact=True).wait_for()
            take_picture(page, pictures / "jupyterlab.png")
            ask(f"{url}/dask/clusters/{cluster['id']}", "DELETE")
            page.close()


def ask(url: str, method: str = "GET") -> bytes:
    """What JupyterLab answers to whoever knows its token."""
    request = urllib.request.Request(url, method=method, headers={"Authorization": "token t"})
    with urllib.request.urlopen(request, timeout=GENEROUS) as answer:
        return answer.read()


CELL = """
import numpy, daskrr
X = numpy.random.default_rng(0).standard_normal((2_000_000, 4))
daskrr.leverage_scores(X, daskrr.kernels.Gaussian(2.0), 1e-3, 400, sampling="uniform", random_state=0)
"""


class TestNotebook:
    def test_an_interrupt_stops_the_job_and_its_bar(self):
        manager = pytest.importorskip("jupyter_client.manager", reason="jupyter-client is not installed")
        pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
        kernel, client = manager.start_new_kernel(kernel_name="python3", startup_timeout=GENEROUS)
        try:
            told: list[str] = []
            asked = client.execute(CELL)
            while not any("pass 1: gram · 1" in text for text in told):
                told.append(json.dumps(client.get_iopub_msg(timeout=GENEROUS)["content"], ensure_ascii=False))
            kernel.interrupt_kernel()
            while '"execution_state": "idle"' not in told[-1]:
                told.append(json.dumps(client.get_iopub_msg(timeout=GENEROUS)["content"], ensure_ascii=False))
            while (reply := client.get_shell_msg(timeout=GENEROUS))["parent_header"]["msg_id"] != asked:
                pass
            assert reply["content"]["ename"] == "KeyboardInterrupt"
            assert any("application/vnd.jupyter.widget-view+json" in text for text in told)
            assert any('"bar_style": "danger"' in text for text in told)
            assert any("pass 1: gram, stopped at" in text for text in told)
        finally:
            client.stop_channels()
            kernel.shutdown_kernel(now=True)
