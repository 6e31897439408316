"""A SLURM of one machine, started by a test with all its files in one folder, and stopped at the end."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from conftest import GENEROUS, stop

MISSING = [name for name in ("slurmctld", "slurmd", "munged", "mungekey", "sbatch", "srun") if not shutil.which(name)]
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=2,batch_sched_delay=1
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmctldTimeout=30
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} State=UNKNOWN
PartitionName=debug Nodes={host} Default=YES MaxTime=60 State=UP OverSubscribe=FORCE:8
"""


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start SLURM; gives the variables by which its commands find it."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    file, socket_ = folder / "slurm.conf", folder / "munge.socket"
    file.write_text(CONFIGURATION.format(folder=folder, **_machine()))
    with contextlib.ExitStack() as stack:
        _munge(folder, socket_, stack)
        for command in (["slurmctld", "-D", "-f", str(file)], ["slurmd", "-D", "-f", str(file)]):
            stack.enter_context(_daemon(command, folder))
        environment = {"SLURM_CONF": str(file)}
        state = ["sinfo", "--noheader", "--format=%T"]
        until(lambda: output(state, environment) in ("idle", "mixed"), "the node does not become idle", folder)
        stack.callback(_empty, environment)
        yield environment


def _machine() -> dict[str, Any]:
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        ports = {"controller": one.getsockname()[1], "daemon": other.getsockname()[1]}
    memory = int(psutil.virtual_memory().total * 0.8 / 2**20)
    return ports | {"host": socket.gethostname().partition(".")[0], "cpus": os.cpu_count(), "memory": memory}


def _munge(folder: Path, socket_: Path, stack: contextlib.ExitStack) -> None:
    key = folder / "munge.key"
    subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True)
    paths = {
        "socket": socket_,
        "key-file": key,
        "pid-file": "munged.pid",
        "log-file": "munged.log",
        "seed-file": "seed",
    }
    options = [f"--{name}={folder / path}" for name, path in paths.items()]
    stack.enter_context(_daemon(["munged", "--foreground", "--force", *options], folder))
    until(socket_.exists, "munged does not start", folder)


@contextlib.contextmanager
def _daemon(command: list[str], folder: Path) -> Iterator[None]:
    with (folder / f"{command[0]}.out").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            yield
        finally:
            stop(process)


def _empty(environment: dict[str, str]) -> None:
    """End all batch jobs that a test may have left."""
    everything = ["scancel", "--full", "--signal=KILL", "--user=root"]
    subprocess.run(everything, env=os.environ | environment, check=False, capture_output=True)
    subprocess.run(everything[:1] + everything[3:], env=os.environ | environment, check=False, capture_output=True)
    with contextlib.suppress(AssertionError):
        until(lambda: not queue(environment), "batch jobs do not end")


def queue(environment: dict[str, str]) -> list[str]:
    """Names of the batch jobs that wait or run."""
    return output(["squeue", "--noheader", "--format=%j"], environment).split()


def exit_codes(number: str, environment: dict[str, str]) -> list[str]:
    """The exit codes of a batch job that has ended, or of all in an array; none before."""
    found = output(["scontrol", "--oneliner", "show", "job", number], environment)
    facts = [dict(word.partition("=")[::2] for word in line.split()) for line in found.splitlines()]
    ended = all(one["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT") for one in facts)
    return [one["ExitCode"].partition(":")[0] for one in facts] if ended else []


def output(command: list[str], environment: dict[str, str]) -> str:
    """What a command prints."""
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def until(happened: Callable[[], Any], otherwise: str, folder: Path | None = None) -> Any:
    """What ``happened`` returns when it is true at last."""
    deadline = time.monotonic() + GENEROUS
    while not (found := happened()):
        logs = "" if folder is None else "".join(f"\n{one}:\n{one.read_text()}" for one in folder.glob("*.log"))
        assert time.monotonic() < deadline, otherwise + logs
        time.sleep(0.1)
    return found
