"""deploy/docker: the image built and the compose file run for real, by buildah and podman, without any registry.

The base image is Debian with its Python, made by debootstrap and kept in a folder between runs
(``DASKRR_DEPLOY_CACHE``). Health checks, which podman leaves to systemd, are asked for by the test.
"""

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

import daskrr
from daskrr import exact, kernels

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1200)]

GENEROUS = 900
ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
CACHE = Path(os.environ.get("DASKRR_DEPLOY_CACHE", "~/.cache/daskrr-deploy")).expanduser()
BASE = "localhost/daskrr-base:latest"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
INDEX_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy")
ADDRESSES = {"scheduler": "10.89.77.10", "store": "10.89.77.11"}
# Debian's podman has no names on its networks: addresses are given to the services that are called by name.
ADDRESSED = {
    "services": {name: {"networks": {"default": {"ipv4_address": ip}}} for name, ip in ADDRESSES.items()}
    | {name: {"extra_hosts": [f"{host}:{ip}" for host, ip in ADDRESSES.items()]} for name in ("worker", "job")},
    "networks": {"default": {"ipam": {"config": [{"subnet": "10.89.77.0/24"}]}}},
}
NEEDED = ("podman", "buildah", "runc", "debootstrap", "podman-compose")
missing = [
    tool for tool in NEEDED if shutil.which(tool, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") is None
]
needs_containers = pytest.mark.skipif(
    bool(missing) or os.geteuid() != 0, reason=f"needs root and {', '.join(missing) or 'nothing else'}"
)


def checked(tool: str, *arguments: str) -> subprocess.CompletedProcess:
    """A tool of this environment, and what it says."""
    command = [str(Path(sys.executable).with_name(tool)), *arguments]
    if not Path(command[0]).exists():
        pytest.skip(f"needs {tool}")
    return subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS, check=False)


def test_dockerfiles__have_no_findings(tmp_path: Path) -> None:
    done = checked("hadolint", str(DOCKER / "Dockerfile"), str(DOCKER / "store" / "Dockerfile"))
    assert (done.returncode, done.stdout) == (0, "")
    planted = (DOCKER / "Dockerfile").read_text().replace("WORKDIR /home/daskrr", "USER root\nWORKDIR home")
    (tmp_path / "Dockerfile").write_text(planted)
    found = checked("hadolint", str(tmp_path / "Dockerfile"))
    assert found.returncode == 1
    assert "DL3000" in found.stdout
    assert "DL3002" in found.stdout


def test_compose__keeps_to_its_schema(tmp_path: Path) -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    done = checked("check-jsonschema", *schema, str(DOCKER / "compose.yaml"))
    assert done.returncode == 0, done.stdout
    planted = tmp_path / "compose.yaml"
    planted.write_text((DOCKER / "compose.yaml").read_text().replace("depends_on:", "depend_on:"))
    found = checked("check-jsonschema", *schema, str(planted))
    assert found.returncode == 1
    assert "depend_on" in found.stdout


class Engine:
    """Podman and buildah with a store of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "containers.conf").write_text(
            '[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\nevents_logger = "file"\n'
            '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]\n'
            f'[network]\nnetwork_config_dir = "{folder}/networks"\n'
        )
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/images"\nrunroot = "{folder}/run"\n'
        )
        (folder / "addressed.yaml").write_text(yaml.dump(ADDRESSED))
        self.environment = os.environ | {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COMPOSE_PROJECT_NAME": "daskrr",
            "DASHBOARD_PORT": str(free_port()),
        }

    def run(self, *command: str, accept: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess:
        """Run a command to its end, which has to be good."""
        done = subprocess.run(
            command, env=self.environment, cwd=DOCKER, capture_output=True, text=True, timeout=GENEROUS, check=False
        )
        assert done.returncode in accept, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def compose(self, *arguments: str, **how: tuple[int, ...]) -> subprocess.CompletedProcess:
        """Run a command of the compose file."""
        files = ("-f", "compose.yaml", "-f", str(self.folder / "addressed.yaml"))
        return self.run("podman-compose", "--profile", "job", *files, *arguments, **how)

    def job(self, *command: str, mount: Path | None = None) -> str:
        """Run the job, or another command in its place; what it says."""
        mounts = [] if mount is None else ["-v", f"{mount}:/{mount.name}:ro"]
        done = self.compose("run", "--rm", "--no-deps", "-T", *mounts, "job", *command)
        return done.stdout + done.stderr

    def start(self, service: str, *containers: str) -> None:
        """Start a service, and wait until all of its containers are healthy."""
        self.compose("up", "-d", "--no-deps", "--no-build", service)
        deadline = time.monotonic() + GENEROUS
        while any(self.run("podman", "healthcheck", "run", one, accept=(0, 1, 125)).returncode for one in containers):
            logs = self.run("podman", "logs", containers[0]).stderr
            assert time.monotonic() < deadline, f"{service} does not become healthy: {logs}"
            time.sleep(0.5)

    def inspect(self, name: str) -> dict:
        """All that is known of an image or a container."""
        return json.loads(self.run("podman", "inspect", name).stdout)[0]

    def build(self, name: str, *where: str) -> None:
        """Build an image on the base of the test."""
        (self.folder / "pip.conf").write_text(pip_settings())
        certificates = ssl.get_default_verify_paths().cafile or CERTIFICATES
        self.run(
            *("buildah", "bud", "--isolation", "chroot", "--network", "host", "--format", "docker"),
            *("--secret", f"id=pip,src={self.folder}/pip.conf", "--volume", f"{certificates}:{CERTIFICATES}:ro"),
            *("--build-arg", f"BASE={BASE}", "--tag", f"localhost/{name}:latest", *where),
        )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pip_settings() -> str:
    """The index that pip uses here, as a file for pip in an image."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    pairs = [line.split("=", 1) for line in listed.stdout.splitlines() if "='file:" not in line]
    named = {name.rpartition(".")[2]: value.strip("'") for name, value in pairs}
    kept = [f"{name} = {value}" for name, value in named.items() if name in INDEX_SETTINGS]
    return "\n".join(["[global]", f"cert = {CERTIFICATES}", *kept, ""])


def base(engine: Engine) -> Path:
    """An archive of Debian with Python, made if there is none yet."""
    archive = CACHE / "base.tar"
    if not archive.exists():
        root = engine.folder / "base"
        engine.run("debootstrap", "--variant=minbase", "--include=python3,python3-venv", "bookworm", str(root))
        CACHE.mkdir(parents=True, exist_ok=True)
        made = archive.with_suffix(f".{os.getpid()}")
        kept_out = ("--exclude=./var/cache/apt/*", "--exclude=./var/lib/apt/lists/*")
        engine.run("tar", "-C", str(root), *kept_out, "-cf", str(made), ".")
        made.rename(archive)
    return archive


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Both images built; everything is removed in the end but the base."""
    made = Engine(tmp_path_factory.mktemp("containers"))
    try:
        made.run("podman", "import", str(base(made)), BASE)
        tried = made.run("podman", "run", "--rm", BASE, "true", accept=(0, 125, 126, 127))
        if tried.returncode != 0:
            pytest.skip(f"podman cannot start containers here: {tried.stderr}")
        made.build("daskrr-store", "store")
        made.build("daskrr", "-f", "Dockerfile", str(ROOT))
        yield made
    finally:
        made.run("podman", "rm", "--all", "--force", "--time", "0")
        made.run("podman", "network", "rm", "--force", "daskrr_default")
        shutil.rmtree(made.folder)


@needs_containers
def test_image__runs_as_nobody_in_particular_and_keeps_no_settings_of_its_build(engine: Engine) -> None:
    image = engine.inspect("localhost/daskrr:latest")
    assert image["Config"]["User"] == "1000:1000"
    assert "/health" in str(image["Healthcheck"])
    said = engine.run(
        *("podman", "run", "--rm", "--network", "none", "localhost/daskrr:latest"),
        *("sh", "-c", "daskrr --version; id -u; ls /etc/pip.conf /source 2>&1 || true"),
    ).stdout
    assert daskrr.__version__ in said
    assert "\n1000\n" in said
    assert said.count("No such file") == 2


@needs_containers
def test_compose__scores_a_table_on_the_store(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    X = np.random.default_rng(0).standard_normal((1000, 3))
    np.savetxt(tmp_path / "points.csv", X, delimiter=",", header="x,y,z", comments="", fmt="%.17g")
    engine.start("store", "daskrr_store_1")
    engine.start("scheduler", "daskrr_scheduler_1")
    engine.start("worker", "daskrr_worker_1", "daskrr_worker_2")
    (upload,) = re.findall(r"sh -c '(.+?)'", (DOCKER / "README.md").read_text(), re.DOTALL)
    engine.job("sh", "-c", upload, mount=tmp_path / "points.csv")
    assert "written to  s3://daskrr/scores.zarr" in engine.job()
    assert "nothing to do" in engine.job()

    for name, value in store_settings(engine).items():
        monkeypatch.setenv(name, value)
    scores = daskrr.open_scores("s3://daskrr/scores.zarr")
    width = scores.summary["parameters"]["kernel"]["length_scale"]
    expected = exact.leverage_scores(X, kernels.Gaussian(width), 1e-3)
    # Both ends are nearer to each other than the round-off of the dense solution may be.
    assert (scores["lower"][:] <= expected * (1 + 1e-7)).all()
    assert (scores["upper"][:] >= expected * (1 - 1e-7)).all()
    assert scores.summary["workers"]["count"] == 2
    assert scores.summary["algebra"]["place"] == "scheduler"

    ports = engine.inspect("daskrr_scheduler_1")["HostConfig"]["PortBindings"]
    assert {port: [one["HostIp"] for one in where] for port, where in ports.items()} == {"8787/tcp": ["127.0.0.1"]}
    for name in ("daskrr_worker_1", "daskrr_worker_2", "daskrr_scheduler_1"):
        engine.run("podman", "stop", "--time", "60", name)
        assert engine.inspect(name)["State"]["ExitCode"] == 0


def store_settings(engine: Engine) -> dict[str, str]:
    """The environment of the job, for a reader outside of the containers."""
    listed = [setting.split("=", 1) for setting in engine.inspect("daskrr_worker_1")["Config"]["Env"]]
    settings = {name: value for name, value in listed if name.startswith("AWS_")}
    address = ADDRESSES["store"]
    return settings | {"AWS_ENDPOINT_URL": f"http://{address}:9000", "NO_PROXY": address, "no_proxy": address}
