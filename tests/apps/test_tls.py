"""Who can reach a cluster: encrypted connections to one that runs already, and loopback for those started here."""

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import dask
import numpy as np
import psutil
import pytest
import zarr
from click.testing import CliRunner
from conftest import GENEROUS, stop
from distributed import LocalCluster, Security

import daskrr
from daskrr import kernels
from daskrr.apps import clusters
from daskrr.apps.cli import main
from daskrr.errors import InvalidParameter, SourceUnreachable

RECIPE = Path(__file__).parents[2] / "deploy" / "local" / "make-certificates.sh"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(daskrr.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
MODEL = [
    "--kernel",
    "gaussian",
    "--length-scale",
    "2",
    "--ridge",
    "1e-3",
    "--landmarks",
    "40",
    "--certify",
    "--seed",
    "0",
]
ARRAYS = ("scores", "lower", "upper", "estimate", "residual")
ELSEWHERE = "tcp://192.0.2.1:8786"  # an address that belongs to nobody


def certificates(folder):
    """An authority of its own with a certificate that it has signed; the options that name the files."""
    made = Security.temporary()
    files = {"tls_ca_file": made.tls_ca_file, "tls_cert": made.tls_client_cert, "tls_key": made.tls_client_key}
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return {name: str(folder / name) for name in files}


def words(options):
    return [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), value)]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Certificates made by the recipe for clusters by hand, where that is possible."""
    folder = tmp_path_factory.mktemp("ours")
    if shutil.which("openssl") is None:
        return certificates(folder / "tls")
    subprocess.run([RECIPE, folder], capture_output=True, timeout=GENEROUS, check=True)
    files = {"tls_ca_file": "ca.pem", "tls_cert": "cert.pem", "tls_key": "key.pem"}
    return {name: str(folder / file) for name, file in files.items()}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("foreign") / "tls")


@contextlib.contextmanager
def started(command, log):
    """A process that ends with the test."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=file, stderr=file, env=ENVIRONMENT, cwd=log.parent
        )
        try:
            yield process
        finally:
            stop(process)


@pytest.fixture(scope="module")
def encrypted(ours):
    """Address of a scheduler with one worker, both in this process, with certificates."""
    files = {"tls_ca_file": ours["tls_ca_file"]}
    for role in ("scheduler", "worker", "client"):
        files |= {f"tls_{role}_cert": ours["tls_cert"], f"tls_{role}_key": ours["tls_key"]}
    security = Security(require_encryption=True, **files)
    options = {"threads_per_worker": 1, "processes": False, "memory_limit": "2GiB", "dashboard_address": None}
    with LocalCluster(n_workers=1, protocol="tls://", host="127.0.0.1", security=security, **options) as cluster:
        yield cluster.scheduler_address


@pytest.fixture(scope="module")
def encrypted_processes(ours, tmp_path_factory):
    """Address of a scheduler with one worker, both started by their commands with certificates."""
    folder = tmp_path_factory.mktemp("cluster")
    file = folder / "scheduler.json"
    local = ["--scheduler-file", str(file), "--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0", *words(ours)]
    scheduler = ["dask", "scheduler", "--protocol", "tls", "--port", "0", *local]
    worker = ["dask", "worker", "--nthreads", "1", "--no-nanny", "--memory-limit", "2GiB", *local]
    with started(scheduler, folder / "scheduler.log"), started(worker, folder / "worker.log"):
        address = written(file)["address"]
        with clusters.connect(address, **ours, worker_seconds=GENEROUS, echo=lambda line: None):
            pass
        yield address


def written(file):
    """What a file holds once it is there, whole."""
    deadline = time.monotonic() + GENEROUS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            return json.loads(file.read_text())
        time.sleep(0.05)
    raise TimeoutError(f"{file} was never written")


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(clusters, "CONNECT_SECONDS", GENEROUS)


@pytest.fixture
def points(tmp_path):
    path = tmp_path / "points.zarr"
    rows = np.random.default_rng(0).standard_normal((500, 3))
    zarr.create_array(path, shape=rows.shape, chunks=(100, 3), dtype=rows.dtype)[:] = rows
    return path


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def contents(output):
    return {name: zarr.open_array(output / name, mode="r")[...].tobytes() for name in ARRAYS}


def in_plain(points, output):
    daskrr.score_to_zarr(points, output, kernels.Gaussian(2.0), 1e-3, 40, certify=True, random_state=0, progress=False)
    return contents(output)


class TestEncrypted:
    @pytest.mark.slow
    def test_score__over_tls_gives_the_bits_of_a_plain_run(self, encrypted_processes, ours, points, tmp_path):
        output = tmp_path / "scores.zarr"
        options = ["--cluster", encrypted_processes, *words(ours), "--require-tls"]
        done = invoke("score", points, output, *MODEL, *options, "--quiet", "--json")
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["n_rows"] == 500
        assert contents(output) == in_plain(points, tmp_path / "plain.zarr")

    def test_connect__every_connection_is_encrypted(self, encrypted, ours):
        with clusters.connect(encrypted, **ours, echo=lambda line: None) as client:
            (worker,) = client.scheduler_info()["workers"]
            assert worker.startswith("tls://")
            assert client.submit(lambda: 1).result(GENEROUS) == 1
            assert client.scheduler_comm.comm.local_address.startswith("tls://")

    def test_connect__finds_certificates_in_the_configuration_of_dask(self, encrypted, ours):
        client = {"cert": ours["tls_cert"], "key": ours["tls_key"]}
        settings = {"distributed.comm.tls.ca-file": ours["tls_ca_file"], "distributed.comm.tls.client": client}
        with dask.config.set(settings), clusters.connect(encrypted, echo=lambda line: None) as connected:
            assert len(connected.scheduler_info()["workers"]) == 1
        with pytest.raises(SourceUnreachable, match="asks every client for a certificate"), clusters.connect(encrypted):
            pass

    @pytest.mark.parametrize(
        "names", [("tls_ca_file",), ("tls_cert", "tls_key"), ("tls_ca_file", "tls_cert", "tls_key")]
    )
    def test_connect__certificates_of_another_authority_are_refused(self, encrypted, ours, foreign, names):
        mixed = ours | {name: foreign[name] for name in names}
        with (
            pytest.raises(SourceUnreachable, match="one authority has to have signed"),
            clusters.connect(encrypted, **mixed),
        ):
            pass

    def test_score__without_certificates_fails_in_words(self, encrypted, points, tmp_path):
        for address, words_ in (
            (encrypted, "asks every client for a certificate: give --tls-ca-file"),
            (encrypted.replace("tls", "tcp"), "use tls:// instead of tcp://"),
        ):
            done = invoke("score", points, tmp_path / "scores.zarr", *MODEL, "--cluster", address)
            assert done.exit_code == 3
            assert words_ in done.stderr
            assert "Traceback" not in done.stderr
            assert not (tmp_path / "scores.zarr").exists()

    def test_port__speaks_to_nobody_without_a_certificate(self, encrypted, ours):
        host, port = encrypted.removeprefix("tls://").split(":")
        with socket.create_connection((host, int(port)), GENEROUS) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert plain.recv(1000) == b""
        assert self.answer(host, int(port), ours, with_certificate=True)
        with contextlib.suppress(ssl.SSLError, ConnectionResetError):
            assert not self.answer(host, int(port), ours, with_certificate=False)

    @staticmethod
    def answer(host, port, files, with_certificate):
        """What the scheduler says first to a client with the right authority."""
        context = ssl.create_default_context(cafile=files["tls_ca_file"])
        context.check_hostname = False
        if with_certificate:
            context.load_cert_chain(files["tls_cert"], files["tls_key"])
        with socket.create_connection((host, port), GENEROUS) as raw, context.wrap_socket(raw) as stream:
            return stream.recv(1000)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_make_certificates__files_are_private_and_never_replaced(ours):
    assert {os.stat(path).st_mode & 0o077 for path in ours.values()} == {0}
    folder = Path(ours["tls_key"]).parent
    again = subprocess.run([RECIPE, folder], capture_output=True, text=True, timeout=GENEROUS, check=False)
    assert again.returncode == 1
    assert "has certificates already; remove them first" in again.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["ca.pem", "cert.pem", "key.pem"]


class TestMistakes:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tls_key": "nowhere.pem"}, r"no file nowhere\.pem, which --tls-key should be"),
            ({"tls_ca_file": "nowhere.pem"}, r"no file nowhere\.pem, which --tls-ca-file should be"),
            ({"tls_key": "tls_cert"}, "no certificate with its key"),
            ({"cluster": None}, "name it with --cluster"),
            ({"cluster": "tcp://127.0.0.1:1"}, "is not encrypted"),
            ({"workers": 1}, "not one that runs already"),
        ],
    )
    def test_check__certificates_that_cannot_work_are_told_before_connecting(self, ours, change, message):
        files = ours | {"nowhere.pem": "nowhere.pem"}
        options = {"cluster": "tls://192.0.2.1:8786", **ours}
        options |= {name: files.get(value, value) for name, value in change.items()}
        with pytest.raises(InvalidParameter, match=message):
            clusters.check(**options)

    def test_check__what_works_is_not_complained_about(self, ours, caplog):
        clusters.check("tls://192.0.2.1:8786", **ours, require_tls=True)
        for address in ("tcp://127.0.0.1:8786", "127.0.0.1:8786", "tcp://localhost:8786", "tcp://[::1]:8786", None):
            clusters.check(address, require_tls=True)
        assert caplog.text == ""

    @pytest.mark.parametrize("address", [ELSEWHERE, "192.0.2.1:8786", "ws://192.0.2.1:8786", "tcp://nowhere.invalid:1"])
    def test_check__warns_of_a_plain_scheduler_elsewhere(self, address, caplog):
        clusters.check(address)
        (record,) = caplog.records
        for part in (address, "reads rows and scores", "runs code on the workers", "--tls-ca-file", "--require-tls"):
            assert part in record.getMessage()
        with pytest.raises(InvalidParameter, match="Refused, as --require-tls asks"):
            clusters.check(address, require_tls=True)

    def test_score__refuses_a_plain_scheduler_before_it_connects(self, points, tmp_path):
        done = invoke("score", points, tmp_path / "o.zarr", *MODEL, "--cluster", ELSEWHERE, "--require-tls")
        assert done.exit_code == 2
        assert f"{ELSEWHERE} is not encrypted" in done.stderr


def listening(process):
    """Addresses and ports on which a process or any that it has started accepts connections."""
    family = [process, *process.children(recursive=True)]
    found = [one for member in family for one in member.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    return {(one.laddr.ip, one.laddr.port) for one in found}


@pytest.mark.slow
def test_connect__a_cluster_that_we_start_listens_on_the_loopback_only():
    me, lines = psutil.Process(), []
    with socket.socket() as everywhere:
        everywhere.bind(("0.0.0.0", 0))
        everywhere.listen()
        assert listening(me) >= {everywhere.getsockname()}
    before = listening(me)
    with clusters.connect(workers=2, echo=lines.append) as client:
        addresses = [client.scheduler.address, *client.nthreads(), *lines]
        ports = {int(address.removesuffix("/status").rpartition(":")[2]) for address in addresses}
        found = listening(me) - before
        assert len(ports) == 4
        assert ports <= {port for _, port in found}
        assert {address for address, _ in found} == {"127.0.0.1"}
    assert listening(me) == before
