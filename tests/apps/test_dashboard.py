"""What the scheduler makes of the feed, and the page that shows it; the page in a browser is in deploy/."""

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import dask
import numpy as np
import pytest
from bokeh.document import Document
from conftest import GENEROUS, command_line_cluster
from distributed import Client, LocalCluster
from strategies import as_zarr

import daskrr
from daskrr.apps import dashboard
from daskrr.apps.dashboard import install
from daskrr.apps.dashboard.state import MOST_JOBS, Board
from daskrr.apps.dashboard.view import WAITING, Page, head
from daskrr.runtime.progress import Event


def client_message(job="j", order=1, at=100.0, **facts):
    return {"job": job, "client": "c", "order": order, "at": at} | facts


def event_of(done, rows, seconds, order, stage="pass 1: gram", **more):
    event = Event(stage, done, 4, rows, 4000, seconds, row_flops=1e6, **more)
    return client_message(order=order, at=100.0 + seconds, event=vars(event))


def counts_of(start, counts, run="r-0", kind="residual"):
    return {"run": run, "kind": kind, "start": start, "counts": [*counts, *[0] * (40 - len(counts))],
            "worker": "w", "speed": 1e10}  # fmt: skip


@pytest.fixture
def board():
    found = Board()
    found.take(client_message(state="running"))
    facts = {"run": "r", "input": "<x>.zarr", "rows": 4000, "features": 3, "kernel": "Gaussian(1)", "ridge": 1e-3}
    lease = {"host": "here", "pid": 7, "generation": 2, "renewed_every": 15.0}
    found.take(client_message(order=2, facts=facts | {"landmarks": 50, "tolerance": None, "lease": lease}))
    return found


class TestBoard:
    def test_follows_a_stage(self, board):
        for order, (done, rows, seconds) in enumerate([(0, 0, 0.0), (1, 1000, 1.0), (4, 4000, 2.0)], 3):
            board.take(event_of(done, rows, seconds, order))
        job = board.current
        assert [stage.done for stage in job.stages] == [4]
        assert [rows for _, rows, _ in job.rates if not math.isnan(rows)] == [1000, 3000]
        assert job.flops == 2000 * 1e6

    def test_an_event_that_was_overtaken_is_old(self, board):
        board.take(event_of(3, 3000, 3.0, order=9))
        board.take(event_of(2, 2000, 2.0, order=8))
        assert board.current.stage.done == 3

    def test_rows_that_were_there_before_are_no_speed(self, board):
        board.take(event_of(0, 0, 0.0, 3))
        board.take(event_of(2, 2000, 0.001, 4, found=(2, 2000)))
        board.take(event_of(4, 4000, 2.0, 5, found=(2, 2000)))
        assert max(rows for _, rows, _ in board.current.rates if not math.isnan(rows)) <= 1001
        assert board.current.stage.rate == 1000

    def test_a_block_that_is_computed_twice_counts_once(self, board):
        for start in (0, 1000, 0):
            board.take(counts_of(start, [5, 3]))
        assert board.current.counts["residual"].values[:2].tolist() == [10, 6]

    def test_a_new_round_starts_a_new_histogram(self, board):
        board.take(counts_of(0, [5, 3]))
        board.take(counts_of(0, [1], run="r-1"))
        assert board.current.counts["residual"].values.sum() == 1

    def test_counts_of_a_run_that_nobody_told_of_are_dropped(self, board):
        board.take(counts_of(0, [5], run="other"))
        assert not board.current.counts

    def test_a_client_that_leaves_takes_its_job_along(self, board):
        board.leave("another")
        assert board.current.state == "running"
        board.leave("c")
        assert board.current.state == "lost"
        assert "run the same line again" in board.current.error

    def test_a_job_that_ended_is_not_lost(self, board):
        board.take(client_message(order=9, state="done", error=""))
        board.leave("c")
        assert board.current.state == "done"

    def test_keeps_few_jobs_and_drops_ended_ones_first(self, board):
        for number in range(3 * MOST_JOBS):
            board.take(client_message(job=f"k{number}", at=200.0 + number, state="done", error=""))
        assert len(board.jobs) == MOST_JOBS
        assert board.current.name == "j"

    def test_limit_is_of_all_threads(self, board):
        assert board.limit({"w": 2}) == 0
        board.take(counts_of(0, [1]))
        assert board.limit({"w": 2, "not measured": 1}) == 3e10

    def test_facts_are_json(self, board):
        board.take(event_of(4, 4000, 2.0, 3, dimension=(3.0, math.inf)))
        board.take(counts_of(0, [1]))
        facts = json.loads(json.dumps(board.current.to_dict(1e10), allow_nan=False))
        assert facts["effective_dimension"] == [[3.0, None]]
        assert facts["share_of_matmul"] == 2000 * 1e6 / 1e10
        assert facts["stages"][0]["blocks"] == [4, 4]
        assert sum(facts["histograms"]["residual"]["counts"]) == 1


class TestPage:
    def test_waits_for_a_job(self):
        page = Page()
        page.update(Board(), 0.0)
        assert page.head.text == WAITING
        assert not page.figures.visible

    def test_shows_everything(self, board):
        board.take(event_of(2, 2000, 2.0, 3, dimension=(3.0, 4.0)))
        board.take(counts_of(0, [0, 5, 3]))
        board.take(client_message(order=9, state="failed", error="OSError: <b>disk full</b>"))
        page = Page()
        page.update(board, 1e10)
        Document().add_root(page.root)
        text = page.head.text
        for part in ("&lt;x&gt;.zarr", "4,000 rows × 3 features", "failed", "10%", "3.0–4.0", "process 7 on here",
                     "OSError: &lt;b&gt;disk full"):  # fmt: skip
            assert part in text
        passes, rows, share, dimension, residual, score = page.parts
        assert passes.source.data["share"] == [0.5]
        assert [len(part.source.data["value"]) for part in (rows, share)] == [1, 1]
        assert dimension.source.data["high"] == [4.0]
        assert residual.source.data["rows"] == [5, 3]
        assert residual.figure.title.text == "Residuals / k(x, x), 8 rows"
        assert not score.figure.visible

    def test_an_unknown_limit_is_not_shown(self, board):
        board.take(event_of(2, 2000, 2.0, 3))
        assert "matrix-multiply" not in head(board.current, 0.0)


def get_json(client: Client, path: str) -> dict:
    base = client.dashboard_link.removesuffix("/status")
    with urllib.request.urlopen(f"{base}{path}", timeout=60) as answer:
        return json.load(answer)


ANY = {"*:80"}
NAMED = {"hub.example:80", "hub.example:8443"}


@pytest.mark.parametrize(
    ("origin", "hosts", "allowed", "expected"),
    [
        (None, {"127.0.0.1:8787"}, ANY, True),
        ("http://127.0.0.1:8787", {"127.0.0.1:8787"}, ANY, True),
        ("http://localhost:8787", {"127.0.0.1:8787"}, ANY, False),
        ("http://evil.example", {"127.0.0.1:8787"}, ANY, False),
        ("http://127.0.0.1:9999", {"127.0.0.1:8787"}, ANY, False),
        ("null", {"127.0.0.1:8787"}, ANY, False),
        ("", {"127.0.0.1:8787"}, ANY, False),
        ("https://Hub.example", {"hub.example"}, ANY, True),
        ("https://hub.example", {"127.0.0.1:8787", "hub.example"}, ANY, True),
        (None, {"evil.example"}, ANY, True),
        (None, {"evil.example"}, NAMED, False),
        ("http://evil.example", {"evil.example"}, NAMED, False),
        ("http://evil.example", {"hub.example"}, NAMED, False),
        ("http://evil.example", {"127.0.0.1:8787"}, NAMED, False),
        (None, {"hub.example:8443"}, NAMED, True),
        (None, {"127.0.0.1:8787"}, NAMED, True),
        (None, {"[::1]:8787"}, NAMED, True),
        (None, {"localhost:8787"}, NAMED, True),
        (None, {"127.0.0.1.evil.example"}, NAMED, False),
        ("https://hub.example:8443", {"127.0.0.1:8787"}, NAMED, True),
    ],
)
def test_is_same_site__tells_our_pages_from_others(origin, hosts, allowed, expected):
    assert install.is_same_site(origin, hosts, allowed) is expected


def wait_for(find: Callable[[], Any]) -> Any:
    """What is found, as soon as something is."""
    deadline = time.monotonic() + GENEROUS
    while not (found := find()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def status_of(client: Client, path: str, **headers: str) -> int:
    request = urllib.request.Request(client.dashboard_link.removesuffix("/status") + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def shakes_hands(client: Client, path: str, **headers: str) -> bool:
    """Whether a web socket is opened."""
    address = urlsplit(client.dashboard_link).netloc
    link = http.client.HTTPConnection(address, timeout=60)
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    link.request("GET", path, headers={**upgrade, "Sec-WebSocket-Key": "MDEyMzQ1Njc4OTAxMjM0NQ==", **headers})
    with link.getresponse() as answer:
        return answer.status == 101


class TestScheduler:
    @pytest.mark.slow
    def test_other_sites_get_nothing_of_ours(self, client):
        X = np.random.default_rng(0).standard_normal((200, 2))
        daskrr.leverage_scores(X, daskrr.kernels.Linear(), 1e-2, 5, random_state=0)
        own = "http://" + urlsplit(client.dashboard_link).netloc
        for path in ("/json/daskrr.json", "/daskrr", "/individual-daskrr", "/daskrr/metadata"):
            assert status_of(client, path) == 200
            assert status_of(client, path, Origin=own) == 200
            assert status_of(client, path, Origin="http://evil.example") == 403
        # What Dask itself does, and deploy/README.md tells; these may become stricter.
        assert status_of(client, "/status", Origin="http://evil.example", Host="evil.example") == 200
        assert shakes_hands(client, "/status/ws", Origin="http://evil.example")
        assert status_of(client, "/json/daskrr.json", Host="evil.example") == 200
        for path in ("/daskrr/ws", "/individual-daskrr/ws"):
            assert shakes_hands(client, path, Origin=own)
            assert shakes_hands(client, path, Origin="https://hub.example", Host="hub.example")
            assert shakes_hands(client, path, Origin="https://hub.example", **{"X-Forwarded-Host": "hub.example"})
            assert not shakes_hands(client, path, Origin="http://evil.example")

    def test_where_dask_knows_its_names_others_lead_nowhere(self):
        key = "distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin"
        with (
            dask.config.set({key: ["hub.example"]}),
            LocalCluster(
                n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"preload": [dashboard.__name__]},
            ) as cluster,
            Client(cluster) as client,
        ):  # fmt: skip
            for path in ("/json/daskrr.json", "/daskrr"):
                assert status_of(client, path) == 200
                assert status_of(client, path, Host="hub.example") == 200
                assert status_of(client, path, Host="evil.example") == 403

    @pytest.mark.slow
    def test_a_running_scheduler_gets_the_page_with_the_first_job(self, client):
        X = np.random.default_rng(0).standard_normal((2000, 2))
        daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-2, 50, certify=True, random_state=0)
        daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-2, 50, certify=True, random_state=0)
        job = get_json(client, "/json/daskrr.json")["jobs"][0]
        assert job["state"] == "done"
        assert job["rows"] == 2000
        assert job["effective_dimension"][0][0] > 1
        assert sum(job["histograms"]["residual"]["counts"]) == 2000
        assert get_json(client, "/individual-plots.json")["Individual Daskrr"] == "/individual-daskrr"
        base = client.dashboard_link.removesuffix("/status")
        with urllib.request.urlopen(f"{base}/status", timeout=60) as answer:
            assert answer.read().decode().count('href="daskrr"') == 1
        with urllib.request.urlopen(f"{base}/daskrr", timeout=60) as answer:
            assert 'data-root-id="' in answer.read().decode()

    @pytest.mark.slow
    def test_the_first_job_on_a_scheduler_started_by_hand_is_known_while_it_runs(self, tmp_path):
        as_zarr(np.random.default_rng(0).standard_normal((2000, 2)), (500, 2), tmp_path / "x.zarr")
        seen = []

        def look(event):
            if event.stage == "pass 1: gram" and not seen:
                seen.append(wait_for(lambda: [one for one in jobs() if one["rows"] and one["output"]]))

        def jobs():
            return get_json(client, "/json/daskrr.json")["jobs"]

        with command_line_cluster(tmp_path, n_workers=1) as client:
            options = {"certify": True, "random_state": 0, "block_rows": 500, "progress": look}
            where = tmp_path / "x.zarr", tmp_path / "out.zarr"
            daskrr.score_to_zarr(*where, daskrr.kernels.Gaussian(1.0), 1e-2, 50, **options)
            (ended,) = jobs()
        ((job,),) = seen
        assert (job["state"], ended["state"]) == ("running", "done")
        for one in (job, ended):
            assert one["input"] == str(tmp_path / "x.zarr")
            assert one["output"] == str(tmp_path / "out.zarr")
            assert (one["rows"], one["features"], one["landmarks"]) == (2000, 2, 50)

    def test_a_page_that_comes_late_knows_of_clients_that_have_left(self):
        message = client_message(state="running", facts={"rows": 3})
        events = [(1.0, message), (2.0, "of somebody else"), (3.0, message | {"job": "k", "client": "here"})]
        scheduler = SimpleNamespace(get_events=lambda topic: events, clients={"here": None})
        plugin = dashboard.DashboardPlugin(scheduler)
        plugin.catch_up()
        assert {name: job.state for name, job in plugin.board.jobs.items()} == {"j": "lost", "k": "running"}

    def test_another_version_of_dask_has_no_page_and_works(self, monkeypatch):
        told = []
        monkeypatch.setattr(install, "per_app_patterns", None)
        monkeypatch.setattr(dashboard.log, "info", lambda text, *arguments: told.append(text))
        with (
            LocalCluster(
                n_workers=1, processes=False, threads_per_worker=1, dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"preload": [dashboard.__name__]},
            ) as cluster,
            Client(cluster) as client,
        ):  # fmt: skip
            X = np.random.default_rng(0).standard_normal((300, 2))
            result = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-2, 20, random_state=0)
            assert result.scores.compute().shape == (300,)
            assert client.submit(lambda: 1).result() == 1
        assert told == ["the dashboard has no page about daskrr: %s: %s"]

    def test_without_a_dashboard_everything_works(self):
        with (
            LocalCluster(
                n_workers=1, processes=False, threads_per_worker=1, dashboard_address=None,
                scheduler_kwargs={"preload": [dashboard.__name__]},
            ) as cluster,
            Client(cluster),
        ):  # fmt: skip
            X = np.random.default_rng(0).standard_normal((300, 2))
            result = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-2, 20, random_state=0)
            assert result.scores.compute().shape == (300,)
