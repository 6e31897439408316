"""What the scheduler is told of a job, and that no failure to tell it fails the job."""

from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
import pytest
from distributed import Client
from posing import PosingDevice

import daskrr
from daskrr.kernels.device import using
from daskrr.numerics import histogram
from daskrr.runtime import scheduler, telemetry
from daskrr.runtime.progress import Display, Event, Stage
from daskrr.runtime.telemetry import TOPIC, Feed, matmul_speed, note, reporter

KERNEL = daskrr.kernels.Gaussian(1.0)


class Loop:
    """Runs nothing, but keeps what it was given."""

    def __init__(self):
        self.messages = []

    def add_callback(self, function, client, message):
        self.messages.append(message)


class FakeClient:
    status, id = "running", "client-1"

    def __init__(self):
        self.loop = Loop()

    def sync(self, function, client, message, callback_timeout):
        self.loop.messages.append(message)


class BrokenClient(FakeClient):
    @property
    def loop(self):
        raise OSError("gone")

    @loop.setter
    def loop(self, value):
        pass

    def sync(self, *_, **__):
        raise OSError("gone")


def events(client: Client) -> list[dict]:
    return [message for _, message in client.get_events(TOPIC)]


class TestFeed:
    def test_hands_on_every_event_and_sends_few(self):
        seen, client = [], FakeClient()
        with Feed(progress_of(seen), client) as report, Stage(report, "pass 1", 1000, 1000) as stage:
            for _ in range(1000):
                stage.advance(rows=1)
        assert len(seen) == 1001
        sent = [message["event"]["done"] for message in client.loop.messages if "event" in message]
        assert sent[0] == 0
        assert sent[-1] == 1000
        assert len(sent) < 50
        assert [message["order"] for message in client.loop.messages] == list(range(1, len(client.loop.messages) + 1))
        assert client.loop.messages[-1]["state"] == "done"

    @pytest.mark.parametrize(
        ("error", "state", "text"),
        [
            (ValueError("s3://me:secret@host/x failed"), "failed", "ValueError: s3://***@host/x failed"),
            (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
        ],
    )
    def test_says_how_it_ended(self, error, state, text):
        client = FakeClient()
        with pytest.raises(type(error)), Feed(Display(), client):
            raise error
        assert client.loop.messages[-1]["state"] == state
        assert client.loop.messages[-1]["error"] == text

    def test_a_client_that_fails_harms_nobody(self):
        seen = []
        with Feed(progress_of(seen), BrokenClient()) as report:
            note(run="x")
            report(Event("a", 1, 1, 0, 0, 0.0))
        assert len(seen) == 1

    def test_notes_go_to_the_feed_under_way_alone(self):
        client = FakeClient()
        note(run="before")
        with Feed(Display(), client):
            note(run="within")
        note(run="after")
        assert [message["facts"] for message in client.loop.messages if "facts" in message] == [{"run": "within"}]


def progress_of(seen):
    return telemetry.progress.Relay(seen.append)


class TestReporter:
    def test_without_a_client_nothing_is_fed(self):
        assert not isinstance(reporter(False), Feed)

    def test_one_call_is_told_once(self, client):
        with reporter(False) as outer:
            assert isinstance(outer, Feed)
            assert not isinstance(reporter(outer), Feed)
            assert not isinstance(reporter(False), Feed)


class TestCluster:
    def test_a_job_tells_its_stages_sizes_and_end(self, client):
        X = np.random.default_rng(0).standard_normal((3000, 2))
        before = len(events(client))
        result = daskrr.leverage_scores(X, KERNEL, 1e-2, 60, certify=True, random_state=0, block_rows=1000)
        bounds = result.effective_dimension_bounds[0]
        result.measure()
        told = events(client)[before:]
        jobs = [message for message in told if "job" in message]
        counts = [message for message in told if "kind" in message]
        assert [m["state"] for m in jobs if "state" in m] == ["running", "done"] * 2
        assert next(m["facts"] for m in jobs if "facts" in m)["rows"] == 3000
        ends = {m["event"]["stage"]: m["event"] for m in jobs if "event" in m}
        assert ends["pass 1: gram"]["rows"] == ends["pass 2: scores"]["rows"] == 3000
        assert ends["pass 1: gram"]["row_flops"] == 2 * 60 * 2 + 2 * 60**2
        low, high = ends["pass 1: algebra"]["dimension"]
        assert (low, high) == pytest.approx(bounds)
        for kind in ("residual", "score"):
            last = [m for m in counts if m["kind"] == kind and m["run"] == result.sketch.run]
            assert sum(sum(m["counts"]) for m in last) == 3000
        assert all(m["speed"] > 0 for m in counts)
        assert max(len(repr(message)) for message in told) < 2000

    def test_scores_do_not_depend_on_the_feed(self, client, monkeypatch):
        X = np.random.default_rng(0).standard_normal((500, 2))
        fed = daskrr.leverage_scores(X, KERNEL, 1e-2, 30, random_state=0).scores.compute()
        monkeypatch.setattr(telemetry, "_running_client", lambda: None)
        assert (daskrr.leverage_scores(X, KERNEL, 1e-2, 30, random_state=0).scores.compute() == fed).all()

    def test_a_page_that_cannot_be_loaded_harms_nobody(self):
        with dask.config.set({"daskrr.scheduler-preload": ["daskrr.apps.no_such_module"]}):
            scheduler._load_more(None)


def test_matmul_speed__keeps_the_best(monkeypatch):
    monkeypatch.setattr(telemetry, "_speeds", {})
    monkeypatch.setattr(telemetry, "MATMUL_SHARE", float("inf"))
    seconds = iter([0.5, 0.25, 1.0])
    monkeypatch.setattr(telemetry, "_multiply", lambda device, size, dtype: next(seconds))
    flops = 2.0 * telemetry.MATMUL_SIZE**3
    assert [matmul_speed("float64") for _ in range(3)] == [2 * flops, 4 * flops, 4 * flops]


def test_matmul_speed__is_that_of_the_device(monkeypatch):
    monkeypatch.setattr(telemetry, "_speeds", {})
    monkeypatch.setattr(telemetry, "GPU_MATMUL_SIZE", 300)
    device = PosingDevice()
    with using(device):
        assert matmul_speed("float64") > 0
    assert device.fetched == {(256, 256): 1, (1, 300): 1}
    assert matmul_speed("float64") > 0
    assert {name for name, _ in telemetry._speeds} == {"cpu", "cuda"}


def test_matmul_speed__is_measured_rarely(monkeypatch):
    monkeypatch.setattr(telemetry, "_speeds", {})
    measured = []
    monkeypatch.setattr(telemetry, "_multiply", lambda device, size, dtype: measured.append(dtype) or 1.0)
    for _ in range(100):
        matmul_speed("float32")
    assert measured == ["float32"]


def test_matmul_speed__is_measured_by_one_thread_at_a_time(monkeypatch):
    monkeypatch.setattr(telemetry, "_speeds", {})
    with ThreadPoolExecutor(1) as another:
        others = []

        def multiply(device, size, dtype):
            others.append(another.submit(matmul_speed, dtype).result(60))
            return 0.5

        monkeypatch.setattr(telemetry, "_multiply", multiply)
        speed = matmul_speed("float64")
        assert others == [0.0]
        assert another.submit(matmul_speed, "float64").result(60) == speed == 4.0 * telemetry.MATMUL_SIZE**3


def test_octaves__count_every_value():
    values = np.concatenate([np.random.default_rng(0).random(1000) ** 6, [0.0, 1.0, -1e-17, 1.5, 1e-300]])
    counts = histogram.octaves(values)
    assert counts.sum() == len(values)
    assert counts[-1] == (values >= 0.5).sum()
    assert counts[-3] == ((values >= 0.125) & (values < 0.25)).sum()
