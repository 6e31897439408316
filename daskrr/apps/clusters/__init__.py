"""Clusters to compute on: one started here for the occasion, or one that already runs elsewhere."""

import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import dask
from dask.system import CPU_COUNT
from dask.utils import parse_bytes
from distributed import Client, LocalCluster, Security
from distributed.comm.addressing import parse_address
from distributed.comm.core import CommClosedError
from distributed.system import MEMORY_LIMIT

from daskrr import config, machine
from daskrr.apps.clusters import managed, slurm_runner
from daskrr.apps.interrupts import deaf_children, held_interrupts
from daskrr.errors import InvalidParameter, SourceUnreachable
from daskrr.runtime.devices import CPU, TASKS_AT_ONCE, computes_on_gpu
from daskrr.runtime.workers import settle_in

log = logging.getLogger("daskrr")

CONNECT_SECONDS = 10.0
WORKER_SECONDS = 30.0
# Workers that are just being started have nothing to lose.
SECONDS_TO_STOP_STARTING = 2.0
_ENCRYPTED = ("tls", "wss")
_CERTIFICATES = "--tls-ca-file, --tls-cert and --tls-key, or distributed.comm.tls in the configuration of Dask"

_CURE = (
    f"Start the cluster with certificates and use tls:// with {_CERTIFICATES}; or bind it to the loopback interface, "
    "and come through a tunnel."
)


def local_cluster(
    workers: int | None = None, memory_limit: str | int | None = None, asynchronous: bool = False
) -> LocalCluster:
    """Start worker processes on this machine that nothing outside of it can reach.

    Parameters
    ----------
    workers
        Number of processes, by default one for each core this process may use, or for each GPU, if the device that is
        configured is one.
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
    workers = default_workers() if workers is None else workers
    with_gpus = computes_on_gpu()
    on_gpus = with_gpus and workers <= default_workers()
    settings = {
        # Dask looks at what every worker does a hundred times a second, which costs a few percent of its core, and
        # keeps what it saw in each second for an hour, so that the memory of a worker would grow as long.
        "distributed.worker.profile.interval": "200ms",
        "distributed.worker.profile.cycle": "10s",
        # To see whether its loop still answers, a worker wakes up fifty times a second: as much again, on a core whose
        # caches are full of something else.
        "distributed.admin.tick.interval": "500ms",
        # A task that Dask gives up after two workers is run again, alone, which tells more than two workers more.
        "distributed.scheduler.allowed-failures": 1,
        # Dask knows the like of other libraries.
        "distributed.nanny.pre-spawn-environ.VECLIB_MAXIMUM_THREADS": 1,
    }
    # Dask reads this while the cluster lives. It looks 15 s after a worker was lost, and takes one that has died again
    # and is being restarted at that moment for one that never came back: its nanny is closed, for good.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1 day"})
    configured = dask.config.set(settings)
    with nullcontext() if asynchronous else configured, held_interrupts(SECONDS_TO_STOP_STARTING) as came:
        with deaf_children():
            cluster = LocalCluster(
                n_workers=workers,
                threads_per_worker=TASKS_AT_ONCE if on_gpus else 1,
                processes=True,
                memory_limit=MEMORY_LIMIT // max(1, workers) if memory_limit is None else memory_bytes(memory_limit),
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                # Failures come back as exceptions; the log would only repeat them, each with its traceback.
                silence_logs=logging.CRITICAL,
                preload=[__name__],
                # Of more workers than GPUs, some would have one, and all would compute on processors and say so.
                env={"CUDA_VISIBLE_DEVICES": ""} if with_gpus and not on_gpus else {},
                scheduler_kwargs={"preload": ["daskrr.apps.dashboard"]},
                asynchronous=asynchronous,
            )
        if came:
            cluster.close()
    return cluster


def default_workers() -> int:
    """How many a local cluster has: one for each GPU that is computed on, or for each core."""
    return max(1, len(machine.visible_gpus())) if computes_on_gpu() else CPU_COUNT


def dask_setup(worker: Any) -> None:
    """Make a starting worker ready, and have it ignore the interrupt key; Dask calls this for preloaded modules.

    What tasks import is imported before any is assigned: one that waits for imports on a worker that dies is blamed for
    its death. The key reaches every process of the terminal. The one that started the workers answers it by stopping
    them, and they need not each print how they were interrupted.
    """
    if config.get("device") != CPU:
        machine.use_one_gpu(worker.name)
    import_module("daskrr.leverage")
    settle_in(worker)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def connect(
    cluster: str | None = None,
    workers: int | None = None,
    memory_limit: str | int | None = None,
    tls_ca_file: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    require_tls: bool = False,
    settings: Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    worker_seconds: float = WORKER_SECONDS,
    echo: Callable[[str], None] | None = None,
) -> Iterator[Client]:
    """Give a client of a cluster that has workers, and leave nothing behind.

    Parameters
    ----------
    cluster
        Address of a running scheduler, such as ``"tls://10.0.0.1:8786"``, or what to start, and to stop at the end:
        ``"slurm"``, ``"slurm-runner"``, ``"gateway"``, ``"kubernetes"``, or, by default, ``"local"``.
    workers
        How many to start.
    memory_limit
        Memory of each worker of a local cluster, as in :func:`local_cluster`.
    tls_ca_file, tls_cert, tls_key
        Files in PEM format for a scheduler at ``tls://`` or for a cluster on SLURM: the authority that signed its
        certificate, and a certificate of this client with its key; by default what the configuration of Dask names.
    require_tls
        Refuse a cluster that others could listen to, instead of warning.
    settings
        What else the cluster to start takes; ``daskrr.yaml`` lists it and has the defaults.
    device
        What workers compute on, ``"auto"``, ``"cpu"`` or ``"cuda"``, as long as the client is there; by default what
        the configuration of Dask has as ``daskrr.device``.
    worker_seconds
        How long to wait for the first worker of a running scheduler.
    echo
        Takes the line that tells where the dashboard is; standard error by default.

    Raises
    ------
    SourceUnreachable
        No scheduler answers at the address, or it has no workers, or the certificates do not fit, or what starts such
        clusters is not here.
    InvalidParameter
        The arguments contradict each other, or what starts the cluster does not take its settings.
    """
    client_of = check(
        cluster, workers, memory_limit, tls_ca_file, tls_cert, tls_key, require_tls, settings,
        device=device, worker_seconds=worker_seconds,
    )  # fmt: skip
    with client_of as client:
        if client.dashboard_link:
            (echo or _to_stderr)(f"dashboard: {client.dashboard_link}")
        yield client


def check(
    cluster: str | None = None,
    workers: int | None = None,
    memory_limit: str | int | None = None,
    tls_ca_file: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    require_tls: bool = False,
    settings: Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    worker_seconds: float = WORKER_SECONDS,
) -> AbstractContextManager[Client]:
    """Look what is wrong with the arguments of :func:`connect`; what gives its client starts when it is entered."""
    named = {"ca_file": tls_ca_file, "cert": tls_cert, "key": tls_key}
    files = {name: path for name, path in named.items() if path is not None}
    if is_local(cluster):
        return _computing_on(device, _embedded(*_size(workers, memory_limit, settings or {}, files)))
    if memory_limit is not None:
        raise InvalidParameter("memory_limit is for workers on this machine; others have theirs where they are set up")
    if cluster in managed.KINDS:
        return _computing_on(device, _started(_ordered(str(cluster), workers, settings or {}, files, require_tls)))
    address = str(cluster)
    if workers is not None:
        raise InvalidParameter("workers describes a cluster to start, not one that runs already")
    return _computing_on(device, _running(address, _security_of(address, files, require_tls), worker_seconds))


@contextmanager
def _computing_on(device: str | None, client_of: AbstractContextManager[Client]) -> Iterator[Client]:
    with configured(device), client_of as client:
        yield client


def configured(device: str | None) -> AbstractContextManager[Any]:
    """Have runs compute on a device, unless it is None, for a while."""
    return nullcontext() if device is None else dask.config.set({"daskrr.device": device})


def is_local(cluster: str | None) -> bool:
    """Whether the workers would be started on this machine."""
    return cluster in (None, "local")


def _size(
    workers: int | None, memory_limit: str | int | None, settings: Mapping[str, Any], files: Mapping[str, str]
) -> tuple[int | None, str | int | None]:
    """Number and memory of workers on this machine."""
    if files:
        raise InvalidParameter("certificates are for a scheduler that runs already; name it with --cluster")
    size = managed.named(config.get("clusters.local")) | managed.named(settings)
    if set(size) != {"workers", "memory_limit"}:
        raise InvalidParameter(f"a local cluster has the settings workers and memory-limit, not {', '.join(settings)}")
    workers = size["workers"] if workers is None else workers
    memory_limit = size["memory_limit"] if memory_limit is None else memory_limit
    _check_size(workers, memory_limit)
    return workers, memory_limit


def _ordered(
    kind: str, workers: int | None, settings: Mapping[str, Any], files: Mapping[str, str], require_tls: bool
) -> managed.ClusterRequest:
    """A cluster for others to start."""
    wanted = managed.order(kind, workers, settings, _security(kind, files, "scheduler", "worker") if files else None)
    if wanted.danger is not None:
        _complain(wanted.danger, require_tls, wanted.cure)
    return wanted


def _security_of(address: str, files: Mapping[str, str], require_tls: bool) -> Security | None:
    """What TLS needs to reach a running scheduler, if it is used."""
    scheme, _ = parse_address(address)
    if scheme in _ENCRYPTED:
        return _security(address, files)
    if files:
        raise InvalidParameter(f"certificates are for a scheduler at tls://, and {address} is not encrypted")
    if scheme != "inproc" and not managed.on_loopback(address):
        _complain(address, require_tls)
    return None


def _security(address: str, files: Mapping[str, str], *more_roles: str) -> Security:
    """Certificates from files, or else from the configuration of Dask, for a client and maybe more."""
    own = {name: path for name, path in files.items() if name != "ca_file"}
    given = {f"tls_{role}_{name}": path for role in ("client", *more_roles) for name, path in own.items()}
    given |= {"tls_ca_file": files["ca_file"]} if "ca_file" in files else {}
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


def _complain(address: str, require_tls: bool, cure: str = _CURE) -> None:
    danger = (
        f"{address} is not encrypted: whoever listens on the way reads rows and scores, and whoever reaches its port "
        f"runs code on the workers. {cure}"
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
def _started(wanted: managed.ClusterRequest) -> Iterator[Client]:
    start = slurm_runner.start if wanted.kind == "slurm-runner" else managed.start
    patience = max(wanted.seconds, config.seconds("no-workers-after"))
    with dask.config.set({"daskrr.no-workers-after": patience}), start(wanted) as client:
        log.info("%s: waiting for the first of %s", wanted.kind, _count(wanted))
        _await_worker(client, f"of the {wanted.kind} cluster", managed.KINDS[wanted.kind].look, wanted.seconds)
        yield client


def _count(wanted: managed.ClusterRequest) -> str:
    size = f"{wanted.minimum}" if wanted.minimum == wanted.maximum else f"{wanted.minimum} to {wanted.maximum}"
    return f"{size} worker{'' if wanted.maximum == 1 else 's'}"


@contextmanager
def _running(address: str, security: Security | None, worker_seconds: float) -> Iterator[Client]:
    client = _open(address, security)
    with client, client.as_current():
        cure = f"start one with 'dask worker {address}', or look why its workers do not come up"
        _await_worker(client, f"at {address}", cure, worker_seconds)
        yield client


class _ClosedIfRefused(Client):
    """A client that ends for certain if it does not connect.

    Dask leaves that to the garbage collector, which may come while another loop starts, and wait for it for ever.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        try:
            super().__init__(*arguments, **settings)
        except BaseException:
            with suppress(OSError):  # it took too long
                self.close()
            raise


def _open(address: str, security: Security | None) -> Client:
    advice = "check the address, and that this machine can reach it, or leave it out to compute on this machine"
    try:
        # Not the default: one that fails to connect would stay it.
        return _ClosedIfRefused(address, security=security, timeout=CONNECT_SECONDS, set_as_default=False)
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


def _await_worker(client: Client, which: str, cure: str, seconds: float) -> None:
    try:
        client.wait_for_workers(1, timeout=seconds)
    except TimeoutError as error:
        raise SourceUnreachable(f"the scheduler {which} has had no worker for {seconds:g} seconds: {cure}") from error


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
