"""Job files: what they may say, what they do each night, and how they go on after failures that may pass."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from concurrent.futures import CancelledError
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import KilledWorker
from distributed.comm.core import CommClosedError

import daskrr
from daskrr import errors, kernels
from daskrr.apps import clusters
from daskrr.apps.cli import jobfile, main, runs
from daskrr.apps.cli.options import GROUPS
from daskrr.nystrom.sampling import Leverage

GENEROUS = 120
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(daskrr.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
JOB = """
input = "points.zarr"
output = "scores.zarr"

[kernel]
kernel = "gaussian"
length-scale = 2

[scores]
ridge = 1e-3
landmarks = 40
certify = true
seed = 0
"""
ARRAYS = ("scores", "lower", "upper", "estimate", "residual")


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def write_points(path, n=500, seed=0):
    rows = np.random.default_rng(seed).standard_normal((n, 3))
    zarr.create_array(path, shape=rows.shape, chunks=(100, 3), dtype=rows.dtype)[:] = rows


def append_points(path, n, seed=1):
    array = zarr.open_array(path, mode="r+")
    array.append(np.random.default_rng(seed).standard_normal((n, 3)))


def score(folder, output="scores.zarr", **options):
    given = {"certify": True, "random_state": 0, "progress": False} | options
    return daskrr.score_to_zarr(folder / "points.zarr", folder / output, kernels.Gaussian(2.0), 1e-3, 40, **given)


def contents(output):
    return {name: zarr.open_array(output / name, mode="r")[...].tobytes() for name in ARRAYS}


@pytest.fixture
def folder(tmp_path):
    """A folder with points and the file of a job, which is not the one that the test runs in."""
    write_points(tmp_path / "points.zarr")
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


@pytest.fixture
def in_process(monkeypatch):
    """Compute in this process, where a job would start a cluster."""
    monkeypatch.setattr(clusters, "connect", lambda **_options: nullcontext())


@pytest.fixture
def no_cluster(monkeypatch):
    monkeypatch.setattr(clusters, "connect", lambda **_options: pytest.fail("a cluster was started"))


def run(folder, *options, text=None):
    if text is not None:
        (folder / "job.toml").write_text(text)
    return invoke("run", folder / "job.toml", *options)


class Stop(BaseException):
    """The job ends here."""


def stopped(folder, stage):
    """Score until a stage begins."""

    def stop(event):
        if event.stage.startswith(stage):
            raise Stop

    with pytest.raises(Stop):
        score(folder, progress=stop)


class TestKeys:
    def test_every_option_of_score_is_a_key_or_an_option_of_run(self):
        score_options = {one.opts[0] for one in main.commands["score"].params if one.opts[0].startswith("--")}
        keys = {
            f"--{key}"
            for table in ("kernel", "scores", "table", "cluster")
            for key in jobfile.tables(main.commands)[table]
        }
        run_options = {one.opts[0] for one in main.commands["run"].params}
        assert score_options - keys == {"--wait", "--keep", "--overwrite", "--json", "--quiet", "--debug"}
        assert score_options - keys <= run_options

    def test_schema_tells_every_key_with_its_help(self):
        text = invoke("run", "--schema").stdout
        for table, keys in jobfile.tables(main.commands).items():
            assert (f"\n[{table}]\n" if table else "above all tables") in text
            for key, option in keys.items():
                assert f"\n  {key} " in text
                assert " ".join(option.help.split()) in " ".join(text.split())
        assert "attempts  an integer; 3 by default." in text
        assert "a number, or a list of them; required." in text

    @pytest.mark.usefixtures("in_process")
    def test_example_works_as_it_is_and_has_every_key(self, folder):
        text = invoke("run", "--example").stdout
        result = run(folder, "--json", text=text)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["parameters"]["n_landmarks"] == 300
        for key in (key for keys in jobfile.tables(main.commands).values() for key in keys):
            assert f"\n{key} = " in text or f"\n# {key} =" in text

    def test_values_mean_what_the_options_mean(self, folder):
        text = """
            input = "points.zarr"
            output = "s3://bucket/scores.zarr"
            [kernel]
            kernel = "matern"
            length-scale = [1, 2.5, 3]
            nu = 1.5
            [scores]
            ridge = [1e-2, 1]
            sampling = "leverage"
            landmarks = 30
            replacement = false
            certify = false
            [cluster]
            workers = 2
            memory-limit = "1GiB"
            [update]
            refresh = "never"
            [retries]
            attempts = 5
        """
        (folder / "job.toml").write_text(text)
        job = jobfile.read(folder / "job.toml", main.commands)
        assert (job.points, job.output) == (str(folder / "points.zarr"), "s3://bucket/scores.zarr")
        assert job.kernel == kernels.Matern((1.0, 2.5, 3.0), 1.5)
        assert job.arguments == {"ridge": [0.01, 1.0], "sampling": Leverage(replacement=False), "landmarks": 30}
        assert (job.cluster["workers"], job.cluster["memory_limit"], job.cluster["require_tls"]) == (2, "1GiB", False)
        assert job.update == {"refresh": "never", "allow_functions": ()}
        assert job.retries == {"attempts": 5, "wait": 30.0}

    def test_paths_start_from_the_folder_of_the_file(self, folder, monkeypatch):
        np.save(folder / "rows.npy", np.arange(20))
        (folder / "kernel.json").write_text('{"kernel": "linear"}')
        text = JOB.replace("landmarks = 40", 'sampling = "rows.npy"')
        text = text.replace('kernel = "gaussian"\nlength-scale = 2', 'kernel-spec = "kernel.json"')
        (folder / "job.toml").write_text(text)
        job = jobfile.read(folder / "job.toml", main.commands)
        assert job.kernel == kernels.Linear()
        np.testing.assert_array_equal(job.arguments["sampling"], np.arange(20))
        monkeypatch.chdir(folder)
        assert jobfile.read(Path("job.toml"), main.commands).points == "points.zarr"

    @pytest.mark.parametrize("spec", ["""'{"kernel": "linear"}'""", '{kernel = "linear"}'])
    def test_kernels_may_be_specified_in_place(self, folder, spec):
        text = JOB.replace('kernel = "gaussian"\nlength-scale = 2', f"kernel-spec = {spec}")
        (folder / "job.toml").write_text(text)
        assert jobfile.read(folder / "job.toml", main.commands).kernel == kernels.Linear()


@pytest.mark.usefixtures("no_cluster")
class TestMistakes:
    @pytest.mark.parametrize("options", [[], ["--check"]])
    def test_all_are_told_at_once(self, folder, options):
        text = """
            inptu = "points.zarr"
            ridge = 1
            cluster = "here"
            [kernel]
            kernel = "gauss"
            length_scale = 1
            input = "points.zarr"
            [scores]
            landmarks = 30.5
            certify = "yes"
            seed = true
            tolerance = 1979-05-27
            max-landmarks = [1]
            overwrite = true
            ridge = []
            [retry]
            attempts = 1
            [retries]
            attempts = 0
            wait = "long"
        """
        result = run(folder, *options, text=text)
        assert (result.exit_code, result.stdout) == (2, "")
        first, *lines = result.stderr.splitlines()
        assert first == f"daskrr: the job file {folder / 'job.toml'} has {len(lines)} mistakes"
        assert [line.strip() for line in lines] == [
            "inptu: there is no such key; did you mean input?",
            "ridge: belongs below [scores]",
            "[retry]: there is no such table; did you mean retries?",
            "input: is missing. Path or URL of a Zarr array, or a table.",
            "output: is missing. Path or URL of the scores.",
            "[kernel] kernel: 'gauss' is not one of 'linear', 'gaussian', 'laplacian', 'matern', 'polynomial', "
            "'cosine', 'bernoulli'.",
            "[kernel] length_scale: there is no such key; did you mean length-scale?",
            "[kernel] input: belongs above all tables",
            "[scores] landmarks: must be an integer, not a number",
            "[scores] certify: must be true or false, not a string",
            "[scores] seed: must be an integer, not true or false",
            "[scores] tolerance: must be a number, not a date or time",
            "[scores] max-landmarks: must be an integer, not a list",
            "[scores] overwrite: is no key: give --overwrite to daskrr run",
            "[scores] ridge: needs at least one value",
            "cluster: is a table, not a string: write [cluster], and its keys below",
            "[retries] attempts: 0 is not in the range x>=1.",
            "[retries] wait: must be a number, not a string",
        ]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (("length-scale = 2", ""), "[kernel]: the gaussian kernel needs --length-scale: a number, or median"),
            (("length-scale = 2", 'length-scale = "wide"'), "[kernel] length-scale: must be a number, numbers"),
            (("ridge = 1e-3", ""), "[scores] ridge: is missing. Ridge; it is added"),
            (("ridge = 1e-3", "ridge = -1"), "has a mistake\n  ridge must be positive"),
            (("landmarks = 40", 'sampling = "uniform"'), "[scores]: only residual sampling finds the number"),
            (("landmarks = 40", "landmarks = 40\nsketch-ridge = 0.1"), "[scores]: sketch_ridge weighs each landmark"),
            (("landmarks = 40", 'sampling = "nowhere"'), "[scores]: --sampling is residual, leverage"),
            (("seed = 0", 'dtype = "float16"'), "[scores] dtype: 'float16' is not one of"),
            (("seed = 0", "colour = 7"), "[scores] colour: there is no such key; there are ridge, landmarks,"),
            (("seed = 0", "[cluster]\nworkers = 0"), "[cluster] workers: 0 is not in the range"),
            (("seed = 0", '[cluster]\nmemory-limit = "plenty"'), "[cluster]: 'plenty' is not an amount of memory"),
            (("seed = 0", '[cluster]\ncluster = "tls://x:1"'), "[cluster]: tls://x:1 asks every client"),
            (("seed = 0", '[cluster]\ntls-key = "key.pem"'), "[cluster]: certificates are for a scheduler"),
            (("seed = 0", '[cluster]\ncluster = "slrm"'), "[cluster] cluster: 'slrm' is neither local, slurm, "),
            (
                ("seed = 0", "[cluster]\nslurm = 3"),
                "[cluster] slurm: is a table, not an integer: write [cluster.slurm]",
            ),
            (("seed = 0", "[cluster.local]\nqueue = 3"), "[cluster]: a local cluster has the settings workers and"),
            (("seed = 0", "[scores.more]\na = 1"), "[scores.more]: there is no such key"),
            (("seed = 0", "[scores]"), "is not TOML"),
            (("seed = 0", "seed = "), "is not TOML: Invalid value (at line 13"),
            (("points.zarr", "job.toml"), "input: "),
            (("points.zarr", "nowhere.zarr"), "no readable Zarr array at"),
        ],
    )
    def test_each_is_named(self, folder, change, message):
        result = run(folder, "--check", text=JOB.replace(*change))
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
        assert "Traceback" not in result.stderr

    def test_a_file_that_is_not_there_or_no_text(self, tmp_path):
        result = invoke("run", tmp_path / "none.toml")
        assert result.exit_code == 2
        assert f"cannot read the job file {tmp_path / 'none.toml'}: No such file" in result.stderr
        (tmp_path / "job.toml").write_bytes(b"\xff\xfe")
        assert "is not TOML" in run(tmp_path).stderr

    @pytest.mark.parametrize(
        "line",
        [
            'aws-secret-access-key = "hunter2"',
            'password = "hunter2"',
            '[cluster]\nauth_token = "hunter2"',
            '[cluster.gateway.auth]\npassword = "hunter2"',
            '[cluster.slurm]\njob-script-prologue = ["curl https://me:hunter2@host/"]',
            '[storage]\napi-key = "hunter2"',
            '[credentials]\nname = "hunter2"',
        ],
    )
    def test_secrets_are_refused_and_not_repeated(self, folder, line):
        result = run(folder, text=line + "\n" + JOB if "[" not in line else JOB + line)
        assert result.exit_code == 2
        assert "a job file holds no secrets" in result.stderr
        assert "hunter2" not in result.stderr

    @pytest.mark.parametrize("url", ["s3://me:hunter2@bucket/points.zarr", "https://host/points.zarr?sig=hunter2"])
    def test_secrets_in_urls_are_refused_and_not_repeated(self, folder, url):
        result = run(folder, text=JOB.replace("points.zarr", url))
        assert result.exit_code == 2
        assert "input: has a user name, a password or a query in its URL" in result.stderr
        assert "hunter2" not in result.stderr


class TestNights:
    @pytest.mark.usefixtures("in_process")
    def test_the_first_scores_and_the_second_does_nothing(self, folder, monkeypatch):
        before = run(folder, "--check", "--json")
        assert json.loads(before.stdout)["action"] == "score"
        assert not (folder / "scores.zarr").exists()
        first = run(folder)
        assert first.exit_code == 0, first.stderr
        assert "highest rows by estimate" in first.stdout
        assert f"{folder / 'job.toml'}: score, since there are no scores yet" in first.stderr
        score(folder, "reference.zarr")
        assert contents(folder / "scores.zarr") == contents(folder / "reference.zarr")
        monkeypatch.setattr(clusters, "connect", lambda **_options: pytest.fail("a cluster was started"))
        second = run(folder, "--quiet")
        line = f"nothing to do: {folder / 'scores.zarr'} holds the scores of all 500 rows, which are unchanged\n"
        assert (second.exit_code, second.stdout, second.stderr) == (0, line, "")
        assert "would   nothing: input and job are those" in run(folder, "--check").stdout
        assert json.loads(run(folder, "--json").stdout)["action"] == "nothing"

    def test_check_tells_what_it_would_cost(self, folder):
        text = run(folder, "--check").stdout
        for part in ("would   score: there are no scores yet", "500 rows × 3 features", "memory limit"):
            assert part in text
        same = [
            "--kernel",
            "gaussian",
            "--length-scale",
            2,
            "--ridge",
            1e-3,
            "--landmarks",
            40,
            "--certify",
            "--seed",
            0,
        ]
        plans = [
            json.loads(run(folder, "--check", "--json").stdout)["plan"],
            json.loads(invoke("plan", folder / "points.zarr", *same, "--json").stdout),
        ]
        for plan in plans:
            del plan["seconds_at_matmul_speed"]  # measured anew
        assert plans[0] == plans[1]

    @pytest.mark.usefixtures("in_process")
    def test_a_stopped_job_goes_on(self, folder):
        stopped(folder, "pass 2")
        assert "would   resume: " in run(folder, "--check").stdout
        result = run(folder, "--json")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["action"] == "resume"
        assert "resume, since a job was stopped" in result.stderr
        score(folder, "reference.zarr")
        assert contents(folder / "scores.zarr") == contents(folder / "reference.zarr")

    @pytest.mark.usefixtures("in_process")
    def test_another_job_is_not_replaced_unless_asked(self, folder):
        assert run(folder, "--quiet").exit_code == 0
        other = JOB.replace("seed = 0", "seed = 1")
        assert run(folder, "--check", text=other).exit_code == 4
        refused = run(folder)
        assert refused.exit_code == 4
        assert "--overwrite" in refused.stderr
        assert json.loads(run(folder, "--overwrite", "--check", "--json").stdout)["action"] == "score"
        result = run(folder, "--overwrite", "--json")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["parameters"]["random_state"] == 1
        assert json.loads(run(folder, "--json").stdout)["action"] == "nothing"

    @pytest.mark.usefixtures("in_process")
    def test_a_job_that_is_at_work_is_left_alone(self, folder):
        told = []

        def ask(event):
            if not told and event.stage.startswith("pass 1"):
                told.extend([run(folder, "--check"), run(folder)])

        score(folder, progress=ask)
        assert [result.exit_code for result in told] == [0, 5]
        assert "the output is held by process" in told[0].stdout
        assert "--wait waits for it" in told[0].stdout


@pytest.mark.usefixtures("in_process")
class TestUpdate:
    def test_a_night_with_new_rows_updates(self, folder):
        score(folder)
        append_points(folder / "points.zarr", 100)
        (folder / "job.toml").write_text(JOB + '[update]\nrefresh = "always"\n')
        before = contents(folder / "scores.zarr")
        assert "would   update: the input has more rows" in run(folder, "--check").stdout
        assert contents(folder / "scores.zarr") == before
        result = run(folder, "--json", "--quiet")
        assert result.exit_code == 0, result.stderr
        summary = json.loads(result.stdout)
        assert (summary["action"], summary["update"]["reason"]) == ("update", "asked for")
        score(folder, "reference.zarr")
        assert contents(folder / "scores.zarr") == contents(folder / "reference.zarr")

    def test_command_tells_the_drift(self, folder):
        score(folder, block_rows=100)
        append_points(folder / "points.zarr", 100)
        result = invoke("update", folder / "points.zarr", folder / "scores.zarr", "--refresh", "never", "--quiet")
        assert result.exit_code == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[:2] == [
            "rows                 500 and 100 new ones, 100 summed",
            "landmarks            kept: the landmarks cover the new rows",
        ]
        assert [line.split()[0] for line in lines[-7:]] == ["scores", "5%", "25%", "50%", "75%", "95%", "99%"]
        assert "in the new rows" in result.stdout
        append_points(folder / "points.zarr", 7, seed=2)
        result = invoke("update", folder / "points.zarr", folder / "scores.zarr", "--refresh", "always", "--quiet")
        assert "landmarks            drawn anew: asked for" in result.stdout

    def test_command_tells_that_there_was_nothing_to_do(self, folder, no_cluster):
        score(folder)
        result = invoke("update", folder / "points.zarr", folder / "scores.zarr", "--quiet")
        assert result.stdout.startswith("nothing to do: ")

    def test_command_needs_scores_and_rows_that_continue_theirs(self, folder, no_cluster):
        result = invoke("update", folder / "points.zarr", folder / "scores.zarr")
        assert result.exit_code == 2
        assert "no finished scores to update" in result.stderr
        score(folder)
        zarr.open_array(folder / "points.zarr", mode="r+").resize((400, 3))
        result = invoke("update", folder / "points.zarr", folder / "scores.zarr")
        assert result.exit_code == 1
        assert "has only 400" in result.stderr

    def test_nights_with_and_without_new_rows(self, folder):
        actions = []
        for new in (0, 0, 60, 0):
            if new:
                append_points(folder / "points.zarr", new)
            result = run(folder, "--json")
            assert result.exit_code == 0, result.stderr
            actions.append(json.loads(result.stdout)["action"])
        assert actions == ["score", "nothing", "update", "nothing"]
        assert zarr.open_array(folder / "scores.zarr" / "scores", mode="r").shape == (560,)

    def test_nights_with_new_rows_before_the_first_scores_were_whole(self, folder):
        stopped(folder, "pass 2")
        append_points(folder / "points.zarr", 50)
        result = run(folder, "--json")
        assert result.exit_code == 0, result.stderr
        assert (json.loads(result.stdout)["action"], json.loads(result.stdout)["n_rows"]) == ("score", 550)


class TestRetries:
    @pytest.fixture
    def waited(self, monkeypatch):
        waits = []
        monkeypatch.setattr(runs.time, "sleep", waits.append)
        return waits

    @pytest.mark.parametrize(
        "error",
        [
            errors.SourceUnreachable("x"),
            errors.StoreFailed("x"),
            KilledWorker("task", SimpleNamespace(address="tcp://127.0.0.1:1"), 3),
            CommClosedError("x"),
            CancelledError("x"),
            TimeoutError("x"),
        ],
    )
    def test_what_may_pass_is_tried_again_after_longer_and_longer_waits(self, waited, error, caplog):
        failures = [error] * 3

        def work():
            if failures:
                raise failures.pop()
            return "done"

        assert runs.persistently(work, attempts=4, wait=30) == "done"
        assert waited == [30, 60, 120]
        assert "attempt 3 of 4 failed, the next begins in 2 min 00 s" in caplog.text

    @pytest.mark.parametrize("attempts", [1, 2])
    def test_what_does_not_pass_fails_with_its_own_error(self, waited, attempts):
        def work():
            raise errors.SourceUnreachable("x")

        with pytest.raises(errors.SourceUnreachable):
            runs.persistently(work, attempts, wait=1)
        assert waited == [1] * (attempts - 1)

    @pytest.mark.parametrize(
        "error",
        [
            errors.InvalidData("x"),
            errors.LeaseHeld("x"),
            errors.DoesNotFit("x"),
            errors.OutputExists("x"),
            errors.RidgeTooSmall("x"),
            errors.CheckFailed("x"),
            ZeroDivisionError("x"),
            KeyboardInterrupt(),
        ],
    )
    def test_what_cannot_pass_ends_at_once(self, waited, error):
        def work():
            raise error

        with pytest.raises(type(error)):
            runs.persistently(work, attempts=3, wait=1)
        assert waited == []


@contextlib.contextmanager
def hanging_up():
    """Address of a service that closes every connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        # A thread that waits in accept() would keep the socket open.
        server.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def process(*words):
    """A process whose standard error is read; it ends with the test."""
    started = subprocess.Popen(
        [sys.executable, "-m", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT,
    )  # fmt: skip
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


@pytest.mark.slow
def test_run__ends_quickly_when_it_is_told_to_while_it_waits(folder):
    with hanging_up() as address, contextlib.ExitStack() as stack:
        (folder / "job.toml").write_text(JOB + f'[cluster]\ncluster = "{address}"\n[retries]\nwait = 3600\n')
        line = ("daskrr.apps.cli", "run", folder / "job.toml")
        jobs = [stack.enter_context(process(*line)) for _ in range(2)]
        for job, number, code, word in zip(
            jobs, (signal.SIGTERM, signal.SIGINT), (143, 130), ("terminated", "interrupted"), strict=True
        ):
            assert any("attempt 1 of 3 failed, the next begins in" in text for text in job.stderr)
            began = time.monotonic()
            job.send_signal(number)
            _, rest = job.communicate(timeout=GENEROUS)
            assert time.monotonic() - began < 10
            assert job.returncode == code
            assert rest == f"daskrr: {word}\n"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def cluster(folder, port):
    """A scheduler and a worker as processes of their own; gives the scheduler."""
    local = ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
    scheduler = ["dask", "scheduler", "--port", str(port), *local]
    worker = ["dask", "worker", f"tcp://127.0.0.1:{port}", "--nthreads", "1", "--no-nanny", *local]
    log = (folder / "cluster.log").open("ab")
    with log, contextlib.ExitStack() as stack:
        started = []
        for command in (scheduler, worker):
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", *command], stdout=log, stderr=log, cwd=folder, env=ENVIRONMENT
                )
            )  # fmt: skip
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        yield started[0]


@pytest.mark.slow
def test_run__goes_on_by_itself_when_a_killed_scheduler_is_back(tmp_path):
    write_points(tmp_path / "points.zarr", 20_000)
    port = free_port()
    text = JOB.replace("certify = true", "certify = true\nblock-rows = 500")
    text += f'[cluster]\ncluster = "tcp://127.0.0.1:{port}"\n[retries]\nattempts = 20\nwait = 0.5\n'
    (tmp_path / "job.toml").write_text(text)
    lines = []
    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(cluster(tmp_path, port))
        job = stack.enter_context(process("daskrr.apps.cli", "run", tmp_path / "job.toml", "--json"))
        for line in job.stderr:
            lines.append(line)
            if line.startswith("pass 1") and scheduler.poll() is None:
                scheduler.kill()
                scheduler.wait()
                stack.enter_context(cluster(tmp_path, port))
        assert job.wait(GENEROUS) == 0, "".join(lines)
        summary = json.loads(job.stdout.read())
    assert scheduler.returncode == -signal.SIGKILL
    assert any(line.startswith("attempt 1 of 20 failed") for line in lines)
    assert summary["action"] == "resume"
    score(tmp_path, "reference.zarr", block_rows=500)
    assert contents(tmp_path / "scores.zarr") == contents(tmp_path / "reference.zarr")


def test_read__a_cluster_on_the_line_takes_the_place_of_that_in_the_file(folder):
    text = JOB + '[cluster]\nworkers = 2\nmemory-limit = "1GiB"\n[cluster.local]\nworkers = 5\n'
    (folder / "job.toml").write_text(text)
    options = dict.fromkeys(GROUPS["cluster"])
    for line, expected in [
        ({}, {"workers": 2, "memory_limit": "1GiB", "settings": {"workers": 5}}),
        ({"workers": 3}, {"workers": 3, "memory_limit": "1GiB", "settings": {"workers": 5}}),
        ({"cluster": "tcp://127.0.0.1:1"}, {"workers": None, "memory_limit": None, "settings": None}),
    ]:
        found = jobfile.read(folder / "job.toml", main.commands, options | line).cluster
        assert found.items() >= expected.items()
        assert found["cluster"] == line.get("cluster")


def test_example__is_toml():
    assert tomllib.loads(jobfile.example(main.commands))["scores"]["ridge"] == 1e-3
