"""A cluster within one batch job of SLURM: srun starts a scheduler and workers beside the process that asked for them.

The same module is what srun starts, as often as there are tasks; each becomes what the number of its task says.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from distributed import Client, Security

from daskrr.apps.clusters.managed import ClusterRequest
from daskrr.errors import SourceUnreachable

_END_SECONDS = 15.0
# The scheduler has little to do beside a worker, and needs no core of its own.
_SRUN = ["--quiet", "--overcommit", "--cpu-bind=none"]
# Failures come back as exceptions; the log would only repeat them, each with its traceback.
_QUIET = {"DASK_LOGGING": repr({"distributed": "critical", "distributed.client": "critical"})}
_ROLES = ("client", "scheduler", "worker")


@contextmanager
def start(wanted: ClusterRequest) -> Iterator[Client]:
    """Start one more task than there are workers, for the scheduler; give a client, and end them all."""
    with tempfile.TemporaryDirectory(prefix=".daskrr-", dir=wanted.settings["folder"]) as name:
        folder = Path(name).absolute()
        settings = {**wanted.settings, "security": _files(wanted.settings.get("security"), folder)}
        (folder / "settings.json").write_text(json.dumps(settings))
        command = ["srun", *_SRUN, f"--ntasks={wanted.maximum + 1}", *settings["srun"]]
        command += [sys.executable, "-m", __name__, str(folder)]
        members = subprocess.Popen(command, stdout=sys.stderr, env=os.environ | _QUIET)
        try:
            with _client(folder, settings["security"], members, wanted.seconds) as client:
                try:
                    yield client
                finally:  # there are keys in it, and to end takes a while, which a request to end may not wait for
                    shutil.rmtree(folder, ignore_errors=True)
        finally:
            _end(members)


def _files(security: Security | bool | None, folder: Path) -> dict[str, str] | None:
    """The certificates of every role as paths; those that are made for this run are put into its folder."""
    if security is None:
        return None
    if isinstance(security, Security):
        found = {name: getattr(security, name) for name in ["tls_ca_file", *_of_roles()]}
        return {name: os.path.abspath(path) for name, path in found.items()}
    certificates, paths = Security.temporary(), {}
    for name in ["tls_ca_file", *_of_roles()]:
        paths[name] = str(folder / f"{name}.pem")
        Path(paths[name]).touch(mode=0o600)
        Path(paths[name]).write_text(getattr(certificates, name))
    return paths


def _of_roles() -> list[str]:
    return [f"tls_{role}_{part}" for role in _ROLES for part in ("cert", "key")]


@contextmanager
def _client(
    folder: Path, files: dict[str, str] | None, members: subprocess.Popen[Any], seconds: float
) -> Iterator[Client]:
    """A client of the scheduler that srun starts; it has scheduler and workers end before it does itself."""
    client = Client(_address(folder / "scheduler.json", members, seconds), security=_security(files), timeout=seconds)
    try:
        yield client
    finally:
        with _silent("distributed.client"), suppress(OSError):
            client.shutdown()
            client.close()


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Have a client not tell, with its traceback, that it lost the scheduler that it has just ended."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _address(file: Path, members: subprocess.Popen[Any], seconds: float) -> str:
    """Where the scheduler is, once it has said so."""
    deadline = time.monotonic() + seconds
    while members.poll() is None and time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            return str(json.loads(file.read_text())["address"])
        time.sleep(0.1)
    found = f"it ended with {members.returncode}" if members.poll() is not None else f"not within {seconds:g} seconds"
    raise SourceUnreachable(f"srun started no scheduler: {found}. Look at what it printed above.")


def _security(files: dict[str, str] | None) -> Security | None:
    return None if files is None else Security(require_encryption=True, **files)


def _end(members: subprocess.Popen[Any]) -> None:
    """Wait for srun, which ends when its tasks have; those that hang are ended."""
    for stop in (lambda: None, members.terminate, members.kill):
        stop()
        with suppress(subprocess.TimeoutExpired):
            members.wait(_END_SECONDS)
            return


def take_part(folder: Path) -> None:
    """Be the scheduler or a worker, as long as the cluster lasts."""
    settings = json.loads((folder / "settings.json").read_text())
    common = {
        "security": _security(settings["security"]),
        "protocol": "tls" if settings["security"] else None,
        "interface": settings.get("interface"),
        "dashboard_address": "127.0.0.1:0",
    }
    import_module("dask_jobqueue.slurm").SLURMRunner(
        scheduler_file=str(folder / "scheduler.json"),
        client=False,
        scheduler_options=dict(common),
        worker_class="distributed.Nanny",
        worker_options={**common, "nthreads": 1, "memory_limit": settings["memory_limit"]},
    )


if __name__ == "__main__":
    take_part(Path(sys.argv[1]))
