"""Clusters that something else runs for us, SLURM, a Dask Gateway or Kubernetes: what can be set, and their start.

Settings come from a job file and from ``daskrr.yaml``, and are looked at before anything is started.
"""

import difflib
import inspect
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any

import dask
from dask.utils import parse_timedelta
from distributed import Client, Security
from distributed.comm.addressing import get_address_host_port

from daskrr import config
from daskrr.apps.interrupts import held_interrupts
from daskrr.errors import InvalidParameter, SourceUnreachable, check_count, install


@dataclass(frozen=True)
class Kind:
    """What starts clusters of a kind: a class of an optional package; and where to look if workers stay away."""

    module: str
    name: str
    extra: str
    look: str
    cure: str


_SECURITY = "Leave out security = false, and certificates are made for the run."
KINDS = {
    "slurm": Kind(
        "dask_jobqueue", "SLURMCluster", "slurm",
        "look at 'squeue --me' and at the logs of the batch jobs", _SECURITY,
    ),
    "slurm-runner": Kind(
        "dask_jobqueue.slurm", "SLURMRunner", "slurm", "look at what srun printed above", _SECURITY
    ),
    "gateway": Kind(
        "dask_gateway", "GatewayCluster", "gateway", "look at the log of the gateway", "Use a gateway at https://."
    ),
    "kubernetes": Kind(
        "dask_kubernetes.operator", "KubeCluster", "kubernetes", "look at 'kubectl get pods'",
        "Let a NetworkPolicy close it to strangers, as in deploy/kubernetes.",
    ),
}  # fmt: skip
_NOT_TO_BE_SET = {"self", "loop", "asynchronous", "job_cls", "scheduler_cls", "scheduler", "n_workers"}


@dataclass(frozen=True)
class ClusterRequest:
    """A cluster to start: from ``minimum`` to ``maximum`` workers, the first of them within some seconds."""

    kind: str
    minimum: int
    maximum: int
    seconds: float
    settings: dict[str, Any]
    danger: str | None = None
    """What is not encrypted, if anything is not."""

    @property
    def cure(self) -> str:
        """What can be done about the danger."""
        return KINDS[self.kind].cure


def order(
    kind: str, workers: int | None = None, given: Mapping[str, Any] | None = None, security: Security | None = None
) -> ClusterRequest:
    """Put together what to start, of ``given`` settings and those of ``daskrr.yaml``.

    Raises
    ------
    InvalidParameter
        A setting does not exist or cannot be met.
    SourceUnreachable
        What starts such clusters is not installed.
    """
    given = named(given or {})
    settings = dask.config.merge(named(config.get(f"clusters.{kind}")), given)
    _refuse_unknown(kind, settings)
    low, high = _size(kind, workers, given, settings.pop("minimum", None), settings.pop("maximum", None))
    seconds = _seconds(kind, settings.pop("workers_within"))
    settings = {name: value for name, value in settings.items() if value is not None}
    danger = _PREPARE[kind](settings, security)
    return ClusterRequest(kind, low, high, seconds, settings, danger)


def named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by the names of Python, where a dash is an underscore."""
    return {name.replace("-", "_"): value for name, value in settings.items()}


def _place(kind: str) -> str:
    return f"[cluster.{kind}] of a job file, or daskrr.clusters.{kind} in the configuration of Dask"


def _refuse_unknown(kind: str, settings: Mapping[str, Any]) -> None:
    known = set(named(config.DEFAULTS["clusters"][kind]))
    known |= set() if kind == "slurm-runner" else _parameters(_load(kind))
    for name in sorted(set(settings) - known):
        close = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
        raise InvalidParameter(f"a {kind} cluster has no setting {name}; {advice}".replace("_", "-"))


def _parameters(cluster_class: type) -> set[str]:
    """All that a class and those it is made of can be told."""
    classes = [*cluster_class.__mro__, *getattr(cluster_class, "job_cls", object).__mro__]
    found = [one for each in classes for one in inspect.signature(each.__init__).parameters.values()]
    return {one.name for one in found if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)} - _NOT_TO_BE_SET


def _load(kind: str) -> Any:
    """The class that starts clusters of a kind."""
    wanted = KINDS[kind]
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        return getattr(import_module(wanted.module), wanted.name)
    except ImportError as error:
        raise SourceUnreachable(
            f"--cluster {kind} needs {wanted.module.partition('.')[0]} ({error}): {install(wanted.extra)}"
        ) from error
    finally:
        # dask_jobqueue takes the interrupt key for itself as soon as it is imported.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)


def _size(kind: str, workers: int | None, given: Mapping[str, Any], low: Any, high: Any) -> tuple[int, int]:
    """Between how many workers the cluster has; none that are told means as many as SLURM has tasks."""
    if workers is not None:
        if {"minimum", "maximum"} & set(given):
            raise InvalidParameter("workers fixes the size of a cluster: give it, or minimum and maximum, not both")
        low = high = workers
    elif kind == "slurm-runner":
        low = high = int(os.environ.get("SLURM_NTASKS", 1))
    elif low is None and high is None:
        raise InvalidParameter(
            f"how many workers shall a {kind} cluster have? Give --workers, or minimum and maximum in {_place(kind)}"
        )
    low = check_count("minimum", 1 if low is None else low)
    high = check_count("maximum", low if high is None else high)
    if low > high:
        raise InvalidParameter(f"a cluster cannot have at least {low} and at most {high} workers")
    return low, high


def _seconds(kind: str, text: Any) -> float:
    try:
        return float(parse_timedelta(text))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidParameter(f"workers-within is {text!r} in {_place(kind)}; a time looks like 10 minutes") from error


def _prepare_slurm(settings: dict[str, Any], security: Security | None) -> str | None:
    """Fill in what neither we nor the people who run the machine were told."""
    if shutil.which("sbatch") is None:
        raise SourceUnreachable("there is no command sbatch here: start daskrr on a machine from which jobs are sent")
    cores = settings.get("cores") or dask.config.get("jobqueue.slurm.cores") or 1
    for name, value in {"cores": cores, "processes": cores, "memory": f"{4 * check_count('cores', cores)}GiB"}.items():
        if name not in settings and dask.config.get(f"jobqueue.slurm.{name}") is None:
            settings[name] = value
    if dask.config.get("jobqueue.slurm.shared-temp-directory") is None:
        settings.setdefault("shared_temp_directory", os.getcwd())
    return _encrypt(settings, security)


def _prepare_runner(settings: dict[str, Any], security: Security | None) -> str | None:
    _load("slurm-runner")
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        raise InvalidParameter(
            "--cluster slurm-runner takes the tasks of the batch job that it runs in, and this is none: "
            "put the command into a script and give that to sbatch, or use --cluster slurm"
        )
    return _encrypt(settings, security)


def _encrypt(settings: dict[str, Any], security: Security | None) -> str | None:
    """Have certificates used that were given, or made for the occasion."""
    wanted = settings.pop("security", True)
    if security is None and not wanted:
        return "the connections between the batch jobs"
    if security is None and find_spec("cryptography") is None:
        raise SourceUnreachable(
            f"certificates for this run cannot be made without cryptography: {install('slurm')}, or give "
            "--tls-ca-file, --tls-cert and --tls-key"
        )
    settings["security"] = True if security is None else security
    return None


def _prepare_gateway(settings: dict[str, Any], security: Security | None) -> str | None:
    _refuse_certificates("gateway", security)
    address = settings.get("address") or dask.config.get("gateway.address", None)
    if address is None:
        raise InvalidParameter(f"where is the gateway? Give its address in {_place('gateway')}, or as gateway.address")
    settings |= settings.pop("cluster_options", {})
    plain = address.startswith("http://") and not on_loopback(address)
    return str(address) if plain else None


def on_loopback(address: str) -> bool:
    """Whether an address leads nowhere but to this machine."""
    try:
        host, _ = get_address_host_port(address.replace("http://", "tcp://"))
        return all(ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, None))
    except (OSError, ValueError):
        return False


def _prepare_kubernetes(settings: dict[str, Any], security: Security | None) -> str | None:
    _refuse_certificates("kubernetes", security)
    if "image" not in settings and "custom_cluster_spec" not in settings:
        raise InvalidParameter(f"which image has daskrr? Give it as image in {_place('kubernetes')}")
    return "the network between the pods"


def _refuse_certificates(kind: str, security: Security | None) -> None:
    if security is not None:
        raise InvalidParameter(f"a {kind} cluster takes no certificates; leave out --tls-cert and its companions")


_PREPARE = {
    "slurm": _prepare_slurm,
    "slurm-runner": _prepare_runner,
    "gateway": _prepare_gateway,
    "kubernetes": _prepare_kubernetes,
}


@contextmanager
def start(wanted: ClusterRequest) -> Iterator[Client]:
    """Start a cluster, give a client of it, and stop it at the end."""
    with _begin(wanted) as cluster, Client(cluster) as client:
        if wanted.kind == "slurm":
            _try_submission(cluster)
        # SLURM's jobs end with their time. Whatever adapts to the work, between equal bounds too, replaces them.
        if wanted.kind == "slurm" or wanted.minimum < wanted.maximum:
            cluster.adapt(minimum=wanted.minimum, maximum=wanted.maximum)
        else:
            cluster.scale(wanted.minimum)
        yield client


def _begin(wanted: ClusterRequest) -> Any:
    """A cluster without workers."""
    with held_interrupts() as came:
        cluster = _make(wanted)
        if came:
            cluster.close()
    return cluster


def _make(wanted: ClusterRequest) -> Any:
    try:
        return _load(wanted.kind)(**wanted.settings)
    except (TypeError, ValueError) as error:
        raise InvalidParameter(f"no {wanted.kind} cluster can be started with these settings: {error}") from error
    except Exception as error:
        raise SourceUnreachable(
            f"the {wanted.kind} cluster did not start ({type(error).__name__}: {error}): look at {_place(wanted.kind)}"
        ) from error


def _try_submission(cluster: Any) -> None:
    """Ask SLURM whether it would take the batch jobs, which Dask sends in the background and does not speak about."""
    answer = subprocess.run(
        ["sbatch", "--test-only"], input=cluster.job_script(), capture_output=True, text=True, check=False
    )
    if answer.returncode:
        found = answer.stderr.strip()
        if "contact slurm controller" in found:
            raise SourceUnreachable(f"SLURM does not answer: {found}")
        raise InvalidParameter(f"SLURM does not take such batch jobs: {found}. Look at {_place('slurm')}")
