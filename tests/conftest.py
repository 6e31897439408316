"""Clusters that tests share; everything a test starts, it stops."""

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster
from hypothesis import settings

from daskrr.storage import retry

# A machine that is busy with something else makes no property wrong.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

GENEROUS = 120
WITHOUT_DASKRR = "import sys; sys.modules['daskrr'] = None; "
OTHER_VERSION = "import daskrr; daskrr.__version__ = '0.0.0'; "
# One request at a time: served by threads, two conditional requests may both find their condition met.
S3_SERVER = """
import sys
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple
application = DomainDispatcherApplication(create_backend_app)
run_simple("127.0.0.1", int(sys.argv[1]), application, request_handler=MotoRequestHandler)
"""


# Durable writes wait for the disk, and most tests make many: in memory they take a third of the time.
MEMORY, ENOUGH = Path("/dev/shm"), 4 * 2**30


def pytest_configure(config: pytest.Config) -> None:
    """Have temporary folders in memory where there is room; TMPDIR puts them elsewhere."""
    if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ENOUGH:
        os.environ["TMPDIR"], tempfile.tempdir = str(MEMORY), None


def is_asked_for(marker: str, config: pytest.Config) -> bool:
    """Whether tests with a marker are among those that -m asks for by name."""
    return re.search(rf"(?<!not )\b{marker}\b", config.option.markexpr) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out tests of deploy/ unless they are asked for by their marker: what they import is not everywhere."""
    is_one = collection_path.is_relative_to(Path(__file__).parent / "deploy")
    return True if is_one and not is_asked_for("deploy", config) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """No test may depend on those before it: ``--shuffle SEED`` runs them in another order."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests on GPUs unless they are asked for, slow ones too; on demand, files in a random order.

    The tests of each file stay together, so that fixtures of modules are made once.
    """
    if not is_asked_for("gpu", config):
        there = {item for item in items if item.get_closest_marker("gpu") is not None}
        config.hook.pytest_deselected(items=list(there))
        items[:] = [item for item in items if item not in there]
    if (seed := config.getoption("--shuffle")) is not None:
        chance = random.Random(seed)
        place = {name: chance.random() for name in sorted({item.path for item in items})}
        items.sort(key=lambda item: item.nodeid)
        chance.shuffle(items)
        items.sort(key=lambda item: place[item.path])


@pytest.fixture(autouse=True)
def _scheduler_is_left_as_found() -> Iterator[None]:
    """A default client that is not closed in order would have later tests ask for a scheduler that is gone."""
    before = dask.config.get("scheduler", None)
    yield
    assert dask.config.get("scheduler", None) == before


@pytest.fixture(autouse=True)
def _pauses_are_short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process of a quick test tries again, it tries soon; slow ones wait as users do."""
    if not any(map(request.node.get_closest_marker, ("slow", "deploy", "gpu"))):
        for name in ("PAUSES", "PAUSES_IF_ABSENT"):
            monkeypatch.setattr(retry, name, tuple(pause / 100 for pause in getattr(retry, name)))


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Two single-threaded worker processes on loopback."""
    with LocalCluster(
        n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0", memory_limit="2GiB"
    ) as started:
        yield started


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    """A client of the shared cluster, current for the test alone."""
    with Client(cluster) as connected:
        yield connected


@contextlib.contextmanager
def command_line_cluster(
    folder: Path,
    n_workers: int = 2,
    scheduler_setup: str = "",
    worker_setup: str = "",
    scheduler_options: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Client]:
    """A scheduler and workers as processes of their own, started by their commands."""
    file = folder / "scheduler.json"
    here = Path(__file__).parent
    own = [str(here / name) for name in ("", "helpers", "runtime")]
    path = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | (environment or {})
    scheduler = [*_dask_command("scheduler", scheduler_setup), "--host", "127.0.0.1", "--port", "0"]
    worker = [*_dask_command("worker", worker_setup), "--scheduler-file", str(file), "--host", "127.0.0.1"]
    commands = [[*scheduler, "--no-dashboard", "--scheduler-file", str(file), *scheduler_options]]
    commands += [[*worker, "--nthreads", "1", "--no-dashboard", "--no-nanny", "--memory-limit", "2GiB"]] * n_workers
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context(open(folder / f"process-{len(os.listdir(folder))}.log", "wb"))
            process = subprocess.Popen(command, env=settings, cwd=folder, stdout=log, stderr=log)
            stack.callback(stop, process)
        client = stack.enter_context(Client(scheduler_file=str(file), timeout=GENEROUS, set_as_default=False))
        stack.enter_context(client.as_current())
        client.wait_for_workers(n_workers, timeout=GENEROUS)
        yield client


def _dask_command(name: str, setup: str) -> list[str]:
    """``dask scheduler`` or ``dask worker``, after ``setup`` has changed something in its process."""
    if not setup:
        return [sys.executable, "-m", "dask", name]
    return [sys.executable, "-c", f"{setup}from distributed.cli.dask_{name} import main; main()"]


def stop(process: subprocess.Popen) -> None:
    """End a process, the hard way if need be."""
    process.terminate()
    try:
        process.wait(GENEROUS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(url: str, deadline: float) -> bool:
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except OSError:
            time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a bucket on a server of our own; its credentials are in the environment alone."""
    address = f"http://127.0.0.1:{_free_port()}"
    settings = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    command = [sys.executable, "-c", S3_SERVER, address.rpartition(":")[2]]
    log = (tmp_path_factory.mktemp("s3") / "server.log").open("wb")
    with pytest.MonkeyPatch.context() as patch, log:
        for name, value in settings.items():
            patch.setenv(name, value)
        server = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        try:
            assert _answers(f"{address}/moto-api/", time.monotonic() + GENEROUS)
            urllib.request.urlopen(urllib.request.Request(f"{address}/points", method="PUT"), timeout=GENEROUS).close()
            yield "s3://points"
        finally:
            stop(server)
