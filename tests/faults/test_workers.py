"""Real jobs on real clusters whose workers and schedulers are killed, stopped, cut off and exchanged.

Rows 1-5, 24, 25 and 27 of the fault matrix. REF is what a job gives that nothing disturbs, computed by threads of this
process.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import command_line_cluster
from distributed import Client, LocalCluster
from distributed.diagnostics.plugin import SchedulerPlugin
from kernels_of_doom import gaussian
from strategies import as_zarr

import daskrr
from daskrr.apps.clusters import local_cluster
from daskrr.jobs import reader, verification
from daskrr.kernels import Function
from daskrr.runtime.executors import ClusterExecutor
from daskrr.runtime.scheduler import algebra
from daskrr.runtime.tree import cut

GENEROUS = 180
HERE = Path(__file__).parent
NAMES = ("estimate", "lower", "residual", "scores", "upper")
N_ROWS, BLOCK = 200_000, 4096
# For two workers: one of sixteen blocks, six of four, and nine of one.
SPANS = cut(N_ROWS, BLOCK, n_threads=2, most_blocks=16)
N_TASKS, LARGEST = len(SPANS), SPANS[0].n_rows
# A row in the middle of the data, whose first feature no other has, and the rows of its task.
MARKED, MARK, MARKED_ROWS = 140_000, 2.5, "rows 131072–147455"
EXTERNAL = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "15s", "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "15s"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """Rows of which one is marked."""
    X = np.random.default_rng(0).standard_normal((N_ROWS, 4))
    X[MARKED, 0] = MARK
    path = tmp_path_factory.mktemp("points") / "points.zarr"
    as_zarr(X, (BLOCK, 4), str(path))
    return path


@pytest.fixture(scope="module")
def reference(points, tmp_path_factory):
    output = tmp_path_factory.mktemp("reference") / "scores.zarr"
    kernel = Function(gaussian)
    options = {"certify": True, "sampling": "uniform", "random_state": 0, "block_rows": BLOCK, "progress": False}
    daskrr.score_to_zarr(points, output, kernel, 1e-2, 100, **options)
    return contents(output)


def contents(output):
    return {name: zarr.open_array(output / name, mode="r")[...].tobytes() for name in NAMES}


def spec(**parameters):
    return json.dumps({"kernel": "function", "function": "kernels_of_doom:gaussian", "parameters": parameters})


class Job:
    """The command ``daskrr score`` as a process of its own."""

    def __init__(self, points, output, scheduler, parameters, settings):
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "daskrr.apps.cli", "score", str(points), str(output), "--json"]
        command += ["--kernel-spec", spec(**parameters), "--allow-function", "kernels_of_doom:gaussian", "--certify"]
        command += ["--ridge", "1e-2", "--landmarks", "100", "--sampling", "uniform", "--seed", "0"]
        command += ["--block-rows", str(BLOCK), "--cluster", scheduler]
        self.log = Path(f"{output}.log")
        with self.log.open("w") as log:
            environment = os.environ | {"PYTHONPATH": path} | settings
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment)

    @property
    def complaints(self):
        return self.log.read_text()

    @property
    def runs(self):
        return self.process.poll() is None

    def ended(self, code=0, seconds=GENEROUS):
        assert self.process.wait(seconds) == code, self.complaints
        return self.complaints


@contextlib.contextmanager
def job(points, output, scheduler, settings=None, **parameters):
    """The job of an output; it is killed at the end, whatever it does."""
    started = Job(points, output, scheduler, parameters, settings or {})
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def finished(points, output, scheduler, **parameters):
    """The same line again, to its end; what it published."""
    with job(points, output, scheduler, **parameters) as again:
        again.ended()
    assert verification.verify(output) == []
    return contents(output)


def wait_for(condition, running=None):
    deadline = time.monotonic() + GENEROUS
    while not condition():
        assert running is None or running.runs, running.complaints
        assert time.monotonic() < deadline
        time.sleep(0.005)


def scored(output):
    return len(list(output.glob(".daskrr/records/*/receipts/*")))


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


class Counter(SchedulerPlugin):
    """How often each task was brought to its end, and how many workers left."""

    name = "counter"

    def __init__(self):
        self.ends, self.left = {}, 0

    def transition(self, key, start, finish, *args, **kwargs):
        if start == "processing" and finish == "memory":
            self.ends[key] = self.ends.get(key, 0) + 1

    def remove_worker(self, scheduler, worker, **kwargs):
        self.left += 1

    def of(self, name):
        return {key: times for key, times in list(self.ends.items()) if re.match(rf"{name}-[0-9a-f]{{32}}", str(key))}

    @property
    def done(self):
        return sum(list(self.ends.values()))

    def again(self, name):
        """How many blocks ended more than once."""
        return sum(self.of(name).values()) - len(self.of(name))


@contextlib.contextmanager
def counted_cluster(workers=2):
    """A cluster of this process, as the command starts it; its client and what it did."""
    with local_cluster(workers) as cluster, Client(cluster, set_as_default=False) as client:
        counter = Counter()
        cluster.scheduler.add_plugin(counter)
        yield cluster, client, counter


def worker_pids(client):
    return sorted(client.run(os.getpid).values())


# Pass 2 asks about every row twice: for the landmarks and for the probe of the estimate.
@pytest.mark.parametrize(("tasks", "times"), [("gram", 1), ("score-rows", 2)])
def test_worker__that_is_killed_costs_no_more_than_the_task_it_was_at(tasks, times, points, reference, tmp_path):
    logs = [tmp_path / "undisturbed.log", tmp_path / "disturbed.log"]
    with counted_cluster() as (cluster, client, counter):
        assert finished(points, tmp_path / "first.zarr", cluster.scheduler_address, log=str(logs[0])) == reference
        assert len(counter.of("gram")) == len(counter.of("score-rows")) == N_TASKS
        victim = worker_pids(client)[0]
        with job(points, tmp_path / "out.zarr", cluster.scheduler_address, log=str(logs[1])) as running:
            wait_for(lambda: len(counter.of(tasks)) >= N_TASKS + 5, running)
            os.kill(victim, signal.SIGKILL)
            complaints = running.ended()
    assert is_gone(victim)
    assert complaints.count("was lost") == 1, complaints
    assert counter.left >= 1
    assert contents(tmp_path / "out.zarr") == reference
    undisturbed, disturbed = (sum(map(int, log.read_text().split())) for log in logs)
    # What it had ended may have been read from storage again, and no row was looked at for that.
    assert 0 <= disturbed - undisturbed <= times * LARGEST


def die(folder, times):
    """Kill this process, but no more than so many times."""
    before = len(list(folder.iterdir()))
    if before < times:
        (folder / str(before)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return before


def found(kept, inputs):
    return None, inputs


def test_algebra__tries_inputs_alone_that_two_workers_died_of(tmp_path):
    with counted_cluster() as (_, client, counter), client.as_current():
        executor = ClusterExecutor(client, "deadly")
        place = algebra(executor, "deadly", scheduler_bytes=0)
        assert place.place == "scheduler"
        assert place.perform(found, executor.apply("deadly", partial(die, tmp_path, 2))) == 2
        assert counter.left == 2


def test_undisturbed__nothing_is_done_twice(points, reference, tmp_path):
    with counted_cluster() as (cluster, _, counter):
        assert finished(points, tmp_path / "out.zarr", cluster.scheduler_address) == reference
        assert counter.left == counter.again("gram") == counter.again("score-rows") == 0


def test_random_kills__for_half_a_minute_change_no_bit(points, reference, tmp_path):
    chance, kills, number, struck = random.Random(0), 0, 0, defaultdict(int)
    with counted_cluster() as (cluster, _, counter):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline or kills < 5:
            number += 1
            output = tmp_path / f"{number}.zarr"
            with job(points, output, cluster.scheduler_address, seconds=0.1) as running:
                while running.runs and (time.monotonic() < deadline or kills < 5):
                    before = counter.done
                    kills += kill_one(cluster, chance, struck)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        running.process.wait(chance.uniform(1, 4))
                    wait_for(lambda before=before: counter.done > before + 2 or not running.runs)
                running.ended()
            assert contents(output) == reference
    assert counter.left >= kills >= 5


def kill_one(cluster, chance, struck):
    """Kill a worker that the scheduler knows, if there is one whose tasks were not struck twice; how many were killed.

    A task that is under way at every kill would be blamed for them, and rightly so.
    """
    at_work = {address: {task.key for task in one.processing} for address, one in cluster.scheduler.workers.items()}
    spared = {address for address, keys in at_work.items() if any(struck[key] > 1 for key in keys)}
    victims = [one for one in cluster.workers.values() if one.worker_address in at_work.keys() - spared]
    if not victims:
        return 0
    victim = chance.choice(victims)
    for key in at_work[victim.worker_address]:
        struck[key] += 1
    os.kill(victim.process.pid, signal.SIGKILL)
    return 1


@pytest.mark.parametrize("moment", ["pass 1", "pass 2"])
def test_poison_block__is_named_and_everything_else_kept(moment, points, reference, tmp_path):
    flag, output = tmp_path / "flag", tmp_path / "out.zarr"
    parameters = {"deadly": MARK, "flag": str(flag)}
    began = time.monotonic()
    with counted_cluster() as (cluster, _, counter):
        # Thirty seconds, unless other programs keep workers from starting as fast as they could.
        limit = max(30.0, 6 * (time.monotonic() - began))
        if moment == "pass 1":
            flag.touch()
        with job(points, output, cluster.scheduler_address, **parameters) as running:
            if moment == "pass 2":
                wait_for(lambda: scored(output) > 0, running)
                flag.touch()
            wait_for(lambda: counter.left, running)
            complaints = running.ended(3, seconds=limit)
        assert MARKED_ROWS in complaints
        assert complaints.count("rows ") == 1
        assert counter.left >= 4
        (status,) = reader.status(output)["unfinished"]
        assert status["summed"]["fit-0"] == (N_TASKS - 1 if moment == "pass 1" else N_TASKS)
        assert status["scored"] == (0 if moment == "pass 1" else N_TASKS - 1)
        flag.unlink()
        assert finished(points, output, cluster.scheduler_address, **parameters) == reference


def test_block__that_hangs_is_run_elsewhere(points, reference, tmp_path):
    flag, output = tmp_path / "flag", tmp_path / "out.zarr"
    flag.touch()
    with counted_cluster() as (cluster, _, counter):
        settings = {"DASK_DASKRR__STUCK_AFTER": "5s"}
        with job(points, output, cluster.scheduler_address, settings, hanging=MARK, flag=str(flag)) as running:
            wait_for(lambda: "did not end within" in running.complaints, running)
            flag.unlink()
            complaints = running.ended()
    assert MARKED_ROWS in complaints
    assert "is restarted" in complaints
    assert counter.left >= 1
    assert contents(output) == reference


def test_block__that_hangs_twice_is_named_and_everything_else_kept(points, reference, tmp_path):
    flag, output = tmp_path / "flag", tmp_path / "out.zarr"
    flag.touch()
    parameters = {"hanging": MARK, "flag": str(flag)}
    with counted_cluster() as (cluster, _, counter):
        settings = {"DASK_DASKRR__STUCK_AFTER": "5s"}
        with job(points, output, cluster.scheduler_address, settings, **parameters) as running:
            # It has as long as twenty other tasks, twice.
            complaints = running.ended(3, seconds=2 * GENEROUS)
        assert f"the block of {MARKED_ROWS} twice did not end" in complaints
        assert counter.left >= 2
        assert reader.status(output)["unfinished"][0]["summed"]["fit-0"] == N_TASKS - 1
        flag.unlink()
        assert finished(points, output, cluster.scheduler_address, **parameters) == reference


def test_cluster__without_workers_ends_the_job_which_goes_on_later(points, reference, tmp_path):
    output = tmp_path / "out.zarr"
    with counted_cluster() as (cluster, client, counter):
        settings = {"DASK_DASKRR__NO_WORKERS_AFTER": "3s"}
        with job(points, output, cluster.scheduler_address, settings) as running:
            wait_for(lambda: scored(output) > 3, running)
            cluster.scale(0)
            complaints = running.ended(3)
        assert "no workers for 3 seconds" in complaints
        assert "same line" in complaints
        cluster.scale(2)
        client.wait_for_workers(2, timeout=GENEROUS)
        assert finished(points, output, cluster.scheduler_address) == reference
        assert counter.left >= 2


def folder(parent, name):
    made = parent / name
    made.mkdir()
    return made


@pytest.mark.parametrize("moment", ["pass 1", "pass 2"])
def test_scheduler__that_is_killed_ends_the_job_which_goes_on_elsewhere(moment, points, reference, tmp_path):
    output = tmp_path / "out.zarr"
    path = os.pathsep.join([str(HERE), str(HERE.parent / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with command_line_cluster(folder(tmp_path, "first"), environment={"PYTHONPATH": path}) as client:
        victim, address = client.run_on_scheduler(os.getpid), client.scheduler.address
        with job(points, output, address, seconds=0.05) as running:
            reached = {
                "pass 1": lambda: list(output.glob(".daskrr/records/*/fit-0/*/*")),
                "pass 2": lambda: scored(output),
            }
            wait_for(reached[moment], running)
            client.close()
            os.kill(victim, signal.SIGKILL)
            complaints = running.ended(3, seconds=60)
    assert is_gone(victim)
    assert "scheduler" in complaints
    assert "the same line" in complaints
    assert not (output / "zarr.json").exists()
    with command_line_cluster(folder(tmp_path, "second"), environment={"PYTHONPATH": path}) as client:
        assert finished(points, output, client.scheduler.address, seconds=0.05) == reference


def test_worker__that_is_stopped_for_a_minute_changes_no_bit(points, reference, tmp_path):
    with counted_cluster() as (cluster, client, _):
        victim = worker_pids(client)[0]
        with job(points, tmp_path / "out.zarr", cluster.scheduler_address) as running:
            wait_for(lambda: scored(tmp_path / "out.zarr") > 3, running)
            os.kill(victim, signal.SIGSTOP)
            try:
                time.sleep(60)
                assert running.runs
            finally:
                os.kill(victim, signal.SIGCONT)
            running.ended()
    assert contents(tmp_path / "out.zarr") == reference


def test_workers__that_come_and_go_change_no_bit(points, reference, tmp_path):
    output = tmp_path / "out.zarr"
    with (
        counted_cluster(1) as (cluster, client, counter),
        job(points, output, cluster.scheduler_address, seconds=0.05) as running,
    ):
        wait_for(lambda: len(counter.of("gram")) > 5, running)
        cluster.scale(2)
        client.wait_for_workers(2, timeout=GENEROUS)
        wait_for(lambda: scored(output) > 3, running)
        cluster.scale(1)
        wait_for(lambda: counter.left, running)
        running.ended()
    assert contents(output) == reference


def test_workers__from_one_to_sixteen_and_back_in_both_passes_change_no_bit(points, reference, tmp_path):
    output, counts = tmp_path / "out.zarr", []
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}

    def scale(event):
        workers = {2: 16, 6: 1}.get(event.done)
        if event.stage.startswith("pass") and workers:
            cluster.scale(workers)
            wait_for(lambda: len(client.nthreads()) == workers)
            counts.append((event.stage, workers))

    with LocalCluster(**options) as cluster, Client(cluster) as client:
        kernel = Function(gaussian, parameters={"seconds": 0.02})
        daskrr.score_to_zarr(
            points, output, kernel, 1e-2, 100, certify=True, sampling="uniform", random_state=0, block_rows=BLOCK,
            progress=scale,
        )  # fmt: skip
    assert counts == [(stage, workers) for stage in ("pass 1: gram", "pass 2: scores") for workers in (16, 1)]
    assert contents(output) == reference


def test_threads__of_workers_change_no_bit(points, reference, tmp_path):
    options = {"n_workers": 1, "threads_per_worker": 3, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**options) as cluster:
        assert finished(points, tmp_path / "out.zarr", cluster.scheduler_address) == reference


def can_make_networks():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"daskrr-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


@contextlib.contextmanager
def other_host():
    """A network namespace joined to ours by a cable: its name, its address, ours, and our end of the cable."""
    name, cable = f"daskrr-{os.getpid()}", f"dk{os.getpid() % 100_000}"
    prefix = f"10.213.{os.getpid() % 250}"
    commands = [
        f"ip netns add {name}",
        f"ip link add {cable} type veth peer name {cable}x netns {name}",
        f"ip addr add {prefix}.1/24 dev {cable}",
        f"ip link set {cable} up",
        f"ip -n {name} addr add {prefix}.2/24 dev {cable}x",
        f"ip -n {name} link set {cable}x up",
        f"ip -n {name} link set lo up",
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
        yield name, f"{prefix}.2", f"{prefix}.1", cable
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", cable], check=False, capture_output=True)


@contextlib.contextmanager
def process(command, environment, log):
    with log.open("w") as file:
        started = subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=log.parent)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


@pytest.mark.skipif(not can_make_networks(), reason="network namespaces need root and 'ip netns'")
def test_worker__whose_network_is_cut_changes_no_bit(points, reference, tmp_path):
    output, file = tmp_path / "out.zarr", tmp_path / "scheduler.json"
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | EXTERNAL | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    dask_command = [sys.executable, "-m", "dask"]
    with other_host() as (name, theirs, ours, cable), contextlib.ExitStack() as stack:
        options = ["--no-dashboard", "--port", "0", "--scheduler-file", str(file)]
        scheduler = [*dask_command, "scheduler", "--host", ours, *options]
        stack.enter_context(process(scheduler, environment, tmp_path / "scheduler.log"))
        worker = [
            *dask_command,
            "worker",
            "--scheduler-file",
            str(file),
            "--nthreads",
            "1",
            "--no-dashboard",
            "--no-nanny",
        ]
        stack.enter_context(process([*worker, "--host", ours], environment, tmp_path / "near.log"))
        far = ["ip", "netns", "exec", name, *worker, "--host", theirs]
        stack.enter_context(process(far, environment, tmp_path / "far.log"))
        client = stack.enter_context(Client(scheduler_file=str(file), timeout=GENEROUS, set_as_default=False))
        client.wait_for_workers(2, timeout=GENEROUS)
        assert any(theirs in address for address in client.nthreads())
        with job(points, output, client.scheduler.address, EXTERNAL, seconds=0.05) as running:
            wait_for(lambda: scored(output) > 3, running)
            subprocess.run(["ip", "link", "set", cable, "down"], check=True)
            running.ended()
            assert not any(theirs in address for address in client.nthreads())
    assert contents(output) == reference
