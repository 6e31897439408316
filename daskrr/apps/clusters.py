"""Clusters to compute on: one started here for the occasion, or one that already runs elsewhere."""

import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import dask
from dask.system import CPU_COUNT
from dask.utils import parse_bytes
from distributed import Client, LocalCluster, Security
from distributed.comm.addressing import get_address_host_port, parse_address
from distributed.comm.core import CommClosedError

from daskrr.errors import InvalidParameter, SourceUnreachable

log = logging.getLogger("daskrr")

CONNECT_SECONDS = 10.0
WORKER_SECONDS = 30.0
_ENCRYPTED = ("tls", "wss")
_CERTIFICATES = "--tls-ca-file, --tls-cert and --tls-key, or distributed.comm.tls in the configuration of Dask"


def local_cluster(
    workers: int | None = None, memory_limit: str | int | None = None, asynchronous: bool = False
) -> LocalCluster:
    """Start worker processes on this machine that nothing outside of it can reach.

    Parameters
    ----------
    workers
        Number of single-threaded processes, by default one for each core this process may use.
    memory_limit
        Memory of each worker, such as ``"2GiB"``; by default an equal share of the machine's memory.
    asynchronous
        Whether the caller awaits the cluster, as the extension of JupyterLab does. It starts then, so that what it is
        started with stays in the configuration of Dask.

    Returns
    -------
    cluster
        To be closed by the caller.
    """
    _check_size(workers, memory_limit)
    settings = {
        # Dask looks at what every worker does a hundred times a second, which costs a few percent of its core.
        "distributed.worker.profile.interval": "200ms",
        # A task that Dask gives up after two workers is run again, alone, which tells more than two workers more.
        "distributed.scheduler.allowed-failures": 1,
    }
    # Dask reads this while the cluster lives. It looks 15 s after a worker was lost, and takes one that has died again
    # and is being restarted at that moment for one that never came back: its nanny is closed, for good.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1 day"})
    with nullcontext(dask.config.set(settings)) if asynchronous else dask.config.set(settings):
        return LocalCluster(
            n_workers=CPU_COUNT if workers is None else workers,
            threads_per_worker=1,
            processes=True,
            memory_limit="auto" if memory_limit is None else memory_bytes(memory_limit),
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            # Failures come back as exceptions; the log would only repeat them, each with its traceback.
            silence_logs=logging.CRITICAL,
            preload=[__name__],
            scheduler_kwargs={"preload": ["daskrr.apps.dashboard"]},
            asynchronous=asynchronous,
        )


def dask_setup(worker: Any) -> None:
    """Make a starting worker ready, and have it ignore the interrupt key; Dask calls this for preloaded modules.

    What tasks import is imported before any is assigned: one that waits for imports on a worker that dies is blamed for
    its death. The key reaches every process of the terminal. The one that started the workers answers it by stopping
    them, and they need not each print how they were interrupted.
    """
    import_module("daskrr.leverage")
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def connect(
    scheduler: str | None = None,
    workers: int | None = None,
    memory_limit: str | int | None = None,
    tls_ca_file: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    require_tls: bool = False,
    *,
    worker_seconds: float = WORKER_SECONDS,
    echo: Callable[[str], None] | None = None,
) -> Iterator[Client]:
    """Give a client of a cluster that has workers, and leave nothing behind.

    Parameters
    ----------
    scheduler
        Address of a running scheduler, such as ``"tls://10.0.0.1:8786"``. Without one a cluster is started on this
        machine and stopped at the end.
    workers, memory_limit
        Size of the cluster to start, as in :func:`local_cluster`.
    tls_ca_file, tls_cert, tls_key
        Files in PEM format for a scheduler at ``tls://``: the authority that signed its certificate, and a certificate
        of this client with its key; by default what the configuration of Dask names.
    require_tls
        Refuse a scheduler that others could listen to, instead of warning.
    worker_seconds
        How long to wait for the first worker of a running scheduler.
    echo
        Takes the line that tells where the dashboard is; standard error by default.

    Raises
    ------
    SourceUnreachable
        No scheduler answers at the address, or it has no workers, or the certificates do not fit.
    """
    security = check(scheduler, workers, memory_limit, tls_ca_file, tls_cert, tls_key, require_tls)
    client_of = _embedded(workers, memory_limit) if scheduler is None else _running(scheduler, security, worker_seconds)
    with client_of as client:
        if client.dashboard_link:
            (echo or _to_stderr)(f"dashboard: {client.dashboard_link}")
        yield client


def check(
    scheduler: str | None = None,
    workers: int | None = None,
    memory_limit: str | int | None = None,
    tls_ca_file: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    require_tls: bool = False,
) -> Security | None:
    """Look what is wrong with the arguments of :func:`connect`, without reaching for anything; what TLS needs."""
    files = {"tls_ca_file": tls_ca_file, "tls_client_cert": tls_cert, "tls_client_key": tls_key}
    given = {name: path for name, path in files.items() if path is not None}
    if scheduler is None:
        _check_size(workers, memory_limit)
        if given:
            raise InvalidParameter("certificates are for a scheduler that runs already; name it with --scheduler")
        return None
    if workers is not None or memory_limit is not None:
        raise InvalidParameter("workers and memory_limit describe a cluster to start, not one that runs already")
    scheme, _ = parse_address(scheduler)
    if scheme in _ENCRYPTED:
        return _security(scheduler, given)
    if given:
        raise InvalidParameter(f"certificates are for a scheduler at tls://, and {scheduler} is not encrypted")
    if scheme != "inproc" and not _on_loopback(scheduler):
        _complain(scheduler, require_tls)
    return None


def _security(address: str, given: dict[str, str]) -> Security:
    security = Security(require_encryption=True, **given)
    for name, value in security.get_tls_config_for_role("client").items():
        if name != "ciphers" and value is not None and "\n" not in value and not Path(value).is_file():
            raise InvalidParameter(f"there is no file {value}, which --tls-{name.replace('_', '-')} should be")
    try:
        context = security.get_connection_args("client")["ssl_context"]
    except OSError as error:
        raise InvalidParameter(f"what was given for {address} is no certificate with its key: {error}") from error
    if context is None:
        raise SourceUnreachable(f"{address} asks every client for a certificate: give {_CERTIFICATES}")
    return security


def _on_loopback(address: str) -> bool:
    """Whether an address leads nowhere but to this machine."""
    try:
        host, _ = get_address_host_port(address)
        return all(ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, None))
    except (OSError, ValueError):
        return False


def _complain(address: str, require_tls: bool) -> None:
    danger = (
        f"{address} is not encrypted: whoever listens on the way reads rows and scores, and whoever reaches its port "
        f"runs code on the workers. Start the cluster with certificates and use tls:// with {_CERTIFICATES}; or "
        "bind it to the loopback interface, and come through a tunnel."
    )
    if require_tls:
        raise InvalidParameter(f"{danger} Refused, as --require-tls asks.")
    log.warning("%s --require-tls makes this an error.", danger)


def _check_size(workers: int | None, memory_limit: str | int | None) -> None:
    if workers is not None and workers < 1:
        raise InvalidParameter(f"a cluster needs at least one worker, not {workers}")
    if memory_limit is not None:
        memory_bytes(memory_limit)


@contextmanager
def _embedded(workers: int | None, memory_limit: str | int | None) -> Iterator[Client]:
    with local_cluster(workers, memory_limit) as cluster, Client(cluster) as client:
        yield client


@contextmanager
def _running(address: str, security: Security | None, worker_seconds: float) -> Iterator[Client]:
    client = _open(address, security)
    with client, client.as_current():
        _await_worker(client, address, worker_seconds)
        yield client


def _open(address: str, security: Security | None) -> Client:
    advice = "check the address, and that this machine can reach it, or leave it out to compute on this machine"
    try:
        # Not the default: one that fails to connect would stay it.
        return Client(address, security=security, timeout=CONNECT_SECONDS, set_as_default=False)
    except CommClosedError as error:
        raise SourceUnreachable(
            f"the scheduler at {address} closes the connection ({error}): {_doubt(security)}"
        ) from error
    except (OSError, ValueError) as error:
        raise SourceUnreachable(f"no Dask scheduler answers at {address} ({error}): {advice}") from error
    except Exception as error:
        # Another service, such as the dashboard, sends bytes that cannot be read as Dask's protocol.
        raise SourceUnreachable(f"what answers at {address} is no Dask scheduler: {advice}") from error


def _doubt(security: Security | None) -> str:
    """What is likely amiss if a connection is closed as soon as it is made."""
    if security is None:
        return "if it was started with certificates, use tls:// instead of tcp://"
    return f"one authority has to have signed its certificate and yours; look at {_CERTIFICATES}"


def _await_worker(client: Client, address: str, seconds: float) -> None:
    try:
        client.wait_for_workers(1, timeout=seconds)
    except TimeoutError as error:
        raise SourceUnreachable(
            f"the scheduler at {address} has had no worker for {seconds:g} seconds: start one with "
            f"'dask worker {address}', or look why its workers do not come up"
        ) from error


def memory_bytes(size: str | int) -> int:
    """An amount of memory such as ``"2GiB"``."""
    try:
        count = int(parse_bytes(size))
    except ValueError as error:
        raise InvalidParameter(f"{size!r} is not an amount of memory; one looks like 2GiB") from error
    if count < 1:
        raise InvalidParameter(f"a worker cannot live with {size} of memory")
    return count


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
