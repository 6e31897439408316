"""What can be set about clusters that others start, and that they are stopped whatever happens; no SLURM needed."""

import os
import signal
import subprocess
from types import SimpleNamespace

import dask
import pytest
from distributed import Client, LocalCluster

from daskrr import config
from daskrr.apps import clusters
from daskrr.apps.clusters import managed
from daskrr.errors import InvalidParameter, SourceUnreachable
from daskrr.leverage.plan import Workers
from daskrr.machine import Gpu
from daskrr.runtime.executors import executor


@pytest.mark.parametrize(
    ("device", "gpu", "expected"),
    [("cpu", True, clusters.CPU_COUNT), ("cuda", True, 3), ("auto", True, 3), ("auto", False, clusters.CPU_COUNT)],
)
def test_local_cluster__has_a_worker_for_each_gpu_it_computes_on(device, gpu, expected, monkeypatch):
    monkeypatch.setattr("daskrr.runtime.devices.usable_gpu", lambda: Gpu("posing", 2**30) if gpu else None)
    monkeypatch.setattr("daskrr.machine.visible_gpus", lambda: ["0", "1", "2"])
    with dask.config.set({"daskrr.device": device}):
        assert clusters.default_workers() == expected


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "seen"), [(1, "0"), (2, "")])
def test_local_cluster__of_more_workers_than_gpus_has_none(workers, seen, monkeypatch):
    monkeypatch.setattr("daskrr.runtime.devices.usable_gpu", lambda: Gpu("posing", 2**30))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with clusters.local_cluster(workers) as cluster, Client(cluster) as client:
        assert set(client.run(os.getenv, "CUDA_VISIBLE_DEVICES").values()) == {seen}


def test_device__is_set_as_long_as_the_client_is_there():
    with LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster:
        with clusters.connect(cluster.scheduler_address, device="cpu", echo=lambda line: None):
            assert config.get("device") == "cpu"
        assert config.get("device") == "auto"


IMAGE = {"image": "somewhere/daskrr"}


class Job:
    def __init__(self, queue=None, cores=None, processes=None, memory=None, log_directory=None, **more):
        pass


class StandIn(LocalCluster):
    """A cluster with the settings of one on SLURM, on threads of this process; remembers what is done with it."""

    job_cls = Job
    made: "list[StandIn]" = []  # noqa: RUF012

    def __init__(self, security=None, shared_temp_directory=None, scheduler_options=None, interface=None, **job):
        Job(**job)
        self.job, self.sizes = job, []
        super().__init__(n_workers=0, processes=False, dashboard_address=None)
        self.made.append(self)

    def job_script(self):
        return "#!/bin/sh\n"

    def adapt(self, **sizes):
        self.sizes.append(sizes)
        self.scale(sizes["minimum"])


class Kubernetes:
    def __init__(self, *, name=None, namespace=None, image=None, worker_command=None, quiet=False, **more):
        raise ConnectionError("no API server")


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """Stand-ins for the optional packages; gives what SLURM answers."""
    found = {
        "dask_jobqueue": SimpleNamespace(SLURMCluster=StandIn),
        "dask_jobqueue.slurm": SimpleNamespace(SLURMRunner=object),
        "dask_gateway": SimpleNamespace(GatewayCluster=Kubernetes),
        "dask_kubernetes.operator": SimpleNamespace(KubeCluster=Kubernetes),
    }
    answer = subprocess.CompletedProcess("sbatch", 0, "", "")
    monkeypatch.setattr(managed, "import_module", found.__getitem__)
    monkeypatch.setattr(managed.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(managed.subprocess, "run", lambda *_, **__: answer)
    monkeypatch.setattr(StandIn, "made", [])
    with dask.config.set({"jobqueue.slurm": {"cores": None, "processes": None, "memory": None}, "gateway": {}}):
        dask.config.set({"jobqueue.slurm.shared-temp-directory": None})
        yield answer


def quietly(**options):
    return clusters.connect("slurm", **options, echo=lambda line: None)


class TestSettings:
    def test_defaults_are_those_of_the_file(self):
        assert config.get("clusters.slurm")["security"] is True
        assert [config.seconds(name) for name in ("stuck-after", "no-workers-after", "lease-time")] == [300, 60, 60]

    def test_a_job_file_wins_over_the_configuration_and_that_over_the_defaults(self):
        settings = {"daskrr.clusters.slurm": {"queue": "long", "memory": "1GiB", "maximum": 7, "workers-within": "9s"}}
        with dask.config.set(settings):
            made = managed.order("slurm", given={"memory": "2GiB", "log-directory": "logs"})
        assert (made.minimum, made.maximum, made.seconds) == (1, 7, 9)
        assert {name: made.settings[name] for name in ("queue", "memory", "log_directory")} == {
            "queue": "long", "memory": "2GiB", "log_directory": "logs",
        }  # fmt: skip

    def test_slurm_has_single_threaded_workers_unless_the_site_says_otherwise(self):
        assert managed.order("slurm", 1, {"cores": 3}).settings.items() >= {"processes": 3, "memory": "12GiB"}.items()
        with dask.config.set({"jobqueue.slurm.cores": 8, "jobqueue.slurm.processes": 2}):
            assert not {"cores", "processes"} & set(managed.order("slurm", 1).settings)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "how many workers shall a slurm cluster have"),
            ({"workers": 2, "settings": {"minimum": 1}}, "give it, or minimum and maximum, not both"),
            ({"settings": {"minimum": 3, "maximum": 2}}, "at least 3 and at most 2"),
            ({"settings": {"maximum": "many"}}, "maximum must be an int"),
            ({"workers": 1, "settings": {"log_directori": "x"}}, "did you mean log-directory"),
            ({"workers": 1, "settings": {"colour": "x"}}, "no setting colour; there are "),
            ({"workers": 1, "settings": {"workers-within": "soon"}}, "a time looks like 10 minutes"),
            ({"workers": 1, "memory_limit": "1GiB"}, "for workers on this machine"),
            ({"workers": 1, "tls_cert": "nowhere.pem"}, r"no file nowhere\.pem"),
            ({"workers": 1, "settings": {"security": False}, "require_tls": True}, "Refused, as --require-tls asks"),
            ({"cluster": "slurm-runner"}, "takes the tasks of the batch job"),
            ({"cluster": "gateway", "workers": 1}, "where is the gateway"),
            (
                {"cluster": "gateway", "workers": 1, "settings": {"address": "http://192.0.2.1"}, "require_tls": True},
                "not",
            ),
            ({"cluster": "kubernetes", "workers": 1}, "which image has daskrr"),
            ({"cluster": "kubernetes", "workers": 1, "settings": IMAGE, "require_tls": True}, "a NetworkPolicy"),
            ({"cluster": "local", "settings": {"queue": "long"}}, "workers and memory-limit, not queue"),
        ],
    )
    def test_mistakes_are_told_before_anything_starts(self, options, message, monkeypatch):
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        with pytest.raises(InvalidParameter, match=message):
            clusters.check(**{"cluster": "slurm"} | options)
        assert StandIn.made == []

    def test_plain_connections_are_warned_of(self, caplog):
        clusters.check("slurm", 1, settings={"security": False})
        clusters.check("kubernetes", 1, settings=IMAGE)
        clusters.check("gateway", 1, settings={"address": "http://127.0.0.1:8000"})
        assert [record.getMessage().partition(" is not")[0] for record in caplog.records] == [
            "the connections between the batch jobs", "the network between the pods",
        ]  # fmt: skip

    @pytest.mark.parametrize("kind", managed.KINDS)
    def test_a_package_that_is_not_installed_is_named_with_its_extra(self, kind, monkeypatch):
        def fail(name):
            raise ModuleNotFoundError(f"No module named {name!r}")

        monkeypatch.setattr(managed, "import_module", fail)
        with pytest.raises(SourceUnreachable, match=rf"pip install '\.\[{managed.KINDS[kind].extra}\]' in a checkout"):
            clusters.check(kind, 1)

    def test_what_a_package_does_to_the_interrupt_key_is_undone(self, monkeypatch):
        def grab(name):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return SimpleNamespace(SLURMCluster=StandIn)

        before = signal.getsignal(signal.SIGINT)
        monkeypatch.setattr(managed, "import_module", grab)
        clusters.check("slurm", 1)
        assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def interruptible():
    """The interrupt key works, also where tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class TestStarted:
    def test_a_cluster_of_fixed_size_adapts_between_equal_bounds_and_is_closed(self):
        with quietly(workers=2) as client:
            assert client.submit(lambda: 1).result(60) == 1
            assert config.seconds("no-workers-after") == 86400
        (made,) = StandIn.made
        assert made.sizes == [{"minimum": 2, "maximum": 2}]
        assert made.status.name == "closed"
        assert config.seconds("no-workers-after") == 60

    @pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
    def test_it_is_closed_after_a_failure_too(self, failure):
        with pytest.raises(failure), quietly(settings={"minimum": 1, "maximum": 4}):
            raise failure
        (made,) = StandIn.made
        assert made.sizes == [{"minimum": 1, "maximum": 4}]
        assert made.status.name == "closed"

    @pytest.mark.parametrize(
        ("answer", "failure", "message"),
        [
            ("invalid partition specified: x", InvalidParameter, "does not take such batch jobs: allocation"),
            ("Unable to contact slurm controller", SourceUnreachable, "SLURM does not answer"),
        ],
    )
    def test_batch_jobs_that_slurm_refuses(self, packages, answer, failure, message):
        packages.returncode, packages.stderr = 1, f"allocation failure: {answer}\n"
        with pytest.raises(failure, match=message), quietly(workers=1):
            pass
        assert StandIn.made[0].sizes == []
        assert StandIn.made[0].status.name == "closed"

    def test_workers_that_stay_away(self, monkeypatch):
        monkeypatch.setattr(StandIn, "adapt", lambda self, **_: None)
        with (
            pytest.raises(SourceUnreachable, match=r"no worker for 0\.1 seconds: look at 'squeue --me'"),
            quietly(workers=1, settings={"workers-within": "100ms"}),
        ):
            pass

    def test_an_interrupt_waits_until_what_is_half_started_can_be_stopped(self, monkeypatch, interruptible):
        def start(self, **settings):
            signal.raise_signal(signal.SIGINT)
            begin(self, **settings)

        begin = StandIn.__init__
        monkeypatch.setattr(StandIn, "__init__", start)
        with pytest.raises(KeyboardInterrupt):
            managed._begin(managed.ClusterRequest("slurm", 1, 1, 1.0, {}))
        assert StandIn.made[0].status.name == "closed"

    def test_a_cluster_that_does_not_start(self):
        with (
            pytest.raises(
                SourceUnreachable, match=r"kubernetes cluster did not start \(ConnectionError: no API server"
            ),
            clusters.connect("kubernetes", 1, settings=IMAGE),
        ):
            pass


@pytest.mark.slow
def test_connect__starts_workers_that_have_few_threads_and_tell_what_they_take() -> None:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    with clusters.connect(workers=1, echo=print) as client:
        (found,) = client.run(lambda: [__import__("os").environ.get(name) for name in names]).values()
        (threads,) = client.run(lambda: __import__("zarr").config.get("threading.max_workers")).values()
        assert Workers.of(executor("a run")).idle_bytes > 50 * 2**20
    assert found == ["1"] * len(names)
    assert threads == 2
